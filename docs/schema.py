"""JSON schemas of the files of a run, from the types that read them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fczoo.federation import result
from fczoo.reports import run_folder

DIALECT = "https://json-schema.org/draft/2020-12/schema"
FILES = {
    "result": (result.Result, result.FORMAT, result.METRIC_FIELDS),
    "bench": (run_folder.About, run_folder.FORMAT, ()),
}
"""Name of a file without its suffix -> its type, its format, and fields in which null is NaN."""
RECORD = {
    "format": {"description": "Version of the format.", "type": "string"},
    "sha256": {
        "description": "SHA-256 of the other fields, as JSON with sorted keys.",
        "type": "string",
        "pattern": "^[0-9a-f]{64}$",
    },
}
"""Fields that every file has next to those of its type."""
IS_FINISHED = {"description": "Whether every task is learned and evaluated.", "type": "boolean"}
BOTH = {
    "settings": "Settings of the run, as `fczoo show settings` lists them; those that earlier "
    "versions lacked are left out at their default.",
    "backbone": "Name, shape and SHA-256 of the weights of the backbone.",
    "partition": "Spec and SHA-256 of the split over clients.",
    "versions": "Versions of Python and of the libraries.",
}
MEANINGS = {
    "result": {
        **BOTH,
        "method": "Name of the method.",
        "options": "Options of the method with their values.",
        "seed": "Seed of the run.",
        "class_order": "Labels of the data set in the order in which they arrive.",
        "task_sizes": "Number of classes per task.",
        "test_counts": "Number of test images per task.",
        "trained_scalars": "Number of scalars that a client trains.",
        "remark": "What a reader must know of the method as it ran; tables show it.",
        "start": "For a run that starts from a kept model: the model, its number of tasks and the "
        "SHA-256 of its tensors. Empty for others.",
        "accuracy": "accuracy[t][i]: percentage on task i after task t; null without test images.",
        "metrics": "Value of each metric by name, as `fczoo list metrics` explains them.",
        "task_aware": "As accuracy, with the answer among the classes of the image's task.",
        "next_accuracy": "Percentage on task t + 1 after task t; null where it has new classes.",
        "top5": "Percentage of all images seen with their class among five answers, per task.",
        "calibration": "Expected calibration error in points after each task; empty where a "
        "method gives scores, not logits.",
        "class_accuracy": "Percentage per class seen, after each task.",
        "confusion": "Triples of class, answer and number of images, after the last task.",
        "client_accuracy": "Percentage per client on test images with the classes of its images, "
        "after the last task; null for a client without images.",
        "client_tasks": "Client, first and last stage of each client's task, where clients are in "
        "different tasks.",
        "client_task_accuracy": "After each stage: percentage per entry of client_tasks that has "
        "begun.",
        "personal_accuracy": "As client_accuracy, for each client's own model after "
        "--personal-epochs.",
        "curve": "Task, rounds of it, accuracy over all classes seen, and bytes sent so far: after "
        "each task, and after each --eval-every rounds.",
        "curve_seconds": "Seconds of the virtual clock at each point of the curve.",
        "virtual_seconds": "Seconds of the virtual clock at the end.",
        "bytes_up": "Bytes of all uploads.",
        "bytes_down": "Bytes of all broadcasts, without tensors that a client already has.",
        "client_rounds": "Number of uploads.",
        "uploaded": "Bytes of uploads by content.",
        "rejected": "Uploads that were refused, in whole or part, or lost: task, moment, client "
        "and reason.",
        "skipped": "Exchanges with too few valid uploads, after which the state stayed: task, "
        "moment and reason.",
        "far": "Per client: number of uploads with class statistics far from those of others.",
        "privacy": "Epsilon and delta of a client's uploads, where they are noisy.",
        "seconds": "Duration of the run in seconds, evaluation included.",
        "phases": "Seconds per phase of the run.",
        "client_storage": "Bytes that a client stores at most, next to backbone and images.",
        "server_storage": "Bytes of the server's state at most.",
        "peak_memory": "Peak memory in bytes, of the run and of CUDA.",
    },
    "bench": {
        **BOTH,
        "methods": "Options of each method by its name.",
        "seeds": "Seeds; each method has a run per seed.",
        "device": "Device of the runs.",
        "split": "How training and test images were separated.",
        "data": "SHA-256 of the images, and remarks.",
        "hardware": "Processor, cores, threads and GPUs.",
        "tuned": "Search of `fczoo tune` behind the options, where --tuned names one.",
        "started": "Time at which the runs began.",
        "command": "Words of the command that began or resumed the runs last.",
        "earlier_commands": "Words of the commands before it.",
        "code": "SHA-256 of every module that the runs use.",
        "keep": "Whether runs keep their models, and the server's state.",
        "changed_code": "Changes of the code that --accept-changed-code accepted, with times.",
        "warnings": "Warnings of the command and its runs, equal ones merged.",
    },
}
"""File -> its fields with their meaning."""


def write_schemas(folder: Path) -> None:
    """Write the schema of each file.

    Args:
        folder: Folder of the schemas.
    """
    folder.mkdir(exist_ok=True)
    for name in FILES:
        (folder / f"{name}.schema.json").write_text(schema_text(name), encoding="utf-8")


def schema_text(name: str) -> str:
    """Return the schema of a file as text.

    Args:
        name: Name of the file without its suffix.
    """
    return json.dumps(make_schema(name), indent=1, ensure_ascii=False) + "\n"


def make_schema(name: str) -> dict[str, Any]:
    """Return the schema of a file.

    Args:
        name: Name of the file without its suffix.
    """
    kind, version, nullable_fields = FILES[name]
    (types,) = msgspec.json.schema_components([kind])[1].values()
    fields = {
        key: {"description": MEANINGS[name][key], **(with_null(s) if key in nullable_fields else s)}
        for key, s in types["properties"].items()
    }
    first = {"format": {**RECORD["format"], "const": version}}
    if name == "result":
        first["finished"] = IS_FINISHED
    return {
        "$schema": DIALECT,
        "title": f"{name}.json",
        "type": "object",
        "properties": {**first, **fields, "sha256": RECORD["sha256"]},
        "required": ["format", *types["required"], "sha256"],
    }


def with_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema in which null may take the place of each number.

    Args:
        schema: Schema of a field.
    """
    if schema.get("type") == "number":
        return {**schema, "type": ["number", "null"]}
    inner = ("items", "additionalProperties")
    nullable = {key: with_null(schema[key]) for key in inner if isinstance(schema.get(key), dict)}
    return {**schema, **nullable}
