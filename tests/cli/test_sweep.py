"""Test ``--sweep`` and ``--zip``: their runs, folders and errors."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fczoo.cli.axes import parse_axes
from fczoo.reports.run_folder import read_bench_file
from fczoo.reports.runs import read_experiments
from helpers_cli import TINY, run
from helpers_papers import output_of

Plan = Callable[..., dict[str, list[tuple[str, int]]]]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Return a function from options of ``bench`` to methods and seeds by folder."""

    def folders(*words: str) -> dict[str, list]:
        sweeps = []
        monkeypatch.setattr("fczoo.runner.sweep.check_unique", sweeps.append)
        monkeypatch.setattr("fczoo.runner.dry_run.dry_run", lambda *_: "")
        run("bench", *TINY, *words, "--dry-run")
        return {folder.as_posix(): list(runs) for folder, runs in sweeps[0].items()}

    return folders


def methods_of(runs: dict[str, list]) -> dict[str, list[str]]:
    return {folder: [config.method for config in configs] for folder, configs in runs.items()}


def test_sweep_is_product_of_lists_of_method(plan: Plan) -> None:
    runs = plan(
        *("--methods", "pilora", "--seeds", "0,1"),
        *("--sweep", "PILoRA.LR-LoRA=0.01,0.1", "--sweep", "pilora.blocks=(0,1),(0,1,2)"),
    )
    assert list(runs) == [
        "pilora.lr_lora=0.01,pilora.blocks=0-1",
        "pilora.lr_lora=0.01,pilora.blocks=0-1-2",
        "pilora.lr_lora=0.1,pilora.blocks=0-1",
        "pilora.lr_lora=0.1,pilora.blocks=0-1-2",
    ]
    options = [configs[0].options for configs in runs.values()]
    assert [(x["lr_lora"], x["blocks"]) for x in options] == [
        (0.01, (0, 1)),
        (0.01, (0, 1, 2)),
        (0.1, (0, 1)),
        (0.1, (0, 1, 2)),
    ]
    assert all([config.seed for config in configs] == [0, 1] for configs in runs.values())


def test_options_of_other_methods_do_not_multiply_runs(plan: Plan) -> None:
    runs = plan(
        *("--methods", "fedncm,hgp,pilora", "--sweep", "hgp.lr=0.01,0.1"),
        *("--sweep", "pilora.blocks=0,1"),
    )
    assert methods_of(runs) == {
        "others": ["fedncm"],
        "hgp.lr=0.01": ["hgp"],
        "hgp.lr=0.1": ["hgp"],
        "pilora.blocks=0": ["pilora"],
        "pilora.blocks=1": ["pilora"],
    }


def test_zip_pairs_values(plan: Plan) -> None:
    words = ("--sweep", "batch_size=2,2,3", "--sweep", "hgp.lr=0.01,0.1,0.1")
    runs = plan("--methods", "fedncm,hgp", *words, "--zip")
    assert methods_of(runs) == {
        "batch_size=2": ["fedncm"],
        "batch_size=2,hgp.lr=0.01": ["hgp"],
        "batch_size=2,hgp.lr=0.1": ["hgp"],
        "batch_size=3": ["fedncm"],
        "batch_size=3,hgp.lr=0.1": ["hgp"],
    }
    assert [configs[0].settings.batch_size for configs in runs.values()] == [2, 2, 2, 3, 3]


def test_sweep_combines_with_partition_grid(plan: Plan) -> None:
    runs = plan(
        *("--methods", "fedavg", "--partition", "iid,dirichlet:0.1"),
        *("--sweep", "local=(fedprox:mu=0.1),none"),
    )
    assert list(runs) == [
        "local=fedprox_0.1/iid",
        "local=fedprox_0.1/dirichlet_0.1",
        "local=none/iid",
        "local=none/dirichlet_0.1",
    ]
    (size,) = plan("--methods", "fedncm", "--sweep", "backbone.image_size=64").values()
    assert size[0].settings.image_size == 64


def test_command_line_sweep_replaces_sweep_of_file(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "runs.toml"
    lists = "sweep.hgp.lr = [0.01, 0.1]\nsweep.pilora.blocks = [[0, 1], [2]]\n"
    file.write_text(f'methods = ["hgp", "pilora"]\nzip = true\n{lists}')
    runs = plan("--config", str(file))
    folders = ["hgp.lr=0.01", "hgp.lr=0.1", "pilora.blocks=0-1", "pilora.blocks=2"]
    assert list(runs) == folders
    words = ("--no-zip", "--sweep", "hgp.lr=0.3,0.5", "--methods", "hgp")
    assert list(plan("--config", str(file), *words)) == ["hgp.lr=0.3", "hgp.lr=0.5"]
    file.write_text('sweep = ["hgp.lr=0.01,0.1"]\nset.hgp.lr = 0.2\nmethods = "hgp"\n')
    message = output_of("bench", "--config", str(file), "--dry-run", code=1)
    assert message.endswith("--set hgp.lr and --sweep hgp.lr are both given; leave one out\n")
    # a value of the file is a default, which a sweep on the command line replaces
    file.write_text('set.hgp.lr = 0.2\nbatch-size = 5\nmethods = "hgp"\n')
    sweep = ("--sweep", "hgp.lr=0.3,0.5", "--sweep", "batch-size=2")
    both = plan("--config", str(file), *sweep)
    assert list(both) == ["hgp.lr=0.3,batch_size=2", "hgp.lr=0.5,batch_size=2"]


def test_set_keeps_list_as_one_value(plan: Plan) -> None:
    (runs,) = plan("--methods", "pilora", "--set", "pilora.blocks=0,1").values()
    assert runs[0].options["blocks"] == (0, 1)


SWEEP = "--sweep"
ERRORS = {
    ("hgp.lr",): "cannot read --sweep 'hgp.lr'; write METHOD.OPTION=VALUE,VALUE or "
    "SETTING=VALUE,VALUE, e.g. hgp.lr=0.01,0.1",
    ("hgp.lr=",): "--sweep 'hgp.lr=' has no value; write METHOD.OPTION=VALUE,VALUE or "
    "SETTING=VALUE,VALUE, e.g. hgp.lr=0.01,0.1",
    ("hgp.lr=0.1,,0.2",): "--sweep 'hgp.lr=0.1,,0.2' has an empty entry; remove it and its comma",
    ("hgp.lr=0.1,0.1",): "--sweep has hgp.lr=0.1 twice; leave one out",
    ("hgp.lr=0.1,1e-1",): "--sweep gives hgp.lr=0.1 twice; leave one out",
    ("hgp.lr=0.1", SWEEP, "hgp.LR=0.2"): "--sweep has hgp.lr twice; give all of its values in "
    "one list",
    ("hpg.lr=0.1,0.2",): "--sweep hpg.lr: no method is called 'hpg'; did you mean hgp?",
    ("hgp.lrr=0.1,0.2",): "hgp has no option 'lrr'; did you mean lr",
    ("hgp.lr=0.1,fast",): "--sweep hgp.lr is 'fast'; it must be a finite number",
    ("fedavg.lr=0.1,0.2",): "--sweep fedavg.lr: fedavg is not a method of this run; known: hgp",
    ("lr=0.1,0.2",): "cannot read --sweep 'lr=0.1,0.2': lr is an option of ",
    ("rounds=1,many",): "--sweep rounds is 'many'; it must be",
    ("clents=2,3",): "--sweep: no setting is called 'clents' (write "
    "METHOD.OPTION for an option of a method); did you mean clients",
    ("partition=iid,shards:2",): "--sweep partition: give several values as "
    "--partition VALUE,VALUE",
    ("seeds=0,1",): "--sweep seeds: give several values as --seeds VALUE,VALUE",
    ("device=cpu,cuda",): "--sweep device: --device is not a hyper-parameter; for several "
    "values write [[cells]] in a settings file, see --config",
    ("pilora.blocks=(0,1",): "--sweep 'pilora.blocks=(0,1' has an unmatched parenthesis; add "
    "the other one",
    ("pilora.blocks=0,1)",): "--sweep 'pilora.blocks=0,1)' has an unmatched parenthesis; add "
    "the other one",
    ("hgp.lr=0.1,0.2", "--zip"): "--zip needs two or more --sweep; add another, or leave --zip out",
    ("hgp.lr=0.1,0.2", SWEEP, "clients=2", "--zip"): "--zip needs lists of equal length, but "
    "there are 2 values of hgp.lr, 1 value of clients",
    ("clients=2,2", SWEEP, "hgp.lr=0.1,0.1", "--zip"): "--sweep has clients=2 twice; leave one out",
    ("hgp.lr=0.1,0.2", "--set", "hgp.lr=0.3"): "--set hgp.lr and --sweep hgp.lr are both given; "
    "leave one out",
    ("rounds=1,2", "--rounds", "3"): "--rounds and --sweep rounds are both given; leave one out",
}


@pytest.mark.parametrize("words", ERRORS, ids=" ".join)
def test_invalid_sweep_is_rejected(words: tuple[str, ...], tmp_path: Path):
    out = tmp_path / "runs"
    message = output_of("bench", "--methods", "hgp", "--out", str(out), SWEEP, *words, code=1)
    assert f"Error: {ERRORS[words]}" in message
    assert message.count("\n") == 1 and not out.exists()


def test_zip_without_sweep_and_list_in_set_are_rejected(tmp_path: Path) -> None:
    message = output_of("bench", "--methods", "hgp", "--zip", code=1)
    assert (
        "--zip is given without --sweep; give two or more --sweep options, or leave --zip out"
        in message
    )
    message = output_of("bench", "--methods", "hgp", "--set", "hgp.lr=0.01,0.1", code=1)
    assert message == (
        "Error: --set hgp.lr is '0.01,0.1'; it must be a finite number; for several values give "
        "--sweep hgp.lr=0.01,0.1\n"
    )
    card = ("reproduce", "hgp/cifar100/dirichlet:0.05", SWEEP, "hgp.lr=1,2")
    assert "--sweep hgp.lr=1,2 gives several" in output_of(*card, code=1)


def test_parentheses_keep_list_as_one_value() -> None:
    (axis,) = parse_axes(["pilora.blocks=0,(0,1), (0,1,2)"])
    assert axis.values == ("0", "0,1", "0,1,2")
    first, second = parse_axes({"hgp": {"lr": 0.1}, "tasks": ["5,5", 2]})
    assert (first.name, first.values, second.values) == ("hgp.lr", ("0.1",), ("5,5", "2"))


def test_sweep_runs_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    words = ("bench", *TINY, "--methods", "fedncm,fedavg", "--sweep", "fedavg.lr=0.01,0.1")
    first = run(*words, "--out", str(out))
    assert f"Accuracy by value: fczoo report {out} --sweep" in first
    (experiment,) = read_experiments([out])
    labels = ["fedavg (lr=0.01)", "fedavg (lr=0.1)", "fedncm"]
    assert [line.label for line in experiment.lines] == labels
    assert read_bench_file(out / "fedavg.lr=0.1").methods["fedavg"]["lr"] == 0.1
    results = {p: p.stat().st_mtime_ns for p in out.rglob("result.json")}
    assert len(results) == 3
    run(*words, "--out", str(out))
    run("bench", "--resume", "--out", str(out))
    assert results == {p: p.stat().st_mtime_ns for p in out.rglob("result.json")}
    message = output_of("bench", "--resume", "--out", str(out), *words[-2:], code=1)
    assert "leave --sweep out, or add --methods, which also runs the sweep" in message
