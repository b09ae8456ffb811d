"""What ``show`` prints."""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any, get_type_hints

import torch
from tabulate import tabulate

from fczoo.backbones.pretraining import TITLES
from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.names import fold
from fczoo.core.options import describe_type, nearest, plural
from fczoo.core.payload import Payload
from fczoo.core.registry import (
    AGGREGATORS,
    ATTACKS,
    DATASETS,
    LOCAL_TRAINING,
    MERGES,
    METHODS,
    PARTITIONERS,
    create_method,
)
from fczoo.core.tree import Tree, nbytes
from fczoo.federation.settings import GROUPS, Settings
from fczoo.reports.contamination import CLASSES
from fczoo.reports.words import option_word
from fczoo.runner.cost import Measured, measure
from fczoo.runner.moments import MOMENTS
from fczoo.security.privacy import disclosed


def show(name: str, dataset: str) -> str:
    """Everything about a method, data set, partitioner, aggregator, attack, local training or, as
    ``settings``, the settings.

    Raises FczooError for an unknown name.
    """
    if fold(name) == "settings":
        return _settings_page()
    pages = (
        (METHODS, _method_page),
        (DATASETS, _dataset_page),
        *((r, _options_page) for r in (PARTITIONERS, AGGREGATORS, MERGES, ATTACKS, LOCAL_TRAINING)),
    )
    for registry, page in pages:
        if registry.find(name):
            return page(registry.get(name), dataset)
    known = ["settings", *(n for registry, _ in pages for n in registry.names())]
    raise FczooError(f"nothing is called {name!r}; {nearest(name, known)}")


def _method_page(cls: type[Method], dataset: str) -> str:
    method = create_method(cls.name, dataset)
    parts = [f"{cls.name}: {inspect.getdoc(cls)}", f"Paper: {cls.paper}"]
    parts.append(f"Hyper-parameters on {dataset} (--set {cls.name}.FIELD=VALUE):\n{_options_table(method)}")
    if cls.returning:
        parts.append("Labels may come back in later tasks (--tasks domains, --moving, --task-order own).")
    if cls.tuned:
        parts.append(f"Values by data set: {'; '.join(tuned_words(cls))}.")
    return "\n\n".join([*parts, *exchange(method, dataset)])


def tuned_words(cls: type[Method]) -> list[str]:
    """Each data set with the values that a method has for it."""
    return [
        f"{dataset} ({', '.join(f'{k}={option_word(v)}' for k, v in values.items())})"
        for dataset, values in cls.tuned.items()
    ]


def exchange(method: Method, dataset: str) -> list[str]:
    """What a method trains, sends, keeps and gives away on a data set, measured: paragraphs and tables."""
    training = method.training()
    torch.set_num_threads(1)  # a step on so few images is too small to share
    seen = measure(method, Settings.for_dataset(dataset))
    kept = ", ".join(p.rstrip(".") for p in method.private) or "nothing"
    parts = [f"Averaged by: {training.averaging}. Kept on the server: {kept}."]
    parts.append(
        f"Measured in the first two tasks of {dataset} on {seen.backbone}, a client with every class. "
        f"Its uploads, MB:\n{_moments_table(seen)}"
    )
    tables = [("Trained", seen.trained)]
    for moment, words in MOMENTS.items():
        first, second = (uploads.get(moment, Payload({})) for uploads in (seen.sent, seen.later))
        more = {name: value for name, value in second.items() if name not in first}
        tables += [
            (f"Sent up {words}", first.tensors),
            (f"Sent up {words}, {'also ' if first else ''}from the second task on", more),
        ]
    tables.append(("Held by a client in the second task besides what it trains", seen.held))
    parts += [f"{label}, {nbytes(tree) / 1e6:.3f} MB:\n{_tree_table(tree)}" for label, tree in tables if tree]
    if seen.remembered:
        parts.append(f"Remembered by a client from the first task: {', '.join(seen.remembered)}.")
    every = [upload for uploads in (seen.sent, seen.later) for upload in uploads.values()]
    sent = Payload({name: value for upload in every for name, value in upload.items()})
    lines = (
        f"{content} ({', '.join(dict.fromkeys(map(_group, names)))}): {tells}"
        for content, names, tells in disclosed(training, sent)
    )
    parts.append("What a server could learn from an upload:\n" + "\n".join(lines))
    if training.separate:
        parts.append(
            "The server needs each client's sums by itself: secure aggregation, which shows it only totals, "
            "cannot hide them."
        )
    parts.append(
        f"Sent down at the start of a task: {nbytes(seen.received) / 1e6:.3f} MB; later only what has "
        "changed."
    )
    return parts


def _moments_table(seen: Measured) -> str:
    """The moments at which a client acts, and the size of its upload in the first and the second task."""

    def size(uploads: Mapping[str, Payload], moment: str) -> str:
        upload = uploads.get(moment)
        return "" if upload is None else f"{nbytes(upload.tensors) / 1e6:.3f}" if upload else "nothing"

    rows = [
        (words, size(seen.sent, moment), size(seen.later, moment))
        for moment, words in MOMENTS.items()
        if moment in {**seen.sent, **seen.later}
    ]
    return tabulate(rows, ["moment", "first task", "second task"], tablefmt="simple", disable_numparse=True)


def _settings_page() -> str:
    settings = Settings()
    tables = [f"{group.capitalize()}:\n{_options_table(settings, group)}" for group in GROUPS]
    return "\n\n".join(
        ["Settings of a run, on digits: options of fczoo bench, fields of fczoo.Settings", *tables]
    )


def _dataset_page(cls: Any, _: str) -> str:
    meanings = {f.name: f.metadata["meaning"] for f in dataclasses.fields(Settings)}
    defaults = dataclasses.asdict(cls.defaults)
    table = tabulate([(k, v, meanings[k]) for k, v in defaults.items()], tablefmt="plain")
    facts = [
        ("Source", cls.source or "comes with its package"),
        ("Layout", cls.layout),
        ("Licence", cls.licence),
    ]
    known = "; ".join(
        f"{TITLES.get(key, key)} has {CLASSES[overlap]}" for key, overlap in cls.overlaps.items()
    )
    facts.append(("Pre-training", known))
    if cls.folder:
        facts.append(("Place", f"folder {cls.folder} below FCZOO_HOME/data or --data-root"))
        facts.append(
            (
                "Download",
                f"fczoo data fetch {cls.name}" if cls.archives else "not automatic; see source and layout",
            )
        )
    about = tabulate([fact for fact in facts if fact[1]], tablefmt="plain")
    own = f"Its own schedule (--protocol none):\n{table}"
    return f"{cls.name}: {cls.about}\n{inspect.getdoc(cls)}\n\n{about}\n\n{own}"


def _options_page(entry: Any, _: str) -> str:
    table = (
        f"\n\n{_options_table(entry())}"
        if isinstance(entry, type) and dataclasses.is_dataclass(entry)
        else ""
    )
    return f"{entry.name}: {inspect.getdoc(entry)}{table}"


def _options_table(instance: Any, group: str = "") -> str:
    hints, rows = get_type_hints(type(instance)), []
    for field in dataclasses.fields(instance):
        if group and field.metadata["group"] != group:
            continue
        value, meaning = getattr(instance, field.name), field.metadata.get("meaning", "")
        rows.append((field.name, option_word(value), describe_type(hints[field.name]), meaning))
    return tabulate(
        rows,
        ["field", "value", "type", "meaning"],
        tablefmt="simple",
        disable_numparse=True,
        maxcolwidths=[None, None, 28, 90],
    )


def _group(name: str) -> str:
    """``full.*`` for each weight of the network; any other tensor by its name."""
    return re.sub(r"(.*full)\..*", r"\1.*", name)


def _tree_table(tree: Tree) -> str:
    """Name, shape and scalars; many tensors of one group, such as all weights of the network, in one line."""
    groups: dict[str, list[str]] = {}
    for name in tree:
        groups.setdefault(_group(name), []).append(name)
    rows = []
    for group, names in groups.items():
        shape = (
            plural(len(names), "tensor")
            if len(names) > 1
            else "x".join(map(str, tree[names[0]].shape)) or "scalar"
        )
        rows.append((group, shape, sum(tree[n].numel() for n in names)))
    return tabulate(rows, tablefmt="plain")
