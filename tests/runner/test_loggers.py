"""Test loggers with stand-ins for their packages.

The real packages are tested if they are installed.
"""

import json
import logging
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from click.testing import CliRunner

from fczoo import FczooError
from fczoo.cli.app import main
from fczoo.core.metrics import METRICS, MORE_METRICS
from fczoo.core.registry import create_method
from fczoo.runner.trackers import LOGGERS, Logger, check_loggers
from helpers_cli import TINY

SMALL = [*TINY, "--rounds", "2", "--tasks", "2", "--clients", "2"]
EVALUATIONS = ("ECE", "client_mean", "client_std", "client_worst", "task_aware", "top5")
BENCH = ["bench", "--methods", "fedavg", "--set", "fedavg.tune=head", *SMALL]


class RecordingLogger(Logger):
    """Store every record and fail at step ``broken``."""

    extra = "math"  # a package that is always installed
    broken = -1
    records: list[tuple] = []

    def open(self, name, config):
        if self.broken == 0:
            raise ConnectionError("no server\nat all")
        self.records.append(
            (
                "open",
                self.folder.name,
                name,
                config["fedavg.tune"],
                config["rounds"],
                config["seed"],
            )
        )

    def log(self, values, step):
        if step == self.broken:
            raise ConnectionError("server gone")
        self.records.append((step, *sorted(values)))

    def close(self):
        self.records.append(("close",))


@pytest.fixture
def recording_logger(monkeypatch) -> type[RecordingLogger]:
    monkeypatch.setitem(LOGGERS, "math", RecordingLogger)
    monkeypatch.setattr(RecordingLogger, "records", [])
    return RecordingLogger


def test_logger_gets_rounds_and_tasks_and_is_closed(recording_logger, tmp_path):
    result = CliRunner().invoke(
        main, [*BENCH, "--seeds", "3", "--log", "math", "--out", str(tmp_path / "run")]
    )
    assert result.exit_code == 0, result.output
    round_, metrics = (
        ("bytes_down", "bytes_up", "loss", "seconds"),
        (*METRICS, *MORE_METRICS, *EVALUATIONS),
    )
    assert recording_logger.records == [
        ("open", "seed3", "fedavg seed 3", "head", 2, 3),
        *[(1, *round_), (2, *round_), (2, *sorted([*metrics, "task 1"]))],
        *[(3, *round_), (4, *round_), (4, *sorted([*metrics, "task 1", "task 2"])), ("close",)],
    ]


def test_logger_gets_accuracy_of_evaluated_rounds(recording_logger, tmp_path):
    record = {"loss": 1.0, "bytes_up": 1, "bytes_down": 1, "seconds": 1.0}
    with recording_logger(tmp_path, {"rounds": 2}) as tracker:
        tracker.start(create_method("fedavg"), 0, 2, 2, 0)
        tracker.round(record)
        tracker.round({**record, "accuracy": 50.0})
    assert [entry for entry in recording_logger.records if entry[0] in (1, 2)] == [
        (1, *sorted(record)),
        (2, *sorted([*record, "accuracy"])),
    ]


def test_logger_failure_warns_late_and_aborts_at_start(
    recording_logger, monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(recording_logger, "broken", 3)
    with caplog.at_level(logging.WARNING):
        result = CliRunner().invoke(main, [*BENCH, "--log", "math", "--out", str(tmp_path / "run")])
    assert result.exit_code == 0
    assert [p[0] for p in recording_logger.records] == ["open", 1, 2, 2]
    assert "stops after round 3: server gone" in caplog.text
    monkeypatch.setattr(recording_logger, "broken", 0)
    result = CliRunner().invoke(main, [*BENCH, "--log", "math", "--out", str(tmp_path / "other")])
    assert result.exit_code == 1
    assert result.stderr.endswith("Error: --log math cannot start: no server\n")


def test_failed_run_closes_logger(recording_logger, tmp_path):
    with pytest.raises(ZeroDivisionError), recording_logger(tmp_path, {"rounds": 1}) as logger:
        logger.running = True
        raise ZeroDivisionError
    assert recording_logger.records == [("close",)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_missing_logger_package_is_reported(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)
    result = CliRunner().invoke(main, [*BENCH, "--log", name, "--out", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert (
        result.stderr
        == f"Error: --log {name} needs the package {name}; pip install 'fczoo[{name}]'\n"
    )
    assert not (tmp_path / "run").exists()


def test_unknown_logger_is_rejected():
    with pytest.raises(
        FczooError, match="no tracker is called 'tensorbord'; did you mean tensorboard"
    ):
        check_loggers(["tensorbord"])


class Recorder:
    """Record the runs and stored file names that a stand-in package gets."""

    def __init__(self):
        self.runs: list[SimpleNamespace] = []

    def begin(self, **values) -> SimpleNamespace:
        self.runs.append(SimpleNamespace(files=defaultdict(list), texts={}, closed=False, **values))
        return self.runs[-1]

    def store(self, run: SimpleNamespace, kind: str, path: str) -> None:
        run.files[kind].append(Path(path).name)
        if path.endswith(".md"):
            run.texts[Path(path).name] = Path(path).read_text()


@pytest.fixture
def wandb(monkeypatch) -> Recorder:
    """Replace the package wandb with a stand-in."""
    recorder, module = Recorder(), ModuleType("wandb")

    class Artifact:
        def __init__(self, name, type):
            assert re.fullmatch(r"[\w.-]{1,128}", name)
            self.name, self.type, self.paths = name, type, []

        def add_file(self, local_path, name):
            self.paths.append(local_path)

    def init(**values):
        run = recorder.begin(**values)
        run.log = lambda values, step: None
        run.log_artifact = lambda artifact: [
            recorder.store(run, artifact.type, path) for path in artifact.paths
        ]
        run.finish = lambda: setattr(run, "closed", True)
        return run

    module.init, module.Artifact = init, Artifact
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("NAME", "RUN_GROUP", "JOB_TYPE", "TAGS", "PROJECT"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    return recorder


@pytest.fixture
def mlflow(monkeypatch) -> Recorder:
    """Replace the package mlflow with a stand-in that has experiment ``old`` with ID 7."""
    recorder, module = Recorder(), ModuleType("mlflow")
    recorder.experiments = {"old": "7"}

    class MlflowClient:
        def get_experiment_by_name(self, name):
            number = recorder.experiments.get(name)
            return SimpleNamespace(experiment_id=number) if number else None

        def get_experiment(self, number):
            if number not in recorder.experiments.values():
                raise KeyError(f"no experiment {number}")
            return SimpleNamespace(experiment_id=number)

        def create_experiment(self, name):
            return recorder.experiments.setdefault(name, "9")

        def create_run(self, experiment, run_name, tags):
            run = recorder.begin(experiment=experiment, name=run_name, tags=tags, params={})
            return SimpleNamespace(info=SimpleNamespace(run_id=recorder.runs.index(run)))

        def log_param(self, run, key, value):
            recorder.runs[run].params[key] = value

        def log_metric(self, *values, step):
            pass

        def log_artifact(self, run, path, kind):
            recorder.store(recorder.runs[run], kind, path)

        def set_terminated(self, run):
            recorder.runs[run].closed = True

    module.MlflowClient = MlflowClient
    monkeypatch.setitem(sys.modules, "mlflow", module)
    for name in ("EXPERIMENT_NAME", "EXPERIMENT_ID", "RUN_NAME"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    return recorder


def bench(folder: Path, *words: str) -> None:
    result = CliRunner().invoke(main, [*BENCH, *words, "--out", str(folder)])
    assert result.exit_code == 0, result.output


TABLES = ["tables.md", "tables.csv", "tables.json"]


def test_wandb_groups_seeds_and_stores_files(wandb, tmp_path):
    pytest.importorskip("matplotlib")
    bench(tmp_path / "runs", "--log", "wandb", "--seeds", "0,1")
    first, second, report = wandb.runs
    assert first.group == second.group and first.group.startswith("fedavg digits dirichlet:0.5 ")
    assert [first.job_type, second.job_type] == ["seed 0", "seed 1"]
    assert first.tags == ["fedavg", "digits", "dirichlet:0.5", "vit_nano_32"]
    assert first.files["model"] == ["model.safetensors", "model.json", "README.md"]
    assert first.files["results"] == ["result.json", "rounds.jsonl"]
    assert first.files["tables"] == TABLES
    assert {"accuracy.png", "accuracy.pdf"} <= {*first.files["figures"]}
    assert all(run.closed for run in wandb.runs)
    # a run's own table has one seed, the report has both
    assert "; seeds 0\n" in first.texts["tables.md"]
    assert (report.name, report.job_type, report.group) == ("report of runs", "report", "report")
    assert "; seeds 0, 1 of training only\n" in report.texts["tables.md"]
    assert report.files["tables"] == TABLES and "model" not in report.files


def test_server_state_is_not_sent_to_wandb(wandb, tmp_path):
    words = ["bench", "--methods", "hgp", *SMALL, "--log", "wandb", "--out", str(tmp_path / "runs")]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert (tmp_path / "runs/hgp/seed0/server_state.safetensors").is_file()
    assert wandb.runs[0].files["model"] == ["model.safetensors", "model.json", "README.md"]


def test_wandb_groups_by_options_and_reports_sweep(wandb, tmp_path):
    pytest.importorskip("matplotlib")
    sweep = ("--sweep", "fedavg.lr=0.01,0.1", "--no-keep-model")
    bench(tmp_path / "runs", "--log", "wandb", *sweep)
    first, second, report = wandb.runs
    assert first.group != second.group and "model" not in first.files
    assert report.files["tables"] == [*TABLES, "sweeps.md"]
    assert "with --set fedavg.lr=" in report.texts["sweeps.md"]
    assert "sweep-fedavg.lr.png" in report.files["figures"]
    wandb.runs.clear()
    bench(tmp_path / "runs", "--log", "wandb", *sweep)  # all are finished
    assert wandb.runs == []


def test_logger_environment_variables_take_precedence(wandb, mlflow, monkeypatch, tmp_path):
    for name in ("NAME", "RUN_GROUP", "JOB_TYPE", "TAGS"):
        monkeypatch.setenv(f"WANDB_{name}", "mine")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "study")
    monkeypatch.setenv("MLFLOW_RUN_NAME", "mine")
    bench(tmp_path / "runs", "--log", "wandb,mlflow")
    (run,) = wandb.runs  # None makes wandb read its environment variables
    assert [run.name, run.group, run.job_type, run.tags] == [None] * 4
    (run,) = mlflow.runs
    assert (run.name, run.experiment, mlflow.experiments["study"]) == ("mine", "9", "9")


def test_mlflow_gets_group_experiment_and_files(mlflow, monkeypatch, tmp_path):
    bench(tmp_path / "a", "--log", "mlflow")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "old")
    bench(tmp_path / "b", "--log", "mlflow")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "7")
    bench(tmp_path / "c", "--log", "mlflow")
    assert [run.experiment for run in mlflow.runs] == ["9", "7", "7"]
    assert mlflow.experiments == {"old": "7", "fczoo": "9"}
    first, second, _ = mlflow.runs
    assert first.name == "fedavg seed 0" and first.tags["job_type"] == "seed 0"
    assert first.tags["group"] == second.tags["group"]
    assert first.tags["tags"] == "fedavg, digits, dirichlet:0.5, vit_nano_32"
    assert first.files["model"] == ["model.safetensors", "model.json", "README.md"]
    assert first.files["tables"] == TABLES and first.closed
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "fczoo")
    result = CliRunner().invoke(main, [*BENCH, "--log", "mlflow", "--out", str(tmp_path / "d")])
    assert result.stderr.endswith(
        "Error: --log mlflow cannot start: MLFLOW_EXPERIMENT_ID is 7, but experiment fczoo has ID "
        "9; unset one of the two\n"
    )


def test_tensorboard_shows_tables_and_figures(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    written = []

    class SummaryWriter:
        def __init__(self, folder):
            written.append(Path(folder).parent.name)

        def add_text(self, tag, text, step=None):
            written.append((tag, text[:6] if tag == "tables" else ""))

        def add_image(self, tag, image, step, dataformats):
            assert image.ndim == 3
            assert image.shape[2] == 3
            assert dataformats == "HWC"
            written.append(tag)

        def add_scalar(self, *values):
            pass

        def close(self):
            written.append("closed")

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    bench(tmp_path / "runs", "--log", "tensorboard")
    assert written[:3] == ["seed0", ("config", ""), ("tables", "digits")]
    assert "accuracy" in written and written[-1] == "closed"


def test_failed_logger_files_are_warnings(wandb, monkeypatch, tmp_path, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    bench(tmp_path / "a", "--log", "wandb")
    assert "no figures are sent to trackers: matplotlib is not installed" in caplog.text
    assert {*wandb.runs[0].files} == {"tables", "results", "model"}

    def refuse(*_):
        raise ConnectionError("full")

    monkeypatch.setattr(wandb, "store", refuse)
    bench(tmp_path / "b", "--log", "wandb", "--seeds", "0,1")
    assert "--log wandb stops after round 4: full" in caplog.text
    monkeypatch.setattr("fczoo.runner.tracked_files.sections", refuse)
    bench(tmp_path / "c", "--log", "wandb", "--seeds", "0,1")
    assert "no files of fedavg seed 0 are sent to trackers: full" in caplog.text
    assert f"no report of {tmp_path / 'c'} is sent to trackers: full" in caplog.text
    for folder in ("b", "c"):
        result = json.loads((tmp_path / folder / "fedavg/seed1/result.json").read_text())
        assert result["finished"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_installed_package_stores_values(name, monkeypatch, tmp_path):
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = LOGGERS[name](tmp_path, {})
    logger.open("fedavg seed 0", {"rounds": 2, "blocks": (0, 1), "order": None})
    logger.log({"loss": 0.5, "A_N": 71.25}, 1)
    (tmp_path / "tables.md").write_text("a table")
    logger.store("tables", [tmp_path / "tables.md"])
    logger.close()
    written = [p for p in tmp_path.rglob("*") if p.is_file()]
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        assert [(e.step, e.value) for e in events.Scalars("A_N")] == [(1, 71.25)]
    elif name == "mlflow":
        (metric,) = [p for p in written if p.name == "A_N"]
        assert metric.read_text().split()[1:3] == ["71.25", "1"]
        assert any(p.parts[-3:] == ("artifacts", "tables", "tables.md") for p in written)
    else:
        assert any(p.suffix == ".wandb" and p.stat().st_size > 0 for p in written)
