"""Files as an enemy or a broken disk makes them:
every reader ends in its one-line error or in a valid object.

``FCZOO_FUZZ=10000 pytest tests/test_hostile_files.py`` tries that many of each kind instead of a few.
"""

import gzip
import io
import json
import os
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from fczoo import FczooError
from fczoo.backbones.load import load_backbone
from fczoo.core.backbone import Backbone, ViTConfig
from fczoo.core.files import read_json, read_lines
from fczoo.core.metrics import all_metrics
from fczoo.data.image_cache import _read_checksums
from fczoo.data.image_files import prepare
from fczoo.data.partition import Partition, load_partition
from fczoo.data.unpack import unpack
from fczoo.federation.checkpoint import Checkpoint, Snapshot
from fczoo.federation.result import Result, read_result
from fczoo.reports.text import report
from fczoo.runner.resume import check_same

TRIES = int(os.environ.get("FCZOO_FUZZ", "0"))


def tried(times: int) -> settings:
    return settings(
        max_examples=TRIES or times, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )


def weights(dim: int = 192) -> dict[str, torch.Tensor]:
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
        "hgp", {"lr": 0.1}, {"rounds": 1}, 0, {"name": "vit"}, {"spec": "iid"}, [0, 1], [1, 1], [5, 5]
    )
    content = {
        **vars(empty),
        "accuracy": [[90.0], [80.0, 70.0]],
        "rejected": [{"task": 0, "client": 1, "reason": "odd"}],
        "finished": True,
    }
    path.write_text(json.dumps({**content, "metrics": all_metrics(content["accuracy"], [5, 5])}))


def write_about(path: Path) -> None:
    path.write_text(
        json.dumps(
            {"methods": {"hgp": {"lr": 0.1}}, "seeds": [0], "settings": {"rounds": 2}, "device": "cpu"}
        )
    )


def read_about(path: Path) -> None:
    about = read_json(path, "run description")
    check_same(
        path.parent,
        about,
        {"methods": {"hgp": {"lr": 0.1}}, "seeds": [0], "settings": {"rounds": 2}, "device": "cpu"},
    )


def write_index(path: Path) -> None:
    stem = path.with_suffix("")
    more = {"sha256 of blocks": ["0" * 64], "made": "2026-01-01T00:00:00+0000"}
    path.write_text(json.dumps(ABOUT_CACHE | more))
    stem.with_suffix(".u8").write_bytes(bytes(2 * 4 * 4 * 3))


ABOUT_CACHE = {"format": "fczoo-images-1", "images": 2, "size": 4}


def write_image(path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 9, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("data/one.txt", "one" * 50)
        packed.writestr("data/two.txt", "two")


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as packed:
        for name in ("data/one.txt", "data/two.txt"):
            member = tarfile.TarInfo(name)
            member.size = 3
            packed.addfile(member, io.BytesIO(name[5:8].encode()))


def write_gz(path: Path) -> None:
    path.write_bytes(gzip.compress(b"labels" * 20))


def read_archive(path: Path) -> None:
    """Unpack into a folder of its own; whatever happens, nothing is beside it."""
    place = path.parent / "around" / "inside"
    try:
        unpack(path, place)
    finally:
        found = [p.name for p in (path.parent / "around").iterdir()]
        links = [p for p in place.rglob("*") if p.is_symlink()]
        shutil.rmtree(path.parent / "around")
        assert found == ["inside"] and not links


def write_npz(path: Path) -> None:
    """The layout of the original release: one block of width 24, three heads, 2 x 2 patches of 16 pixels."""
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
    def small(name: str, pretrained: bool) -> torch.nn.Module:
        return timm.create_model(
            "vit_tiny_patch16_224", num_classes=0, img_size=32, embed_dim=24, depth=1, num_heads=3
        )

    with pytest.MonkeyPatch.context() as patch:
        for place in ("load", "timm_vit"):  # the true ones have 100 times as many weights
            patch.setattr(f"fczoo.backbones.{place}.timm_model", small)
        return load_backbone(f"vit_tiny_patch16_224:{path}")


READERS: dict[str, tuple[Callable | None, Callable, type, int]] = {
    "weights.safetensors": (write_safetensors, lambda p: load_backbone(str(p)), Backbone, 100),
    "weights.pth": (write_pth, lambda p: load_backbone(str(p)), Backbone, 100),
    "checkpoint.safetensors": (write_checkpoint, lambda p: Checkpoint(p).load(), Snapshot, 300),
    "partition.json": (write_partition, load_partition, Partition, 300),
    "result.json": (write_result, read_result, Result, 300),
    "description.json": (write_about, read_about, type(None), 300),
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


@pytest.fixture(scope="module", params=READERS)
def reader(request, tmp_path_factory, make_run):
    """A place, the bytes of a sound file, its reader, what it gives, and how often to try."""
    write, read, kind, times = READERS[request.param]
    path = tmp_path_factory.mktemp("files") / request.param
    if write:
        write(path)
    else:
        make_run(path.parents[len(Path(request.param).parts) - 2], {"one": {0: 70.0}})
    assert isinstance(read(path), kind)
    return path, path.read_bytes(), read, kind, times


@st.composite
def mutated(draw, content: bytes) -> bytes:
    """The content after a few cuts, flips, insertions and repetitions,
    more of them near the begin, where headers are.
    """
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        near = draw(st.booleans())
        at = draw(st.integers(0, min(len(data), 4096) if near else len(data)))
        kind = draw(st.sampled_from(["cut", "flip", "insert", "delete", "huge", "repeat"]))
        if kind == "cut":
            del data[at:]
        elif kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=16))
        elif kind == "delete":
            del data[at : at + draw(st.integers(1, 64))]
        elif kind == "huge":
            data[at : at + 8] = draw(
                st.sampled_from([b"\xff" * 8, b"99999999", b"-1e99999", b"\0" * 8, b"[[[[[[[["])
            )
        elif kind == "repeat":
            data[at:at] = data[at : at + 64]
    return bytes(data)


VALUES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
ANYTHING = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def rearranged(draw, content: bytes) -> bytes:
    """JSON, or lines of it, in which one value, anywhere, is another one or is gone."""
    lines = (
        [json.loads(line) for line in content.splitlines()]
        if content.count(b"}\n{")
        else [json.loads(content)]
    )
    place = draw(st.sampled_from(lines))
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and draw(st.booleans()):
            place = place[key]
            continue
        if draw(st.booleans()):
            place[key] = draw(ANYTHING)
        else:
            del place[key]
        break
    return "\n".join(map(json.dumps, lines)).encode()


def attempt_all(reader, strategy: st.SearchStrategy[bytes], times: int) -> None:
    """Each content ends in a valid object or in an error of one line."""
    path, _, read, kind, _ = reader

    @tried(times)
    @given(strategy)
    def attempt(data: bytes) -> None:
        path.write_bytes(data)
        try:
            assert isinstance(read(path), kind)
        except FczooError as error:
            assert "\n" not in str(error)

    attempt()


def test_mutated_files_end_in_the_error_or_a_valid_object(reader):
    path, content, _, _, times = reader
    attempt_all(
        reader,
        mutated(content) | rearranged(content) if path.suffix.startswith(".json") else mutated(content),
        times,
    )


def test_any_bytes_end_in_the_error(reader):
    attempt_all(reader, st.binary(max_size=200), reader[-1] // 3)


class Bomb:
    """Unpickling it would make a file."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def test_nothing_in_a_pickle_is_executed(tmp_path):
    target, file = tmp_path / "executed", tmp_path / "weights.pth"
    file.write_bytes(pickle.dumps({"cls_token": Bomb(target)}))
    with pytest.raises(FczooError):
        load_backbone(str(file))
    torch.save({"cls_token": Bomb(target)}, file)
    with pytest.raises(FczooError):
        load_backbone(str(file))
    array = np.array([Bomb(target)], dtype=object)
    np.savez(tmp_path / "weights.npz", cls=array)
    with pytest.raises(FczooError):
        load_backbone(f"vit_tiny_patch16_224:{tmp_path / 'weights.npz'}")
    assert zipfile.is_zipfile(file) and not target.exists()
    pickle.loads(pickle.dumps(Bomb(target)))
    assert target.exists()  # the bomb is one


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    broken = weights()
    broken["norm.bias"][3] = float("nan")
    save_file(broken, tmp_path / "w.safetensors")
    with pytest.raises(FczooError, match=r"weight norm.bias of .* is not finite"):
        load_backbone(str(tmp_path / "w.safetensors"))
