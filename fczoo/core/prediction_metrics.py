"""Metrics of predictions for single images, each with its formula.

A logit of -infinity or of the lowest number of its type marks a class that a method excludes; such
a class is never the answer.
"""

import torch
from torch import Tensor

from fczoo.core.tasks import Task

TOP = 5  # answers per image that count for top-5
BINS = 15  # of the calibration error (Guo et al., 2017)


def task_answers(logits: Tensor, task: Task) -> Tensor:
    """Compute argmax_{c in task} z_c: the answers where the task of each image is known.

    Args:
        logits: Logits or scores z [B, C] over the classes seen.
        task: The task of the images.

    Returns:
        Classes [B]; -1 where the method excludes all classes of the task.
    """
    best = logits[:, task.start : task.stop].max(1)
    possible = best.values > torch.finfo(logits.dtype).min
    return torch.where(possible, best.indices + task.start, -1)


def in_top(logits: Tensor, labels: Tensor, k: int = TOP) -> Tensor:
    """Compute whether the label is among the k classes with the highest logits.

    Of equal logits the lower class comes first, as in argmax, so that k = 1 gives the accuracy.

    Args:
        logits: Logits or scores [B, C] over the classes seen.
        labels: True classes [B].
        k: Number of answers per image.

    Returns:
        Booleans [B].
    """
    of_label = logits.gather(1, labels[:, None])
    lower = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    ahead = (logits > of_label) | ((logits == of_label) & lower)
    return (ahead.sum(1) < k) & (of_label[:, 0] > torch.finfo(logits.dtype).min)


def confidences(logits: Tensor) -> Tensor:
    """Compute max_c softmax(z)_c, the probability of the answer.

    Args:
        logits: Logits z [B, C] over the classes seen.

    Returns:
        Probabilities [B], at least in float32.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype).softmax(1).amax(1)


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> float:
    """Compute ECE = sum_b n_b / n |acc_b - conf_b| over bins of equal width (Guo et al., 2017).

    Bin b = 1, ..., B holds the n_b images with confidence in ((b - 1) / B, b / B]; acc_b is the
    share of right answers among them, conf_b their mean confidence.

    Args:
        confidence: Probabilities of the answers [n], above 0.
        correct: Whether each answer is right [n].
        bins: Number B of bins.

    Returns:
        ECE in percentage points; NaN without images.
    """
    if not len(confidence):
        return float("nan")
    confidence = confidence.double()
    index = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gap = torch.zeros(bins, dtype=torch.float64)
    gap.index_add_(0, index, correct.double() - confidence)  # n_b (acc_b - conf_b)
    return 100 * float(gap.abs().sum()) / len(confidence)
