"""Data-free synthesis of images that a model classifies (TARGET, Zhang et al., ICCV 2023).

The generator learns to make images that the model (the teacher) assigns to given classes, and for
which the student's probabilities still differ. The student learns from the teacher on all images
of the rounds so far.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._target_generator import generate_images, image_generator
from fczoo.core.tree import Tree

BETAS = (0.5, 0.999)  # of Adam, for generator and noise
STUDENT_TEMPERATURE = 20.0  # T at which the student learns from the teacher

Answers = Callable[[Tensor], Tensor]
"""Function from images [B, 3, S, S] in [0, 1] to logits [B, C] over the classes seen so far."""


@dataclass(frozen=True)
class SynthesisConfig:
    """Hyper-parameters of image synthesis."""

    synthesis_rounds: int
    synthesis_batch: int  # images per round
    warmup: int  # round from which the student is an adversary
    steps: int  # of the generator, per round
    noise: int  # noise values per image
    width: int  # of the generator
    lr_generator: float
    lr_noise: float
    match: float  # weight of the teacher's cross-entropy
    disagree: float  # weight of KL(teacher || student), which is maximised
    student_steps: int  # per round
    student_lr: float


def synthesise_images(
    config: SynthesisConfig,
    teacher: Answers,
    student: Callable[[Tree, Tensor], Tensor],
    start: Mapping[str, Tensor],
    classes: int,
    size: int,
    rng: torch.Generator,
) -> Tensor:
    """Synthesise images, one batch per round of synthesis.

    Args:
        config: Hyper-parameters.
        teacher: Function from images to the teacher's logits.
        student: Function from weights and images to the student's logits.
        start: Initial weights of the student.
        classes: Number of classes C; labels are drawn from 0 to C - 1.
        size: Height and width S of the images, pixels.
        rng: Random generator.

    Returns:
        Images [N, 3, S, S], bytes.
    """
    # Base generator with its meta-optimizer, and the student with its optimizer.
    like = next(iter(start.values()))
    base = image_generator(config.noise, config.width, size, rng)
    base = {k: v.to(like).requires_grad_() for k, v in base.items()}
    outer = torch.optim.Adam(base.values(), config.lr_generator * config.steps, betas=BETAS)
    weights = {k: v.detach().clone().requires_grad_() for k, v in start.items()}
    optimizer = torch.optim.SGD(
        weights.values(), config.student_lr, momentum=0.9, weight_decay=1e-4
    )
    batches: list[Tensor] = []
    for number in range(1, config.synthesis_rounds + 1):
        # One round: noise z ~ N(0, I), random labels; from round ``warmup`` on the student is the
        # adversary.
        z = torch.randn(config.synthesis_batch, config.noise, generator=rng, device=rng.device).to(
            like
        )
        labels = torch.randint(classes, (config.synthesis_batch,), generator=rng, device=rng.device)
        adversary = {k: v.detach() for k, v in weights.items()} if number >= config.warmup else None

        def objective(
            images: Tensor, labels: Tensor = labels, adversary: Tree | None = adversary
        ) -> Tensor:
            # L_G = lambda_m L_ce - lambda_d KL(p^T || p^S).
            logits = teacher(images)
            loss = config.match * F.cross_entropy(logits, labels)
            if adversary is None:
                return loss
            return loss - config.disagree * disagreement(logits, student(adversary, images))

        images = synthesis_round(base, outer, z, objective, config, size)
        batches.append((images.clamp(0, 1) * 255).round().to(torch.uint8))
        # After the warm-up: distil the teacher into the student on all images so far.
        if number > config.warmup:
            pool = torch.cat(batches)
            for _ in range(config.student_steps):
                indices = torch.randint(
                    len(pool), (config.synthesis_batch,), generator=rng, device=rng.device
                )
                distil_student(weights, optimizer, pool[indices].to(like) / 255, teacher, student)
    return torch.cat(batches)


def synthesis_round(
    base: Tree,
    outer: torch.optim.Optimizer,
    z: Tensor,
    objective: Callable[[Tensor], Tensor],
    config: SynthesisConfig,
    size: int,
) -> Tensor:
    """Train the generator for one round and return its best batch of images.

    The steps update a copy of the generator and the noise. Then ``outer`` updates the generator
    ``base`` once, with the sum of the copy's gradients (first-order MAML).

    Args:
        base: Weights of the generator, changed in place.
        outer: Optimizer of ``base``.
        z: Noise [B, noise].
        objective: Loss of a batch of images.
        config: Hyper-parameters.
        size: Height and width S of the images, pixels.

    Returns:
        Images [B, 3, S, S] of the step with the lowest ``objective``.
    """
    # Inner loop: Adam on the fast copy and on z; the batch with the lowest loss is returned.
    fast = {k: v.detach().clone().requires_grad_() for k, v in base.items()}
    z = z.detach().clone().requires_grad_()
    groups: list[dict[str, Any]] = [
        {"params": list(fast.values())},
        {"params": [z], "lr": config.lr_noise},
    ]
    inner = torch.optim.Adam(groups, config.lr_generator, betas=BETAS)
    outer.zero_grad()
    lowest, best = float("inf"), generate_images(fast, z, size).detach()
    for _ in range(config.steps):
        images = generate_images(fast, z, size)
        loss = objective(images)
        if float(loss.detach()) <= lowest:
            lowest, best = float(loss.detach()), images.detach()
        inner.zero_grad()
        loss.backward()
        # FOMAML: add this step's gradient to that of the base generator.
        for name, leaf in base.items():
            gradient = fast[name].grad
            leaf.grad = gradient if leaf.grad is None or gradient is None else leaf.grad + gradient
        inner.step()
    outer.step()
    return best


def disagreement(teacher: Tensor, student: Tensor) -> Tensor:
    """Compute the mean over images of KL(teacher || student), where both predict the same class.

    Args:
        teacher: Logits of the teacher [B, C].
        student: Logits of the student [B, C].

    Returns:
        The mean; images with different predictions count as 0.
    """
    agree = teacher.argmax(1) == student.argmax(1)
    return (divergence(teacher, student, 1.0) * agree).mean()


def divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Compute the divergence T^2 KL(q || p) of each image.

    q is the softmax of the teacher's logits over T, p that of the student's.

    Args:
        teacher: Logits of the teacher [B, C].
        student: Logits of the student [B, C].
        temperature: Temperature T.

    Returns:
        Divergences [B].
    """
    log_p, log_q = ((z / temperature).log_softmax(-1) for z in (student, teacher))
    return temperature**2 * (log_q.exp() * (log_q - log_p)).sum(-1)


def distil_student(
    weights: Tree,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    teacher: Answers,
    student: Callable[[Tree, Tensor], Tensor],
) -> None:
    """Train the student for one step, with its gradient clipped to norm 1.

    Args:
        weights: Weights of the student, changed in place.
        optimizer: Optimizer of the weights.
        images: Images [B, 3, S, S] in [0, 1].
        teacher: Function from images to the teacher's logits.
        student: Function from weights and images to the student's logits.
    """
    with torch.no_grad():
        target = teacher(images)
    optimizer.zero_grad()
    divergence(target, student(weights, images), STUDENT_TEMPERATURE).mean().backward()
    torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
    optimizer.step()
