"""Model card, the README.md in the folder of a stored model, and BibTeX of methods and fczoo."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fczoo import __version__
from fczoo.core.method import Method
from fczoo.core.options import build
from fczoo.core.registry import METHODS
from fczoo.federation.model_record import ModelRecord

ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")
YEAR = re.compile(r"\b(19[3-9]\d|20\d\d)\b(?!\.)")
AUTHORS = re.compile(r"(?:^|: )([A-Z][\w'-]+(?: et al\.| and [A-Z][\w'-]+|(?=, \"))), ")
TITLE = re.compile('"([^"]+)"')
JOURNALS = ("PNAS", "TPAMI", "Annals of Eugenics")
VENUE = re.compile(r"(?:^|, )([A-Z][^,:()]*) (?:19|20)\d\d\b")

FCZOO = f"""@software{{fczoo,
  title = {{fczoo}},
  author = {{{{fczoo developers}}}},
  version = {{{__version__}}},
  license = {{Apache-2.0}},
  abstract = {{A benchmark zoo for Federated Class-Incremental Learning on pre-trained vision transformers}}
}}"""
"""The entry of CITATION.cff."""


def bibtex(methods: Iterable[str]) -> str:
    """Return BibTeX entries of methods and of fczoo.

    An entry is parsed from the method's ``paper``: authors, title, venue, year and arXiv number, as
    far as it has them. Without a title, the whole text becomes a note.

    Args:
        methods: Registered names.

    Raises:
        FczooError: A name is unknown.
    """
    entries = [entry for name in methods for entry in method_entries(METHODS.get(name))]
    return "\n\n".join([*dict.fromkeys(entries), FCZOO])


def references(methods: Iterable[str]) -> str:
    """Return the references of methods and of fczoo, one per line.

    Args:
        methods: Registered names.

    Raises:
        FczooError: A name is unknown.
    """
    papers = [METHODS.get(name).paper or name for name in methods]
    fczoo_reference = f'fczoo developers, "fczoo", version {__version__}'
    return "\n".join(f"{paper.rstrip('.')}." for paper in [*dict.fromkeys(papers), fczoo_reference])


def method_entries(method: type[Method]) -> list[str]:
    """Return the BibTeX entries of one method, one per source with a year or an arXiv number.

    Args:
        method: Class of the method.
    """
    sources = [part.strip() for part in method.paper.split(";")]
    citable_sources = [source for source in sources if ARXIV.search(source) or YEAR.search(source)]
    return [
        _entry(method, source, number)
        for number, source in enumerate(citable_sources or [method.paper or method.name], 1)
    ]


def _entry(method: type[Method], source: str, number: int) -> str:
    fields: dict[str, str] = {}
    if authors := AUTHORS.search(source):
        fields["author"] = authors[1].replace(" et al.", " and others")
    if title := TITLE.search(source):
        fields["title"] = f"{{{title[1]}}}"
    outside_title = TITLE.sub("", source)  # a title may contain a year
    venue, year, paper = (
        VENUE.search(outside_title),
        YEAR.search(outside_title),
        ARXIV.search(outside_title),
    )
    is_published = bool(title and venue)
    kind = "misc"
    if venue and is_published:
        kind = "article" if venue[1] in JOURNALS else "inproceedings"
        fields["journal" if kind == "article" else "booktitle"] = venue[1]
    elif venue:
        fields["howpublished"] = venue[1]
    if year:
        fields["year"] = year[1]
    if paper:
        fields |= {"eprint": paper[1], "archiveprefix": "arXiv"}
        fields.setdefault("year", f"20{paper[1][:2]}")  # arXiv numbers start with year and month
    if not title:
        fields["note"] = source
    key = method.name if number == 1 else f"{method.name}-{number}"
    lines = ",\n".join(f"  {name} = {{{_escape(value)}}}" for name, value in fields.items())
    return f"@{kind}{{{key},\n{lines}\n}}"


def _escape(text: str) -> str:
    """Escape special characters of LaTeX."""
    return re.sub(r"([&%#_])", r"\\\1", text)


SETTINGS = ("clients", "rounds", "epochs", "batch_size", "augment", "protocol", "as_released")
"""Settings of the run on a card; ``model.json`` has all settings."""
TRAINING_SETTINGS = ("rounds", "epochs", "batch_size", "augment")
"""Settings that have no effect on a method without training."""


def model_card(record: ModelRecord, method: type[Method]) -> str:
    """Format the card of a model in Markdown: training, metrics, limits, use and citation.

    Args:
        record: Description of the model.
        method: Class of its method.
    """
    instance = build(method, record.method, record.options)
    sections = {
        "Training": _table(_training(record, instance)),
        "Accuracy": f"{_table(_metrics(record))}\n\nAccuracy in percent on the test images of each "
        f"task, after the last task:\n\n{_table(_tasks(record))}",
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
        and (name not in TRAINING_SETTINGS or instance.training().trained_prefixes)
    }
    replaces_weights = any(name.startswith("full.") for name in record.tensors)
    weights_note = (
        "partly trained: this folder contains only the trained weights"
        if replaces_weights
        else "frozen, not in this folder"
    )
    pool = f", pool {backbone['pool']}" if backbone.get("pool", "cls") != "cls" else ""
    return {
        "method": f"{record.method}: {instance.paper}",
        "options": options or "none",
        "data set": record.dataset,
        "partition over clients": record.settings.get("partition"),
        **settings,
        "seed": record.seed,
        "backbone": f"{backbone.get('name')}{pool}, SHA-256 {str(backbone.get('sha256'))[:16]}; "
        f"{weights_note}",
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
        "It predicts one of the classes above for any image, even if the image shows something "
        "else.",
        "The accuracy is valid for images like the test images; measure it on your images with "
        "`fczoo evaluate FOLDER --data-root DIR`.",
    ]
    if not method.training().gives_logits:
        lines.append(
            "Its outputs are scores that rank the classes, not logits: they give no probabilities."
        )
    names = zip(record.classes, record.has_images, strict=True)
    if missing := [name for name, has_images in names if not has_images]:
        lines.append(
            f"No client had images of {', '.join(missing)}: these classes are never predicted."
        )
    if not record.settings.get("dp_noise"):
        lines.append(
            "Training had no differential privacy: the tensors may reveal information about the "
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
        "installed.\nfczoo finds the backbone by its name, or give its file with "
        "`--backbone NAME:FILE`."
    )
