"""t-SNE of features in reports: images, labels and rejected requests."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fczoo.board import tsne
from fczoo.board.tsne import project
from fczoo.cli.app import main
from fczoo.core.errors import FczooError
from helpers_cli import TINY, run


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    run("bench", "--methods", "fedncm", *TINY, "--out", str(folder))
    return folder


def test_projection_keeps_groups_and_is_deterministic() -> None:
    """Project two groups of ten points whose distance is a hundred times their width."""
    noise = np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32)
    noise[10:] += 100
    positions = project(noise)
    assert positions.shape == (20, 2) and np.array_equal(positions, project(noise))
    centres = positions[:10].mean(0), positions[10:].mean(0)
    to_centre = np.linalg.norm(positions - np.repeat(centres, 10, 0), axis=1)
    other = np.linalg.norm(positions - np.repeat(centres[::-1], 10, 0), axis=1)
    assert (to_centre < other).all()
    with pytest.raises(FczooError, match="t-SNE has only 3 test images"):
        project(noise[:3])


def test_first_images_per_class_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tsne, "MAX_IMAGES", 6)
    labels = np.array([1, 0, 0, 1, 2, 0, 1, 3])  # the model does not know class 3
    assert tsne._first_images_per_class(labels, 3).tolist() == [1, 2, 0, 3, 4]


@pytest.mark.parametrize("colour", ["class", "task"])
def test_page_has_labelled_point_per_image(out: Path, colour: str) -> None:
    page = out / f"{colour}.html"
    run("report", str(out), "--html", str(page), "--tsne", colour)
    text = page.read_text()
    assert "<h2>Features</h2>" in text
    start = text.index('{"kind":"points","name":"t-SNE fedncm"')
    figure, _ = json.JSONDecoder().raw_decode(text[start:])
    record = json.loads((out / "fedncm" / "seed0" / "model.json").read_text())
    classes, tasks = record["classes"], record["tasks"]
    expected = classes if colour == "class" else [f"task {i + 1}" for i in range(len(tasks))]
    assert [one["label"] for one in figure["series"]] == expected
    count = sum(len(one["points"]) for one in figure["series"])
    assert count == sum(record["test_counts"])
    assert f"features of {count} test images under the final model of seed 0" in figure["caption"]
    assert figure["of_methods"] is False


def test_invalid_tsne_requests_are_rejected(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error_of(*words: str) -> str:
        outcome = CliRunner().invoke(main, ["report", str(out), *words])
        assert outcome.exit_code == 1 and not list(tmp_path.iterdir())
        return outcome.stderr

    page = str(tmp_path / "page.html")
    assert "--tsne needs --html FILE; add it" in error_of("--tsne", "class")
    monkeypatch.setattr(tsne, "MAX_LABELS", 9)
    assert "t-SNE by class has 10 labels" in error_of("--html", page, "--tsne", "class")
    monkeypatch.setattr(tsne, "RECORD", "none.json")
    assert "t-SNE needs the model of a run" in error_of("--html", page, "--tsne", "task")
