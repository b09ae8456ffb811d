"""Test data sets and streams with their class order."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fczoo import FczooError, Settings
from fczoo.core.files import home
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import ImageData, Images
from fczoo.data.stream import make_stream


@pytest.fixture(scope="module")
def digits() -> ImageData:
    return DATASETS.get("digits")().load(Path("unused"))


# ---------------------------------------------------------------- digits


def test_digits_format(digits: ImageData) -> None:
    assert digits.classes == tuple("0123456789")
    for part, count in ((digits.train, 1437), (digits.test, 360)):
        assert part.pixels.shape == (count, 32, 32, 3)
        assert part.pixels.dtype == np.uint8
        assert part.labels.shape == (count,) and part.labels.dtype == np.int64
        assert (part.pixels[..., 0] == part.pixels[..., 1]).all()
        assert (part.pixels[..., 0] == part.pixels[..., 2]).all()
        assert part.pixels.min() == 0 and part.pixels.max() == 255


def test_digits_are_split_by_class(digits: ImageData) -> None:
    counts = np.bincount(load_digits().target)
    train, test = np.bincount(digits.train.labels), np.bincount(digits.test.labels)
    assert (train + test).tolist() == counts.tolist()
    assert (np.abs(test - counts / 5) < 1).all()


def test_digits_match_scikit_learn_images(digits: ImageData) -> None:
    """Match each upscaled image with one original of its class, each used once.

    The images are averaged over blocks of 4 x 4 pixels.
    """
    source = load_digits()
    pixels = np.concatenate([digits.train.pixels, digits.test.pixels])[..., 0] / 255 * 16
    labels = np.concatenate([digits.train.labels, digits.test.labels])
    small = pixels.reshape(-1, 8, 4, 8, 4).mean((2, 4)).reshape(len(pixels), -1)
    originals = source.images.reshape(len(source.images), -1)
    nearest = ((small**2).sum(1)[:, None] - 2 * small @ originals.T + (originals**2).sum(1)).argmin(
        1
    )
    assert len(set(nearest)) > 0.99 * len(originals)
    assert (source.target[nearest] == labels).mean() > 0.99
    assert np.abs(small - originals[nearest]).mean() < 1  # of 16


def test_digits_are_deterministic(digits: ImageData) -> None:
    again = DATASETS.get("digits")().load(Path("elsewhere"))
    for a, b in ((digits.train, again.train), (digits.test, again.test)):
        assert np.array_equal(a.pixels, b.pixels)
        assert np.array_equal(a.labels, b.labels)


# ---------------------------------------------------------------- streams


def test_stream_in_natural_order(digits: ImageData) -> None:
    stream = make_stream("digits", tasks=5)
    assert stream.name == "digits"
    assert stream.class_order == tuple(range(10))
    assert stream.classes == digits.classes
    assert [(t.index, t.start, t.stop, t.classes, t.count, t.size) for t in stream.tasks] == [
        (i, 2 * i, 2 * i + 2, 10, 5, 2) for i in range(5)
    ]
    assert np.array_equal(stream.train.labels, digits.train.labels)
    assert np.array_equal(stream.test.labels, digits.test.labels)
    assert np.array_equal(stream.train_index, np.arange(1437))


@pytest.mark.parametrize(
    ("tasks", "sizes"),
    [(1, [10]), (3, [4, 3, 3]), (4, [3, 3, 2, 2]), (7, [2, 2, 2, 1, 1, 1, 1]), (10, [1] * 10)],
)
def test_task_sizes_are_balanced(tasks: int, sizes: list[int]) -> None:
    stream = make_stream("digits", tasks=tasks)
    assert [t.size for t in stream.tasks] == sizes
    assert stream.tasks[0].start == 0 and stream.tasks[-1].stop == 10
    assert all(a.stop == b.start for a, b in zip(stream.tasks, stream.tasks[1:], strict=False))
    for images in (stream.train, stream.test):
        places = [stream.positions(images, t) for t in stream.tasks]
        assert np.array_equal(np.sort(np.concatenate(places)), np.arange(len(images.labels)))
        for task, positions in zip(stream.tasks, places, strict=True):
            assert set(images.labels[positions]) == set(range(task.start, task.stop))


@pytest.mark.parametrize("seed", [0, 1, 2024])
def test_class_order_renumbers_labels(digits: ImageData, seed: int) -> None:
    stream = make_stream("digits", tasks=5, class_order_seed=seed)
    assert sorted(stream.class_order) == list(range(10))
    assert stream.class_order != tuple(range(10))
    assert stream.classes == tuple(str(c) for c in stream.class_order)
    order = np.array(stream.class_order)
    assert np.array_equal(order[stream.train.labels], digits.train.labels)
    assert np.array_equal(order[stream.test.labels], digits.test.labels)
    assert np.array_equal(
        stream.train.pixels, digits.train.pixels
    )  # the order of images is unchanged
    assert stream.class_order == make_stream("digits", class_order_seed=seed).class_order


def test_class_orders_differ_between_seeds() -> None:
    assert len({make_stream("digits", class_order_seed=seed).class_order for seed in range(4)}) == 4


def test_first_images_of_each_class(digits: ImageData) -> None:
    stream = make_stream("digits", tasks=2, class_order_seed=3, train_per_class=7, test_per_class=2)
    assert np.bincount(stream.train.labels).tolist() == [7] * 10
    assert np.bincount(stream.test.labels).tolist() == [2] * 10
    positions = sorted(i for c in range(10) for i in np.flatnonzero(digits.train.labels == c)[:7])
    assert stream.train_index.tolist() == positions
    assert np.array_equal(stream.train.pixels, digits.train.pixels[positions])
    assert np.array_equal(
        np.array(stream.class_order)[stream.train.labels], digits.train.labels[positions]
    )


def test_train_per_class_above_available_keeps_all(digits: ImageData) -> None:
    stream = make_stream("digits", train_per_class=10_000)
    assert np.array_equal(stream.train_index, np.arange(1437))
    assert len(stream.test.labels) == 360


@pytest.mark.parametrize("tasks", [0, -1, 11])
def test_invalid_task_count_is_rejected(tasks: int) -> None:
    with pytest.raises(
        FczooError,
        match=(
            f"digits has 10 classes and cannot be cut into {tasks} tasks; choose --tasks "
            "between 1 and 10"
        ),
    ):
        make_stream("digits", tasks=tasks)


@pytest.mark.parametrize("sizes", [(5, 1, 1, 1, 1, 1), (6, 2, 2), (10,), (1, 2, 3, 4)])
def test_tasks_of_given_sizes(sizes: tuple[int, ...]) -> None:
    stream = make_stream("digits", tasks=sizes)
    assert tuple(t.size for t in stream.tasks) == sizes
    assert [t.count for t in stream.tasks] == [len(sizes)] * len(sizes)
    assert [t.start for t in stream.tasks] == [sum(sizes[:t]) for t in range(len(sizes))]


@pytest.mark.parametrize("sizes", [(5, 4), (5, 6), ()])
def test_wrong_sum_of_task_sizes_is_rejected(sizes: tuple[int, ...]) -> None:
    with pytest.raises(FczooError, match=f"adds up to {sum(sizes)} classes, but digits has 10"):
        make_stream("digits", tasks=sizes)


@pytest.mark.parametrize("sizes", [(5, 0, 5), (11, -1)])
def test_task_without_classes_is_rejected(sizes: tuple[int, ...]) -> None:
    with pytest.raises(FczooError, match=r"has a task without classes; give at least 1 class per"):
        make_stream("digits", tasks=sizes)


def test_explicit_class_order(digits: ImageData) -> None:
    order = (9, 0, 8, 1, 7, 2, 6, 3, 5, 4)
    stream = make_stream("digits", tasks=5, class_order=order)
    assert stream.class_order == order
    assert stream.classes == tuple(map(str, order))
    assert np.array_equal(np.array(order)[stream.train.labels], digits.train.labels)


@pytest.mark.parametrize("order", [(), (0, 1), (*range(9), 8), (*range(1, 11),), (*range(10), 0)])
def test_incomplete_class_order_is_rejected(order: tuple[int, ...]) -> None:
    with pytest.raises(FczooError, match="each of the labels 0 to 9 of digits once"):
        make_stream("digits", class_order=order)


def test_class_order_excludes_class_order_seed() -> None:
    with pytest.raises(FczooError, match="give one of the two"):
        make_stream("digits", class_order=tuple(range(10)), class_order_seed=0)


def test_tasks_and_class_order_are_parsed() -> None:
    settings = Settings.for_dataset("digits", tasks="6,2,2", class_order="9,8,7,6,5,4,3,2,1,0")
    assert settings.tasks == (6, 2, 2)
    assert settings.class_order == tuple(range(9, -1, -1))
    assert Settings.for_dataset("digits", tasks="4").tasks == 4


def test_unknown_dataset_is_rejected() -> None:
    with pytest.raises(FczooError, match="no data set is called 'digit'; did you mean digits"):
        make_stream("digit")


def test_home_is_read_from_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path))
    assert home() == tmp_path
    with pytest.raises(FczooError, match=re.escape(str(tmp_path / "data"))):
        make_stream("cifar100", tasks=10)
    monkeypatch.delenv("FCZOO_HOME")
    assert "fczoo" in home().parts


# ---------------------------------------------------------------- CIFAR-100


def cifar_tree(root: Path) -> tuple[np.ndarray, np.ndarray]:
    """Write files in the published layout with 6 + 4 random images.

    Rows are 1024 red, then green, then blue values.

    Returns:
        Rows [10, 3072] and labels [10].
    """
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows, labels = (
        rng.integers(0, 256, (10, 3072), dtype=np.uint8),
        np.array([5, 0, 99, 7, 7, 42, 5, 1, 0, 98]),
    )
    for name, part in (("train", slice(0, 6)), ("test", slice(6, 10))):
        content = {
            "data": rows[part],
            "fine_labels": labels[part].tolist(),
            "coarse_labels": [0] * len(labels[part]),
        }
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "meta").write_bytes(
        pickle.dumps({"fine_label_names": [f"class {i}" for i in range(100)]})
    )
    return rows, labels


def test_cifar_with_wrong_checksum_is_rejected(tmp_path: Path) -> None:
    cifar_tree(tmp_path)
    with pytest.raises(
        FczooError, match=r"incomplete or corrupt \(checksums differ\); unpack .* again"
    ):
        DATASETS.get("cifar100")().load(tmp_path)


def test_cifar_layout_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, labels = cifar_tree(tmp_path)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: True)
    for root in (tmp_path, tmp_path / "cifar-100-python"):
        data = DATASETS.get("cifar100")().load(root)
        assert data.classes == tuple(f"class {i}" for i in range(100))
        for images, part in ((data.train, slice(0, 6)), (data.test, slice(6, 10))):
            assert isinstance(images, Images)
            assert images.pixels.dtype == np.uint8
            assert images.labels.dtype == np.int64
            assert images.labels.tolist() == labels[part].tolist()
            assert images.pixels.shape == (len(labels[part]), 32, 32, 3)
            for channel in range(3):  # row by row within a channel
                assert np.array_equal(
                    images.pixels[..., channel].reshape(-1, 1024),
                    rows[part, 1024 * channel : 1024 * (channel + 1)],
                )


@pytest.mark.parametrize("gone", ["train", "test", "meta"])
def test_cifar_with_missing_file_is_rejected(tmp_path: Path, gone: str) -> None:
    cifar_tree(tmp_path)
    (tmp_path / "cifar-100-python" / gone).unlink()
    with pytest.raises(FczooError, match="incomplete or corrupt"):
        DATASETS.get("cifar100")().load(tmp_path)


def test_missing_cifar_reports_source(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FczooError) as caught:
            DATASETS.get("cifar100")().load(root)
        message = str(caught.value)
        assert "no folder cifar-100-python in" in message
        assert str(root) in message
        assert "cifar-100-python.tar.gz" in message
        assert "--data-root" in message  # the file to get and the option for its location


def test_cifar_file_instead_of_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-python").write_text("")
    with pytest.raises(FczooError, match="no folder cifar-100-python"):
        DATASETS.get("cifar100")().load(tmp_path)
