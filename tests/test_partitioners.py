"""Partitioners: properties over random labels, impossible requests, and partitions as files."""

import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fczoo import FczooError, Task
from fczoo.data import Images, Stream
from fczoo.partition import Partition, load_partition, make_partition
from fczoo.partitioners.dirichlet import Dirichlet
from fczoo.partitioners.quantity import Quantity
from fczoo.registry import PARTITIONERS
from fczoo.seeds import numpy_stream

some = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
seeds = st.integers(0, 2**31)

# A spec of each partitioner that can be met by any of the labels drawn below.
SPECS = {"iid": ["iid"], "dirichlet": ["dirichlet:0.1", "dirichlet:0.5", "dirichlet:beta=1,draw=sample", "dirichlet:beta=0.2,cap=true"]}
SPECS["quantity"] = ["quantity:1", "quantity:2"]
specs = pytest.mark.parametrize("spec", [spec for name in PARTITIONERS.names("fczoo.partitioners") for spec in SPECS.get(name, [name])])

# Up to 5 classes of 1 to 40 images, and clients enough to cover them with one class each.
labels_of = st.lists(st.integers(1, 40), min_size=2, max_size=5).map(lambda sizes: np.repeat(np.arange(len(sizes)), sizes))


def split(spec: str, labels: np.ndarray, clients: int, seed: int) -> list[np.ndarray]:
    return PARTITIONERS.create(spec)(labels, clients, numpy_stream("test", seed))


def table(parts: list[np.ndarray], labels: np.ndarray) -> np.ndarray:
    """Images per client and class."""
    return np.array([np.bincount(labels[p], minlength=labels.max() + 1) for p in parts])


def test_every_partitioner_has_a_spec_here() -> None:
    assert set(PARTITIONERS.names("fczoo.partitioners")) == SPECS.keys()


# ---------------------------------------------------------------- what every partitioner has to keep


@specs
@some
@given(labels_of, st.integers(5, 9), seeds, st.randoms(use_true_random=False))
def test_disjoint_and_covering(spec: str, labels: np.ndarray, clients: int, seed: int, order) -> None:
    labels = labels[order.sample(range(len(labels)), len(labels))]
    before = labels.copy()
    parts = split(spec, labels, clients, seed)
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert table(parts, labels).sum() == len(labels)
    assert np.array_equal(labels, before)
    assert all(np.array_equal(a, b) for a, b in zip(parts, split(spec, labels, clients, seed), strict=True))


@specs
def test_another_seed_is_another_split(spec: str) -> None:
    labels = np.repeat(np.arange(5), 40)
    splits = {tuple(tuple(np.sort(p)) for p in split(spec, labels, 5, seed)) for seed in range(5)}
    assert len(splits) == 5


@pytest.mark.parametrize("name", PARTITIONERS.names("fczoo.partitioners"))
@some
@given(labels_of, seeds)
def test_a_single_client_gets_all(name: str, labels: np.ndarray, seed: int) -> None:
    (part,) = split(f"quantity:{labels.max() + 1}" if name == "quantity" else name, labels, 1, seed)
    assert np.array_equal(np.sort(part), np.arange(len(labels)))


@pytest.mark.parametrize("spec", ["iid", "dirichlet:100", "dirichlet:beta=100,draw=sample", "quantity:1"])
def test_images_of_a_class_are_drawn(spec: str) -> None:
    """No client gets a run of neighbours, which in many data sets resemble each other."""
    for part in split(spec, np.zeros(60, np.int64), 2, 0):
        assert len(part) > 10 and (np.diff(np.sort(part)) > 1).sum() > 5


# ---------------------------------------------------------------- iid


@some
@given(labels_of, st.integers(1, 9), seeds)
def test_iid_shares_are_equal(labels: np.ndarray, clients: int, seed: int) -> None:
    counts = table(split("iid", labels, clients, seed), labels)
    assert (counts.max(0) - counts.min(0) <= 1).all()


# ---------------------------------------------------------------- dirichlet


@some
@given(labels_of, st.integers(2, 9), st.floats(0.01, 1), st.integers(1, 8), st.sampled_from(["split", "sample"]), st.booleans(), seeds)
def test_dirichlet_min_size(caplog, labels: np.ndarray, clients: int, beta: float, min_size: int, draw: str, cap: bool, seed: int) -> None:
    """Kept by a draw, or by the repair, which says so. The least is capped at an equal share."""
    assume(len(labels) >= clients)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="fczoo"):
        parts = Dirichlet(beta, draw, cap, min_size, max_tries=3)(labels, clients, numpy_stream("test", seed))
    smallest = min(min_size, len(labels) // clients)
    assert min(map(len, parts)) >= smallest >= 1
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    if caplog.records:
        assert len(caplog.records) == 1 and f"below {smallest} images in 3 draws" in caplog.messages[0]


def test_dirichlet_warns_of_a_repair_only(caplog) -> None:
    labels = np.repeat(np.arange(2), 10)
    with caplog.at_level(logging.WARNING, logger="fczoo"):
        Dirichlet(100.0, min_size=1)(labels, 2, numpy_stream("test", 0))
        assert not caplog.records
        parts = Dirichlet(1e-6, min_size=5, max_tries=4)(labels, 4, numpy_stream("test", 0))  # two owners at most before the repair
    assert len(caplog.records) == 1
    assert [len(p) for p in parts] == [5, 5, 5, 5]


def test_dirichlet_with_large_beta_is_nearly_iid() -> None:
    labels = np.repeat(np.arange(4), 100)
    assert np.abs(table(split("dirichlet:1e6", labels, 5, 0), labels) - 20).max() <= 1  # cut at cumulative shares, rounded down
    sampled = table(split("dirichlet:beta=1e6,draw=sample", labels, 5, 0), labels)
    assert np.abs(sampled - 20).max() <= 20  # 5 standard deviations of a binomial with n = 100, p = 1/5: sqrt(16) = 4


def test_dirichlet_skew_grows_as_beta_falls() -> None:
    labels = np.repeat(np.arange(4), 100)

    def share(beta: float) -> float:
        """Mean largest share of a class, 20 seeds."""
        return float(np.mean([table(split(f"dirichlet:beta={beta},min_size=1", labels, 5, s), labels).max(0) / 100 for s in range(20)]))

    shares = [share(beta) for beta in (0.05, 0.3, 2.0, 100.0)]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.8 and shares[-1] < 0.3


def test_dirichlet_cap_closes_full_clients() -> None:
    """A client that holds an equal share before a class comes gets nothing of it."""
    labels = np.repeat(np.arange(8), 25)
    for seed in range(10):
        counts = table(Dirichlet(0.2, cap=True, min_size=1)(labels, 4, numpy_stream("test", seed)), labels)
        before = np.cumsum(counts, 1) - counts
        assert (counts[before >= 50] == 0).all()
        assert counts.sum(1).max() < 50 + 25
    free = [table(Dirichlet(0.2, min_size=1)(labels, 4, numpy_stream("test", s)), labels).sum(1).max() for s in range(10)]
    assert max(free) >= 75


class CountedDraws:
    """Counts the draws of a Dirichlet partitioner."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.number, once = 0, Dirichlet._once

        def counted(*args: object) -> list[np.ndarray]:
            self.number += 1
            return once(*args)

        monkeypatch.setattr(Dirichlet, "_once", counted)


def test_dirichlet_ends_with_many_clients(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    draws = CountedDraws(monkeypatch)
    labels = np.repeat(np.arange(10), 100)
    with caplog.at_level(logging.WARNING, logger="fczoo"):
        parts = Dirichlet(0.01, max_tries=20)(labels, 500, numpy_stream("test", 0))
    assert draws.number == 20 and len(caplog.records) == 1
    assert [len(p) for p in parts] == [2] * 500
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1000))


def test_dirichlet_stops_at_the_first_good_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = CountedDraws(monkeypatch)
    Dirichlet(1000.0, min_size=1)(np.repeat(np.arange(5), 50), 5, numpy_stream("test", 0))
    assert draws.number == 1


@pytest.mark.parametrize("draw", ["split", "sample"])
def test_dirichlet_of_vanishing_beta(draw: str) -> None:
    """A class goes to one client, which may be full already and then leaves no share at all; still every image has an owner."""
    labels = np.repeat(np.arange(3), 20)
    for seed in range(10):
        parts = Dirichlet(1e-6, draw, cap=True, min_size=1, max_tries=2)(labels, 3, numpy_stream("test", seed))
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(60))


# ---------------------------------------------------------------- quantity


@some
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8), st.integers(1, 30), seeds)
def test_quantity_owns_exactly_alpha_classes(alpha: int, classes: int, clients: int, tries: int, seed: int) -> None:
    assume(alpha <= classes <= alpha * clients)
    labels = np.repeat(np.arange(classes), 2 * clients)
    counts = table(Quantity(alpha, tries)(labels, clients, numpy_stream("test", seed)), labels)
    assert ((counts > 0).sum(1) == alpha).all()
    assert (counts > 0).any(0).all()
    for shares in counts.T:  # equal shares among the owners
        assert np.ptp(shares[shares > 0]) <= 1


def test_quantity_repair_covers_every_class() -> None:
    """Six clients with one class each and six classes: a draw covers all in 6!/6^6 = 1.5 % of cases, the repair always."""
    labels = np.repeat(np.arange(6), 12)
    for seed in range(10):
        counts = table(Quantity(1, max_tries=1)(labels, 6, numpy_stream("test", seed)), labels)
        assert sorted(counts.argmax(1)) == list(range(6)) and (counts.max(1) == 12).all()


@pytest.mark.parametrize(
    ("alpha", "clients", "complaint"),
    [(5, 10, "more classes than the 4 of a task"), (1, 3, "cannot cover the 4 classes"), (2, 1, "cannot cover the 4 classes")],
)
def test_quantity_that_cannot_be_met(alpha: int, clients: int, complaint: str) -> None:
    with pytest.raises(FczooError, match=complaint):
        Quantity(alpha)(np.repeat(np.arange(4), 10), clients, numpy_stream("test", 0))


# ---------------------------------------------------------------- specs


def test_specs_name_fields() -> None:
    assert PARTITIONERS.create("dirichlet:0.3") == Dirichlet(beta=0.3)
    assert PARTITIONERS.create("dirichlet") == PARTITIONERS.create("dirichlet:") == Dirichlet(beta=0.5, draw="split", cap=False)
    assert PARTITIONERS.create("dirichlet:beta=0.1,min_size=2") == Dirichlet(0.1, min_size=2)
    assert PARTITIONERS.create("dirichlet:0.1,cap=true,draw=sample") == Dirichlet(0.1, "sample", True)
    assert PARTITIONERS.create("quantity:3") == Quantity(3)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("dirchlet:0.5", "did you mean dirichlet"),
        ("zipf", "known: "),
        ("", "no partitioner is called ''"),
        ("dirichlet:x", "dirichlet.beta is 'x'; it must be float"),
        ("dirichlet:nan", "dirichlet.beta is 'nan'"),
        ("dirichlet:1e999", "dirichlet.beta is"),
        ("dirichlet:0", "must be at least 1e-06"),
        ("dirichlet:-1", "must be at least 1e-06"),
        ("dirichlet:0.5,0.1", "cannot read '0.1'"),
        ("dirichlet:bta=0.5", "has no option 'bta'; did you mean beta"),
        ("dirichlet:min_size=2.5", "dirichlet.min_size is 2.5; it must be int"),
        ("dirichlet:draw=cut", "must be split | sample"),
        ("dirichlet:max_tries=0", "must be at least 1"),
        ("quantity:0", "must be at least 1"),
        ("quantity:true", "it must be int"),
        ("iid:3", "cannot read '3'"),
    ],
)
def test_specs_that_cannot_be_read(spec: str, complaint: str) -> None:
    with pytest.raises(FczooError, match=re.escape(complaint)):
        PARTITIONERS.create(spec)


# ---------------------------------------------------------------- partitions of a stream


def toy_stream(name: str = "toy", order: tuple[int, ...] = (2, 0, 3, 1), tasks: int = 2, per_class: int = 12, train_index: np.ndarray | None = None):
    """4 classes in tasks of equal size; labels in order of arrival. ``train_index`` are odd positions, so that they differ from places."""
    labels = np.tile(np.arange(4), per_class)
    pixels = np.zeros((len(labels), 1, 1, 3), np.uint8)
    index = 2 * np.arange(len(labels)) + 1 if train_index is None else train_index
    size = 4 // tasks
    cut = tuple(Task(t, t * size, (t + 1) * size, 4, tasks) for t in range(tasks))
    return Stream(name, Images(pixels, labels), Images(pixels, labels), index, order, tuple("abcd"), cut)


def equal(a: Partition, b: Partition) -> bool:
    head = (a.dataset, a.spec, a.seed, a.class_order) == (b.dataset, b.spec, b.seed, b.class_order)
    return (
        head
        and len(a.tasks) == len(b.tasks)
        and all(np.array_equal(x, y) for s, t in zip(a.tasks, b.tasks, strict=True) for x, y in zip(s, t, strict=True))
    )


@pytest.mark.parametrize("spec", ["iid", "dirichlet:0.3", "quantity:1"])
def test_partition_of_a_stream(spec: str) -> None:
    stream = toy_stream()
    partition = make_partition(stream, spec, 3, seed=4)
    assert (partition.dataset, partition.spec, partition.seed, partition.clients) == ("toy", spec, 4, 3)
    assert partition.counts().shape == (2, 3) and partition.counts().sum(1).tolist() == [24, 24]
    for task, parts in zip(stream.tasks, partition.tasks, strict=True):
        owned = np.concatenate(parts)
        assert np.array_equal(np.sort(owned), stream.train_index[stream.positions(stream.train, task)])
        assert all(np.array_equal(p, np.sort(p)) for p in parts)
    assert equal(partition, make_partition(stream, spec, 3, seed=4))
    assert partition.sha256 == make_partition(stream, spec, 3, seed=4).sha256
    other = make_partition(stream, spec, 3, seed=5)
    assert not equal(partition, other) and partition.sha256 != other.sha256


def test_tasks_are_split_independently() -> None:
    """The second task's split is its own draw: not that of the first, moved along."""
    partition = make_partition(toy_stream(), "dirichlet:0.3", 3)
    stream = toy_stream()
    places = [[np.searchsorted(np.sort(np.concatenate(t)), p).tolist() for p in t] for t in partition.tasks]
    assert places[0] != places[1]
    whole = make_partition(toy_stream(tasks=1), "dirichlet:0.3", 3)
    assert len(whole.tasks) == 1 and whole.counts().sum() == len(stream.train.labels)


@pytest.mark.parametrize(
    ("spec", "clients", "complaint"),
    [
        ("iid", 25, "24 training images for 25 clients"),
        ("dirichlet:0.5", 25, "24 training images for 25 clients"),
        ("iid", 0, "0 clients"),
        ("iid", -3, "-3 clients"),
        ("quantity:3", 4, "more classes than the 2 of a task"),
        ("quantity:1", 1, "cannot cover the 2 classes"),
        ("dirchlet:0.5", 3, "did you mean dirichlet"),
        ("file:nowhere.json", 3, "no partition file at nowhere.json"),
    ],
)
def test_partitions_that_cannot_be(spec: str, clients: int, complaint: str) -> None:
    with pytest.raises(FczooError, match=complaint):
        make_partition(toy_stream(), spec, clients)


def test_as_many_clients_as_images() -> None:
    partition = make_partition(toy_stream(per_class=2), "dirichlet:0.1", 4)
    assert partition.counts().tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]


# ---------------------------------------------------------------- files


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "split.json"
    make_partition(toy_stream(), "dirichlet:0.3", 3, seed=4).save(path)
    return path


def test_save_and_load(saved: Path) -> None:
    original = make_partition(toy_stream(), "dirichlet:0.3", 3, seed=4)
    loaded = load_partition(saved)
    assert equal(loaded, original) and loaded.sha256 == original.sha256
    assert loaded.class_order == (2, 0, 3, 1) and loaded.tasks[0][0].dtype == np.int64


def test_saving_a_client_without_images(tmp_path: Path) -> None:
    partition = Partition("toy", "by hand", 0, (0, 1), ((np.array([3, 5]), np.array([], np.int64)),))
    partition.save(tmp_path / "p.json")
    loaded = load_partition(tmp_path / "p.json")
    assert equal(loaded, partition) and loaded.counts().tolist() == [[2, 0]]


def test_reuse_gives_the_same_split(saved: Path) -> None:
    stream = toy_stream()
    reused = make_partition(stream, f"file:{saved}", 3, seed=99)
    assert equal(reused, make_partition(stream, "dirichlet:0.3", 3, seed=4))


@pytest.mark.parametrize(
    ("stream", "clients", "complaint"),
    [
        (toy_stream(name="other"), 3, "another data set"),
        (toy_stream(order=(0, 1, 2, 3)), 3, "another class order"),
        (toy_stream(tasks=4), 3, "another number of tasks"),
        (toy_stream(), 4, "another number of clients"),
        (toy_stream(train_index=2 * np.arange(48)), 3, "names images that task 1 of this run does not have"),
    ],
)
def test_reuse_refuses_other_data(saved: Path, stream: Stream, clients: int, complaint: str) -> None:
    with pytest.raises(FczooError, match=complaint):
        make_partition(stream, f"file:{saved}", clients)


def test_reuse_refuses_a_task_without_images(tmp_path: Path) -> None:
    stream, nothing = toy_stream(), np.array([], np.int64)
    first = stream.train_index[stream.positions(stream.train, stream.tasks[0])]
    Partition("toy", "by hand", 0, stream.class_order, ((first, nothing), (nothing, nothing))).save(tmp_path / "p.json")
    with pytest.raises(FczooError, match="gives nobody an image of task 2"):
        make_partition(stream, f"file:{tmp_path / 'p.json'}", 2)


def test_hash_tells_every_part_apart() -> None:
    tasks = ((np.array([0, 1]), np.array([2])),)
    base = Partition("toy", "iid", 0, (0, 1), tasks)
    others = [
        Partition("toys", "iid", 0, (0, 1), tasks),
        Partition("toy", "iid:", 0, (0, 1), tasks),
        Partition("toy", "iid", 1, (0, 1), tasks),
        Partition("toy", "iid", 0, (1, 0), tasks),
        Partition("toy", "iid", 0, (0, 1), ((np.array([0]), np.array([1, 2])),)),
        Partition("toy", "iid", 0, (0, 1), ((np.array([0, 1]), np.array([3])),)),
    ]
    assert len({p.sha256 for p in [base, *others]}) == 7
    assert Partition("toy", "iid", 0, (0, 1), ((np.array([0, 1]), np.array([2])),)).sha256 == base.sha256


def edited(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def test_edits_are_noticed(saved: Path) -> None:
    content = json.loads(saved.read_text())
    moved = [[[*task[0][1:]], [task[0][0], *task[1]], task[2]] for task in content["tasks"]]
    for change in ({"tasks": moved}, {"seed": 5}, {"spec": "iid"}, {"dataset": "other"}, {"class_order": [0, 1, 2, 3]}, {"sha256": "0" * 64}):
        saved.write_text(json.dumps(content))
        load_partition(saved)
        edited(saved, **change)
        with pytest.raises(FczooError, match="does not match its sha256"):
            load_partition(saved)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "12",
        '"text"',
        "not json",
        "\x00",
        "[" * 100_000,
        '{"format": "fczoo-partition-0"}',
        '{"format": "fczoo-partition-1"}',
        '{"format": "fczoo-partition-1", "tasks": []}',
        '{"format": "fczoo-partition-1", "tasks": [[]]}',
        '{"format": "fczoo-partition-1", "tasks": {"a": 1}}',
        '{"format": "fczoo-partition-1", "tasks": [[[0]], [[1], [2]]]}',
        '{"format": "fczoo-partition-1", "tasks": [[["a"]]]}',
        '{"format": "fczoo-partition-1", "tasks": [[[null]]]}',
        '{"format": "fczoo-partition-1", "tasks": [[[[0], [1, 2]]]]}',
        '{"format": "fczoo-partition-1", "tasks": [[[99999999999999999999999]]]}',
        '{"format": "fczoo-partition-1", "tasks": [[[0]]], "dataset": "toy", "spec": "iid", "seed": Infinity, "class_order": []}',
        '{"format": "fczoo-partition-1", "tasks": [[[0]]], "dataset": "toy", "spec": "iid", "seed": null, "class_order": []}',
        '{"format": "fczoo-partition-1", "tasks": [[[0]]], "dataset": "toy", "spec": "iid", "seed": 0, "class_order": null}',
        '{"format": "fczoo-partition-1", "tasks": [[[0]]], "dataset": "toy", "spec": "iid", "seed": 0, "class_order": ["a"]}',
    ],
    ids=lambda text: text[:60],
)
def test_malformed_files(saved: Path, text: str) -> None:
    saved.write_text(text)
    with pytest.raises(FczooError, match="is no valid partition file"):
        load_partition(saved)


def test_a_folder_is_no_partition(tmp_path: Path) -> None:
    with pytest.raises(FczooError, match="is no valid partition file"):
        load_partition(tmp_path)
    with pytest.raises(FczooError, match="no partition file"):
        load_partition(tmp_path / "missing.json")


def test_bytes_that_are_no_text(saved: Path) -> None:
    saved.write_bytes(b"\xff\xfe" + saved.read_bytes())
    with pytest.raises(FczooError, match="is no valid partition file"):
        load_partition(saved)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files(saved: Path, data: st.DataObject) -> None:
    """Bytes cut off, changed, put in or taken out: an error for the user, or the very same partition."""
    original = make_partition(toy_stream(), "dirichlet:0.3", 3, seed=4)
    original.save(saved)
    content = bytearray(saved.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        match data.draw(st.sampled_from(["cut", "change", "insert", "delete"])):
            case "cut":
                del content[at:]
            case "change":
                content[at : at + 1] = data.draw(
                    st.binary(min_size=1, max_size=2) | st.sampled_from([b"0", b"9", b",", b"[", b"]", b"-", b".", b'"'])
                )
            case "insert":
                content[at:at] = data.draw(st.binary(min_size=1, max_size=4) | st.sampled_from([b"0", b"1e99", b"[", b"]", b"null,", b"NaN,", b"{}"]))
            case "delete":
                del content[at : at + data.draw(st.integers(1, 8))]
    saved.write_bytes(content)
    try:
        loaded = load_partition(saved)
    except FczooError:
        return
    assert equal(loaded, original)
