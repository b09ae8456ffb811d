"""Test the models that runs store: selection, location, size and failures."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import fczoo
from fczoo.cli.app import main
from fczoo.core.errors import FczooError
from fczoo.federation.model_record import read_model_record
from fczoo.federation.settings import Settings
from fczoo.models import storage
from fczoo.runner.cost import first_round
from fczoo.runner.dry_run import state_sizes
from helpers_cli import TINY, run


def bench(out: Path, *words: str, method: str = "fedncm") -> str:
    return run("bench", "--methods", method, *TINY, "--out", str(out), *words)


def model_files(out: Path) -> list[str]:
    names = ("model.json", "model.safetensors", "server_state.safetensors")
    return sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.name in names)


def test_run_stores_final_model(tmp_path):
    text = bench(tmp_path, method="fedridge")
    prefix = "fedridge/seed0/"
    names = ["model.json", "model.safetensors", "server_state.safetensors"]
    assert model_files(tmp_path) == [prefix + name for name in names]
    assert f"1 model, 0.2 MB; use one with: fczoo predict {tmp_path / prefix.rstrip('/')}" in (
        " ".join(text.split())
    )
    record = read_model_record(tmp_path / prefix)
    result = json.loads((tmp_path / prefix / "result.json").read_text())
    assert record.metrics == result["metrics"]
    assert record.options == result["options"] and record.backbone == result["backbone"]
    assert len(record.tasks) == 3 and record.classes == list("0123456789")
    assert fczoo.load_model(tmp_path).method.name == "fedridge"


def test_no_keep_model_stores_no_model(tmp_path):
    text = bench(tmp_path, "--no-keep-model")
    assert not model_files(tmp_path) and "model," not in text


def test_keep_model_tasks_stores_model_per_task(tmp_path):
    bench(tmp_path, "--keep-model", "tasks", "--no-keep-server-state", method="fedridge")
    places = ["fedridge/seed0", "fedridge/seed0/task1", "fedridge/seed0/task2"]
    assert {Path(name).parent.as_posix() for name in model_files(tmp_path)} == {*places}
    assert not list(tmp_path.rglob("server_state.safetensors"))
    classes = [len(fczoo.load_model(tmp_path / place).classes) for place in places]
    assert classes == [10, 4, 7]


def test_keep_model_is_read_from_config_file(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('methods = "fedncm"\nkeep_model = "none"\n')
    run("bench", "--config", str(config), *TINY, "--out", str(tmp_path / "run"))
    assert not model_files(tmp_path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--keep-model", "some"], "--keep-model is 'some'; it must be one of final, tasks, none"),
        (["--keep-model", "tasks", "--no-keep-model"], "are both given; leave one out"),
    ],
)
def test_invalid_keep_model_is_rejected(words, says, tmp_path):
    outcome = CliRunner().invoke(
        main, ["bench", "--methods", "fedncm", *TINY, *words, "--out", str(tmp_path / "run")]
    )
    assert outcome.exit_code == 1 and says in outcome.stderr
    assert outcome.stderr.count("\n") == 1 and not (tmp_path / "run").exists()


def test_python_api_stores_models_in_run_folder(tmp_path):
    settings = {"train_per_class": 8, "test_per_class": 4, "rounds": 1, "tasks": 2}
    fczoo.bench("fedncm", out=tmp_path / "a", **settings)
    assert fczoo.load_model(tmp_path / "a").classes
    fczoo.bench("fedncm", out=tmp_path / "b", keep_model="none", **settings)
    assert not model_files(tmp_path / "b")
    with pytest.raises(FczooError, match="keep_model is 'all'; it must be one of 'final'"):
        fczoo.bench("fedncm", keep_model="all", **settings)


def test_failed_model_save_is_warning(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "save_model", fail)
    bench(tmp_path)
    (line,) = (tmp_path / "fedncm/seed0/warnings.jsonl").read_text().splitlines()
    assert "the model of fedncm is not stored: OSError: [Errno 28] No space left" in line
    assert json.loads((tmp_path / "fedncm/seed0/result.json").read_text())["finished"]


def test_bug_in_model_save_keeps_result(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(storage, "save_model", fail)
    words = ("bench", "--methods", "fedncm", *TINY, "--out", str(tmp_path))
    assert CliRunner().invoke(main, words).exit_code == 1
    run_folder = tmp_path / "fedncm/seed0"
    assert json.loads((run_folder / "result.json").read_text())["finished"]
    assert "a fault" in json.loads((run_folder / "failed.json").read_text())["traceback"]


def test_resumed_run_keeps_model_settings(tmp_path):
    run_folder = tmp_path / "fedridge" / "seed0"
    bench(tmp_path, "--keep-model", "tasks", "--no-keep-server-state", method="fedridge")
    files = model_files(tmp_path)
    for words, expected in (((), files), (("--keep-model", "final"), [files[0], files[1]])):
        shutil.rmtree(run_folder)
        run("bench", "--resume", "--out", str(tmp_path), *words)
        assert model_files(tmp_path) == expected and "server" not in "".join(expected)
    shutil.rmtree(run_folder)
    run("bench", "--resume", "--out", str(tmp_path), "--keep-server-state")
    assert [*files[:2], "fedridge/seed0/server_state.safetensors"] == model_files(tmp_path)


def test_dry_run_estimates_state_size(tmp_path):
    text = run("bench", "--methods", "fedridge", "--dry-run")
    assert "MB kept" in text
    settings = Settings.for_dataset("digits")
    for name in ("fedridge", "fppl"):
        method = fczoo.create_method(name, "digits")
        config = fczoo.load_backbone("vit_nano_32").config
        first = first_round(method, settings)
        size = state_sizes(method, settings, 0, config)[-1]
        assert size >= sum(value.numel() * 4 for value in first.trained_tensors.values())


def test_dry_run_counts_statistics_per_class():
    """Include the count, mean and covariance that SLCA stores per class; a task has 5 classes."""
    config = fczoo.load_backbone("vit_nano_32").config
    method = fczoo.create_method("slca", "digits", tune="head")
    first, second = state_sizes(method, Settings.for_dataset("digits", tasks=2), 0, config)
    dim = config.feature_dim
    assert second - first == pytest.approx(5 * 4 * (dim * dim + dim + 1), rel=1e-3)


def test_local_method_stores_and_uploads_nothing():
    local = fczoo.create_method("local", "digits", tune="head")
    settings = Settings.for_dataset("digits", tasks=2)
    config = fczoo.load_backbone("vit_nano_32").config
    assert state_sizes(local, settings, 0, config) == [0, 0]
    cost = first_round(local, settings)
    assert (cost.upload_bytes, cost.broadcast) == (0, {}) and cost.trained_tensors.keys() == {
        "head.weight",
        "head.bias",
    }


def test_dry_run_estimates_stored_model_size(tmp_path):
    def megabytes(*words: str) -> float:
        lines = run("bench", "--methods", "fedridge", "--dry-run", *words).splitlines()
        head = next(line for line in lines if "MB kept" in line and line.startswith("method"))
        row = next(line for line in lines if line.startswith("fedridge  "))
        return float(row[head.index("MB kept") :].split()[0])

    final = megabytes()
    assert final > 0
    assert megabytes("--no-keep-model") == megabytes("--keep-model", "none") == 0
    assert final < megabytes("--keep-model", "tasks") <= 5 * final + 0.01
    for words, message in (
        (("--keep-model", "some"), "--keep-model is 'some'; it must be one of"),
        (("--keep-model", "tasks", "--no-keep-model"), "both given; leave one out"),
    ):
        result = CliRunner().invoke(main, ["bench", "--methods", "fedridge", "--dry-run", *words])
        assert result.exit_code == 1 and message in result.output
