"""Both sides of the benchmark of a training step: a method in fczoo, and a plain reference."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision import transforms as T

from fczoo import Batch, Context, Task, Tree, create_method
from fczoo.backbones.timm_vit import BUNDLED_CONFIG
from fczoo.core.backbone import Backbone
from fczoo.core.tree import drop, select
from fczoo.core.vit_config import ViTConfig
from fczoo.data.dataset import Defaults, Images
from fczoo.data.views import Augment, ImageStore, get_augment
from fczoo.federation.batches import Client
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.device import DTYPES, Plan
from fczoo.federation.server import broadcast

OTHERS = (
    ViTConfig("vit_tiny_patch16_224", 224, 16, 192, 12, 3, 768),
    ViTConfig("vit_base_patch16_224", 224, 16, 768, 12, 12, 3072),
)
CONFIGS = {config.name: config for config in (BUNDLED_CONFIG, *OTHERS)}
AUGMENT = {"hgp": "hgp", "pilora": "pilora", "fppl": "fppl", "fcilpt": "none"}  # of papers or code
TASK = Task(index=0, start=0, stop=10, classes=20, count=2)
EPOCHS = Defaults.epochs  # of a round, as bench has them by default
PIXELS = 32  # width of the images before they are resized

Side = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """Settings that all sides of a comparison share."""

    method: str
    backbone: str
    augment: str
    device: str
    batch_size: int
    steps: int  # per client and round
    clients: int
    threads: int
    repeats: int
    clock: str

    @property
    def each(self) -> int:
        """Return the number of images of a client."""
        return max(1, self.batch_size * self.steps // EPOCHS)

    def images(self) -> Images:
        """Create random images of all clients."""
        rng, count = np.random.default_rng(0), self.clients * self.each
        return Images(
            rng.integers(0, 256, (count, PIXELS, PIXELS, 3), np.uint8),
            rng.integers(TASK.start, TASK.stop, count),
        )

    def start(self) -> tuple[Any, Any, Tree]:
        """Create the method, a timm model with random weights, and the state of the first round."""
        torch.set_num_threads(self.threads)
        torch.manual_seed(0)
        config, method = CONFIGS[self.backbone], create_method(self.method)
        size: dict[str, Any] = {
            "img_size": config.image_size,
            "patch_size": config.patch_size,
            "embed_dim": config.dim,
            "depth": config.depth,
        }
        vit = VisionTransformer(
            **size, num_heads=config.heads, num_classes=0, global_pool="token"
        ).to(self.device)
        state = method.begin_task(
            {}, TASK, Backbone(config, vit.state_dict()), torch.Generator().manual_seed(0)
        )
        return method, vit, {k: v.to(self.device) for k, v in state.items()}

    def read_clock(self) -> float:
        """Return the time in seconds, after all work on the GPU."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.process_time() if self.clock == "cpu" else time.perf_counter()


@dataclass(frozen=True)
class Variant:
    """Variant of fczoo's execution of a case."""

    precision: str
    together: int
    cache_queries: bool = False


def fczoo_side(case: Case, variant: Variant) -> Side:
    """Return a round of all clients through the engine."""
    method, vit, state = case.start()
    backbone = Backbone(CONFIGS[case.backbone], vit.state_dict()).to(
        case.device, DTYPES[variant.precision]
    )
    augment = get_augment(case.augment)
    pass_size = 256 if case.device == "cuda" else 64  # as in fczoo's own rounds
    plan = Plan(
        EPOCHS, case.batch_size, augment, 0, variant.together, variant.cache_queries, pass_size
    )
    shares = torch.arange(case.clients * case.each).split(case.each)
    clients = [Client(k, index) for k, index in enumerate(shares)]
    ctx = Context(TASK, 0, 1, drop(broadcast(method, state), *method.training().optims))
    engine = ClientEngine(method, backbone, ImageStore(case.images(), backbone), plan)
    return partial(engine.train, state, clients, ctx)


def pil_view(augment: Augment, config: ViTConfig) -> T.Compose:
    """Return an augmentation as torchvision does it on one image."""
    size, bicubic = config.image_size, T.InterpolationMode.BICUBIC
    crop = (
        T.RandomResizedCrop(size, augment.scale, augment.ratio, bicubic)
        if augment.scale
        else T.Resize((size, size), bicubic)
    )
    flip = [T.RandomHorizontalFlip(augment.flip)] if augment.flip else []
    jitter = [T.ColorJitter(brightness=augment.brightness)] if augment.brightness else []
    return T.Compose([crop, *flip, *jitter, T.ToTensor(), T.Normalize(config.mean, config.std)])


def one_by_one(view: T.Compose, pixels: np.ndarray, device: str, rows: Tensor) -> Tensor:
    """Transform images one by one with PIL."""
    return torch.stack([view(Image.fromarray(image)) for image in pixels[rows.numpy()]]).to(device)


class Reference:
    """Round of all clients in the style of released code."""

    def __init__(self, case: Case):
        self.case, self.images = case, case.images()
        self.method, self.vit, self.state = case.start()  # no weight of the timm model is frozen
        self.trained: dict[str, nn.Parameter] = {}  # tensors that the method trains
        config = CONFIGS[case.backbone]
        self.train_view = pil_view(get_augment(case.augment), config)
        self.test_view = pil_view(Augment(), config)

    def __call__(self) -> None:
        clip, prefixes = self.method.training().clip_norm, self.method.training().optims
        for index in torch.arange(len(self.images.labels)).split(self.case.each):
            self.trained = {
                k: nn.Parameter(v.clone()) for k, v in select(self.state, *prefixes).items()
            }
            optimizer = torch.optim.Adam(self.trained.values(), next(iter(prefixes.values())).lr)
            for _ in range(EPOCHS):
                for x, y in self.batches(index[torch.randperm(len(index))], self.train_view):
                    self.vit.zero_grad()
                    optimizer.zero_grad()
                    loss = self.loss(x, y)
                    loss.backward()
                    if clip is not None:
                        nn.utils.clip_grad_norm_(self.trained.values(), clip)
                    optimizer.step()
                    loss.item()  # for the log
            if "after_training" in self.method.training().collect_at:
                with torch.no_grad():
                    torch.cat(
                        [
                            self.features(x, self.plugs(x)[0])
                            for x, _ in self.batches(index, self.test_view)
                        ]
                    )

    def batches(self, index: Tensor, view: T.Compose) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views and labels of the images, batch by batch."""
        for rows in index.split(self.case.batch_size):
            yield (
                one_by_one(view, self.images.pixels, self.case.device, rows),
                torch.from_numpy(self.images.labels)[rows].to(self.case.device),
            )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the loss of a batch."""
        plugs, extra = self.plugs(x)
        features = self.features(x, plugs)
        if self.method.name == "pilora":
            frozen = self.state["frozen.before"], self.state["frozen.after"]
            table = torch.cat([frozen[0], self.trained["prototype"], frozen[1]])
            distance = (features[:, None] - table).square().mean(-1).sqrt()
            return (
                F.cross_entropy(-distance, y) + 1e-3 * distance.gather(1, y[:, None]).mean() + extra
            )
        logits = F.linear(features, self.trained["head.weight"], self.trained["head.bias"])
        return F.cross_entropy(logits[:, : TASK.stop], y) + extra

    def plugs(self, x: Tensor) -> tuple[Mapping[str, Tensor], Tensor | float]:
        """Return the method's additions to the transformer for these images, and to the loss."""
        trained, method = self.trained, self.method
        if method.name in ("hgp", "pilora"):
            return trained, 0.01 * sum(
                v.abs().sum() for k, v in trained.items() if k.endswith(".a")
            )
        with torch.no_grad():
            query = F.normalize(self.features(x, {}), dim=-1)
        if method.name == "fppl":
            keys = F.normalize(trained["fusion.key"][:1], dim=-1)
            weights = (trained["fusion.scale"] * query @ keys.mT).softmax(-1)
            plugs = {}
            for i in method.blocks:
                plugs[f"deep.{i}"] = torch.einsum(
                    "bt,tld->bld", weights, trained[f"prompt.{i}"][None]
                )
            return plugs, 0.0
        match = (query @ F.normalize(trained["pool.key"], dim=-1).mT).topk(method.chosen)
        prompts = trained["pool.prompt"][match.indices].flatten(1, 2)
        common = trained["common"].expand(len(x), -1, -1)
        far = (1 - match.values).sum(-1).mean()
        return {"tokens": torch.cat([prompts, common], 1)}, far / method.strength

    def features(self, images: Tensor, plugs: Mapping[str, Tensor]) -> Tensor:
        """Run timm's layers in timm's order, with room for prompts."""
        vit, x = self.vit, self.vit.patch_embed(images)
        x = torch.cat([vit.cls_token.expand(len(x), -1, -1), x], 1) + vit.pos_embed
        if "tokens" in plugs:
            x = torch.cat([plugs["tokens"], x], 1)
        length = x.shape[1]
        for i, block in enumerate(vit.blocks):
            if f"deep.{i}" in plugs:
                x = torch.cat([x, plugs[f"deep.{i}"]], 1)
            x = x + self.attention(block.attn, block.norm1(x), i, plugs)
            x = (x + block.mlp(block.norm2(x)))[:, :length]
        x = vit.norm(x)
        return x[:, : plugs["tokens"].shape[1]].mean(1) if "tokens" in plugs else x[:, 0]

    def attention(self, attn: Any, x: Tensor, block: int, plugs: Mapping[str, Tensor]) -> Tensor:
        """Run the attention of a block with LoRA pairs and prefixes."""
        heads = []
        for part, rows in zip("qkv", attn.qkv(x).chunk(3, -1), strict=True):
            if f"lora.{block}.{part}.a" in plugs:
                rows = (
                    rows
                    + x @ plugs[f"lora.{block}.{part}.a"].mT @ plugs[f"lora.{block}.{part}.b"].mT
                )
            if f"prefix.{block}.{part}" in plugs:
                rows = torch.cat([plugs[f"prefix.{block}.{part}"].expand(len(x), -1, -1), rows], 1)
            heads.append(rows.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2))
        return attn.proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


def check_gradients(case: Case) -> None:
    """Check that both sides compute the same gradients on one batch in float32."""
    reference, config = Reference(case), CONFIGS[case.backbone]
    x = torch.randn(4, 3, config.image_size, config.image_size, device=case.device)
    y = torch.arange(4, device=case.device)
    optims = reference.method.training().optims
    initial = select(reference.state, *optims)
    trees = [{k: nn.Parameter(v.clone()) for k, v in initial.items()} for _ in range(2)]
    reference.trained, backbone = trees[0], Backbone(config, reference.vit.state_dict())
    batch = Batch(x, y, torch.ones_like(y, dtype=x.dtype), backbone(x))
    ctx = Context(TASK, 0, 1, drop(broadcast(reference.method, reference.state), *optims))
    reference.loss(x, y).backward()
    reference.method.loss(backbone, trees[1], batch, ctx)[0].backward()
    grads = [[{k: v.grad for k, v in tree.items() if v.grad is not None}] for tree in trees]
    if (gap := largest_difference(*grads)) > 1e-3:
        raise click.ClickException(f"{case.method}: gradients of the reference are off by {gap:g}")


def largest_difference(first: list[Tree], second: list[Tree]) -> float:
    """Return the largest difference in a tensor, relative to its largest entry."""
    pairs = [
        (a[k].double(), b[k].double())
        for a, b in zip(first, second, strict=True)
        for k in a
        if a[k].numel()
    ]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-12)) for a, b in pairs)
