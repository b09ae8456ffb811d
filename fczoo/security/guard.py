"""The one place where a server checks uploads before it merges them.

What is broken is turned away, with a reason.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fczoo.core.errors import FczooError
from fczoo.core.payload import ROW_DIMENSIONS, Group, Payload, Uploads, content_of, group_of
from fczoo.core.tree import Tree
from fczoo.core.types import Exchange, Task, Training


class Stopped(FczooError):
    """Training cannot go on: too few uploads are sound, or the state is not finite; what was saved stays."""


SILENT = "dropped out"
LARGEST_NORM = 1e3  # times the round's median: a longer update would undo everybody else's
LARGEST_GROWTH = 10.0  # times what all started from; a shorter one may be all that is left to learn


class Form(NamedTuple):
    """What a tensor of an upload must be like."""

    shape: tuple[int, ...]  # of one row, where the number of rows is free
    floating: bool
    free_rows: bool = False


@dataclass(frozen=True)
class Guard:
    """Admits the uploads of one run of a method. ``least`` sound ones are needed to go on."""

    method: str
    training: Training  # with all that clients upload
    least: int = 1

    def admit(
        self,
        sent: Mapping[int, Payload],
        asked: Mapping[int, int],
        trained: Tree,
        exchange: Exchange,
        losses: Mapping[int, float] = MappingProxyType({}),
    ) -> tuple[list[Payload], list[dict[str, Any]]]:
        """The sound uploads, and task, moment, client and reason of those that are turned away.

        ``sent`` is by client; ``asked`` are the clients of the exchange and their numbers of images, which
        a simulator knows and a real server bounds when clients enrol; ``trained`` is what they started
        from, ``losses`` those of the clients that have trained. Raises Stopped when too few uploads are
        sound, and TypeError when the method uploads what it has not declared.
        """
        payloads = {c: sent.get(c, Payload({}, c)) for c in asked}
        training = self.training
        self._check_declared(payloads.values(), training.trained, training.uploads)
        sound, reasons = sift(payloads, trained, training, exchange.task, asked)
        for client, reason in reasons.items():
            if reason == SILENT and client in losses:
                reasons[client] = f"diverged, loss {losses[client]:g}"
        return sound, self.turned_away(len(sound), reasons, exchange)

    def fault(self, payload: Payload, client: int, images: int, form: Payload, task: Task) -> str:
        """Why an upload of sums cannot be used, which must look as ``form`` does; empty where it can.

        Raises TypeError when ``form`` has what the method has not declared.
        """
        uploads = self.training.uploads
        self._check_declared([form], self.training.trained, uploads)
        names = frozenset(form)
        forms = _forms({client: form}, names, {}, uploads)
        fault = _fault(payload, client, names, forms, uploads, _holdable(self.training, task), task)
        return fault or _overstated(payload, images, uploads)

    def turned_away(self, sound: int, reasons: Mapping[int, str], exchange: Exchange) -> list[dict[str, Any]]:
        """Task, moment, client and reason of those that are. Raises Stopped when too few are ``sound``."""
        asked = sound + len(reasons)
        if asked and sound < self.least:
            self._stop(sound, asked, reasons, exchange)
        about = {"task": exchange.task.index, "moment": exchange.moment}
        return [{**about, "client": c, "reason": reason} for c, reason in reasons.items()]

    def _check_declared(self, payloads: Any, trained: tuple[str, ...], uploads: Uploads) -> None:
        """What all clients send and nobody has declared is the method's own fault."""
        names = [set(p) for p in payloads if p]
        common = set.intersection(*names) if names else set()
        undeclared = [name for name in common if content_of(name, trained, uploads) is None]
        if undeclared:
            raise TypeError(
                f"{self.method} uploads {min(undeclared)!r} without declaring it; name its group in "
                f"training().uploads (see fczoo/core/payload.py)"
            )

    def _stop(self, sound: int, asked: int, reasons: Mapping[int, str], exchange: Exchange) -> None:
        named = "; ".join(f"client {c}: {reason}" for c, reason in list(reasons.items())[:3])
        diverged = any("diverged" in reason or "not finite" in reason for reason in reasons.values())
        advice = "lower its learning rates with --set" if diverged else "lower --min-clients or --drop-rate"
        happened = "diverged" if diverged else "stopped"
        raise Stopped(
            f"{self.method} {happened} in {exchange}: {sound} of {asked} uploads are sound, "
            f"{self.least} needed; {'; '.join(filter(None, [named, advice]))}"
        )


def sift(
    payloads: Mapping[int, Payload], trained: Tree, training: Training, task: Task, images: Mapping[int, int]
) -> tuple[list[Payload], dict[int, str]]:
    """The sound uploads, and for every other client the reason why its upload is turned away.

    ``payloads`` are by client, empty where nothing came; ``trained`` is what the clients started from;
    ``images`` is how many each client has. A trained tensor keeps its shape; the rows of declared groups
    are those that the group's layout allows; what the declaration leaves open (a dimension, a type) is as
    in most uploads. Norms are compared from three clients up, see ``LARGEST_NORM``.
    """
    uploads = training.uploads
    classes = _holdable(training, task)
    names = _expected_names(payloads, trained, uploads)
    forms = _forms(payloads, names, trained, uploads)
    reasons = {}
    for client, payload in payloads.items():
        fault = _fault(payload, client, names, forms, uploads, classes, task)
        reasons[client] = fault or _overstated(payload, images[client], uploads)
    norms = {c: _distance(p, trained) for c, p in payloads.items() if not reasons[c]}
    if len(norms) >= 3:
        middle = sorted(norms.values())[(len(norms) - 1) // 2]
        longest = max(LARGEST_NORM * middle, LARGEST_GROWTH * _norm(trained.values()))
        for client, norm in norms.items():
            if norm > longest and middle > 0:
                reasons[client] = f"its update has norm {norm:.3g}, the median is {middle:.3g}"
    sound = [p for c, p in payloads.items() if not reasons[c]]
    return sound, {c: reason for c, reason in reasons.items() if reason}


def _holdable(training: Training, task: Task) -> range:
    """Classes that a client may hold."""
    new_only = training.scope == "task" and not training.exemplars
    return range(task.start if new_only else 0, task.stop)


def _layout(name: str, uploads: Uploads) -> tuple[str, Group]:
    """The group to which a tensor belongs; a trained tensor is a group of its own."""
    return group_of(name, uploads) or (name, Group("whole", "parameters"))


def _optional(name: str, uploads: Uploads) -> bool:
    return _layout(name, uploads)[1].layout == "samples"


def _expected_names(payloads: Mapping[int, Payload], trained: Tree, uploads: Uploads) -> frozenset[str]:
    """The names in most of the uploads that hold all trained tensors, without those that may be left out."""
    complete = Counter[frozenset[str]]()
    for payload in payloads.values():
        if payload and trained.keys() <= payload.keys():
            complete[frozenset(n for n in payload if not _optional(n, uploads))] += 1
    return complete.most_common(1)[0][0] if complete else frozenset(trained)


def _forms(
    payloads: Mapping[int, Payload], names: frozenset[str], trained: Tree, uploads: Uploads
) -> dict[str, Form]:
    optional = {n for p in payloads.values() for n in p if _optional(n, uploads)}
    forms = {}
    for name in sorted(names | optional):
        if name in trained:
            forms[name] = Form(tuple(trained[name].shape), trained[name].is_floating_point())
            continue
        free = _layout(name, uploads)[1].layout != "whole"
        seen = Counter[tuple[tuple[int, ...], bool]]()
        for value in (p[name] for p in payloads.values() if name in p):
            seen[tuple(value.shape[1:] if free else value.shape), value.is_floating_point()] += 1
        forms[name] = Form(*seen.most_common(1)[0][0], free)
    return forms


def _distance(payload: Payload, trained: Tree) -> float:
    return _norm(payload[name].to(start.device).double() - start.double() for name, start in trained.items())


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in tensors))


def _fault(
    payload: Payload,
    client: int,
    names: frozenset[str],
    forms: Mapping[str, Form],
    uploads: Uploads,
    classes: range,
    task: Task,
) -> str:
    """Why an upload cannot be used; empty where it can."""
    if not payload:
        return SILENT
    if missing := names - payload.keys():
        return f"lacks {min(missing)}"
    if extra := payload.keys() - forms.keys():
        return f"sent {min(extra)}, which nobody asked for"
    for name, value in payload.items():
        prefix, group = _layout(name, uploads)
        fault = _misshapen(payload, name, forms[name], prefix, group, task)
        fault = fault or _impossible(name, value, prefix, group)
        if fault:
            return fault
    for prefix, group in uploads.items():
        fault = _uneven(payload, prefix, group)
        if not fault and group.layout == "rows" and f"{prefix}label" in payload:
            fault = _mislabelled(payload[f"{prefix}label"], f"{prefix}label", classes)
        if fault:
            return fault
    if payload.client != client:
        return f"signs as client {payload.client}"
    return "" if payload.num_samples > 0 else f"claims {payload.num_samples} samples"


def _misshapen(payload: Payload, name: str, form: Form, prefix: str, group: Group, task: Task) -> str:
    value = payload[name]
    if value.layout is not torch.strided or value.is_complex():
        found = value.layout if value.layout is not torch.strided else value.dtype
        return f"{name} is {found}, expected dense real numbers"
    wanted = form.shape
    if form.free_rows:
        wanted = (_expected_rows(payload, prefix, group, task), *form.shape)
    if tuple(value.shape) != wanted:
        return f"{name} has shape {tuple(value.shape)}, expected {wanted}"
    if value.is_floating_point() != form.floating:
        kind = "a floating" if form.floating else "an integer"
        return f"{name} is {str(value.dtype).removeprefix('torch.')}, expected {kind} type"
    return ""


def _expected_rows(payload: Payload, prefix: str, group: Group, task: Task) -> int:
    """Rows of each tensor of a group: one a class (new or seen), one a label, or as many as the first has."""
    if group.layout in ("classes", "seen classes"):
        return task.size if group.layout == "classes" else task.stop
    if group.layout == "rows":
        return _length(payload.get(f"{prefix}label"))
    return _length(payload[next(name for name in payload if name.startswith(prefix))])


def _length(value: torch.Tensor | None) -> int:
    return len(value) if value is not None and value.dim() else 0


def _impossible(name: str, value: torch.Tensor, prefix: str, group: Group) -> str:
    if not value.isfinite().all():
        return f"{name} is not finite"
    content = group.tells(name.removeprefix(prefix))
    if content == "counts" and (value < 0).any():
        return f"{name} is a count below 0"
    variances = value if value.dim() < 3 else value.diagonal(dim1=-2, dim2=-1)
    if content == "class variances" and variances.lt(0).any():
        return f"{name} is a variance below 0"
    return ""


def _uneven(payload: Payload, prefix: str, group: Group) -> str:
    """Where statistics of a group are no numbers, vectors [D] or matrices [D, D] a row, of one D."""
    width: int | None = None
    for name in (n for n in group.statistics if f"{prefix}{n}" in payload):
        value = payload[f"{prefix}{name}"]
        row, dimensions = tuple(value.shape[1:]), ROW_DIMENSIONS.get(name, 1)
        kind = ("a number", "a vector", "a square matrix")[dimensions]
        width = row[0] if width is None and row else width
        if row != (width,) * dimensions:
            side = f" of side {width}" if dimensions and len(row) == dimensions else ""
            return f"{prefix}{name} has rows of shape {row}, expected {kind}{side}"
        if name == "label" and (value.is_floating_point() or value.dtype == torch.bool):
            return f"{prefix}{name} is {str(value.dtype).removeprefix('torch.')}, expected an integer type"
    return ""


def _overstated(payload: Payload, images: int, uploads: Uploads) -> str:
    """Where a client claims more images than it has, or counts more of them than it claims."""
    if not payload:
        return ""
    if payload.num_samples > images:
        return f"claims {payload.num_samples} samples, it has {images}"
    for prefix, group in uploads.items():
        count = payload.get(f"{prefix}count") if "count" in group.statistics else None
        if count is not None and (total := float(count.double().sum())) > payload.num_samples:
            return f"{prefix}count adds up to {total:g}, of {payload.num_samples} samples"
    return ""


def _mislabelled(labels: torch.Tensor, name: str, classes: range) -> str:
    outside = labels[(labels < classes.start) | (labels >= classes.stop)]
    if len(outside):
        held = f"{classes.start} to {classes.stop - 1}"
        return f"{name} names class {int(outside[0])}; the client may have {held}"
    if len(labels.unique()) < len(labels):
        return f"{name} names a class twice"
    return ""
