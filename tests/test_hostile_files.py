"""Files as an enemy or a broken disk makes them: every reader ends in its one-line error or in a valid object.

``FCZOO_FUZZ=10000 pytest tests/test_hostile_files.py`` tries that many of each kind instead of a few.
"""

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fczoo import FczooError
from fczoo.backbone import Backbone, ViTConfig
from fczoo.checkpoint import Checkpoint, Snapshot
from fczoo.partition import Partition, load_partition
from fczoo.record import Result, read_json, read_result
from fczoo.resume import check_same
from fczoo.weights import load_backbone

TRIES = int(os.environ.get("FCZOO_FUZZ", "0"))


def tried(times: int) -> settings:
    return settings(max_examples=TRIES or times, deadline=None, suppress_health_check=list(HealthCheck), database=None)


def weights(dim: int = 192) -> dict[str, torch.Tensor]:
    shapes = ViTConfig("vit_tiny", image_size=16, patch_size=8, dim=dim, depth=1, heads=3, mlp_dim=32).shapes()
    rng = torch.Generator().manual_seed(0)
    return {k: torch.randn(s, generator=rng).half() for k, s in shapes.items()}


def write_safetensors(path: Path) -> None:
    save_file(weights(), path)


def write_pth(path: Path) -> None:
    torch.save(weights(), path)


def write_checkpoint(path: Path) -> None:
    trees = {"state": {"a": torch.arange(6.0), "b": torch.tensor(3)}, "memory.1": {"exemplar.index": torch.arange(4)}}
    Checkpoint(path).save(Snapshot(1, 2, trees, {"result": {"seconds": 1.0}, "ledger": {"version": {"a": 1}, "known": [[0, {"a": 1}]]}}))


def write_partition(path: Path) -> None:
    parts = tuple(tuple(np.arange(4) + 8 * t + 4 * k for k in range(2)) for t in range(2))
    Partition("digits", "iid", 0, (0, 1, 2, 3), parts).save(path)


def write_result(path: Path) -> None:
    empty = Result("hgp", {"lr": 0.1}, {"rounds": 1}, 0, {"name": "vit"}, {"spec": "iid"}, [0, 1], [1, 1], [5, 5])
    content = {**vars(empty), "accuracy": [[90.0], [80.0, 70.0]], "metrics": {"A_N": 75.0}, "rejected": [{"task": 0, "client": 1}], "finished": True}
    path.write_text(json.dumps(content))


def write_about(path: Path) -> None:
    path.write_text(json.dumps({"methods": {"hgp": {"lr": 0.1}}, "seeds": [0], "settings": {"rounds": 2}, "device": "cpu"}))


def read_about(path: Path) -> None:
    about = read_json(path, "run description")
    check_same(path.parent, about, {"methods": {"hgp": {"lr": 0.1}}, "seeds": [0], "settings": {"rounds": 2}, "device": "cpu"})


READERS: dict[str, tuple[Callable, Callable, type | None, int]] = {
    "weights.safetensors": (write_safetensors, lambda p: load_backbone(str(p)), Backbone, 100),
    "weights.pth": (write_pth, lambda p: load_backbone(str(p)), Backbone, 100),
    "checkpoint.safetensors": (write_checkpoint, lambda p: Checkpoint(p).load(), Snapshot, 300),
    "partition.json": (write_partition, load_partition, Partition, 300),
    "result.json": (write_result, read_result, Result, 300),
    "bench.json": (write_about, read_about, type(None), 300),
}


@pytest.fixture(scope="module", params=READERS)
def reader(request, tmp_path_factory):
    """A place, the bytes of a sound file, its reader, what it gives, and how often to try."""
    write, read, kind, times = READERS[request.param]
    path = tmp_path_factory.mktemp("files") / request.param
    write(path)
    assert isinstance(read(path), kind)
    return path, path.read_bytes(), read, kind, times


@st.composite
def mutated(draw, content: bytes) -> bytes:
    """The content after a few cuts, flips, insertions and repetitions, more of them near the begin, where headers are."""
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
            data[at : at + 8] = draw(st.sampled_from([b"\xff" * 8, b"99999999", b"-1e99999", b"\0" * 8, b"[[[[[[[["]))
        elif kind == "repeat":
            data[at:at] = data[at : at + 64]
    return bytes(data)


VALUES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
ANYTHING = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6)


@st.composite
def rearranged(draw, content: bytes) -> bytes:
    """JSON in which one value, anywhere, is another one or is gone."""
    tree = json.loads(content)
    place = tree
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
    return json.dumps(tree).encode()


def test_mutated_files_end_in_the_error_or_a_valid_object(reader):
    path, content, read, kind, times = reader
    strategy = mutated(content) | rearranged(content) if path.suffix == ".json" else mutated(content)

    @tried(times)
    @given(strategy)
    def attempt(data: bytes) -> None:
        path.write_bytes(data)
        try:
            assert isinstance(read(path), kind)
        except FczooError as error:
            assert "\n" not in str(error)

    attempt()


def test_any_bytes_end_in_the_error(reader):
    path, _, read, kind, times = reader

    @tried(times // 3)
    @given(st.binary(max_size=200))
    def attempt(data: bytes) -> None:
        path.write_bytes(data)
        try:
            assert isinstance(read(path), kind)
        except FczooError as error:
            assert "\n" not in str(error)

    attempt()


@tried(8)
@given(data=st.data())
def test_mutated_flax_weights_end_in_the_error_or_a_valid_object(tmp_path_factory, data):
    """Each needs a model of its own, hence few: ``.npz`` of the original release, which numpy reads without pickle."""
    path = tmp_path_factory.getbasetemp() / "weights.npz"
    np.savez(path, **{"cls": np.zeros((1, 1, 192), np.float32), "embedding/kernel": np.zeros((16, 16, 3, 192), np.float32)})
    path.write_bytes(data.draw(mutated(path.read_bytes())))
    try:
        assert isinstance(load_backbone(f"vit_tiny_patch16_224:{path}"), Backbone)
    except FczooError as error:
        assert "\n" not in str(error)


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
