"""Template data of one benchmark on a page: rows with tags and provenance, and figures.

Tags of methods are the filters of a page.
"""

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fczoo.board.charts import chart, download
from fczoo.board.ranks import test_differences
from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.options import build
from fczoo.core.registry import METHODS
from fczoo.federation.environment import digest
from fczoo.reports.captions import conditions, describe, notes, schedule_sources
from fczoo.reports.detail_figures import confusion_maps, diagnostic_figures
from fczoo.reports.figure_data import Figure
from fczoo.reports.figures import accuracy_matrix, overview
from fczoo.reports.run_folder import BenchFile
from fczoo.reports.runs import Experiment, Line, identity
from fczoo.reports.significance import SeedValues, interval
from fczoo.reports.table_formats import number, sign, to_csv
from fczoo.reports.tables import COLUMNS, GROUPS, Table, entry_of, make_table, percent
from fczoo.reports.text_format import setting_word


@dataclass(frozen=True)
class Title:
    """Description of a benchmark: data, protocol, backbone and budget."""

    data: str
    protocol: str
    backbone: str
    budget: str
    file: str  # file name of its page

    @property
    def title(self) -> str:
        return f"{self.data}, {self.protocol}"

    @property
    def subtitle(self) -> str:
        return f"{self.backbone}; {self.budget}"


def heading(experiment: Experiment) -> Title:
    """Create the title of an experiment, with a unique file name.

    Args:
        experiment: Runs with the same data, split, backbone and schedule.
    """
    s = experiment.settings
    backbone = experiment.bench_file.backbone["name"].split(".")[0]
    if s["image_size"]:
        backbone += f" at {s['image_size']} px"
    budget = [f"{s['rounds']} rounds x {s['epochs']} epochs per task", _images(s)]
    if s["precision"] != "fp32":
        budget.append(s["precision"])
    words = (
        s["dataset"],
        s["partition"],
        experiment.bench_file.backbone["name"].split("_patch")[0],
    )
    data = {name: value for name, value in experiment.bench_file.data.items() if name != "remarks"}
    identity_values = (*identity(experiment.bench_file), *sorted(data.items()))
    unique_hash = hashlib.sha256(repr(identity_values).encode()).hexdigest()[:6]
    name = "-".join([*words, f"{s['rounds']}x{s['epochs']}", unique_hash])
    return Title(
        data=s["dataset"],
        protocol=_protocol(experiment, s),
        backbone=backbone,
        budget=", ".join(budget),
        file=f"{re.sub(r'[^a-z0-9.]+', '-', name.lower()).strip('-.')}.html",
    )


def _protocol(experiment: Experiment, s: dict[str, Any]) -> str:
    count = len(experiment.first_result.task_sizes)
    kind = s["tasks"] if isinstance(s["tasks"], str) else "tasks" if count > 1 else "task"
    words = [f"{count} {kind}", f"{s['clients']} clients", experiment.bench_file.partition["spec"]]
    seed_sources = [name.replace("-", " ") for name in s["vary"] if name != "training"]
    by_seed = [f"{' and '.join(seed_sources)} drawn per seed"] if seed_sources else []
    return ", ".join([*words, *by_seed, *schedule_sources(s), *conditions(experiment)])


def _images(s: dict[str, Any]) -> str:
    return f"{s['train_per_class']} images per class" if s["train_per_class"] else "all images"


RESUME_OPTIONS = re.compile(
    r" --(?:(?:no-)?(?:resume|accept-changed-code|skip-failed)|jobs[ =]\S+)(?= |$)"
)
BARE_COMMAND = re.compile(r"\S+ bench(?: --out[ =](?:'[^']*'|\S+))?")


def commands(bench_files: Sequence[BenchFile]) -> list[str]:
    """Return the shell commands behind runs; commands that resumed the same runs are merged.

    Args:
        bench_files: Contents of ``bench.json`` of the run folders.
    """
    unique_commands: dict[str, None] = {}
    for bench_file in bench_files:
        for words in (*bench_file.earlier_commands, bench_file.command):
            command = RESUME_OPTIONS.sub("", shlex.join(words))
            if command and not BARE_COMMAND.fullmatch(command):
                unique_commands[command] = None
    return list(unique_commands)


def provenance(line: Line, names: Mapping[str, str]) -> list[tuple[str, str]]:
    """List versions, hardware and hashes of the runs of a row.

    Args:
        line: Row of a table.
        names: Names of runs by their ``place``.

    Returns:
        Pairs of name and value, one per distinct value; empty values are left out.
    """
    texts_by_name: dict[str, dict[str, None]] = {}
    for record, result in zip(line.records, line.results, strict=True):
        bench_file = record.bench_file
        versions = dict(result.versions or bench_file.versions)
        code = versions.pop("code", digest(bench_file.code) if bench_file.code else "")
        values = {
            "run": names[record.place],
            **versions,
            **bench_file.hardware,
            "device": bench_file.device,
            "started": bench_file.started or "not recorded",
            "code sha256": code,
            "backbone sha256": bench_file.backbone["sha256"],
            "partition sha256": bench_file.partition["sha256"],
            "data sha256": bench_file.data.get("sha256", ""),
        }
        for name, value in values.items():
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            texts_by_name.setdefault(name, {})[text] = None
    return [(name, text) for name, texts in texts_by_name.items() for text in texts if text]


MAIN_COLUMNS = ("A_N", "Avg", "forgetting", "MB sent", "seconds")
"""Columns of the first table; other tables have the rest."""
NO_ROLES: Mapping[str, str] = {}


def benchmark(
    experiment: Experiment,
    index: int,
    order: Mapping[str, int],
    extra_figures: Sequence[Figure] = (),
    roles: Mapping[str, str] = NO_ROLES,
) -> dict[str, Any]:
    """Return the template data of one experiment of a page.

    Args:
        experiment: Runs with the same data, split, backbone and schedule.
        index: Index of the experiment on its page, from 0.
        order: Colour number by row label.
        extra_figures: Figures of features.
        roles: Role in a suite by row label.

    Returns:
        Values by template name.
    """
    lines = sort_lines(experiment)
    experiment = replace(experiment, lines=tuple(lines))
    tags = [tags_of(line) for line in lines]
    charts = [chart(figure) for figure in overview(experiment)]
    names = {
        record.place: f"{runs.name}/{record.method}/seed{record.seed}"
        for runs in experiment.runs
        for record in runs.records
    }
    rows = [
        _row(line, row_tags, f"b{index}-{i}", names)
        for i, (line, row_tags) in enumerate(zip(lines, tags, strict=True))
    ]
    for row in rows:
        row["colour"] = order[row["label"]]
        row["role"] = roles.get(row["label"], "method")
    return {
        "id": f"b{index}",
        "heading": heading(experiment),
        "about": describe(experiment).split("\n"),
        "rows": rows,
        "main": _table(make_table(experiment, MAIN_COLUMNS)),
        "tables": [_table(make_table(experiment, group)) for group in GROUPS],
        "ablations": "ablation" in roles.values(),
        "tested": any(len(line.seeds) > 1 for line in lines),
        "choices": choices(tags),
        "charts": [f for f in charts if f["kind"] in ("curves", "points")],
        "other_charts": [f for f in charts if f["kind"] not in ("curves", "points")],
        "confusion": [chart(figure) for line in lines for figure in confusion_maps(line)],
        "features": [chart(figure) for figure in extra_figures],
        "diagnostics": [chart(figure) for line in lines for figure in diagnostic_figures(line)],
        "notes": notes(experiment),
        "settings": [(k, setting_word(k, v)) for k, v in experiment.settings.items()],
        "csv": download(to_csv([experiment])),
        **test_differences(lines),
    }


def sort_lines(experiment: Experiment) -> list[Line]:
    """Sort the lines by A_N, best first; lines that are not ranked come last."""

    def key(line: Line) -> tuple[bool, float]:
        entry = entry_of(line, COLUMNS["A_N"])
        return not line.is_ranked, -entry.mean if entry else 0.0

    return sorted(experiment.lines, key=key)


def choices(tags: Sequence[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """Return the choices of each filter, sorted.

    Args:
        tags: Tags by filter, for each row.

    Returns:
        Tags of all rows by filter.
    """
    known_tags: dict[str, set[str]] = {}
    for row_tags in tags:
        for name, values in row_tags.items():
            known_tags.setdefault(name, set()).update(values)
    return {name: sorted(values) for name, values in known_tags.items()}


def _row(
    line: Line, tags: Mapping[str, Sequence[str]], anchor: str, names: Mapping[str, str]
) -> dict[str, Any]:
    """Return the template data of a table row; ``names`` has names of runs by ``place``."""
    accuracy = entry_of(line, COLUMNS["A_N"])
    bounds = interval(list(accuracy.by_seed.values())) if accuracy else None
    entries = [(COLUMNS[name], entry_of(line, COLUMNS[name])) for name in MAIN_COLUMNS]
    by_seed = [
        (
            seed,
            [
                column.show(e.by_seed[seed]) if e and seed in e.by_seed else "–"
                for column, e in entries
            ],
        )
        for seed in line.seeds
    ]
    return {
        "label": line.label,
        "anchor": anchor,
        "tags": tags,
        "family": tags["family"][0],
        "interval": f"{percent(bounds[0])} to {percent(bounds[1])}" if bounds else "",
        "remark": line.remark,
        "options": [(k, setting_word(k, v)) for k, v in line.results[0].options.items()],
        "commands": commands([record.bench_file for record in line.records]),
        "provenance": provenance(line, names),
        "by_seed": by_seed,
        "matrix": chart(accuracy_matrix(line)),
    }


def _table(table: Table) -> dict[str, Any]:
    arrows = {"high": "↑", "low": "↓", "": ""}

    def cell(entry: SeedValues | None, i: int) -> dict[str, Any]:
        text = number(entry, table.columns[i])
        if entry is None:
            return {"text": text, "value": "", "mark": "", "sign": ""}
        test_sign = sign(entry, "≈", "†")
        return {"text": text, "value": repr(entry.mean), "mark": entry.mark, "sign": test_sign}

    head = [(c.name, arrows[c.better], c.meaning) for c in table.columns]
    rows = [
        (label, [cell(entry, i) for i, entry in enumerate(row)], seeds)
        for label, row, seeds in zip(table.labels, table.rows, table.seeds, strict=True)
    ]
    return {"head": head, "rows": rows}


UNKNOWN = "not installed here"
NETWORK = "whole network"
TENSOR_KINDS = {
    "full": NETWORK,
    "lora": "LoRA",
    "prefix": "prompts",
    "general": "prompts",
    "expert": "prompts",
    "component": "prompts",
    "pool": "prompts",
    "common": "prompts",
    "prompt": "prompts",
    "adapter": "adapters",
    "head": "head",
    "classifier": "head",
    "own": "prompts",
    "projection": "head",
    "flow": "flow",
    "proxy": "head",
    "eta": "head",
    "sigma": "head",
    "fusion": "head",
    "prototype": "prototypes",
    "tab": "task tokens",
    "new": "task tokens",
    "old": "task tokens",
}
"""Kind of a trained tensor, by the first word of its name; other words are kinds themselves."""
FAMILIES = (NETWORK, "LoRA", "prompts", "adapters", "prototypes", "head")
"""Kinds of trained tensors; a method's family is the first kind that it trains."""


def tags_of(line: Line) -> dict[str, tuple[str, ...]]:
    """Return the tags of a row's method.

    Args:
        line: Row of a table; if its method is not installed, some tags are ``UNKNOWN``.

    Returns:
        Tags by filter: family of the method; exemplars (kept or none); content of its uploads, as
        its runs counted it; kinds of trained tensors; and tuning, the number of trials of ``fczoo
        tune`` that found its values.
    """
    uploads = [r.uploaded for r in line.results]
    upload_kinds = tuple(
        dict.fromkeys(content for c in uploads for content, size in c.items() if size)
    )
    efforts = dict.fromkeys(record.trials for record in line.records)
    tuning = tuple(f"{effort or 'no'} trials" for effort in efforts)
    method = _method(line)
    family = exemplars = UNKNOWN
    trained_kinds: tuple[str, ...] = (UNKNOWN,)
    if method is not None:
        training = method.training()
        trained_kinds = tensor_kinds(training.trained_prefixes) or ("nothing",)
        exemplars = "kept" if training.exemplars else "none"
        if not line.is_ranked:
            family = "upper bound"
        elif training.exemplars:
            family = "exemplars"
        else:
            family = next((name for name in FAMILIES if name in trained_kinds), "statistics only")
    return {
        "family": (family,),
        "exemplars": (exemplars,),
        "sent": upload_kinds,
        "trained": trained_kinds,
        "tuning": tuning,
    }


def tensor_kinds(prefixes: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct kinds of tensors with these prefixes.

    Args:
        prefixes: Prefixes of tensor names, as in a method's ``training().trained_prefixes``.
    """
    first_words = [prefix.partition(".")[0].partition("_")[0] for prefix in prefixes]
    return tuple(dict.fromkeys(TENSOR_KINDS.get(word, word) for word in first_words))


def _method(line: Line) -> Method | None:
    """Create the method of a run; None if it is not installed or its options are invalid now."""
    name, options = line.records[0].method, line.results[0].options
    if name not in METHODS.names():
        return None
    cls = METHODS.get(name)
    field_names = {f.name for f in dataclasses.fields(cls)}
    try:
        return build(cls, name, {k: v for k, v in options.items() if k in field_names})
    except FczooError:
        return None
