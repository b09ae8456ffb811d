"""``--client-devices``: seconds of the virtual clock, by hand and in runs."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from fczoo import (
    Batch,
    Context,
    FczooError,
    Method,
    Optim,
    Settings,
    Task,
    Training,
    Tree,
    create_method,
)
from fczoo.core.payload import Payload
from fczoo.federation.batches import Client
from fczoo.federation.callbacks import Callback
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.client_devices import ClientDevices, Device, read_devices
from fczoo.federation.run import FederatedRun
from fczoo.federation.virtual_clock import VirtualClock
from helpers_engine import run_to_end

HEADER = "client,gflops,down_mbps,up_mbps\n"


def client(number: int) -> Client:
    return Client(number, torch.arange(2))


def upload(number: int, floats: int) -> Payload:
    return Payload({"w": torch.zeros(floats)}, number, 2)


def two_devices() -> ClientDevices:
    """Return devices with 2 and 1 GFLOP per second, and links of 8 Mbit, 1 MB per second."""
    return ClientDevices("two", (Device(2, 8, 8), Device(1, 8, 4)), (0, 1), True, 0)


def clock(backbone, devices=None, **settings) -> VirtualClock:
    return VirtualClock(Settings(**settings), devices or two_devices(), backbone)


# 1 MB down and 0.5 MB up, 4 and 3 GFLOP: client 0 takes 1 + 2 + 0.5, client 1 takes 1 + 3 + 1
WORK, DOWN = {0: 4e9, 1: 3e9}, {0: 10**6, 1: 10**6}
UPLOADS = [upload(0, 125_000), upload(1, 125_000)]


@pytest.mark.parametrize(
    ("settings", "needed", "senders", "sampled", "late", "seconds"),
    [
        ({}, 2, [0, 1], [0, 1], [], 5.0),
        ({"deadline": 5}, 2, [0, 1], [0, 1], [], 5.0),
        ({"deadline": 4}, 2, [0], [0, 1], [1], 4.0),  # the server waits until the deadline
        ({"deadline": 3}, 2, [], [0, 1], [0, 1], 3.0),
        ({"over_select": 2}, 1, [0], [0], [], 3.5),  # the first one is enough
        ({"over_select": 2, "deadline": 4}, 1, [0], [0, 1], [1], 3.5),
    ],
)
def test_round_by_hand(backbone, settings, needed, senders, sampled, late, seconds):
    end = clock(backbone, **settings).close_round(
        WORK, DOWN, UPLOADS, [client(0), client(1)], needed
    )
    assert [u.client for u in end.uploads] == senders
    assert [c.number for c in end.sampled] == sampled
    assert list(end.late) == late
    assert end.seconds == pytest.approx(seconds)


def test_server_waits_for_dropped_client_until_deadline(backbone):
    only = {0: WORK[0]}
    for settings, seconds in (({}, 3.5), ({"deadline": 60}, 60)):
        end = clock(backbone, **settings).close_round(
            only, DOWN, UPLOADS[:1], [client(0), client(1)], 2
        )
        assert end.seconds == pytest.approx(seconds)


def test_clock_without_devices_stays_at_zero(backbone):
    still = VirtualClock(Settings(), None, backbone)
    end = still.close_round({}, DOWN, UPLOADS, [client(0)], 1)
    assert end.uploads is not UPLOADS and end.uploads == UPLOADS
    assert end.seconds == 0 and not end.late


def test_devices_are_drawn_by_share():
    devices = ClientDevices("t", (Device(1, 1, 1), Device(2, 1, 1)), (1, 3), False, 0)
    fast = np.mean([devices.device_of(k).gflops == 2 for k in range(1000)])
    assert 0.7 < fast < 0.8
    assert devices.device_of(7) == devices.device_of(7)


def test_availability_is_drawn_per_round():
    devices = ClientDevices("t", (Device(1, 1, 1, 0.25),), (1,), False, 0)
    clients = [client(k) for k in range(400)]
    rounds = [[c.number for c in devices.available_clients(clients, 0, 0, r)] for r in range(2)]
    assert rounds[0] != rounds[1] and all(70 < len(r) < 130 for r in rounds)
    rare = ClientDevices("t", (Device(1, 1, 1, 1e-9),), (1,), False, 0)
    assert len(rare.available_clients(clients, 0, 0, 0)) == 1  # at least one client


@dataclass(frozen=True)
class Head(Method):
    """A matrix [D, 2] on the query feature: two products of 2 x 2 D operations in a step."""

    name = "head"

    def __post_init__(self) -> None:
        """Skip the check of the options, as this method is not for users."""

    def training(self) -> Training:
        return Training({"w": Optim("sgd", lr=0.1)}, ["query"])

    def begin_task(self, state: Tree, task: Task, backbone, rng) -> Tree:
        return {"w": torch.zeros(backbone.dim, 2, dtype=torch.float64)}

    def loss(self, backbone, train: Tree, batch: Batch, ctx: Context) -> tuple[Tensor, Tree]:
        return batch.mean((batch.query @ train["w"]).sum(1)), {}

    def predict(self, backbone, state: Tree, batch: Batch, task: Task) -> Tensor:
        return batch.query @ state["w"] @ torch.ones(2, task.stop, dtype=torch.float64)


class Rounds(Callback):
    def __init__(self) -> None:
        self.records: list[dict] = []

    def round(self, record) -> None:
        self.records.append(record)


def forward_flops(config) -> int:
    """Count a ViT's products: patches, and per block queries to values, attention, and the MLP.

    The last block computes the class token only.
    """
    d, patches = config.dim, (config.image_size // config.patch_size) ** 2

    def block(rows: int, tokens: int) -> int:
        values, attention = 2 * tokens * d * 3 * d, 2 * 2 * rows * tokens * d
        return values + attention + 2 * rows * d * d + 2 * 2 * rows * d * config.mlp_dim

    blocks = (config.depth - 1) * block(1 + patches, 1 + patches) + block(1, 1 + patches)
    return 2 * patches * 3 * config.patch_size**2 * d + blocks


@pytest.mark.parametrize("together", [1, 3])
def test_seconds_of_run_by_hand(make_bench, tmp_path, together):
    table = tmp_path / "devices.csv"
    table.write_text(HEADER + "0,1e-3,1,1\n1,2e-3,1,1\n2,4e-3,1,1\n")
    bench = make_bench(client_devices=str(table), rounds=1, epochs=2, together=together)
    rounds = Rounds()
    run = FederatedRun(bench, Head(), 0, rounds, None, None)
    next(iter(run))
    d = bench.backbone.dim
    per_image = forward_flops(bench.backbone.config) + 2 * (2 * 2 * d * 2)  # of two epochs
    size = d * 2 * 8  # bytes of w in float64, down and up
    images = {c.number: len(c.index) for c in bench.clients(bench.stream.tasks[0])}
    seconds = [2 * 8 * size / 1e6 + per_image * images[k] / (1e6 * 2**k) for k in sorted(images)]
    assert rounds.records[0]["virtual_seconds"] == pytest.approx(max(seconds), rel=1e-12)
    assert run.result.curve_seconds == [run.result.virtual_seconds]


@pytest.mark.parametrize("method", ["fedavg", "fedcof"])
def test_deadline_rejects_late_clients_only_in_rounds(make_bench, small_method, tmp_path, method):
    """Reject a slow client in rounds, but wait for its statistics at a task boundary."""
    table = tmp_path / "devices.csv"
    table.write_text(HEADER + "0,1e9,1e9,1e9\n1,1e-9,1e9,1e9\n2,1e9,1e9,1e9\n")
    run = run_to_end(
        make_bench(client_devices=str(table), deadline=10, rounds=1, epochs=1),
        small_method(method),
    )
    late = [r for r in run.result.rejected if r["reason"].startswith("late: ")]
    assert {r["client"] for r in late} <= {1}
    assert bool(late) == (method == "fedavg")
    assert (run.result.virtual_seconds > 1e3) == (method == "fedcof")


def test_clock_without_late_clients_changes_no_number(make_bench, small_method):
    method = small_method("hgp")
    plain, timed = (
        run_to_end(make_bench(client_devices=spec, rounds=1), method)
        for spec in (None, "cross-silo")
    )
    assert plain.result.accuracy == timed.result.accuracy
    assert all(torch.equal(v, timed.state[k]) for k, v in plain.state.items())
    assert not plain.result.curve_seconds and not plain.result.virtual_seconds
    assert timed.result.virtual_seconds > 0


def test_resumed_run_keeps_clock(make_bench, small_method, tmp_path):
    class SimulatedKill(Exception):
        pass

    def kill() -> None:
        raise SimulatedKill

    settings = {"client_devices": "phones", "participation": 1, "over_select": 2}
    bench, path = make_bench(**settings, epochs=1), tmp_path / "checkpoint"
    method = small_method("fedavg", tune="head")
    with pytest.raises(SimulatedKill):
        run_to_end(bench, method, Checkpoint(path, kill))
    uninterrupted, resumed = run_to_end(bench, method), run_to_end(bench, method, Checkpoint(path))
    assert resumed.result.curve_seconds == uninterrupted.result.curve_seconds
    assert resumed.result.accuracy == uninterrupted.result.accuracy
    assert all(torch.equal(v, resumed.state[k]) for k, v in uninterrupted.state.items())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("gflops,down_mbps,share\n1,1,1\n", "has no column up_mbps; columns are"),
        ("gflops,down_mbps,up_mbps\n1,1,1\n", "has no column share"),
        (HEADER + "0,fast,1,1\n", "line 2: .*'fast'; give numbers"),
        (HEADER + "0,1,1\n", "line 2: .*give numbers"),
        (HEADER + "0,1,1,1\n0,1,1,1\n", "client 0 has two rows"),
        (HEADER + "0,0,1,1\n", "line 2: speeds must be above 0"),
        (HEADER + "0.5,1,1,1\n", "line 2: 0.5 is not a valid client"),
        ("share,gflops,down_mbps,up_mbps,watts\n1,1,1,1,1\n", "no column is called 'watts'"),
        ("share,gflops,down_mbps,up_mbps\n0,1,1,1\n", "all shares are 0"),
        (
            "share,gflops,down_mbps,up_mbps,availability\n1,1,1,1,2\n",
            "availability above 0 and at most 1",
        ),
    ],
)
def test_invalid_device_tables_are_rejected(tmp_path, content, says):
    path = tmp_path / "devices.csv"
    path.write_text(content)
    with pytest.raises(FczooError, match=says):
        read_devices(str(path), 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"client_devices": "phnes"}, "no table or CSV file .* 'phnes'; did you mean phones"),
        ({"deadline": 10}, "deadline needs the virtual clock; give client_devices"),
        ({"over_select": 1.3}, "over_select needs the virtual clock"),
        ({"client_devices": "phones", "over_select": 0.5}, "over_select"),
        ({"client_devices": "phones", "over_select": 1.3}, "lower participation"),
        ({"client_devices": "phones", "deadline": 0}, "deadline"),
        (
            {"client_devices": "phones", "dp_subsampling": True, "dp_noise": 1, "dp_clip": 1},
            "dp_subsampling needs the same sampling probability",
        ),
    ],
)
def test_invalid_settings_are_rejected_without_data(changes, says):
    with pytest.raises(FczooError, match=says):
        Settings.for_dataset("digits", **changes).check()


def test_client_without_device_is_rejected_before_run(make_bench, tmp_path):
    table = tmp_path / "devices.csv"
    table.write_text(HEADER + "0,1,1,1\n1,1,1,1\n")
    with pytest.raises(FczooError, match="no row for client 2; add one"):
        make_bench(client_devices=str(table)).check(create_method("fedncm"))


def test_deadline_without_uploads_is_rejected(make_bench):
    with pytest.raises(FczooError, match="deadline applies to uploads"):
        make_bench(client_devices="phones", deadline=10).check(create_method("local"))


def test_bundled_device_tables_are_read():
    for table in ("phones", "cross-silo"):
        assert sum(read_devices(table, 0).keys) > 0
