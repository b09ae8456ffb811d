"""Output of ``fczoo show backbone NAME``."""

from fczoo.backbones.load import backbone_facts
from fczoo.backbones.names import BUNDLED_NAME, canonical_backbone, full_name
from fczoo.backbones.weights import (
    describe_pretraining,
    identify_weights,
    split_spec,
    weights_needed,
)
from fczoo.core.vit_config import ViTConfig
from fczoo.reports.text_format import plain_table

POOLS = {
    "cls": "the class token",
    "mean": "the mean of the patches",
    "attention": "attention pooling of the patches",
    "cls+mean": "class token, then mean of the patches",
}


def backbone_page(spec: str) -> str:
    """Describe a backbone: size, input, work per image, licence and pre-training.

    Args:
        spec: Name, file, or both.

    Returns:
        The text to print.

    Raises:
        FczooError: The backbone does not exist or is not supported.
    """
    spec = canonical_backbone(spec)
    facts = backbone_facts(spec)
    config, giga = facts.config, facts.flops / 1e9
    weights = identify_weights(spec) or full_name(spec)
    rows = [
        ("backbone", spec),
        ("weights", _place(spec)),
        ("blocks", f"{config.depth} of width {config.dim}, {config.heads} heads{_parts(config)}"),
        ("parameters", f"{facts.parameters / 1e6:.1f} million, without a head"),
        ("tokens", _tokens(config)),
        ("feature", f"{config.feature_dim} numbers: {POOLS[config.pool]}"),
        (
            "work",
            f"{_billions(giga)} GFLOPs per image ({_billions(giga / 2)} billion multiply-adds)",
        ),
        ("input", f"{config.image_size} x {config.image_size} pixels; {_statistics(config)}"),
        ("licence", facts.licence or "not known"),
        ("pre-training", describe_pretraining(weights)),
    ]
    if facts.dropped:
        rows.append(("dropped", f"the checkpoint's {facts.dropped}"))
    if facts.note and config.activation != "quick_gelu":  # timm's note asks for what it has
        rows.append(("note", facts.note))
    rows.append(("use it", f"fczoo bench --backbone {spec}"))
    if split_spec(spec)[1] is None:
        rows.append(("own weights", f"fczoo bench --backbone {spec}:FILE.safetensors"))
    return plain_table([*rows, ("all names", "fczoo list backbones")])


def _billions(number: float) -> str:
    return f"{number:.{1 if number >= 1 else 3}f}"


def _place(spec: str) -> str:
    if spec == BUNDLED_NAME:
        return "the small backbone that comes with fczoo: no download"
    return weights_needed(spec, "a run") or "on this machine"


def _parts(config: ViTConfig) -> str:
    """List the parts of the network that the first ViT lacks."""
    activations = {"gelu": "", "gelu_tanh": "GELU by tanh", "quick_gelu": "QuickGELU"}
    parts = (
        "SwiGLU" if config.swiglu else activations[config.activation],
        "LayerScale" if config.layer_scale else "",
        "rotary positions" if config.rope else "",
        "norm before the blocks" if config.pre_norm else "",
        "" if config.qkv_bias else "no bias of queries, keys and values",
    )
    return "".join(f", {part}" for part in parts if part)


def _tokens(config: ViTConfig) -> str:
    parts = [f"{config.grid} x {config.grid} patches of {config.patch_size} pixels"]
    parts += ["1 class token"] * config.class_token
    if config.register_tokens:
        parts.append(f"{config.register_tokens} registers")
    return f"{config.tokens}: {', '.join(parts)}"


def _statistics(config: ViTConfig) -> str:
    mean, std = (", ".join(f"{x:g}" for x in values) for values in (config.mean, config.std))
    return f"mean {mean}; std {std}"
