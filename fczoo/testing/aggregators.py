"""The check of an aggregator."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.payload import Payload
from fczoo.core.registry import AGGREGATORS, make_aggregator
from fczoo.core.tree import Tree
from fczoo.core.types import ServerAggregator
from fczoo.federation.aggregator_check import repeats
from fczoo.testing.runs import Draw, check_random_cases, need, need_documented, need_one_line

Extra = Callable[[torch.Generator], Tree]
"""What uploads hold in addition to parameters, drawn for one client."""

PARAMETERS = ("head", "prompt", "half")


def random_uploads(count: int, seed: int, extra: Extra = lambda rng: {}) -> list[Payload]:
    """Draw uploads of clients 0, 1, ... with 1 to 199 images each.

    Args:
        count: Number of uploads.
        seed: Seed of the draw.
        extra: Draws tensors that an upload holds in addition to parameters.

    Returns:
        Uploads with ``head`` [4, 3] and ``prompt`` [5] in float64, ``half`` [2] in bfloat16, and
        the tensors of ``extra``.
    """
    rng = torch.Generator().manual_seed(seed)
    samples = torch.randint(1, 200, (count,), generator=rng).tolist()

    def upload(client: int) -> Payload:
        head = torch.randn(4, 3, generator=rng, dtype=torch.float64)
        prompt = torch.randn(5, generator=rng, dtype=torch.float64)
        half = torch.randn(2, generator=rng).bfloat16()
        tensors = {"head": head, "prompt": prompt, "half": half, **extra(rng)}
        return Payload(tensors, client, samples[client])

    return [upload(client) for client in range(count)]


def check_aggregator(
    aggregator: str | ServerAggregator, extra: Extra = lambda rng: {}, fewest: int = 1
) -> None:
    """Raise AssertionError, in one sentence, where an aggregator breaks a rule.

    Checked on random uploads: no upload is changed, and the merged tree shares no memory with one;
    the same uploads give the same tree; parameters keep their name, shape and type, are between the
    clients' values in every coordinate, do not depend on the order of the clients, and stay where
    all clients agree, whatever their numbers of images; fewer uploads than ``fewest`` are refused
    in one line. A registered aggregator, and each of its options, has a description.

    Args:
        aggregator: Registered name with its options, such as ``trimmed_mean:2``, or a function.
        extra: Draws what it reads in addition to parameters.
        fewest: Number of uploads that it needs.

    Raises:
        AssertionError: A rule is broken.
    """
    if isinstance(aggregator, str):
        label, merge = aggregator, make_aggregator(aggregator)
        need_documented(AGGREGATORS.get(aggregator.partition(":")[0]), label)
    else:
        label, merge = getattr(aggregator, "name", repr(aggregator)), aggregator

    def case(draw: Draw) -> None:
        uploads = random_uploads(draw(fewest, fewest + 5), draw(0, 2**31), extra)
        merged_tree = _merge_checked(label, merge, uploads)
        _check_parameters(label, merged_tree, uploads)
        _check_order(label, merge, merged_tree, uploads, draw(0, 2**31))
        _check_agreement(label, merge, uploads)

    check_random_cases(case)
    if fewest > 1:
        _check_refusal(label, merge, random_uploads(fewest - 1, 0, extra))


def _merge_checked(label: str, merge: ServerAggregator, uploads: Sequence[Payload]) -> Tree:
    """Merge uploads, and check that they are unchanged."""
    copies = [{name: value.clone() for name, value in upload.items()} for upload in uploads]
    inputs = list(uploads)
    merged_tree = merge(inputs)
    need(len(inputs) == len(copies), f"{label} changes the list of uploads; work on a copy")
    for upload, old in zip(inputs, copies, strict=True):
        same = upload.keys() == old.keys() and all(
            torch.equal(upload[name], old[name]) for name in old
        )
        need(same, f"{label} changes an upload in place; make new tensors")
        for name in merged_tree.keys() & old.keys():
            same_memory = (
                merged_tree[name].numel()
                and merged_tree[name].data_ptr() == upload[name].data_ptr()
            )
            need(not same_memory, f"{label} returns the memory of an upload as {name}; clone it")
    need(
        repeats(merge, inputs),
        f"{label} gives another tree from the same uploads; draw nothing and keep no state",
    )
    return merged_tree


def _check_parameters(label: str, merged: Tree, uploads: Sequence[Payload]) -> None:
    for name in PARAMETERS:
        need(
            name in merged,
            f"{label} loses the parameter {name}; merge every tensor that it does not read itself",
        )
        value, rows = merged[name], torch.stack([upload[name] for upload in uploads])
        need(
            value.shape == rows.shape[1:] and value.dtype == rows.dtype,
            f"{label} makes {value.dtype} {list(value.shape)} of {rows.dtype} "
            f"{list(rows.shape[1:])}; keep both",
        )
        inside = (value >= rows.amin(0) - 1e-12) & (value <= rows.amax(0) + 1e-12)
        need(
            inside.all(),
            f"{label} merges {name} to a value outside those of all clients; weights must add "
            "up to 1",
        )


def _check_order(
    label: str, merge: ServerAggregator, merged: Tree, uploads: Sequence[Payload], seed: int
) -> None:
    order = torch.randperm(len(uploads), generator=torch.Generator().manual_seed(seed)).tolist()
    permuted_tree = merge([uploads[i] for i in order])
    for name in PARAMETERS:
        need(
            _is_close(merged[name], permuted_tree[name]),
            f"{label} depends on the order of the clients; sort by client",
        )


def _check_agreement(label: str, merge: ServerAggregator, uploads: Sequence[Payload]) -> None:
    one = uploads[0]
    merged_tree = merge(
        [Payload(one.tensors, upload.client, upload.num_samples) for upload in uploads]
    )
    for name in PARAMETERS:
        need(
            _is_close(merged_tree[name], one[name]),
            f"{label} changes {name}, on which all clients agree; return it unchanged",
        )


def _is_close(a: Tensor, b: Tensor) -> bool:
    tolerance = 2e-2 if a.dtype == torch.bfloat16 else 1e-9
    return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance)


def _check_refusal(label: str, merge: ServerAggregator, uploads: Sequence[Payload]) -> None:
    try:
        merge(uploads)
    except FczooError as error:
        need_one_line(error, label)
    else:
        raise AssertionError(
            f"{label} merges {len(uploads)} uploads; raise FczooError for fewer than it needs"
        )
