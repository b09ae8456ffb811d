"""Attacks: hostile clients that upload false changes, or learn from false labels."""

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
from fczoo.core.training import Training
from fczoo.core.tree import Tree
from fczoo.core.types import Exchange
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream
from fczoo.data.views import ImageStore

# Counts and variances do not change: a server would detect false ones.
FORGED_CONTENTS: tuple[Content, ...] = ("parameters", "class means")


@dataclass(frozen=True)
class Attack:
    """Attack on the honest change of one tensor."""

    flips = False  # true: the client learns from false labels instead

    def __post_init__(self) -> None:
        check_options(self)

    def forge(self, change: Tensor, rng: torch.Generator) -> Tensor:
        """Return the change that is uploaded in place of the honest one."""
        return change


@register_attack("sign-flip")
@dataclass(frozen=True)
class SignFlip(Attack):
    """Upload of the learned change x with the opposite sign: -factor * x."""

    factor: float = option(1.0, "length of the false change, relative to the honest one", low=0)

    def forge(self, change: Tensor, rng: torch.Generator) -> Tensor:
        return -self.factor * change


@register_attack("scale")
@dataclass(frozen=True)
class Scale(Attack):
    """Upload of factor * x, where x is the learned change, to outweigh the other clients."""

    factor: float = option(10.0, "factor on the honest change", low=0)

    def forge(self, change: Tensor, rng: torch.Generator) -> Tensor:
        return self.factor * change


@register_attack("gaussian")
@dataclass(frozen=True)
class Gaussian(Attack):
    """Upload of noise in place of the learned change.

    Its standard deviation is ``factor`` times the root mean square of the honest change.
    """

    factor: float = option(
        10.0,
        "standard deviation of the noise, relative to the root mean square of the honest change",
        low=0,
    )

    def forge(self, change: Tensor, rng: torch.Generator) -> Tensor:
        size = self.factor * change.square().mean().sqrt() if change.numel() else 0.0
        return size * torch.randn(change.shape, generator=rng, dtype=change.dtype).to(change.device)


@register_attack("label-flip")
@dataclass(frozen=True)
class LabelFlip(Attack):
    """Honest learning from false labels: class i of a task's c classes becomes c - 1 - i."""

    flips = True


@dataclass(frozen=True)
class Attackers:
    """Hostile clients of a run, drawn from the run's seed and the same in all rounds."""

    attack: Attack
    numbers: frozenset[int]
    training: Training  # with all that clients upload
    seed: int

    @staticmethod
    def draw(
        spec: str | None, part: float, clients: int, training: Training, seed: int
    ) -> "Attackers":
        """Draw the attackers by a spec such as ``scale:100``; none without a spec.

        Raises FczooError if the attack is unknown, or if no client would perform it.
        """
        if not spec:
            return Attackers(Attack(), frozenset(), training, seed)
        attack, count = ATTACKS.create(spec), round(part * clients)
        if not count:
            raise FczooError(
                f"--attackers {part:g} of {clients} clients selects no client, so --attack {spec} "
                f"would do nothing; give --attackers {1 / clients:.2g} or more, or leave --attack "
                "out"
            )
        order = numpy_stream("attackers", seed).permutation(clients)
        return Attackers(attack, frozenset(order[:count].tolist()), training, seed)

    def check(self, partition: Partition) -> None:
        """Raise FczooError if false labels would reach honest clients through shared images."""
        if not self.attack.flips:
            return
        images = [np.unique(np.concatenate(parts)) for parts in zip(*partition.tasks, strict=True)]
        if sum(map(len, images)) > len(np.unique(np.concatenate(images))):
            raise FczooError(
                f"with --partition {partition.spec} clients share images, so --attack label-flip "
                "would also flip labels of honest clients; use a partition without shared images, "
                "such as dirichlet:0.5, or another attack"
            )

    def forge(self, payloads: Sequence[Payload], shared: Tree, exchange: Exchange) -> list[Payload]:
        """Return the uploads of an exchange, with those of the attackers forged.

        ``shared`` are the tensors of the server's broadcast.
        """
        return [
            self._forge_upload(p, shared, exchange) if p and p.client in self.numbers else p
            for p in payloads
        ]

    def store(self, stream: Stream, partition: Partition, honest: ImageStore) -> ImageStore:
        """Return the images from which clients learn: honest ones, or some with false labels."""
        return honest.with_labels(self.mislabel(stream, partition)) if self.attack.flips else honest

    def mislabel(self, stream: Stream, partition: Partition) -> np.ndarray:
        """Return the labels of the training images [N], with false ones for the attackers' images.

        Raises FczooError as ``check`` does.
        """
        self.check(partition)
        labels = stream.train.labels.copy()
        # flip each label only once, as an image can belong to several stages
        false = np.zeros(len(labels), dtype=bool)
        for task, parts in zip(stream.tasks, partition.tasks, strict=True):
            to_flip = np.isin(
                stream.train_index, np.concatenate([parts[k] for k in sorted(self.numbers)])
            )
            to_flip &= (
                ~false & (stream.train.labels >= task.start) & (stream.train.labels < task.stop)
            )
            labels[to_flip] = task.start + task.stop - 1 - labels[to_flip]
            false |= to_flip
        return labels

    def _forge_upload(self, payload: Payload, shared: Tree, exchange: Exchange) -> Payload:
        rng = torch_stream(
            "attack", self.seed, exchange.task.index, exchange.round + 1, payload.client
        )
        out = dict(payload)
        for name, value in payload.items():
            content = content_of(name, self.training.trained_prefixes, self.training.uploads)
            if value.is_floating_point() and content in FORGED_CONTENTS:
                is_shared = name in shared and shared[name].shape == value.shape
                start = shared[name].to(value) if is_shared else torch.zeros_like(value)
                out[name] = start + self.attack.forge(value - start, rng)
        return payload.holding(out)
