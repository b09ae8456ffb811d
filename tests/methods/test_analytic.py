"""Methods solved from sums: equal to the joint solution for every partition and task order."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fczoo import FczooError, Task, create_method
from fczoo.core.method import table_note
from fczoo.functional.ridge import best_ridge, gram_of_groups
from helpers_analytic import Wide, images, query_batch, states_after_tasks, survey_sums
from helpers_golden import golden
from helpers_payload import server_context

TIGHT = {"rtol": 1e-8, "atol": 1e-10}
RIDGE_METHODS = {  # (method, variant) -> options
    ("fedridge", "plain"): {"bias": "none"},
    ("fedridge", "bias"): {"bias": "penalised"},
    ("fedridge", "free bias"): {"bias": "free"},
    ("afcl", ""): {},
    ("stsa", ""): {"width": 6},
    ("ranpac", ""): {"width": 6},
}
TASKS = [Task(0, 0, 2, 5, 2), Task(1, 2, 5, 5, 2)]


def split_by_owner(
    x: Tensor, y: Tensor, owner: Tensor, clients: list[int]
) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the images of each of ``clients`` in each task."""
    parts = []
    for task in TASKS:
        in_task = (y >= task.start) & (y < task.stop)
        parts.append([(x[in_task & (owner == k)], y[in_task & (owner == k)]) for k in clients])
    return parts


def joint(phi: Tensor, y: Tensor, ridge: float, bias: str) -> Tensor:
    """Solve one least-squares problem over all images.

    Extra rows of sqrt(ridge) penalise the columns.
    """
    ones = torch.ones(len(phi), 1, dtype=phi.dtype)
    rows = phi if bias == "none" else torch.cat([phi, ones], 1)
    identity = torch.eye(rows.shape[1], dtype=phi.dtype)
    below = ridge**0.5 * (identity[:-1] if bias == "free" else identity)
    hot = torch.cat([torch.nn.functional.one_hot(y, 5).to(phi), torch.zeros(len(below), 5).to(phi)])
    return torch.linalg.lstsq(torch.cat([rows, below]), hot).solution


@pytest.mark.parametrize("which", RIDGE_METHODS, ids=" ".join)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clients=st.permutations(range(4)),
    backwards=st.booleans(),
    size=st.integers(1, 30),
    ridge=st.sampled_from([1e-2, 1.0, 50.0]),
)
def test_every_partition_gives_joint_solution(which, seed, clients, backwards, size, ridge):
    options = RIDGE_METHODS[which]
    method = create_method(
        which[0], **{"gamma" if which[0] == "afcl" else "ridge": ridge}, **options
    )
    rng = torch.Generator().manual_seed(seed)
    (x, y), owner = images(seed), torch.randint(0, 4, (30,), generator=rng)
    start = method.begin_task({}, TASKS[0], Wide(4), rng)
    parts, tasks = split_by_owner(x, y, owner, clients), TASKS
    if backwards:
        parts, tasks = parts[::-1], tasks[::-1]
    state = states_after_tasks(method, parts, tasks, start, size)[-1]
    phi = (x @ start["projection"].double()).relu() if "projection" in start else x
    bias = options.get("bias", "none")
    weights = state["answer.weight"].mT
    if bias == "free":
        weights = torch.cat([weights, state["answer.bias"][None]])
    torch.testing.assert_close(weights, joint(phi, y, ridge, bias), **TIGHT)


@pytest.mark.parametrize("name", ["fedlda", "fecam"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), clients=st.permutations(range(4)), size=st.integers(1, 30))
def test_every_partition_gives_same_classifier(name, seed, clients, size):
    method, rng = create_method(name), torch.Generator().manual_seed(seed)
    (x, y), owner = images(seed), torch.randint(0, 4, (30,), generator=rng)
    start = method.begin_task({}, TASKS[0], Wide(4), rng)
    split = states_after_tasks(method, split_by_owner(x, y, owner, clients), TASKS, start, size)[-1]
    joint_state = states_after_tasks(
        method, split_by_owner(x, y, torch.zeros(30), [0]), TASKS, start
    )[-1]
    for key, value in joint_state.items():
        torch.testing.assert_close(split[key], value, rtol=1e-8, atol=1e-8)


DOMAINS = [Task(t, 0, 5, 5, 3) for t in range(3)]


@pytest.mark.parametrize("which", [*RIDGE_METHODS, ("fedlda", ""), ("fecam", "")], ids=" ".join)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), order=st.permutations(range(3)), size=st.integers(1, 30))
def test_recurring_classes_give_joint_classifier(which, seed, order, size):
    """Give the classifier of all images at once.

    Each of three domains has all classes; there are two clients.
    """
    options = {**RIDGE_METHODS.get(which, {}), **({"ridge": 1.0} if which[0] == "ranpac" else {})}
    method, rng = create_method(which[0], **options), torch.Generator().manual_seed(seed)
    (x, y), owner = images(seed), torch.randint(0, 6, (30,), generator=rng)
    start = method.begin_task({}, DOMAINS[0], Wide(4), rng)
    parts = [[(x[owner == k], y[owner == k]) for k in (2 * d, 2 * d + 1)] for d in order]
    split = states_after_tasks(method, parts, DOMAINS, start, size)[-1]
    joint_state = states_after_tasks(method, [[(x, y)]], DOMAINS[:1], start)[-1]
    for key, value in joint_state.items():
        torch.testing.assert_close(split[key], value, rtol=1e-7, atol=1e-8)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), order=st.permutations(range(3)))
def test_class_means_over_domains_equal_joint_means(seed, order):
    method, (x, y) = create_method("fedncm"), images(seed)
    domain = torch.randint(0, 3, (30,), generator=torch.Generator().manual_seed(seed))
    start = method.begin_task({}, DOMAINS[0], Wide(4), torch.Generator())
    parts = [[(x[domain == d], y[domain == d])] for d in order]
    state = states_after_tasks(method, parts, DOMAINS, start)[-1]
    means = torch.stack([x[y == c].mean(0) for c in range(5)])
    torch.testing.assert_close(state["mean"].double(), means, rtol=1e-5, atol=1e-6)
    assert state["count"].tolist() == [6] * 5


# --- AFCL


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), order=st.permutations(range(6)))
def test_afcl_equals_end_of_paper_recursion(seed, order):
    """Match the recursion over uploads in any order.

    R <- R - R X^T (I + X R X^T)^-1 X R, W <- [W 0] + R X^T (Y - X [W 0]).
    """
    (x, y), gamma, eye = images(seed), 0.7, torch.eye(4, dtype=torch.float64)
    inverse, weight = eye / gamma, torch.zeros(4, 5, dtype=torch.float64)
    hot = torch.nn.functional.one_hot(y, 5).double()
    for k in order:
        rows, goal = x[k::6], hot[k::6]
        small = torch.eye(len(rows), dtype=torch.float64) + rows @ inverse @ rows.mT
        inverse = inverse - inverse @ rows.mT @ torch.linalg.solve(small, rows @ inverse)
        weight = weight + inverse @ rows.mT @ (goal - rows @ weight)
    method = create_method("afcl", gamma=gamma)
    start = method.begin_task({}, TASKS[0], Wide(4), torch.Generator())
    state = states_after_tasks(
        method, split_by_owner(x, y, torch.arange(30) % 3, [0, 1, 2]), TASKS, start
    )[-1]
    torch.testing.assert_close(state["answer.weight"].mT, weight, **TIGHT)


def test_per_client_ridge_matches_afl_pairwise_merge():
    """Match W_12 of AFL's absolute aggregation law with ``per_client`` and two clients."""
    x, y = images(0)
    hot, eye, gamma = (
        torch.nn.functional.one_hot(y, 5).double(),
        torch.eye(4, dtype=torch.float64),
        2.0,
    )
    halves = [(x[k::2].mT @ x[k::2] + gamma * eye, x[k::2].mT @ hot[k::2]) for k in (0, 1)]
    inverse_sum = torch.linalg.inv(halves[0][0] + halves[1][0])
    parts = []
    for (mine, q), (theirs, _) in (halves, halves[::-1]):
        r = torch.linalg.inv(mine)
        parts.append((eye - r @ theirs + r @ theirs @ inverse_sum @ theirs) @ r @ q)
    task = Task(0, 0, 5, 5, 1)
    method = create_method("afcl", gamma=gamma, per_client=True)
    start = method.begin_task({}, task, Wide(4), torch.Generator())
    sums = survey_sums(method, start, [query_batch(x, y)], task)
    context = server_context(task)
    state = method.update_from(
        "task_start", start, sums, type(context)(**{**vars(context), "clients": 2})
    )
    torch.testing.assert_close(state["answer.weight"].mT, parts[0] + parts[1], **TIGHT)
    assert "per_client=True" in table_note(method)


# --- STSA, RanPAC: recorded outputs


def test_stsa_matches_recorded_outputs(rng):
    g = golden("stsa_exact")
    method = create_method("stsa", ridge=float(g["in.ridge"]), width=16)
    tasks = [Task(0, 0, 4, 7, 2), Task(1, 4, 7, 7, 2)]
    parts = [
        [(g[f"in.feat_t{t}k{k}"], g[f"in.label_t{t}k{k}"]) for k in range(3)] for t in range(2)
    ]
    start = method.begin_task({}, tasks[0], Wide(6), rng)
    start["projection"] = g["in.W_rand"]
    close = {"rtol": 1e-4, "atol": 1e-5}
    for t, state in enumerate(states_after_tasks(method, parts, tasks, start)):
        stop = tasks[t].stop
        for name, key in (("gram", "G"), ("target", "P")):
            ours = state[f"moment.{name}"] if name == "gram" else state["moment.target"].mT
            torch.testing.assert_close(ours, g[f"out.{key}_t{t}"].double(), **close)
        torch.testing.assert_close(
            state["answer.weight"][:stop], g[f"out.W_t{t}"].double(), **close
        )
        logits = method.predict(None, state, query_batch(g["in.x_test"]), tasks[t])
        torch.testing.assert_close(logits, g[f"out.logits_t{t}"].double(), **close)
        plain = create_method("stsa", score="linear", width=16)
        logits = plain.predict(None, state, query_batch(g["in.x_test"]), tasks[t])
        torch.testing.assert_close(logits, g[f"alt.plain_logits_t{t}"].double(), **close)


def test_ranpac_matches_recorded_outputs(rng):
    g = golden("ranpac")
    method, state = create_method("ranpac", width=20), {}
    labels = [g[f"in.label_t{t}"] for t in range(2)]
    bounds = [0, int(labels[0].max()) + 1, int(labels[1].max()) + 1]
    for t, (start, stop) in enumerate(pairwise(bounds)):
        task = Task(t, start, stop, bounds[-1], 2)
        state = method.begin_task(state, task, Wide(6), rng)
        state["projection"] = g["in.W_rand"]
        features = g[f"in.feat_t{t}"]
        held_out = (torch.arange(len(features)) >= int(0.8 * len(features)))[:, None].float()
        sums = survey_sums(method, state, [query_batch(features, labels[t], held_out)], task)
        state = method.update_from("task_start", state, sums, server_context(task))
        assert float(state["answer.ridge"]) == float(g[f"out.ridge_t{t}"])
        close = {"rtol": 1e-3, "atol": 1e-4}  # the official solution is in float32
        torch.testing.assert_close(
            state["answer.weight"][:stop], g[f"out.W_t{t}"].double(), **close
        )


def test_best_ridge_by_hand():
    """Choose ridge 1 for one image to fit and one held out.

    Fit: feature 1, target 1, so w = 1 / (1 + ridge). Held out: feature 1, target 1/2.
    """
    one = torch.ones(1, 1, dtype=torch.float64)
    assert (
        best_ridge({"gram": one, "target": one}, {"gram": one, "target": one / 2}, (0.1, 1.0, 10.0))
        == 1.0
    )


def test_ridge_choice_does_not_depend_on_partition(make_bench, watch):
    bench = make_bench()
    one_client_tasks = tuple(
        (np.sort(np.concatenate(p)), p[0][:0], p[0][:0]) for p in bench.partition.tasks
    )
    one = replace(bench, partition=replace(bench.partition, tasks=one_client_tasks))
    method = create_method("ranpac", width=12)
    ours, theirs = watch(bench, method).states[2], watch(one, method).states[2]
    assert float(ours["answer.ridge"]) == float(theirs["answer.ridge"])
    torch.testing.assert_close(ours["answer.weight"], theirs["answer.weight"], rtol=1e-6, atol=1e-8)


# --- STSA-E, FedCOF


def test_gram_of_single_image_groups_is_exact(rng):
    x = torch.randn(12, 5, generator=rng, dtype=torch.float64)
    label = torch.arange(12) % 3
    hot = torch.nn.functional.one_hot(label, 3)
    torch.testing.assert_close(gram_of_groups(hot, hot[:, :, None] * x[:, None]), x.mT @ x, **TIGHT)


def test_gram_of_groups_by_hand():
    """Compare the Gram matrix of groups with a value worked out by hand.

    Class with images 1, 3 | 4: N 3, J 2, P 8: 2/1 (16/2 + 16/1) - 1/3 64 = 48 - 64/3.
    One group: 64/3.
    """
    count, total = torch.tensor([[2], [1]]), torch.tensor([[[4.0]], [[4.0]]])
    assert float(gram_of_groups(count, total)) == pytest.approx(48 - 64 / 3)
    assert float(
        gram_of_groups(count.sum(0, keepdim=True), total.sum(0, keepdim=True))
    ) == pytest.approx(64 / 3)
    empty = torch.zeros(2, 1)  # clients without the class count as groups: 2/3 24, and (3 - 4) < 0
    wide = (torch.cat([count, empty.long()]), torch.cat([total, empty[:, None]]))
    assert float(gram_of_groups(*wide, groups=4)) == pytest.approx(16)
    assert float(gram_of_groups(*wide)) == pytest.approx(48 - 64 / 3)


def test_gram_of_groups_is_unbiased(rng):
    """Average estimates over many random groupings, and compare within three standard errors."""
    x = torch.randn(6, 2, generator=rng, dtype=torch.float64) + 1
    estimates = []
    for _ in range(2000):
        part = torch.randperm(6, generator=rng).argsort() % 2
        hot = torch.nn.functional.one_hot(part, 2).double()
        estimates.append(gram_of_groups(hot.sum(0)[:, None], (hot.mT @ x)[:, None]))
    estimate_stack = torch.stack(estimates)
    error = estimate_stack.std(0) / len(estimate_stack) ** 0.5
    assert ((estimate_stack.mean(0) - x.mT @ x).abs() <= 3 * error + 1e-9).all()


def test_stsae_with_one_part_per_image_equals_stsa(make_bench, watch):
    options = {"width": 10, "ridge": 1.0}
    estimate = watch(make_bench(), create_method("stsae", parts=14, **options)).states[2]
    exact = watch(make_bench(), create_method("stsa", **options)).states[2]
    torch.testing.assert_close(estimate["moment.gram"], exact["moment.gram"], **TIGHT)
    torch.testing.assert_close(estimate["answer.weight"], exact["answer.weight"], **TIGHT)


def test_fedcof_with_one_owner_per_class_is_nearest_mean(rng):
    """Reduce to a shrunk nearest-mean classifier.

    All S_c are gamma I. With g = gamma sum (N_c - 1):
    w_c = (P_c - N (mbar.P_c) / (g + N |mbar|^2) mbar) / g.
    """
    x, y = images(3)
    method, task = create_method("fedcof", gamma=0.5), Task(0, 0, 5, 5, 1)
    start = method.begin_task({}, task, Wide(4), rng)
    state = states_after_tasks(method, [[(x[y == c], y[y == c]) for c in range(5)]], [task], start)[
        -1
    ]
    g, mean = 0.5 * (30 - 5), x.mean(0)
    sums = torch.stack([x[y == c].sum(0) for c in range(5)])
    away = 30 * (sums @ mean) / (g + 30 * mean @ mean)
    torch.testing.assert_close(state["answer.weight"], (sums - away[:, None] * mean) / g, **TIGHT)


def test_fedcof_covariance_is_exact_with_one_image_per_client(rng):
    x, y = images(4)
    method, task = create_method("fedcof"), Task(0, 0, 5, 5, 1)
    start = method.begin_task({}, task, Wide(4), rng)
    state = states_after_tasks(
        method, [[(x[i : i + 1], y[i : i + 1]) for i in range(30)]], [task], start
    )[-1]
    scatter = sum(5 * torch.cov(x[y == c].mT) for c in range(5))  # N_c - 1 = 5
    torch.testing.assert_close(state["moment.gram"], scatter, **TIGHT)


@pytest.mark.parametrize("name", ["afcl", "stsa", "ranpac", "fedlda", "fecam"])
@pytest.mark.parametrize(
    "refused", [{"min_class_count": 2}, {"outliers": 3.0}], ids=["rare", "outliers"]
)
def test_second_moments_reject_min_class_count_and_outliers(make_bench, name, refused):
    with pytest.raises(
        FczooError, match=f"the second moments over all classes that {name} uploads"
    ):
        make_bench(**refused).check(create_method(name))
