"""Test the options of ``fczoo bench``: help texts, groups and error messages."""

from dataclasses import fields
from pathlib import Path

import pytest
import timm.data
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from fczoo import FczooError, Settings
from fczoo.cli.app import main
from fczoo.cli.arguments import parse_methods, parse_seeds
from fczoo.cli.bench import bench
from fczoo.cli.options import GroupedOption
from fczoo.core.registry import DATASETS, METHODS
from fczoo.data.dataset import CLIP, IMAGENET
from fczoo.federation import benchmark
from fczoo.federation.setting_groups import GROUPS

HGP = ["bench", "--methods", "hgp"]
LONG = "9" * 400
BRACKETS = "[" * 100_000


def error_of(*arguments: str) -> str:
    """Run a command that must fail with one line; return the line."""
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code in (1, 2), outcome.output
    assert outcome.stderr.startswith("Error: ")
    assert outcome.stderr.count("\n") == 1
    assert not outcome.stdout
    return outcome.stderr


def test_every_setting_is_option_with_text_in_its_group() -> None:
    options = {p.name: p for p in bench.params if isinstance(p, GroupedOption)}
    page = CliRunner().invoke(main, ["bench", "--help-all"], terminal_width=400).stdout
    for field in fields(Settings):
        option = options[field.name]
        assert option.help.startswith(field.metadata["meaning"].partition("; none: ")[0])
        assert option.help in page
        assert option.group == field.metadata["group"] in GROUPS
    places = [page.index(f"\n{group.capitalize()}:\n") for group in ("runs", *GROUPS, "output")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "command", [["show", "settings"], ["bench", "--methods", "fedncm", "--dry-run"]]
)
def test_other_pages_show_same_option_texts(command: list[str]) -> None:
    page = CliRunner().invoke(main, command).stdout
    for field in fields(Settings):
        (line,) = [row for row in page.splitlines() if row.startswith(f"{field.name}  ")]
        assert field.metadata["meaning"][:40] in line
    assert all(f"\n{group.capitalize()}:\n" in page for group in GROUPS)


def test_normalisation_constants_match_timm() -> None:
    assert (timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD) == IMAGENET
    assert (timm.data.OPENAI_CLIP_MEAN, timm.data.OPENAI_CLIP_STD) == CLIP


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*HGP, "--rounds", "0"], "--rounds is 0; it must be at least 1"),
        ([*HGP, "--batch-size", "x"], "--batch-size is 'x'; it must be a whole number"),
        ([*HGP, "--precision", "fp16"], "--precision is 'fp16'; it must be fp32 | bf16 | fp64"),
        ([*HGP, "--rounds", str(2**63)], f"--rounds is {2**63}; it must be at most {2**63 - 1}"),
        ([*HGP, "--partition-seed", LONG], "... (400 characters); it must be at most"),
        ([*HGP, "--dp-clip", LONG], "--dp-clip is '999"),
        ([*HGP, "--clients", "1000001"], "--clients is 1000001; it must be between 1 and 1000000"),
        ([*HGP, "--set", "hgp.lr=-1"], "--set hgp.lr is -1.0; it must be at least 0"),
        ([*HGP, "--set", f"hgp.lr={LONG}"], "--set hgp.lr is '999"),
        ([*HGP, "--set", f"hgp.lr={BRACKETS}"], "--set hgp.lr is '[[["),
        ([*HGP, "--set", BRACKETS], "write METHOD.FIELD=VALUE"),
        (
            [*HGP, "--set", "backbone.rounds=3"],
            "--set backbone.rounds is unknown; known: image_size, mean, std",
        ),
        ([*HGP, "--seeds", "1,01"], "--seeds has 1 twice"),
        ([*HGP, "--seeds", LONG], "distinct whole numbers such as 0,1,2 or 0-4"),
        ([*HGP, "--attackers", "0.3"], "--attackers is given without --attack"),
        (["bench", "--methods", "hgp,hgp"], "--methods names 'hgp' twice"),
        (["report", ".", "--figures", "x"], "--figures needs --html FILE or --sweep; add one"),
        (["bench", "--rouds", "3"], "fczoo bench: no such option --rouds; did you mean --rounds"),
        (
            ["tune", "--metods", "hgp"],
            "fczoo tune: no such option --metods; did you mean --methods",
        ),
        (
            ["report", ".", "--formt"],
            "fczoo report: no such option --formt; did you mean --format?",
        ),
        (
            ["data", "check", "--foo"],
            "fczoo data check: no such option --foo; see fczoo data check --help",
        ),
        (["list", "methods", "--foo"], "fczoo list: no such option --foo; see fczoo list --help"),
        (
            ["reproduce", "--foo"],
            "fczoo reproduce: no such option --foo; see fczoo reproduce --help",
        ),
        (["--foo"], "Error: fczoo: no such option --foo; see fczoo --help"),
        (["bench", "--rounds"], "requires an argument"),
        (["lst"], "No such command 'lst'"),
        (["list", "methds"], "'methds' is not one of"),
        (["show"], "Missing argument"),
    ],
)  # fmt: skip
def test_invalid_option_is_reported_as_written(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = error_of(*arguments)
    assert says in line
    assert len(line) < 400
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--partition", "dirichlt:0.5"],
            "no partitioner is called 'dirichlt'; did you mean dirichlet, dirichlet-size?",
        ),
        (["--partition", "dirichlet:few"], "dirichlet.beta is 'few'"),
        (["--attack", "scal"], "no attack is called 'scal'; did you mean scale?"),
        (["--attack", "scale:far"], "scale.factor is 'far'"),
        (["--aggregator", "media"], "no aggregator is called 'media'; did you mean median"),
        (["--augment", "flipp"], "no augmentation is called 'flipp'; did you mean flip"),
        (["--protocol", "hpg"], "no protocol is called 'hpg'; did you mean hgp?"),
        (["--methods", "hgpp"], "no method is called 'hgpp'; did you mean hgp"),
        (["--set", "hgp.lrr=1"], "did you mean lr?"),
        (["--set", "hgpp.lr=1"], "hgpp is not a method of this run"),
        (["--log", "wandbb"], "no tracker is called 'wandbb'; did you mean wandb?"),
        (["--dataset", "cifar1000"], "no data set is called 'cifar1000'; did you mean cifar100"),
    ],
)
@pytest.mark.parametrize("dataset", ["digits", "cifar100"])
def test_misspelt_name_is_rejected_before_data_is_read(
    words: list[str], says: str, dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reject a misspelt name before data or weights are read.

    This also holds where the data are missing, as those of cifar100 here.
    """

    def fail_access(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setenv("FCZOO_HOME", str(tmp_path))
    monkeypatch.setattr(DATASETS.get(dataset), "load", fail_access)
    monkeypatch.setattr(benchmark, "require_data", fail_access)
    monkeypatch.setattr(benchmark, "load_backbone", fail_access)
    assert says in error_of(*HGP, "--dataset", dataset, "--out", str(tmp_path / "run"), *words)
    assert not any(tmp_path.iterdir())
    if words[0] in ("--partition", "--dataset", "--protocol"):
        assert says in error_of("partition", "--dataset", dataset, *words)


def test_parse_seeds_accepts_lists_and_ranges() -> None:
    assert parse_seeds("0-4") == [0, 1, 2, 3, 4]
    assert parse_seeds("7,0-2") == [7, 0, 1, 2]
    assert parse_seeds(3) == [3] and parse_seeds([1, 0]) == [1, 0]
    for wrong in ("4-0", "0-2,1", "7,0-2,", "", "-1", "0-", "0-10000", "²", True, [0, 0]):
        with pytest.raises(FczooError, match="--seeds"):
            parse_seeds(wrong)


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=6, unique=True))
def test_parse_seeds_restores_written_list(seeds: list[int]) -> None:
    assert parse_seeds(",".join(map(str, seeds))) == seeds


def test_unknown_picture_suffix_is_rejected(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    line = error_of("partition", "--plot", str(tmp_path / "p.xyz"))
    assert "is not an image file" in line
    assert ".png" in line
    assert not any(tmp_path.iterdir())


def test_list_shows_kinds_and_protocols() -> None:
    kinds = CliRunner().invoke(main, ["list"]).stdout
    assert {"methods", "quirks", "protocols"} <= {
        line.split()[0] for line in kinds.splitlines() if line
    }
    protocols = CliRunner().invoke(main, ["show", "protocol"]).stdout
    assert protocols.startswith(CliRunner().invoke(main, ["list", "protocols"]).stdout.rstrip())


def test_all_selects_all_methods_and_rejects_other_names():
    assert parse_methods("all") == parse_methods(["all"]) == METHODS.names()
    assert parse_methods("fedncm, hgp") == ["fedncm", "hgp"]
    with pytest.raises(
        FczooError, match="--methods all includes every method; leave the other names out"
    ):
        parse_methods("hgp,all")
