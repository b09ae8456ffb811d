"""Test settings files: options, cells of a grid, and run folders as settings."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.reports.run_folder import write_bench_file

TINY = """
methods = ["fedncm"]
train-per-class = 8
test_per_class = 4
rounds = 1
epochs = 1
tasks = [4, 6]
clients = 3
"""


def run(*arguments: str, code: int = 0) -> str:
    outcome = CliRunner().invoke(main, ["bench", *arguments])
    assert outcome.exit_code == code, outcome.output
    return outcome.stdout if code == 0 else outcome.stderr


def about(folder: Path) -> dict:
    return json.loads((folder / "bench.json").read_text())


@pytest.fixture
def config(tmp_path: Path):
    def write(text: str) -> str:
        (tmp_path / "runs.toml").write_text(TINY + text)
        return str(tmp_path / "runs.toml")

    return write


def test_command_line_overrides_settings_file(config, tmp_path: Path) -> None:
    file = config(
        'seeds = "0-1"\npartition = "iid"\nout = "unused"\n[set.fedncm]\ndistance = "cosine"\n'
    )
    out = tmp_path / "run"
    run("--config", file, "--partition", "dirichlet:0.3", "--clients", "2", "--out", str(out))
    record = about(out)
    settings = record["settings"]
    assert (settings["tasks"], settings["train_per_class"], settings["clients"]) == ([4, 6], 8, 2)
    assert settings["partition"] == "dirichlet:0.3"
    assert record["seeds"] == [0, 1]
    assert record["methods"] == {"fedncm": {"distance": "cosine", "normalise": False}}


def test_method_options_of_file_and_command_line_are_merged(config) -> None:
    file = config("[set.hgp]\nlr = 0.25\nprefix_len = 3\n[set.fppl]\nlr = 0.5\n")
    page = run("--config", file, "--methods", "hgp", "--set", "hgp.lr=0.125", "--dry-run")
    rows = {line.split()[0]: line.split()[1:] for line in page.splitlines() if line.strip()}
    assert rows["lr"] == ["0.125", "--set"]
    assert rows["prefix_len"] == ["3", "--set"]
    assert rows["tasks"][:2] == ["4,6", "given"]


def test_cells_of_settings_file_form_one_grid(config, tmp_path: Path) -> None:
    cells = """
[[cells]]
name = "few"
clients = 2

[[cells]]
partition = ["iid", "dirichlet:0.5"]
seeds = [3]

[[cells]]
methods = "fedclm,fedncm"
set = ["fedncm.distance=cosine"]
"""
    out = tmp_path / "grid"
    output = run("--config", config(cells), "--out", str(out))
    records = {
        p.parent.relative_to(out).as_posix(): about(p.parent) for p in out.rglob("bench.json")
    }
    split = "partition=iid-dirichlet_0.5,seeds=3"
    last = "methods=fedclm,fedncm,fedncm.distance=cosine"
    assert records.keys() == {"few", f"{split}/iid", f"{split}/dirichlet_0.5", last}
    assert records["few"]["settings"]["clients"] == 2
    assert records[f"{split}/iid"]["seeds"] == [3]
    assert list(records[last]["methods"]) == ["fedclm", "fedncm"]
    assert records[last]["methods"]["fedncm"] == {"distance": "cosine", "normalise": False}
    assert (
        output.count("digits: 2 tasks of 4 to 6 classes") == 3
    )  # one table per stream and schedule
    assert run("--config", config(cells), "--out", str(out)) == output


def test_dry_run_reports_name_of_each_cell(config) -> None:
    cells = '[[cells]]\nname = "a"\nclients = 2\n[[cells]]\nname = "b"\nclients = 3\n'
    words = ["bench", "--config", config(cells), "--methods", "fedncm", "--dry-run"]
    outcome = CliRunner().invoke(main, words)
    assert outcome.exit_code == 0, outcome.output
    assert "setting 1 of 2: a" in outcome.stderr
    assert "setting 2 of 2: b" in outcome.stderr
    assert outcome.stdout.count("Costs assume") + outcome.stdout.count("Image-steps") >= 2


def test_run_description_as_config_repeats_run(config, tmp_path: Path) -> None:
    """Restore configuration, split and numbers from a run folder.

    The rest of the file and today's defaults do not matter.
    """
    first, second = tmp_path / "first", tmp_path / "second"
    run("--config", config('[set.fedncm]\ndistance = "cosine"\n'), "--out", str(first))
    write_bench_file(first, {**about(first), "earlier_commands": [["fczoo"]]})
    run("--config", str(first / "bench.json"), "--out", str(second))
    old, new = about(first), about(second)
    for part in ("methods", "seeds", "settings", "partition", "backbone", "data"):
        assert old[part] == new[part], part
    one, two = (json.loads((p / "fedncm/seed0/result.json").read_text()) for p in (first, second))
    assert one["accuracy"] == two["accuracy"]


def test_missing_settings_of_old_run_get_neutral_values(config, tmp_path: Path) -> None:
    """Use the neutral value of a setting that an older run folder does not have.

    The value that the protocol sets today does not matter.
    """
    first = tmp_path / "first"
    run("--config", config('protocol = "quick"\nmin_clients = 1\n'), "--out", str(first))
    old = {k: v for k, v in about(first).items() if k not in ("format", "sha256")}
    settings = {
        k: v for k, v in old["settings"].items() if k not in ("outliers", "dp_delta", "test_crop")
    }
    old = {k: v for k, v in old.items() if k not in ("format", "sha256")}
    (first / "bench.json").write_text(json.dumps({**old, "settings": settings}))
    page = run("--config", str(first / "bench.json"), "--dry-run")
    rows = {line.split()[0]: line.split()[1:] for line in page.splitlines() if line.strip()}
    assert [rows[k][0] for k in ("outliers", "dp_delta", "test_crop")] == ["none", "1e-05", "1"]
    assert rows["protocol"][0] == "quick" and rows["clients"][0] == "3"


def test_run_description_keeps_saved_partition(config, tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    run("--config", config("partition_seed = 5\n"), "--out", str(first))
    run("--config", config(f'partition = "file:{first}/partition.json"\n'), "--out", str(second))
    run("--config", str(second / "bench.json"), "--out", str(third))
    assert about(third)["partition"]["sha256"] == about(first)["partition"]["sha256"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batchsize = 3", "no option is called 'batchsize'; did you mean batch_size"),
        ("batch-size = 3\nbatch_size = 3", "batch_size is given twice"),
        ("batch_size = 0", "--batch-size is 0; it must be at least 1"),
        ("batch_size = [[1]]", "--batch-size is [[1]]; it must be a whole number"),
        ("methods = 3", "methods is 3; it must be a string, or a list of strings"),
        ("protocol = 3", "protocol is 3; it must be a string"),
        ("resume = 'yes'", "resume is 'yes'; it must be true or false"),
        ("seeds = 1.5", "seeds is 1.5; it must be a whole number"),
        ("seeds = [0, 0]", "--seeds has 0 twice"),
        ("set = 3", "set is 3; it must be a table for each method"),
        ("[set.hgpp]\nlr = 1", "set.hgpp: no method is called 'hgpp'; did you mean hgp"),
        ("[set.fedncm]\nlrr = 1", "fedncm has no option 'lrr'"),
        ("[set.backbone]\nrounds = 1", "--set backbone.rounds is unknown"),
        ("cells = 3", "write [[cells]]"),
        ("[[cells]]\nout = 'x'", "cell 1 of"),
        ("[[cells]]\nname = '../x'", "is not a valid folder name"),
        ("[[cells]]\n", "needs a folder name"),
        ("[[cells]]\nclients = 2\n[[cells]]\nclients = 2", "two cells are called clients=2"),
        ("[[cells]]\nname = 'a'\n[[cells]]\nname = 'b'", "fedncm with seed 0 would run in"),
        ("attackers = 0.3", "--attackers is given without --attack"),
        ("rounds = ", "is not valid TOML"),
        ("mean = " + "[" * 100_000, "is not valid TOML"),
        ("config = 'x'", "no option is called 'config'"),
    ],
)
def test_invalid_settings_file_is_rejected(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {line.split("=")[0].strip().replace("-", "_") for line in text.splitlines()}
    head = "\n".join(line for line in TINY.splitlines() if line.split(" ")[0] not in keys)
    Path("runs.toml").write_text(f"{head}\n{text}\n")
    message = run("--config", "runs.toml", code=1)
    assert says in message
    assert message.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["runs.toml"]


def test_missing_or_unreadable_settings_file_is_rejected(tmp_path: Path) -> None:
    assert "no settings file at" in run("--config", str(tmp_path / "a.toml"), code=1)
    assert "is not a settings file" in run("--config", str(tmp_path / "a.yaml"), code=1)
    assert "no run description at" in run("--config", str(tmp_path / "bench.json"), code=1)
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    assert "is not valid TOML" in run("--config", str(tmp_path / "a.toml"), code=1)
