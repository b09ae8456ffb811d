"""Test ``fczoo.wrap_vit`` and ``fczoo.PluggedViT`` on a ViT in memory."""

import copy

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import fczoo
from fczoo.functional.adapters import adapters
from fczoo.functional.lora import lora_pairs
from fczoo.functional.prompts import init_prefixes

SIZE, DIM, DEPTH = 32, 192, 2


@pytest.fixture
def model() -> nn.Module:
    """Create a small ViT of timm with random weights and a head of five classes."""
    torch.manual_seed(0)
    options = {"img_size": SIZE, "patch_size": 8, "depth": DEPTH, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **options).eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def timm_features(model: nn.Module, images: Tensor) -> Tensor:
    return model.forward_head(model.forward_features(images), pre_logits=True)


def fresh_pairs(backbone, rank=2):
    return lora_pairs(backbone, (0, 1), rank, torch.Generator().manual_seed(2), "blocks")


def test_wrapped_vit_features_match_model(model, images):
    backbone = fczoo.wrap_vit(model)
    assert backbone.config.name == "vit_tiny_patch16_224"
    with torch.no_grad():
        expected = timm_features(model, images)
        assert torch.allclose(backbone(images), expected, atol=1e-5)
        model.norm.weight.zero_()  # the backbone has a copy
        assert torch.allclose(backbone(images), expected, atol=1e-5)


def test_other_vit_families_are_wrapped(images):
    options = {"img_size": SIZE, "patch_size": 8, "depth": 1, "num_classes": 0}
    for name in ("eva02_tiny_patch14_224", "vit_small_patch14_dinov2"):
        model = timm.create_model(name, **options).eval()
        with torch.no_grad():
            expected = timm_features(model, images)
            assert torch.allclose(fczoo.wrap_vit(model)(images), expected, atol=1e-4), name


def test_new_lora_pairs_keep_features(model, images):
    vit = fczoo.PluggedViT(model, fresh_pairs(fczoo.wrap_vit(model)))
    with torch.no_grad():
        assert torch.allclose(vit(images), timm_features(model, images), atol=1e-5)


def test_lora_pair_adds_to_model_weights(model, images):
    """Add B A to the rows of the fused projection that give queries and values."""
    pairs = fresh_pairs(fczoo.wrap_vit(model))
    for name in pairs:
        if name.endswith(".b"):
            pairs[name] = torch.randn(pairs[name].shape, generator=torch.Generator().manual_seed(3))
    vit = fczoo.PluggedViT(model, pairs)
    with torch.no_grad():
        for block in range(DEPTH):
            for part, row in (("q", 0), ("v", 2 * DIM)):
                down, up = (pairs[f"lora.{block}.{part}.{side}"] for side in "ab")
                model.blocks[block].attn.qkv.weight[row : row + DIM] += up @ down
        assert torch.allclose(vit(images), timm_features(model, images), atol=1e-4)


def test_prompts_are_prepended_to_image_tokens(model, images):
    prompts = torch.randn(4, DIM, generator=torch.Generator().manual_seed(4))
    vit = fczoo.PluggedViT(model, {"tokens": prompts})
    with torch.no_grad():
        tokens = model._pos_embed(model.patch_embed(images))
        tokens = torch.cat([prompts.expand(len(images), -1, -1), tokens], 1)
        for block in model.blocks:
            tokens = block(tokens)
        outputs = model.norm(tokens)
        assert torch.allclose(vit(images), outputs[:, 4], atol=1e-5)
        assert torch.allclose(vit(images, pool="prompt"), outputs[:, :4].mean(1), atol=1e-5)


def test_only_plugs_train(model, images):
    backbone, rng = fczoo.wrap_vit(model), torch.Generator().manual_seed(5)
    plugs = {
        **fresh_pairs(backbone),
        **init_prefixes((0,), 3, DIM, "normal", rng),
        **adapters(backbone.config, 4, rng),
        "tokens": 0.02 * torch.randn(2, DIM, generator=rng),
    }
    vit, head = fczoo.PluggedViT(backbone, plugs), nn.Linear(DIM, 3)
    assert sum(p.numel() for p in vit.parameters()) == sum(v.numel() for v in plugs.values())
    assert len(vit.state_dict()) == len(plugs)
    labels, frozen = torch.arange(3), copy.deepcopy(backbone.weights)
    optimizer = torch.optim.Adam([*vit.parameters(), *head.parameters()], lr=0.01)
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(head(vit(images)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(vit.plugs()[name].grad.abs().sum() > 0 for name in plugs)
    assert all(torch.equal(value, frozen[name]) for name, value in vit.backbone.weights.items())
    assert all(torch.equal(value, frozen[name]) for name, value in backbone.weights.items())


def test_module_converts_copies_and_loads(model, images):
    pairs = fresh_pairs(fczoo.wrap_vit(model))
    vit = fczoo.PluggedViT(model, pairs)
    double = copy.deepcopy(vit).double()
    assert {w.dtype for w in double.backbone.weights.values()} == {torch.float64}
    assert {w.dtype for w in vit.backbone.weights.values()} == {torch.float32}
    with torch.no_grad():
        assert double(images.double()).dtype == torch.float64
        assert torch.allclose(double(images.double()).float(), vit(images), atol=1e-5)
    changed = {name: value + 1 for name, value in vit.plugs().items()}
    merged = fczoo.merge("uniform", [vit.plugs(), changed])
    vit.load_plugs(merged)
    for name, value in pairs.items():
        assert torch.allclose(vit.plugs()[name], value + 0.5)
    again = fczoo.PluggedViT(model, pairs)
    again.load_state_dict(vit.state_dict())
    assert all(torch.equal(again.plugs()[name], value) for name, value in vit.plugs().items())


def test_repr_counts_trained_numbers(model):
    vit = fczoo.PluggedViT(model, {"tokens": torch.zeros(5, DIM)})
    assert "vit_tiny_patch16_224, 1 plug with 960 parameters" in repr(vit)


def error_of(function, *arguments) -> str:
    with pytest.raises(fczoo.FczooError) as error:
        function(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_unsupported_models_are_rejected(model):
    message = error_of(fczoo.wrap_vit, timm.create_model("resnet18"))
    assert "resnet18 is not a plain ViT: it is a ResNet" in message
    other = torchvision.models.VisionTransformer(32, 8, 1, 2, 16, 32)
    assert error_of(fczoo.wrap_vit, other) == (
        "the model is a torchvision.models.vision_transformer.VisionTransformer; give a ViT of "
        "timm.create_model, or load a file of weights with load_backbone('NAME:FILE')"
    )
    with torch.no_grad():
        model.cls_token.fill_(torch.nan)
    assert error_of(fczoo.wrap_vit, model) == (
        "weight cls_token of vit_tiny_patch16_224 is not finite; load its weights again"
    )


@pytest.mark.parametrize(
    ("plugs", "message"),
    [
        ({}, "plugs is {}; give a dict, name of a plug -> tensor"),
        (None, "plugs is None; give a dict, name of a plug -> tensor"),
        ({"tokens": [1.0]}, "plug 'tokens' is not a tensor of floating-point numbers"),
        ({"lora.7.q.a": torch.zeros(2, DIM)}, "unknown plug 'lora.7.q.a' for vit_tiny"),
        (
            {"lora.0.q.b": torch.zeros(DIM, 2)},
            "plug 'lora.0.q.b' needs 'lora.0.q.a' as well; give both",
        ),
        (
            {"tokens": torch.zeros(2, 100)},
            "plug 'tokens' has width 100, but vit_tiny_patch16_224 needs 192",
        ),
        (
            {"lora.0.q.a": torch.zeros(2, 100), "lora.0.q.b": torch.zeros(DIM, 2)},
            "the plugs do not fit vit_tiny_patch16_224, which has width 192: ",
        ),
    ],
)
def test_invalid_plugs_are_rejected(model, plugs, message):
    assert error_of(fczoo.PluggedViT, model, plugs).startswith(message)


def test_invalid_images_are_rejected(model, images):
    vit = fczoo.PluggedViT(model, {"tokens": torch.zeros(2, DIM)})
    assert error_of(vit, images[0]) == "images have shape [3, 32, 32]; give [B, 3, 32, 32]"
    assert error_of(vit, torch.zeros(1, 3, 224, 224)).startswith(
        "images have shape [1, 3, 224, 224]"
    )
    message = "images are not a tensor of floating-point numbers; normalise them"
    assert error_of(vit, images.to(torch.uint8)) == message
    assert error_of(vit, None) == message
    assert vit(images.double()).shape == (3, DIM)


def test_invalid_plug_values_are_rejected(model):
    vit = fczoo.PluggedViT(model, {"tokens": torch.zeros(2, DIM)})
    assert error_of(vit.load_plugs, {}) == "load_plugs got no plug 'tokens'; give tokens"
    both = {"tokens": torch.zeros(2, DIM), "deep.0": torch.zeros(2, DIM)}
    message = "load_plugs got an unknown plug 'deep.0'; give tokens"
    assert error_of(vit.load_plugs, both) == message
    assert error_of(vit.load_plugs, {"tokens": torch.zeros(3, DIM)}) == (
        "plug 'tokens' has shape [3, 192]; give the module's shape [2, 192]"
    )
