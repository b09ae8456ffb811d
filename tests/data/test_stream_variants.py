"""Test few shots, long-tailed classes, blurry boundaries and noisy labels."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from fczoo import FczooError, Settings
from fczoo.cli.app import main
from fczoo.core.tasks import Task
from fczoo.data.dataset import Images
from fczoo.data.partition import load_partition, make_partition
from fczoo.data.stream import Stream
from fczoo.data.stream_variants import (
    VARIANTS,
    add_label_noise,
    describe_variants,
    long_tail_counts,
    vary_stream,
)
from fczoo.federation.data_setup import open_stream, partition_stream
from helpers_partition import seeds, some, toy_stream

OFF = {"shots": None, "imbalance": None, "blurry": 0.0, "label_noise": 0.0}


def vary(stream: Stream, seed: int = 0, **values: float) -> Stream:
    return vary_stream(stream, {**OFF, **values}, seed)


def sizes(stream: Stream) -> list[int]:
    """Return the training images per class, in order of arrival."""
    return np.bincount(stream.train.labels, minlength=len(stream.classes)).tolist()


def test_long_tailed_cifar_matches_published_sizes() -> None:
    """Compare with 500, 477, ..., 5 images and the totals of papers (Cao et al., 2019)."""
    cifar100 = long_tail_counts(np.full(100, 500), 0.01)
    assert cifar100[[0, 1, 99]].tolist() == [500, 477, 5]  # 500 * 0.01^(1/99) = 477.27
    assert cifar100.sum() == 10_847
    assert long_tail_counts(np.full(10, 5000), 0.01).sum() == 12_406


def test_long_tail_follows_natural_order() -> None:
    """Give class c of 4 with 16 images 16 * (1/8)^(c/3) = 16, 8, 4, 2 images."""
    stream = vary(toy_stream(order=(2, 0, 3, 1), per_class=16), imbalance=1 / 8)
    assert sizes(stream) == [4, 16, 2, 8]
    assert sizes(vary(toy_stream(per_class=1), imbalance=0.01)) == [1] * 4


def test_shots_apply_after_first_task() -> None:
    stream = vary(toy_stream(per_class=12), shots=3)
    assert sizes(stream) == [12, 12, 3, 3]
    with pytest.raises(FczooError, match="class c has 12 training images, fewer than --shots 13"):
        vary(toy_stream(per_class=12), shots=13)


def test_blurry_boundaries_match_hand_calculation() -> None:
    """Keep 6 of 10 images of a class in its task, and give 2 to each of the two others."""
    tasks = tuple(Task(t, t, t + 1, 3, 3) for t in range(3))
    images = Images(np.zeros((30, 1, 1, 3), np.uint8), np.repeat(np.arange(3), 10))
    stream = Stream("toy", images, images, np.arange(30), (0, 1, 2), tuple("abc"), tasks)
    blurry = vary(stream, blurry=0.4)
    table = np.zeros((3, 3), int)
    np.add.at(table, (blurry.train.domains, blurry.train.labels), 1)
    assert table.tolist() == [[6, 2, 2], [2, 6, 2], [2, 2, 6]]
    assert blurry.tasks == tuple(Task(t, 0, 3, 3, 3) for t in range(3))
    assert blurry.test.domains.tolist() == images.labels.tolist()
    with pytest.raises(FczooError, match="this run has one; raise --tasks"):
        vary(replace(stream, tasks=(Task(0, 0, 3, 3, 1),)), blurry=0.4)


def test_label_noise_applies_per_client() -> None:
    stream = vary(toy_stream(per_class=20), label_noise=0.25)
    partition = make_partition(stream, "dirichlet:1", 3)
    noisy = add_label_noise(stream, partition)
    wrong = noisy.train.labels != stream.train.labels
    for task, clients in zip(stream.tasks, partition.tasks, strict=True):
        for images in clients.within(stream.train_index):
            assert wrong[images].sum() == round(len(images) / 4)
            labels = noisy.train.labels[images]
            assert np.all((task.start <= labels) & (labels < task.stop))
    assert noisy.test is stream.test
    shared = make_partition(stream, "overlap:0.5", 3)
    with pytest.raises(FczooError, match=r"those of overlap:0.5 share images; use another"):
        add_label_noise(stream, shared)


def test_symmetric_noise_uses_all_other_classes() -> None:
    stream = vary(toy_stream(tasks=1, per_class=400), label_noise=1.0)
    noisy = add_label_noise(stream, make_partition(stream, "iid", 1))
    table = np.zeros((4, 4), int)
    np.add.at(table, (stream.train.labels, noisy.train.labels), 1)
    assert table.diagonal().tolist() == [0] * 4
    # 400 draws among 3 classes: 133 expected, standard deviation 9.4
    assert table[~np.eye(4, dtype=bool)].min() > 95


@some
@given(
    per_class=st.lists(st.integers(4, 30), min_size=4, max_size=4),
    seed=seeds,
    shots=st.sampled_from([None, 1, 4]),
    imbalance=st.sampled_from([None, 0.02, 0.5, 1.0]),
    blurry=st.sampled_from([0.0, 0.3, 1.0]),
    label_noise=st.sampled_from([0.0, 0.2, 1.0]),
    clients=st.integers(1, 2),
)
def test_variants_keep_stream_invariants(
    per_class: list[int], seed: int, clients: int, **values: float | None
) -> None:
    """Check the invariants of every variant.

    It has all classes, no duplicate image and the same test images, and it is deterministic.
    """
    if values["shots"]:  # settings reject other variants with shots
        values |= {"imbalance": None, "blurry": 0.0}
    labels = np.repeat(np.arange(4), per_class)
    images = Images(np.zeros((len(labels), 1, 1, 3), np.uint8), labels)
    stream = replace(toy_stream(), train=images, train_index=2 * np.arange(len(labels)) + 1)
    varied = vary_stream(stream, values, seed)
    assert np.array_equal(varied.test.labels, stream.test.labels)
    assert len(np.unique(varied.train_index)) == len(varied.train_index) == len(varied.train.pixels)
    assert np.isin(varied.train_index, stream.train_index).all()
    assert min(sizes(varied)) >= 1
    partition = make_partition(varied, "iid", clients, seed)
    noisy = add_label_noise(varied, partition)
    for task, parts in zip(varied.tasks, partition.tasks, strict=True):
        assert len(np.unique(parts.positions)) == len(parts.positions)
        in_task = varied.train_index[varied.positions(varied.train, task)]
        assert np.array_equal(np.sort(parts.positions), in_task)
    assert sum(int(task.sizes.sum()) for task in partition.tasks) == len(varied.train_index)
    again = vary_stream(stream, values, seed)
    assert np.array_equal(again.train_index, varied.train_index)
    noisy_again = add_label_noise(again, make_partition(again, "iid", clients, seed))
    assert np.array_equal(noisy_again.train.labels, noisy.train.labels)


# ---------------------------------------------------------------- settings, files, commands


def test_few_shot_settings_define_tasks() -> None:
    settings = Settings.for_dataset("cifar100", base_classes=60, ways=5, shots=5)
    assert settings.tasks == (60, *[5] * 8)
    assert settings.task_count == 9


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"base_classes": 4}, "base_classes and ways only work together; give"),
        (
            {"base_classes": 4, "ways": 4},
            "leaves 6, which cannot be divided into tasks of ways 4; change",
        ),
        ({"base_classes": 10, "ways": 1}, "leaves 0, which cannot be divided into tasks of ways 1"),
        ({"base_classes": 4, "ways": 2, "tasks": 5}, "make 4 tasks, unlike tasks 5; leave"),
        ({"shots": 5, "imbalance": 0.1}, "shots does not work with imbalance"),
        ({"shots": 5, "blurry": 0.1}, "shots does not work with blurry"),
        ({"blurry": 1.5}, "blurry is 1.5; it must be"),
        ({"dataset": "domainnet", "tasks": "domains", "blurry": 0.1}, "domains have sharp"),
        ({"dataset": "imagefolder", "base_classes": 4, "ways": 2}, "give tasks 4,2,2 and so on"),
    ],
)
def test_contradictory_settings_are_rejected(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(FczooError) as caught:
        Settings.for_dataset(**{"dataset": "digits", **changes})
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_variants_are_saved_with_partition(tmp_path: Path) -> None:
    words = ["partition", "--tasks", "2", "--clients", "2", "--partition", "iid"]
    words += ["--imbalance", "0.1", "--label-noise", "0.2"]
    path = tmp_path / "p.json"
    outcome = CliRunner().invoke(main, [*words, "--save", str(path)])
    assert outcome.exit_code == 0, outcome.output
    assert "iid, long-tailed classes, imbalance 0.1, 0.2 of each client's labels wrong" in (
        outcome.stdout
    )
    # digits: class 3 has the most training images, 147; iid halves of tasks
    saved = load_partition(path)
    assert dict(saved.variants) == {"imbalance": 0.1, "label_noise": 0.2, "seed": 0}
    counts = saved.counts()
    assert [line.split()[-1] for line in outcome.stdout.splitlines()[4:6]] == [
        str(sum(round(0.2 * n) for n in row)) for row in counts.tolist()
    ]
    settings = Settings(tasks=2, clients=2, imbalance=0.1, label_noise=0.2, partition="iid")
    stream, partition = open_stream(settings, pixels=False)
    assert partition.sha256 == saved.sha256
    from_file = replace(settings, partition=f"file:{path}")
    again, _ = open_stream(from_file, pixels=False)
    assert np.array_equal(again.train.labels, stream.train.labels)
    with pytest.raises(
        FczooError,
        match=r"variant of the stream \(.*--label-noise 0.2 .*\) than this run \(--imb",
    ):
        open_stream(replace(from_file, label_noise=0.0), pixels=False)


def test_label_noise_does_not_depend_on_stages() -> None:
    settings = Settings(tasks=2, clients=2, label_noise=0.3)
    stream, _ = open_stream(settings, pixels=False)
    stages, partition = open_stream(replace(settings, moving=1), pixels=False)
    assert len(partition.tasks) == 3
    assert np.array_equal(stages.train.labels, stream.train.labels)


def test_variants_are_off_by_default() -> None:
    settings = Settings()
    assert not any(getattr(settings, name) for name in VARIANTS)
    assert not describe_variants(vars(settings))
    stream = toy_stream()
    assert vary_stream(stream, vars(settings), 0) is stream
    assert "imbalance" not in settings.portable()
    assert partition_stream(Settings(clients=2), stream)[1].variants == {}
