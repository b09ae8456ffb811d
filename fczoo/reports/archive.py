"""Archives: CSV files of finished runs, one row per run, with all data for tables."""

import csv
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fczoo.core.errors import FczooError
from fczoo.core.files import (
    Count,
    Number,
    content_sha256,
    convert_json,
    encode_json,
    restore_nan,
    to_csv_text,
    unquote_formula,
    write_safely,
)
from fczoo.core.metrics import METRICS, MORE_METRICS
from fczoo.federation.result import EVALUATION_METRICS, METRIC_FIELDS, Result, check_result
from fczoo.reports.run_folder import BenchFile, PartitionSummary, RunRecord, Runs, check_bench_file
from fczoo.reports.text_format import option_word

FORMAT = "fczoo-archive-2"
OLD_FORMAT = "fczoo-archive-1"  # without cells of the form REFERENCE; with empty FOLDER_COLUMNS
NATURAL = "natural"
SETTING_PREFIX = "settings."  # prefix of the columns of settings


class Row(msgspec.Struct, kw_only=True):
    """Row of one run; cells are text or JSON, and metrics and settings have extra columns."""

    format: str
    folder: str
    method: str
    seed: Count
    options: dict[str, Any]
    remark: str
    accuracy: list[list[float]]
    test_counts: list[Count]
    task_sizes: list[Count]
    class_order: str  # "natural", or original labels in order of arrival
    trained_scalars: Count
    bytes_up: Count
    bytes_down: Count
    client_rounds: Count
    uploaded: dict[str, Count]
    rejected: list[dict[str, Any]]
    privacy: dict[str, Number]
    seconds: Number
    phases: dict[str, Number]
    client_storage: Count | None
    server_storage: Count | None
    peak_memory: dict[str, Count]
    backbone: str  # its name
    backbone_sha256: str
    backbone_shape: dict[str, Any]
    partition: str  # spec, as for --partition
    partition_seed: Count
    partition_sha256: str
    train_images: Count
    train_counts: list[list[Count]]  # images, [task][client]
    data: dict[str, Any]
    split: str
    device: str
    hardware: dict[str, Any]
    versions: dict[str, str]
    started: str
    command: str  # quoted for a shell
    earlier_commands: list[str]
    tuned: dict[str, Any] = {}  # older archives lack it
    far: dict[str, Count] = {}  # uploads with far statistics by client; older archives lack it
    warnings: list[str] = []  # of the run folder
    curve: list[list[Any]] = []  # older archives lack it
    curve_seconds: list[Number] = []  # older archives lack it
    virtual_seconds: Number = 0.0
    start: dict[str, Any] = {}  # older archives lack it
    pretraining: str = ""  # overlap of pre-training data and classes; not read, but derived again


CONVERTED_COLUMNS = {
    "class_order",
    "backbone",
    "partition",
    "versions",
    "command",
    "earlier_commands",
}
"""Columns named like fields of ``Result`` or ``BenchFile``, but with another format."""
_COLUMNS = [
    field.name for field in msgspec.structs.fields(Row) if field.name not in CONVERTED_COLUMNS
]
RESULT_COLUMNS = [name for name in _COLUMNS if name in Result.__dataclass_fields__]
"""Columns that contain an unchanged field of ``Result``."""
BENCH_COLUMNS = [name for name in _COLUMNS if name in BenchFile.__struct_fields__]
"""Columns that contain an unchanged field of ``BenchFile``."""
METRIC_COLUMNS = (*METRICS, *MORE_METRICS, *EVALUATION_METRICS)
TEXT_COLUMNS = tuple(f.name for f in msgspec.structs.fields(Row) if f.type is str)
ADVICE = "create one from run folders with `fczoo report FOLDER --archive FILE`"
REFERENCE = re.compile(r"as row ([1-9]\d{0,8})")  # the header is row 1, as in spreadsheets
MAX_FULL_LENGTH = 20  # characters up to which a repeated cell is written in full
FREE_TEXTS = {"folder", "method", "remark"}  # free texts, which could look like a reference
FOLDER_COLUMNS = (
    "backbone_shape",
    "train_counts",
    "data",
    "hardware",
    "tuned",
    "earlier_commands",
    "warnings",
)
"""Columns that are filled only in the first row of a folder in archives of the old format."""


def write_archive(all_runs: Sequence[Runs], path: Path) -> tuple[int, int]:
    """Write every finished run to a CSV file.

    Runs share long values, such as class order, split and options. If an earlier row N has the same
    text of more than ``MAX_FULL_LENGTH`` characters in the column, the cell is ``as row N``.

    Args:
        all_runs: Runs by run folder.
        path: File to write.

    Returns:
        Number of runs written, and number of unfinished runs.

    Raises:
        FczooError: Two run folders have the same name.
    """
    rows, names = [], set()
    for runs in all_runs:
        if runs.name in names:
            raise FczooError(f"two run folders are called {runs.name}; give their parent folder")
        names.add(runs.name)
        finished_runs = [
            (record, record.result) for record in runs.records if record.result is not None
        ]
        rows += [_cells(runs, record, result) for record, result in finished_runs]
    columns = dict.fromkeys(column for row in rows for column in row)
    lines = [[*columns, "sha256"]]
    first_rows: dict[tuple[str, str], int] = {}
    for number, row in enumerate(rows, 2):
        full_row = {column: row.get(column, "") for column in columns}
        cells = [_shorten(column, cell, number, first_rows) for column, cell in full_row.items()]
        lines.append([*cells, content_sha256(full_row)])
    write_safely(path, to_csv_text(lines).encode())
    return len(rows), sum(len(runs.records) for runs in all_runs) - len(rows)


def _shorten(column: str, cell: str, number: int, first_rows: dict[tuple[str, str], int]) -> str:
    """Return a cell, or a reference to the first row with the same text in its column."""
    if len(cell) <= MAX_FULL_LENGTH or column in FREE_TEXTS:
        return cell
    first = first_rows.setdefault((column, cell), number)
    return cell if first == number else f"as row {first}"


def _cells(runs: Runs, record: RunRecord, result: Result) -> dict[str, str]:
    """Return one run's row by column."""
    bench_file = runs.bench_file
    is_natural = result.class_order == list(range(sum(result.task_sizes)))
    row = Row(
        format=FORMAT,
        folder=runs.name,
        **{name: getattr(result, name) for name in RESULT_COLUMNS},
        **{name: getattr(bench_file, name) for name in BENCH_COLUMNS},
        class_order=NATURAL if is_natural else option_word(result.class_order),
        backbone=bench_file.backbone["name"],
        backbone_sha256=bench_file.backbone["sha256"],
        pretraining=bench_file.contamination,
        backbone_shape={
            k: v for k, v in bench_file.backbone.items() if k not in ("name", "sha256")
        },
        partition=bench_file.partition["spec"],
        partition_seed=runs.split.seed,
        partition_sha256=bench_file.partition["sha256"],
        train_images=runs.split.images,
        train_counts=runs.split.counts,
        versions=result.versions or bench_file.versions,
        command=shlex.join(bench_file.command),
        earlier_commands=[shlex.join(command) for command in bench_file.earlier_commands],
    )
    plain = msgspec.to_builtins(row)
    texts = {
        k: v if k in TEXT_COLUMNS else encode_json(v, separators=(",", ":"))
        for k, v in plain.items()
    }
    metrics = {k: encode_json(v) for k, v in result.metrics.items() if math.isfinite(v)}
    settings = {
        f"{SETTING_PREFIX}{name}": option_word(value) for name, value in bench_file.settings.items()
    }
    return {**texts, **metrics, **settings}


def read_archive(path: Path) -> list[Runs]:
    """Read the runs of an archive, grouped by run folder.

    Args:
        path: CSV file that ``write_archive`` wrote.

    Returns:
        One ``Runs`` per run folder.

    Raises:
        FczooError: The file is not an archive; the message names line and column.
    """
    folders: dict[str, list[RunRecord]] = {}
    first_rows: dict[str, Row] = {}
    for number, cells in enumerate(_rows(path), 2):
        try:
            row = _row(cells, first_rows)
            record = _run_record(path, row, cells)
        except ValueError as error:
            problem = f"{path} is not a valid archive of runs: line {number}: {error}"
            raise FczooError(f"{problem}; {ADVICE}") from error
        first_rows.setdefault(row.folder, row)
        folders.setdefault(row.folder, []).append(record)
    return [_runs(path, first_rows[name], records) for name, records in folders.items()]


def _rows(path: Path) -> Iterator[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            if "format" not in (reader.fieldnames or ()):
                raise FczooError(
                    f"{path} is not an archive of runs: it has no column 'format'; {ADVICE}"
                )
            rows: list[dict[str, str]] = []
            for cells in reader:
                cells = {
                    k: unquote_formula(v) if isinstance(v, str) else v for k, v in cells.items()
                }
                if cells["format"] == FORMAT:
                    cells = {k: _restore(k, v, rows) for k, v in cells.items()}
                rows.append(cells)
                yield cells
    except (ValueError, csv.Error) as error:
        raise FczooError(f"{path} is not a valid archive of runs: {error}; {ADVICE}") from error


def _restore(column: str, cell: str, rows: Sequence[Mapping[str, str]]) -> str:
    """Return the full text of a cell that may refer to an earlier row."""
    # A cell is no text in a row with too few or too many cells, which ``_row`` refuses.
    is_text = isinstance(cell, str) and column not in FREE_TEXTS
    reference = REFERENCE.fullmatch(cell) if is_text else None
    if reference is None:
        return cell
    index = int(reference[1]) - 2
    if not 0 <= index < len(rows):
        raise ValueError(f"line {len(rows) + 2}: {column} is {cell!r}, which names no earlier row")
    return rows[index][column]


def _row(cells: Mapping[str, str], first_rows: Mapping[str, Row]) -> Row:
    if cells.get("format") not in (FORMAT, OLD_FORMAT):
        raise ValueError(f"format is {cells.get('format')!r}, expected {FORMAT!r}")
    if None in cells or None in cells.values() or cells.get("sha256") != content_sha256(cells):
        raise ValueError("its content does not match its sha256; it was changed or is damaged")
    content: dict[str, Any] = {}
    for field in msgspec.structs.fields(Row):
        if field.name not in cells and not field.required:
            continue
        if field.name not in cells:
            raise ValueError(f"it lacks the column {field.name}")
        text = cells[field.name]
        if not text and cells["format"] == OLD_FORMAT and field.name in FOLDER_COLUMNS:
            if cells["folder"] not in first_rows:
                raise ValueError(f"{field.name} is empty in the first row of {cells['folder']}")
            content[field.name] = getattr(first_rows[cells["folder"]], field.name)
            continue
        try:
            content[field.name] = text if field.name in TEXT_COLUMNS else json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{field.name}: {error}") from error
    return convert_json(restore_nan(content, METRIC_FIELDS), Row)


def _run_record(path: Path, row: Row, cells: Mapping[str, str]) -> RunRecord:
    """Return the run of one row.

    Raises ValueError if the row is inconsistent.
    """
    names = [name for name in cells if name.startswith(SETTING_PREFIX)]
    bench_file = check_bench_file(
        BenchFile(
            methods={row.method: row.options},
            seeds=[row.seed],
            settings={
                name.removeprefix(SETTING_PREFIX): cells[name] for name in names if cells[name]
            },
            backbone={"name": row.backbone, "sha256": row.backbone_sha256, **row.backbone_shape},
            partition={"spec": row.partition, "sha256": row.partition_sha256},
            versions=row.versions,
            command=shlex.split(row.command),
            earlier_commands=[shlex.split(command) for command in row.earlier_commands],
            **{name: getattr(row, name) for name in BENCH_COLUMNS},
        )
    )
    is_natural = row.class_order == NATURAL
    result = Result(
        settings=bench_file.settings,
        backbone=bench_file.backbone,
        partition={**bench_file.partition, "seed": row.partition_seed},
        class_order=list(range(sum(row.task_sizes)))
        if is_natural
        else [*map(int, row.class_order.split(","))],
        metrics={name: float(cells[name]) for name in METRIC_COLUMNS if cells.get(name)},
        versions=row.versions,
        **{name: getattr(row, name) for name in RESULT_COLUMNS},
    )
    location = f"{path}: {row.folder}/{row.method}/seed{row.seed}"
    return RunRecord(location, None, bench_file, row.method, row.seed, check_result(result))


def _runs(path: Path, row: Row, records: Sequence[RunRecord]) -> Runs:
    """Combine the runs of one folder's rows under one description."""
    methods: dict[str, dict[str, Any]] = {}
    for record in records:
        methods |= record.bench_file.methods
    seeds = sorted({record.seed for record in records})
    bench_file = msgspec.structs.replace(records[0].bench_file, methods=methods, seeds=seeds)
    split = PartitionSummary(
        spec=row.partition,
        seed=row.partition_seed,
        sha256=row.partition_sha256,
        images=row.train_images,
        counts=row.train_counts,
    )
    return Runs(
        row.folder, f"{path}: {row.folder}", bench_file, tuple(records), archived_split=split
    )
