"""Synthesis of images around anchors at the server (LANDER, Tran et al., CVPR 2024).

Rounds of the generator and steps of the student alternate. The student is the adversary: the
generator searches for images on which student and teacher still disagree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._data_free_replay import Model, Moments, Reply, layer_distance, mix_moments
from fczoo.baselines._lander_generator import (
    balanced_labels,
    crop_and_flip,
    input_layers,
    lander_generator,
    lander_images,
)
from fczoo.baselines._target_synthesis import BETAS, STUDENT_TEMPERATURE, disagreement, divergence
from fczoo.core.options import option
from fczoo.core.tree import Tree

STUDENT_DECAY = 2e-4
STUDENT_BATCH = 128

StudentModel = Callable[[Tree, Tensor], Reply]
"""Function from weights and normalised images to the student's reply."""


@dataclass(frozen=True)
class SynthesisOptions:
    """Hyper-parameters of the image synthesis at the server."""

    anchor_weight: float = option(
        5.0, "lambda, weight of the distance to the anchors", low=0, tune=(0.1, 100, "log")
    )
    prior_weight: float = option(1.0, "weight of the activation moments, with prior=survey", low=0)
    images: int = option(10_000, "maximum number of synthetic images sent to each client", low=1)
    synthesis_rounds: int = option(50, "rounds of image synthesis per task", low=1)
    synthesis_batch: int = option(256, "images per round of synthesis", low=2)
    warmup: int = option(10, "first round whose images are kept and train the student", low=1)
    steps: int = option(40, "optimizer steps of the generator per round of synthesis", low=1)
    rows: int = option(10, "images after which the generator gets a new input layer", low=1)
    hidden: int = option(256, "output width of each input layer", low=1)
    width: int = option(64, "channels of the generator's last hidden layer", low=1)
    lr_generator: float = option(2e-3, "learning rate of the generator, Adam", low=0)
    lr_normalise: float = option(1e-2, "learning rate of the learned image normalisation", low=0)
    match: float = option(0.5, "weight of the teacher's cross-entropy on generated images", low=0)
    disagree: float = option(1.0, "weight of KL(teacher || student), which is maximised", low=0)
    student_steps: int = option(50, "training steps of the student per kept round", low=0)
    student_lr: float = option(2e-3, "learning rate of the student, SGD, momentum 0.9", low=0)
    student_clip: float | None = option(1.0, "student's gradient clip norm; none: off", low=1e-6)

    @property
    def pool_size(self) -> int:
        """Return the number of synthetic images that clients hold in a task."""
        rounds = self.synthesis_rounds - self.warmup + 1
        return min(self.images, rounds * self.synthesis_batch)


@dataclass
class Synthesis:
    """State of the image synthesis that persists over its rounds."""

    generator: Tree
    normalisation: Tree = field(
        default_factory=lambda: {
            "mean": torch.full((3,), 0.5),
            "std": torch.full((3,), 0.2),
        }
    )  # learned, without bounds
    averages: list[Moments] = field(default_factory=list)  # moving averages, per layer


def anchor_distance(attached: Tensor, anchors: Tensor, radius: Tensor) -> Tensor:
    """Compute B(x~) = [mean (a - E_y)^2 - r]_+, a scalar.

    Args:
        attached: Features a [B, e] in the space of the anchors.
        anchors: Anchors [B, e] of their classes.
        radius: Mean squared distance r below which B is 0.
    """
    return ((attached - anchors).square().mean() - radius).clamp(min=0)


def synthesis_round(
    synthesis: Synthesis,
    options: SynthesisOptions,
    teacher: Model,
    student: Model | None,
    targets: tuple[Tensor, Tensor, Tensor],
    prior: Sequence[Moments],
    side: int,
    rng: torch.Generator | None,
) -> Tensor:
    """Train the generator for one round, and return its batch of images with the lowest loss.

    Args:
        synthesis: Generator, normalisation and averages, updated in place.
        options: Hyper-parameters.
        teacher: The model whose task has ended; ``features`` of its reply are a.
        student: The student, for the disagreement term; None: without this term.
        targets: Labels [B], their anchors [B, e] and the radius.
        prior: Moments of the clients' activations, one per compared layer; may be empty.
        side: Height and width of the images, pixels.
        rng: Random generator of the crops; None: images are not cropped.

    Returns:
        Images [B, 3, side, side] in (0, 1) of the step with the lowest loss, before its update.
    """
    labels, anchors, radius = targets
    leaves, normalisation = (
        {k: v.detach().clone().requires_grad_() for k, v in tree.items()}
        for tree in (synthesis.generator, synthesis.normalisation)
    )
    groups = [
        {"params": list(leaves.values()), "lr": options.lr_generator},
        {"params": list(normalisation.values()), "lr": options.lr_normalise},
    ]
    optimizer = torch.optim.Adam(groups, betas=BETAS)
    lowest, best, moments = float("inf"), None, list[Moments]()
    for _ in range(options.steps):
        images = lander_images(leaves, anchors, options.rows, side)
        views = images if rng is None else crop_and_flip(images, rng)
        mean, std = (normalisation[name].view(1, 3, 1, 1) for name in ("mean", "std"))
        views = (views - mean) / std
        reply = teacher(views)
        # L_G, term by term (released: NAYER.synthesize): w_match L_ce of the teacher on the labels;
        # lambda B; -w_dis KL(p^T || p^S), where both predict the same class; w_prior d(layers).
        loss = options.match * F.cross_entropy(reply.logits, labels)
        distance = anchor_distance(reply.features, anchors, radius)
        loss = loss + options.anchor_weight * distance
        if student:
            loss = loss - options.disagree * disagreement(reply.logits, student(views).logits)
        if prior:
            layers = layer_distance(reply.moments, prior, synthesis.averages)
            loss = loss + options.prior_weight * layers
        if best is None or float(loss.detach()) < lowest:
            lowest, best = float(loss.detach()), images.detach()  # the batch before its update
        moments = [Moments(*(value.detach() for value in layer)) for layer in reply.moments]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    synthesis.generator = {k: v.detach() for k, v in leaves.items()}
    synthesis.normalisation = {k: v.detach() for k, v in normalisation.items()}
    synthesis.averages = mix_moments(moments, synthesis.averages)
    assert best is not None  # there is at least one step
    return best


def student_step(
    student: Tree,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    teacher: Model,
    model: StudentModel,
    options: SynthesisOptions,
) -> None:
    """Train the student for one step on T^2 KL (T = 20) + lambda mean (a - a_teacher)^2.

    Args:
        student: Weights of the student, changed in place.
        optimizer: Optimizer of the weights.
        images: Images [B, 3, side, side], normalised.
        teacher: The model whose task has ended.
        model: Function from weights and images to the student's reply.
        options: Hyper-parameters.
    """
    with torch.no_grad():
        target = teacher(images)
    reply = model(student, images)
    loss = divergence(target.logits, reply.logits, STUDENT_TEMPERATURE).mean()  # of all kept images
    loss = loss + options.anchor_weight * F.mse_loss(reply.features, target.features)
    optimizer.zero_grad()
    loss.backward()
    if options.student_clip is not None:
        torch.nn.utils.clip_grad_norm_(student.values(), options.student_clip)
    optimizer.step()


def synthesise_images(
    options: SynthesisOptions,
    teacher: Model,
    model: StudentModel,
    start: Tree,
    table: tuple[Tensor, Tensor],
    classes: int,
    prior: Sequence[Moments],
    side: int,
    normalise: Callable[[Tensor], Tensor],
    rng: torch.Generator,
) -> Tensor:
    """Synthesise images with a new generator, which alternates with steps of the student.

    Args:
        options: Hyper-parameters.
        teacher: The model whose task has ended; ``features`` of its reply are a.
        model: Function from weights and images to the student's reply.
        start: Initial weights of the student.
        table: Anchors [C, e] and the radius.
        classes: Number of classes seen.
        prior: Moments of the clients' activations, one per compared layer; may be empty.
        side: Height and width of the images, pixels.
        normalise: Function that normalises kept images for the student.
        rng: Random generator.

    Returns:
        Images [N, 3, side, side], bytes: those of all rounds from the warm-up on.
    """
    anchors, radius = table
    generator = lander_generator(
        anchors.shape[1],
        options.synthesis_batch,
        options.rows,
        options.hidden,
        options.width,
        side,
        rng,
    )
    synthesis = Synthesis({name: value.to(anchors) for name, value in generator.items()})
    synthesis.normalisation = {k: v.to(anchors) for k, v in synthesis.normalisation.items()}
    weights = {k: v.detach().clone().requires_grad_() for k, v in start.items()}
    kept: list[Tensor] = []
    for number in range(1, options.synthesis_rounds + 1):
        layers, hidden, entries = synthesis.generator["input.weight"].shape
        drawn = input_layers(layers, hidden, entries, rng)  # new layers make rounds differ
        synthesis.generator |= {name: value.to(anchors) for name, value in drawn.items()}
        labels = balanced_labels(options.synthesis_batch, classes, rng)
        # Adversary from round warm-up + 3 on, counted from 1, as in released code.
        frozen = {k: v.detach() for k, v in weights.items()}
        student = partial(model, frozen) if number > options.warmup + 2 else None
        targets = labels, anchors[labels], radius
        images = synthesis_round(synthesis, options, teacher, student, targets, prior, side, rng)
        if number < options.warmup:  # no image is kept yet
            continue
        kept.append((images * 255).round().to(torch.uint8))
        pool = torch.cat(kept)
        optimizer = torch.optim.SGD(
            weights.values(), options.student_lr, momentum=0.9, weight_decay=STUDENT_DECAY
        )
        for _ in range(options.student_steps):
            count = min(STUDENT_BATCH, len(pool))
            picks = torch.randint(len(pool), (count,), generator=rng, device=rng.device)
            views = normalise(pool[picks].to(anchors) / 255)
            student_step(weights, optimizer, views, teacher, model, options)
    return torch.cat(kept)
