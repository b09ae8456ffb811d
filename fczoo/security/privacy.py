"""Privacy of uploads: the content that they disclose, and two ways to disclose less.

Clients withhold statistics of rare classes, and clip updates and add noise to them.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.payload import (
    HEADER_BYTES,
    Content,
    Payload,
    Uploads,
    content_of,
    contents,
    keep_classes,
)
from fczoo.core.seeds import torch_stream
from fczoo.core.training import Training
from fczoo.core.tree import Tree, nbytes
from fczoo.core.types import Exchange

MIN_NOISE = 0.5  # times the clipping norm

DISCLOSURES: dict[Content, str] = {
    "parameters": "no image directly, but changes of weights can reveal whether an image was in "
    "the training data, and with small batches the images themselves",
    "counts": "which classes a client has, and how many images of each",
    "class means": "the mean feature of each class; for a class with one image, the feature of "
    "that image",
    "class variances": "the spread of the client's images of each class in feature space",
    "second moments": "the covariance of the client's features, over all its classes or per class",
    "gradients of single images": "the images themselves: a gradient of one image can be inverted "
    "to its label and pixels",
    "losses": "how well the model fits the client's images",
}


def list_disclosures(training: Training, sent: Payload) -> list[tuple[Content, list[str], str]]:
    """List the uploaded content by kind, with tensor names and what a server could learn from it.

    Kinds are in the order of ``DISCLOSURES``.
    """
    by_content: dict[Content, list[str]] = {}
    for name in sent:
        content = content_of(name, training.trained_prefixes, training.uploads)
        by_content.setdefault(content or "parameters", []).append(name)
    return [
        (content, by_content[content], DISCLOSURES[content])
        for content in DISCLOSURES
        if content in by_content
    ]


def bytes_by_content(training: Training, sent: Sequence[Payload]) -> dict[str, int]:
    """Measure the size of uploads in bytes, by what they disclose.

    Client and number of images count as counts.
    """
    size = Counter[str]()
    for payload in sent:
        if payload:
            size["counts"] += HEADER_BYTES
        for content, names, _ in list_disclosures(training, payload):
            size[content] += nbytes({name: payload[name] for name in names})
    return dict(size)


class Draw(NamedTuple):
    """Repeated draw of ``sample_size`` out of ``clients`` without replacement.

    There are ``times`` draws; each drawn client sends ``uploads`` uploads.
    """

    clients: int
    sample_size: int
    uploads: int
    times: int


def has_class_counts(uploads: Uploads) -> bool:
    """Return whether uploads have counts per class, which ``--min-class-count`` needs.

    It withholds classes by these counts.
    """
    return any("count" in group.statistics for group in uploads.values())


@dataclass(frozen=True)
class Privacy:
    """Protection that every client applies to its uploads before it sends them.

    With ``clip`` C and ``noise`` z, the change of the trained tensors, as one vector, is shortened
    to norm C. Then N(0, (z C)^2) is added to each of its coordinates. The server receives only the
    result.
    """

    seed: int
    min_class_count: int = 1  # minimum images of a class; with fewer its statistics are withheld
    clip: float | None = None
    noise: float = 0.0
    delta: float = 1e-5
    # noise from the system's cryptographic source instead of the seed's generator
    secure: bool = False
    subsampling: bool = False  # epsilon towards an observer who cannot see the participants

    def check(self, method: Method) -> None:
        """Raise FczooError if the protection does not cover the method's uploads."""
        if self.noise and self.clip is None:
            raise FczooError(
                "--dp-noise needs --dp-clip: noise protects only updates of limited norm; give both"
            )
        if 0 < self.noise < MIN_NOISE:
            raise FczooError(
                f"--dp-noise {self.noise:g} is too small to protect clients: epsilon of a usual "
                f"run is in the hundreds; give {MIN_NOISE} or more, or leave it out"
            )
        if self.secure and not self.noise:
            raise FczooError(
                "--dp-secure selects the source of the noise, but --dp-noise is 0; give --dp-noise"
            )
        if self.subsampling and not self.noise:
            raise FczooError("--dp-subsampling lowers epsilon, which needs noise; give --dp-noise")
        training = method.training()
        uploads, upload_contents = training.uploads, set[str](contents(training.uploads))
        if {*training.collect_at} - {"after_training"}:
            upload_contents.add("surveys")
        if self.clip is not None and upload_contents:
            raise FczooError(
                f"--dp-clip protects only trained parameters, but {method.name} also uploads "
                f"{', '.join(sorted(upload_contents))}; choose another method"
            )
        over_all_classes = {"class means", "class variances"} & {
            g.content for g in uploads.values()
        }
        over_all_classes |= {"second moments"} & upload_contents
        if self.min_class_count > 1 and over_all_classes:
            raise FczooError(
                f"--min-class-count cannot remove a class from the {min(over_all_classes)} over "
                f"all classes that {method.name} uploads; leave it at 1"
            )
        groups_without_counts = [
            p
            for p, group in uploads.items()
            if group.statistics and "count" not in group.statistics
        ]
        if self.min_class_count > 1 and groups_without_counts:
            raise FczooError(
                f"--min-class-count needs image counts per class, but {method.name} uploads "
                f"{groups_without_counts[0]} without counts; leave it at 1"
            )

    def guarantee(self, draws: Sequence["Draw"]) -> dict[str, float]:
        """Return epsilon and delta for a client that always takes part; empty without noise."""
        if not self.noise:
            return {}
        value = epsilon(self.noise, sum(d.uploads * d.times for d in draws), self.delta)
        if self.subsampling:
            value = min(value, sampled_epsilon(self.noise, draws, self.delta))
        return {"epsilon": value, "delta": self.delta}

    def protect(
        self, payloads: Sequence[Payload], trained: Tree, training: Training, exchange: Exchange
    ) -> list[Payload]:
        """Return the protected uploads of an exchange.

        ``trained`` are the tensors from which the clients started.
        """
        out = [
            self._withhold_classes(p, training.uploads) if self.min_class_count > 1 and p else p
            for p in payloads
        ]
        return (
            out
            if self.clip is None
            else [
                self._add_noise(p, trained, exchange) if p or (self.secure and p.num_samples) else p
                for p in out
            ]
        )

    def _withhold_classes(self, payload: Payload, uploads: Uploads) -> Payload:
        for prefix, group in uploads.items():
            counts = payload.get(f"{prefix}count")
            if "count" in group.statistics and counts is not None:
                payload = keep_classes(payload, prefix, group, counts >= self.min_class_count)
        return payload

    def _add_noise(self, payload: Payload, trained: Tree, exchange: Exchange) -> Payload:
        """Clip the change of an upload and add noise.

        Raises FczooError for a tensor that is not trained, as it would leave the client without
        protection.
        """
        assert self.clip is not None
        if extra := payload.keys() - trained.keys():
            raise FczooError(
                f"--dp-clip protects only trained parameters, but the method also uploads "
                f"{min(extra)!r}; declare it in training().uploads, and leave --dp-clip out"
            )
        rng = torch_stream(
            "privacy", self.seed, exchange.task.index, exchange.round + 1, payload.client
        )
        change = {k: payload[k] - v.to(payload[k]) for k, v in trained.items() if payload}
        if not payload or not all(v.isfinite().all() for v in change.values()):
            # without a norm to clip the upload is empty, as for a client that diverged
            if not self.secure:
                return payload.holding({})
            # a missing upload would disclose data without noise, and a server's state can cause it
            change = {k: torch.zeros_like(v) for k, v in trained.items()}
        norm = math.sqrt(sum(float(v.double().square().sum()) for v in change.values()))
        out, share = dict(payload), min(1.0, self.clip / norm) if norm else 1.0
        for name, value in change.items():
            start = trained[name].to(value)
            if self.secure:  # rounds after the noise, so large values of a server cannot grow it
                noise = self.noise * self.clip * secure_normal(value.double())
                out[name] = (start.double() + (share * value.double() + noise)).to(value)
            else:
                out[name] = start + share * value + self.noise * self.clip * _normal(value, rng)
        return payload.holding(out)


def _normal(like: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=rng, dtype=like.dtype).to(like.device)


def secure_normal(like: Tensor) -> Tensor:
    """Draw standard normal numbers of the tensor's shape from the system's cryptographic source.

    It uses the Box-Muller transform. As with any noise in floating point, the theory does not cover
    the last bits.
    """
    integers = np.frombuffer(os.urandom(16 * like.numel()), np.uint64).reshape(2, -1)
    radius, angle = ((integers >> np.uint64(11)) + 0.5) / 2**53  # uniform in (0, 1)
    normal = np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)
    return torch.from_numpy(normal).reshape(like.shape).to(like)


@cache  # a server that resumes, and each seed of a sweep, asks for the same one
def epsilon(noise: float, uploads: int, delta: float) -> float:
    """Compute epsilon of (epsilon, delta)-differential privacy towards the server, per client.

    It covers all data of one client. The compared runs differ in all that this client holds, so its
    clipped update moves by up to 2 C. Thus noise z C is a Gaussian mechanism of multiplier z / 2,
    composed over ``uploads``. Sampling of clients does not lower epsilon, since the server knows
    the participants. The number of samples n_k counts as public. Without noise epsilon is infinite.
    Raises FczooError if the accountant is not installed.
    """
    if not noise:
        return math.inf
    accounting = _accounting()
    accountant = accounting.pld.PLDAccountant()
    accountant.compose(accounting.GaussianDpEvent(noise / 2), uploads)
    return float(accountant.get_epsilon(delta))


def composed_epsilon(uploads: Iterable[tuple[float, int]], delta: float) -> float:
    """Compute epsilon of uploads with different noise; equal to ``epsilon`` for equal noise.

    Gaussian mechanisms of multipliers m_i compose to one of 1 / sqrt(sum 1 / m_i^2), whose delta of
    epsilon is known exactly (Balle and Wang, "Improving the Gaussian Mechanism for Differential
    Privacy", ICML 2018, theorem 8). Here m = noise / 2, see ``epsilon``.

    Args:
        uploads: Pairs of a noise, in clipping norms, and its number of uploads.
        delta: Delta of the guarantee.

    Returns:
        Epsilon; 0 without uploads.
    """
    shift = math.sqrt(sum(count * (2 / noise) ** 2 for noise, count in uploads))  # 1 / m
    if not shift:
        return 0.0

    def delta_of(value: float) -> float:
        tail = _normal_below(-shift / 2 - value / shift)
        subtrahend = math.exp(value + math.log(tail)) if tail else 0.0
        return _normal_below(shift / 2 - value / shift) - subtrahend

    low, high = 0.0, 1.0
    while delta_of(high) > delta:
        high *= 2
    for _ in range(100):
        midpoint = (low + high) / 2
        low, high = (midpoint, high) if delta_of(midpoint) > delta else (low, midpoint)
    return high


def _normal_below(x: float) -> float:
    """Return the probability that a standard normal number is below x."""
    return math.erfc(-x / math.sqrt(2)) / 2


def sampled_epsilon(noise: float, draws: Sequence[Draw], delta: float) -> float:
    """Compute epsilon towards an observer who sees neither the drawn clients nor the senders.

    This requires a trusted party that draws the clients and forwards their uploads without names.
    The list of clients with data of a task is public. Between two runs the data of one client are
    replaced, and the draws are without replacement (Wang, Balle and Kasiviswanathan, AISTATS 2019,
    theorem 27).
    """
    accounting = _accounting()
    accountant = accounting.rdp.RdpAccountant(
        neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE
    )
    for draw in (d for d in draws if d.times and d.uploads):
        event = accounting.SelfComposedDpEvent(accounting.GaussianDpEvent(noise / 2), draw.uploads)
        if draw.sample_size < draw.clients:
            event = accounting.SampledWithoutReplacementDpEvent(
                draw.clients, draw.sample_size, event
            )
        accountant.compose(event, draw.times)
    return float(accountant.get_epsilon(delta))


def _accounting() -> Any:
    try:
        import dp_accounting
        from dp_accounting import pld, rdp  # noqa: F401
    except ImportError:
        raise FczooError(
            "the accountant for --dp-noise is not installed; run pip install 'fczoo[privacy]'"
        ) from None
    return dp_accounting
