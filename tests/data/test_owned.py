"""Who owns which image: many clients in one array, and the same file as ever."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from fczoo.data.owned import Owned
from fczoo.data.partition import Partition, load_partition

PARTS = [np.array([3, 8]), np.array([], np.int64), np.array([1, 4, 9])]


def test_parts_are_read_as_from_a_list():
    owned = Owned(PARTS)
    assert len(owned) == 3 and [part.tolist() for part in owned] == [[3, 8], [], [1, 4, 9]]
    assert owned[-1].tolist() == [1, 4, 9] and [part.tolist() for part in owned[:2]] == [[3, 8], []]
    assert owned.sizes.tolist() == [2, 0, 3] and owned[0].dtype == np.int64
    for client in (3, -4):
        with pytest.raises(IndexError):
            owned[client]


def test_places_among_the_images_that_are_there():
    assert [part.tolist() for part in Owned(PARTS).within(np.array([1, 3, 4, 8, 9]))] == [
        [1, 3],
        [],
        [0, 2, 4],
    ]


def test_a_partition_costs_no_array_a_client():
    """Ten thousand clients without images take what their numbers of images take."""
    partition = Partition("toy", "by hand", 0, (0,), ([PARTS[1]] * 10_000,))
    (owned,) = partition.tasks
    arrays = [value for value in vars(owned).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) == 8 * 10_000 + 4 * 10_001


def test_what_does_not_fit_is_kept_whole():
    """A foreign file may name any position; it is refused for what it says, not for its remainder."""
    far = 2**32 + 5
    assert [part.tolist() for part in Owned([np.array([-1, 7]), np.array([far])])] == [[-1, 7], [far]]


@pytest.mark.parametrize("joined", [(), (3, 3)])
def test_file_and_hash_are_those_of_plain_lists(tmp_path: Path, joined: tuple[int, ...]):
    partition = Partition("toy", "by hand", 7, (1, 0), (PARTS, PARTS[::-1]), joined)
    lists = [[part.tolist() for part in task] for task in (PARTS, PARTS[::-1])]
    plain = {"dataset": "toy", "spec": "by hand", "seed": 7, "class_order": [1, 0], "tasks": lists}
    plain |= {"joined": list(joined)} if joined else {}
    expected = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    assert partition.sha256 == expected
    partition.save(tmp_path / "p.json")
    told = json.loads((tmp_path / "p.json").read_text())
    assert told == {"format": "fczoo-partition-1", "sha256": expected, **plain}
    assert load_partition(tmp_path / "p.json").counts().tolist() == [[2, 0, 3], [3, 0, 2]]
