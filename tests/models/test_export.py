"""Exports of saved models: same logits as the model, or an error with the reason."""

import json

import pytest
import timm
import torch
from msgspec.structs import replace
from safetensors import safe_open

import fczoo
from fczoo.backbones.timm_vit import common_names, timm_names
from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.settings import Settings
from fczoo.models.classifier import Classifier
from fczoo.models.export import export_model
from fczoo.models.export_timm import timm_arguments
from helpers_export import assert_same_logits, export_images
from helpers_families import FAMILIES, timm_family

SMALL = {"train_per_class": 4, "test_per_class": 2, "rounds": 1, "epochs": 1, "tasks": 2}


@pytest.mark.parametrize("method", ["fedavg", "fedlora", "ffalora", "lorm", "bic", "fedridge"])
def test_timm_loads_merged_weights(method, models, tmp_path):
    model = models(method)
    path = tmp_path / "out.safetensors"
    code = export_model(model, "timm", path)
    network = eval(code, {"timm": timm})
    assert_same_logits(network.eval(), model)
    with safe_open(path, "pt") as file:
        export_metadata = file.metadata()
    assert json.loads(export_metadata["classes"]) == list("0123456789")
    assert export_metadata["method"] == method and json.loads(export_metadata["mean"]) == [
        0.5,
        0.5,
        0.5,
    ]


@pytest.mark.parametrize("settings", [{"pool": "mean"}, {"image_size": 48}, {"precision": "bf16"}])
def test_timm_uses_backbone_settings(settings, tmp_path):
    bench = Benchmark.open(Settings.for_dataset("digits", **SMALL, **settings))
    run = bench.start("fedridge")
    run.run()
    model = fczoo.load_model(fczoo.save_model(tmp_path, run))
    network = eval(export_model(model, "timm", tmp_path / "out.safetensors"), {"timm": timm})
    size = model.backbone.config.image_size
    images = torch.randn(2, 3, size, size)
    tolerance = 1e-4 if model.backbone.dtype == torch.float32 else 0.1
    torch.testing.assert_close(
        network.eval()(images), model(images), rtol=0, atol=tolerance, check_dtype=False
    )


def test_timm_rejects_cls_mean_pooling(tmp_path):
    bench = Benchmark.open(Settings.for_dataset("digits", **SMALL, pool="cls+mean"))
    run = bench.start("fedridge")
    run.run()
    model = fczoo.load_model(fczoo.save_model(tmp_path, run))
    with pytest.raises(
        FczooError, match=r"timm has no architecture like vit_nano_32 with pool cls\+mean"
    ):
        export_model(model, "timm", tmp_path / "out.safetensors")


def test_timm_never_predicts_class_without_images(models, tmp_path):
    trained = models("fedavg")
    record = replace(trained.record, has_images=[number != 3 for number in range(10)])
    model = Classifier(record, trained.method, trained.backbone, trained.state)
    network = eval(export_model(model, "timm", tmp_path / "out.safetensors"), {"timm": timm})
    assert_same_logits(network.eval(), model)
    assert network(export_images())[:, 3].isneginf().all()


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("hgp", "trained prefixes"),
        ("fppl", "trained prompts between"),
        ("l2p", "outputs of prompts"),
        ("dytox", "tokens of inner blocks"),
        ("fedncm", "distances to class means"),
        ("pilora", "distances to class means"),
        ("lucir", "not linear in the features"),
    ],
)
def test_timm_rejects_unsupported_methods(method, reason, models, tmp_path):
    path = tmp_path / "out.safetensors"
    with pytest.raises(FczooError, match=f"^{method} cannot be exported to timm: .*{reason}"):
        export_model(models(method), "timm", path)
    assert not path.exists()


def test_export_with_different_logits_is_not_written(models, tmp_path, monkeypatch):
    monkeypatch.setattr("fczoo.models.export_timm.LinearForm.lora_pairs", lambda form: {})
    path = tmp_path / "out.safetensors"
    with pytest.raises(FczooError, match="its logits would differ by up to"):
        export_model(models("ffalora"), "timm", path)
    assert not path.exists()


def test_invalid_output_paths_are_rejected(models, tmp_path):
    model, path = models("fedridge"), tmp_path / "out.safetensors"
    path.write_text("mine")
    with pytest.raises(FczooError, match=r"out.safetensors exists; remove it, or give another"):
        export_model(model, "timm", path)
    assert path.read_text() == "mine"
    with pytest.raises(FczooError, match=r"out.txt does not end with '.safetensors'"):
        export_model(model, "timm", tmp_path / "out.txt")
    with pytest.raises(FczooError, match="no folder"):
        export_model(model, "timm", tmp_path / "none" / "out.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_timm_names_round_trip_for_every_family(family):
    state = timm_family(family).state_dict()
    names = timm_names(common_names(state), state)
    assert names.keys() == state.keys()
    assert all(torch.equal(names[name], value) for name, value in state.items())


def test_eva_rejects_trained_key_bias():
    state = timm_family("eva02_tiny_patch14_224").state_dict()
    weights = common_names(state)
    weights["blocks.1.attn.qkv.bias"] = weights["blocks.1.attn.qkv.bias"] + 1
    with pytest.raises(FczooError, match=r"blocks.1 has a trained bias of the keys"):
        timm_names(weights, state)


@pytest.mark.parametrize(
    ("name", "size", "pool"),
    [
        ("vit_tiny_patch16_224", 64, "cls"),
        ("vit_tiny_patch16_224", 224, "mean"),
        ("vit_small_patch16_dinov3", 64, "cls"),
        ("eva02_tiny_patch14_224", 28, "cls"),
    ],
)
def test_timm_uses_input_size_and_pooling(name, size, pool):
    from fczoo.backbones.load import configuration

    config = configuration(name, size, pool)
    arguments = timm_arguments(config, 7)
    assert arguments is not None
    network = arguments.create()
    rng = torch.Generator().manual_seed(0)
    state = {k: 0.1 * torch.randn(v.shape, generator=rng) for k, v in network.state_dict().items()}
    network.load_state_dict(state)
    weights = {k: v for k, v in common_names(state).items() if not k.startswith("head.")}
    backbone, view = Backbone(config, weights), torch.randn(2, 3, size, size, generator=rng)
    expected = backbone(view) @ state["head.weight"].mT + state["head.bias"]
    torch.testing.assert_close(network(view), expected, rtol=1e-4, atol=1e-4)
