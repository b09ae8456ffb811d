"""Canonical spellings of partitions, aggregators, attacks and local rules, also in old folders."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo import FczooError, Settings, load_results, option
from fczoo.cli.app import main
from fczoo.core.files import read_json, write_json
from fczoo.core.registry import DATASETS, PARTITIONERS, Registry
from fczoo.data.partition import load_partition
from fczoo.federation.data_setup import open_stream
from fczoo.protocols.registry import PROTOCOLS
from helpers_cli import TINY, run

HASHES = {  # of version 0.2.0.dev0 before canonical spellings: digits, five clients, seed 0
    "dirichlet:0.5": "75c409b4",
    "dirichlet:1": "7d0eabfd",  # of dirichlet:1.0, which four data sets had as their default
    "quantity:2": "bcdd5655",
    "overlap:0.6": "052be17b",
    "shards:2,shards=50": "51dd43ad",
    "dirichlet:0.5,cap=on,min_size=10": "5678be85",  # of PILoRA's protocol
    "dirichlet:0.5,scope=dataset,cap=on,min_size=10": "5e0bf386",  # of FPPL's
    "dirichlet:1,draw=sample,max_tries=10000": "082083e6",  # of HGP's
    "iid": "7ff08333",
}
SPELLINGS = [
    (
        "partition",
        "dirichlet:0.5",
        "dirichlet dirichlet:beta=0.5 dirichlet:.5 dirichlet:0.50 dirichlet:5e-1",
    ),
    (
        "partition",
        "dirichlet:1",
        "dirichlet:1.0 dirichlet:1. dirichlet:+1 dirichlet:beta=1,min_size=6",
    ),
    ("partition", "dirichlet:0.5,cap=on", "dirichlet:cap=true dirichlet:0.5,draw=split,cap=ON"),
    (
        "partition",
        "dirichlet:0.5,scope=dataset,cap=on,min_size=10",
        "dirichlet:min_size=10,cap=true,scope=dataset "
        "dirichlet:.5,cap=on,min_size=10,scope=dataset",
    ),
    (
        "partition",
        "dirichlet:0.1,draw=sample,max_tries=10000",
        "dirichlet:max_tries=10000,draw=sample,beta=.1",
    ),
    ("partition", "quantity:2", "quantity quantity:alpha=2 quantity:2,draw=shares"),
    ("partition", "quantity:2,scope=dataset,anchored=on", "quantity:anchored=true,scope=dataset"),
    ("partition", "overlap:0.6", "overlap overlap:fraction=.6 overlap:0.60"),
    ("partition", "overlap:1", "overlap:1.0 overlap:1e0"),
    ("partition", "shards:2,shards=50", "shards:shards=50 shards:alpha=2,shards=50"),
    ("partition", "iid", "iid IID"),
    ("aggregator", "trimmed_mean:1", "trimmed_mean trimmed_mean:trim=1"),
    ("aggregator", "capped:3", "capped capped:3.0 capped:times=3"),
    ("attack", "scale:10", "scale scale:10.0 scale:1e1 scale:factor=10"),
    ("attack", "sign-flip:5", "sign-flip:5. sign-flip:factor=5"),
    ("local", "fedprox:0.01", "fedprox fedprox:mu=0.01 fedprox:.01 fedprox:1e-2"),
    ("local", "scaffold", "scaffold"),
]


@pytest.mark.parametrize(("setting", "canonical", "spellings"), SPELLINGS)
def test_all_spellings_give_equal_settings(setting: str, canonical: str, spellings: str) -> None:
    for spec in [canonical, *spellings.split(" ")]:
        settings = Settings.for_dataset("digits", **{setting: spec})
        assert getattr(settings, setting) == settings.portable()[setting] == canonical, spec
        assert settings == Settings.for_dataset("digits", **{setting: canonical})


@pytest.mark.parametrize(
    "spec", ["dirichlet", "dirichlet: 5e-1", "dirichlet:.5", "dirichlet:beta= 0.5"]
)
def test_default_partition_keeps_hash(spec: str) -> None:
    partition = open_stream(Settings.for_dataset("digits", partition=spec), pixels=False)[1]
    assert (partition.spec, partition.sha256[:8]) == ("dirichlet:0.5", "75c409b4")


@pytest.mark.parametrize(("spec", "sha256"), HASHES.items())
def test_canonical_spellings_keep_hash(spec: str, sha256: str) -> None:
    partition = open_stream(Settings.for_dataset("digits", partition=spec), pixels=False)[1]
    assert (partition.spec, partition.sha256[:8]) == (spec, sha256)


@pytest.mark.parametrize("dataset", ["cars196", "cub200", "eurosat", "imagenet_a"])
@pytest.mark.parametrize("spec", [None, "dirichlet:1.0", "dirichlet:1", "dirichlet:beta=1."])
def test_default_of_four_data_sets_keeps_hash(dataset: str, spec: str | None) -> None:
    chosen = Settings.for_dataset(dataset, partition=spec).partition
    partition = open_stream(Settings.for_dataset("digits", partition=chosen), pixels=False)[1]
    assert (partition.spec, partition.sha256[:8]) == ("dirichlet:1", "7d0eabfd")


def test_bundled_partitions_are_canonical() -> None:
    splits = {DATASETS.get(name).defaults.partition for name in DATASETS.names("fczoo.datasets")}
    for name in PROTOCOLS.names("fczoo."):
        splits |= {split for some in PROTOCOLS.get(name).partitions.values() for split in some}
    assert {"dirichlet:1", "quantity:6", "dirichlet:0.5,scope=dataset,cap=on,min_size=10"} <= splits
    assert {split: PARTITIONERS.canonical(split) for split in splits} == {
        split: split for split in splits
    }


def test_plugin_part_has_canonical_spelling() -> None:
    @dataclass(frozen=True)
    class SliceRule:
        rule: str = option("", "a word")
        parts: int | None = option(None, "a number")
        rate: float = option(2.0, "a number")
        even: bool = option(True, "a switch")
        rows: tuple[int, ...] = option((1, 2), "numbers")

    registry = Registry("thing", "register_thing")
    registry.register("sliced")(SliceRule)
    assert registry.canonical("sliced") == "sliced"
    assert (
        registry.canonical("sliced:even=false,rate=2,parts=3.")
        == "sliced:even=false,rate=2,parts=3."
    )
    assert registry.canonical("sliced:even=FALSE,rate=2,parts=3") == "sliced:parts=3,even=off"
    assert registry.canonical("sliced:v1.0, rate = 3.0,parts=none") == "sliced:v1.0,rate=3"
    for spec in ("sliced:v1.0,rate=3", "sliced:parts=3,even=off"):
        assert registry.canonical(spec) == spec
    assert registry.canonical("slicd:1") == "slicd:1"  # for ``create`` to refuse


@pytest.mark.parametrize(
    "spec",
    [
        "dirchlet",
        "dirichlet:-1",
        "dirichlet:0.5,caps=on",
        "dirichlet:.",
        "dirichlet:",
        "iid:",
        "iid:5",
    ],
)
def test_invalid_spec_is_rejected_as_typed(spec: str) -> None:
    settings = Settings(partition=spec)
    assert settings.partition == spec
    with pytest.raises(FczooError):
        settings.check()


def respell(folder: Path, typed: str) -> str:
    """Rewrite a run folder as version 0.2.0.dev0 wrote it for a partition typed in this way.

    Return its hash of the partition.
    """
    record = {**read_json(folder / "partition.json", "file"), "spec": typed}
    content = {name: value for name, value in record.items() if name not in ("format", "sha256")}
    sha256 = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    spelling = {"spec": typed, "sha256": sha256}
    for path, fields in [
        (folder / "partition.json", spelling),
        (folder / "bench.json", {"partition": spelling}),
        *((p, {"partition": {**spelling, "seed": 0}}) for p in folder.glob("*/seed*/result.json")),
    ]:
        content = read_json(path, "file") | fields
        if "settings" in content:
            content["settings"]["partition"] = typed
        if path.name != "partition.json":  # that version wrote no checksum of the whole file
            content = {k: v for k, v in content.items() if k not in ("format", "sha256")}
        write_json(path, content)
    return sha256


@pytest.fixture
def old_folder(tmp_path: Path) -> Path:
    run("bench", "--methods", "fedncm", *TINY, "--out", str(tmp_path / "old"))
    respell(tmp_path / "old", "dirichlet")
    return tmp_path / "old"


def test_old_and_new_folder_share_table(old_folder: Path, tmp_path: Path) -> None:
    options = ["--methods", "fedridge", *TINY, "--partition", "dirichlet:beta=.5"]
    run("bench", *options, "--out", str(tmp_path / "new"))
    output = run("report", str(tmp_path))
    assert output.count("digits: 3 tasks") == 1
    assert "clients, dirichlet:0.5 (seed 0, " in output
    (experiment,) = load_results(tmp_path).experiments
    assert sorted(line.label for line in experiment.lines) == ["fedncm", "fedridge"]
    assert (
        json.loads((tmp_path / "new/bench.json").read_text())["settings"]["partition"]
        == "dirichlet:0.5"
    )


@pytest.mark.parametrize("typed", ["dirichlet:1.0", "dirichlet:1", "dirichlet:beta=1"])
def test_old_and_new_folder_with_beta_1_share_table(typed: str, tmp_path: Path) -> None:
    for method, out in (("fedncm", "old"), ("fedridge", "new")):
        run("bench", "--methods", method, *TINY, "--partition", typed, "--out", str(tmp_path / out))
    new = load_partition(tmp_path / "new/partition.json")
    assert (respell(tmp_path / "old", typed) == new.sha256) == (typed == "dirichlet:1.0")
    (experiment,) = load_results(tmp_path).experiments
    assert sorted(line.label for line in experiment.lines) == ["fedncm", "fedridge"]
    assert experiment.bench_file.partition == {"spec": "dirichlet:1", "sha256": new.sha256}


@pytest.mark.parametrize(
    "spec", [[], ["--partition", "dirichlet"], ["--partition", "dirichlet:5e-1"]]
)
def test_old_folder_resumes_with_any_spelling(spec: list[str], old_folder: Path) -> None:
    (old_folder / "fedncm/seed0/result.json").unlink()
    sha256 = load_partition(old_folder / "partition.json").sha256
    run("bench", "--methods", "fedncm", *TINY, *spec, "--seeds", "0,1", "--out", str(old_folder))
    assert len(load_results(old_folder)) == 2
    about = json.loads((old_folder / "bench.json").read_text())
    assert about["partition"] == {"spec": "dirichlet:0.5", "sha256": sha256}


def test_old_grid_resumes_with_other_folder_spelling(old_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "grid").mkdir()
    folder = old_folder.rename(tmp_path / "grid/dirichlet")
    (folder / "fedncm/seed0/result.json").unlink()
    run("bench", "--resume", "--out", str(tmp_path / "grid"))
    assert sorted(p.name for p in (tmp_path / "grid").iterdir() if p.is_dir()) == ["dirichlet"]
    assert len(load_results(folder)) == 1


def test_old_folder_can_be_submitted(old_folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["submit", str(old_folder), "--dry-run"])
    assert "has no hashes of the code" not in result.output
    assert "differs from" not in result.output


def test_old_partition_file_is_read(old_folder: Path) -> None:
    file = load_partition(old_folder / "partition.json")
    assert json.loads((old_folder / "partition.json").read_text())["spec"] == "dirichlet"
    assert file.spec == "dirichlet:0.5"
    spec, out = f"file:{old_folder / 'partition.json'}", str(old_folder.parent / "again")
    again = run("bench", "--methods", "fedncm", *TINY, "--partition", spec, "--out", out)
    assert f"dirichlet:0.5 (seed 0, {file.sha256[:8]})" in again


def test_two_spellings_are_one_setting(tmp_path: Path) -> None:
    specs, out = "dirichlet,dirichlet:.5", str(tmp_path / "o")
    run("bench", "--methods", "fedncm", *TINY, "--partition", specs, "--out", out)
    assert (tmp_path / "o/bench.json").is_file()
