"""Clients that want to spoil the model: what they upload, or learn from, in place of the truth."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.options import check_options, option
from fczoo.core.payload import Content, Payload, content_of
from fczoo.core.registry import ATTACKS, register_attack
from fczoo.core.seeds import numpy_stream, torch_stream
from fczoo.core.tree import Tree
from fczoo.core.types import Exchange, Training
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream
from fczoo.data.views import ImageStore

# Counts and variances stay: a server would notice false ones.
FORGED: tuple[Content, ...] = ("parameters", "class means")


@dataclass(frozen=True)
class Attack:
    """What an attacker does with the honest change of one tensor."""

    flips = False  # true: it learns from false labels instead

    def __post_init__(self) -> None:
        check_options(self)

    def forge(self, change: Tensor, rng: torch.Generator) -> Tensor:
        """The change that is uploaded in place of the honest one."""
        return change


@register_attack("sign-flip")
@dataclass(frozen=True)
class SignFlip(Attack):
    """Uploads the opposite of what it has learned: -factor x."""

    factor: float = option(1.0, "length of the false change, honest changes", low=0)

    def forge(self, change: Tensor, rng: torch.Generator) -> Tensor:
        return -self.factor * change


@register_attack("scale")
@dataclass(frozen=True)
class Scale(Attack):
    """Uploads its own change many times over, so that it outweighs the others: factor x."""

    factor: float = option(10.0, "factor on the honest change", low=0)

    def forge(self, change: Tensor, rng: torch.Generator) -> Tensor:
        return self.factor * change


@register_attack("gaussian")
@dataclass(frozen=True)
class Gaussian(Attack):
    """Uploads noise in place of its change, as long as it on average over the tensor, times a factor."""

    factor: float = option(10.0, "noise's standard deviation, root mean squares of the honest change", low=0)

    def forge(self, change: Tensor, rng: torch.Generator) -> Tensor:
        size = self.factor * change.square().mean().sqrt() if change.numel() else 0.0
        return size * torch.randn(change.shape, generator=rng, dtype=change.dtype).to(change.device)


@register_attack("label-flip")
@dataclass(frozen=True)
class LabelFlip(Attack):
    """Learns honestly from false labels: class i of a task's c classes is called c - 1 - i."""

    flips = True


@dataclass(frozen=True)
class Attackers:
    """The hostile clients of a run: the same ones throughout, drawn from the run's seed."""

    attack: Attack
    numbers: frozenset[int]
    training: Training  # with all that clients upload
    seed: int

    @staticmethod
    def draw(spec: str | None, part: float, clients: int, training: Training, seed: int) -> "Attackers":
        """Attackers by a spec such as ``scale:100``, and none without one.

        Raises FczooError for an unknown attack, and for one that nobody would carry out.
        """
        if not spec:
            return Attackers(Attack(), frozenset(), training, seed)
        attack, count = ATTACKS.create(spec), round(part * clients)
        if not count:
            raise FczooError(
                f"--attackers {part:g} of {clients} clients is nobody, so --attack {spec} would do nothing; "
                f"give --attackers {1 / clients:.2g} or more, or leave --attack out"
            )
        order = numpy_stream("attackers", seed).permutation(clients)
        return Attackers(attack, frozenset(order[:count].tolist()), training, seed)

    def check(self, partition: Partition) -> None:
        """Raise FczooError where clients share images and false labels would reach honest ones with them."""
        if not self.attack.flips:
            return
        images = [np.unique(np.concatenate(own)) for own in zip(*partition.tasks, strict=True)]
        if shared := sum(map(len, images)) - len(np.unique(np.concatenate(images))):
            raise FczooError(
                f"under --partition {partition.spec} clients share images ({shared} more than there are), so "
                "--attack label-flip would give honest clients false labels, too; give a partition without, "
                "such as dirichlet:0.5 or iid, or another attack"
            )

    def forge(self, payloads: Sequence[Payload], shared: Tree, exchange: Exchange) -> list[Payload]:
        """The uploads of a round or survey as they arrive; ``shared`` is what the server had sent."""
        return [self._forged(p, shared, exchange) if p and p.client in self.numbers else p for p in payloads]

    def store(self, stream: Stream, partition: Partition, honest: ImageStore) -> ImageStore:
        """The images from which the run's clients learn: the honest ones, or some with false labels."""
        return honest.relabelled(self.mislabel(stream, partition)) if self.attack.flips else honest

    def mislabel(self, stream: Stream, partition: Partition) -> np.ndarray:
        """Labels of the training images [N], those of the attackers' images false.

        Raises FczooError as ``check`` does.
        """
        self.check(partition)
        labels = stream.train.labels.copy()
        false = np.zeros(len(labels), dtype=bool)  # once and for all: an image may be of several stages
        for task, parts in zip(stream.tasks, partition.tasks, strict=True):
            own = np.isin(stream.train_index, np.concatenate([parts[k] for k in sorted(self.numbers)]))
            own &= ~false & (stream.train.labels >= task.start) & (stream.train.labels < task.stop)
            labels[own] = task.start + task.stop - 1 - labels[own]
            false |= own
        return labels

    def _forged(self, payload: Payload, shared: Tree, exchange: Exchange) -> Payload:
        rng = torch_stream("attack", self.seed, exchange.task.index, exchange.round + 1, payload.client)
        out = dict(payload)
        for name, value in payload.items():
            content = content_of(name, self.training.trained, self.training.uploads)
            if value.is_floating_point() and content in FORGED:
                sent = name in shared and shared[name].shape == value.shape
                before = shared[name].to(value) if sent else torch.zeros_like(value)
                out[name] = before + self.attack.forge(value - before, rng)
        return payload.holding(out)
