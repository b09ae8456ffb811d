"""Meanings of the metrics, and of each field of ``Result`` with its unit and default."""

import re
from dataclasses import MISSING, fields
from inspect import formatannotation
from typing import NamedTuple, get_type_hints

from fczoo.federation.result import Result


class FieldDescription(NamedTuple):
    """Description of one field of ``Result``."""

    name: str
    type: str
    unit: str
    default: str  # empty: a run always sets it
    meaning: str


RESULT_FIELDS: dict[str, tuple[str, str]] = {
    "method": ("", "name of the method"),
    "options": ("", "hyper-parameters of the method by name"),
    "settings": ("", "fields of Settings by name; paths without their folders"),
    "seed": ("", "seed of the run"),
    "backbone": ("", "shape, input and SHA-256 of the backbone"),
    "partition": ("", "partitioner, seed and SHA-256 of the partition"),
    "class_order": ("", "original label of each class, in order of arrival"),
    "task_sizes": ("classes", "classes per task"),
    "test_counts": ("images", "test images per task"),
    "trained_scalars": ("numbers", "parameters that a client trains in the latest task"),
    "remark": ("", "notes on the method and the run, which reports print"),
    "start": (
        "",
        "kept model from which the run started: its name, number of tasks, and SHA-256 of its "
        "tensors; empty for a run from the beginning",
    ),
    "accuracy": (
        "%",
        "[t][i]: accuracy on task i after task t, predicted among all classes seen; NaN (null in "
        "JSON) without test images",
    ),
    "metrics": ("% or points", "metric -> its value after the latest task"),
    "task_aware": ("%", "as accuracy, but predicted among the classes of the image's task"),
    "next_accuracy": (
        "%",
        "[t]: accuracy on task t + 1 after task t; None if task t + 1 has new classes, as in most "
        "runs",
    ),
    "top5": ("%", "[t]: images whose class is among the five highest logits of all classes seen"),
    "calibration": (
        "points",
        "[t]: expected calibration error over all images seen; empty for methods without logits",
    ),
    "class_accuracy": (
        "%",
        "[t][c]: accuracy on class c after task t; NaN (null in JSON) without test images",
    ),
    "confusion": (
        "images",
        "list of [class, predicted class, number of images] after the latest task",
    ),
    "client_accuracy": (
        "%",
        "accuracy per client after the latest task, on test images with the class mix of the "
        "client's images; None without images, empty where the server does not know the mixes",
    ),
    "client_tasks": (
        "stages",
        "list of [client, first stage, last stage], an entry per client-task; empty if all clients "
        "are in the same task",
    ),
    "client_task_accuracy": (
        "%",
        "[s]: accuracy after stage s per client-task that has begun, on test images with its class "
        "mix",
    ),
    "personal_accuracy": (
        "%",
        "accuracy per client of its own fine-tuned model after the last task, on the test images "
        "of client_accuracy",
    ),
    "curve": (
        "rounds, %, bytes",
        "list of [task, rounds of the task, accuracy over all classes seen, bytes sent so far], an "
        "entry per task and per eval_every rounds",
    ),
    "curve_seconds": ("s", "virtual time of each point of the curve, with client_devices"),
    "virtual_seconds": ("s", "virtual time since the run began, with client_devices"),
    "bytes_up": ("bytes", "all uploads of all clients"),
    "bytes_down": ("bytes", "all broadcasts; a tensor that a client already has is not sent again"),
    "client_rounds": ("uploads", "number of uploads of all clients"),
    "uploaded": (
        "bytes",
        "bytes_up by kind of content (parameters, class means, ...); the kind determines what an "
        "upload discloses about a client",
    ),
    "rejected": (
        "",
        "uploads rejected or lost, in whole or in part: task, moment (round or task boundary), "
        "client, reason",
    ),
    "skipped": (
        "",
        "exchanges with too few valid uploads: task, moment (round or task boundary), reason",
    ),
    "far": (
        "uploads",
        "client -> number of its uploads with class statistics far from those of other clients; "
        "the run used them nevertheless",
    ),
    "privacy": ("", "epsilon and delta of a client's uploads, with dp_noise"),
    "seconds": ("s", "time of the run"),
    "phases": ("s", "time of statistics, training, server, evaluation and personal fine-tuning"),
    "client_storage": (
        "bytes",
        "largest storage of a client, without backbone and images of the task; None: not measured",
    ),
    "server_storage": ("bytes", "largest size of the server's state; None: not measured"),
    "peak_memory": ("bytes", "largest memory of this run's process (run) and on the GPU (cuda)"),
    "versions": ("", "packages with their versions, hash of the code, and commit"),
}
"""Unit (or "") and meaning by field."""

METRIC_MEANINGS = {
    "A_N": "% of the test images of all seen classes classified correctly after the last task",
    "Avg": "mean over the tasks of the accuracy on all classes seen so far",
    "FAA": "mean of the tasks' accuracies after the last task",
    "Abar": "mean over the tasks of the mean accuracy of the tasks seen so far",
    "forgetting": "mean drop of earlier tasks from their best accuracy before the last task",
    "forgetting_first": "mean drop of all tasks since they were learned; the last task counts as 0",
    "forgetting_best": "mean drop of all tasks from their best accuracy so far, which may be the "
    "one after the last task",
    "BWT": "mean change of the accuracy of earlier tasks since they were learned",
    "plasticity": "mean of the tasks' accuracies right after they were learned",
    "AUC": "area under the curve of the accuracy over all seen classes, after each task",
    "task_aware": "A_N, but predicted among the classes of the image's task",
    "top5": "% of all test images whose class is among the five highest logits",
    "ECE": "expected calibration error in points; only of methods that give logits",
    "base": "final accuracy on the first task, if it has at least twice as many classes as others",
    "novel": "final accuracy on all later tasks, for the same runs as base",
    "harmonic": "harmonic mean of base and novel",
    "base_novel_mean": "arithmetic mean of base and novel",
    "old": "final accuracy on the tasks of the kept model from which the run started",
    "new": "final accuracy on the tasks after those of the kept model",
    "FWT": "mean accuracy on a task before it is learned, minus chance level; domains only",
    "client_mean": "mean over clients of the accuracy on test images with a client's class mix",
    "client_std": "standard deviation over clients of the accuracies in client_mean",
    "client_worst": "client_mean over the 10 % of clients with the lowest accuracies",
    "personal_mean": "client_mean of the clients' own models, after --personal-epochs",
    "personal_std": "client_std of the clients' own models",
    "personal_worst": "client_worst of the clients' own models",
    "client_task_final": "mean final accuracy of the client-tasks (--moving)",
    "client_task_accuracy": "mean over stages of the accuracy of the client-tasks that have begun",
    "client_task_forgetting": "mean over stages of the drop of client-tasks from their earlier best",
    "client_task_backward": "backward transfer: change of ended client-tasks since their end, mean "
    "over stages",
    "client_task_forward": "forward transfer: accuracy of client-tasks in their last stage, minus "
    "that of `local`; mean over stages",
    "client_task_total": "sum over stages of forward and backward transfer, divided by the number "
    "of stages with a forward transfer",
}
"""Meaning by metric."""
LOWER_IS_BETTER = (
    "forgetting",
    "ECE",
    "intransigence",
    "client_std",
    "personal_std",
    "client_task_forgetting",
)
"""Prefixes of the names of metrics for which lower values are better."""


def describe_result_fields() -> list[FieldDescription]:
    """Describe the fields of ``Result`` in their order."""
    descriptions, hints = [], get_type_hints(Result)  # without the limits of numbers
    for field in fields(Result):
        default = ""
        if field.default is not MISSING:
            default = repr(field.default)
        elif field.default_factory is not MISSING:
            default = repr(field.default_factory())
        words = formatannotation(hints[field.name]).replace("typing.", "")
        words = re.sub(r"Optional\[(\w+)\]", r"\1 | None", words)
        unit, meaning = RESULT_FIELDS[field.name]
        descriptions.append(FieldDescription(field.name, words, unit, default, meaning))
    return descriptions
