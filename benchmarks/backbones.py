"""Draw work per image over parameters of backbones, for docs/backbones.md; no weights are needed.

python benchmarks/backbones.py docs/static/backbones.png
"""

import sys

from matplotlib.figure import Figure

from fczoo.backbones.load import backbone_facts

FAMILIES = {
    "ViT": ("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224"),
    "DINOv2, patches of 14": ("vit_small_patch14_dinov2", "vit_base_patch14_dinov2"),
    "DINOv3": ("vit_small_patch16_dinov3", "vit_base_patch16_dinov3"),
    "CLIP, patches of 32 and 16": ("vit_base_patch32_clip_224", "vit_base_patch16_clip_224"),
    "SigLIP": ("vit_base_patch16_siglip_224",),
    "EVA-02, patches of 14": (
        *("eva02_tiny_patch14_224", "eva02_small_patch14_224"),
        "eva02_base_patch14_448",
    ),
}
MARKERS = "osD^v*"


def main() -> None:
    """Draw all backbones at 224 pixels."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for marker, (family, names) in zip(MARKERS, FAMILIES.items(), strict=True):
        facts = [backbone_facts(name, 224) for name in names]
        parameters = [fact.parameters / 1e6 for fact in facts]
        axes.plot(parameters, [fact.flops / 1e9 for fact in facts], marker=marker, label=family)
    bundled = backbone_facts("vit_nano_32")
    axes.plot(bundled.parameters / 1e6, bundled.flops / 1e9, "k+", label="vit_nano_32, 32 pixels")
    axes.set(xscale="log", yscale="log", xlabel="million parameters", ylabel="GFLOPs per image")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(sys.argv[1], dpi=120)


if __name__ == "__main__":
    main()
