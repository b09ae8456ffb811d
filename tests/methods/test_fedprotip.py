"""FedProTIP: steps outside the bases, and the task of an image by the space that holds its feature."""

import pytest
import torch
from fczoo.baselines.fedprotip import held_parts, projected

from fczoo import Task, create_method
from fczoo.core.tree import select
from helpers_methods import CLOSE, batch
from helpers_payload import server_context


def test_the_gradient_of_a_client_is_projected_by_hand() -> None:
    """The basis is the first axis: gradients along it are taken out, and so is a step along it."""
    shared = {"full.x.weight": torch.ones(1, 2), "basis.x": torch.tensor([[1.0], [0.0]])}
    weight = torch.ones(1, 2, requires_grad=True)
    tree = projected({"full.x.weight": weight, "head.bias": torch.zeros(1)}, shared)
    (gradient,) = torch.autograd.grad((tree["full.x.weight"] * torch.tensor([[3.0, 5.0]])).sum(), weight)
    assert gradient.tolist() == [[0.0, 5.0]] and "head.bias" in tree
    moved = projected({"full.x.weight": torch.tensor([[9.0, 4.0]])}, shared)
    assert moved["full.x.weight"].tolist() == [[1.0, 4.0]]


def test_parts_of_a_feature_by_hand() -> None:
    """(3, 0, 4): the first task's axis holds 9/25, the second's two 16/25; the scale is nothing."""
    feature, tasks = torch.tensor([[3.0, 0.0, 4.0]]), torch.tensor([0, 1, 1])
    space = torch.eye(3, dtype=torch.float64)
    for scale in (1.0, 7.0):
        found = held_parts(scale * feature, space, tasks, 2)
        torch.testing.assert_close(found, torch.tensor([[9 / 25, 16 / 25]]))


@pytest.mark.parametrize("identity", ["hard", "soft", "off"])
def test_answers_by_the_task_of_each_image(identity) -> None:
    """An image of the second task's space, whose logits favour the first task."""
    method, task = create_method("fedprotip", identity=identity), Task(1, 2, 4, 4, 2)
    state = {"space": torch.eye(2), "space_task": torch.tensor([0, 1]), "owner": torch.tensor([0, 0, 1, 1])}
    state |= {"head.weight": torch.zeros(4, 2), "head.bias": torch.tensor([0.5, 0.0, 0.0, 0.1])}

    def backbone(images, plugs):
        return images

    logits = method.predict(backbone, state, batch(torch.tensor([[0.0, 2.0]]), [3]), task)
    assert logits.argmax(1).tolist() == [{"hard": 3, "soft": 3, "off": 0}[identity]]
    assert logits.isfinite().all()
    if identity == "soft":
        torch.testing.assert_close(logits[0, 3] - logits[0, 0], torch.tensor(1.0 + 0.1 - 0.5))


def test_later_tasks_leave_old_inputs_alone_at_every_client(record) -> None:
    run = record("fedprotip")
    before, moved = run.states[0], 0.0
    for call in (c for c in run.rounds if c.ctx.task.index == 1):
        for payload in call.payloads:
            for name, basis in select(before, "basis.").items():
                weight = f"full.{name.removeprefix('basis.')}.weight"
                change = payload[weight] - call.state[weight]
                assert (change @ basis).abs().max() < 1e-10
                moved = max(moved, float(change.abs().max()))
    assert moved > 1e-6


def test_each_task_keeps_directions_of_its_own(record) -> None:
    run = record("fedprotip")
    space, tasks = run.states[2]["space"], run.states[2]["space_task"]
    assert torch.bincount(tasks).tolist() == [run.method.directions] * 3
    torch.testing.assert_close(space.mT @ space, torch.eye(space.shape[1]).to(space), **CLOSE)
    assert run.states[2]["owner"].tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_directions_shrink_where_they_do_not_fit(noise) -> None:
    """Twenty for each of three tasks in seven dimensions: two for each."""
    method, x = create_method("fedprotip"), noise(9, 7)
    state = {"space": torch.zeros(7, 0), "space_task": torch.empty(0, dtype=torch.int64)}
    state["owner"] = torch.tensor([0, 0])
    gram = x.mT @ x
    i, j = torch.triu_indices(7, 7)
    found = method.absorb("end", state, {"gram.space": gram[i, j]}, server_context(Task(0, 0, 2, 6, 3)))
    assert found["space"].shape == (7, 2) and found["space_task"].tolist() == [0, 0]


def test_the_first_task_is_uniform_fedavg(make_bench, watch) -> None:
    options = {"rounds": 1, "epochs": 1}
    ours = watch(make_bench(**options), create_method("fedprotip")).rounds[1].state
    plain = watch(make_bench(aggregator="uniform", **options), create_method("fedavg")).rounds[1].state
    for name, value in select(plain, "full.", "head.").items():
        assert torch.equal(ours[name], value)
