"""A notebook shows results as tables and pictures, and a bar while runs continue."""

import pytest

nbformat = pytest.importorskip(
    "nbformat", reason="nbclient and ipykernel (extra test) are not installed"
)
nbclient = pytest.importorskip(
    "nbclient", reason="nbclient and ipykernel (extra test) are not installed"
)
pytest.importorskip("ipykernel", reason="nbclient and ipykernel (extra test) are not installed")

CELLS = (
    "import fczoo",
    "results = fczoo.bench(['fedncm', 'fedclm'], range(2), dataset='digits', train_per_class=8,\n"
    "                      test_per_class=4, tasks=3, rounds=1, epochs=1)",
    "results",
    "results['fedclm'][0]",
    "results.plot()",
    "fczoo.bench('fedncn')",
)


@pytest.mark.slow
def test_a_notebook_shows_tables_curves_and_progress(tmp_path) -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    cells[-1].metadata["tags"] = ["raises-exception"]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(
        book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    _, ran, table, one, curves, wrong = (cell["outputs"] for cell in book.cells)
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
    (error,) = (out for out in wrong if out["output_type"] == "error")
    assert error["ename"] == "FczooError"
    assert "no method is called 'fedncn'; did you mean" in error["evalue"]
    assert not list(tmp_path.iterdir())  # nothing is left where no one asked for files
