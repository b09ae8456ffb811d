"""Test the suggestions for options, commands and values of other tools."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.cli.bench import bench
from fczoo.cli.other_tools import COMMANDS, OPTIONS, PARTITIONS, single_seed_note
from helpers_cli import TINY


def error_of(*words: str) -> str:
    """Run a command that must fail with one line; return the line."""
    outcome = CliRunner().invoke(main, list(words))
    assert outcome.exit_code in (1, 2), outcome.output
    assert outcome.stderr.startswith("Error: ")
    assert outcome.stderr.count("\n") == 1
    assert not outcome.stdout
    return outcome.stderr


@pytest.mark.parametrize("option", OPTIONS)
def test_foreign_option_gets_suggestion(option: str) -> None:
    target, advice = OPTIONS[option]
    params = {param.name: param.opts[0] for param in bench.params}
    assert params[target] in advice
    assert f"--{option}" not in {o for p in bench.params for o in p.opts}
    assert f"fczoo bench: no such option --{option}; {advice}" in error_of(
        "bench", f"--{option}", "1"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "--LR", "1"], "--set METHOD.lr=VALUE"),
        (
            ["bench", "--lr_lora", "1"],
            "option of dolfin, fedlora, l2p, pilora: --set METHOD.lr_lora=VALUE",
        ),
        (
            ["tune", "--LR-LoRA", "1"],
            "option of dolfin, fedlora, l2p, pilora: --set METHOD.lr_lora=VALUE",
        ),
        (["bench", "--momentum", "1"], "and 41 more: --set METHOD.momentum=VALUE"),
        (["tune", "--lr", "1"], "--set METHOD.lr=VALUE"),
        (["bench", "--non-iid", "1"], "--partition dirichlet:0.1"),
        (["bench", "--pretrained", "x"], "--backbone FILE"),
        (["tune", "--num-clients", "3"], "--clients NUMBER"),
        (["bench", "--methods", "a", "b", "c"], "separate names by commas: --methods a,b,c"),
        (["bench", "--methods=a", "b"], "separate names by commas: --methods a,b"),
        (["bench", "--methods", "a,", "b"], "separate names by commas: --methods a,b"),
        (["bench", "--seeds", "0", "1"], "separate numbers by commas: --seeds 0,1"),
        (
            ["bench", "--tasks", "50", "10", "--seeds", "0"],
            "separate numbers by commas: --tasks 50,10",
        ),
        (["tune", "--methods", "a", "b"], "separate names by commas: --methods a,b"),
        (["bench", "--methods", "hgp,FedProx"], "fedprox is an option of a run: --local fedprox"),
        (["bench", "--methods", "Median"], "median is an option of a run: --aggregator median"),
        (["bench", "--methods", "FedAdam"], "fedadam is an option of a run: --server-optimizer fe"),
        (["bench", "--methods", "hgp", "--server-lr", "0.1"], "give --server-optimizer fedadam:LR"),
        (["bench", "--methods", "hgp", "--partition", "noniid"], "write --partition dirichlet:0.1"),
        (
            ["bench", "--methods", "hgp", "--partition", "Non-IID:0.3"],
            "write --partition dirichlet:0.3",
        ),
        (
            ["bench", "--methods", "hgp", "--partition", "dirichlet:0.1,0.5"],
            "--partition dirichlet:0.1,dirichlet:0.5",
        ),
        (["bench", "--methods", "hgp", "--partition", "0.1"], "write --partition dirichlet:0.1"),
        (["partition", "--partition", "NonIID"], "write --partition dirichlet:0.1"),
        (
            ["tune", "--methods", "hgp", "--out", "x", "--partition", "LDA:0.2"],
            "write --partition dirichlet:0.2",
        ),
        (
            ["bench", "--methods", "hgp", "--set", "hgp.learning_rate=1"],
            "mean lr, head_lr, server_lr?",
        ),
        (["bench", "--methods", "hgp", "--set", "hgp.wd=1"], "(--set hgp.weight_decay=VALUE)"),
        (["bench", "--methods", "pilora", "--set", "pilora.learning_rate=1"], "lr_prototype"),
        (["reproduce", "hgp/cifar100"], "hgp/cifar100 has "),
        (["reproduce", "HGP/cifar100"], "hgp/cifar100/"),
    ],
)
def test_foreign_arguments_get_suggestion(words: list[str], says: str) -> None:
    assert says in error_of(*words)


@pytest.mark.parametrize("command", COMMANDS)
def test_foreign_command_gets_suggestion(command: str) -> None:
    advice = COMMANDS[command]
    target = advice.split()[1].strip(";")
    assert target in main.commands or target in ("--help", "--version")
    assert f"No such command {command!r}; write {advice}" in error_of(command)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("HGP", "write fczoo show hgp or fczoo bench --methods hgp"),
        ("Data-Sets", "write fczoo list datasets"),
        ("protocols", "write fczoo list protocols"),
    ],
)
def test_name_in_place_of_command_gets_suggestion(command: str, says: str) -> None:
    assert says in error_of(command)


@pytest.mark.parametrize("name", PARTITIONS)
def test_foreign_partition_gets_suggestion(name: str) -> None:
    says = f"write --partition {PARTITIONS[name]}"
    assert says in error_of("bench", "--methods", "hgp", "--partition", name)


def test_one_seed_hint() -> None:
    assert single_seed_note("3") == "--seeds 3 is one seed; for 3 seeds give --seeds 0-2"
    assert single_seed_note(3) == single_seed_note("3")
    assert {
        single_seed_note(value) for value in ("0", "1", "0-2", "0,1", "", "2024", "9" * 400)
    } == {""}


def test_bench_prints_hint_for_single_seed(tmp_path: Path) -> None:
    words = [*TINY, "--out", str(tmp_path / "run"), "--methods", "fedncm", "--seeds", "3"]
    outcome = CliRunner().invoke(main, ["bench", *words])
    assert outcome.exit_code == 0, outcome.output
    assert "--seeds 3 is one seed; for 3 seeds give --seeds 0-2\n" in outcome.stderr
    assert json.loads((tmp_path / "run" / "bench.json").read_text())["seeds"] == [3]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("quick", "quick"),
        ("vit_nano_32", "the small backbone that comes with fczoo"),
        ("VIT-tiny-patch16-224", "fczoo bench --backbone vit_tiny_patch16_224"),
        ("aggregator", "capped, fedavg, krum"),
        ("--batch-size", "fczoo bench --batch-size"),
        ("lr", "An option of "),
        ("lr", "hgp.lr "),
    ],
)
def test_show_describes_names_of_any_kind(name: str, says: str) -> None:
    outcome = CliRunner().invoke(main, ["show", "--", name])
    assert outcome.exit_code == 0 and says in outcome.stdout, outcome.output


def test_show_lists_meanings_of_ambiguous_name() -> None:
    outcome = CliRunner().invoke(main, ["show", "pool"])
    assert outcome.exit_code == 0, outcome.output
    assert outcome.stdout.startswith(
        "pool has 2 meanings:\n- the setting pool of a run: fczoo bench --pool"
    )
    assert (
        "- an option of fppl: fczoo show fppl prints its value, --set fppl.pool=VALUE sets it\n"
        in outcome.stdout
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("qick", "unknown name 'qick'; did you mean quick"),
        ("methods", "unknown name 'methods'; see fczoo list methods"),
        ("seeds", "unknown name 'seeds'; --seeds is an option: see fczoo bench --help"),
        (
            "learning_rate",
            "unknown name 'learning_rate'; the learning rate is an option of each method",
        ),
    ],
)
def test_show_suggests_names_for_unknown_name(name: str, says: str) -> None:
    assert says in error_of("show", name)
