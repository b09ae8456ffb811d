"""Plausibility of uploads: bounds of values that an honest client can send.

These checks are always on. They do not detect statistics that are wrong but within the bounds;
``--outliers`` compares the clients with each other.

The last layer of a frozen backbone is a layer norm, so features have norm B at most
(``Backbone.largest_norm``). Means of features have the same bound, and their second moments are at
most B^2. Methods that train the norm, project features (``Group.projected``, or another width) or
read other layers have no such bound; their limit is ``MARGIN`` times B, far above honest values.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.payload import Group, Payload
from fczoo.core.training import Training

ROUNDING = 1.02  # factor on a bound, as features can be in bfloat16
MARGIN = 1e3  # times B, for features that no bound is known of
COUNTS_PER_IMAGE = 1e6  # in counts of other things than images, such as prompts over all epochs
OF_FEATURES = "implies features of norm"  # in reasons of statistics by class
NORM = "full.norm."  # names of the final norm where it is trained
BLOCK = 256  # rows of a matrix that are checked at once


def value_range(value: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest number of a tensor; (0, 0) if it has none."""
    if not value.numel():
        return 0.0, 0.0
    low, high = value.detach().aminmax()
    return float(low), float(high)


def largest_value(dtype: torch.dtype) -> float:
    """Return the largest plausible number of a type: the largest with a finite cube.

    The server squares values and sums them over clients.
    """
    return math.cbrt(torch.finfo(dtype).max) if dtype.is_floating_point else math.inf


@dataclass(frozen=True)
class StatisticsCheck:
    """Bounds of the statistics that clients of one method upload."""

    training: Training  # with all that clients upload
    backbone: Backbone

    def find_fault(self, payload: Payload) -> str:
        """Return the reason why statistics cannot be those of images; empty if they can.

        Args:
            payload: Upload whose names, shapes and types are valid, and whose values are finite.
        """
        for prefix, group in self.training.uploads.items():
            if group.layout != "whole":
                tensors = {n: payload[f"{prefix}{n}"] for n in _present(payload, prefix, group)}
                fault = self._class_fault(tensors, prefix, group.projected)
            else:
                names = [
                    n for n in payload if n == prefix or n.startswith(f"{prefix.rstrip('.')}.")
                ]
                faults = (self._whole_fault(payload, name, group) for name in names)
                fault = next(filter(None, faults), "")
            if fault:
                return fault
        return ""

    def _largest_norm(self, width: int, exact: bool = True) -> float:
        """Return the largest norm of a feature of some width, or of an input of a layer."""
        bound, dim = self.backbone.largest_norm, self.backbone.dim
        trains_norm = any(
            NORM.startswith(prefix) or prefix.startswith(NORM)
            for prefix in self.training.trained_prefixes
        )
        if exact and width == dim and not trains_norm:
            return ROUNDING * bound
        return MARGIN * bound * math.sqrt(max(1.0, width / dim))

    def _class_fault(self, tensors: Mapping[str, Tensor], prefix: str, projected: bool) -> str:
        """Check statistics with one row per class by their mean per image."""
        count = _to_float64(tensors["count"]).clamp(min=1) if "count" in tensors else None
        means = dict[str, Tensor]()  # per image: [g, D], of matrices the diagonal
        for name, value in tensors.items():
            is_sum = name in ("sum", "squares", "products")
            if name in ("label", "count") or (is_sum and count is None):
                continue
            rows = _to_float64(value)
            if rows.dim() == 3:
                if fault := next(filter(None, map(matrix_fault, rows)), ""):
                    return f"{prefix}{name} {fault}"
                rows = rows.diagonal(dim1=1, dim2=2)
            means[name] = rows / count[:, None] if is_sum and count is not None else rows
        for name, rows in means.items():
            limit = self._largest_norm(rows.shape[1], exact=not projected)
            is_vector = name in ("mean", "sum")
            lengths = torch.linalg.vector_norm(rows, dim=1) if is_vector else rows.sum(1).sqrt()
            max_norm = float(lengths.max()) if len(lengths) else 0.0
            if not max_norm <= limit:  # also of a negative sum, whose root is not a number
                return f"{prefix}{name} {OF_FEATURES} {max_norm:.3g}, but the limit is {limit:.3g}"
        first_moment = "sum" if "sum" in means else "mean"
        mean = means.get(first_moment)
        for name in ("squares", "products"):
            if mean is not None and name in means:
                tolerance = means[name] * (ROUNDING - 1) + 1e-6 * means[name].amax(1, keepdim=True)
                if (mean.square() > means[name] + tolerance).any():
                    return f"{prefix}{name} is too small for {prefix}{first_moment}"
        return ""

    def _whole_fault(self, payload: Payload, name: str, group: Group) -> str:
        """Check a tensor that is merged as a whole."""
        value, images = payload[name], payload.num_samples
        if group.content == "counts" and (total := float(value.double().sum())):
            limit = COUNTS_PER_IMAGE * images
            if total > limit:
                excess = f"{total:.3g}, but the limit is {limit:.3g}"
                return f"{name} adds up to {excess} for {images} images"
            return ""
        if group.content == "class means" and value.dim() and value.numel():
            limit = self._largest_norm(value.shape[-1], exact=False)
            max_norm = float(torch.linalg.vector_norm(_to_float64(value), dim=-1).max())
            if max_norm > limit:
                return f"{name} has norm {max_norm:.3g}, but the limit is {limit:.3g}"
            return ""
        if group.content != "second moments" or not value.numel():
            return ""
        if value.dim() == 2 and value.shape[0] == value.shape[1]:
            if fault := matrix_fault(value):
                return f"{name} {fault}"
            value = value.diagonal()
        width = value.shape[-1] if value.dim() else 1
        limit = self._largest_norm(width, exact=False)
        max_size = math.sqrt(max(value_range(value)[1], 0.0) / images)
        if max_size > limit:
            return f"{name} implies inputs of size {max_size:.3g}, but the limit is {limit:.3g}"
        return ""


def _present(payload: Payload, prefix: str, group: Group) -> list[str]:
    return [name for name in group.statistics if f"{prefix}{name}" in payload]


def _to_float64(value: Tensor) -> Tensor:
    """Convert to float64, in which no bound overflows; on mps, which lacks it, to float32."""
    return value.to(torch.float32 if value.device.type == "mps" else torch.float64)


def matrix_fault(matrix: Tensor) -> str:
    """Return the reason why a matrix [D, D] is not a sum of outer products; empty if it may be.

    Such a matrix is symmetric, and |m_ij| is at most sqrt(m_ii m_jj). Both are checked up to
    rounding.
    """
    diagonal = _to_float64(matrix.diagonal())
    tolerance = 1e-4 * float(diagonal.abs().max()) if len(diagonal) else 0.0
    if (diagonal < -tolerance).any():
        return "has a negative diagonal entry"
    root = (diagonal.clamp(min=0) + tolerance).sqrt()
    for start in range(0, len(matrix), BLOCK):
        rows = _to_float64(matrix[start : start + BLOCK])
        if ((rows - _to_float64(matrix[:, start : start + BLOCK].mT)).abs() > tolerance).any():
            return "is not symmetric"
        if (rows.abs() > ROUNDING * root[start : start + BLOCK, None] * root).any():
            return "has off-diagonal entries that are too large for its diagonal"
    return ""
