"""Data-free synthesis of images that a model classifies (TARGET, Zhang et al., ICCV 2023).

The generator learns to make images of given classes under the model, the teacher, on which the
student still disagrees. The student learns from the teacher on the images of earlier rounds.
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
    warmup: int  # rounds before the student takes part
    steps: int  # of the generator, per round
    noise: int  # noise values per image
    width: int  # of the generator
    lr_generator: float
    lr_noise: float
    match: float  # weight of the cross-entropy under the teacher
    disagree: float  # weight of the student's disagreement
    student_steps: int  # per round
    student_lr: float


def synthesise_images(
    making: SynthesisConfig,
    teacher: Answers,
    student: Callable[[Tree, Tensor], Tensor],
    start: Mapping[str, Tensor],
    classes: int,
    size: int,
    rng: torch.Generator,
) -> Tensor:
    """Synthesise images, one batch per round of synthesis.

    Args:
        making: Hyper-parameters.
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
    base = image_generator(making.noise, making.width, size, rng)
    base = {k: v.to(like).requires_grad_() for k, v in base.items()}
    outer = torch.optim.Adam(base.values(), making.lr_generator * making.steps, betas=BETAS)
    pupil = {k: v.detach().clone().requires_grad_() for k, v in start.items()}
    optimizer = torch.optim.SGD(pupil.values(), making.student_lr, momentum=0.9, weight_decay=1e-4)
    batches: list[Tensor] = []
    for number in range(1, making.synthesis_rounds + 1):
        # One round: noise z ~ N(0, I), random labels, and from the warm-up on the student as rival.
        z = torch.randn(making.synthesis_batch, making.noise, generator=rng, device=rng.device).to(
            like
        )
        labels = torch.randint(classes, (making.synthesis_batch,), generator=rng, device=rng.device)
        rival = {k: v.detach() for k, v in pupil.items()} if number >= making.warmup else None

        def objective(
            images: Tensor, labels: Tensor = labels, rival: Tree | None = rival
        ) -> Tensor:
            # L_G = lambda_m L_ce - lambda_d KL(p^T || p^S).
            logits = teacher(images)
            loss = making.match * F.cross_entropy(logits, labels)
            if rival is None:
                return loss
            return loss - making.disagree * disagreement(logits, student(rival, images))

        images = synthesis_round(base, outer, z, objective, making, size)
        batches.append((images.clamp(0, 1) * 255).round().to(torch.uint8))
        # After the warm-up: distil the teacher into the student on all images so far.
        if number > making.warmup:
            pool = torch.cat(batches)
            for _ in range(making.student_steps):
                indices = torch.randint(
                    len(pool), (making.synthesis_batch,), generator=rng, device=rng.device
                )
                distil_student(pupil, optimizer, pool[indices].to(like) / 255, teacher, student)
    return torch.cat(batches)


def synthesis_round(
    base: Tree,
    outer: torch.optim.Optimizer,
    z: Tensor,
    objective: Callable[[Tensor], Tensor],
    making: SynthesisConfig,
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
        making: Hyper-parameters.
        size: Height and width S of the images, pixels.

    Returns:
        Images [B, 3, S, S] of the step with the lowest ``objective``.
    """
    # Inner loop: Adam on the fast copy and on z; the batch with the lowest loss is returned.
    fast = {k: v.detach().clone().requires_grad_() for k, v in base.items()}
    z = z.detach().clone().requires_grad_()
    groups: list[dict[str, Any]] = [
        {"params": list(fast.values())},
        {"params": [z], "lr": making.lr_noise},
    ]
    inner = torch.optim.Adam(groups, making.lr_generator, betas=BETAS)
    outer.zero_grad()
    lowest, best = float("inf"), generate_images(fast, z, size).detach()
    for _ in range(making.steps):
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
    pupil: Tree,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    teacher: Answers,
    student: Callable[[Tree, Tensor], Tensor],
) -> None:
    """Train the student for one step, with its gradient clipped to norm 1.

    Args:
        pupil: Weights of the student, changed in place.
        optimizer: Optimizer of the weights.
        images: Images [B, 3, S, S] in [0, 1].
        teacher: Function from images to the teacher's logits.
        student: Function from weights and images to the student's logits.
    """
    with torch.no_grad():
        target = teacher(images)
    optimizer.zero_grad()
    divergence(target, student(pupil, images), STUDENT_TEMPERATURE).mean().backward()
    torch.nn.utils.clip_grad_norm_(pupil.values(), 1.0)
    optimizer.step()
