"""EWC: the Fisher information of all clients, its decay and its penalty."""

import torch
from torch import Tensor

from fczoo import Batch, Context, Tree, create_method
from fczoo.core.seeds import numpy_stream
from fczoo.core.tree import select
from fczoo.federation.batches import Client
from fczoo.federation.server import broadcast
from fczoo.functional.fisher import fisher_sums
from fczoo.testing.method_under_test import record_run
from fczoo.testing.toy_benchmark import small_method, toy_bench
from helpers_methods import CLOSE, batch


def test_fisher_equals_weighted_squares_of_image_gradients(noise, rng):
    """Compare with one backward pass per image."""
    weight, x, y = noise(4, 5), noise(6, 5), torch.randint(0, 4, (6,), generator=rng)

    def log_likelihood(tree: Tree, one: Batch) -> Tensor:
        return (one.x @ tree["w"].T).log_softmax(-1).gather(1, one.y[:, None])[:, 0]

    w = torch.tensor([1.0, 1, 1, 1, 1, 0], dtype=torch.float64)
    fisher = fisher_sums(log_likelihood, {"w": weight}, batch(x, y, w=w))["w"]
    by_hand = torch.zeros_like(weight)
    for i in range(5):
        leaf = weight.clone().requires_grad_()
        score = (leaf @ x[i]).log_softmax(0)[y[i]]
        by_hand += score.exp().detach() * torch.autograd.grad(score, leaf)[0].square()
    torch.testing.assert_close(fisher, by_hand, **CLOSE)
    assert (fisher >= 0).all()


def test_ewc_fisher_equals_fisher_of_pooled_images(record):
    """Compare sum_k F_k / sum_k n_k with the centralised Fisher information."""
    run = record("ewc")
    call = next(c for c in run.calls if c.phase == "task_end")
    total = sum(p.num_samples for p in call.payloads)
    everything = Client(9, torch.cat([c.index for c in call.clients]))
    (central,) = call.engine.collect(
        "task_end", broadcast(run.method, call.state), [everything], call.ctx
    )
    assert central.num_samples == total
    for name in select(central, "fisher."):
        torch.testing.assert_close(run.states[0][name], central[name] / total, **CLOSE)
        assert (run.states[0][name] >= 0).all()
    later = run.states[0]["fisher.head.weight"]
    assert later[:3].any()
    assert not later[3:].any()  # rows of future classes have no Fisher


def test_ewc_decays_fisher_of_earlier_tasks(record):
    run = record("ewc")
    second = [c for c in run.calls if c.phase == "task_end"][1]
    total = sum(p.num_samples for p in second.payloads)
    for name in select(second.payloads[0], "fisher."):
        mean = sum(p[name] for p in second.payloads) / total
        torch.testing.assert_close(run.states[1][name], 0.9 * run.states[0][name] + mean, **CLOSE)


def test_ewc_penalty_has_no_gradient_at_anchor(record, batch_of):
    run = record("ewc")
    call = next(c for c in run.rounds if c.ctx.task.index == 1 and c.ctx.round == 0)
    data = batch_of(run.method, run.bench.train, call.clients[0].index)
    train = {
        k: v.clone().requires_grad_()
        for k, v in select(call.state, *run.method.training().optims).items()
    }
    for strength in (0.0, 1.0, 1e6):
        loss, _ = create_method("ewc", strength=strength).loss(
            run.bench.backbone, train, data, call.ctx
        )
        plain, _ = create_method("fedavg").loss(run.bench.backbone, train, data, call.ctx)
        for ours, theirs in zip(
            *(torch.autograd.grad(v, list(train.values())) for v in (loss, plain)), strict=True
        ):
            torch.testing.assert_close(ours, theirs, **CLOSE)


def test_ewc_skips_training_in_last_round(make_bench, small_method, watch):
    run = watch(make_bench(), small_method("ewc", skip_last_round=True))
    for call in run.rounds:
        trains = any(
            not torch.equal(p[k], call.state[k]) for p in call.payloads for k in select(p, "full.")
        )
        assert trains == (call.ctx.round == 0)


def test_ewc_fisher_weightings_by_hand(make_bench, small_method, backbone, batch_of, tasks):
    """Compare each weighting with one backward pass per image and class."""
    bench, task = make_bench(), tasks[0]
    plain = small_method("ewc", tune="head", head_init="default")
    state = plain.begin_task({}, task, bench.backbone, torch.Generator().manual_seed(0))
    state = {k: v.double() for k, v in state.items()}
    data = batch_of(plain, bench.train, bench.clients(task)[0].index[:3])
    by_hand = {
        name: torch.zeros_like(state["head.weight"]) for name in ("weighted", "empirical", "true")
    }
    for x, y in zip(data.query, data.y, strict=True):
        for c in range(task.size):
            weight = state["head.weight"].clone().requires_grad_()
            score = (weight @ x + state["head.bias"])[: task.stop].log_softmax(0)[c]
            square = torch.autograd.grad(score, weight)[0].square()
            by_hand["true"] += score.exp().detach() * square
            if c == y:
                by_hand["weighted"] += score.exp().detach() * square
                by_hand["empirical"] += square
    for name, reference in by_hand.items():
        method = small_method("ewc", tune="head", fisher=name)
        sums = method.collect("task_end", bench.backbone, state, data, Context(task, 0, 1, state))
        fisher = sums["fisher.head.weight"]
        torch.testing.assert_close(fisher, reference, **CLOSE)


def test_fisher_is_collected_from_trained_clients_only():
    """Collect from clients that trained, or from all with ``asked=all``.

    One of three clients is drawn in each round of a task.
    """
    for choice, rounds in (("trained", 1), ("trained", 2), ("all", 1)):
        bench = toy_bench(rounds=rounds, epochs=1, participation=0.34)
        run = record_run(bench, small_method("ewc", asked=choice))
        for task in range(3):
            calls = [c for c in run.calls if c.ctx.task.index == task]
            participants = {p.client for c in calls if c.phase == "train" for p in c.payloads}
            (survey,) = [{p.client for p in c.payloads} for c in calls if c.phase == "task_end"]
            holders = 2 if task == 1 else 3
            assert survey == participants if choice == "trained" else len(survey) == holders


def test_task_without_training_keeps_fisher():
    """Keep Fisher information and anchor when no drawn client has images of the task.

    The draw is among all clients that joined. In the second task it takes the one without images.
    """
    seed = next(s for s in range(99) if numpy_stream("participation", s, 1, 0).choice(3, 1) == [2])
    bench = toy_bench(rounds=1, epochs=1, participation=0.34, draw_among="joined")
    run = record_run(bench, small_method("ewc"), seed)
    assert [c.ctx.task.index for c in run.calls if c.phase == "task_end"] == [0, 2]
    for name, value in {
        **select(run.states[0], "fisher."),
        **select(run.states[0], "anchor."),
    }.items():
        assert torch.equal(run.states[1][name], value)
