"""Test the default protocol of ``bench`` on a machine without a GPU."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from fczoo import FczooError
from fczoo.cli.app import main
from fczoo.federation import device
from fczoo.reports.run_folder import read_bench_file

WORDS = [
    "--methods",
    "fppl",
    "--dataset",
    "imagefolder",
    "--tasks",
    "2",
    "--clients",
    "2",
    "--rounds",
    "1",
]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for class_folder in [tmp_path / part / name for part in ("train", "test") for name in "abcd"]:
        class_folder.mkdir(parents=True)
        for i in range(4):
            Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8)).save(
                class_folder / f"{i}.png"
            )
    return tmp_path


def protocol_of_run(images: Path, *more: str) -> tuple[str | None, str]:
    """Run a bench on the images; return its protocol and the initialisation of the head."""
    out = images / "out"
    words = [
        "bench",
        *WORDS,
        "--data-root",
        str(images),
        "--backbone",
        "vit_nano_32",
        "--out",
        str(out),
    ]
    outcome = CliRunner().invoke(main, [*words, *more])
    assert outcome.exit_code == 0, outcome.output
    about = read_bench_file(out)
    assert ("1 run, protocol quick (--protocol none" in outcome.stderr) == (
        about.settings["protocol"] == "quick"
    )
    return about.settings["protocol"], about.methods["fppl"]["head_init"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ("quick", "means")),
        (["--set", "fppl.head_init=zeros"], ("quick", "zeros")),
        (["--protocol", "none"], (None, "zeros")),
        (
            ["--as-released", "fppl", "--batch-size", "8", "--seeds", "0", "--vary", "training"],
            (None, "default"),
        ),
    ],
)
def test_default_protocol_is_quick_unless_given(
    images: Path, options: list[str], expected: tuple[str | None, str]
) -> None:
    assert protocol_of_run(images, "--epochs", "1", *options) == expected


@pytest.mark.parametrize(
    ("executor", "cluster", "expected"),
    [
        ("cores", [], "quick"),
        ("ray", [], "quick"),
        ("ray", ["threads=2"], "quick"),
        ("ray", ["address=new", "spread=clients"], "quick"),
        ("ray", ["address=10.0.0.1:6379"], None),
        ("slurm", ["threads=2"], None),
    ],
)
def test_protocol_depends_on_executor_and_cluster(
    executor: str, cluster: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fczoo.cli.sweep import sweep_of_request

    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    request = {
        "methods": "fedncm",
        "dataset": "cifar100",
        "set": {},
        "executor": executor,
        "cluster": cluster,
    }
    ((config,),) = sweep_of_request(request).values()
    assert config.settings.protocol == expected


def test_default_protocol_depends_on_data_set_and_device(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fczoo.cli.sweep import sweep_of_request

    def protocol(dataset: str, **options: str) -> str | None:
        ((config,),) = sweep_of_request(
            {"methods": "fedncm", "dataset": dataset, "set": {}, **options}
        ).values()
        return config.settings.protocol

    assert protocol("digits") is None and protocol("cifar100") == "quick"
    assert protocol("cifar100", device="cuda") is None
    with pytest.raises(FczooError, match="device is 'foo'"):
        protocol("cifar100", device="foo")
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: True)
    assert protocol("cifar100") is None
    assert protocol("cifar100", device="cpu") == "quick"
    with pytest.raises(FczooError, match="did you mean cifar100"):
        protocol("cifar1000")


def test_partition_command_shows_split_of_run(images: Path) -> None:
    """Show the split of the run before it starts.

    The protocol allows twenty images per class and the folder has four; both commands agree.
    """
    protocol_of_run(images, "--epochs", "1")
    words = [
        "--dataset",
        "imagefolder",
        "--data-root",
        str(images),
        "--tasks",
        "2",
        "--clients",
        "2",
    ]
    output = CliRunner().invoke(main, ["partition", *words]).output
    sha256 = read_bench_file(images / "out").partition["sha256"]
    assert output.startswith("imagefolder, protocol quick: ")
    assert f"sha256 {sha256}" in output
    plain_output = CliRunner().invoke(main, ["partition", *words, "--protocol", "none"]).output
    assert plain_output.startswith("imagefolder: ")
    report = CliRunner().invoke(main, ["report", str(images / "out")]).output
    assert "; protocol quick: 1 rounds x 1 epochs, batch 16" in report


def test_dry_run_reports_work_on_image_folder(images: Path) -> None:
    words = ["bench", *WORDS, "--data-root", str(images), "--backbone", "vit_nano_32", "--dry-run"]
    outcome = CliRunner().invoke(main, words)
    assert outcome.exit_code == 0, outcome.output
    assert "16 training and 16 test images" in outcome.output
    (row,) = [line.split() for line in outcome.output.splitlines() if line.startswith("fppl  ")]
    assert int(row[1].replace(",", "")) > 1000  # prompts and a head of the folder's four classes
