"""Archives: equal tables from archive and run folders, and errors of damaged archives."""

import csv
import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.core.files import content_sha256, write_json
from fczoo.reports.archive import FOLDER_COLUMNS, REFERENCE, read_archive, write_archive
from fczoo.reports.run_folder import Runs
from fczoo.reports.runs import read_experiments, read_runs
from fczoo.reports.table_formats import report
from helpers_results import RESULTS

FORMATS = ("text", "markdown", "latex", "csv", "json")


@pytest.fixture
def folders(make_run, tmp_path: Path) -> Path:
    """Write three run folders.

    One has a rejected upload and different settings.
    """
    root = tmp_path / "runs"
    make_run(root / "a", {"one": {0: 70.0, 1: 72.3, 2: 74.1}, "two": {0: 60.0, 1: 62.1, 2: 63.9}})
    make_run(
        root / "b" / "c",
        {"three": {0: 68.0}},
        {"lr": 0.5, "blocks": [0, 1], "note": 'a "word", \n b'},
    )
    make_run(
        root / "d",
        {"one": {4: 1 / 3}},
        rounds=9,
        tasks=(5, 5),
        attack="sign-flip:5",
        local="fedprox:0.1",
        train_per_class=7,
        dp_clip=0.1,
        class_order=tuple(range(9, -1, -1)),
    )
    path = root / "d" / "one" / "seed4" / "result.json"
    fields = {
        "rejected": [{"task": 0, "moment": 0, "client": 1, "reason": "prompt is not finite"}],
        "privacy": {"epsilon": 3.25, "delta": 1e-5},
        "class_order": list(range(9, -1, -1)),
        "remark": "odd\nremark",
    }
    write_json(path, {**json.loads(path.read_text()), **fields})
    return root


def test_accuracy_without_test_images_is_nan(make_run, tmp_path):
    make_run(tmp_path / "runs", {"one": {0: 70.0}})
    path = tmp_path / "runs" / "one" / "seed0" / "result.json"
    result = json.loads(path.read_text())
    result["accuracy"][-1][-1], result["test_counts"][-1], result["metrics"] = None, 0, {}
    write_json(path, result)
    archive = write_archive_of(tmp_path / "runs", tmp_path / "all.csv")
    assert "NaN" not in archive.read_text()
    (record,) = read_runs([archive])[0].records
    assert math.isnan(record.result.accuracy[-1][-1])
    assert record.result.accuracy[:-1] == result["accuracy"][:-1]


def write_archive_of(place: Path, to: Path) -> Path:
    result = CliRunner().invoke(main, ["report", str(place), "--archive", str(to)])
    assert result.exit_code == 0, result.output
    return to


def content(runs: Runs) -> dict:
    """Return the parts of a folder that an archive keeps."""
    about = runs.bench_file.plain()
    about["settings"] = {k: v for k, v in about["settings"].items() if v is not None}
    about["methods"] = {c.method: c.result.options for c in runs.records}
    results = [
        {**vars(c.result), "settings": {}, "versions": {}, "partition": {}} for c in runs.records
    ]
    return {"name": runs.name, "about": about, "results": results, "split": runs.split}


def test_archive_keeps_every_field_of_runs(folders, tmp_path):
    runs = read_runs([write_archive_of(folders, tmp_path / "all.csv")])
    assert [content(r) for r in runs] == [content(r) for r in read_runs([folders])]
    assert [r.name for r in runs] == ["a", "b/c", "d"]
    again = tmp_path / "again.csv"
    write_archive(runs, again)
    assert again.read_text() == (tmp_path / "all.csv").read_text()


@pytest.mark.parametrize("style", FORMATS)
def test_archive_tables_equal_folder_tables(style, folders, tmp_path):
    assert report([write_archive_of(folders, tmp_path / "all.csv")], style) == report(
        [folders], style
    )


@pytest.mark.parametrize("style", FORMATS)
def test_every_format_lists_attack_and_privacy(style, folders):
    text = report([folders / "d"], style).replace("\\%", "%")
    assert "attack sign-flip:5 by 20 % of the clients" in text
    assert "clipped to norm 0.1" in text
    assert "local training fedprox:0.1" in text
    assert "attack" not in report([folders / "a"], style)


def test_report_page_reads_archive(folders, tmp_path):
    archive, page = write_archive_of(folders, tmp_path / "all.csv"), tmp_path / "page.html"
    result = CliRunner().invoke(main, ["report", str(archive), "--html", str(page)])
    assert result.exit_code == 0 and "sign-flip:5" in page.read_text()


def test_archive_skips_and_counts_unfinished_runs(folders, tmp_path):
    (folders / "a" / "one" / "seed2" / "result.json").unlink()
    result = CliRunner().invoke(
        main, ["report", str(folders), "--archive", str(tmp_path / "all.csv")]
    )
    assert result.output == f"7 runs written to {tmp_path / 'all.csv'}, 1 unfinished left out\n"


def change_row(path: Path, line: int, **cells: str) -> None:
    rows = list(csv.DictReader(path.open(newline="")))
    rows[line].update(cells)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ({"A_N": "99.0"}, "line 3: its content does not match its sha256"),
        (
            {"format": "fczoo-archive-9"},
            "line 3: format is 'fczoo-archive-9', expected 'fczoo-archive-2'",
        ),
    ],
)
def test_changed_archive_is_rejected(cells, says, folders, tmp_path):
    archive = write_archive_of(folders, tmp_path / "all.csv")
    change_row(archive, 1, **cells)
    result = CliRunner().invoke(main, ["report", str(archive)])
    assert result.exit_code == 1
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_other_csv_is_rejected_with_hint(tmp_path):
    (tmp_path / "own.csv").write_text("method,accuracy\nhgp,60\n")
    result = CliRunner().invoke(main, ["report", str(tmp_path / "own.csv")])
    assert result.exit_code == 1
    assert "own.csv is not an archive of runs: it has no column 'format'" in result.stderr
    assert "create one from run folders with `fczoo report FOLDER --archive FILE`" in result.stderr
    assert result.stderr.count("\n") == 1


def test_long_cell_is_written_once_per_column(folders, tmp_path):
    archive = write_archive_of(folders, tmp_path / "all.csv")
    rows = list(csv.DictReader(archive.open(newline="")))
    command = rows[0]["command"]
    assert len(command) > 20 and [row["command"] for row in rows[1:6]] == ["as row 2"] * 5
    assert len({row["sha256"] for row in rows}) == len(rows)
    for column in rows[0]:
        cells = [row[column] for row in rows]
        once = [cell for cell in cells if len(cell) > 20]
        assert column == "remark" or len(once) == len(set(once)), column
        targets = [int(cell.split()[2]) for cell in cells if REFERENCE.fullmatch(cell)]
        assert all(len(rows[target - 2][column]) > 20 for target in targets)


def test_user_text_like_reference_is_kept(folders, tmp_path):
    path = folders / "d" / "one" / "seed4" / "result.json"
    write_json(path, {**json.loads(path.read_text()), "remark": "as row 2"})
    runs = read_runs([write_archive_of(folders, tmp_path / "all.csv")])
    assert runs[-1].records[0].result.remark == "as row 2"


@pytest.mark.parametrize("target", [1, 3, 99])
def test_reference_without_earlier_row_is_rejected(target, folders, tmp_path):
    archive = write_archive_of(folders, tmp_path / "all.csv")
    change_row(archive, 1, command=f"as row {target}")
    result = CliRunner().invoke(main, ["report", str(archive)])
    assert result.exit_code == 1
    assert f"line 3: command is 'as row {target}', which names no earlier row" in result.stderr
    assert result.stderr.count("\n") == 1


def test_old_archive_format_is_read(folders, tmp_path):
    """Read an archive without references; only the first row of a folder has its values."""
    archive = write_archive_of(folders, tmp_path / "all.csv")
    rows = list(csv.DictReader(archive.open(newline="")))
    for row in rows:
        full = {
            column: rows[int(cell.split()[2]) - 2][column] if REFERENCE.fullmatch(cell) else cell
            for column, cell in row.items()
        }
        row.update(full, format="fczoo-archive-1")
    for number, row in enumerate(rows):
        if any(earlier["folder"] == row["folder"] for earlier in rows[:number]):
            row.update(dict.fromkeys(FOLDER_COLUMNS, ""))
        row["sha256"] = content_sha256(row)
        change_row(archive, number, **row)
    assert "as row" not in archive.read_text()
    assert [content(r) for r in read_runs([archive])] == [content(r) for r in read_runs([folders])]


def test_runs_in_folder_and_archive_count_once(folders):
    write_archive_of(folders, folders / "results.csv")
    experiments = read_experiments([folders])
    assert [len(e.lines) for e in experiments] == [3, 1]
    assert sum(len(e.runs) for e in experiments) == 6


@pytest.mark.parametrize("archive", sorted(RESULTS.glob("*.csv")), ids=lambda path: path.stem)
def test_repository_archives_are_rewritten_identically(archive, tmp_path):
    copy = tmp_path / archive.name
    write_archive(read_archive(archive), copy)
    assert copy.read_bytes() == archive.read_bytes()


def test_repository_results_are_small():
    """Limit the size: results are downloaded with the code, compressed to an eighth."""
    size = sum(path.stat().st_size for path in RESULTS.rglob("*") if path.is_file())
    assert size < 1_500_000
