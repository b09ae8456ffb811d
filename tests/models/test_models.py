"""Saved models: saving, loading, and rejected files."""

import json
import os
import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import fczoo
from fczoo.core.errors import FczooError
from fczoo.core.files import content_sha256
from fczoo.core.tree import nbytes
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.model_record import weights_note
from fczoo.federation.run import FederatedRun
from fczoo.federation.settings import Settings
from fczoo.models.classifier import EvaluationTransform, prediction_tensors
from fczoo.models.predict import evaluate, labelled_images, predict_files

SMALL = {"train_per_class": 8, "test_per_class": 4, "rounds": 1, "epochs": 1}


def finished_run(method: str, **settings: object) -> FederatedRun:
    bench = Benchmark.open(Settings.for_dataset("digits", **{**SMALL, "tasks": 2, **settings}))
    run = bench.start(method)
    run.run()
    return run


@pytest.fixture(scope="module")
def run() -> FederatedRun:
    return finished_run("hgp")


@pytest.fixture
def folder(run: FederatedRun, tmp_path: Path) -> Path:
    return fczoo.save_model(tmp_path / "model", run)


def test_model_accuracy_matches_last_evaluation(run, folder):
    model = fczoo.load_model(folder)
    store = run.scenario.test
    logits = torch.cat(
        [model(store.view(part)) for part in torch.arange(len(store.labels)).split(64)]
    )
    accuracy = 100 * float((logits.argmax(1) == store.labels).double().mean())
    assert accuracy == pytest.approx(run.result.metrics["A_N"], abs=1e-9)
    assert model.classes == tuple("0123456789")
    assert not model.training and not logits.requires_grad
    assert model.features(store.view(torch.arange(3))).shape == (3, run.backbone.dim)


@pytest.mark.parametrize("pool", ["mean", "cls+mean"])
def test_model_uses_pooling_of_run(pool, tmp_path):
    run = finished_run("fedncm", pool=pool)
    model = fczoo.load_model(fczoo.save_model(tmp_path, run))
    assert f"vit_nano_32, pool {pool}, SHA-256" in (tmp_path / "README.md").read_text("utf-8")
    images = run.scenario.test.view(torch.arange(3))
    assert model.backbone.config == run.backbone.config
    assert torch.equal(model.features(images), run.backbone(images))


@pytest.mark.parametrize("test_crop", [1.0, 0.875])
def test_transform_gives_evaluation_pixels(test_crop):
    run = finished_run("fedncm", test_crop=test_crop)
    store = run.scenario.test
    config = run.backbone.config
    transform = EvaluationTransform(32, config.image_size, store.test_crop, config.mean, config.std)
    images = [Image.fromarray(pixels) for pixels in run.stream.test.pixels[:5]]
    torch.testing.assert_close(
        torch.stack([transform(image) for image in images]),
        store.view(torch.arange(5)),
        rtol=0,
        atol=0,
    )


def test_model_resizes_images_as_run(tmp_path, monkeypatch):
    """Use images whose class is the colour of both ends; the centre is black in every class."""
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))
    for label, colour in enumerate([(255, 0, 0), (0, 0, 255)]):
        pixels = np.zeros((32, 96, 3), np.uint8)
        pixels[:, :32] = pixels[:, 64:] = colour
        for part, number in (("train", 0), ("train", 1), ("test", 2)):
            file = tmp_path / "data" / part / str(label) / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.where(pixels > 0, pixels - number, 0).astype(np.uint8)).save(file)
    data = {"data_root": str(tmp_path / "data"), "backbone": "vit_nano_32", "stored_size": 32}
    small = {"tasks": 1, "clients": 1, "partition": "iid", "train_per_class": None}
    scores = {}
    for resize in ("crop", "squash"):
        settings = Settings.for_dataset("imagefolder", **data, **small, resize=resize)
        run = Benchmark.open(settings).start("fedncm")
        run.run()
        folder = fczoo.save_model(tmp_path / resize, run)
        assert json.loads((folder / "model.json").read_text())["resize"] == resize
        model = fczoo.load_model(folder)
        files = [tmp_path / "data/test" / name for name in ("0/2.png", "1/2.png")]
        with Image.open(files[1]) as image:
            assert torch.equal(model.transform(image), run.scenario.test.view(torch.arange(2))[1])
        answers = [prediction.classes[0] for prediction in predict_files(model, files, 1)]
        pixels, labels = labelled_images(model, None, tmp_path / "data")
        scores[resize] = evaluate(model, pixels, labels).accuracy
        assert resize == "crop" or answers == ["0", "1"]
    assert scores == {"crop": 50, "squash": 100}


def test_transform_converts_other_sizes_and_modes(folder):
    model = fczoo.load_model(folder)
    grey = Image.new("L", (50, 40), 128)
    assert model.transform(grey).shape == (3, 32, 32)
    with pytest.raises(FczooError, match=r"give a PIL image: Image.open"):
        model.transform(torch.zeros(3, 32, 32))


@pytest.mark.parametrize("method", ["hgp", "slca", "ccvr", "fedridge", "pilora"])
def test_model_file_holds_prediction_tensors_only(method, tmp_path):
    run = finished_run(method)
    folder = fczoo.save_model(tmp_path, run)
    read = prediction_tensors(run.method, run.backbone, run.state, run.stream.tasks[-1])
    assert load_file(folder / "model.safetensors").keys() == read.keys()
    size = (folder / "model.safetensors").stat().st_size
    header = 8 + 120 * len(read)  # names, shapes and offsets of the tensors
    assert nbytes(read) <= size <= 1.1 * nbytes(read) + header
    rest = run.state.keys() - read.keys()
    if rest:
        path = folder / "server_state.safetensors"
        assert load_file(path).keys() == rest
        if os.name == "posix":
            assert path.stat().st_mode & 0o777 == 0o600
    assert bool(rest) == (method in ("hgp", "slca", "ccvr", "fedridge"))


def test_server_state_can_be_omitted(run, tmp_path):
    fczoo.save_model(tmp_path, run)
    fczoo.save_model(tmp_path, run, server_state=False)
    assert not (tmp_path / "server_state.safetensors").exists()
    assert fczoo.load_model(tmp_path).method == run.method


def test_model_after_early_task_has_seen_classes_only(tmp_path):
    bench = Benchmark.open(Settings.for_dataset("digits", **SMALL, tasks=5))
    run = bench.start("fedncm")
    next(iter(run))
    model = fczoo.load_model(fczoo.save_model(tmp_path, run))
    assert model.classes == ("0", "1")
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 2)


def test_class_without_images_is_never_predicted(run, folder):
    path = folder / "model.json"
    content = json.loads(path.read_text())
    content["has_images"] = [False] * 9 + [True]
    content["sha256"] = content_sha256(content)
    path.write_text(json.dumps(content))
    model = fczoo.load_model(folder)
    logits = model(run.scenario.test.view(torch.arange(6)))
    assert logits.argmax(1).tolist() == [9] * 6
    assert logits[:, :9].isinf().all()


def test_model_converts_dtype_and_rejects_training(folder):
    model = fczoo.load_model(folder)
    images = torch.zeros(1, 3, 32, 32)
    assert model.double()(images).dtype == torch.float64
    assert model.eval() is model
    with pytest.raises(FczooError, match="for inference only"):
        model.train()
    for wrong in (images[0], images.expand(1, 3, 32, 32)[..., :8], images.long()):
        with pytest.raises(FczooError, match="images"):
            model(wrong)


def test_state_dict_has_all_tensors(run, folder):
    tensors = load_file(folder / "model.safetensors")
    values = fczoo.load_model(folder).state_dict()
    assert len(values) == len(tensors) + len(run.backbone.weights)


def test_run_folder_with_one_model_is_loaded(run, tmp_path):
    with pytest.raises(FczooError, match="no model in"):
        fczoo.load_model(tmp_path)
    fczoo.save_model(tmp_path / "hgp" / "seed0", run)
    fczoo.save_model(tmp_path / "hgp" / "seed0" / "task1", run)
    assert fczoo.load_model(tmp_path).method == run.method
    fczoo.save_model(tmp_path / "hgp" / "seed1", run)
    with pytest.raises(FczooError, match=r"has 2 models: hgp.seed0, hgp.seed1; give one"):
        fczoo.load_model(tmp_path)
    with pytest.raises(FczooError, match="no folder"):
        fczoo.load_model(tmp_path / "elsewhere")


def change_description(folder: Path, **values: object) -> None:
    path = folder / "model.json"
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({**content, "sha256": content_sha256(content)}))


def load_error(folder: Path, **arguments: str) -> str:
    with pytest.raises(FczooError) as caught:
        fczoo.load_model(folder, **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_damaged_model_is_rejected(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    assert "does not match the SHA-256 in model.json" in load_error(folder)
    path.unlink()
    assert "cannot read" in load_error(folder)


def test_changed_or_broken_description_is_rejected(folder):
    path = folder / "model.json"
    text = path.read_text()
    path.write_text(text.replace('"seed": 0', '"seed": 1'))
    assert "does not match its sha256" in load_error(folder)
    path.write_text(text[:-20])
    assert "is not a valid model description" in load_error(folder)
    path.write_text(text)
    change_description(folder, has_images=[True])
    assert "the numbers of classes differ: 10 in classes, 1" in load_error(folder)


def test_newer_format_is_rejected(folder):
    change_description(folder, format="fczoo-model-9", versions={"fczoo": "9.0"})
    assert "install the fczoo that wrote it, version 9.0" in load_error(folder)


def test_different_backbone_is_rejected(run, folder):
    change_description(folder, backbone={**run.result.backbone, "sha256": "00"})
    assert "give the weights of the run with backbone NAME:FILE" in load_error(folder)


def test_missing_method_is_rejected(folder):
    change_description(folder, method="wonder")
    assert "'wonder', which is not installed" in load_error(folder)


def test_unknown_option_error_names_file(folder):
    change_description(folder, options={"nosuch": 1})
    assert re.search(r"model/model\.json: hgp has no option 'nosuch'", load_error(folder))


@pytest.mark.parametrize(("name", "file"), [("", "nano.safetensors"), ("vit_nano_32:", "nano")])
def test_backbone_file_is_located_by_hash(tmp_path, monkeypatch, name, file):
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))
    weights = tmp_path / "elsewhere" / file
    weights.parent.mkdir()
    weights.write_bytes((files("fczoo") / "assets" / "vit_nano_32.safetensors").read_bytes())
    run = finished_run("fedncm", backbone=f"{name}{weights}")
    folder = fczoo.save_model(tmp_path / "model", run)
    assert str(tmp_path) not in (folder / "model.json").read_text()
    assert fczoo.load_model(folder).classes
    weights_note(run.backbone.sha256).unlink()
    assert f"no weight file at {file}; give" in load_error(folder)
    assert fczoo.load_model(folder, backbone=f"{name}{weights}").classes
