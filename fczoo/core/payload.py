"""What a client uploads: the grammar of payloads, in one page.

A payload has a sender, the number of images behind it, and named tensors. Each tensor belongs to what
clients train (``Training.optims``) or to a group that the method declares once, in ``Training.uploads``::

    uploads={
        "gauss.": rows("count", "mean", "var"),  # gauss.label [g], gauss.count [g], gauss.mean [g, D], ...
        "class.": per_class("count", "sum"),  # class.count [c], class.sum [c, D], c classes of the task
        "kept.": per_seen_class("count", "sum"),  # the same for all classes seen so far
        "usage": whole("counts"),  # one tensor, of the same shape from every client
        "image_gradient.": samples("gradients of single images"),  # one row an image; may be left out
    }

Guard, privacy, outlier removal, attacks, aggregators and byte counts read this declaration and nothing
else. A tensor that is not declared is refused, so that no statistics travel without protection.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fczoo.core.tree import Tree, drop, select

Content = Literal[
    "parameters", "counts", "class means", "class variances", "second moments", "gradients of single images"
]
"""What a tensor tells a server about the data behind it."""

STATISTICS: dict[str, Content] = {
    "label": "counts",  # which class a row is about
    "count": "counts",  # its images n
    "mean": "class means",
    "sum": "class means",  # n times the mean
    "var": "class variances",
    "squares": "class variances",  # sum of squares, a dimension
    "cov": "class variances",
    "products": "second moments",  # sum of outer products
}
"""The words of which groups of class statistics are made, and what each tells."""

ROW_DIMENSIONS = {"label": 0, "count": 0, "cov": 2, "products": 2}
"""Dimensions of one class's statistic: a number, a matrix [D, D] or, where it is not named, a vector [D]."""

HEADER_BYTES = 16  # sender and number of images, two 64-bit integers


@dataclass(frozen=True)
class Group:
    """A declared part of an upload; made by ``whole``, ``per_class``, ``per_seen_class``,
    ``rows`` and ``samples``.
    """

    layout: Literal["whole", "classes", "seen classes", "rows", "samples"]
    content: Content | None = None  # of every tensor; None: by the name of the statistic
    statistics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = set(self.statistics) - STATISTICS.keys()
        if unknown:
            raise TypeError(f"{min(unknown)!r} is no statistic of a class; take {', '.join(STATISTICS)}")

    def tells(self, name: str) -> Content | None:
        """What the tensor called ``name`` within the group tells; None where the group has no such tensor."""
        if self.content is not None:
            return self.content
        return STATISTICS[name] if name in self.statistics else None


def whole(content: Content) -> Group:
    """Tensors of one shape from every client, merged as a whole; the key is a name, or a prefix and a dot."""
    return Group("whole", content)


def per_class(*statistics: str) -> Group:
    """One row a class of the current task; a count of 0 says that the client does not have the class."""
    return Group("classes", None, statistics)


def per_seen_class(*statistics: str) -> Group:
    """As ``per_class``, with one row a class seen so far: for clients that hold images of earlier tasks."""
    return Group("seen classes", None, statistics)


def rows(*statistics: str) -> Group:
    """One row a class that the client holds; ``label`` [g] says which, each class at most once."""
    return Group("rows", None, ("label", *statistics))


def samples(content: Content) -> Group:
    """One row a single image; a client may send none."""
    return Group("samples", content)


Uploads = Mapping[str, Group]
"""Prefix (or whole name) -> group."""


@dataclass(frozen=True, eq=False)
class Payload(Mapping[str, Tensor]):
    """One client's upload; reads like the dictionary of its tensors. Without tensors: nothing came."""

    tensors: Tree
    client: int = 0
    num_samples: int = 1  # n_k, the client's own images of the task, exemplars not counted, or those surveyed

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def holding(self, tensors: Tree) -> "Payload":
        """Other tensors from the same sender."""
        return Payload(tensors, self.client, self.num_samples)

    def only(self, *prefixes: str) -> "Payload":
        """The part whose names start with one of the prefixes."""
        return self.holding(select(self.tensors, *prefixes))

    def drop(self, *prefixes: str) -> "Payload":
        """The part whose names start with none of the prefixes."""
        return self.holding(drop(self.tensors, *prefixes))


def group_of(name: str, uploads: Uploads) -> tuple[str, Group] | None:
    """The declared prefix and group to which a tensor belongs; None where it is not declared."""
    for prefix, group in uploads.items():
        if name == prefix or (prefix.endswith(".") and name.startswith(prefix)):
            return (prefix, group) if group.tells(name.removeprefix(prefix)) else None
    return None


def content_of(name: str, trained: Sequence[str], uploads: Uploads) -> Content | None:
    """What a tensor of a payload tells: ``trained`` prefixes are parameters. None: nobody has declared it."""
    found = group_of(name, uploads)
    if found:
        return found[1].tells(name.removeprefix(found[0]))
    return "parameters" if name.startswith(tuple(trained)) else None


def contents(uploads: Uploads) -> set[Content]:
    """All that declared groups may tell."""
    found = {STATISTICS[name] for group in uploads.values() for name in group.statistics}
    return found | {group.content for group in uploads.values() if group.content}


def keep_classes(payload: Payload, prefix: str, group: Group, keep: Tensor) -> Payload:
    """The upload with only some of a group's classes; ``keep`` [g] or [c] is true where a class stays.

    Of ``rows`` the others are cut out. Of ``per_class`` and ``per_seen_class`` they become 0, whose count of
    0 says that the client does not have the class.
    """
    changed = {}
    for name, value in select(payload.tensors, prefix).items():
        mask = keep.to(value.device)
        if group.layout == "rows":
            changed[name] = value[mask]
        else:
            mask = mask.view(-1, *[1] * (value.dim() - 1))
            changed[name] = torch.where(mask, value, torch.zeros_like(value))
    return payload.holding({**payload.tensors, **changed})
