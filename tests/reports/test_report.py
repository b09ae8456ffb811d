"""Tables and run folders: marks, formats, grouping and errors, on small written results."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

from fczoo import load_results
from fczoo.board.pages import write_page
from fczoo.cli.app import main
from fczoo.core.errors import FczooError
from fczoo.core.files import write_json
from fczoo.reports.drawing import draw
from fczoo.reports.figures import accuracy_curves, colour_order
from fczoo.reports.runs import read_experiments
from fczoo.reports.significance import SeedValues, differ_significantly
from fczoo.reports.table_formats import legend, report, to_latex, to_markdown, to_text
from fczoo.reports.tables import ACCURACY, COLUMNS, Table, make_table, mark_entries

THREE = {
    "one": {0: 70.0, 1: 72.0, 2: 74.0},
    "two": {0: 60.0, 1: 62.1, 2: 63.9},
    "three": {0: 68.0, 1: 80.0, 2: 60.0},
}


@pytest.fixture
def folder(make_run: Callable[..., Path], tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", THREE)


def test_means_and_marks_match_hand_computation(folder):
    (experiment,) = read_experiments([folder])
    rows = {
        line.split()[0]: line
        for line in to_text(
            make_table(experiment, ["FAA", "forgetting", "MB up", "client MB", "server MB"])
        ).splitlines()
    }
    # FAA = (last + 80) / 2: means 76, 71, 74.67; deviation of one: 70, 72, 74 -> 2 / 2 = 1.
    assert rows["one"].split("  ")[0] == "one"
    assert "*76.0 ± 1.0" in rows["one"]
    assert "*18.0 ± 2.0" in rows["one"]
    assert "°74.7 ± 5.0 ~" in rows["three"]  # (8, 12, -14) vary too much for significance
    assert re.search(
        r"[^°*]71\.0 ± 1\.0 [^~]", rows["two"]
    )  # paired differences 10, 9.9, 10.1 are significant although the std is 1
    assert "2.000" in rows["one"]
    assert "3.000" in rows["one"]
    assert "–" in rows["one"]
    assert rows["one"].split()[-1] == "3"


def test_upload_columns_match_hand_computation(folder):
    """Compare upload columns with values computed by hand.

    Two uploads have 4 MB, 1 MB of it counts. One seed has a rejected upload, two have epsilon.
    """
    for seed, change in (
        (
            0,
            {"rejected": [{"task": 0, "moment": 0, "client": 1, "reason": "prompt is not finite"}]},
        ),
        (1, {"uploaded": {}}),
    ):
        path = folder / "one" / f"seed{seed}" / "result.json"
        write_json(
            path,
            json.loads(path.read_text())
            | {"privacy": {"epsilon": 3.0 + seed, "delta": 1e-5}}
            | change,
        )
    (experiment,) = read_experiments([folder])
    names = ["parameters", "counts", "class means", "rejected", "epsilon"]
    one, two, _ = make_table(experiment, names).rows
    assert [e and dict(e.by_seed) for e in one] == [
        {0: 1.5, 2: 1.5},
        {0: 0.5, 2: 0.5},
        {0: 0, 2: 0},
        {0: 1, 1: 0, 2: 0},
        {0: 3, 1: 4},
    ]
    assert [e and e.mark for e in one] == [""] * 5 and two[4] is None
    text = " ".join(report([folder], "text").split())
    assert "one: uploads rejected or lost: 1, 1 x prompt is not finite" in text
    assert "which classes a client has" in text


def test_paired_test_matches_textbook():
    a, b = SeedValues({0: 70.0, 1: 72.0, 2: 75.0}), SeedValues({0: 69.0, 1: 70.0, 2: 74.5, 9: 0.0})
    d = np.array([1.0, 2.0, 0.5])
    p = 2 * stats.t.sf(d.mean() / (d.std(ddof=1) / 3**0.5), 2)
    assert differ_significantly(a, b) is bool(p < 0.05)
    assert differ_significantly(SeedValues({0: 1.0}), SeedValues({0: 2.0})) is None
    assert differ_significantly(SeedValues({0: 1.0, 1: 2.0}), SeedValues({2: 1.0, 3: 1.0})) is None


def test_constant_difference_is_not_tested():
    """Do not test a difference that is the same for every seed."""
    assert differ_significantly(SeedValues({0: 5.0, 1: 5.0}), SeedValues({0: 4.0, 1: 4.0})) is None
    assert differ_significantly(SeedValues({0: 5.1, 1: 6.1}), SeedValues({0: 5.0, 1: 6.0})) is None
    assert differ_significantly(SeedValues({0: 5.0, 1: 6.0}), SeedValues({0: 5.0, 1: 6.0})) is None


def test_one_seed_is_not_tested_and_one_method_not_ranked(make_run, tmp_path):
    text = report(
        [make_run(tmp_path / "one", {m: {0: runs[0]} for m, runs in THREE.items()})], "text"
    )
    assert "*75.0" in text
    assert "one seed: differences are not tested" in text
    assert "~" not in text
    assert "±" not in text
    assert "*" not in report([make_run(tmp_path / "alone", {"one": THREE["one"]})], "text").replace(
        "10^6", ""
    )


def test_low_forgetting_is_best_and_ties_share_mark():
    low = COLUMNS["forgetting"]
    assert [
        e and e.mark
        for e in mark_entries(
            [
                SeedValues({0: 3.0}),
                None,
                SeedValues({0: 1.0}),
                SeedValues({0: 1.0}),
                SeedValues({0: 9.0}),
            ],
            low,
        )
    ] == [
        "",
        None,
        "best",
        "best",
        "",
    ]


def test_upper_bound_is_shown_but_not_ranked(make_run, tmp_path):
    folder = make_run(tmp_path / "run", {"bound": {0: 99.0}, "one": {0: 70.0}, "two": {0: 60.0}})
    path = folder / "bound" / "seed0" / "result.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "remark": "upper bound: sees everything"})
    )
    text = report([folder], "text")
    first = {
        line.split()[0]: line.split()[1]
        for line in reversed(text.splitlines())
        if line.startswith(("bound ", "one ", "two "))
    }
    assert first == {"bound": "89.5", "one": "*75.0", "two": "°70.0"}
    assert "bound: upper bound: sees everything" in text


def test_every_format_has_all_values(folder):
    latex, markdown = report([folder], "latex"), report([folder], "markdown")
    assert r"\toprule" in latex
    caption = next(line for line in latex.splitlines() if line.startswith(r"\caption"))
    assert "participation 1. vit" in caption
    assert r"\textbf{76.0 $\pm$ 1.0}" in latex
    assert r"\underline{74.7 $\pm$ 5.0}$^{\approx}$" in latex
    assert r"A\_N" in latex
    body = [line for line in latex.splitlines() if not line.startswith("%")]
    assert "_" not in " ".join(body).replace(r"\_", "")
    assert latex.count(r"\begin{tabular}") == latex.count(r"\bottomrule") == 3
    assert "**76.0 ± 1.0**" in markdown and "<ins>74.7 ± 5.0</ins> ≈" in markdown
    rows = list(csv.DictReader(io.StringIO(report([folder], "csv"))))
    assert float(rows[0]["FAA"]) == 76.0
    assert float(rows[0]["FAA std"]) == 1.0
    assert rows[0]["MB up"] == "2.0"
    assert rows[0]["server MB"] == ""
    assert set(COLUMNS) < set(rows[0])
    (table,) = json.loads(report([folder], "json"))
    assert set(table["rows"][0]["values"]) == set(COLUMNS)
    assert table["rows"][0]["values"]["FAA"]["by_seed"] == {"0": 75.0, "1": 76.0, "2": 77.0}
    field = "significantly_different_from_best"
    assert table["rows"][2]["values"]["FAA"][field] is False
    assert table["rows"][0]["values"]["FAA"][field] is None  # the best


def test_duplicate_run_counts_once_and_conflict_is_rejected(make_run, tmp_path):
    make_run(tmp_path / "a", {"one": THREE["one"]})
    make_run(tmp_path / "b", {"one": {0: 70.0, 5: 71.0}})
    (experiment,) = read_experiments([tmp_path])
    assert [line.seeds for line in experiment.lines] == [[0, 1, 2, 5]]
    make_run(tmp_path / "c", {"one": {5: 71.5}})
    with pytest.raises(
        FczooError,
        match=(
            r"one with seed 5 has different results in .*b/one/seed5 and .*c/one/seed5; "
            r"give one"
        ),
    ):
        read_experiments([tmp_path])


def test_unfinished_and_failed_runs_are_listed_separately(folder):
    write_json(folder / "two" / "seed1" / "failed.json", {"error": "two diverged"})
    result = json.loads((folder / "three" / "seed0" / "result.json").read_text())
    write_json(
        folder / "three" / "seed0" / "result.json",
        {**result, "finished": False, "accuracy": result["accuracy"][:1], "metrics": {}},
    )
    (folder / "one" / "seed2" / "result.json").unlink()
    text = report([folder], "text")
    for line in (
        "two seed 1: two diverged",
        "three seed 0: stopped after task 1 of 2",
        "one seed 2: not started",
    ):
        assert f"not finished: {line}" in text
    assert [
        line.split()[-1] for line in text.splitlines() if line.startswith(("one", "two", "three"))
    ][:3] == ["2", "2", "2"]


def test_string_settings_are_parsed_and_latex_is_escaped(folder, make_run):
    change_fields(
        folder / "bench.json",
        settings={
            **json.loads((folder / "bench.json").read_text())["settings"],
            "participation": "1.0",
            "tasks": "2",
        },
    )
    change_fields(folder / "one/seed0/result.json", uploaded={"parameters": 8, "counts": 4_000_000})
    (experiment,) = read_experiments([folder])
    assert experiment.settings["participation"] == 1.0 and experiment.task_count == 2
    assert "$<$0.001" not in report([folder], "text")
    assert re.search(r"^ *one +& ", report([folder], "latex"), re.MULTILINE)
    assert " < " not in report([folder], "latex")


def change_fields(path: Path, **fields: object) -> None:
    write_json(path, {**json.loads(path.read_text()), **fields})


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "bench.json").unlink(), "no run folder at or below"),
        (lambda f: (f / "bench.json").write_text("{"), "not a valid run description"),
        (lambda f: (f / "bench.json").write_text("[]"), "expected a JSON object"),
        (lambda f: (f / "bench.json").write_text("{}"), "Object missing required field `methods`"),
        (
            lambda f: change_fields(f / "bench.json", methods={"../one": {}}),
            "methods: '../one' is not the name of a method",
        ),
        (
            lambda f: change_fields(f / "bench.json", seeds=["0"]),
            "seeds[0]: Expected `int`, got `str`",
        ),
        (
            lambda f: change_fields(f / "bench.json", settings={"clients": -1}),
            "settings.clients is -1; it must be between 1 and 1000000",
        ),
        (
            lambda f: change_fields(f / "one/seed0/result.json", accuracy=[[90.0], [70.0]]),
            "the lengths do not fit",
        ),
        (
            lambda f: change_fields(f / "one/seed0/result.json", metrics={"A_N": 99.0}),
            "metrics.A_N is 99, but its accuracies give 75",
        ),
        (
            lambda f: change_fields(f / "one/seed0/result.json", accuracy=[[90.0], [170.0, 80.0]]),
            "accuracy: a value is not a percentage",
        ),
        (
            lambda f: change_fields(f / "one/seed0/result.json", seed="two\nlines"),
            "seed: Expected `int`, got `str`",
        ),
        (
            lambda f: change_fields(f / "one/seed0/result.json", format="fczoo-result-9"),
            "format is 'fczoo-result-9', expected 'fczoo-result-1'",
        ),
        (
            lambda f: (f / "one/seed0/result.json").write_text('{"method": "one"}'),
            "not a valid result file",
        ),
        (lambda f: [p.unlink() for p in f.rglob("result.json")], "no run is finished"),
    ],
)
def test_invalid_run_folder_is_rejected(folder, spoil, says):
    spoil(folder)
    result = CliRunner().invoke(main, ["report", str(folder)])
    assert result.exit_code == 1
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_every_accuracy_column_has_direction():
    assert {c.name: c.better for c in ACCURACY} == {
        **dict.fromkeys(("A_N", "Avg", "FAA", "Abar", "BWT"), "high"),
        **dict.fromkeys(("forgetting", "forgetting_first", "forgetting_best"), "low"),
    }


def entries(*by_seed):
    return [SeedValues(dict(enumerate(values))) for values in by_seed]


def test_untested_row_is_marked():
    """Mark a row that was not tested against the best.

    The second row is 2 points below with each seed, so it is not tested. The third row is 15
    points below and 5 points above the best row.
    """
    best, second, third = mark_entries(entries([55, 57], [53, 55], [40, 62]), COLUMNS["A_N"])
    assert (best.mark, best.is_different, best.is_untested) == ("best", None, False)
    assert (second.mark, second.is_different, second.is_untested) == ("second", None, True)
    assert (third.mark, third.is_different, third.is_untested) == ("", False, False)
    table = Table((COLUMNS["A_N"],), ("a", "b", "c"), (2, 2, 2), ((best,), (second,), (third,)))
    assert "°54.0 ± 1.4 ?" in to_text(table) and "51.0 ± 15.6 ~" in to_text(table)
    assert "<ins>54.0 ± 1.4</ins> †" in to_markdown(table)
    assert "51.0 ± 15.6 ≈" in to_markdown(table)
    assert r"\underline{54.0 $\pm$ 1.4}$^{\dagger}$" in to_latex(table, "")
    assert "? not tested against the best" in " ".join(legend([table], "text").split())
    assert "† not tested against the best" in " ".join(legend([table], "markdown").split())


def test_tied_best_rows_have_no_second():
    marks = mark_entries(entries([60.0], [60.0], [50.0]), COLUMNS["A_N"])
    assert [(e.mark, e.is_untested) for e in marks] == [
        ("best", False),
        ("best", False),
        ("", False),
    ]
    close_marks = mark_entries(
        entries([60.01], [60.02], [50.0]), COLUMNS["A_N"]
    )  # both are printed as 60.0
    assert [e.mark for e in close_marks] == ["second", "best", ""]


def test_row_has_same_colour_in_all_figures(make_run, tmp_path):
    """Use one colour per row in all figures of a report.

    Row alpha is third in one table and first in the other. Rows with equal hue differ in line
    style.
    """
    pytest.importorskip("matplotlib")
    values = {0: 50.0, 1: 52.0}
    make_run(tmp_path / "a", dict.fromkeys(("zeta", "beta", "alpha"), values))
    make_run(
        tmp_path / "b", dict.fromkeys(("alpha", *(f"m{i}" for i in range(9))), values), rounds=3
    )
    results = load_results(tmp_path)
    assert list(colour_order(results.experiments))[:3] == ["zeta", "beta", "alpha"]

    def line_styles(drawn):
        return {x.get_label(): (x.get_color(), x.get_linestyle()) for x in drawn.axes[0].lines}

    first, second = line_styles(results.plot(0)), line_styles(results.plot(1))
    assert first["alpha"] == second["alpha"] == ("#00875f", "-")
    assert len(second) == 10 and len({*first.values(), *second.values()}) == 12
    write_page([tmp_path], tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().count('data-label="alpha" data-colour="2"') == 2


def test_plot_has_png_representation(make_run, tmp_path):
    pytest.importorskip("matplotlib")
    figure = load_results(make_run(tmp_path / "run", THREE)).plot()
    assert figure._repr_png_().startswith(b"\x89PNG\r\n")


def test_single_figure_uses_colours_in_order(make_run, tmp_path):
    pytest.importorskip("matplotlib")
    (experiment,) = load_results(make_run(tmp_path / "run", THREE)).experiments
    figure = draw(accuracy_curves(experiment))
    assert [line.get_color() for line in figure.axes[0].lines] == ["#0072b2", "#d55e00", "#00875f"]
