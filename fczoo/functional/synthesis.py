"""Images that a model has learned to recognise, made without any image (TARGET, Zhang et al., ICCV 2023).

A generator is trained until the model, the teacher, sees given classes in its images, and until a student,
which learns from the teacher on what was made before, still disagrees.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.tree import Tree
from fczoo.functional.generator import generated, image_generator

BETAS = (0.5, 0.999)  # of Adam, for generator and noise
STUDENT_TEMPERATURE = 20.0  # T at which the student learns from the teacher

Answers = Callable[[Tensor], Tensor]
"""Images [B, 3, S, S] in [0, 1] -> logits [B, C] over the classes seen so far."""


@dataclass(frozen=True)
class Making:
    """How images are made."""

    synthesis_rounds: int
    synthesis_batch: int  # images a round
    warmup: int  # rounds before the student takes part
    steps: int  # of the generator, a round
    noise: int  # numbers of which an image is made
    width: int  # of the generator
    lr_generator: float
    lr_noise: float
    match: float  # weight of the cross-entropy under the teacher
    disagree: float  # weight of the student's disagreement
    student_steps: int  # a round
    student_lr: float


def synthesised(
    making: Making,
    teacher: Answers,
    student: Callable[[Tree, Tensor], Tensor],
    start: Mapping[str, Tensor],
    classes: int,
    size: int,
    rng: torch.Generator,
) -> Tensor:
    """Images [N, 3, S, S], bytes, of labels below ``classes``: a batch in each round of synthesis.

    ``student(weights, images)`` gives the student's logits, whose weights begin at ``start``.
    """
    like = next(iter(start.values()))
    base = image_generator(making.noise, making.width, size, rng)
    base = {k: v.to(like).requires_grad_() for k, v in base.items()}
    outer = torch.optim.Adam(base.values(), making.lr_generator * making.steps, betas=BETAS)
    pupil = {k: v.detach().clone().requires_grad_() for k, v in start.items()}
    optimizer = torch.optim.SGD(pupil.values(), making.student_lr, momentum=0.9, weight_decay=1e-4)
    made: list[Tensor] = []
    for number in range(1, making.synthesis_rounds + 1):
        z = torch.randn(making.synthesis_batch, making.noise, generator=rng, device=rng.device).to(like)
        labels = torch.randint(classes, (making.synthesis_batch,), generator=rng, device=rng.device)
        rival = {k: v.detach() for k, v in pupil.items()} if number >= making.warmup else None

        def objective(images: Tensor, labels: Tensor = labels, rival: Tree | None = rival) -> Tensor:
            found = teacher(images)
            loss = making.match * F.cross_entropy(found, labels)
            if rival is None:
                return loss
            return loss - making.disagree * disagreement(found, student(rival, images))

        images = synthesis_round(base, outer, z, objective, making, size)
        made.append((images.clamp(0, 1) * 255).round().to(torch.uint8))
        if number > making.warmup:
            pool = torch.cat(made)
            for _ in range(making.student_steps):
                drawn = torch.randint(len(pool), (making.synthesis_batch,), generator=rng, device=rng.device)
                distil_student(pupil, optimizer, pool[drawn].to(like) / 255, teacher, student)
    return torch.cat(made)


def synthesis_round(
    base: Tree,
    outer: torch.optim.Optimizer,
    z: Tensor,
    objective: Callable[[Tensor], Tensor],
    making: Making,
    size: int,
) -> Tensor:
    """The batch of images [B, 3, S, S] of the step with the lowest ``objective``.

    A copy of the generator ``base`` and the noise ``z`` [B, noise] take the steps; ``base`` itself takes
    one, by ``outer``, along the sum of the copy's gradients (first-order MAML).
    """
    fast = {k: v.detach().clone().requires_grad_() for k, v in base.items()}
    z = z.detach().clone().requires_grad_()
    groups: list[dict[str, Any]] = [{"params": list(fast.values())}, {"params": [z], "lr": making.lr_noise}]
    inner = torch.optim.Adam(groups, making.lr_generator, betas=BETAS)
    outer.zero_grad()
    lowest, best = float("inf"), generated(fast, z, size).detach()
    for _ in range(making.steps):
        images = generated(fast, z, size)
        loss = objective(images)
        if float(loss.detach()) <= lowest:
            lowest, best = float(loss.detach()), images.detach()
        inner.zero_grad()
        loss.backward()
        for name, leaf in base.items():
            found = fast[name].grad
            leaf.grad = found if leaf.grad is None or found is None else leaf.grad + found
        inner.step()
    outer.step()
    return best


def disagreement(teacher: Tensor, student: Tensor) -> Tensor:
    """Mean over images of KL(teacher || student) of logits [B, C], where both give the same answer."""
    agree = teacher.argmax(1) == student.argmax(1)
    return (divergence(teacher, student, 1.0) * agree).mean()


def divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """T^2 KL(q || p) [B]: q the softmax of the teacher's logits [B, C] over T, p that of the student's."""
    log_p, log_q = ((z / temperature).log_softmax(-1) for z in (student, teacher))
    return temperature**2 * (log_q.exp() * (log_q - log_p)).sum(-1)


def distil_student(
    pupil: Tree,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    teacher: Answers,
    student: Callable[[Tree, Tensor], Tensor],
) -> None:
    """One step of the student, its gradient no longer than 1."""
    with torch.no_grad():
        target = teacher(images)
    optimizer.zero_grad()
    divergence(target, student(pupil, images), STUDENT_TEMPERATURE).mean().backward()
    torch.nn.utils.clip_grad_norm_(pupil.values(), 1.0)
    optimizer.step()
