"""Server-side validation of uploads, the only place where a server checks them before the merge.

Invalid uploads are rejected, with a reason.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError, printable
from fczoo.core.payload import ROW_DIMENSIONS, Group, Payload, Uploads, content_of, group_of
from fczoo.core.training import Training
from fczoo.core.tree import Tree
from fczoo.core.types import Exchange, Task
from fczoo.security.value_bounds import OF_FEATURES, StatisticsCheck, largest_value, value_range

DROPPED_OUT = "dropped out"
LATE = "late"  # beginning of the reason of those that miss a deadline
LARGEST_NORM = 1e3  # times the round's median; a longer update would undo all others
LARGEST_GROWTH = 10.0  # times the norm of the start; a shorter update may be all left to learn
CountLimits = Mapping[int, Mapping[str, int]]
"""Largest count of each client, by the prefix of a group of whole tensors."""


class TensorForm(NamedTuple):
    """Expected form of a tensor of an upload."""

    shape: tuple[int, ...]  # of one row, where the number of rows is free
    dtype: torch.dtype
    free_rows: bool = False

    def admits(self, dtype: torch.dtype) -> bool:
        """Return whether a type is the expected one, or float32 of a device without float64."""
        return dtype == self.dtype or (dtype, self.dtype) == (torch.float32, torch.float64)


@dataclass(frozen=True)
class UploadValidator:
    """Validator of the uploads in one run, which stops with fewer than ``min_valid`` valid ones."""

    method: str
    training: Training  # with all that clients upload
    min_valid: int = 1
    backbone: Backbone | None = None  # of the features behind statistics; None: unknown

    def validate(
        self,
        sent: Mapping[int, Payload],
        images: Mapping[int, int],
        trained: Tree,
        exchange: Exchange,
        losses: Mapping[int, float] = MappingProxyType({}),
        form: Payload | None = None,
        late: Mapping[int, str] = MappingProxyType({}),
        counts: CountLimits = MappingProxyType({}),
    ) -> tuple[list[Payload], list[dict[str, Any]]]:
        """Return the valid uploads, and task, moment, client and reason of the rejected ones.

        ``sent`` is by client. ``images`` has the number of images of each client of the exchange;
        a simulator knows them, and a real server bounds them when clients enrol.
        ``trained`` are the tensors from which clients started, ``losses`` the losses of the clients
        that have trained. ``form`` has names, shapes and types of a valid upload; without it the
        majority of uploads decides. ``late`` has the reason for each client whose upload was left
        out, ``counts`` the largest valid counts.

        Raises FczooError if too few uploads are valid, and TypeError if the method uploads
        undeclared tensors.
        """
        payloads = {c: sent.get(c, Payload({}, c)) for c in images}
        training = self.training
        forms = payloads.values() if form is None else [form]
        self._check_declared(forms, training.trained_prefixes, training.uploads)
        valid_uploads, reasons = validate_uploads(
            payloads, trained, training, exchange.task, images, form, self.backbone, counts
        )
        for client, reason in reasons.items():
            if reason == DROPPED_OUT and client in late:
                reasons[client] = late[client]
            elif reason == DROPPED_OUT and client in losses:
                reasons[client] = f"diverged, loss {losses[client]:g}"
        return valid_uploads, self.list_rejections(len(valid_uploads), reasons, exchange)

    def find_fault(
        self,
        payload: Payload,
        client: int,
        images: int,
        form: Payload,
        task: Task,
        counts: CountLimits = MappingProxyType({}),
    ) -> str:
        """Return the reason why an upload of sums is invalid; empty if it is valid.

        A valid upload has the names and shapes of ``form``. Raises TypeError if ``form`` has
        tensors that the method has not declared.
        """
        self._check_declared([form], self.training.trained_prefixes, self.training.uploads)
        client_images = {client: images}
        _, reasons = validate_uploads(
            {client: payload}, {}, self.training, task, client_images, form, self.backbone, counts
        )
        return reasons.get(client, "")

    def list_rejections(
        self, valid: int, reasons: Mapping[int, str], exchange: Exchange
    ) -> list[dict[str, Any]]:
        """Return task, moment, client and reason of the rejected uploads.

        ``valid`` is the number of valid uploads. Raises FczooError if it is too low.
        """
        total = valid + len(reasons)
        if total and valid < self.min_valid:
            self._stop(valid, total, reasons, exchange)
        exchange_info = {"task": exchange.task.index, "moment": exchange.label}
        return [{**exchange_info, "client": c, "reason": reason} for c, reason in reasons.items()]

    def _check_declared(self, payloads: Any, trained: tuple[str, ...], uploads: Uploads) -> None:
        """Raise TypeError for undeclared tensors in all uploads, an error of the method."""
        names = [set(p) for p in payloads if p]
        common = set.intersection(*names) if names else set()
        extra = [name for name in common if content_of(name, trained, uploads) is None]
        if extra:
            raise TypeError(
                f"{self.method} uploads {min(extra)!r} without declaring it; add its group to "
                f"training().uploads (see fczoo/core/payload.py)"
            )

    def _stop(self, valid: int, total: int, reasons: Mapping[int, str], exchange: Exchange) -> None:
        details = "; ".join(f"client {c}: {reason}" for c, reason in list(reasons.items())[:3])
        event, advice = "stopped", "lower --min-clients or --drop-rate"
        if have_diverged(reasons.values()):
            event, advice = "diverged", "lower its learning rates with --set"
        elif any(reason.startswith(LATE) for reason in reasons.values()):
            advice = "raise --deadline"
        elif any(f" {OF_FEATURES} " in reason for reason in reasons.values()):
            advice = "if the method projects features, declare its groups with projected=True"
        raise FczooError(
            f"{self.method} {event} in {exchange}: {valid} of {total} uploads are valid, "
            f"{self.min_valid} needed; {'; '.join(filter(None, [details, advice]))}"
        )


def have_diverged(reasons: Iterable[str]) -> bool:
    """Return whether one of the reasons of rejections is a training that diverged."""
    return any("diverged" in reason or "not finite" in reason for reason in reasons)


def validate_uploads(
    payloads: Mapping[int, Payload],
    trained: Tree,
    training: Training,
    task: Task,
    images: Mapping[int, int],
    form: Payload | None = None,
    backbone: Backbone | None = None,
    counts: CountLimits = MappingProxyType({}),
) -> tuple[list[Payload], dict[int, str]]:
    """Return the valid uploads, and for every other client the reason for the rejection.

    ``payloads`` are by client, empty if no upload arrived. ``trained`` are the tensors from which
    the clients started. ``images`` is the number of images of each client.

    A trained tensor must have the shape and type that the server sent, and a declared group the
    rows of its layout. Properties that the declaration leaves open (a dimension, a type) are those
    of ``form``, or else of the majority of uploads. ``backbone`` bounds the norm of statistics, and
    ``counts`` bounds counts. Norms of updates are compared with their lower median, see
    ``LARGEST_NORM``.
    """
    uploads = training.uploads
    classes = _allowed_classes(training, task)
    examples = {0: form} if form else payloads
    names = _expected_names(examples, trained, training)
    forms = _forms(payloads, examples, names, trained, uploads)
    statistics = StatisticsCheck(training, backbone) if backbone else None
    reasons = {}
    for client, payload in payloads.items():
        fault = _find_fault(payload, client, names, forms, uploads, classes, task)
        limits = counts.get(client, {})
        fault = fault or _count_fault(payload, images[client], uploads, limits)
        if statistics and payload:
            fault = fault or statistics.find_fault(payload)
        reasons[client] = fault
    norms = {c: update_norm(p, trained) for c, p in payloads.items() if not reasons[c]}
    if len(norms) >= 2:
        median = sorted(norms.values())[(len(norms) - 1) // 2]
        limit = max(LARGEST_NORM * median, LARGEST_GROWTH * _norm(trained.values()))
        for client, norm in norms.items():
            if norm > limit and median > 0:
                reasons[client] = f"its update has norm {norm:.3g}, but the limit is {limit:.3g}"
    valid_uploads = [_cast_to_form(p, forms) for c, p in payloads.items() if not reasons[c]]
    return valid_uploads, {c: reason for c, reason in reasons.items() if reason}


def _cast_to_form(payload: Payload, forms: Mapping[str, TensorForm]) -> Payload:
    """Return an upload in the expected types, so that no merge takes a type from one client."""
    if all(value.dtype == forms[name].dtype for name, value in payload.items()):
        return payload
    return payload.holding({name: value.to(forms[name].dtype) for name, value in payload.items()})


def _allowed_classes(training: Training, task: Task) -> range:
    """Return the classes that a client may hold."""
    new_only = training.data_scope == "task" and not training.exemplars
    return range(task.start if new_only else 0, task.stop)


def _layout(name: str, uploads: Uploads) -> tuple[str, Group]:
    """Return the group to which a tensor belongs; each trained tensor forms a separate group."""
    return group_of(name, uploads) or (name, Group("whole", "parameters"))


def _optional(name: str, uploads: Uploads) -> bool:
    return _layout(name, uploads)[1].layout == "samples"


def _expected_names(
    payloads: Mapping[int, Payload], trained: Tree, training: Training
) -> frozenset[str]:
    """Return the names in most of the complete uploads, without optional and undeclared ones.

    Complete uploads hold all trained tensors.
    """
    uploads, complete = training.uploads, Counter[frozenset[str]]()
    for payload in payloads.values():
        if payload and trained.keys() <= payload.keys():
            declared = (n for n in payload if content_of(n, training.trained_prefixes, uploads))
            complete[frozenset(n for n in declared if not _optional(n, uploads))] += 1
    return complete.most_common(1)[0][0] if complete else frozenset(trained)


def _forms(
    payloads: Mapping[int, Payload],
    examples: Mapping[int, Payload],
    names: frozenset[str],
    trained: Tree,
    uploads: Uploads,
) -> dict[str, TensorForm]:
    """Return the expected form of each tensor: the most common in examples, or in uploads."""
    optional = {n for p in payloads.values() for n in p if _optional(n, uploads)}
    forms = {}
    for name in sorted(names | optional):
        if name in trained:
            forms[name] = TensorForm(tuple(trained[name].shape), trained[name].dtype)
            continue
        free = _layout(name, uploads)[1].layout != "whole"
        forms_count = Counter[tuple[tuple[int, ...], torch.dtype]]()
        senders = [p for p in examples.values() if name in p] or payloads.values()
        for value in (p[name] for p in senders if name in p):
            forms_count[tuple(value.shape[1:] if free else value.shape), value.dtype] += 1
        forms[name] = TensorForm(*forms_count.most_common(1)[0][0], free)
    return forms


def update_norm(payload: Payload, trained: Tree) -> float:
    """Return the length of the change of the trained tensors."""
    return _norm(
        payload[name].to(start.device).double() - start.double() for name, start in trained.items()
    )


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in tensors))


def _find_fault(
    payload: Payload,
    client: int,
    names: frozenset[str],
    forms: Mapping[str, TensorForm],
    uploads: Uploads,
    classes: range,
    task: Task,
) -> str:
    """Return the reason why an upload is invalid; empty if it is valid."""
    if not payload:
        return DROPPED_OUT
    if missing := names - payload.keys():
        return f"lacks {min(missing)}"
    if extra := payload.keys() - forms.keys():
        return f"sent {printable(min(extra))}, which the server did not request"
    for name, value in payload.items():
        prefix, group = _layout(name, uploads)
        fault = _shape_fault(payload, name, forms[name], prefix, group, task)
        fault = fault or _value_fault(name, value, prefix, group)
        if fault:
            return fault
    for prefix, group in uploads.items():
        fault = _row_fault(payload, prefix, group)
        if not fault and group.layout == "rows" and f"{prefix}label" in payload:
            fault = _label_fault(payload[f"{prefix}label"], f"{prefix}label", classes)
        if fault:
            return fault
    if payload.client != client:
        return f"claims to be client {payload.client}"
    return "" if payload.num_samples > 0 else f"claims {payload.num_samples} images"


def _shape_fault(
    payload: Payload, name: str, form: TensorForm, prefix: str, group: Group, task: Task
) -> str:
    value = payload[name]
    if value.layout is not torch.strided or value.is_complex():
        actual = value.layout if value.layout is not torch.strided else value.dtype
        return f"{name} is {actual}, expected dense real numbers"
    shape = form.shape
    if form.free_rows:
        shape = (_expected_rows(payload, prefix, group, task), *form.shape)
    if tuple(value.shape) != shape:
        return f"{name} has shape {tuple(value.shape)}, expected {shape}"
    if not form.admits(value.dtype):
        sent, expected = (str(dtype).removeprefix("torch.") for dtype in (value.dtype, form.dtype))
        return f"{name} is {sent}, expected {expected}"
    return ""


def _expected_rows(payload: Payload, prefix: str, group: Group, task: Task) -> int:
    """Return the number of rows of each tensor of a group.

    It is one per class (new or seen), one per label, or the length of the first tensor.
    """
    if group.layout in ("classes", "seen classes"):
        return task.size if group.layout == "classes" else task.stop
    if group.layout == "rows":
        return _length(payload.get(f"{prefix}label"))
    return _length(payload[next(name for name in payload if name.startswith(prefix))])


def _length(value: torch.Tensor | None) -> int:
    return len(value) if value is not None and value.dim() else 0


def _value_fault(name: str, value: torch.Tensor, prefix: str, group: Group) -> str:
    low, high = value_range(value)
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{name} is not finite"
    if (largest := max(-low, high)) > (limit := largest_value(value.dtype)):
        return f"{name} has a value of {largest:.3g}, but the limit is {limit:.3g}"
    content = group.content_of(name.removeprefix(prefix))
    if content == "counts" and low < 0:
        return f"{name} has a count below 0"
    variances = value if value.dim() < 3 else value.diagonal(dim1=-2, dim2=-1)
    if content == "class variances" and variances.lt(0).any():
        return f"{name} has a variance below 0"
    return ""


def _row_fault(payload: Payload, prefix: str, group: Group) -> str:
    """Return a reason if statistics do not have one number, vector [D] or matrix [D, D] per row.

    D is the same in all statistics of the group. The reason is empty if they are valid.
    """
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
            return (
                f"{prefix}{name} is {str(value.dtype).removeprefix('torch.')}, "
                "expected an integer type"
            )
    return ""


def _count_fault(payload: Payload, images: int, uploads: Uploads, limits: Mapping[str, int]) -> str:
    """Return a reason if a client claims more images than it has, or counts more than it can."""
    if not payload:
        return ""
    if payload.num_samples > images:
        return f"claims {payload.num_samples} images, but has {images}"
    for prefix, group in uploads.items():
        count = payload.get(f"{prefix}count") if "count" in group.statistics else None
        if count is not None and (total := float(count.double().sum())) > payload.num_samples:
            return f"{prefix}count adds up to {total:g}, more than {payload.num_samples} images"
    for name, value in payload.items() if limits else ():
        limit = limits.get(_layout(name, uploads)[0])
        if limit is not None and (high := value_range(value)[1]) > limit:
            return f"{name} has a count of {high:g}, but the limit is {limit} for {images} images"
    return ""


def _label_fault(labels: torch.Tensor, name: str, classes: range) -> str:
    outside = labels[(labels < classes.start) | (labels >= classes.stop)]
    if len(outside):
        class_range = f"{classes.start} to {classes.stop - 1}"
        return f"{name} names class {int(outside[0])}; the client may have {class_range}"
    if len(labels.unique()) < len(labels):
        return f"{name} names a class twice"
    return ""
