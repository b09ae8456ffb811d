"""Checkpoints: saved and loaded snapshots, damaged files, and failed writes."""

import os

import pytest
import torch

from fczoo import FczooError
from fczoo.core.files import write_safely
from fczoo.federation.checkpoint import Checkpoint, Snapshot, contiguous_copy

SNAPSHOT = Snapshot(
    1,
    2,
    {
        "state": {"a": torch.arange(6.0).view(2, 3).mT, "b": torch.tensor(3)},
        "memory.4": {"i": torch.arange(3)},
    },
    {"x": [1, None]},
)


def test_snapshot_is_saved_and_loaded(tmp_path):
    checkpoint = Checkpoint(tmp_path / "c.safetensors")
    assert checkpoint.load() is None
    checkpoint.save(SNAPSHOT)
    snapshot = checkpoint.load()
    assert (snapshot.task, snapshot.round, snapshot.notes) == (
        1,
        2,
        {"x": [1, None]},
    )
    assert snapshot.trees.keys() == SNAPSHOT.trees.keys()
    for tree, values in SNAPSHOT.trees.items():
        assert list(snapshot.trees[tree]) == list(values)  # in this order
        assert all(
            torch.equal(v, snapshot.trees[tree][k]) and v.dtype == snapshot.trees[tree][k].dtype
            for k, v in values.items()
        )
    checkpoint.remove()
    assert checkpoint.load() is None and not list(tmp_path.iterdir())


def test_views_of_one_tensor_are_saved(tmp_path):
    table = torch.arange(12.0).view(4, 3)
    checkpoint = Checkpoint(tmp_path / "c.safetensors")
    checkpoint.save(
        Snapshot(0, 1, {"state": {"one": table[:2], "two": table[1:], "all": table}}, {})
    )
    assert torch.equal(checkpoint.load().trees["state"]["two"], table[1:])


def test_failed_write_keeps_old_file(tmp_path, monkeypatch):
    write_safely(tmp_path / "file", b"old")
    monkeypatch.setattr(
        os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space left"):
        write_safely(tmp_path / "file", b"new")
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"]


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_damaged_checkpoint_is_rejected(tmp_path, part):
    path = tmp_path / "c.safetensors"
    Checkpoint(path).save(SNAPSHOT)
    content = path.read_bytes()
    for corrupt_bytes in (
        content[: int(part * len(content))],
        content[: int(part * len(content))] + b"\x7f" + content[int(part * len(content)) + 1 :],
    ):
        path.write_bytes(corrupt_bytes)
        with pytest.raises(FczooError, match="not a valid checkpoint"):
            Checkpoint(path).load()


def test_contiguous_copy_copies_only_views():
    table = torch.arange(12.0).view(4, 3)
    assert contiguous_copy(table) is table
    for view in (table[1:], table.mT):
        assert torch.equal(contiguous_copy(view), view)
        assert contiguous_copy(view).is_contiguous()
        assert not contiguous_copy(view).storage_offset()
