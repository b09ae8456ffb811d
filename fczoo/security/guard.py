"""The one place where a server looks at uploads before it merges anything: what is broken is turned away, with a reason."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.payload import ENVELOPE, Content, content_of
from fczoo.core.tree import Tree
from fczoo.core.types import Task


class Stopped(FczooError):
    """Training cannot go on: too few uploads are sound, or the state is not finite. What was saved before is kept."""


SILENT = "dropped out"
ABSURD = 1e3  # times the round's median: an update that far from the broadcast would undo everybody else's


class Look(NamedTuple):
    """How a tensor has to look."""

    shape: tuple[int, ...]  # of one row, where the number of rows is free
    floating: bool
    rows: str = ""  # the tensor of the same upload that says how many rows there are


@dataclass(frozen=True)
class Guard:
    """Admits the uploads of one run. ``least`` sound ones are needed to go on."""

    method: Method
    least: int = 1

    def admit(
        self,
        sent: Mapping[int, Tree],
        asked: Sequence[int],
        trained: Tree,
        task: Task,
        moment: int | str,
        losses: Mapping[int, float] = MappingProxyType({}),
    ) -> tuple[list[Tree], list[dict[str, Any]]]:
        """The sound uploads, and task, moment, client and reason of those that are turned away.

        ``sent`` is by client, ``asked`` are the clients of the round, ``trained`` is what they started from, ``moment`` the round's number
        or the survey's name; ``losses`` of those that have trained. Raises Stopped when too few uploads are sound.
        """
        payloads = {c: sent.get(c, {}) for c in asked}
        sound, reasons = sift(payloads, trained, self.method.uploads)
        for client, reason in reasons.items():
            if reason == SILENT and client in losses:
                reasons[client] = f"diverged, loss {losses[client]:g}"
        if asked and len(sound) < self.least:
            self._stop(
                len(sound),
                len(asked),
                reasons,
                f"task {task.index + 1}, {f'round {moment + 1}' if isinstance(moment, int) else moment}",
            )
        return sound, [
            {"task": task.index, "moment": moment, "client": c, "reason": r} for c, r in reasons.items()
        ]

    def _stop(self, sound: int, asked: int, reasons: Mapping[int, str], where: str) -> None:
        named = "; ".join(f"client {c}: {reason}" for c, reason in list(reasons.items())[:3])
        diverged = any("diverged" in reason or "not finite" in reason for reason in reasons.values())
        raise Stopped(
            f"{self.method.name} {'diverged' if diverged else 'stopped'} in {where}: {sound} of {asked} uploads are sound, {self.least} needed; "
            f"{named}; {'lower its learning rates with --set' if diverged else 'lower --min-clients or --drop-rate'}"
        )


def sift(
    payloads: Mapping[int, Tree], trained: Tree, contents: Mapping[str, Content]
) -> tuple[list[Tree], dict[int, str]]:
    """The sound uploads, and for every other client the reason why its upload is turned away.

    ``payloads`` are by client, empty where nothing came; ``trained`` is what the clients started from, ``contents`` what
    ``Method.uploads`` says. A trained tensor keeps its shape, anything else looks as in most uploads. Only rows may be
    more or fewer: tensors beside a ``.label``, as many as labels, and gradients of single images, which need not be sent
    at all. Norms are compared from three clients up.
    """
    complete = [
        frozenset(n for n in p if not _optional(n, contents))
        for p in payloads.values()
        if p and trained.keys() <= p.keys()
    ]
    names = Counter(complete).most_common(1)[0][0] if complete else frozenset({*trained, *ENVELOPE})
    known = sorted(names | {n for p in payloads.values() for n in p if _optional(n, contents)})
    looks = {
        n: _usual([p[n] for p in payloads.values() if n in p], n, trained, known, contents) for n in known
    }
    reasons = {client: _fault(p, client, names, looks, contents) for client, p in payloads.items()}
    norms = {c: _distance(p, trained) for c, p in payloads.items() if not reasons[c]}
    if len(norms) >= 3:
        middle = sorted(norms.values())[(len(norms) - 1) // 2]
        reasons |= {
            c: f"its update has norm {v:.3g}, the median is {middle:.3g}"
            for c, v in norms.items()
            if v > ABSURD * middle > 0
        }
    return [p for c, p in payloads.items() if not reasons[c]], {
        c: reason for c, reason in reasons.items() if reason
    }


def _optional(name: str, contents: Mapping[str, Content]) -> bool:
    return content_of(name, contents) == "gradients of single images"


def _distance(payload: Tree, trained: Tree) -> float:
    return math.sqrt(
        sum(float((payload[k].to(v.device).double() - v.double()).square().sum()) for k, v in trained.items())
    )


def _usual(
    values: Sequence[torch.Tensor],
    name: str,
    trained: Tree,
    known: Sequence[str],
    contents: Mapping[str, Content],
) -> Look:
    if name in trained:
        return Look(tuple(trained[name].shape), trained[name].is_floating_point())
    if _optional(name, contents):
        rows = next(n for n in known if _optional(n, contents))
    else:
        rows = next(
            (n for n in known if n.endswith(".label") and name.startswith(n.removesuffix("label"))), ""
        )
    shapes = Counter((tuple(v.shape[1:] if rows else v.shape), v.is_floating_point()) for v in values)
    return Look(*shapes.most_common(1)[0][0], rows) if shapes else Look((), False)


def _fault(
    payload: Tree,
    client: int,
    names: frozenset[str],
    looks: Mapping[str, Look],
    contents: Mapping[str, Content],
) -> str:
    """Why an upload cannot be used; empty where it can."""
    if not payload:
        return SILENT
    if missing := names - payload.keys():
        return f"lacks {min(missing)}"
    if extra := payload.keys() - looks.keys():
        return f"sent {min(extra)}, which nobody asked for"
    for name, value in payload.items():
        look = looks[name]
        wanted = (*payload[look.rows].shape[:1], *look.shape) if look.rows in payload else look.shape
        if tuple(value.shape) != wanted:
            return f"{name} has shape {tuple(value.shape)}, expected {wanted}"
        if value.is_floating_point() != look.floating:
            return f"{name} is {str(value.dtype).removeprefix('torch.')}, expected {'a floating' if look.floating else 'an integer'} type"
        if not value.isfinite().all():
            return f"{name} is not finite"
        content = content_of(name, contents)
        if content == "counts" and (value < 0).any():
            return f"{name} is a count below 0"
        if (
            content == "class variances"
            and (value if value.dim() < 3 else value.diagonal(dim1=-2, dim2=-1)).lt(0).any()
        ):
            return f"{name} is a variance below 0"
    if int(payload["client"]) != client:
        return f"signs as client {int(payload['client'])}"
    return "" if int(payload["num_samples"]) > 0 else f"claims {int(payload['num_samples'])} samples"
