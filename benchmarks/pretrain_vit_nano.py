"""Train the bundled backbone, vit_nano_32, on Tiny-ImageNet's labels and a larger ViT's features.

    python benchmarks/pretrain_vit_nano.py TINY_IMAGENET_FOLDER VIT_TI.safetensors OUT.safetensors

VIT_TI is timm's vit_tiny_patch16_224.augreg_in21k_ft_in1k, or another plain ViT with input mean and
std 0.5. OUT can be used as ``fczoo.load_backbone("vit_nano_32:OUT.safetensors")``. Inputs are
scaled to [0, 1] and normalised with mean 0.5 and std 0.5. The shipped weights took 14 epochs over
all 100,000 training images; another run gives similar weights, but not the same bits. Images and
teacher derive from ImageNet, whose terms allow non-commercial research and education: for research
use.
"""

import math
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from tqdm import tqdm

from fczoo import load_backbone
from fczoo.backbones.timm_vit import BUNDLED_CONFIG

BATCH, PEAK_LR, TEACHER_PIXELS = 256, 1.5e-3, 128


def tiny_imagenet(root: Path, per_class: int | None) -> tuple[Tensor, Tensor]:
    """Read training images, uint8 [N, 3, 64, 64], and their labels.

    ``per_class`` limits them to the first ones of every class.
    """
    names = (root / "wnids.txt").read_text().split()
    files = []
    for label, name in enumerate(names):
        paths = sorted((root / "train" / name / "images").glob("*.JPEG"))
        files += [(file, label) for file in paths[:per_class]]
    if not files:
        raise click.ClickException(
            f"no images below {root / 'train'}; give the folder that holds wnids.txt and train/"
        )
    images = np.stack(
        [np.asarray(Image.open(f).convert("RGB")) for f, _ in tqdm(files, "read", leave=False)]
    )
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.tensor(
        [i for _, i in files]
    )


@torch.inference_mode()
def teacher_features(images: Tensor, weights: Path) -> Tensor:
    """Compute standardised features of the teacher at 128 px."""
    teacher = load_backbone(str(weights), image_size=TEACHER_PIXELS).to(dtype=torch.bfloat16)
    out = []
    for block in tqdm(images.split(64), "teacher", leave=False):
        x = F.interpolate(block.float() / 255, size=TEACHER_PIXELS, mode="bicubic").clamp(0, 1)
        out.append(teacher((x - 0.5) / 0.5))
    features = torch.cat(out)
    return (features - features.mean(0)) / features.std(0)


def augment(x: Tensor, rng: torch.Generator) -> Tensor:
    """Crop at random, resize to 32 px, flip, and change brightness and contrast of a batch."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(len(x), *shape, generator=rng)

    side, ratio = uniform(0.28, 1).sqrt(), torch.exp(uniform(-1, 1) * math.log(4 / 3) / 2)
    width, height = (side * ratio).clamp(max=1), (side / ratio).clamp(max=1)
    theta = torch.zeros(len(x), 2, 3)
    theta[:, 0, 2], theta[:, 1, 2] = uniform(-1, 1) * (1 - width), uniform(-1, 1) * (1 - height)
    theta[:, 0, 0], theta[:, 1, 1] = torch.where(uniform(0, 1) < 0.5, width, -width), height
    grid = F.affine_grid(
        theta,
        [len(x), 3, BUNDLED_CONFIG.image_size, BUNDLED_CONFIG.image_size],
        align_corners=False,
    )
    x = F.grid_sample(
        x.float() / 255, grid, mode="bilinear", align_corners=False, padding_mode="reflection"
    )
    x = (x * uniform(0.6, 1.4, 1, 1, 1)).clamp(0, 1)
    mean = x.mean((1, 2, 3), keepdim=True)
    x = ((x - mean) * uniform(0.6, 1.4, 1, 1, 1) + mean).clamp(0, 1)
    return (x - 0.5) / 0.5


@click.command(context_settings={"show_default": True})
@click.argument(
    "folder",
    metavar="TINY_IMAGENET_FOLDER",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@click.argument(
    "teacher", metavar="VIT_TI", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.argument("out", metavar="OUT", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--epochs", default=14, type=click.IntRange(1))
@click.option(
    "--per-class", type=click.IntRange(1), help="First training images of each class; none: all."
)
@click.option("--seed", default=0)
def main(
    folder: Path, teacher: Path, out: Path, epochs: int, per_class: int | None, seed: int
) -> None:
    """Train vit_nano_32 and write its weights, float16, after every epoch."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed)
    images, labels = tiny_imagenet(folder, per_class)
    target = teacher_features(images, teacher)
    size: dict[str, Any] = {
        "img_size": BUNDLED_CONFIG.image_size,
        "patch_size": BUNDLED_CONFIG.patch_size,
        "embed_dim": BUNDLED_CONFIG.dim,
        "depth": BUNDLED_CONFIG.depth,
    }
    net = VisionTransformer(
        **size,
        num_heads=BUNDLED_CONFIG.heads,
        num_classes=0,
        global_pool="token",
        patch_drop_rate=0.5,
    )
    head, project = (
        nn.Linear(BUNDLED_CONFIG.dim, int(labels.max()) + 1),
        nn.Linear(BUNDLED_CONFIG.dim, target.shape[1]),
    )
    params = [p for module in (net, head, project) for p in module.parameters()]
    matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98))
    steps = max(1, len(images) // BATCH)  # per epoch; the remainder waits for the next shuffle
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LR, total_steps=max(2, epochs * steps), pct_start=0.05
    )
    for epoch in range(epochs):
        if epoch >= epochs - 2:
            # all other epochs drop half of the patches
            net.patch_drop = nn.Identity()  # type: ignore[assignment]
        losses = []
        for rows in tqdm(
            torch.randperm(len(images), generator=rng).split(BATCH)[:steps],
            f"epoch {epoch + 1}",
            leave=False,
        ):
            feature = net(augment(images[rows], rng))
            loss = F.cross_entropy(head(feature), labels[rows], label_smoothing=0.1)
            loss = (
                loss + 2 * (1 - F.cosine_similarity(project(feature), target[rows], dim=1)).mean()
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        save_file(
            {name: v.detach().half().contiguous() for name, v in net.state_dict().items()}, out
        )
        print(f"epoch {epoch + 1} of {epochs}: loss {torch.stack(losses).mean():.3f}", flush=True)
    load_backbone(f"{BUNDLED_CONFIG.name}:{out}")  # fails here rather than in use


if __name__ == "__main__":
    main()
