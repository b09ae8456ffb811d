"""Model card: the README.md in the folder of a kept model."""

import math
from collections.abc import Mapping
from typing import Any

from fczoo.core.method import Method
from fczoo.core.options import build
from fczoo.models.citation import FCZOO, method_entries
from fczoo.models.record import ModelRecord

SETTINGS = ("clients", "rounds", "epochs", "batch_size", "augment", "protocol", "as_released")
"""Settings of the run that a card lists; ``model.json`` has all."""
OF_TRAINING = ("rounds", "epochs", "batch_size", "augment")
"""Those that a method which trains nothing does not read."""


def model_card(record: ModelRecord, method: type[Method]) -> str:
    """Return the card of a model in Markdown: training, metrics, limits, use and citation.

    Args:
        record: Description of the model.
        method: Class of its method.
    """
    instance = build(method, record.method, record.options)
    sections = {
        "Training": _table(_training(record, instance)),
        "Accuracy": f"{_table(_metrics(record))}\n\nAccuracy in percent on the test images of each "
        f"task, after the last one:\n\n{_table(_tasks(record))}",
        "Limits": "\n".join(f"- {line}" for line in _limits(record, instance)),
        "Use": _use(record),
        "Citation": "```bibtex\n" + "\n\n".join([*method_entries(method), FCZOO]) + "\n```",
    }
    text = "\n\n".join(f"## {heading}\n\n{body}" for heading, body in sections.items())
    return (
        f"# {record.method} on {record.dataset}\n\n"
        f"An image classifier for {len(record.classes)} classes, trained in {len(record.tasks)} "
        f"tasks by federated class-incremental learning with fczoo.\n\n{text}\n"
    )


def _table(rows: Mapping[str, Any]) -> str:
    lines = [f"| {name} | {str(value).replace('|', '&#124;')} |" for name, value in rows.items()]
    return "\n".join(["| | |", "| --- | --- |", *lines])


def _training(record: ModelRecord, instance: Method) -> dict[str, Any]:
    backbone = record.backbone
    options = ", ".join(f"{name}={value}" for name, value in record.options.items())
    settings = {
        name.replace("_", " "): record.settings[name]
        for name in SETTINGS
        if record.settings.get(name) is not None
        and (name not in OF_TRAINING or instance.training().trained_prefixes)
    }
    replaces_weights = any(name.startswith("full.") for name in record.tensors)
    place = (
        "trained: this folder has the weights that replace its own, not the others"
        if replaces_weights
        else "frozen, not in this folder"
    )
    return {
        "method": f"{record.method}: {instance.paper}",
        "options": options or "none",
        "data set": record.dataset,
        "partition over clients": record.settings.get("partition"),
        **settings,
        "seed": record.seed,
        "backbone": f"{backbone.get('name')}, SHA-256 {str(backbone.get('sha256'))[:16]}; {place}",
        "input": f"{backbone.get('image_size')} pixels, mean {backbone.get('mean')}, "
        f"std {backbone.get('std')}",
        "number type": f"{record.precision} on {record.device}",
        "fczoo": record.versions.get("fczoo"),
    }


def _metrics(record: ModelRecord) -> dict[str, str]:
    return {name: _percent(value) for name, value in record.metrics.items()}


def _tasks(record: ModelRecord) -> dict[str, str]:
    return {
        f"task {index + 1}: {', '.join(record.classes[task['start'] : task['stop']])}": (
            f"{_percent(accuracy)} ({count} images)"
        )
        for index, (task, accuracy, count) in enumerate(
            zip(record.tasks, record.accuracy[-1], record.test_counts, strict=True)
        )
    }


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


def _limits(record: ModelRecord, method: Method) -> list[str]:
    lines = [
        "It knows the classes above and answers one of them for any image, also for one of "
        "something else.",
        "The accuracy holds for images like the test images; measure on yours with "
        "`fczoo evaluate FOLDER --data-root DIR`.",
    ]
    if not method.training().gives_logits:
        lines.append(
            "Its outputs are scores that order the classes, not logits: they have no probabilities."
        )
    names = zip(record.classes, record.has_images, strict=True)
    if missing := [name for name, has_images in names if not has_images]:
        lines.append(f"No client had images of {', '.join(missing)}: these are never predicted.")
    if not record.settings.get("dp_noise"):
        lines.append(
            "Training had no differential privacy: the tensors may reveal something of the "
            "clients' images."
        )
    return lines


def _use(record: ModelRecord) -> str:
    return (
        "```python\n"
        "import fczoo\n"
        "from PIL import Image\n\n"
        'model = fczoo.load_model("FOLDER")\n'
        'logits = model(model.transform(Image.open("IMAGE"))[None])\n'
        "print(model.classes[logits.argmax()])\n"
        "```\n\n"
        "`fczoo predict FOLDER IMAGES` prints the best classes of images. The method must be "
        "installed, and\nthe backbone is found by its name"
        " or given with `--backbone NAME:FILE`."
    )
