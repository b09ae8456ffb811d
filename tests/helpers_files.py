"""A valid file of every kind that fczoo reads, its reader, and the number of mutations to try."""

import gzip
import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from fczoo.backbones.load import load_backbone
from fczoo.core.backbone import Backbone
from fczoo.core.files import read_json, read_lines
from fczoo.core.metrics import all_metrics
from fczoo.core.vit_config import ViTConfig
from fczoo.data.fetch import unpack
from fczoo.data.image_cache import _read_checksums
from fczoo.data.image_files import prepare
from fczoo.data.partition import Partition, load_partition
from fczoo.federation.checkpoint import Checkpoint, Snapshot
from fczoo.federation.result import Result, read_result
from fczoo.reports.table_formats import report
from fczoo.runner.resume_checks import check_same


def weights(dim: int = 192) -> dict[str, torch.Tensor]:
    """Draw weights of a ViT in fp16: one block, three heads, 2 x 2 patches of 8 pixels."""
    shapes = ViTConfig(
        "vit_tiny", image_size=16, patch_size=8, dim=dim, depth=1, heads=3, mlp_dim=32
    ).shapes()
    rng = torch.Generator().manual_seed(0)
    return {k: torch.randn(s, generator=rng).half() for k, s in shapes.items()}


def write_safetensors(path: Path) -> None:
    save_file(weights(), path)


def write_pth(path: Path) -> None:
    torch.save(weights(), path)


def write_checkpoint(path: Path) -> None:
    trees = {
        "state": {"a": torch.arange(6.0), "b": torch.tensor(3)},
        "memory.1": {"exemplar.index": torch.arange(4)},
    }
    Checkpoint(path).save(
        Snapshot(
            1,
            2,
            trees,
            {"result": {"seconds": 1.0}, "ledger": {"version": {"a": 1}, "known": [[0, {"a": 1}]]}},
        )
    )


def write_partition(path: Path) -> None:
    parts = tuple(tuple(np.arange(4) + 8 * t + 4 * k for k in range(2)) for t in range(2))
    Partition("digits", "iid", 0, (0, 1, 2, 3), parts).save(path)


def write_result(path: Path) -> None:
    empty = Result(
        "hgp",
        {"lr": 0.1},
        {"rounds": 1},
        0,
        {"name": "vit"},
        {"spec": "iid"},
        [0, 1],
        [1, 1],
        [5, 5],
    )
    content = {
        **vars(empty),
        "accuracy": [[90.0], [80.0, 70.0]],
        "rejected": [{"task": 0, "client": 1, "reason": "odd"}],
        "finished": True,
    }
    path.write_text(json.dumps({**content, "metrics": all_metrics(content["accuracy"], [5, 5])}))


def write_bench_file(path: Path) -> None:
    path.write_text(
        json.dumps(
            {
                "methods": {"hgp": {"lr": 0.1}},
                "seeds": [0],
                "settings": {"rounds": 2},
                "device": "cpu",
            }
        )
    )


def read_bench_file(path: Path) -> None:
    about = read_json(path, "run description")
    check_same(
        path.parent,
        about,
        {"methods": {"hgp": {"lr": 0.1}}, "seeds": [0], "settings": {"rounds": 2}, "device": "cpu"},
    )


def write_index(path: Path) -> None:
    stem = path.with_suffix("")
    details = {"sha256 of blocks": ["0" * 64], "made": "2026-01-01T00:00:00+0000"}
    path.write_text(json.dumps(ABOUT_CACHE | details))
    stem.with_suffix(".u8").write_bytes(bytes(2 * 4 * 4 * 3))


ABOUT_CACHE = {"format": "fczoo-images-1", "images": 2, "size": 4}


def write_image(path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 9, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/one.txt", "one" * 50)
        archive.writestr("data/two.txt", "two")


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name in ("data/one.txt", "data/two.txt"):
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(name[5:8].encode()))


def write_gz(path: Path) -> None:
    path.write_bytes(gzip.compress(b"labels" * 20))


def read_archive(path: Path) -> None:
    """Unpack into a folder; whatever happens, nothing may appear next to it."""
    folder = path.parent / "around" / "inside"
    try:
        unpack(path, folder)
    finally:
        names = [p.name for p in (path.parent / "around").iterdir()]
        links = [p for p in folder.rglob("*") if p.is_symlink()]
        shutil.rmtree(path.parent / "around")
        assert names == ["inside"] and not links


def write_npz(path: Path) -> None:
    """Write the layout of the original release.

    One block of width 24, three heads, 2 x 2 patches of 16 pixels.
    """
    rng, block = np.random.default_rng(0), "Transformer/encoderblock_0"
    attention = f"{block}/MultiHeadDotProductAttention_1"
    shapes = {
        "cls": (1, 1, 24),
        "embedding/kernel": (16, 16, 3, 24),
        "embedding/bias": (24,),
        "Transformer/posembed_input/pos_embedding": (1, 5, 24),
        **{f"Transformer/encoder_norm/{k}": (24,) for k in ("scale", "bias")},
        **{f"{block}/LayerNorm_{i}/{k}": (24,) for i in (0, 2) for k in ("scale", "bias")},
        **{f"{attention}/{p}/kernel": (24, 3, 8) for p in ("query", "key", "value")},
        **{f"{attention}/{p}/bias": (3, 8) for p in ("query", "key", "value")},
        f"{attention}/out/kernel": (3, 8, 24),
        f"{attention}/out/bias": (24,),
        f"{block}/MlpBlock_3/Dense_0/kernel": (24, 96),
        f"{block}/MlpBlock_3/Dense_0/bias": (96,),
        f"{block}/MlpBlock_3/Dense_1/kernel": (96, 24),
        f"{block}/MlpBlock_3/Dense_1/bias": (24,),
    }
    np.savez(path, **{k: rng.standard_normal(v).astype(np.float16) for k, v in shapes.items()})


def read_npz(path: Path) -> Backbone:
    """Load the file of ``write_npz`` as the timm model of that small size."""

    def small(name: str, pretrained: bool) -> torch.nn.Module:
        return timm.create_model(
            "vit_tiny_patch16_224", num_classes=0, img_size=32, embed_dim=24, depth=1, num_heads=3
        )

    with pytest.MonkeyPatch.context() as patch:
        for module in ("load", "timm_vit"):  # the true ones have 100 times as many weights
            patch.setattr(f"fczoo.backbones.{module}.timm_model", small)
        return load_backbone(f"vit_tiny_patch16_224:{path}")


READERS: dict[str, tuple[Callable | None, Callable, type, int]] = {
    "weights.safetensors": (write_safetensors, lambda p: load_backbone(str(p)), Backbone, 100),
    "weights.pth": (write_pth, lambda p: load_backbone(str(p)), Backbone, 100),
    "checkpoint.safetensors": (write_checkpoint, lambda p: Checkpoint(p).load(), Snapshot, 300),
    "partition.json": (write_partition, load_partition, Partition, 300),
    "result.json": (write_result, read_result, Result, 300),
    "description.json": (write_bench_file, read_bench_file, type(None), 300),
    "run/bench.json": (None, lambda p: report([p.parent], "text"), str, 100),
    "run/one/seed0/result.json": (None, lambda p: report([p.parents[2]], "text"), str, 100),
    "run/one/seed0/rounds.jsonl": (None, lambda p: read_lines(p, "list of rounds"), list, 100),
    "weights.npz": (write_npz, read_npz, Backbone, 50),
    "image.png": (write_image, lambda p: prepare(p, 8), np.ndarray, 200),
    "image.jpg": (write_image, lambda p: prepare(p, 8), np.ndarray, 200),
    "pixels.json": (
        write_index,
        lambda p: _read_checksums(p.with_suffix(""), ABOUT_CACHE),
        list | None,
        200,
    ),
    "data.zip": (write_zip, read_archive, type(None), 100),
    "data.tar": (write_tar, read_archive, type(None), 100),
    "data.tar.gz": (write_tar, read_archive, type(None), 100),
    "labels.gz": (write_gz, read_archive, type(None), 100),
}
