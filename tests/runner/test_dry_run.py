"""Test dry runs, their cost estimates and the errors of commands with a protocol."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from fczoo import Settings, Task, create_method
from fczoo.cli.app import main
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import Dataset, Defaults, Images
from fczoo.data.partition import make_partition
from fczoo.data.stream import Stream, task_sizes
from fczoo.runner.cost import first_round, measure
from fczoo.runner.dry_run import image_steps
from fczoo.runner.timing import duration_text, seconds_per_step, thread_counts


def test_image_steps_match_hand_calculation() -> None:
    """Compare image-steps with values worked out by hand.

    40 images in two tasks, 3 rounds of 2 epochs: 6 x 20 per task. Half of the clients take half of
    that.
    """
    labels = np.repeat(np.arange(4), 10)
    images = Images(np.zeros((40, 1, 1, 3), np.uint8), labels)
    stream = make_toy(images)
    settings = {"tasks": 2, "rounds": 3, "epochs": 2, "partition": "iid", "clients": 4}
    assert image_steps(Settings(**settings), stream, make_partition(stream, "iid", 4)) == [120, 120]
    assert image_steps(
        Settings(**settings, participation=0.5), stream, make_partition(stream, "iid", 4)
    ) == [
        60,
        60,
    ]
    assert image_steps(
        Settings(**settings, participation=1 / 4), stream, make_partition(stream, "iid", 4)
    ) == [30, 30]
    grown = Settings(**settings, joining=4, transition=0.5, participation=2, draw_among="joined")
    partition = make_partition(
        stream, "overlap:1", 4, joining=4, transition=0.5
    )  # 4 of 4 and 2 + 4 of 8 clients with 20 images each
    assert image_steps(grown, stream, partition) == [6 * 80 * 2 / 4, 6 * 120 * 2 / 8]
    assert image_steps(Settings(**settings, participation=2), stream, partition) == [
        6 * 80 * 2 / 4,
        6 * 120 * 2 / 6,
    ]


def make_toy(images: Images) -> Stream:
    return Stream(
        "toy",
        images,
        images,
        np.arange(40),
        (0, 1, 2, 3),
        tuple("abcd"),
        (Task(0, 0, 2, 4, 2), Task(1, 2, 4, 4, 2)),
    )


def test_linear_head_flops_match_hand_calculation() -> None:
    """Compare operations of a linear head with values worked out by hand.

    On frozen features: forward 2 x 128 x 10, backward the same for the weights; the features
    come from a cached pass.
    """
    cost = first_round(create_method("fedavg", tune="head"), Settings())
    assert cost.flops == 2 * 2 * 128 * 10
    assert 0 < cost.activation_bytes < 10_000


def test_full_training_costs_three_forward_passes() -> None:
    """Compare the cost of full training with three forward passes.

    ViT: forward 2 x parameters of the matrices x 65 tokens plus attention; backward twice
    that, except for operations that lead to no weight.
    """
    cost = first_round(create_method("fedavg", tune="full"), Settings())
    matrices = sum(
        v.numel()
        for k, v in cost.trained_tensors.items()
        if k.startswith("full.blocks") and v.dim() == 2
    )
    forward = 2 * matrices * 65
    assert 2.4 * forward < cost.flops < 3.3 * forward  # the last block processes only one row


def test_dry_run_reports_missing_dataset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Count by the official number of images, report the missing folder and write nothing."""
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    small = ["--backbone", "vit_nano_32", "--seeds", "0,1"]
    result = CliRunner().invoke(
        main, ["bench", "--protocol", "hgp", "--dataset", "cifar100", "--dry-run", *small]
    )
    assert result.exit_code == 0, result.output
    for excerpt in (
        "Settings of 2 runs, seeds 0, 1",
        "no folder cifar-100-python",
        "by task: 125,000 + ",  # 5,000 images x 5 epochs x 5 rounds
        "= 1,250,000",
        "Weights: vit_nano_32 is available",
        "GB: estimated memory",
    ):
        assert excerpt in result.stdout
    rows = {
        line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line.strip()
    }
    assert rows["backbone"][:2] == ["vit_nano_32", "given"]
    assert rows["rounds"][:3] == ["5", "protocol", "hgp"]
    assert rows["rounds"][3:] == ["Number", "of", "communication", "rounds", "per", "task"]
    assert rows["precision"][:2] == ["fp32", "default"]
    assert rows["lr"] == ["0.003", "protocol", "hgp"]
    assert rows["init"] == [
        "normal",
        "protocol",
        "hgp",
    ]
    assert not any(tmp_path.iterdir())


def test_dry_run_reports_origin_of_values() -> None:
    result = CliRunner().invoke(
        main,
        ["bench", "--methods", "hgp,fedncm", "--dry-run", "--rounds", "7", "--set", "hgp.lr=0.5"],
    )
    assert result.exit_code == 0, result.output
    doing = "counting bytes and operations"
    assert result.stderr.splitlines() == [
        f"hgp: {doing}",
        f"fedncm: {doing}",
        "WARNING: fedncm does not train: --rounds 7 has no effect",
    ]
    rows = {
        line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line.strip()
    }
    assert rows["rounds"][:2] == ["7", "given"] and rows["lr"] == ["0.5", "--set"]
    assert rows["epochs"][:3] == ["1", "data", "set"]
    assert rows["epochs"][3:] == ["Number", "of", "local", "epochs", "per", "round"]
    assert rows["server_lr"] == ["0.001", "data", "set"]
    assert "1,437 training and 360 test images" in result.stdout
    assert f"= {1437 * 7:,}" in result.stdout
    assert rows["hgp"][:2] == [f"{129_290:,}", "0.519"] and rows["fedncm"][0] == "0"
    assert float(rows["hgp"][-2]) > 0
    assert rows["hgp"][-1] in ("s", "min")
    assert rows["fedncm"][-2:] == ["0", "s"]


def test_step_time_and_duration_text() -> None:
    assert seconds_per_step(create_method("fedavg", tune="head"), Settings()) > 0
    assert seconds_per_step(create_method("fedncm"), Settings()) == 0
    assert [duration_text(s) for s in (0, 89, 90, 5399, 5400, 36_000)] == [
        "0 s",
        "89 s",
        "2 min",
        "90 min",
        "2 h",
        "10 h",
    ]


def patch_clock(monkeypatch: pytest.MonkeyPatch, *durations: float) -> None:
    """Patch the timer so that measurements take these seconds, one after another."""
    times = iter(
        time for i, seconds in enumerate(durations) for time in (100.0 * i, 100.0 * i + seconds)
    )
    monkeypatch.setattr(
        "fczoo.runner.timing.time", SimpleNamespace(perf_counter=lambda: next(times))
    )


def test_step_time_on_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the step time to the mean of several steps on a busy machine.

    If one step takes 4 s and then four take 3 s, a step takes at most 0.75 s.
    """
    patch_clock(monkeypatch, 4.5, 4.0, 3.0, 4.0, 3.0)
    assert seconds_per_step(create_method("fedavg", tune="head"), Settings()) == 0.75


def test_step_time_uses_one_thread_if_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measure the step time with one thread if several threads are slower.

    All threads: 2 s for one step, 5 s for four. One thread: 0.5 s and 0.8 s, so 0.1 s per step.
    """
    patch_clock(monkeypatch, 4.5, 2.0, 5.0, 0.5, 0.8)
    assert seconds_per_step(create_method("fedavg", tune="head"), Settings()) == pytest.approx(0.1)


def test_thread_counts_yield_all_then_one() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert [torch.get_num_threads() for _ in thread_counts()] == [2, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_dry_run_reads_local_weight_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a file that is named like a timm model as a file, as the run itself does."""
    vit = VisionTransformer(224, 16, embed_dim=192, depth=12, num_heads=3, num_classes=0)
    monkeypatch.chdir(tmp_path)
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
    save_file(vit.state_dict(), name)
    arguments = [
        "bench",
        "--methods",
        "fedavg",
        "--set",
        "fedavg.tune=full",
        "--dry-run",
        "--backbone",
        name,
    ]
    pages = [
        CliRunner().invoke(main, [*arguments, *options]) for options in ([], ["--image-size", "32"])
    ]
    assert [page.exit_code for page in pages] == [0, 0], [page.output for page in pages]
    large, small = (
        next(li for li in p.stdout.splitlines() if li.startswith("fedavg  ")) for p in pages
    )
    parameters, gflop = large.split()[1], float(large.split()[4])
    assert int(parameters.replace(",", "")) > sum(v.numel() for v in vit.parameters())
    counts_attention = tuple(map(int, torch.__version__.split(".")[:2])) >= (
        2,
        15,
    )  # products of attention, too
    assert (
        36 < gflop / float(small.split()[4]) < (48 if counts_attention else 42)
    )  # 197 tokens against 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "--dry-run"], "give --methods, --protocol or --as-released"),
        (["bench"], "give --methods, --protocol or --as-released"),
        (["bench", "--protocol", "hpg"], "did you mean hgp"),
        (["bench", "--protocol", "hgp"], "protocol hgp does not use digits"),
        (["bench", "--protocol", "quick", "--dry-run", "--set", "hgp.lrr=1"], "did you mean lr"),
        (["bench", "--protocol", "quick", "--dry-run", "--augment", "flipp"], "did you mean flip"),
        (["bench", "--protocol", "quick", "--dry-run", "--clients", "500"], "lower --clients"),
        (["show", "protocol", "hpg"], "did you mean hgp"),
        (
            ["show", "protocol", "hgp", "--dataset", "cub"],
            "no data set is called 'cub'; did you mean cub200",
        ),
        (["show", "protocol", "hgp", "fppl"], "give NAME, or KIND NAME"),
        (["show", "hgp", "fppl"], "give NAME, or KIND NAME"),
    ],
)
def test_invalid_arguments_are_rejected(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_bench_uses_methods_of_protocol(tmp_path: Path) -> None:
    out = tmp_path / "run"
    short = [
        "--train-per-class",
        "6",
        "--test-per-class",
        "2",
        "--rounds",
        "1",
        "--epochs",
        "1",
        "--tasks",
        "2",
        "--set",
        "hgp.prefix_len=2",
    ]
    result = CliRunner().invoke(main, ["bench", "--protocol", "quick", *short, "--out", str(out)])
    assert result.exit_code == 0, result.output
    about = json.loads((out / "bench.json").read_text())
    assert list(about["methods"]) == ["pilora", "hgp", "fppl"] and about["seeds"] == [0]
    assert about["settings"]["protocol"] == "quick"
    assert about["settings"]["batch_size"] == 8


def test_dataset_with_unequal_tasks_is_measured() -> None:
    """Measure a data set with unequal tasks.

    Cars-196 ends with a task of 16 classes. Payloads have the size of the first task.
    """

    class Cars(Dataset):
        """Define only the attributes that ``measure`` reads."""

        classes = 196
        about = "cars"
        defaults = Defaults("vit_nano_32", 10, 10, "iid", 1, 1, 16, "none")

        def load(self, root: Path):  # type: ignore[no-untyped-def]
            raise AssertionError

    settings = Settings(dataset="cars196", tasks=(20,) * 9 + (16,), backbone="vit_nano_32")
    original = DATASETS.get
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DATASETS, "get", lambda name: Cars if name == "cars196" else original(name))
        measurement = measure(create_method("hgp", prefix_len=1), settings)
    assert len(measurement.first_task_uploads["round"]["gauss.label"]) == 20
    assert measurement.trained_tensors["head.weight"].shape == (
        196,
        128,
    )
    assert task_sizes("cars196", 196, settings.tasks)[-1] == 16
