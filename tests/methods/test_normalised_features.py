"""Unit-norm features with a method's ``normalise`` option, by hand."""

import pytest
import torch

from fczoo import Task, create_method
from helpers_analytic import Wide, query_batch, states_after_tasks

TASKS = [Task(0, 0, 2, 2, 1)]
IMAGES = torch.tensor(
    [[3.0, 4.0], [0.0, 10.0], [5.0, 0.0]], dtype=torch.float64
)  # norms 5, 10 and 5
LABELS = torch.tensor([0, 0, 1])


def learn(method, rng):
    return states_after_tasks(
        method, [[(IMAGES, LABELS)]], TASKS, method.begin_task({}, TASKS[0], Wide(2), rng)
    )[-1]


def test_class_means(rng):
    """Compare class means with values worked out by hand.

    Class 0: the mean of (0.6, 0.8) and (0, 1); the query, of length 1, is (0.8, 0.6).
    """
    method = create_method("fedncm", normalise=True)
    state = learn(method, rng)
    torch.testing.assert_close(state["mean"], torch.tensor([[0.3, 0.9], [1.0, 0.0]]))
    scores = method.predict(
        None, state, query_batch(torch.tensor([[8.0, 6.0]], dtype=torch.float64)), TASKS[0]
    )
    assert scores.tolist() == [[pytest.approx(-(0.25 + 0.09)), pytest.approx(-(0.04 + 0.36))]]


def test_ridge_regression(rng):
    """Compare the solution of ridge regression with a value worked out by hand.

    G = ((0.36 + 1, 0.48), (0.48, 0.64 + 1)) and Q = ((0.6, 1), (1.8, 0)); with gamma 1 the inverse
    of ((2.36, 0.48), (0.48, 2.64)) is ((2.64, -0.48), (-0.48, 2.36)) / 6.
    """
    method = create_method("afcl", normalise=True, gamma=1.0)
    state = learn(method, rng)
    weight = torch.tensor([[2.64 * 0.6 - 0.48 * 1.8, -0.48 * 0.6 + 2.36 * 1.8], [2.64, -0.48]]) / 6
    torch.testing.assert_close(state["answer.weight"], weight.double(), rtol=1e-6, atol=1e-7)
    scores = method.predict(
        None, state, query_batch(torch.tensor([[0.0, 7.0]], dtype=torch.float64)), TASKS[0]
    )
    torch.testing.assert_close(scores, weight[None, :, 1].double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["fedridge", "fedlda", "fedcof", "stsa", "stsae", "ranpac"])
def test_normalised_state_does_not_depend_on_feature_norm(name, rng):
    method = create_method(name, normalise=True)
    start = method.begin_task({}, TASKS[0], Wide(2), rng)
    longer = IMAGES * torch.tensor([1.0, 0.5, 3.0])[:, None]
    one, two = (
        states_after_tasks(method, [[(x, LABELS)]], TASKS, start)[-1] for x in (IMAGES, longer)
    )
    assert one.keys() == two.keys()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value)
