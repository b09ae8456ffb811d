"""Test that input from Python works or raises FczooError with one useful line."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import fczoo
from fczoo import FczooError, Settings
from fczoo.cli.app import main
from fczoo.core.errors import options_in_messages, use_python_names
from fczoo.core.registry import METHODS
from fczoo.federation.benchmark import Benchmark

SMALL: dict[str, Any] = {
    "tasks": 2,
    "train_per_class": 8,
    "test_per_class": 4,
    "rounds": 1,
    "epochs": 1,
}
IMAGES = np.zeros((2, 3, 8, 8), np.float32)
ONE = torch.tensor([1.0])


@pytest.fixture(scope="module")
def bench() -> Benchmark:
    return Benchmark.open(Settings.for_dataset("digits", clients=3, **SMALL))


INVALID_INPUT = {
    "number as method": (lambda: fczoo.run(3), "3 is not a method; give a name such as 'hgp'"),
    "misspelt setting": (
        lambda: fczoo.run("fedncm", round=2),
        "no option 'round'; did you mean rounds?",
    ),
    "negative seed": (
        lambda: fczoo.run("fedncm", seed=-1),
        "seed is -1; it must be a whole number from 0",
    ),
    "large seed": (lambda: fczoo.run("fedncm", seed=2**70), "it must be a whole number from 0"),
    "bool as seed": (lambda: fczoo.run("fedncm", seed=True), "seed is True; it must be"),
    "float as seed": (lambda: fczoo.run("fedncm", seed=1.0), "seed is 1.0; it must be"),
    "text as seed": (lambda: fczoo.run("fedncm", seed="0"), "seed is '0'; it must be"),
    "number as seeds": (
        lambda: fczoo.bench("fedncm", seeds=2),
        "seeds is 2; give a list such as",
    ),
    "text as seeds": (
        lambda: fczoo.bench("fedncm", seeds="01"),
        "seeds is '01'; give a list such as",
    ),
    "no seeds": (lambda: fczoo.bench("fedncm", seeds=[]), "give one or more distinct seeds"),
    "repeated seed": (
        lambda: fczoo.bench("fedncm", seeds=[0, 0]),
        "give one or more distinct seeds",
    ),
    "no methods": (lambda: fczoo.bench([]), "give one or more distinct names"),
    "number as methods": (lambda: fczoo.bench(3), "methods is 3; give a name such as 'hgp'"),
    "flat options": (lambda: fczoo.bench("fedncm", options={"lr": 1}), "give a dict of dicts"),
    "options of other method": (
        lambda: fczoo.bench("fedncm", options={"hgp": {}}),
        "options has values for 'hgp'",
    ),
    "text as jobs": (
        lambda: fczoo.bench("fedncm", jobs="2"),
        "jobs is '2'; it must be a whole number",
    ),
    "no settings": (
        lambda: Benchmark.open(None),
        "None is not a fczoo.Settings; give one, or the name of a data set",
    ),
    "misspelt data set": (lambda: Benchmark.open("digit"), "did you mean digits"),
    "list as method": (lambda: fczoo.create_method(["hgp"]), "is not the name of a method"),
    "device with index": (
        lambda: Settings(device=torch.device("cuda:0")),
        "it must be auto | cpu | cuda | mps",
    ),
    "dict as trees": (lambda: fczoo.merge("median", {"w": ONE}), "give a list of dicts"),
    "tensors as trees": (lambda: fczoo.merge("median", [ONE]), "give a dict, name -> tensor"),
    "text as tensor": (lambda: fczoo.merge("median", [{"w": "a"}]), "'a' is not a tensor"),
    "number as aggregator": (
        lambda: fczoo.merge(3, [{"w": ONE}]),
        "not the name of an aggregator",
    ),
    "number as sample counts": (
        lambda: fczoo.merge("fedavg", [{"w": ONE}], 2),
        "num_samples is 2; give a list",
    ),
    "no images": (lambda: fczoo.whole_batch(None, None), "images: None is not a tensor"),
    "too many labels": (
        lambda: fczoo.whole_batch(IMAGES, [0, 1, 2]),
        "give 2 whole numbers, one per image",
    ),
    "float labels": (
        lambda: fczoo.whole_batch(IMAGES, [0.0, 1.0]),
        "give 2 whole numbers, one per image",
    ),
    "no results": (lambda: fczoo.load_results(), "None is not a path; give a run folder"),
    "number as results": (lambda: fczoo.load_results(3), "3 is not a path; give a run folder"),
    "missing results folder": (lambda: fczoo.load_results("/no"), "no run folder at or below /no"),
    "flat features": (
        lambda: fczoo.whole_batch(IMAGES, [0, 1], np.zeros(3)),
        "give features [2, D]",
    ),
}


@pytest.mark.parametrize("name", INVALID_INPUT)
def test_invalid_input_raises_one_line_error(name: str) -> None:
    call, message = INVALID_INPUT[name]
    with pytest.raises(FczooError) as caught:
        call()
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["fedncm", METHODS.get("fedncm"), fczoo.create_method("fedncm")])
def test_methods_are_accepted_as_name_class_or_instance(method: Any, bench: Benchmark) -> None:
    assert bench.run(method, np.int64(1)).seed == 1
    assert bench.run(method).accuracy == fczoo.run(method, clients=3, **SMALL).accuracy


def test_settings_accept_paths_devices_and_numpy_numbers() -> None:
    options = {"data_root": Path("/x"), "device": torch.device("cpu"), "rounds": np.int64(3)}
    settings = Settings.for_dataset("digits", **options)
    assert (settings.data_root, settings.device, settings.rounds) == ("/x", "cpu", 3)
    assert Settings(data_root=Path("/x")).data_root == "/x"


def test_arrays_are_accepted_as_tensors() -> None:
    batch = fczoo.whole_batch(IMAGES, [0, 1])
    assert batch.x.shape == (2, 3, 8, 8) and batch.y.tolist() == [0, 1]
    assert fczoo.merge("median", [{"w": np.array([1.0])}, {"w": [3.0]}])["w"].tolist() == [2.0]


@pytest.mark.parametrize("name", ["dualprompt", "l2p"])
def test_prediction_without_features_raises_error(name: str, bench: Benchmark) -> None:
    run = bench.start(name)
    task = next(iter(run))
    batch = fczoo.whole_batch(torch.zeros(2, 3, 32, 32), [0, 1])
    with pytest.raises(FczooError, match="the batch has none; create it with whole_batch"):
        run.method.predict(bench.backbone, run.state, batch, task)


def test_saved_results_are_loaded(bench: Benchmark, tmp_path: Path) -> None:
    for seed in (0, 1):
        bench.run("fedncm", seed).save(tmp_path / f"{seed}.json")
    results = fczoo.load_results(tmp_path / "0.json", str(tmp_path / "1.json"))
    assert [result.seed for result in results["fedncm"]] == [0, 1]
    (experiment,) = results.experiments
    assert "2 tasks of 5 classes, 40 test images" in str(results)
    assert experiment.bench_file.partition["sha256"] == bench.partition.sha256
    results.save(tmp_path / "all.csv")
    assert len(fczoo.load_results(tmp_path / "all.csv")) == 2
    with pytest.raises(FczooError, match="is not the name of a JSON file"):
        next(iter(results)).save(tmp_path)


def test_result_without_settings_is_rejected(bench: Benchmark, tmp_path: Path) -> None:
    result = bench.run("fedncm")
    result.settings = {}
    result.save(tmp_path / "run.json")
    with pytest.raises(
        FczooError, match="is not a valid result file: settings: the dataset is missing"
    ):
        fczoo.load_results(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"participation": 0}, "participation is 0, so no client would train"),
        ({"rounds": "x"}, "rounds is 'x'; it must be a whole number"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"clients": 2, "participation": 3}, "participation 3 is more than the 2 clients"),
        ({"tasks": 11}, "choose tasks between 1 and 10"),
        ({"dp_noise": 1.0}, "dp_noise needs dp_clip"),
        (
            {"vary": ("partition",), "partition": "file:p.json"},
            "vary partition has no effect",
        ),
    ],
)
def test_messages_name_arguments_not_options(given: dict[str, Any], message: str) -> None:
    for call in (lambda: fczoo.run("fedncm", **given), lambda: fczoo.bench("fedncm", **given)):
        with pytest.raises(FczooError) as caught:
            call()
        assert message in str(caught.value) and "--" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fczoo.create_method("hgp", lr=-1), "hgp.lr is -1.0; it must be at least 0"),
        (
            lambda: fczoo.Settings.for_dataset("digits", batch_size=0),
            "batch_size is 0; it must be at least 1",
        ),
        (
            lambda: fczoo.Settings(participation=0).check(),
            "participation is 0, so no client would train",
        ),
        (lambda: fczoo.Benchmark.open(fczoo.Settings(tasks=11)), "choose tasks between 1 and 10"),
        (
            lambda: fczoo.load_backbone("x.safetensors"),
            "no weight file at x.safetensors; give backbone NAME",
        ),
    ],
)
def test_messages_of_other_functions_name_arguments(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(FczooError) as caught:
        call()
    assert message in str(caught.value) and "--" not in str(caught.value)


def test_messages_of_benchmark_check_name_arguments(bench: Benchmark) -> None:
    few = replace(bench, settings=replace(bench.settings, min_clients=3, participation=1 / 3))
    with pytest.raises(
        FczooError, match=r"^min_clients is 3, but in task 1 of hgp at most 1 client can upload"
    ):
        few.check(fczoo.create_method("hgp"))


def test_messages_of_commands_and_workers_name_options(tmp_path: Path) -> None:
    def fail() -> None:
        raise FczooError("lower it with --min-clients")

    inner = use_python_names(fail)
    with options_in_messages(), pytest.raises(FczooError, match="--min-clients"):
        inner()
    with pytest.raises(FczooError, match="lower it with min_clients"):
        use_python_names(inner)()
    words = ["bench", "--methods", "hgp", "--set", "hgp.lr=-1", "--out", str(tmp_path / "run")]
    assert "--set hgp.lr is -1" in CliRunner().invoke(main, words).stderr


def test_messages_name_method_options_and_keep_commands() -> None:
    with pytest.raises(FczooError, match=r"^hgp\.lr is -1"):
        fczoo.bench("hgp", options={"hgp": {"lr": -1}})

    @use_python_names
    def fail() -> None:
        raise FczooError(
            "no '--x'; lower it with --set, or see `fczoo bench --help` or fczoo tune --out a"
        )

    with pytest.raises(FczooError) as caught:
        fail()
    message = "no '--x'; lower it with options, or see `fczoo bench --help` or fczoo tune --out a"
    assert str(caught.value) == message
