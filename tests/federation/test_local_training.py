"""``--local``: rules of local training of any method."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fczoo import Benchmark, FczooError, Method, Optim, Settings, Training, create_method
from fczoo.core.payload import Payload
from fczoo.core.registry import AGGREGATORS, LOCAL_TRAINING
from fczoo.core.tree import nbytes, select
from fczoo.core.types import Context, Exchange, Task
from fczoo.data.dataset import Images
from fczoo.data.views import Augment, ImageStore
from fczoo.federation.batches import Client
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.device import Plan
from fczoo.federation.local_rules import CONTROL, ControlVariates, make_local_training
from fczoo.functional.heads import head_logits, linear_head
from fczoo.functional.losses import task_cross_entropy
from fczoo.testing import check_local_training
from helpers_engine import TASK, Toy, run_to_end, same

FOUR = Task(0, 0, 4, 4, 1)


@dataclass(frozen=True)
class Linear(Method):
    """Train a linear head on frozen features by plain gradient descent."""

    name = "linear"

    def training(self):
        return Training({"head.": Optim("sgd", lr=0.3)}, inputs=["query"], averaging="uniform")

    def begin_task(self, state, task, backbone, rng):
        return state or linear_head(task, backbone.dim, rng)

    def loss(self, backbone, train, batch, ctx):
        return task_cross_entropy(head_logits(train, batch.query), batch, ctx.task), {}

    def make_upload(self, train, sums, ctx):
        return dict(train)

    def predict(self, backbone, state, batch, task):
        return head_logits(state, batch.query)[:, : task.stop]


@pytest.mark.parametrize("spec", LOCAL_TRAINING.names())
def test_every_local_rule_passes_check(spec):
    check_local_training(spec)


# --- by hand: the loss (w - y)^2 at rate 0.1, two steps per round


def train_rounds(
    backbone, controls: ControlVariates, number: int, together: int = 1
) -> list[list[Payload]]:
    """Return the payloads of the rounds of two clients with one image each, labelled 1 and 3."""
    store = ImageStore(Images(np.zeros((2, 16, 16, 3), np.uint8), np.array([1, 3])), backbone)
    store.query = lambda index: torch.tensor([[1.0, 0.0]] * 2, dtype=torch.float64)[index]
    plan = Plan(2, 1, Augment(), seed=0, together=together)
    engine = ClientEngine(Toy(), backbone, store, plan, controls=controls)
    clients = [Client(k, torch.tensor([k])) for k in range(2)]
    state, payloads = {"w": torch.zeros(2, dtype=torch.float64)}, []
    for r in range(number):
        payloads.append(engine.train(state, clients, Context(FOUR, r, number, state)))
        controls.update_server_tree(payloads[-1], state, 2, AGGREGATORS.get("uniform"))
        state = {"w": sum(p["w"] for p in payloads[-1]) / 2}
        state = controls.rule.correct_merged(state, controls.server)
    return payloads


def test_fedprox_by_hand(backbone):
    """Compare the steps of FedProx with values worked out by hand.

    Steps of the first client: 0 - 0.1 (-2) = 0.2; 0.2 - 0.1 (2 (0.2 - 1) + 5 (0.2 - 0)) = 0.26.
    """
    (payloads,) = train_rounds(backbone, ControlVariates(make_local_training("fedprox:5")), 1)
    assert payloads[0]["w"].tolist() == pytest.approx([0.26, 0])
    assert payloads[0].keys() == {"w", "seen", "labels"}


@pytest.mark.parametrize("together", [1, 2])
def test_scaffold_by_hand(backbone, together):
    """Compare the steps of SCAFFOLD with values worked out by hand.

    Round 1: gradients -2, -1.6 and -6, -4.8, so c_i = -1.8 and -5.4, c = -3.6, x = (0.36 + 1.08) /
    2.

    Round 2 of the first client, which adds c - c_i = -1.8: 0.72 - 0.1 (-0.56 - 1.8) = 0.956, then
    0.956 - 0.1 (-0.088 - 1.8) = 1.1448; c_i = -1.8 + 3.6 + (0.72 - 1.1448) / (2 0.1) = -0.324.
    """
    controls = ControlVariates(make_local_training("scaffold"))
    first, second = train_rounds(backbone, controls, 2, together)
    assert [p["w"][0].item() for p in first] == pytest.approx([0.36, 1.08])
    assert [p[f"{CONTROL}w"][0].item() for p in first] == pytest.approx([-1.8, -5.4])
    assert second[0]["w"][0].item() == pytest.approx(1.1448)
    assert controls.clients[0]["w"][0].item() == pytest.approx(-0.324)
    assert second[0][f"{CONTROL}w"][0].item() == pytest.approx(-0.324 + 1.8)
    assert torch.allclose(
        controls.server["w"], (controls.clients[0]["w"] + controls.clients[1]["w"]) / 2
    )


@pytest.mark.parametrize("together", [1, 2])
def test_feddyn_by_hand(backbone, together):
    """Compare the steps of FedDyn with values worked out by hand.

    Round 1, alpha 0.5: 0.2 and 0.2 - 0.1 (-1.6 + 0.1) = 0.35; 0.6 and 0.6 - 0.1 (-4.8 + 0.3) =
    1.05. h_k = -0.5 y = -0.175 and -0.525, h = -0.35, and the model is 0.7 + 0.35 / 0.5 = 1.4.

    Round 2 of the first client, whose gradient gets 0.175 + 0.5 (y - 1.4): 1.4 - 0.1 (0.8 + 0.175)
    = 1.3025, then 1.3025 - 0.1 (0.605 + 0.175 - 0.04875) = 1.229375.
    """
    controls = ControlVariates(make_local_training("feddyn:0.5"))
    first, second = train_rounds(backbone, controls, 2, together)
    assert [p["w"][0].item() for p in first] == pytest.approx([0.35, 1.05])
    assert second[0]["w"][0].item() == pytest.approx(1.229375)
    assert second[0].keys() == {"w", "seen", "labels"}
    assert controls.clients[0]["w"][0].item() == pytest.approx(-0.175 - 0.5 * (1.229375 - 1.4))
    assert torch.allclose(
        controls.server["w"], (controls.clients[0]["w"] + controls.clients[1]["w"]) / 2
    )
    assert not controls.broadcast and not controls.shared


# --- compared with methods


@pytest.mark.parametrize("participation", [1.0, 2.0])
def test_scaffold_matches_tutorial_method(make_bench, scaffold, participation):
    ours = run_to_end(make_bench(local="scaffold", participation=participation), Linear())
    theirs = run_to_end(make_bench(participation=participation), scaffold)
    assert same(ours.state, select(theirs.state, "head."), 1e-11)


def test_fedprox_matches_proximal_loss(make_bench):
    class ProximalLinear(Linear):
        def loss(self, backbone, train, batch, ctx):
            loss, sums = super().loss(backbone, train, batch, ctx)
            return loss + 0.35 * sum((train[k] - ctx.shared[k]).square().sum() for k in train), sums

    ours, theirs = (
        run_to_end(make_bench(local="fedprox:0.7"), Linear()),
        run_to_end(make_bench(), ProximalLinear()),
    )
    assert same(ours.state, theirs.state, 1e-11)


@pytest.mark.parametrize("name", ["fedavg", "l2p", "lorm", "podnet"])
def test_fedprox_with_weight_zero_matches_plain_run(make_bench, small_method, name):
    """Change nothing with weight 0.

    Methods train whole weights, prompts with clipped gradients, factors one after another, or a
    round only on exemplars.
    """
    method, once = small_method(name), {"epochs": 1, "rounds": 1}
    specs = None, "fedprox:0", "fedprox:5"
    plain, zero, proximal = (run_to_end(make_bench(local=spec, **once), method) for spec in specs)
    assert same(zero.state, plain.state) and not same(proximal.state, plain.state)


def test_scaffold_with_one_client_matches_plain_run():
    small = {"train_per_class": 8, "test_per_class": 2, "tasks": 2, "clients": 1, "epochs": 1}
    method = create_method("fedavg", tune="head")  # Adam
    plain, ours = (
        run_to_end(Benchmark.open(Settings.for_dataset("digits", local=local, **small)), method)
        for local in (None, "scaffold")
    )
    assert same(ours.state, plain.state)
    assert ours.result.accuracy == plain.result.accuracy
    assert "plain gradient descent, but clients train with adam" in ours.result.remark
    assert not plain.result.remark


# --- with other parts of a run


@pytest.mark.parametrize(("name", "together"), [("glfc", 1), ("lorm", 3), ("podnet", 3)])
def test_scaffold_trains_any_method(make_bench, small_method, name, together):
    """Train any method with SCAFFOLD.

    The methods have memories, factors trained one after another, and a round only on exemplars.
    """
    options = {"proxy": "last", "tune": "head"} if name == "glfc" else {}
    run = run_to_end(
        make_bench(local="scaffold", epochs=1, together=together), small_method(name, **options)
    )
    assert not run.result.rejected and run.server.controls.server
    for variate, value in run.server.controls.server.items():
        mean = (
            sum(t.get(variate, torch.zeros(())) for t in run.server.controls.clients.values()) / 3
        )
        torch.testing.assert_close(value, mean, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("saved", [1, 2, 3])
def test_killed_run_resumes_with_control_variates(make_bench, tmp_path, saved):
    saves: list[int] = []

    class SimulatedKill(Exception):
        pass

    def kill() -> None:
        saves.append(1)
        if len(saves) == saved:
            raise SimulatedKill

    bench, path = make_bench(local="scaffold", participation=2, rounds=3), tmp_path / "checkpoint"
    with pytest.raises(SimulatedKill):
        run_to_end(bench, Linear(), Checkpoint(path, kill))
    reference, continuation = (
        run_to_end(bench, Linear()),
        run_to_end(bench, Linear(), Checkpoint(path)),
    )
    assert same(continuation.state, reference.state)
    assert same(continuation.server.controls.server, reference.server.controls.server)
    assert all(
        same(v, reference.server.controls.clients[k])
        for k, v in continuation.server.controls.clients.items()
    )
    assert continuation.result.bytes_down == reference.result.bytes_down


def test_bytes_of_control_variates_are_counted(make_bench):
    """Count the bytes of control variates.

    Uploads have as many as trained tensors. Broadcasts have them from the second round of a task,
    when they are not zero.
    """
    plain, ours = (
        run_to_end(make_bench(), Linear()),
        run_to_end(make_bench(local="scaffold"), Linear()),
    )
    size, uploads = nbytes(plain.state), plain.result.client_rounds
    assert ours.result.bytes_up - plain.result.bytes_up == size * uploads
    second = sum(len(plain.scenario.clients(task)) for task in plain.stream.tasks)
    assert ours.result.bytes_down - plain.result.bytes_down == size * second
    assert ours.result.client_storage == plain.result.client_storage + 2 * size


def test_hostile_clients_forge_control_variates(make_bench, watch):
    bench = make_bench(local="scaffold", attack="sign-flip:2", attackers=0.34, rounds=1)
    uplink = bench.uplink(Linear(), 0)
    (hostile,) = uplink.attackers.numbers
    change = {"head.weight": torch.ones(2), f"{CONTROL}head.weight": torch.ones(2)}
    broadcast = {"head.weight": torch.zeros(2)}
    (forgery,) = uplink.send([Payload(change, hostile)], broadcast, Exchange(TASK, 0))
    assert forgery["head.weight"].tolist() == forgery[f"{CONTROL}head.weight"].tolist() == [-2, -2]


def test_invalid_control_variates_are_rejected(make_bench):
    uplink, bench = make_bench(local="scaffold").uplink(Linear(), 0), make_bench()
    head = {"head.weight": torch.zeros(2, 3)}
    valid = {**head, f"{CONTROL}head.weight": torch.zeros(2, 3)}
    invalid = [
        {**valid, f"{CONTROL}head.weight": t}
        for t in (torch.zeros(3), torch.full((2, 3), torch.nan))
    ]
    trees = [valid, valid, valid, *invalid, head]
    payloads = [Payload(tree, k) for k, tree in enumerate(trees)]
    clients = [Client(k, torch.arange(1)) for k in range(len(trees))]
    arrival = uplink.arrive(payloads, clients, head, Exchange(bench.stream.tasks[0], 0))
    assert [p.client for p in arrival.payloads] == [0, 1, 2]
    assert [r["reason"].split()[0] for r in arrival.rejected] == [f"{CONTROL}head.weight"] * 2 + [
        "lacks"
    ]


def test_robust_aggregator_merges_control_variates():
    controls = ControlVariates(make_local_training("scaffold"))
    values = [1.0, 2.0, 900.0]
    payloads = [Payload({f"{CONTROL}w": torch.tensor([v])}, k, 10**k) for k, v in enumerate(values)]
    controls.update_server_tree(payloads, {}, 6, AGGREGATORS.get("median"))
    assert controls.server["w"].item() == pytest.approx(3 / 6 * 2.0)
    controls.clear()
    controls.update_server_tree(
        payloads, {}, 6, AGGREGATORS.get("fedavg")
    )  # each client counts as one
    assert controls.server["w"].item() == pytest.approx(3 / 6 * 301.0)


@pytest.mark.parametrize(
    ("method", "settings", "says"),
    [
        ("fedncm", {"local": "moon"}, "applies to trained tensors"),
        ("fedavg", {"local": "moon"}, "those of fedavg are frozen"),
        ("lorm", {"local": "feddyn"}, "lorm does not average them"),
        (
            "fedavg",
            {"local": "feddyn", "server_optimizer": "fedadam"},
            "both correct the averaged model",
        ),
        ("fedavg", {"local": "fednova", "dp_clip": 1.0}, "uploads numbers of steps"),
        (
            "fedavg",
            {"local": "scaffold", "dp_clip": 1.0},
            "local scaffold also uploads control variates",
        ),
        ("fedncm", {"local": "fedprox:0.1"}, "trained tensors, but fedncm trains none"),
        ("fedavg", {"local": "fedprux"}, "no local training is called 'fedprux'"),
        ("fedavg", {"local": "fedprox:-1"}, "mu"),
    ],
)
def test_unsupported_settings_are_rejected(make_bench, method, settings, says):
    with pytest.raises(FczooError, match=says):
        options = {"tune": "head"} if method == "fedavg" else {}
        make_bench(**settings).check(create_method(method, **options))


def test_fedprox_supports_privacy(make_bench):
    make_bench(local="fedprox:0.1", dp_clip=1.0).check(create_method("fedavg"))
