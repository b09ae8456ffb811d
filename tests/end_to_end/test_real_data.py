"""Test real images with a pre-trained ViT-Ti/16, if both are available.

``FCZOO_TEST_DATA`` is the folder that holds ``cifar-100-python`` and, if they are to be tested,
``tiny-imagenet-200`` and ``mini-imagenet`` (whole or in part); ``FCZOO_TEST_VIT`` is the weight
file. All runs use fp32: on a processor without bf16 instructions, bf16 is many times slower.
"""

import os
import shutil
from pathlib import Path

import pytest

import fczoo
from fczoo.data.stream import make_stream

DATA, VIT = os.environ.get("FCZOO_TEST_DATA"), os.environ.get("FCZOO_TEST_VIT")
pytestmark = pytest.mark.skipif(not (DATA and VIT), reason="set FCZOO_TEST_DATA and FCZOO_TEST_VIT")


def test_cifar100_is_complete():
    stream = make_stream("cifar100", Path(DATA), tasks=10)
    assert stream.train.pixels.shape == (50000, 32, 32, 3)
    assert stream.test.pixels.shape == (10000, 32, 32, 3)
    assert [len(stream.positions(stream.train, t)) for t in stream.tasks] == [5000] * 10
    assert stream.classes[0] == "apple" and stream.classes[99] == "worm"


def test_corrupt_copy_is_rejected(tmp_path):
    copy = shutil.copytree(Path(DATA) / "cifar-100-python", tmp_path / "cifar-100-python")
    with (copy / "test").open("r+b") as file:
        file.seek(1000)
        file.write(b"!")
    with pytest.raises(fczoo.FczooError, match="corrupt"):
        make_stream("cifar100", tmp_path, tasks=10)


@pytest.mark.parametrize(
    ("name", "folder", "first"),
    [
        ("tinyimagenet", "tiny-imagenet-200", "goldfish"),
        ("miniimagenet", "mini-imagenet", "n01532829"),
    ],
)
def test_image_files_are_read_and_classified(name, folder, first, tmp_path, monkeypatch):
    if not (Path(DATA) / folder).is_dir():
        pytest.skip(f"no {folder} in FCZOO_TEST_DATA")
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path))
    settings = fczoo.Settings.for_dataset(
        name,
        data_root=DATA,
        backbone=VIT,
        tasks=5,
        clients=3,
        train_per_class=5,
        test_per_class=2,
        image_size=128,
    )
    bench = fczoo.Benchmark.open(settings)
    assert bench.stream.classes[0] == first
    assert len(bench.stream.train.labels) == 5 * len(bench.stream.classes)
    assert bench.run(fczoo.create_method("fedncm")).metrics["A_N"] > 20  # chance is 0.5 or 1


@pytest.fixture(scope="module")
def bench():
    """Open all 100 classes at 96 pixels with few images: 60 local steps per task."""
    settings = fczoo.Settings.for_dataset(
        "cifar100",
        data_root=DATA,
        backbone=VIT,
        tasks=5,
        clients=3,
        rounds=1,
        epochs=6,
        batch_size=4,
        train_per_class=6,
        test_per_class=4,
        augment="none",
        image_size=96,
    )
    return fczoo.Benchmark.open(settings)


def test_checkpoint_defines_backbone_config():
    config = fczoo.load_backbone(VIT).config
    assert (config.image_size, config.patch_size, config.dim, config.depth, config.heads) == (
        224,
        16,
        192,
        12,
        3,
    )
    assert config.mean == config.std == (0.5, 0.5, 0.5)


def test_class_means_of_real_features_beat_chance(bench):
    result = bench.run(fczoo.create_method("fedncm"))
    assert result.metrics["A_N"] > 20  # chance is 1; small images and few samples


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pilora", {"head_tune": True}),
        ("hgp", {}),
        ("fcilpt", {"lr": 3e-2}),
        ("fppl", {"lr": 1e-2, "server_lr": 1e-2}),
    ],
)
def test_methods_learn_real_images(bench, name, options):
    result = bench.run(fczoo.create_method(name, "cifar100", **options))
    assert result.accuracy[0][0] > 10  # 20 classes in the first task: chance is 5
    assert result.metrics["A_N"] > 3  # 100 classes: chance is 1
