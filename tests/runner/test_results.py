"""Test result objects: ``fczoo.bench``, ``fczoo.load_results`` and stepped runs."""

import json
import math
import re

import pytest
import torch
import torch.nn.functional as F

import fczoo
from fczoo.core.errors import FczooError
from fczoo.federation.result import read_result

TINY = {"train_per_class": 12, "test_per_class": 5, "rounds": 1, "epochs": 1}


@pytest.fixture(scope="module")
def results():
    return fczoo.bench(
        ["fedncm", "fedridge"], range(2), options={"fedridge": {"ridge": 3.0}}, **TINY
    )


def test_bench_returns_results_as_printed(results):
    assert len(results) == 4 and [r.seed for r in results["fedridge"]] == [0, 1]
    assert all(r.options["ridge"] == 3.0 for r in results["fedridge"])
    text = str(results)
    assert text.startswith("digits: 5 tasks of 2 classes")
    assert "fedridge: ridge=3, set by the user" in text
    mean = sum(r.metrics["A_N"] for r in results["fedncm"]) / 2
    assert re.search(rf"fedncm\s+\S?{mean:.1f} ", text)
    with pytest.raises(KeyError):
        results["hgp"]


def test_representations_are_short(results):
    assert repr(results) == "<Results of 4 runs: fedncm, fedridge on digits>"
    result = results["fedncm"][0]
    figures = f"A_N {result.metrics['A_N']:.1f}, Avg {result.metrics['Avg']:.1f}"
    assert repr(result) == f"<Result of fedncm, seed 0 on digits: {figures}>"
    assert result.table().splitlines()[2].split()[:2] == ["1", f"{result.accuracy[0][0]:.1f}"]
    bench = fczoo.Benchmark.open(fczoo.Settings.for_dataset("digits", **TINY))
    assert repr(bench.backbone) == "<Backbone vit_nano_32: 6 blocks of 128, 32 px, on cpu>"
    assert "120 images, 5 tasks, 5 clients>" in repr(bench.partition)
    assert repr(bench).startswith("<Benchmark: digits in 5 tasks, <Partition dirichlet:0.5, seed 0")


def test_results_render_as_html_tables(results):
    html = results._repr_html_()
    assert html.count("<tr>") == 3
    assert "<td>fedncm" in html
    assert "A_N" in html
    assert results["fedncm"][0]._repr_html_().count("<tr>") == 6
    partition = fczoo.Benchmark.open(fczoo.Settings.for_dataset("digits", **TINY)).partition
    cells = re.findall(r"<td[^>]*>\s*(\d+)</td>", partition._repr_html_())
    assert sum(map(int, cells)) == 120


def test_data_frame_has_one_row_per_run(results):
    frame = results.to_pandas()
    assert frame.shape[0] == 4 and list(frame["method"][:2]) == ["fedncm", "fedncm"]
    assert frame["A_N"].tolist() == [r.metrics["A_N"] for r in results]


def test_saved_results_are_loaded(results, tmp_path):
    results.save(tmp_path / "all.csv")
    assert str(fczoo.load_results(tmp_path / "all.csv")) == str(results)
    results["fedncm"][0].save(tmp_path / "result.json")
    assert read_result(tmp_path / "result.json").accuracy == results["fedncm"][0].accuracy
    with pytest.raises(FczooError, match="no run folder"):
        fczoo.load_results(tmp_path / "nothing")


def test_run_folder_stores_varied_seeds_in_one_table(tmp_path):
    results = fczoo.bench(
        "fedncm", (0, 1), out=tmp_path / "runs", vary=("training", "partition"), **TINY
    )
    assert len(results.experiments) == 1 and results.experiments[0].seeds == [0, 1]
    about = json.loads((tmp_path / "runs" / "seed1" / "bench.json").read_text())
    assert about["settings"]["partition_seed"] == 1
    assert str(fczoo.load_results(tmp_path / "runs")) == str(results)


def test_plot_has_one_curve_per_method(results):
    figure = results.plot()
    assert len(figure.axes[0].lines) == 2
    assert figure.get_layout_engine() is not None  # which keeps the legend out of the axes
    assert figure._repr_png_().startswith(b"\x89PNG")  # a notebook shows it
    with pytest.raises(FczooError, match="experiment is 1; these results have experiments 0 to 0"):
        results.plot(1)
    with pytest.raises(FczooError, match="experiment is 'digits'; these results have"):
        results.plot("digits")


def test_table_supports_report_styles(results):
    assert "| fedncm" in results.table("markdown")
    assert r"\toprule" in results.table("latex")
    assert results.table("csv").startswith("dataset,partition")
    with pytest.raises(FczooError, match="style is 'word'"):
        results.table("word")


def test_callback_gets_losses_of_single_steps():
    """Report the losses of single steps, whose mean is the client's loss.

    Each client has two epochs of batches of 8.
    """

    class LossRecorder(fczoo.Callback):
        def __init__(self):
            self.means, self.single = [], []

        def client(self, task, round, loss):
            self.means.append(loss)

        def steps(self, task, round, client, losses):
            self.single.append((task, client, losses))

    observer = LossRecorder()
    bench = fczoo.Benchmark.open(
        fczoo.Settings.for_dataset("digits", **{**TINY, "epochs": 2, "tasks": 2})
    )
    for task in bench.start(
        fczoo.create_method("fedavg", "digits", tune="head"), callback=observer
    ):
        step_losses = [losses for t, _, losses in observer.single if t == task.index]
        image_counts = [len(o) for o in bench.partition.tasks[task.index] if len(o)]
        assert sorted(map(len, step_losses)) == sorted(2 * math.ceil(n / 8) for n in image_counts)
    assert [sum(ls) / len(ls) for *_, ls in observer.single] == pytest.approx(
        observer.means, rel=1e-5
    )


def test_stepped_run_equals_whole_run():
    bench = fczoo.Benchmark.open(fczoo.Settings.for_dataset("digits", **TINY))
    run = bench.start(fczoo.create_method("fedridge", "digits"))
    progress = []
    for task in run:
        progress.append((task.index, len(run.result.accuracy)))
        assert run.state
    assert progress == [(t, t + 1) for t in range(5)]
    reference = bench.run(fczoo.create_method("fedridge", "digits"))
    assert run.result.accuracy == reference.accuracy


def test_run_features_reproduce_accuracy():
    """Compute the accuracy of a run from its features by class means or a linear head."""
    bench = fczoo.Benchmark.open(fczoo.Settings.for_dataset("digits", **TINY))
    for method in (fczoo.create_method("fedncm"), fczoo.create_method("hgp", "digits")):
        run = bench.start(method)
        assert not len(run.features()[0])  # nothing is learned yet
        result = run.run()
        (train, train_labels), (test, labels) = run.features("train"), run.features()
        if method.name == "fedncm":
            rows = torch.stack([train[train_labels == c].mean(0) for c in range(10)])
            scores = -torch.cdist(test, rows)
        else:
            scores = F.linear(test, run.state["head.weight"], run.state["head.bias"])
        right = (scores.argmax(1) == labels).float()
        assert 100 * right.mean() == pytest.approx(result.metrics["A_N"])
