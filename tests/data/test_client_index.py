"""Test ``ClientIndex``: the images of many clients in one array."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from fczoo.data.client_index import ClientIndex
from fczoo.data.partition import Partition, load_partition

PARTS = [np.array([3, 8]), np.array([], np.int64), np.array([1, 4, 9])]


def test_client_index_reads_like_list():
    index = ClientIndex(PARTS)
    assert len(index) == 3
    assert [part.tolist() for part in index] == [[3, 8], [], [1, 4, 9]]
    assert index[-1].tolist() == [1, 4, 9]
    assert [part.tolist() for part in index[:2]] == [[3, 8], []]
    assert index.sizes.tolist() == [2, 0, 3] and index[0].dtype == np.int64
    for client in (3, -4):
        with pytest.raises(IndexError):
            index[client]


def test_within_maps_to_positions():
    assert [part.tolist() for part in ClientIndex(PARTS).within(np.array([1, 3, 4, 8, 9]))] == [
        [1, 3],
        [],
        [0, 2, 4],
    ]


def test_empty_clients_need_little_memory():
    """Store ten thousand clients without images in two small arrays."""
    partition = Partition("toy", "by hand", 0, (0,), ([PARTS[1]] * 10_000,))
    (index,) = partition.tasks
    arrays = [value for value in vars(index).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) == 8 * 10_000 + 4 * 10_001


def test_large_positions_are_kept():
    """Keep positions that do not fit 32 bits.

    A foreign file may name any position; the error must show it without overflow.
    """
    position = 2**32 + 5
    assert [part.tolist() for part in ClientIndex([np.array([-1, 7]), np.array([position])])] == [
        [-1, 7],
        [position],
    ]


@pytest.mark.parametrize("joined", [(), (3, 3)])
def test_file_and_hash_match_plain_lists(tmp_path: Path, joined: tuple[int, ...]):
    partition = Partition("toy", "by hand", 7, (1, 0), (PARTS, PARTS[::-1]), joined)
    lists = [[part.tolist() for part in task] for task in (PARTS, PARTS[::-1])]
    plain = {"dataset": "toy", "spec": "by hand", "seed": 7, "class_order": [1, 0], "tasks": lists}
    plain |= {"joined": list(joined)} if joined else {}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    assert partition.sha256 == digest
    partition.save(tmp_path / "p.json")
    content = json.loads((tmp_path / "p.json").read_text())
    assert content == {"format": "fczoo-partition-1", "sha256": digest, **plain}
    assert load_partition(tmp_path / "p.json").counts().tolist() == [[2, 0, 3], [3, 0, 2]]
