"""FedRidge; that it equals the joint solution is in test_analytic.py."""

import pytest
import torch

from fczoo import FczooError, Task, create_method
from fczoo.functional.ridge import solve_ridge, solve_ridge_with_bias
from helpers_analytic import Wide, query_batch, states_after_tasks
from helpers_golden import golden

TIGHT = {"rtol": 1e-8, "atol": 1e-10}
READINGS = {
    "plain": {"bias": "none"},
    "bias": {"bias": "penalised"},
    "free_bias": {"bias": "free"},
    "rp": {"bias": "none", "lift": "random", "width": 24},
}


@pytest.mark.parametrize("reading", READINGS)
def test_solutions_match_recorded_outputs(reading, rng):
    g = golden("ridge_joint")
    method = create_method("fedridge", ridge=float(g["in.ridge"]), **READINGS[reading])
    bounds = [0, 3, 5, 9]
    tasks = [Task(t, bounds[t], bounds[t + 1], 9, 3) for t in range(3)]
    parts = [
        [(g[f"in.feat_t{t}k{k}"], g[f"in.label_t{t}k{k}"]) for k in range(4)] for t in range(3)
    ]
    start = method.begin_task({}, tasks[0], Wide(8), rng)
    if reading == "rp":
        start["projection"] = g["in.W_rand"]
    for t, state in enumerate(states_after_tasks(method, parts, tasks, start)):
        stop = bounds[t + 1]
        weight = state["answer.weight"][:stop].mT
        torch.testing.assert_close(weight, g[f"out.{reading}.W_t{t}"], **TIGHT)
        if reading == "free_bias":
            torch.testing.assert_close(
                state["answer.bias"][:stop], g[f"out.free_bias.b_t{t}"], **TIGHT
            )
        else:
            logits = method.predict(None, state, query_batch(g["in.x_test"]), tasks[t])
            torch.testing.assert_close(logits, g[f"out.{reading}.logits_t{t}"], **TIGHT)


def test_ridge_solution_by_hand():
    """Compare the solution of two images with a value worked out by hand.

    Features 1 and 3 of classes 0 and 1, lambda 2: W = (1, 3) / (1 + 9 + 2).

    With a free bias by the centred sums: mean 2, centred features -1 and 1, centred targets 1/2 and
    -1/2; the slope of class 0 is -1 / (2 + 2) = -1/4, and its bias 1/2 + 2/4 = 1.
    """
    gram, target = torch.tensor([[10.0]]), torch.tensor([[1.0, 3.0]])
    assert solve_ridge(gram, target, 2.0).tolist() == [
        [pytest.approx(1 / 12), pytest.approx(1 / 4)]
    ]
    weight, bias = solve_ridge_with_bias(
        gram.double(), target.double(), torch.tensor([1.0, 1.0]), 2.0
    )
    assert weight.tolist() == [[pytest.approx(-0.25), pytest.approx(0.25)]]
    assert bias.tolist() == [pytest.approx(1.0), pytest.approx(0.0)]


def test_zero_ridge_gives_minimum_norm_solution(rng):
    x = torch.tensor([[1.0, 1.0], [2.0, 2.0]], dtype=torch.float64)  # rank 1
    target = x.mT @ torch.eye(2, dtype=torch.float64)
    solution = solve_ridge(x.mT @ x, target, 0.0)
    torch.testing.assert_close(
        solution, torch.linalg.pinv(x) @ torch.eye(2, dtype=torch.float64), **TIGHT
    )


def test_zero_ridge_handles_nearly_singular_gram(rng):
    """Give the minimum-norm solution of 99 images in 100 dimensions.

    Rounding often lets the factorisation of the singular Gram matrix succeed.
    """
    for _ in range(10):
        x = 10 * torch.randn(99, 100, generator=rng, dtype=torch.float64)
        y = torch.randn(99, 3, generator=rng, dtype=torch.float64)
        solution = solve_ridge(x.mT @ x, x.mT @ y, 0.0)
        torch.testing.assert_close(solution, torch.linalg.pinv(x) @ y, rtol=1e-4, atol=1e-6)


def test_recurring_classes_are_added(rng):
    task = Task(0, 0, 2, 2, 1)
    method = create_method("fedridge", bias="none", ridge=1.0)
    x, y = torch.randn(8, 3, generator=rng, dtype=torch.float64), torch.arange(8) % 2
    start = method.begin_task({}, task, Wide(3), rng)
    once = states_after_tasks(method, [[(x, y)]], [task], start)[-1]
    twice = states_after_tasks(method, [[(x[:3], y[:3])], [(x[3:], y[3:])]], [task, task], start)[
        -1
    ]
    for name, value in once.items():
        torch.testing.assert_close(twice[name], value, **TIGHT)


def test_class_without_images_is_not_predicted(rng):
    task = Task(0, 0, 3, 3, 1)
    method = create_method("fedridge", bias="none")
    x = -torch.rand(6, 3, generator=rng, dtype=torch.float64)
    state = method.begin_task({}, task, Wide(3), rng)
    state = states_after_tasks(method, [[(x, torch.arange(6) % 2)]], [task], state)[-1]
    assert set(method.predict(None, state, query_batch(-x), task).argmax(1).tolist()) <= {0, 1}


@pytest.mark.parametrize("settings", [{"min_class_count": 2}, {"outliers": 3.0}])
def test_second_moments_reject_min_class_count_and_outliers(make_bench, settings):
    with pytest.raises(
        FczooError, match=r"the second moments over all classes that fedridge uploads"
    ):
        make_bench(**settings).check(create_method("fedridge"))


def test_sums_are_float64_in_float32_runs(make_bench, watch):
    run = watch(make_bench(torch.float32), create_method("fedridge"))
    assert run.states[2]["moment.gram"].dtype == torch.float64
    assert {p["gram"].dtype for call in run.calls for p in call.payloads} == {torch.float64}


def test_cosine_score_rejects_bias():
    with pytest.raises(FczooError, match=r"ignores the bias .* add fedridge\.bias=none"):
        create_method("fedridge", score="cosine")
