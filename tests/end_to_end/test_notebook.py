"""Test the display of results, pictures and progress in notebooks."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip(
    "nbformat", reason="nbclient and ipykernel (extra test) are not installed"
)
nbclient = pytest.importorskip(
    "nbclient", reason="nbclient and ipykernel (extra test) are not installed"
)
pytest.importorskip("ipykernel", reason="nbclient and ipykernel (extra test) are not installed")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
DISPLAYED = {
    "own_data_and_method": (2, 1),  # a shape and curves; results
    "start": (1, 2),  # curves; results and one run
    "use_the_model": (2, 3),  # a digit and features; results, probabilities and confusion
}
"""Notebook -> pictures and tables that it shows."""
CELLS = (
    "import fczoo",
    "results = fczoo.bench(['fedncm', 'fedclm'], range(2), dataset='digits', train_per_class=8,\n"
    "                      test_per_class=4, tasks=3, rounds=1, epochs=1)",
    "results",
    "results['fedclm'][0]",
    "results.plot()",
    "fczoo.partition([0, 0, 1, 1], 'iid', clients=2)",
    "fczoo.bench('fedncn')",
)


@pytest.mark.slow
def test_notebook_shows_tables_curves_and_progress(tmp_path) -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    cells[-1].metadata["tags"] = ["raises-exception"]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(
        book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    _, ran, table, one, curves, split, wrong = (cell["outputs"] for cell in book.cells)
    log = "".join(out["text"] for out in ran if out["output_type"] == "stream")
    assert "run 4 of 4, fedclm seed 1: task 3 of 3" in log
    assert "4 of 4 runs ended; best so far" in log
    assert " % |" in log or any("widget" in kind for out in ran for kind in out.get("data", {}))
    (display,) = table
    assert display["data"]["text/html"].count("<tr>") == 3
    assert "fedclm" in display["data"]["text/html"]
    assert "on task 3" in one[0]["data"]["text/html"]
    assert "<table>" in one[0]["data"]["text/html"]
    assert sum("image/png" in out.get("data", {}) for out in curves) == 1
    assert sum("image/png" in out.get("data", {}) for out in split) == 1
    (error,) = (out for out in wrong if out["output_type"] == "error")
    assert error["ename"] == "FczooError"
    assert "no method is called 'fedncn'; did you mean" in error["evalue"]
    assert not list(tmp_path.iterdir())  # no files are written without ``out``


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_handbook_notebook_runs_completely(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Execute a notebook in an empty folder; the stored one has no outputs and no numbers."""
    book = nbformat.read(path, as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert code and not any(cell.outputs or cell.execution_count for cell in code)
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))
    nbclient.NotebookClient(
        book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [{kind for out in cell.outputs for kind in out.get("data", {})} for cell in code]
    pictures, tables = DISPLAYED[path.stem]
    assert sum("image/png" in kinds for kinds in shown) == pictures
    assert sum("text/html" in kinds for kinds in shown) == tables
