"""Test DomainNet with tasks of classes and tasks of domains."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fczoo import FczooError, Settings
from fczoo.cli.app import main
from fczoo.core.registry import DATASETS
from fczoo.data.stream import _first_images, make_stream, make_tasks
from fczoo.data.verify import verify
from fczoo.federation.data_setup import open_stream
from helpers_datasets import domainnet


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))
    domainnet(tmp_path)
    return tmp_path


def test_domain_tasks_have_all_classes(copy: Path) -> None:
    stream = make_stream("domainnet", copy, tasks="domains", pixels=False)
    assert [(t.start, t.stop, t.classes, t.returning) for t in stream.tasks] == [
        (0, 345, 345, t > 0) for t in range(6)
    ]
    for images in (stream.train, stream.test):
        labels_by_task = [images.labels[stream.positions(images, task)] for task in stream.tasks]
        assert [set(labels % 6) for labels in labels_by_task] == [
            {t, (t - 1) % 6} for t in range(6)
        ]
        assert sum(map(len, labels_by_task)) == len(images.labels)


def test_class_tasks_have_images_of_all_domains(copy: Path) -> None:
    stream = make_stream("domainnet", copy, tasks=5, pixels=False)
    assert stream.train.domains is None
    assert [t.size for t in stream.tasks] == [69] * 5
    assert [len(stream.positions(stream.train, t)) for t in stream.tasks] == [138] * 5


def test_train_per_class_applies_per_domain_task(copy: Path) -> None:
    assert len(make_stream("domainnet", copy, train_per_class=1, pixels=False).train.labels) == 345
    by_domain = make_stream("domainnet", copy, tasks="domains", train_per_class=1, pixels=False)
    assert len(by_domain.train.labels) == 690


def test_first_images_alternate_between_domains() -> None:
    """Keep the first images of a class from all domains alternately.

    Class 0 has three images of domain 0, two of 1, one of 2; class 1 has two of domain 2.
    """
    labels, domains = np.array([0, 0, 0, 1, 0, 0, 0, 1]), np.array([0, 0, 0, 2, 1, 1, 2, 2])
    assert _first_images(labels, domains, False, 4).tolist() == [0, 1, 3, 4, 6, 7]
    assert _first_images(labels, domains, True, 1).tolist() == [0, 3, 4, 6]
    assert _first_images(labels, None, False, 1).tolist() == [0, 3]


def test_class_order_keeps_domains(copy: Path) -> None:
    natural = make_stream("domainnet", copy, tasks="domains", pixels=False)
    random_order = make_stream("domainnet", copy, tasks="domains", pixels=False, class_order_seed=1)
    assert np.array_equal(
        np.array(random_order.class_order)[random_order.train.labels], natural.train.labels
    )
    for task in natural.tasks:
        places = [s.positions(s.train, task) for s in (natural, random_order)]
        assert np.array_equal(*places)


def test_partition_gives_each_domain_image_to_one_client(copy: Path) -> None:
    settings = Settings(
        dataset="domainnet", data_root=str(copy), tasks="domains", clients=3, partition="iid"
    )
    assert settings.task_count == 6
    stream, partition = open_stream(settings, pixels=False)
    for task, parts in zip(stream.tasks, partition.tasks, strict=True):
        positions = np.sort(np.concatenate(parts))
        assert np.array_equal(positions, stream.train_index[stream.positions(stream.train, task)])


def test_dataset_without_domains_is_rejected() -> None:
    for ask in (
        lambda: make_tasks("digits", 10, "domains"),
        lambda: Settings(tasks="domains").task_count,
    ):
        with pytest.raises(
            FczooError, match="digits has no domains to use as tasks; give a number"
        ):
            ask()


@pytest.mark.parametrize(
    "harm", ["missing", "../x/a.jpg 3", "real/thing/a.jpg 0", "sketch/a/b.jpg zero"]
)
def test_damaged_list_is_rejected(harm: str, copy: Path) -> None:
    list_file = copy / "domainnet" / "sketch_test.txt"
    if harm == "missing":
        list_file.unlink()
    else:
        list_file.write_text(f"{list_file.read_text()}{harm}\n")
    with pytest.raises(FczooError, match=r"sketch_test\.txt"):
        DATASETS.get("domainnet")().load(copy)


def test_truncated_list_is_rejected(copy: Path) -> None:
    for file in (copy / "domainnet").glob("*.txt"):
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:5]))
    with pytest.raises(
        FczooError, match="must have exactly the classes 0 to 344; the copy is damaged"
    ):
        DATASETS.get("domainnet")().load(copy)


def test_verify_counts_images(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = DATASETS.get("domainnet")
    monkeypatch.setattr(cls, "official", cls.official._replace(train=690))
    assert verify("domainnet", copy)[1] == ["690 test images, not 176743"]


@pytest.mark.slow
def test_bench_with_domain_tasks(copy: Path) -> None:
    words = (
        f"bench --dataset domainnet --data-root {copy} --tasks domains --stored-size 16 --clients 3"
    )
    words += f" --partition iid --backbone vit_nano_32 --out {copy / 'out'} --methods"
    outcome = CliRunner().invoke(main, [*words.split(), "fedncm"], catch_exceptions=False)
    assert outcome.exit_code == 0
    assert "6 domains of 345 classes" in outcome.stdout
    again = CliRunner().invoke(main, [*words.replace("/out", "/other").split(), "pilora"])
    assert again.exit_code
    assert "support labels that return in later tasks (--tasks domains" in again.output
