"""Test that bad input of ``fczoo bench`` ends in one line and writes nothing."""

from types import SimpleNamespace
from typing import cast

import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.core.errors import OUT_OF_MEMORY
from fczoo.runner import executors
from fczoo.runner.configs import ExecutionConfig, RunSpec
from helpers_cli import TINY


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--methods", "hgpp"], "did you mean hgp"),
        (["--methods", "hgp", "--dataset", "digit"], "did you mean digits"),
        (["--methods", "hgp", "--partition", "dirichlet:zero"], "dirichlet.beta"),
        (["--methods", "hgp", "--partition", "quantity:9"], "needs more classes"),
        (["--methods", "hgp", "--partition", "file:nowhere.json"], "no partition file"),
        (
            ["--methods", "hgp", "--partition", "dirichlet:"],
            "partitioner 'dirichlet:' has no value after the colon; write dirichlet:0.5",
        ),
        (
            ["--methods", "hgp", "--attack", "scale:"],
            "attack 'scale:' has no value after the colon; write scale:10",
        ),
        (
            ["--methods", "hgp", "--partition", "file:."],
            ". is a folder, not a partition file; give a JSON file, such as partition.json",
        ),
        (["--methods", "hgp", "--set", "hgp.lrr=1"], "did you mean lr"),
        (["--methods", "hgp", "--set", "hgp.lr=fast"], "it must be a finite number"),
        (["--methods", "hgp", "--set", "hgp.lr=-1"], "at least 0"),
        (["--methods", "hgp", "--set", "lr=1"], "METHOD.FIELD=VALUE"),
        (
            ["--methods", "hgp", "--set", "fppl.lr=1"],
            "fppl is not a method of this run; known: hgp",
        ),
        (["--methods", "hgp", "--set", "hgp.blocks=0,9"], "block 9"),
        (["--methods", "hgp", "--clients", "5000"], "lower --clients"),
        (["--methods", "hgp", "--tasks", "11"], "10 classes"),
        (["--methods", "hgp", "--participation", "1.5"], "a share up to 1 or a whole number"),
        (["--methods", "hgp", "--participation", "4"], "more than the 3 clients"),
        (["--methods", "hgp", "--tasks", "3,3,3"], "adds up to 9 classes, but digits has 10"),
        (
            ["--methods", "hgp", "--class-order", "0,1,2"],
            "each of the labels 0 to 9 of digits once",
        ),
        (["--methods", "hgp", "--client-draw", "often"], "round | task"),
        (["--methods", "hgp", "--seeds", "0,zero"], "whole numbers"),
        (
            ["--methods", "hgp", "--together", "few"],
            "--together is 'few'; it must be auto | a whole number",
        ),
        (["--methods", "hgp", "--augment", "flipp"], "did you mean flip"),
        (["--methods", "hgp", "--backbone", "missing.safetensors"], "no weight file"),
        (["--methods", "hgp", "--backbone", "vit_tinny_patch16_224"], "did you mean"),
        (["--methods", "hgp", "--dataset", "cifar100", "--data-root", "."], "cifar-100-python"),
        (["--methods", "fcilpt", "--set", "fcilpt.chosen=11"], "more than the 10 prompts"),
        (["--methods", "hgp", "--aggregator", "mean"], "no aggregator"),
        (["--methods", "hgp", "--set", "hgp.blocks="], "hgp.blocks is empty"),
        (
            ["--methods", "hgp,,fedncm"],
            "--methods has an empty entry in 'hgp,,fedncm'; remove it and its comma",
        ),
        (["--methods", "hgp, ,fedncm,"], "--methods has an empty entry in 'hgp, ,fedncm,'"),
        (["--methods", ",hgp"], "--methods has an empty entry in ',hgp'"),
        (["--methods", "hgp", "--seeds", "0,,1"], "--seeds has an empty entry in '0,,1'"),
        (["--methods", "hgp", "--dataset", "digits,"], "--dataset has an empty entry in 'digits,'"),
        (
            ["--methods", "hgp", "--partition", "iid,,dirichlet:0.5"],
            "--partition has an empty entry in 'iid,,dirichlet:0.5'",
        ),
        (["--methods", "hgp", "--log", "wandb,"], "--log has an empty entry in 'wandb,'"),
        (["--methods", "hgp", "--tasks", "5,,5"], "--tasks is '5,,5'; it must be"),
        (["--methods", "hgp", "--vary", "training,,partition"], "--vary is 'training,,partition'"),
        (["--methods", ","], "--methods is empty; give one or more entries"),
        (
            ["--methods", "hgp", "--clients", "5", "--min-clients", "10"],
            "--min-clients 10 is more than the 5 clients at the start, so every run would stop; "
            "lower it",
        ),
        (
            ["--methods", "fedncm", "--clients", "5", "--min-clients", "6", "--dry-run"],
            "--min-clients 6 is more than the 5 clients",
        ),
        (
            [
                "--methods",
                "fedavg",
                "--clients",
                "5",
                "--participation",
                "0.4",
                "--min-clients",
                "3",
            ],
            "--min-clients is 3, but in task 1 of fedavg at most 2 clients can upload; lower it",
        ),
    ],
)
def test_bad_input_reports_one_error_line(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(
        main,
        [
            "bench",
            *([] if "--clients" in arguments or "--tasks" in arguments else TINY),
            *arguments,
        ],
    )
    assert outcome.exit_code == 1
    assert says in outcome.stderr
    assert outcome.stderr.startswith("Error: ")
    assert outcome.stderr.count("\n") == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("unable to mmap 9 bytes from file <w>: Cannot allocate memory (12)"),
        RuntimeError("could not create a primitive"),  # oneDNN
        ImportError("/lib/_lsprof.so: failed to map segment from shared object"),
    ],
)
def test_out_of_memory_reports_one_error_line(error, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr("fczoo.runner.sweep.run_sweep", fail)
    arguments = ["bench", "--methods", "fedncm", *TINY, "--out", str(tmp_path)]
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.stderr == f"Error: {OUT_OF_MEMORY}\n"
    assert outcome.exit_code == 1

    monkeypatch.setattr(executors, "open_benchmark", fail)  # in a worker
    run = cast(RunSpec, SimpleNamespace(folder_of_run=tmp_path))
    outcome_of_worker = executors.work(run, ExecutionConfig(), lambda: None)
    assert outcome_of_worker == executors.Outcome("failed", OUT_OF_MEMORY)
    assert not capsys.readouterr().err
