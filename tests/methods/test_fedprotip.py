"""FedProTIP: steps orthogonal to the bases, and inference of an image's task."""

import pytest
import torch

from fczoo import Task, create_method
from fczoo.baselines.fedprotip import energy_per_task, project_change
from fczoo.core.tree import select
from helpers_methods import CLOSE, batch
from helpers_payload import server_context


def test_client_gradient_projection_by_hand() -> None:
    """Remove the part along the basis, the first axis, from gradients and steps."""
    broadcast = {"full.x.weight": torch.ones(1, 2), "basis.x": torch.tensor([[1.0], [0.0]])}
    weight = torch.ones(1, 2, requires_grad=True)
    tree = project_change({"full.x.weight": weight, "head.bias": torch.zeros(1)}, broadcast)
    (gradient,) = torch.autograd.grad(
        (tree["full.x.weight"] * torch.tensor([[3.0, 5.0]])).sum(), weight
    )
    assert gradient.tolist() == [[0.0, 5.0]] and "head.bias" in tree
    projection = project_change({"full.x.weight": torch.tensor([[9.0, 4.0]])}, broadcast)
    assert projection["full.x.weight"].tolist() == [[1.0, 4.0]]


def test_energy_per_task_by_hand() -> None:
    """Compare energy shares of a feature with values worked out by hand, at any scale.

    (3, 0, 4): the first task's axis holds 9/25, the second task's two axes 16/25.
    """
    feature, tasks = torch.tensor([[3.0, 0.0, 4.0]]), torch.tensor([0, 1, 1])
    space = torch.eye(3, dtype=torch.float64)
    for scale in (1.0, 7.0):
        parts = energy_per_task(scale * feature, space, tasks, 2)
        torch.testing.assert_close(parts, torch.tensor([[9 / 25, 16 / 25]]))


@pytest.mark.parametrize("identity", ["hard", "soft", "off"])
def test_prediction_uses_inferred_task(identity) -> None:
    """Predict an image in the second task's space whose logits favour the first task."""
    method, task = create_method("fedprotip", identity=identity), Task(1, 2, 4, 4, 2)
    state = {
        "space": torch.eye(2),
        "space_task": torch.tensor([0, 1]),
        "owner": torch.tensor([0, 0, 1, 1]),
    }
    state |= {"head.weight": torch.zeros(4, 2), "head.bias": torch.tensor([0.5, 0.0, 0.0, 0.1])}

    def backbone(images, plugs):
        return images

    logits = method.predict(backbone, state, batch(torch.tensor([[0.0, 2.0]]), [3]), task)
    assert logits.argmax(1).tolist() == [{"hard": 3, "soft": 3, "off": 0}[identity]]
    assert logits.isfinite().all()
    if identity == "soft":
        torch.testing.assert_close(logits[0, 3] - logits[0, 0], torch.tensor(1.0 + 0.1 - 0.5))


def test_client_changes_are_orthogonal_to_old_inputs(record) -> None:
    run = record("fedprotip")
    old_state, largest_change = run.states[0], 0.0
    for call in (c for c in run.rounds if c.ctx.task.index == 1):
        for payload in call.payloads:
            for name, basis in select(old_state, "basis.").items():
                weight = f"full.{name.removeprefix('basis.')}.weight"
                change = payload[weight] - call.state[weight]
                assert (change @ basis).abs().max() < 1e-10
                largest_change = max(largest_change, float(change.abs().max()))
    assert largest_change > 1e-6


def test_each_task_adds_orthonormal_directions(record) -> None:
    run = record("fedprotip")
    space, tasks = run.states[2]["space"], run.states[2]["space_task"]
    assert torch.bincount(tasks).tolist() == [run.method.directions] * 3
    torch.testing.assert_close(space.mT @ space, torch.eye(space.shape[1]).to(space), **CLOSE)
    assert run.states[2]["owner"].tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_directions_per_task_are_limited_by_width(noise) -> None:
    """Use two directions for each of three tasks in seven dimensions instead of twenty."""
    method, x = create_method("fedprotip"), noise(9, 7)
    state = {"space": torch.zeros(7, 0), "space_task": torch.empty(0, dtype=torch.int64)}
    state["owner"] = torch.tensor([0, 0])
    gram = x.mT @ x
    i, j = torch.triu_indices(7, 7)
    new_state = method.update_from(
        "task_end", state, {"gram.space": gram[i, j]}, server_context(Task(0, 0, 2, 6, 3))
    )
    assert new_state["space"].shape == (7, 2)
    assert new_state["space_task"].tolist() == [0, 0]


def test_first_task_equals_uniform_fedavg(make_bench, watch) -> None:
    options = {"rounds": 1, "epochs": 1}
    ours = watch(make_bench(**options), create_method("fedprotip")).rounds[1].state
    plain = (
        watch(make_bench(aggregator="uniform", **options), create_method("fedavg")).rounds[1].state
    )
    for name, value in select(plain, "full.", "head.").items():
        assert torch.equal(ours[name], value)
