"""Test readers with damaged and hostile files.

Every reader raises a one-line error or returns a valid object.

``FCZOO_FUZZ=10000 pytest tests/end_to_end/test_hostile_files.py`` tries that number of each kind.
"""

import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fczoo import FczooError
from fczoo.backbones.load import load_backbone
from helpers_files import READERS, weights

TRIES = int(os.environ.get("FCZOO_FUZZ", "0"))


def fuzz_settings(times: int) -> settings:
    """Return settings of hypothesis with this number of tries, or ``FCZOO_FUZZ``."""
    return settings(
        max_examples=TRIES or times,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )


@pytest.fixture(scope="module", params=READERS)
def reader(request, tmp_path_factory, make_run):
    """Return a path, the bytes of a valid file, its reader, its type, and the number of tries."""
    write, read, kind, times = READERS[request.param]
    path = tmp_path_factory.mktemp("files") / request.param
    if write:
        write(path)
    else:
        make_run(path.parents[len(Path(request.param).parts) - 2], {"one": {0: 70.0}})
    assert isinstance(read(path), kind)
    return path, path.read_bytes(), read, kind, times


@st.composite
def mutations(draw, content: bytes) -> bytes:
    """Draw the content after a few cuts, flips, insertions and repetitions.

    More of them are near the beginning, where headers are.
    """
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        in_header = draw(st.booleans())
        at = draw(st.integers(0, min(len(data), 4096) if in_header else len(data)))
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


VALUES = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
)
ANYTHING = st.recursive(
    VALUES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def json_mutations(draw, content: bytes) -> bytes:
    """Draw JSON, or lines of it, in which one value is another one or is gone."""
    lines = (
        [json.loads(line) for line in content.splitlines()]
        if content.count(b"}\n{")
        else [json.loads(content)]
    )
    node = draw(st.sampled_from(lines))
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            break
        key = draw(st.sampled_from(keys))
        if isinstance(node[key], dict | list) and node[key] and draw(st.booleans()):
            node = node[key]
            continue
        if draw(st.booleans()):
            node[key] = draw(ANYTHING)
        else:
            del node[key]
        break
    return "\n".join(map(json.dumps, lines)).encode()


def attempt_all(reader, strategy: st.SearchStrategy[bytes], times: int) -> None:
    """Check that each content ends in a valid object or in an error of one line.

    Args:
        reader: The fixture ``reader``.
        strategy: Strategy of the contents.
        times: Number of tries.
    """
    path, _, read, kind, _ = reader

    @fuzz_settings(times)
    @given(strategy)
    def attempt(data: bytes) -> None:
        path.write_bytes(data)
        try:
            assert isinstance(read(path), kind)
        except FczooError as error:
            assert "\n" not in str(error)

    attempt()


def test_mutated_files_raise_error_or_give_valid_object(reader):
    path, content, _, _, times = reader
    attempt_all(
        reader,
        mutations(content) | json_mutations(content)
        if path.suffix.startswith(".json")
        else mutations(content),
        times,
    )


def test_random_bytes_raise_error_or_give_valid_object(reader):
    attempt_all(reader, st.binary(max_size=200), reader[-1] // 3)


class Bomb:
    """Object that creates a file when it is unpickled."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def test_pickle_code_is_not_executed(tmp_path):
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
    assert target.exists()  # plain pickle does execute it


def test_non_finite_weights_are_rejected(tmp_path):
    broken = weights()
    broken["norm.bias"][3] = float("nan")
    save_file(broken, tmp_path / "w.safetensors")
    with pytest.raises(FczooError, match=r"weight norm.bias of .* is not finite"):
        load_backbone(str(tmp_path / "w.safetensors"))
