"""LoRA pairs in peft's layout give the logits of the model."""

import json
import re
from pathlib import Path

import pytest
import timm
from safetensors.torch import load_file
from torch import nn

import fczoo
from fczoo.core.errors import FczooError
from fczoo.models.export import export_model
from helpers_export import assert_same_logits

LORA = ["ffalora", "dolfin"]


def base_model(code: str) -> nn.Module:
    """Run the part of the printed code that creates timm's model with the frozen weights."""
    names = {"timm": timm, "fczoo": fczoo}
    exec("\n".join(code.splitlines()[:-1]), names)
    return names["base"]


@pytest.mark.parametrize("method", LORA)
def test_files_match_peft_layout(method, models, tmp_path):
    model, folder = models(method), tmp_path / "adapter"
    network = base_model(export_model(model, "peft", folder))
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    state = network.state_dict()
    for layer in config["target_modules"]:
        down, up = (tensors.pop(f"base_model.model.{layer}.lora_{x}.weight") for x in "AB")
        assert down.shape[0] == up.shape[1] == config["r"]
        state[f"{layer}.weight"] += scale * up @ down
    for name in config["modules_to_save"]:
        for part in ("weight", "bias"):
            state[f"{name}.{part}"] = tensors.pop(f"base_model.model.{name}.{part}")
    assert not tensors and config["peft_type"] == "LORA"
    network.load_state_dict(state)
    assert_same_logits(network.eval(), model)


@pytest.mark.parametrize("method", LORA)
def test_peft_loads_adapter(method, models, tmp_path):
    peft = pytest.importorskip("peft")
    model = models(method)
    code = export_model(model, "peft", tmp_path / "adapter")
    names = {"timm": timm, "fczoo": fczoo, "peft": peft}
    exec(code, names)
    assert_same_logits(names["model"].eval(), model)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("fedavg", "it trains weights of the backbone itself"),
        ("lorm", "it trains weights of the backbone itself"),
        ("fedridge", "it has no LoRA pairs"),
        ("pilora", "distances to class means"),
        ("hgp", "trained prefixes"),
    ],
)
def test_methods_without_adapter_are_rejected(method, reason, models, tmp_path):
    folder = tmp_path / "adapter"
    with pytest.raises(FczooError, match=f"^{method} cannot be exported to peft: .*{reason}"):
        export_model(models(method), "peft", folder)
    assert not folder.exists()


def test_existing_folder_is_not_overwritten(models, tmp_path):
    with pytest.raises(FczooError, match=r"exists; remove it, or give another --out"):
        export_model(models("ffalora"), "peft", tmp_path)
    assert not list(Path(tmp_path).iterdir())


def test_hub_weights_are_loaded_by_name(models, monkeypatch):
    from fczoo.models import export_peft
    from fczoo.models.export_timm import TimmArguments

    arguments = TimmArguments("vit_tiny_patch16_224", {"num_classes": 3})
    monkeypatch.setattr(export_peft, "_is_hub", lambda model: True)
    code = export_peft._base(models("ffalora"), arguments)
    assert re.search(r"^base = timm.create_model\(.*num_classes=3, pretrained=True\)$", code)
