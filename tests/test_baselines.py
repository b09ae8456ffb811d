"""What the baselines promise, one by one."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fczoo import Batch, Context, FczooError, Task, Tree, create_method
from fczoo.aggregate import fedavg
from fczoo.backbone import Backbone
from fczoo.core import drop, select
from fczoo.engine import Client, Engine, LocalImages, Plan, broadcast
from fczoo.exemplars import herding
from fczoo.fisher import fisher_sums
from fczoo.gaussians import draw_features, gaussians, moment_sums, pooled
from fczoo.images import Augment
from fczoo.inversion import image_gradient, lenet, lenet_logits, mismatch, read_label, reconstruct
from fczoo.losses import task_cross_entropy
from fczoo.options import quirks
from fczoo.registry import METHODS
from fczoo.show import listing

CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # float64
DIM = 32


def batch(x: Tensor, y: list[int] | Tensor, t: Tensor | None = None, w: Tensor | None = None) -> Batch:
    y = torch.as_tensor(y)
    return Batch(x, y, torch.ones(len(y), dtype=x.dtype) if w is None else w, x, x.new_empty(len(y), 0) if t is None else t)


# --- EWC


def test_fisher_is_the_weighted_square_of_per_image_gradients(noise, rng):
    """Against one backward an image."""
    weight, x, y = noise(4, 5), noise(6, 5), torch.randint(0, 4, (6,), generator=rng)

    def log_likelihood(tree: Tree, one: Batch) -> Tensor:
        return (one.x @ tree["w"].T).log_softmax(-1).gather(1, one.y[:, None])[:, 0]

    w = torch.tensor([1.0, 1, 1, 1, 1, 0], dtype=torch.float64)
    found = fisher_sums(log_likelihood, {"w": weight}, batch(x, y, w=w))["w"]
    by_hand = torch.zeros_like(weight)
    for i in range(5):
        leaf = weight.clone().requires_grad_()
        score = (leaf @ x[i]).log_softmax(0)[y[i]]
        by_hand += score.exp().detach() * torch.autograd.grad(score, leaf)[0].square()
    torch.testing.assert_close(found, by_hand, **CLOSE)
    assert (found >= 0).all()


def test_ewc_fisher_of_the_clients_is_that_of_their_pooled_images(record):
    """sum_k F_k / sum_k n_k is the centralised Fisher, whoever holds what."""
    run = record("ewc")
    call = next(c for c in run.calls if c.moment == "end")
    total = sum(int(p["num_samples"]) for p in call.payloads)
    everything = Client(9, torch.cat([c.index for c in call.clients]))
    central = call.engine.survey("end", broadcast(run.method, call.state), [everything], call.ctx)[0]
    assert int(central["num_samples"]) == total
    for name in select(central, "fisher."):
        torch.testing.assert_close(run.states[0][name], central[name] / total, **CLOSE)
        assert (run.states[0][name] >= 0).all()
    later = run.states[0]["fisher.head.weight"]
    assert later[:3].any() and not later[3:].any()  # rows of classes to come have no Fisher, so they are free


def test_ewc_decays_the_fisher_of_earlier_tasks(record):
    run = record("ewc")
    second = [c for c in run.calls if c.moment == "end"][1]
    total = sum(int(p["num_samples"]) for p in second.payloads)
    for name in select(second.payloads[0], "fisher."):
        mean = sum(p[name] for p in second.payloads) / total
        torch.testing.assert_close(run.states[1][name], 0.9 * run.states[0][name] + mean, **CLOSE)


def test_ewc_penalty_at_the_anchor_has_no_gradient(record, batch_of):
    run = record("ewc")
    call = next(c for c in run.rounds if c.ctx.task.index == 1 and c.ctx.round == 0)
    data = batch_of(run.method, run.bench.train, call.clients[0].index)
    train = {k: v.clone().requires_grad_() for k, v in select(call.state, *run.method.optims()).items()}
    for strength in (0.0, 1.0, 1e6):
        loss, _ = create_method("ewc", strength=strength).loss(run.bench.backbone, train, data, call.ctx)
        plain, _ = create_method("fedavg").loss(run.bench.backbone, train, data, call.ctx)
        for ours, theirs in zip(*(torch.autograd.grad(v, list(train.values())) for v in (loss, plain)), strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize(("name", "options"), [("ewc", {"strength": 0.0}), ("lwf", {"strength": 0.0}), ("fedproto", {"strength": 0.0})])
def test_without_its_term_a_method_is_fedavg(make_bench, small_method, watch, name, options):
    plain = watch(make_bench(aggregator="fedavg"), small_method("fedavg"))
    ours = watch(make_bench(aggregator="fedavg"), small_method(name, **options))
    for task in range(3):
        for key, value in select(plain.states[task], "head.", "full.").items():
            assert torch.equal(ours.states[task][key], value), key


def test_ewc_that_skips_the_last_round_trains_in_the_others(make_bench, small_method, watch):
    run = watch(make_bench(), small_method("ewc", skip_last_round=True))
    for call in run.rounds:
        moved = any(not torch.equal(p[k], call.state[k]) for p in call.payloads for k in select(p, "full."))
        assert moved == (call.ctx.round == 0)


# --- LwF


def test_lwf_teacher_is_the_model_at_the_end_of_the_last_task(record):
    run = record("lwf")
    for call in run.rounds:
        t = call.ctx.task.index
        teacher = select(call.state, "teacher.")
        assert bool(teacher) == (t > 0)
        for name, value in teacher.items():
            assert torch.equal(value, run.states[t - 1][name.removeprefix("teacher.")])


def test_lwf_distillation_leaves_new_rows_alone(record, batch_of, noise):
    run, task = record("lwf"), Task(1, 3, 5, 7, 3)
    logits = noise(4, 7).requires_grad_()
    kd = run.method.distillation(logits, batch(noise(4, 2), [3, 4, 3, 4], noise(4, 7)), task)
    (gradient,) = torch.autograd.grad(kd, logits)
    assert gradient[:, :3].any() and not gradient[:, 3:].any()


def test_teacher_outputs_are_kept_where_the_view_is_fixed(make_bench, small_method, watch):
    """One pass over the images a task instead of one in each epoch, with the same result."""
    calls: list[int] = []
    method = small_method("lwf")
    kept = type(method).teach

    def counted(self, backbone, shared, data, task):
        calls.append(len(data.y))
        return kept(self, backbone, shared, data, task)

    type(method).teach = counted
    try:
        fixed = watch(make_bench(batch_size=100), method)
        once, calls[:] = sum(calls), []
        watch(make_bench(batch_size=100, augment="flip"), method)
    finally:
        type(method).teach = kept
    images = sum(len(c.index) for call in fixed.rounds if call.ctx.round == 0 for c in call.clients)
    assert once == images and sum(calls) == 4 * images  # two rounds of two epochs


# --- FedNCM, FedCLM, FedAvg with class means


def test_class_means_do_not_depend_on_the_split(record, batch_of):
    """FedNCM and FedCLM hold the centralised class means exactly, whoever owns what."""
    for name, key in (("fedncm", "mean"), ("fedclm", "mean")):
        run = record(name)
        store, last = run.bench.train, run.states[2]
        data = batch_of(run.method, store, torch.arange(len(store.labels)))
        features = data.q if name == "fedncm" else run.method.features(run.bench.backbone, last, data)
        for c in (5, 6) if name == "fedclm" else range(7):
            torch.testing.assert_close(last[key][c], features[data.y == c].mean(0), **CLOSE)


def test_fedavg_starts_new_rows_at_class_means(make_bench, small_method, watch, batch_of):
    run = watch(make_bench(), small_method("fedavg", tune="head", start="means"))
    call = next(c for c in run.rounds if c.ctx.task.index == 1)
    data = batch_of(run.method, run.bench.train, torch.arange(len(run.bench.train.labels)))
    for c in (3, 4):
        torch.testing.assert_close(call.state["head.weight"][c], F.normalize(data.q[data.y == c].mean(0), dim=0), **CLOSE)
        assert call.state["head.bias"][c] == 0
    assert torch.equal(call.state["head.weight"][:3], run.states[0]["head.weight"][:3])


# --- Joint


def test_joint_sees_all_images_so_far(make_bench, small_method, watch):
    central = watch(make_bench(), small_method("joint"))
    spread = watch(make_bench(), small_method("joint", setting="federated"))
    for run, clients in ((central, 1), (spread, 3)):
        for call in run.rounds:
            assert len(call.clients) == clients
            labels = torch.cat([run.bench.train.labels[c.index] for c in call.clients])
            assert sorted(labels.tolist()) == [c for c in range(call.ctx.task.stop) for _ in range(10)]
            owned = [set(c.index.tolist()) for c in call.clients]
            assert sum(map(len, owned)) == len(set().union(*owned))


def test_joint_starts_afresh_in_every_task(small_method, backbone, tasks, rng):
    method = small_method("joint")
    first = method.begin_task({}, tasks[0], backbone, torch.Generator().manual_seed(1))
    trained = {k: v + 1 for k, v in first.items()}
    again = method.begin_task(trained, tasks[1], backbone, torch.Generator().manual_seed(1))
    assert all(torch.equal(again[k], first[k]) for k in first)


def test_joint_softmax_covers_all_seen_classes(record, batch_of):
    run = record("joint")
    call = run.rounds[-1]
    data = batch_of(run.method, run.bench.train, torch.arange(20))
    train = select(call.state, *run.method.optims())
    loss, _ = run.method.loss(run.bench.backbone, train, data, call.ctx)
    torch.testing.assert_close(loss, F.cross_entropy(run.method.logits(run.bench.backbone, train, data)[:, :7], data.y), **CLOSE)


# --- what is trained


@pytest.mark.parametrize("name", ["fedavg", "ewc", "lwf", "fedproto", "ccvr", "glfc", "fedclm", "joint"])
@pytest.mark.parametrize("tune", ["lora", "head"])
def test_every_choice_of_what_is_trained_runs(make_bench, small_method, watch, name, tune):
    run = watch(make_bench(), small_method(name, tune=tune))
    prefixes = {"lora": {"head.", "lora."}, "head": {"head."}}[tune]
    assert set(run.method.optims()) == prefixes and not select(run.states[2], "full.")
    for prefix in prefixes:
        start = next(c for c in run.rounds if c.ctx.task.index == 0).state
        assert any(not torch.equal(run.states[0][k], start[k]) for k in select(start, prefix))
    if name != "joint":  # which starts afresh
        assert len(run.result.accuracy[2]) == 3


def test_heads_alone_learn_from_frozen_features_without_the_images(make_bench, small_method, watch):
    """With one client step of plain gradient descent on everything, the federated step equals the centralised one."""
    bench = make_bench(batch_size=100, epochs=1, rounds=1)
    method = small_method("fedavg", tune="head")
    assert method.inputs() == {"query"}
    run = watch(bench, method)
    call = run.rounds[0]
    engine = Engine(method, bench.backbone, bench.train, Plan(1, 100, Augment(), seed=0))
    whole = engine._batch([(torch.cat([c.index for c in call.clients]), None)])
    train = {k: v.clone().requires_grad_() for k, v in select(call.state, "head.").items()}

    def gradient(data: Batch) -> list[Tensor]:
        return list(torch.autograd.grad(method.loss(bench.backbone, train, data, call.ctx)[0], list(train.values())))

    central = gradient(Batch(*(v[0] for v in whole)))
    parts = [(len(c.index), gradient(Batch(*(v[0] for v in engine._batch([(c.index, None)]))))) for c in call.clients]
    total = sum(n for n, _ in parts)
    for i, value in enumerate(central):
        torch.testing.assert_close(sum(n / total * g[i] for n, g in parts), value, **CLOSE)


# --- L2P


def test_l2p_unchosen_slots_stay(make_bench, small_method, watch):
    """Gradient zero, so Adam does not move them, nor does averaging."""
    run = watch(make_bench(), small_method("l2p", size=6, chosen=1))
    used = set()
    for call in run.rounds:
        for client in call.clients:
            data = Batch(*(v[0] for v in call.engine._batch([(client.index, None)])))
            moved = [m for p in call.payloads for m in range(6) if not torch.equal(p["pool.key"][m], call.state["pool.key"][m])]
            used |= set(moved)
            assert data.q.shape[1] == DIM
    untouched = set(range(6)) - used
    start = run.rounds[0].state
    assert used and untouched
    for m in untouched:
        assert torch.equal(run.states[2]["pool.prompt"][m], start["pool.prompt"][m])


def test_l2p_key_loss_moves_keys_towards_their_queries(noise, tasks):
    method = create_method("l2p", size=3, chosen=1)
    keys, query = noise(3, DIM), noise(1, DIM)
    data = batch(query.expand(4, -1), [0, 1, 2, 0])
    leaf = keys.clone().requires_grad_()
    similarity, chosen = method.choose({"pool.key": leaf}, data)
    (gradient,) = torch.autograd.grad(-method.pull * similarity.gather(1, chosen).sum(-1).mean(), leaf)
    best = int(chosen[0, 0])
    assert gradient[best].any() and not gradient[[i for i in range(3) if i != best]].any()
    after = F.cosine_similarity(keys[best] - 0.1 * gradient[best], query[0], dim=0)
    assert after > F.cosine_similarity(keys[best], query[0], dim=0)


def test_l2p_without_key_loss_keeps_its_random_keys(make_bench, small_method, watch):
    run = watch(make_bench(), small_method("l2p", no_key_loss=True))
    assert torch.equal(run.states[2]["pool.key"], run.rounds[0].state["pool.key"])
    assert not torch.equal(run.states[2]["pool.prompt"], run.rounds[0].state["pool.prompt"])


def test_l2p_puts_25_tokens_in_front_of_the_image(backbone, noise, tasks, rng, monkeypatch):
    """With its defaults: 222 tokens on ViT-B/16 at 224 px, 25 and 197; here 25 and 5."""
    method, seen = create_method("l2p"), []
    state = {k: v.double() for k, v in method.begin_task({}, tasks[0], backbone, rng).items()}
    attention = Backbone._attention
    monkeypatch.setattr(Backbone, "_attention", lambda self, hidden, *rest: seen.append(hidden.shape[1]) or attention(self, hidden, *rest))
    data = Batch(noise(2, 3, 16, 16), torch.zeros(2, dtype=torch.int64), torch.ones(2).double(), noise(2, DIM))
    assert method.predict(backbone, state, data, tasks[0]).shape == (2, 3)
    assert set(seen) == {25 + 5}


def test_l2p_refuses_more_choices_than_prompts():
    with pytest.raises(FczooError, match=r"l2p\.chosen is 6, more than the 5 prompts"):
        create_method("l2p", size=5, chosen=6)


# --- DualPrompt


def test_dualprompt_freezes_slots_of_finished_tasks(record):
    run = record("dualprompt")
    for t in (1, 2):
        for name, value in select(run.states[t], "past.").items():
            last = run.states[t - 1][name.replace("past.", "expert.", 1)]
            assert len(value) == t and torch.equal(value[-1], last)
            if t == 2:
                assert torch.equal(value[:1], run.states[1][name])


def test_dualprompt_trains_the_slot_of_the_task_whatever_the_query(record, batch_of):
    run = record("dualprompt")
    call = next(c for c in run.rounds if c.ctx.task.index == 1)
    data = batch_of(run.method, run.bench.train, call.clients[0].index[:3])
    train = select(call.state, *run.method.optims())
    quirk = create_method("dualprompt", **{**vars(run.method), "no_key_loss": True})
    a, b = (quirk.loss(run.bench.backbone, train, data._replace(q=q), call.ctx)[0] for q in (data.q, -data.q))
    assert torch.equal(a, b)


def test_dualprompt_matches_trained_slots_only(record, noise):
    run = record("dualprompt")
    state = {k: v.clone() for k, v in run.states[1].items()}
    query = torch.stack([state["past.key"][0], state["expert.key"], state["next.key"][0]])
    assert run.method.match(state, query)[:2].tolist() == [0, 1] and int(run.method.match(state, query)[2]) < 2
    quirk = create_method("dualprompt", **{**vars(run.method), "match_all_slots": True})
    assert quirk.match(state, query).tolist() == [0, 1, 2]
    assert run.method.match(run.states[0], query).tolist() == [0, 0, 0]


def test_dualprompt_warm_start_copies_prefixes_but_not_the_key(small_method, backbone, tasks, rng):
    for warm in (False, True):
        method = small_method("dualprompt", warm_start=warm)
        first = method.begin_task({}, tasks[0], backbone, rng)
        second = method.begin_task(first, tasks[1], backbone, rng)
        same = {k for k in select(first, "expert.") if torch.equal(first[k], second[k])}
        assert same == ({k for k in select(first, "expert.") if k != "expert.key"} if warm else set())


def test_dualprompt_reshape_bug_is_right_for_one_image_only(noise):
    key, value = noise(4, 3, DIM), noise(4, 3, DIM)
    method, quirk = create_method("dualprompt"), create_method("dualprompt", reshape_bug=True)
    assert all(torch.equal(a, b) for a, b in zip(method.prefixes(key[:1], value[:1]), quirk.prefixes(key[:1], value[:1]), strict=True))
    shared = key[:1].expand(4, -1, -1), value[:1].expand(4, -1, -1)
    wrong = quirk.prefixes(*shared)
    assert torch.equal(wrong[0][:2], shared[0][:2]) and torch.equal(wrong[1][:2], shared[0][:2])  # first half: keys as both
    assert torch.equal(wrong[0][2:], shared[1][2:]) and torch.equal(wrong[1][2:], shared[1][2:])  # second half: values as both


# --- CODA-Prompt


def test_codap_draws_new_rows_orthogonal_to_the_old(record):
    run = record("codap")
    for call in run.rounds:
        if call.ctx.round:
            continue
        for name, fresh in select(call.state, "component.").items():
            rows = fresh.flatten(1)
            torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows), dtype=rows.dtype), rtol=1e-5, atol=1e-5)
            old = call.state.get(name.replace("component.", "past.", 1))
            if call.ctx.task.index:
                assert (rows @ old.flatten(1).T).abs().max() < 1e-5


def test_codap_classical_gram_schmidt_is_orthogonal_to_orthonormal_rows_only(noise):
    from fczoo.baselines.codap import gram_schmidt, orthonormal

    old, draws = orthonormal(noise(0, DIM), noise(3, DIM)), noise(2, DIM)
    torch.testing.assert_close(gram_schmidt(old, draws), orthonormal(old, draws), **CLOSE)
    trained = old + 0.3 * noise(3, DIM)
    assert (gram_schmidt(trained, draws) @ trained.T).abs().max() > 1e-3
    assert (orthonormal(trained, draws) @ trained.T).abs().max() < 1e-9


def test_codap_by_hand_classical_gram_schmidt():
    """Old row (2, 0), draws (1, 1): shadow (1, 0), remainder (0, 1)."""
    from fczoo.baselines.codap import gram_schmidt

    assert gram_schmidt(torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 1.0]])).tolist() == [[0.0, 1.0]]


def test_codap_old_components_are_frozen_and_contribute(record, batch_of):
    run = record("codap")
    for t in (1, 2):
        for name, value in select(run.states[t], "past.").items():
            before = run.states[t - 1]
            known = [before[k] for k in (name, name.replace("past.", "component.", 1)) if k in before]
            assert torch.equal(value, torch.cat(known))
    data, state = batch_of(run.method, run.bench.test, torch.arange(4)), run.states[2]
    with_old, without = run.method.prefixes(state, data.q), run.method.prefixes(drop(state, "past."), data.q)
    assert all((with_old[k] - without[k]).abs().max() > 1e-6 for k in with_old)


def test_codap_weights_are_cosines(record, batch_of):
    run = record("codap")
    data = batch_of(run.method, run.bench.test, torch.arange(4))
    weights = run.method.weights(run.states[2], 0, data.q)
    assert weights.abs().max() <= 1 + 1e-12
    torch.testing.assert_close(run.method.weights(run.states[2], 0, 7 * data.q), weights, **CLOSE)


def test_codap_refuses_components_that_cannot_be_orthogonal(backbone, tasks, rng):
    with pytest.raises(FczooError, match=r"codap\.components is 100, more than the 32 dimensions"):
        create_method("codap").begin_task({}, tasks[0], backbone, rng)
    with pytest.raises(FczooError, match=r"codap\.components is 2, fewer than the 3 tasks"):
        create_method("codap", components=2).begin_task({}, tasks[0], backbone, rng)


# --- FedProto


def test_fedproto_prototypes_are_pooled_class_means(noise, tasks):
    """If all clients share one model."""
    method, task = create_method("fedproto", tune="head"), tasks[0]
    x, y = noise(9, DIM), torch.tensor([0, 0, 1, 1, 1, 0, 1, 0, 0])
    payloads = []
    for k, part in enumerate((slice(0, 2), slice(2, 5), slice(5, 9))):
        sums = method.stats(None, {}, batch(x[part], y[part]), Context(task, 0, 1, {}))
        payloads.append({**sums, "num_samples": torch.tensor(1), "client": torch.tensor(k)})
    start = {"all.mean": torch.zeros(7, DIM, dtype=torch.float64), "all.known": torch.zeros(7)}
    forward, backward = (method.server_update(start, method.aggregate(p, fedavg), task, None, None) for p in (payloads, payloads[::-1]))
    for c in (0, 1):
        torch.testing.assert_close(forward["prototype.mean"][c], x[y == c].mean(0), **CLOSE)
    torch.testing.assert_close(forward["prototype.mean"], backward["prototype.mean"], **CLOSE)
    assert forward["prototype.known"].tolist() == [1, 1, 0] and forward["prototype.mean"].isfinite().all()


def test_fedproto_forgets_prototypes_of_the_last_task_but_for_ncm(record):
    run = record("fedproto")
    for call in run.rounds:
        known = call.state["prototype.known"]
        assert len(known) == call.ctx.task.size and bool(known.any()) == (call.ctx.round > 0)
    assert run.states[2]["all.known"].tolist() == [1.0] * 7


# --- CCVR


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=4), st.booleans(), st.integers(0, 10**6))
def test_pooled_moments_are_those_of_the_concatenated_features(labels, full, seed):
    rng, task = torch.Generator().manual_seed(seed), Task(0, 0, 3, 3, 1)
    data = [(5 + torch.randn(len(y), 4, generator=rng, dtype=torch.float64), torch.tensor(y)) for y in labels]
    rows = [gaussians(moment_sums(x, batch(x, y), task, full), 0, single=True) for x, y in data]
    for (_, y), row in zip(data, rows, strict=True):  # a single image has no spread of its own; the identity wants 0
        name = "gauss.cov" if full else "gauss.var"
        single = torch.bincount(y, minlength=3)[row["gauss.label"]] == 1
        row[name] = torch.where(single.view(-1, *[1] * (row[name].dim() - 1)), 0.0, row[name])
    found = pooled({k: torch.cat([r[k] for r in rows]) for k in rows[0]})
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    for i, c in enumerate(found["gauss.label"].tolist()):
        own = x[y == c]
        assert int(found["gauss.count"][i]) == len(own)
        torch.testing.assert_close(found["gauss.mean"][i], own.mean(0), **CLOSE)
        if len(own) > 1:
            spread = own.T.cov() if full else own.var(0)
            torch.testing.assert_close(found["gauss.cov" if full else "gauss.var"][i], spread, rtol=1e-7, atol=1e-7)


def test_pooled_moments_by_hand():
    """Client 1: {0, 2}, mean 1, variance 2. Client 2: {5, 7, 9}, mean 7, variance 4. Together mean 4.6, variance 13.3."""
    gauss = {
        "gauss.label": torch.tensor([3, 3]),
        "gauss.client": torch.tensor([0, 1]),
        "gauss.count": torch.tensor([2.0, 3.0]),
        "gauss.mean": torch.tensor([[1.0], [7.0]]),
        "gauss.var": torch.tensor([[2.0], [4.0]]),
    }
    found = pooled(gauss)
    assert found["gauss.label"].tolist() == [3] and found["gauss.count"].tolist() == [5]
    assert float(found["gauss.mean"]) == pytest.approx(4.6) and float(found["gauss.var"]) == pytest.approx(13.3)


def test_draws_from_full_covariances_have_them(rng):
    cov = torch.tensor([[4.0, 3.0], [3.0, 4.0]], dtype=torch.float64)
    gauss = {
        "gauss.label": torch.tensor([1]),
        "gauss.count": torch.tensor([5.0], dtype=torch.float64),
        "gauss.mean": torch.tensor([[1.0, -1.0]], dtype=torch.float64),
        "gauss.cov": cov[None],
    }
    x, y = draw_features(gauss, 100_000, rng)
    assert set(y.tolist()) == {1}
    np.testing.assert_allclose(x.mean(0), [1, -1], atol=0.03)
    np.testing.assert_allclose(x.T.cov(), cov, atol=0.1)


@pytest.mark.parametrize("gaussian", ["mixture", "pooled"])
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_ccvr_server_leaves_backbone_and_old_rows_alone(make_bench, small_method, watch, gaussian, covariance):
    run = watch(make_bench(), small_method("ccvr", gaussian=gaussian, covariance=covariance))
    for before, call in zip(run.rounds, run.rounds[1:], strict=False):
        if call.ctx.round == 0:
            continue
        plain = fedavg([drop(p, "gauss.") for p in before.payloads])
        for name, value in select(plain, "full.").items():
            assert torch.equal(call.state[name], value)
        first = call.ctx.task.start
        assert torch.equal(call.state["head.weight"][:first], plain["head.weight"][:first])
        assert not torch.equal(call.state["head.weight"][first : call.ctx.task.stop], plain["head.weight"][first : call.ctx.task.stop])


def test_ccvr_without_any_pair_of_images_leaves_the_head_alone(small_method, backbone, tasks, rng):
    method = small_method("ccvr")
    state = method.begin_task({}, tasks[0], backbone, rng)
    sums = {"class.count": torch.ones(3), "class.sum": torch.ones(3, DIM), "class.squares": torch.ones(3, DIM)}
    ctx = Context(tasks[0], 0, 1, {})
    payload = {**method.pack(select(state, *method.optims()), sums, ctx), "num_samples": torch.tensor(3), "client": torch.tensor(0)}
    after = method.server_update(state, method.aggregate([payload], fedavg), tasks[0], backbone, rng)
    assert all(torch.equal(after[k], state[k]) for k in state)


@pytest.mark.parametrize("name", ["ccvr", "fedproto"])
def test_statistics_of_unnormalised_images_differ(record, batch_of, name):
    run = record(name)
    call = run.rounds[0]
    data = batch_of(run.method, run.bench.train, call.clients[0].index)
    train = select(call.state, *run.method.optims())
    quirk = create_method(name, **{**vars(run.method), "stats_unnormalised": True})
    right, wrong = (m.stats(run.bench.backbone, train, data, call.ctx)["class.sum"] for m in (run.method, quirk))
    assert (right - wrong).abs().max() > 1e-3
    config = run.bench.backbone.config
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (config.mean, config.std))
    by_hand = run.method.stats(run.bench.backbone, train, data._replace(x=data.x * std + mean), call.ctx)["class.sum"]
    torch.testing.assert_close(wrong, by_hand, **CLOSE)
    raw = data.x * std + mean
    assert raw.min() > -1e-9 and raw.max() < 1 + 1e-9
    with pytest.raises(FczooError, match=f"{name}.stats_unnormalised reads images anew, {name}.tune=head only kept features"):
        create_method(name, stats_unnormalised=True, tune="head")


# --- GLFC


def test_glfc_weights_average_to_one_in_each_group(noise):
    learned = torch.tensor([True, True, False, False])
    data = batch(noise(7, 2), [0, 1, 1, 2, 3, 3, 2], w=torch.tensor([1.0, 1, 1, 1, 1, 1, 0], dtype=torch.float64))
    weights = create_method("glfc").weights(noise(7, 4).requires_grad_(), data, learned)
    assert not weights.requires_grad
    assert float(weights[:3].mean()) == pytest.approx(1) and float(weights[3:6].mean()) == pytest.approx(1)


def test_glfc_targets_of_new_classes_are_the_labels(noise):
    """Without an old model's columns the distillation is plain binary cross-entropy."""
    logits, data = noise(5, 4), batch(noise(5, 2), [0, 1, 2, 3, 0])
    plain = F.binary_cross_entropy_with_logits(logits, F.one_hot(data.y, 4).double())
    torch.testing.assert_close(create_method("glfc").relations(logits, data, 0), plain, **CLOSE)
    torch.testing.assert_close(create_method("glfc").compensated(logits, data, torch.zeros(4, dtype=torch.bool)), plain, **CLOSE)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(0, 14), st.integers(0, 14), st.integers(0, 10**6))
def test_a_shortened_herding_list_is_a_herding_list(n, short, long, seed):
    features = torch.randn(n, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    short, long = sorted((short, long))
    whole = herding(features, long).tolist()
    assert len(set(whole)) == len(whole) == min(long, n) and herding(features, short).tolist() == whole[:short]


def test_glfc_detector_by_hand(small_method, make_bench):
    """Entropy of fair logits over four classes is ln 4; it fires when it has risen by more than the threshold."""
    found = create_method("glfc").entropy(torch.zeros(3, 4))
    assert float(found) == pytest.approx(-math.log(0.25 + 1e-5), abs=1e-6)


def client_of(bench, method, task: Task) -> tuple[Engine, LocalImages, Tree]:
    engine = Engine(method, bench.backbone, bench.train, Plan(1, 4, Augment(), seed=0))
    client = bench.clients(task)[0]
    return engine, LocalImages(engine, client.index), method.begin_task({}, task, bench.backbone, torch.Generator().manual_seed(0))


def test_glfc_notices_by_entropy_once(make_bench, tasks, caplog):
    bench = make_bench()
    scale = math.log(10) / math.log(3)  # ln 3 is the rise at which a threshold of ln(10) fires on tasks of three classes
    for threshold, expected in ((math.log(3) * scale - 0.01, [True, False, False]), (math.log(3) * scale + 0.01, [False] * 3)):
        method = create_method("glfc", threshold=threshold, proxy="last", tune="head")
        _, data, state = client_of(bench, method, tasks[0])
        state = {**state, "head.weight": torch.zeros(7, DIM).double(), "head.bias": torch.zeros(7).double()}  # fair logits: entropy ln 3
        memory: Tree = {}
        for fired in expected:
            memory = method.prepare(bench.backbone, data, Context(tasks[0], 0, 3, state, memory))
            assert bool(memory["signal"]) == fired
            assert float(memory["entropy"]) == pytest.approx(math.log(3), abs=1e-4)
    method.prepare(bench.backbone, data, Context(tasks[0], 2, 3, state, memory))  # the last round
    assert "a client has not noticed task 1 by its entropy" in caplog.text


@pytest.mark.parametrize("budget", [0, 1, 5, 100])
def test_glfc_memory_keeps_to_its_budget(make_bench, small_method, watch, caplog, budget):
    run = watch(make_bench(), small_method("glfc", detector="oracle", proxy="last", memory=budget))
    assert ("has no room for one image of each" in caplog.text) == (budget == 1)
    labels, owned = run.bench.train.labels, [set(), set(), set()]
    for call in run.rounds:
        for client in call.clients:
            owned[client.number] |= set(client.index.tolist())
    for client, memory in run.rounds[-1].engine.memories.items():
        kept = memory["exemplar.index"].tolist()
        assert len(kept) <= budget and len(set(kept)) == len(kept) and set(kept) <= owned[client]
    final = run.rounds[-1].engine.memories[0]
    kept = torch.bincount(labels[final["exemplar.index"]], minlength=7)
    room = budget // int(final["learned"].sum())
    held = torch.bincount(labels[torch.cat([c.index for call in run.rounds for c in call.clients if c.number == 0]).unique()], minlength=7)
    assert kept[:5].tolist() == [min(room, n) for n in held[:5].tolist()] and not kept[5:].any()


def test_glfc_trains_on_exemplars_too(make_bench, small_method, watch):
    run = watch(make_bench(batch_size=100, epochs=1), small_method("glfc", detector="oracle", proxy="last", memory=6))
    call = next(c for c in run.rounds if c.ctx.task.index == 2)
    memory = call.engine.memories[0]
    assert len(memory["exemplar.index"]) and (run.bench.train.labels[memory["exemplar.index"]] < 5).all()


def test_glfc_old_model_is_the_last_of_the_task_before_in_cheap_mode(make_bench, small_method, watch):
    run = watch(make_bench(), small_method("glfc", proxy="last"))
    for call in run.rounds:
        old = select(call.state, "old.")
        assert bool(old) == (call.ctx.task.index > 0)
        for name, value in old.items():
            assert torch.equal(value, run.states[call.ctx.task.index - 1][name.removeprefix("old.")])


def test_glfc_uploads_gradients_only_when_it_notices(record):
    run = record("glfc")
    for call in run.rounds:
        for client, payload in zip(call.clients, call.payloads, strict=True):
            sent = select(payload, "image_gradient.")
            assert bool(sent) == (call.ctx.round == 0 and bool(sent))
            if sent:
                classes = run.bench.train.labels[client.index].unique()
                assert all(len(v) == len(classes) for v in sent.values())
                found = [int(read_label({k.removeprefix("image_gradient."): v[i] for k, v in sent.items()})) for i in range(len(classes))]
                assert found == classes.tolist()
    assert any(select(p, "image_gradient.") for call in run.rounds for p in call.payloads)


def test_lenet_has_the_official_number_of_weights():
    """8,136 in the convolutions and 769 a class: 161,936 with 200 classes, as FPPL counts."""
    for classes, size in ((200, 161_936), (100, 85_036)):
        assert sum(v.numel() for v in lenet(classes, torch.Generator()).values()) == size


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 6), st.integers(0, 10**6))
def test_the_label_can_be_read_from_any_gradient(label, seed):
    rng = torch.Generator().manual_seed(seed)
    net = lenet(7, rng)
    assert int(read_label(image_gradient(net, torch.rand(3, 32, 32, generator=rng), torch.tensor(label)))) == label


def test_image_gradient_is_the_derivative_of_the_cross_entropy(rng):
    net = {k: v.double() for k, v in lenet(4, rng).items()}
    image, label, step = torch.rand(3, 32, 32, generator=rng, dtype=torch.float64), torch.tensor(2), 1e-6
    found = image_gradient(net, image, label)
    for name, at in (("lenet.linear.bias", (1,)), ("lenet.conv0.weight", (3, 1, 2, 2)), ("lenet.conv2.bias", (5,))):
        ends = []
        for sign in (1, -1):
            moved = {k: v.clone() for k, v in net.items()}
            moved[name][at] += sign * step
            ends.append(F.cross_entropy(lenet_logits(moved, image[None]), label[None]))
        assert float(found[name][at]) == pytest.approx(float((ends[0] - ends[1]) / (2 * step)), rel=1e-4, abs=1e-8)


def test_reconstruction_comes_nearer_to_the_gradient(rng):
    net = lenet(4, rng)
    target = image_gradient(net, torch.rand(3, 32, 32, generator=rng), torch.tensor(1))
    images, label = reconstruct(net, target, steps=40, inner=2, kept=5, rng=rng)
    assert int(label) == 1 and images.shape == (5, 3, 32, 32) and images.min() >= 0 and images.max() <= 1
    start = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert mismatch(net, images[-1], label, target) < 0.5 * mismatch(net, start, label, target)


def test_glfc_picks_the_model_that_does_best_on_the_reconstructions(small_method, backbone, tasks, rng, monkeypatch):
    method = small_method("glfc")
    state = method.begin_task({}, tasks[0], backbone, rng)
    best = []
    for accuracy, bias in ((0.5, 1.0), (0.2, 2.0), (0.5, 3.0), (0.4, 4.0)):
        monkeypatch.setattr(type(method), "_monitored", lambda *_, a=accuracy: torch.tensor(a))
        merged = {**select(state, *method.optims()), "head.bias": torch.full((7,), bias)}
        state = method.server_update(state, merged, tasks[0], backbone, rng)
        best.append(float(state["best.head.bias"][0]))
    assert best == [1.0, 1.0, 3.0, 3.0]  # as good as the best replaces it
    for reset, accuracy in ((False, 0.0), (True, 0.5)):
        quirk = small_method("glfc", best_perf_no_reset=reset)
        assert float(quirk.begin_task(state, tasks[1], backbone, rng)["best.accuracy"]) == accuracy
    assert float(method.begin_task(state, tasks[1], backbone, rng)["old.head.bias"][0]) == 3.0


def test_quirks_are_off_by_default():
    known = [(name, *quirk) for name in METHODS.names() for quirk in quirks(METHODS.get(name))]
    assert len(known) >= 15
    for name, option, value, place in known:
        assert getattr(create_method(name), option) != value and place
        assert f"{option}={value}" in create_method(name, **{option: value}).remark()
    listed = listing("quirks")
    for option in ("ewc.amp_vanish=True", "lwf.distill_current=True", "dualprompt.reshape_bug=True", "hgp.init=zeros"):
        assert option in listed


def test_task_cross_entropy_shifts_labels_by_the_task_not_by_a_remainder(noise):
    """Label 4 of a task 4..6 is its first class; y % 3 would make it the second."""
    logits, task = noise(3, 7), Task(1, 4, 7, 7, 2)
    found = task_cross_entropy(logits, batch(logits, [4, 5, 6]), task)
    torch.testing.assert_close(found, F.cross_entropy(logits[:, 4:], torch.tensor([0, 1, 2])), **CLOSE)


def test_backbone_pools_class_token_and_prompts(backbone: Backbone, noise):
    x, tokens = noise(2, 3, 16, 16), noise(4, DIM)
    both = backbone(x, {"tokens": tokens}, pool="cls+prompt")
    cls, prompt = (backbone(x, {"tokens": tokens}, pool=p) for p in ("cls", "prompt"))
    torch.testing.assert_close(both, (cls + 4 * prompt) / 5, **CLOSE)


def test_normalisation_by_data_set_is_the_released_one():
    from fczoo import Settings

    assert Settings.for_dataset("cifar100").normalisation == (None, None)
    assert Settings.for_dataset("cifar100", norm_by_dataset=True).normalisation == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert Settings.for_dataset("cars196", norm_by_dataset=True, std=(2.0, 2.0, 2.0)).normalisation == ((0.0, 0.0, 0.0), (2.0, 2.0, 2.0))
    mean, std = Settings.for_dataset("cub200", norm_by_dataset=True).normalisation
    assert mean == (0.485, 0.456, 0.406) and std == (0.229, 0.224, 0.225)
    with pytest.raises(FczooError, match="knows no values for digits"):
        _ = Settings.for_dataset("digits", norm_by_dataset=True).normalisation
