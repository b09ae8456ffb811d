"""What uploads disclose, and two ways to disclose less.

Statistics of rare classes are withheld; updates are clipped and made noisy.
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.method import Method, Surveys
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
from fczoo.core.tree import Tree, nbytes
from fczoo.core.types import Exchange, Training

LEAST_NOISE = 0.5  # times the clipping norm

DISCLOSES: dict[Content, str] = {
    "parameters": "no sample directly, but changes of weights can be inverted when batches are small, and "
    "show whether an image took part",
    "counts": "which classes a client has, and how many images of each",
    "class means": "the typical image of each class in feature space; of a class with one image, that "
    "image's feature",
    "class variances": "how the client's images of a class spread in feature space",
    "second moments": "how the client's features spread and move together, over all its classes or in each",
    "gradients of single images": "the images themselves: a gradient of one image can be inverted to its "
    "label and pixels",
}


def disclosed(training: Training, sent: Payload) -> list[tuple[Content, list[str], str]]:
    """What is uploaded, by kind: content, names of its tensors, and what a server could learn from it."""
    by_content: dict[Content, list[str]] = {}
    for name in sent:
        content = content_of(name, training.trained, training.uploads)
        by_content.setdefault(content or "parameters", []).append(name)
    return [
        (content, by_content[content], DISCLOSES[content]) for content in DISCLOSES if content in by_content
    ]


def bytes_by_content(training: Training, sent: Sequence[Payload]) -> dict[str, int]:
    """Size of uploads, by what they tell; sender and number of images count as counts."""
    size = Counter[str]()
    for payload in sent:
        if payload:
            size["counts"] += HEADER_BYTES
        for content, names, _ in disclosed(training, payload):
            size[content] += nbytes({name: payload[name] for name in names})
    return dict(size)


class Draw(NamedTuple):
    """``times`` draws of ``drawn`` out of ``clients`` without replacement, each for so many uploads."""

    clients: int
    drawn: int
    uploads: int
    times: int


@dataclass(frozen=True)
class Privacy:
    """What every client does to its uploads before it sends them.

    With ``clip`` C and ``noise`` z, the change of the trained tensors, as one vector, is shortened to norm
    C, and N(0, (z C)^2) is added to each of its coordinates: the server itself sees no more than that.
    """

    seed: int
    least: int = 1  # images of a class without which its statistics are withheld
    clip: float | None = None
    noise: float = 0.0
    delta: float = 1e-5
    secure: bool = False  # noise from the system's cryptographic source instead of the seed's generator
    subsampling: bool = False  # epsilon as if nobody saw who is drawn

    def check(self, method: Method) -> None:
        """Raise FczooError where a promise could not be kept for the method's uploads."""
        if self.noise and self.clip is None:
            raise FczooError(
                "--dp-noise needs --dp-clip: without a largest norm no noise bounds what is disclosed"
            )
        if 0 < self.noise < LEAST_NOISE:
            raise FczooError(
                f"--dp-noise {self.noise:g} protects nobody, epsilon would be in the hundreds; "
                f"give {LEAST_NOISE} or more, or leave it out"
            )
        if self.secure and not self.noise:
            raise FczooError("--dp-secure says where noise comes from, and there is none; give --dp-noise")
        if self.subsampling and not self.noise:
            raise FczooError(
                "--dp-subsampling is about epsilon, and without noise there is none; give --dp-noise"
            )
        uploads = method.training().uploads
        others: set[str] = {*contents(uploads)}
        named = sorted(others | ({"surveys"} if isinstance(method, Surveys) and method.surveys() else set()))
        if self.clip is not None and named:
            raise FczooError(
                f"--dp-clip covers updates of parameters, but {method.name} also uploads {', '.join(named)}; "
                f"take a method that does not"
            )
        undivided = {"class means", "class variances"} & {g.content for g in uploads.values()}
        undivided |= {"second moments"} & others
        if self.least > 1 and undivided:
            raise FczooError(
                f"--min-class-count cannot look into the {min(undivided)} over all classes that "
                f"{method.name} uploads; leave it at 1"
            )
        bare = [p for p, group in uploads.items() if group.statistics and "count" not in group.statistics]
        if self.least > 1 and bare:
            raise FczooError(
                f"--min-class-count needs counts beside {bare[0]} in the uploads of {method.name}, "
                f"which has none; leave it at 1"
            )

    def promise(self, draws: Sequence["Draw"]) -> dict[str, float]:
        """Epsilon and delta for a client that takes part whenever it can; empty without noise."""
        if not self.noise:
            return {}
        found = epsilon(self.noise, sum(d.uploads * d.times for d in draws), self.delta)
        if self.subsampling:
            found = min(found, sampled_epsilon(self.noise, draws, self.delta))
        return {"epsilon": found, "delta": self.delta}

    def protect(
        self, payloads: Sequence[Payload], trained: Tree, training: Training, exchange: Exchange
    ) -> list[Payload]:
        """The uploads of a round or survey as clients send them; ``trained`` is what they started from."""
        out = [self._withheld(p, training.uploads) if self.least > 1 and p else p for p in payloads]
        return out if self.clip is None else [self._noisy(p, trained, exchange) if p else p for p in out]

    def _withheld(self, payload: Payload, uploads: Uploads) -> Payload:
        for prefix, group in uploads.items():
            counts = payload.get(f"{prefix}count")
            if "count" in group.statistics and counts is not None:
                payload = keep_classes(payload, prefix, group, counts >= self.least)
        return payload

    def _noisy(self, payload: Payload, trained: Tree, exchange: Exchange) -> Payload:
        """Raises FczooError for a tensor that is not trained: it would leave the client as it is."""
        assert self.clip is not None
        if bare := payload.keys() - trained.keys():
            raise FczooError(
                f"--dp-clip covers updates of parameters, but {min(bare)!r} is uploaded, too, and would go "
                f"unprotected; declare what the method sends in training().uploads, or leave --dp-clip out"
            )
        rng = torch_stream("privacy", self.seed, exchange.task.index, exchange.round + 1, payload.client)
        change = {k: payload[k] - v.to(payload[k]) for k, v in trained.items()}
        if not all(v.isfinite().all() for v in change.values()):
            return payload.holding(
                {}
            )  # it has no norm to clip; nothing is sent, as from a client that diverged
        norm = math.sqrt(sum(float(v.double().square().sum()) for v in change.values()))
        out, share = dict(payload), min(1.0, self.clip / norm) if norm else 1.0
        for name, value in change.items():
            noise = secure_normal(value) if self.secure else _normal(value, rng)
            out[name] = trained[name].to(value) + share * value + self.noise * self.clip * noise
        return payload.holding(out)


def _normal(like: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=rng, dtype=like.dtype).to(like.device)


def secure_normal(like: Tensor) -> Tensor:
    """Standard normal numbers of the tensor's shape, from the system's cryptographic source.

    By Box and Muller's transform. As with any noise in floating point, their last bits are not covered by
    the theory.
    """
    words = np.frombuffer(os.urandom(16 * like.numel()), np.uint64).reshape(2, -1)
    radius, angle = ((words >> np.uint64(11)) + 0.5) / 2**53  # uniform in (0, 1)
    normal = np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)
    return torch.from_numpy(normal).reshape(like.shape).to(like)


def epsilon(noise: float, uploads: int, delta: float) -> float:
    """Epsilon of (epsilon, delta)-differential privacy towards the server, for all data of one client.

    Two runs that differ in everything that one client holds: its clipped update moves by up to 2 C, so
    noise z C is a Gaussian mechanism of multiplier z / 2, composed over ``uploads``. Sampling of clients is
    not counted in its favour, since the server knows who takes part; the number of samples n_k is taken as
    public. Infinite without noise. Raises FczooError when the accountant is not installed.
    """
    if not noise:
        return math.inf
    accounting = _accounting()
    accountant = accounting.pld.PLDAccountant()
    accountant.compose(accounting.GaussianDpEvent(noise / 2), uploads)
    return float(accountant.get_epsilon(delta))


def sampled_epsilon(noise: float, draws: Sequence[Draw], delta: float) -> float:
    """The same towards one who does not see which clients are drawn, nor from whom an upload comes.

    That takes a trusted party that draws the clients and passes on their uploads without a name; who has
    data of a task is public. Between two runs one client's data are replaced, and the draws are without
    replacement (Wang, Balle and Kasiviswanathan, AISTATS 2019, theorem 27).
    """
    accounting = _accounting()
    accountant = accounting.rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
    for draw in (d for d in draws if d.times and d.uploads):
        event = accounting.SelfComposedDpEvent(accounting.GaussianDpEvent(noise / 2), draw.uploads)
        if draw.drawn < draw.clients:
            event = accounting.SampledWithoutReplacementDpEvent(draw.clients, draw.drawn, event)
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
