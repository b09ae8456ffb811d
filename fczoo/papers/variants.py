"""Readings of a printed number: one from the paper's text, one from its released code."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fczoo.backbones.timm_vit import input_statistics
from fczoo.core.files import through_json
from fczoo.core.options import quirks
from fczoo.core.registry import METHODS, PARTITIONERS
from fczoo.data.dataset import released_norm
from fczoo.federation.settings import Settings
from fczoo.papers.printed_numbers import Paper, PrintedNumber, plain_split
from fczoo.protocols.registry import RELEASES
from fczoo.protocols.stated_values import Statement, ValuesByBeta
from fczoo.reports.run_config import RunConfig, configure_run
from fczoo.reports.runs import WITHOUT_EFFECT, Experiment, Line, with_defaults
from fczoo.reports.text_format import option_word, setting_word

EXCLUDED_SETTINGS = (*WITHOUT_EFFECT, "partition_seed")
"""Settings that do not affect results, or that no paper states."""
NORMALISATION = ("mean", "std", "norm_by_dataset")
"""Settings that together define the normalisation of the input."""
UNSTATED_SETTINGS = ("precision", "deterministic", "vary")
"""Settings that papers do not state, in addition to those that protocols mark as open."""
ROUGH_SETTINGS = ("backbone", "partition", "class_order_seed", "train_per_class")
"""Settings that are compared roughly if they are open, instead of not at all."""

PRINT = "the paper's settings"
"""Name of the reading of the print, in texts."""


@dataclass(frozen=True)
class Reading:
    """One reading of the settings behind a printed number."""

    name: str
    source: str  # source in texts about differences: paper or code
    config: RunConfig  # its options are empty if the method is not installed
    # settings that differ from the protocol, as for the command line
    changed_settings: Mapping[str, Any]
    changed_options: Mapping[str, Any]  # options that differ from the protocol
    open_names: frozenset[str]  # settings, and options as ``.name``, that the source leaves open

    @property
    def options(self) -> dict[str, Any]:
        """Return all options of the method as plain values."""
        options: dict[str, Any] = through_json(dict(self.config.options))
        return options


def readings(paper: Paper, number: PrintedNumber) -> list[Reading]:
    """Return the reading of the print and, if released code has the method, of the code.

    Args:
        paper: Paper that printed the number.
        number: Printed number.

    Raises:
        FczooError: The protocol has no such data set or split.
    """
    row = paper.row(number)
    protocol, release = paper.protocol, RELEASES.get(paper.release) if paper.release else None
    protocol_settings = protocol.settings_on(row.dataset)
    printed_settings = {
        k: "none" if v is None else v for k, v in _print_values(protocol_settings).items()
    }
    settings, method = paper.settings(number, **printed_settings), row.method or ""
    protocol_options = protocol.hyperparameters(method, row.dataset)
    beta = getattr(settings.partitioner, "beta", None)
    chosen = {**_print_values(protocol_options, beta), **row.options}
    open_names = {k for k, v in protocol_settings.items() if v.open} | {
        f".{k}" for k, v in protocol_options.items() if v.open
    }
    if method not in protocol.proposes:
        open_names |= {
            f".{name}" for name in _unstated_options(method, protocol_options) - row.options.keys()
        }
    open_names |= set(UNSTATED_SETTINGS) - protocol_settings.keys()
    if row.split is None:
        open_names.add("split")
    # the partition of a row is part of its settings already
    conditions = {name: value for name, value in row.settings.items() if name != "partition"}
    variants = [
        _reading(
            PRINT,
            "paper",
            settings,
            method,
            {**printed_settings, **conditions},
            chosen,
            open_names,
        )
    ]
    if release and (
        method in release.methods or method in release.dataset_options.get(row.dataset, {})
    ):
        split = release.split(paper.settings(number).partition)
        code = {"as_released": paper.release, "partition": split}
        stated_names = set(release.settings_on(row.dataset)) | {
            f".{k}" for k in release.hyperparameters(method, row.dataset)
        }
        variants.append(
            _reading(
                f"the released code ({paper.release})",
                "code",
                paper.settings(number, **code),
                method,
                {"as_released": paper.release, **conditions},
                row.options,
                open_names - stated_names,
            )
        )
    return variants


def _reading(
    name: str,
    source: str,
    settings: Settings,
    method: str,
    changed_settings: Mapping[str, Any],
    changed_options: Mapping[str, Any],
    open_names: set[str],
) -> Reading:
    if method in METHODS.names():
        config = configure_run(method, settings, changed_options)
    else:
        config = RunConfig(method, {}, settings)
    return Reading(name, source, config, changed_settings, changed_options, frozenset(open_names))


def _print_values(statements: Mapping[str, Statement], beta: float | None = None) -> dict[str, Any]:
    """Return the printed values that the protocol replaces by another source's."""
    printed = {
        name: value.printed for name, value in statements.items() if value.printed is not ...
    }
    return {
        name: value.at(beta) if isinstance(value, ValuesByBeta) else value
        for name, value in printed.items()
    }


def _unstated_options(method: str, statements: Mapping[str, Statement]) -> set[str]:
    """Return options that a comparing paper does not state, without quirks of released code."""
    if method not in METHODS.names():
        return set()
    options = METHODS.options(method)
    return options.keys() - statements.keys() - {quirk.field for quirk in quirks(options)}


def differences(experiment: Experiment, line: Line, reading: Reading, seeds: int) -> list[str]:
    """List settings and options in which a row's runs differ from a reading.

    Args:
        experiment: Experiment of the row.
        line: Row of a table.
        reading: Reading to compare with.
        seeds: Number of runs in the paper.

    Returns:
        One text per difference, such as ``rounds 2 (paper: 5)``.
    """
    entries = []
    ours = settings_of(experiment)
    theirs = through_json(with_defaults(reading.config.settings.portable()))
    for name in (n for n in theirs if n not in (*EXCLUDED_SETTINGS, *NORMALISATION)):
        if not _agrees(name, ours, theirs, reading.open_names):
            entries.append((name, setting_word(name, ours[name]), setting_word(name, theirs[name])))
    if "mean" not in reading.open_names and _normalisation(ours) != _normalisation(theirs):
        entries.append(("normalisation", _normalisation_text(ours), _normalisation_text(theirs)))
    if len(line.seeds) < seeds:
        entries.append(("seeds", str(len(line.seeds)), str(seeds)))
    # a run from before an option existed counts as one with its default
    defaults = {k: v.default for k, v in METHODS.options(reading.config.method).items()}
    recorded_options = line.results[0].options
    unrecorded_options = {
        name: defaults[name] for name in reading.changed_options if name not in recorded_options
    }
    options = reading.options
    for name, value in {**recorded_options, **unrecorded_options}.items():
        if f".{name}" not in reading.open_names and name in options and value != options[name]:
            option = f"{reading.config.method}.{name}"
            entries.append((option, option_word(value), option_word(options[name])))
    return [
        f"{name} {our_word} ({reading.source}: {their_word})"
        for name, our_word, their_word in entries
    ]


def open_differences(experiment: Experiment, line: Line, reading: Reading) -> list[str]:
    """List open settings and options in which a row's runs differ from the protocol.

    Args:
        experiment: Experiment of the row.
        line: Row of a table.
        reading: Reading with the open settings and options.

    Returns:
        One text per setting or option, with its value in the runs.
    """
    ours, theirs = settings_of(experiment), through_json(reading.config.settings.portable())
    options = line.results[0].options
    settings = [
        f"{name} {setting_word(name, ours[name])}"
        for name in theirs
        if name in reading.open_names and ours[name] != theirs[name]
    ]
    return settings + [
        f"{reading.config.method}.{name} {option_word(options[name])}"
        for name, value in reading.options.items()
        if f".{name}" in reading.open_names and name in options and options[name] != value
    ]


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """Return the settings of runs, with full names of partition and backbone.

    Args:
        experiment: Experiment of the runs.
    """
    bench_file = experiment.bench_file
    return {
        **through_json(experiment.settings),
        "partition": bench_file.partition["spec"],
        "backbone": bench_file.backbone["name"],
    }


def _agrees(
    name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], open_names: frozenset[str]
) -> bool:
    is_open = name in open_names
    if is_open and name not in ROUGH_SETTINGS:
        return True
    a, b = ours[name], theirs[name]
    if name == "partition":
        return "split" in open_names or _split(a, is_open) == _split(b, is_open)
    if name == "backbone" and is_open:
        return str(a).split(".")[0] == str(b).split(".")[0]  # timm: ARCHITECTURE.WEIGHTS
    if name == "class_order_seed":
        if not is_open:
            return bool("class_order" in open_names or a == b)
        return (a is None) == (b is None)
    if name == "train_per_class" and is_open:
        return a in (None, b)  # all images, as in papers that do not state a number
    return bool(_tasks(a) == _tasks(b) if name == "tasks" else a == b)


def _tasks(value: Any) -> Any:
    return len(value) if isinstance(value, list) and len(set(value)) == 1 else value


def _split(spec: str, is_rough: bool) -> Any:
    """Return a partition in comparable form; ``is_rough`` keeps only what papers print."""
    if spec.startswith("file:"):
        return spec
    partitioner = PARTITIONERS.create(spec)
    return (plain_split(spec), getattr(partitioner, "scope", "")) if is_rough else partitioner


def _normalisation(settings: Mapping[str, Any]) -> list[tuple[float, ...]]:
    """Return mean and standard deviation of the input, by default the checkpoint's."""
    statistics = settings["mean"], settings["std"]
    if settings["norm_by_dataset"]:
        mean, std = released_norm(settings["dataset"])
        statistics = statistics[0] or mean, statistics[1] or std
    return [
        tuple(a or b)
        for a, b in zip(statistics, input_statistics(settings["backbone"]), strict=True)
    ]


def _normalisation_text(settings: Mapping[str, Any]) -> str:
    return " and ".join(map(option_word, _normalisation(settings)))
