"""Uploads of clients: the declaration of their tensors.

A payload has a sender, its number of images, and named tensors. Each tensor is a trained tensor
(``Training.optims``) or belongs to a group that the method declares once, in
``Training.uploads``::

    uploads={
        # gauss.label [g], gauss.count [g], gauss.mean [g, D], ...
        "gauss.": rows("count", "mean", "var"),
        # class.count [c], class.sum [c, D], c classes of the task
        "class.": per_class("count", "sum"),
        # the same for all classes seen so far
        "kept.": per_seen_class("count", "sum"),
        # one tensor, of the same shape from every client
        "usage": whole_tensors("counts"),
        # one row per image; may be left out
        "image_gradient.": samples("gradients of single images"),
    }

Upload validation, privacy, outlier removal, attacks, aggregators and byte counts read only this
declaration. The server rejects undeclared tensors, so that no statistics bypass the protection.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fczoo.core.tree import Tree, drop, select

Content = Literal[
    "parameters",
    "counts",
    "class means",
    "class variances",
    "second moments",
    "gradients of single images",
    "losses",
]
"""Content that a tensor discloses about the data behind it."""

STATISTICS: dict[str, Content] = {
    "label": "counts",  # which class a row is about
    "count": "counts",  # its images n
    "mean": "class means",
    "sum": "class means",  # n times the mean
    "var": "class variances",
    "squares": "class variances",  # sum of squares per dimension
    "cov": "class variances",
    "products": "second moments",  # sum of outer products
}
"""The words from which groups of class statistics are made, and their contents."""

ROW_DIMENSIONS = {"label": 0, "count": 0, "cov": 2, "products": 2}
"""Dimensions of one class's statistic: a number, a matrix [D, D] or, where it is not named, a
vector [D].
"""

HEADER_BYTES = 16  # sender and number of images, two 64-bit integers


@dataclass(frozen=True)
class Group:
    """A declared part of an upload.

    ``whole_tensors``, ``per_class``, ``per_seen_class``, ``rows`` and ``samples`` create it.
    """

    layout: Literal["whole", "classes", "seen classes", "rows", "samples"]
    content: Content | None = None  # of every tensor; None: by the name of the statistic
    statistics: tuple[str, ...] = ()
    symmetric: bool = False  # matrices, of which the lower triangle is sent
    rank: int = 0  # of factors that are sent in place of triangles; 0: none
    of_images: bool = False  # counts of a client's images, each at most once per epoch
    projected: bool = False  # statistics of other features than the backbone's

    def __post_init__(self) -> None:
        unknown = set(self.statistics) - STATISTICS.keys()
        if unknown:
            raise TypeError(
                f"{min(unknown)!r} is not a statistic of a class; take {', '.join(STATISTICS)}"
            )

    def content_of(self, name: str) -> Content | None:
        """Return the disclosed content of a tensor in the group.

        Args:
            name: Name of the tensor without the group's prefix.

        Returns:
            The content; None if the group does not have such a tensor.
        """
        if self.content is not None:
            return self.content
        return STATISTICS[name] if name in self.statistics else None


def whole_tensors(
    content: Content, symmetric: bool = False, of_images: bool = False, rank: int = 0
) -> Group:
    """Declare tensors of one shape from every client, merged as a whole.

    The key is a name, or a prefix and a dot.

    Args:
        content: Content that the tensors disclose.
        symmetric: The tensors are symmetric matrices [M, M]. At a task boundary clients send their
            lower triangles, half of the bytes, and ``update_from`` gets the matrices.
        of_images: Each number counts images of the client, at most once per epoch; the server
            rejects more.
        rank: Symmetric matrices are Gram matrices, and clients send a factor [rank, M] of the best
            approximation of this rank; 0: exact triangles.
    """
    return Group("whole", content, symmetric=symmetric, of_images=of_images, rank=rank)


def per_class(*statistics: str, projected: bool = False) -> Group:
    """Declare one row per class of the current task.

    Count 0 means that the client lacks the class.

    Args:
        *statistics: Keys of ``STATISTICS``.
        projected: The features are projected or scaled after the backbone, so that their norm may
            exceed ``Backbone.largest_norm``.
    """
    return Group("classes", None, statistics, projected=projected)


def per_seen_class(*statistics: str, projected: bool = False) -> Group:
    """Declare one row per class seen so far, for clients with images of earlier tasks.

    Args:
        *statistics: Keys of ``STATISTICS``.
        projected: As in ``per_class``.
    """
    return Group("seen classes", None, statistics, projected=projected)


def rows(*statistics: str, projected: bool = False) -> Group:
    """Declare one row per class that the client holds; ``label`` [g] names each class once.

    Args:
        *statistics: Keys of ``STATISTICS``; ``label`` is added.
        projected: As in ``per_class``.
    """
    return Group("rows", None, ("label", *statistics), projected=projected)


def samples(content: Content) -> Group:
    """Declare one row per image; a client may send none.

    Args:
        content: Content that the tensors disclose.
    """
    return Group("samples", content)


Uploads = Mapping[str, Group]
"""Prefix (or whole name) -> group."""


@dataclass(frozen=True, eq=False)
class Payload(Mapping[str, Tensor]):
    """One client's upload; reads like the dictionary of its tensors.

    A payload without tensors means that no upload arrived.
    """

    tensors: Tree
    client: int = 0
    # n_k: number of the client's images of the task without exemplars, or of collected images
    num_samples: int = 1

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def holding(self, tensors: Tree) -> "Payload":
        """Return a payload of the same sender with other tensors.

        Args:
            tensors: Tensors by name.
        """
        return Payload(tensors, self.client, self.num_samples)

    def only(self, *prefixes: str) -> "Payload":
        """Return the tensors whose names start with one of the prefixes.

        Args:
            *prefixes: Starts of names.
        """
        return self.holding(select(self.tensors, *prefixes))

    def drop(self, *prefixes: str) -> "Payload":
        """Return the tensors whose names start with none of the prefixes.

        Args:
            *prefixes: Starts of names.
        """
        return self.holding(drop(self.tensors, *prefixes))


def group_of(name: str, uploads: Uploads) -> tuple[str, Group] | None:
    """Return the declared prefix and group of a tensor.

    Args:
        name: Name of the tensor in the payload.
        uploads: Groups that the method declares.

    Returns:
        Prefix and group; None if the tensor is not declared.
    """
    for prefix, group in uploads.items():
        if name == prefix or (prefix.endswith(".") and name.startswith(prefix)):
            return (prefix, group) if group.content_of(name.removeprefix(prefix)) else None
    return None


def pack_symmetric(tree: Tree, uploads: Uploads) -> Tree:
    """Replace symmetric matrices [M, M] by their lower triangles [M (M + 1) / 2], row by row.

    With rank r a matrix becomes the factor [min(r, M), M]: the eigenvectors of the largest
    eigenvalues, each times the square root of its eigenvalue.

    Args:
        tree: Sums of a client.
        uploads: Groups that the method declares.
    """
    tensors = dict(tree)
    for name in _symmetric_names(tree, uploads):
        if rank := _rank(name, uploads):
            values, vectors = torch.linalg.eigh(tree[name])  # ascending
            tensors[name] = (vectors * values.clamp(min=0).sqrt()).mT[-rank:].contiguous()
            continue
        i, j = torch.tril_indices(*tree[name].shape, device=tree[name].device)
        tensors[name] = tree[name][i, j]
    return tensors


def unpack_factors(upload: Payload, uploads: Uploads, form: Payload) -> Payload:
    """Replace the factors F of ``pack_symmetric`` by the lower triangles of F^T F.

    Args:
        upload: Upload of a client; a factor of another shape stays, so that validation rejects it.
        uploads: Groups that the method declares.
        form: An upload with the expected shapes.
    """
    triangles = dict(upload)
    for name in _symmetric_names(upload, uploads):
        factor, template = upload[name], form.get(name)
        if _rank(name, uploads) and template is not None and factor.shape == template.shape:
            i, j = torch.tril_indices(factor.shape[1], factor.shape[1], device=factor.device)
            triangles[name] = (factor.mT @ factor)[i, j]
    return upload.holding(triangles)


def unpack_symmetric(tree: Tree, uploads: Uploads) -> Tree:
    """Replace the triangles of ``pack_symmetric`` by the matrices.

    Args:
        tree: Sums [M (M + 1) / 2] over clients, or stacked [K, M (M + 1) / 2].
        uploads: Groups that the method declares.
    """
    matrices = dict(tree)
    for name in _symmetric_names(tree, uploads):
        triangle = tree[name]
        size = (math.isqrt(8 * triangle.shape[-1] + 1) - 1) // 2
        i, j = torch.tril_indices(size, size, device=triangle.device)
        matrices[name] = triangle.new_empty(*triangle.shape[:-1], size, size)
        matrices[name][..., i, j] = triangle
        matrices[name][..., j, i] = triangle
    return matrices


def _rank(name: str, uploads: Uploads) -> int:
    group = group_of(name, uploads)
    return group[1].rank if group else 0


def _symmetric_names(tree: Mapping[str, Tensor], uploads: Uploads) -> list[str]:
    declarations = {name: group_of(name, uploads) for name in tree}
    return [name for name, group in declarations.items() if group and group[1].symmetric]


def content_of(name: str, trained: Sequence[str], uploads: Uploads) -> Content | None:
    """Return the disclosed content of a payload's tensor.

    Args:
        name: Name of the tensor in the payload.
        trained: Prefixes of trained tensors, whose content is parameters.
        uploads: Groups that the method declares.

    Returns:
        The content; None if the tensor is not declared.
    """
    declaration = group_of(name, uploads)
    if declaration:
        return declaration[1].content_of(name.removeprefix(declaration[0]))
    return "parameters" if name.startswith(tuple(trained)) else None


def contents(uploads: Uploads) -> set[Content]:
    """Return all contents that declared groups may disclose.

    Args:
        uploads: Groups that the method declares.
    """
    statistic_contents = {
        STATISTICS[name] for group in uploads.values() for name in group.statistics
    }
    return statistic_contents | {group.content for group in uploads.values() if group.content}


def keep_classes(payload: Payload, prefix: str, group: Group, keep: Tensor) -> Payload:
    """Return the upload with only some of a group's classes.

    In groups of ``rows`` the other rows are removed. In groups of ``per_class`` and
    ``per_seen_class`` they become 0; a count of 0 means that the client lacks the class.

    Args:
        payload: Upload of a client.
        prefix: Prefix of the group.
        group: Declaration of the group.
        keep: Mask [g] or [c], true for the classes to keep.
    """
    new_tensors = {}
    for name, value in select(payload.tensors, prefix).items():
        mask = keep.to(value.device)
        if group.layout == "rows":
            new_tensors[name] = value[mask]
        else:
            mask = mask.view(-1, *[1] * (value.dim() - 1))
            new_tensors[name] = torch.where(mask, value, torch.zeros_like(value))
    return payload.holding({**payload.tensors, **new_tensors})
