"""Participation and data of clients over time, and rounds without data."""

from collections.abc import Sequence
from typing import Any

import pytest

from fczoo import Benchmark, FczooError, Settings, create_method
from fczoo.data.client_index import ClientGrowth
from fczoo.federation.callbacks import Callback

SMALL = {
    "train_per_class": 8,
    "test_per_class": 2,
    "epochs": 1,
    "partition": "overlap:0.6",
    "rounds": 6,
}


class Rounds(Callback):
    """Keep every round's record."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def round(self, record: dict[str, Any]) -> None:
        self.records.append(record)


def rounds(**settings: Any) -> tuple[Benchmark, list[dict[str, Any]]]:
    """Return a bench of a head on frozen features, and the records of its rounds."""
    bench, callback = (
        Benchmark.open(Settings.for_dataset("digits", **{**SMALL, **settings})),
        Rounds(),
    )
    bench.run(create_method("fedavg", tune="head"), callback=callback)
    return bench, callback.records


def participants_by_round(records: Sequence[dict[str, Any]], task: int) -> list[tuple[int, ...]]:
    return [tuple(r["clients"]) for r in records if r["task"] == task]


def test_participants_are_drawn_per_round() -> None:
    _, records = rounds(clients=20, participation=0.1)
    for task in range(5):
        assert all(len(c) == 2 for c in participants_by_round(records, task))
        assert len(set(participants_by_round(records, task))) > 1


def test_participation_draws_fixed_number() -> None:
    _, records = rounds(clients=8, participation=3)
    assert {len(c) for t in range(5) for c in participants_by_round(records, t)} == {3}


def test_participants_are_drawn_per_task() -> None:
    _, records = rounds(clients=20, participation=0.1, client_draw="task")
    chosen = [set(participants_by_round(records, t)) for t in range(5)]
    assert all(len(c) == 1 for c in chosen) and len(set.union(*chosen)) > 1


def test_only_clients_with_data_are_drawn() -> None:
    """Draw fewer clients than requested if fewer have data.

    Two of five clients get data of a later task; three are requested.
    """
    bench, records = rounds(clients=5, transition=0.4, participation=3)
    for task in range(1, 5):
        receivers = ClientGrowth(5, 0, 0.4).receivers(task, 0).tolist()
        assert [c.number for c in bench.clients(bench.stream.tasks[task])] == receivers
        assert len(receivers) == 2
        assert set(participants_by_round(records, task)) == {tuple(receivers)}
    assert {len(c) for c in participants_by_round(records, 0)} == {3}


def test_latest_scope_uses_last_received_images() -> None:
    """Use the images of the last task that gave a client any."""
    bench, _ = rounds(clients=5, transition=0.4, rounds=1)
    partition_tasks = bench.partition.tasks
    for task in bench.stream.tasks:
        last = [
            max(t for t in range(task.index + 1) if len(partition_tasks[t][k])) for k in range(5)
        ]
        clients = bench.clients(task, "latest")
        assert [c.number for c in clients] == [0, 1, 2, 3, 4]
        assert [bench.stream.train_index[c.index].tolist() for c in clients] == [
            partition_tasks[t][k].tolist() for k, t in enumerate(last)
        ]


def test_growing_population_by_hand() -> None:
    """Compare a growing population with values worked out by hand.

    6 clients, 2 more per task; half of the earlier ones get new data: 6, 3 + 2, 4 + 2, 5 + 2, 6 + 2
    of 6, 8, 10, 12, 14.
    """
    bench, records = rounds(
        clients=6, joining=2, transition=0.5, participation=4, draw_among="joined", rounds=8
    )
    assert bench.partition.counts().astype(bool).sum(1).tolist() == [6, 5, 6, 7, 8]
    assert [len(bench.clients(t, idle=True)) for t in bench.stream.tasks] == [6, 8, 10, 12, 14]
    for task in bench.stream.tasks:
        holders = {c.number for c in bench.clients(task)}
        participants = participants_by_round(records, task.index)
        assert all(set(c) <= holders and len(c) <= 4 for c in participants)
        assert (
            {len(c) for c in participants} == {4}
            if task.index == 0
            else len({len(c) for c in participants}) > 1
        )


def test_clients_without_data_receive_but_send_nothing() -> None:
    """Count bytes down of all drawn clients, and bytes up of those with data.

    At the first round of a task no client has its broadcast.
    """
    _, records = rounds(
        clients=6, joining=2, transition=0.5, participation=4, draw_among="joined", rounds=8
    )
    up, down = (
        {r["bytes_" + way] / 4 for r in records if r["task"] == 0 and len(r["clients"]) == 4}
        for way in ("up", "down")
    )
    assert len(up) == 1
    assert all(r["bytes_up"] == len(r["clients"]) * max(up) for r in records)
    assert records[0]["bytes_down"] == max(down) * 4
    later = next(r for r in records if r["task"] and len(r["clients"]) < 4)
    assert later["bytes_down"] > len(later["clients"]) * max(down)


def test_round_without_data_has_no_uploads() -> None:
    """Skip training and uploads if no drawn client has data.

    One of five clients has data of a later task, and one is drawn.
    """
    _, records = rounds(clients=5, transition=0.2, participation=0.2, draw_among="joined")
    empty = [r for r in records if not r["clients"]]
    assert empty
    assert all(r["loss"] is None and r["bytes_up"] == 0 and r["task"] for r in empty)
    assert any(r["bytes_down"] for r in empty)
    assert not all(r["bytes_down"] for r in empty)  # a model is not sent twice
    assert any(r["clients"] for r in records if r["task"])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"participation": 0}, "no client would train"),
        ({"participation": 2.5}, "a share up to 1 or a whole number"),
        ({"participation": 6}, "more than the 5 clients at the start"),
        ({"transition": 1.1}, "transition"),
        ({"joining": -1}, "joining"),
        ({"client_draw": "often"}, "round | task"),
        ({"draw_among": "all"}, "data | joined"),
        ({"transition": 0.1}, "no client gets data of task 2"),
    ],
)
def test_invalid_client_settings_are_rejected(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(FczooError, match=complaint.replace("|", r"\|")):
        Benchmark.open(Settings.for_dataset("digits", clients=5, partition="iid", **changes))


def test_former_callback_argument_warns() -> None:
    bench, callback = Benchmark.open(Settings.for_dataset("digits", **SMALL, tasks=2)), Rounds()
    with pytest.warns(DeprecationWarning, match="observer is now callback") as warned:
        bench.run(create_method("fedavg", tune="head"), observer=callback)
    assert callback.records and warned[0].filename == __file__
