"""Output of ``fczoo show``: pages of methods, other parts, settings, results and backbones."""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any, get_type_hints

import torch
from tabulate import tabulate

from fczoo.backbones.load import backbone_facts
from fczoo.backbones.names import BUNDLED_NAME, canonical_backbone, full_name
from fczoo.backbones.pretraining_overlap import (
    CLASSES,
    TITLES,
    describe_pretraining,
    identify_weights,
)
from fczoo.backbones.weights import describe_missing_weights, split_spec
from fczoo.cli.listing import PARTS
from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.names import fold
from fczoo.core.options import describe_type, nearest, plural
from fczoo.core.payload import Payload
from fczoo.core.registry import (
    DATASETS,
    METHODS,
    Registry,
    create_method,
)
from fczoo.core.tree import Tree, nbytes
from fczoo.core.vit_config import ViTConfig
from fczoo.data.dataset import IN_PACKAGE
from fczoo.federation.setting_groups import GROUPS
from fczoo.federation.settings import Settings
from fczoo.models.card import method_entries
from fczoo.reports.result_fields import FieldDescription, describe_result_fields
from fczoo.reports.run_config import protocol_of_value
from fczoo.reports.text_format import option_word, plain_table
from fczoo.runner.cost import CLIENT_PHASES, MeasuredCost, measure
from fczoo.security.privacy import list_disclosures


def part_page(name: str, dataset: str, registry: Registry[Any] | None = None) -> str:
    """Describe an entry of a registry, the ``settings``, or the fields of a ``result``.

    Args:
        name: Name in any spelling.
        dataset: Data set whose values are shown.
        registry: Registry of the entry. Default: the first one that has the name.

    Returns:
        The text to print.

    Raises:
        FczooError: The name is unknown.
    """
    if registry is None and fold(name) == "settings":
        return _settings_page()
    if registry is None and fold(name) == "result":
        return _result_page()
    pages = {METHODS: _method_page, DATASETS: _dataset_page}
    if registry is None:
        registry = next((part for part in PARTS if part.find(name)), None)
    if registry is None:
        known_names = ["settings", "result", *(n for part in PARTS for n in part.names())]
        raise FczooError(f"unknown name {name!r}; {nearest(name, known_names)}")
    return pages.get(registry, _options_page)(registry.get(name), dataset)


def _method_page(cls: type[Method], dataset: str) -> str:
    method = create_method(cls.name, dataset)
    parts = [f"{cls.name}: {inspect.getdoc(cls)}", f"Paper: {cls.paper}"]
    parts.append(
        f"Hyper-parameters on {dataset} (--set {cls.name}.FIELD=VALUE):\n{_options_table(method)}"
    )
    if cls.supports_recurring_classes:
        parts.append(
            "Classes may recur in later tasks (--tasks domains, --blurry, --moving, "
            "--task-order own)."
        )
    if cls.dataset_options:
        parts.append("Values by data set:\n" + "\n".join(dataset_values(cls)))
    return "\n\n".join([*parts, *describe_exchange(method, dataset), *method_entries(cls)])


def dataset_values(cls: type[Method]) -> list[str]:
    """Format a method's values for each data set, with the protocol that states them.

    Args:
        cls: Class of the method.

    Returns:
        One line per data set.
    """
    lines = []
    for dataset, values in cls.dataset_options.items():
        by_source: dict[str, list[str]] = {}
        for option, value in values.items():
            text = ""
            if origin := protocol_of_value(cls.name, option, value, dataset):
                protocol, statement = origin
                if not statement.chosen_for:
                    text = f", from protocol {protocol.name} ({statement.source})"
            by_source.setdefault(text, []).append(f"{option}={option_word(value)}")
        lines.append(
            f"{dataset}: "
            f"{'; '.join(', '.join(options) + text for text, options in by_source.items())}"
        )
    return lines


def describe_exchange(method: Method, dataset: str) -> list[str]:
    """Describe which tensors a method trains, sends, stores and discloses on a data set.

    Args:
        method: The method.
        dataset: Name of the data set.

    Returns:
        Paragraphs with tables.
    """
    training = method.training()
    torch.set_num_threads(1)  # faster for a step on few images
    measurement = measure(method, Settings.for_dataset(dataset))
    server_groups = ", ".join(f"{p}*" for p in method.server_only) or "none"
    parts = [f"Averaged by: {training.averaging}. Tensors only on the server: {server_groups}."]
    if training.own_models:
        parts = ["Every client keeps its own model: nothing is sent or averaged."]
    parts.append(
        f"Measured in the first two tasks of {dataset} on {measurement.backbone}, for a client "
        f"with every class. Its uploads, MB:\n{_uploads_table(measurement)}"
    )
    tables = [("Trained", measurement.trained_tensors)]
    for phase, words in CLIENT_PHASES.items():
        first, second = (
            uploads.get(phase, Payload({}))
            for uploads in (measurement.first_task_uploads, measurement.second_task_uploads)
        )
        new_tensors = {name: value for name, value in second.items() if name not in first}
        tables += [
            (f"Uploaded {words}", first.tensors),
            (
                f"{'Also uploaded' if first else 'Uploaded'} {words}, from the second task on",
                new_tensors,
            ),
        ]
    tables.append(
        (
            "Stored by a client in the second task in addition to trained tensors",
            measurement.stored_broadcast,
        )
    )
    parts += [
        f"{label}, {nbytes(tree) / 1e6:.3f} MB:\n{_tree_table(tree)}"
        for label, tree in tables
        if tree
    ]
    if measurement.client_memory:
        parts.append(
            "Memory of a client after the first task: "
            f"{', '.join(dict.fromkeys(map(_group, measurement.client_memory)))}."
        )
    if training.own_models:
        return parts
    all_uploads = [
        upload
        for uploads in (measurement.first_task_uploads, measurement.second_task_uploads)
        for upload in uploads.values()
    ]
    combined_upload = Payload(
        {name: value for upload in all_uploads for name, value in upload.items()}
    )
    lines = (
        f"{content} ({', '.join(dict.fromkeys(map(_group, names)))}): {consequence}"
        for content, names, consequence in list_disclosures(training, combined_upload)
    )
    parts.append("What a server could learn from an upload:\n" + "\n".join(lines))
    if training.per_client_statistics:
        parts.append(
            "The server needs the sums of each client, so secure aggregation, which reveals only "
            "totals, cannot hide them."
        )
    parts.append(
        f"Broadcast at the start of a task: {nbytes(measurement.broadcast) / 1e6:.3f} MB; later "
        "only changed tensors."
    )
    return parts


def _uploads_table(cost: MeasuredCost) -> str:
    """Format the size of a client's upload by phase, in the first and the second task."""

    def size(uploads: Mapping[str, Payload], phase: str) -> str:
        upload = uploads.get(phase)
        return (
            "" if upload is None else f"{nbytes(upload.tensors) / 1e6:.3f}" if upload else "nothing"
        )

    rows = [
        (words, size(cost.first_task_uploads, phase), size(cost.second_task_uploads, phase))
        for phase, words in CLIENT_PHASES.items()
        if phase in {**cost.first_task_uploads, **cost.second_task_uploads}
    ]
    return tabulate(
        rows, ["phase", "first task", "second task"], tablefmt="simple", disable_numparse=True
    )


def _settings_page() -> str:
    settings = Settings()  # a data set or a protocol replaces some
    tables = [f"{group.capitalize()}:\n{_options_table(settings, group)}" for group in GROUPS]
    return "\n\n".join(
        [
            "Settings of a run: options of fczoo bench, fields of fczoo.Settings. A data set's "
            "schedule or a protocol replaces some defaults, see fczoo show NAME.",
            *tables,
        ]
    )


def _result_page() -> str:
    descriptions = describe_result_fields()
    head = FieldDescription._fields
    table = tabulate(descriptions, head, "simple", disable_numparse=True, maxcolwidths=80)
    return f"Result of a run: fields of fczoo.Result and of result.json\n\n{table}"


def _dataset_page(cls: Any, _: str) -> str:
    meanings = {f.name: f.metadata["meaning"] for f in dataclasses.fields(Settings)}
    defaults = dataclasses.asdict(cls.defaults)
    table = tabulate([(k, v, meanings[k]) for k, v in defaults.items()], tablefmt="plain")
    facts = [
        ("Source", cls.source or IN_PACKAGE),
        ("Layout", cls.layout),
        ("Licence", cls.licence),
    ]
    overlap_text = "; ".join(
        f"{TITLES.get(key, key)} has {CLASSES[overlap]}" for key, overlap in cls.overlaps.items()
    )
    facts.append(("Pre-training", overlap_text))
    if cls.folder:
        facts.append(("Place", f"folder {cls.folder} below FCZOO_HOME/data or --data-root"))
        facts.append(
            (
                "Download",
                f"fczoo data fetch {cls.name}"
                if cls().can_download
                else "not automatic; see source and layout",
            )
        )
    about = tabulate([fact for fact in facts if fact[1]], tablefmt="plain")
    schedule = f"Its own schedule (--protocol none):\n{table}"
    return f"{cls.name}: {cls.about}\n{inspect.getdoc(cls)}\n\n{about}\n\n{schedule}"


def _options_page(entry: Any, _: str) -> str:
    table = (
        f"\n\n{_options_table(entry())}"
        if isinstance(entry, type) and dataclasses.is_dataclass(entry) and dataclasses.fields(entry)
        else ""
    )
    about = inspect.getdoc(entry) or ""
    if not isinstance(entry, type):  # the arguments of a function are not options of users
        about = about.partition("\n\nArgs:")[0]
    return f"{entry.name}: {about}{table}"


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
    """Return the group of a tensor: ``full.*`` for weights of the network, else its name."""
    return re.sub(r"(.*full)\..*", r"\1.*", name)


def _tree_table(tree: Tree) -> str:
    """Format name, shape and number of scalars of tensors, with one line per group."""
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


POOLS = {
    "cls": "the class token",
    "mean": "the mean of the patches",
    "attention": "attention pooling of the patches",
    "cls+mean": "class token, then mean of the patches",
}


def backbone_page(spec: str) -> str:
    """Describe a backbone: size, input, operations per image, licence and pre-training.

    Args:
        spec: Name, file, or both.

    Returns:
        The text to print.

    Raises:
        FczooError: The backbone does not exist or is not supported.
    """
    spec = canonical_backbone(spec)
    facts = backbone_facts(spec)
    config, giga = facts.config, facts.flops / 1e9
    weights = identify_weights(spec) or full_name(spec)
    rows = [
        ("backbone", spec),
        ("weights", _weights_location(spec)),
        ("blocks", f"{config.depth} of width {config.dim}, {config.heads} heads{_parts(config)}"),
        ("parameters", f"{facts.parameters / 1e6:.1f} million, without a head"),
        ("tokens", _tokens(config)),
        ("feature", f"{config.feature_dim} numbers: {POOLS[config.pool]}"),
        (
            "work",
            f"{_billions(giga)} GFLOPs per image ({_billions(giga / 2)} billion multiply-adds)",
        ),
        ("input", f"{config.image_size} x {config.image_size} pixels; {_statistics(config)}"),
        ("licence", facts.licence or "not known"),
        ("pre-training", describe_pretraining(weights)),
    ]
    if facts.dropped:
        rows.append(("dropped", facts.dropped))
    if facts.note and config.activation != "quick_gelu":  # timm's note asks for QuickGELU
        rows.append(("note", facts.note))
    rows.append(("use it", f"fczoo bench --backbone {spec}"))
    if split_spec(spec)[1] is None:
        rows.append(("own weights", f"fczoo bench --backbone {spec}:FILE.safetensors"))
    return plain_table([*rows, ("all names", "fczoo list backbones")])


def _billions(number: float) -> str:
    return f"{number:.{1 if number >= 1 else 3}f}"


def _weights_location(spec: str) -> str:
    if spec == BUNDLED_NAME:
        return "the small backbone that comes with fczoo: no download"
    return describe_missing_weights(spec, "a run") or "on this machine"


def _parts(config: ViTConfig) -> str:
    """List the parts of the network that the original ViT lacks."""
    activations = {"gelu": "", "gelu_tanh": "GELU by tanh", "quick_gelu": "QuickGELU"}
    parts = (
        "SwiGLU" if config.swiglu else activations[config.activation],
        "LayerScale" if config.layer_scale else "",
        "rotary positions" if config.rope else "",
        "norm before the blocks" if config.pre_norm else "",
        "" if config.qkv_bias else "no bias of queries, keys and values",
    )
    return "".join(f", {part}" for part in parts if part)


def _tokens(config: ViTConfig) -> str:
    parts = [f"{config.grid} x {config.grid} patches of {config.patch_size} pixels"]
    parts += ["1 class token"] * config.class_token
    if config.register_tokens:
        parts.append(f"{config.register_tokens} registers")
    return f"{config.tokens}: {', '.join(parts)}"


def _statistics(config: ViTConfig) -> str:
    mean, std = (", ".join(f"{x:g}" for x in values) for values in (config.mean, config.std))
    return f"mean {mean}; std {std}"
