"""Diagnostics: values by hand, no influence on the run, and no files without the option."""

import json
import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.core.payload import Payload
from fczoo.core.types import Evidence, Task
from fczoo.federation.batches import view_batches
from fczoo.federation.diagnostics import (
    FILE,
    KINDS,
    Probe,
    histogram,
    normalised_entropy,
    read,
    relative_change,
)
from fczoo.functional.lora import lora_cosines
from fczoo.functional.prompts import choice_shares
from helpers_cli import TINY

SECOND = Task(1, 3, 5, 7, 3)  # classes 3 and 4


def test_evenness_by_hand():
    assert normalised_entropy(torch.tensor([3, 4, 3, 4]), SECOND) == pytest.approx(1)
    assert normalised_entropy(torch.tensor([3, 3, 3]), SECOND) == 0
    assert math.copysign(1, normalised_entropy(torch.tensor([3, 3]), SECOND)) == 1
    # 3 of 4 answers name class 3: H = -(3/4 ln 3/4 + 1/4 ln 1/4), over ln 2; answer 0 is of another
    # task
    assert normalised_entropy(torch.tensor([3, 3, 3, 4, 0]), SECOND) == pytest.approx(
        0.811278, abs=1e-6
    )
    assert (
        normalised_entropy(torch.tensor([0, 1]), SECOND) == 0
    )  # no answer names a class of the task
    assert histogram(torch.tensor([3, 3, 0]), 5) == [1, 0, 0, 2, 0]


def test_movement_by_hand():
    old_state, new_state = (
        {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])},
        {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([[4.0]]), "c": torch.ones(9)},
    )
    assert relative_change(old_state, new_state) == pytest.approx(
        0.2
    )  # |(0, 1, 0)| / |(3, 0, 4)| = 1 / 5
    assert relative_change({"a": torch.zeros(2)}, {"a": torch.zeros(2)}) == 0
    assert relative_change({"a": torch.zeros(2)}, {"a": torch.ones(2)}) == math.inf


def test_lora_cosines_by_hand():
    """Compare cosines between LoRA updates with values worked out by hand.

    One layer, rank 1, D = 2: updates e1 e1^T, e1 e2^T, e1 (e1 + e2)^T; cosines 0 and 1 / sqrt 2.
    """
    e1, e2 = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    past = {
        "past.0.q.a": torch.stack([e1[None], e2[None]]),
        "past.0.q.b": torch.stack([e1[:, None], e1[:, None]]),
    }
    cosines = lora_cosines(
        {
            **past,
            "lora.0.q.a": (e1 + e2)[None],
            "lora.0.q.b": 5 * e1[:, None],
            "prototype": torch.ones(3, 2),
        }
    )
    root = 2**-0.5
    assert torch.allclose(
        cosines, torch.tensor([[1, 0, root], [0, 1, root], [root, root, 1]], dtype=cosines.dtype)
    )


def test_choice_shares_by_hand(record):
    """Compare shares of chosen prompts with values worked out by hand.

    Each image takes prompt 3 and the prompt with the number of its label. The task is balanced and
    has classes 0 to 2.
    """
    run = record("l2p")
    scenario, tasks = run.bench, run.bench.stream.tasks
    assert (tasks[0].start, tasks[0].stop) == (0, 3)
    assert run.result.test_counts[0] % 3 == 0

    def images(task):
        index = torch.from_numpy(scenario.stream.positions(scenario.stream.test, task))
        return view_batches(run.method, scenario.test, index, 5)

    def chosen(batch):
        return torch.stack([batch.y, torch.full_like(batch.y, 3)], 1)

    evidence = Evidence(tasks[0], tasks, {}, [], scenario.backbone, images)
    shares = choice_shares(evidence, chosen, 5)
    assert shares["choices"]["share"] == [pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2, 0])]
    assert choice_shares(replace(evidence, payloads=[Payload({})]), chosen, 5) == {}


METHOD_KINDS = {
    "pilora": {"reweight", "lora"},
    "fcilpt": {"choices"},
    "hgp": set(),
    "fedncm": {"confusion"},
    "l2p": {"choices"},
    "dualprompt": {"choices"},
}


@pytest.mark.parametrize("name", METHOD_KINDS)
def test_probe_records_without_changing_run(name, record, tmp_path):
    """Keep accuracies and bytes, and write valid records."""
    plain = record(name)
    result = plain.bench.run(plain.method, 0, probe=Probe(tmp_path))
    assert result.accuracy == plain.result.accuracy
    assert (result.bytes_up, result.bytes_down) == (
        plain.result.bytes_up,
        plain.result.bytes_down,
    )
    records: dict[str, list] = defaultdict(list)
    for r in read(tmp_path):
        records[r["kind"]].append(r)
    training_kinds = KINDS.keys() - {"confusion"} if plain.method.training().optims else set()
    assert {kind for kind, entries in records.items() if entries} == {
        "confusion",
        *training_kinds,
        *METHOD_KINDS[name],
    }
    confusion = [r["matrix"] for r in records["confusion"]]
    assert [len(m) for m in confusion] == [1, 2, 3]
    assert all(sum(row) == pytest.approx(1) for m in confusion for row in m)
    right_task = [confusion[-1][i][i] * 100 for i in range(3)]
    assert all(
        a <= b + 1e-9 for a, b in zip(plain.result.accuracy[-1], right_task, strict=True)
    )  # a right answer names the right task
    assert all(r["distance"] is None or r["distance"] > 0 for r in records["first round"])
    for r in (*records["first round"], *records["clients"]):
        assert all(f"{field} " in KINDS["clients"] for field in {*r["clients"][0]} - {"client"})
        assert all(
            0 <= c["accuracy"] <= 100 and 0 <= c["entropy"] <= 1 + 1e-9 for c in r["clients"]
        )
        assert all(sum(c["histogram"]) == plain.result.test_counts[r["task"]] for c in r["clients"])
    assert all(sum(row) == pytest.approx(1) for r in records["choices"] for row in r["share"])
    for table in (r[key] for r in records["reweight"] for key in ("weights", "share")):
        assert torch.tensor(table).sum(0).tolist() == pytest.approx([1] * len(table[0]), abs=1e-5)
    assert [len(r["matrix"]) for r in records["lora"]] == ([2, 3] if records["lora"] else [])


def test_diagnostics_are_written_only_with_option(tmp_path):
    pytest.importorskip("matplotlib")
    for flag, out in (("--diagnostics", "with"), (None, "without")):
        bench = [
            "bench",
            "--methods",
            "fedavg",
            "--set",
            "fedavg.tune=head",
            *TINY,
            *([flag] if flag else []),
            "--out",
            str(tmp_path / out),
        ]
        assert CliRunner().invoke(main, bench).exit_code == 0
        page = tmp_path / f"{out}.html"
        assert (
            CliRunner().invoke(main, ["report", str(tmp_path / out), "--html", str(page)]).exit_code
            == 0
        )
        assert (
            ("<h2>Diagnostics</h2>" in page.read_text())
            == (flag is not None)
            == (tmp_path / out / "fedavg" / "seed0" / FILE).exists()
        )
    results = [
        json.loads((tmp_path / out / "fedavg" / "seed0" / "result.json").read_text())
        for out in ("with", "without")
    ]
    assert results[0]["accuracy"] == results[1]["accuracy"]


def test_infinite_movement_is_recorded_as_null(tmp_path):
    """Write null for an infinite change.

    The head of this run starts at zero, so its relative change is infinite.
    """
    options = [
        "--methods",
        "fedavg",
        "--set",
        "fedavg.tune=head",
        "--set",
        "fedavg.head_init=zeros",
    ]
    bench = ["bench", *options, *TINY, "--diagnostics", "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(main, bench).exit_code == 0
    text = (tmp_path / "out" / "fedavg" / "seed0" / FILE).read_text()
    drift = [
        r["by prefix"] for r in map(json.loads, text.splitlines()) if r["kind"] == "client drift"
    ]
    assert drift[0]["head."] is None
    assert drift[1]["head."] > 0
    assert "Infinity" not in text
