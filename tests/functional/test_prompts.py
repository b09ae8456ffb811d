"""Baselines that learn prompts: L2P, DualPrompt, CODA-Prompt."""

from dataclasses import asdict
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from fczoo import Batch, FczooError, create_method
from fczoo.baselines.codap import gram_schmidt, orthonormal
from fczoo.core.backbone import Backbone
from fczoo.core.tree import drop, select
from fczoo.core.vit_forward import ForwardPass
from helpers_methods import CLOSE, DIM, batch

# --- L2P


def test_l2p_unchosen_prompts_stay_unchanged(make_bench, small_method, watch, batch_of):
    """Keep prompts that no image chooses.

    Their gradient is zero, so neither Adam nor averaging moves them.
    """
    run = watch(make_bench(), small_method("l2p", size=6, chosen=1))
    used = set()
    for call in run.rounds:
        for p, m in product(call.payloads, range(6)):
            if not torch.equal(p["pool.key"][m], call.state["pool.key"][m]):
                used.add(m)
        for client in call.clients:
            assert batch_of(run.method, run.bench.train, client.index).query.shape[1] == DIM
    idle_slots = set(range(6)) - used
    start = run.rounds[0].state
    assert used and idle_slots
    for m in idle_slots:
        assert torch.equal(run.states[2]["pool.prompt"][m], start["pool.prompt"][m])


def test_l2p_key_loss_moves_keys_towards_queries(noise, tasks):
    method = create_method("l2p", size=3, chosen=1)
    keys, query = noise(3, DIM), noise(1, DIM)
    data = batch(query.expand(4, -1), [0, 1, 2, 0])
    leaf = keys.clone().requires_grad_()
    similarity, chosen = method.choose({"pool.key": leaf}, data)
    (gradient,) = torch.autograd.grad(
        -method.pull * similarity.gather(1, chosen).sum(-1).mean(), leaf
    )
    best = int(chosen[0, 0])
    assert gradient[best].any()
    assert not gradient[[i for i in range(3) if i != best]].any()
    new_similarity = F.cosine_similarity(keys[best] - 0.1 * gradient[best], query[0], dim=0)
    assert new_similarity > F.cosine_similarity(keys[best], query[0], dim=0)


def test_l2p_without_key_loss_keeps_random_keys(make_bench, small_method, watch):
    run = watch(make_bench(), small_method("l2p", no_key_loss=True))
    assert torch.equal(run.states[2]["pool.key"], run.rounds[0].state["pool.key"])
    assert not torch.equal(run.states[2]["pool.prompt"], run.rounds[0].state["pool.prompt"])


def test_l2p_prepends_25_tokens(backbone, noise, tasks, rng, monkeypatch):
    """Put 25 tokens in front of the image.

    With the defaults there are 222 tokens on ViT-B/16 at 224 px, 25 and 197; here 25 and 5.
    """
    method, token_counts = create_method("l2p"), []
    state = {k: v.double() for k, v in method.begin_task({}, tasks[0], backbone, rng).items()}
    attention = ForwardPass._attention
    monkeypatch.setattr(
        ForwardPass,
        "_attention",
        lambda self, hidden, *rest: (
            token_counts.append(hidden.shape[1]) or attention(self, hidden, *rest)
        ),
    )
    data = Batch(
        noise(2, 3, 16, 16),
        torch.zeros(2, dtype=torch.int64),
        torch.ones(2).double(),
        noise(2, DIM),
    )
    assert method.predict(backbone, state, data, tasks[0]).shape == (2, 3)
    assert set(token_counts) == {25 + 5}


def test_l2p_rejects_more_choices_than_prompts():
    with pytest.raises(FczooError, match=r"l2p\.chosen is 6, more than the 5 prompts"):
        create_method("l2p", size=5, chosen=6)


def test_backbone_pools_class_token_and_prompts(backbone: Backbone, noise):
    x, tokens = noise(2, 3, 16, 16), noise(4, DIM)
    mean = backbone(x, {"tokens": tokens}, pool="cls+prompt")
    cls, prompt = (backbone(x, {"tokens": tokens}, pool=p) for p in ("cls", "prompt"))
    torch.testing.assert_close(mean, (cls + 4 * prompt) / 5, **CLOSE)


# --- DualPrompt


def test_dualprompt_freezes_slots_of_finished_tasks(record):
    run = record("dualprompt")
    for t in (1, 2):
        for name, value in select(run.states[t], "past.").items():
            last = run.states[t - 1][name.replace("past.", "expert.", 1)]
            assert len(value) == t and torch.equal(value[-1], last)
            if t == 2:
                assert torch.equal(value[:1], run.states[1][name])


def test_dualprompt_trains_task_slot_for_any_query(record, batch_of):
    run = record("dualprompt")
    call = next(c for c in run.rounds if c.ctx.task.index == 1)
    data = batch_of(run.method, run.bench.train, call.clients[0].index[:3])
    train = select(call.state, *run.method.training().optims)
    quirk = create_method("dualprompt", **{**asdict(run.method), "no_key_loss": True})
    a, b = (
        quirk.loss(run.bench.backbone, train, data._replace(query=q), call.ctx)[0]
        for q in (data.query, -data.query)
    )
    assert torch.equal(a, b)


def test_dualprompt_matches_only_trained_slots(record, noise):
    run = record("dualprompt")
    state = {k: v.clone() for k, v in run.states[1].items()}
    query = torch.stack([state["past.key"][0], state["expert.key"], state["next.key"][0]])
    assert run.method.match(state, query)[:2].tolist() == [0, 1]
    assert int(run.method.match(state, query)[2]) < 2
    quirk = create_method("dualprompt", **{**asdict(run.method), "match_all_slots": True})
    assert quirk.match(state, query).tolist() == [0, 1, 2]
    assert run.method.match(run.states[0], query).tolist() == [0, 0, 0]


def test_dualprompt_warm_start_copies_prefixes_without_key(small_method, backbone, tasks, rng):
    for warm in (False, True):
        method = small_method("dualprompt", warm_start=warm)
        first = method.begin_task({}, tasks[0], backbone, rng)
        second = method.begin_task(first, tasks[1], backbone, rng)
        same = {k for k in select(first, "expert.") if torch.equal(first[k], second[k])}
        assert same == (
            {k for k in select(first, "expert.") if k != "expert.key"} if warm else set()
        )


def test_dualprompt_reshape_bug_is_correct_only_for_one_image(noise):
    key, value = noise(4, 3, DIM), noise(4, 3, DIM)
    method, quirk = create_method("dualprompt"), create_method("dualprompt", reshape_bug=True)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            method.prefixes(key[:1], value[:1], torch.ones(1)),
            quirk.prefixes(key[:1], value[:1], torch.ones(1)),
            strict=True,
        )
    )
    pair = key[:1].expand(4, -1, -1), value[:1].expand(4, -1, -1)
    wrong = quirk.prefixes(*pair, torch.ones(4))
    assert torch.equal(wrong[0][:2], pair[0][:2])
    assert torch.equal(wrong[1][:2], pair[0][:2])  # first half: keys as both
    assert torch.equal(wrong[0][2:], pair[1][2:])
    assert torch.equal(wrong[1][2:], pair[1][2:])  # second half: values as both


def test_dualprompt_reshape_bug_does_not_depend_on_padding(noise):
    key, value = noise(5, 3, DIM), noise(5, 3, DIM)
    quirk = create_method("dualprompt", reshape_bug=True)
    plain = quirk.prefixes(key[:3], value[:3], torch.ones(3))
    with_padding = quirk.prefixes(key, value, torch.tensor([1.0, 1, 1, 0, 0]))
    assert all(torch.equal(a, b[:3]) for a, b in zip(plain, with_padding, strict=True))


# --- CODA-Prompt


def test_codap_new_components_are_orthogonal_to_old(record):
    run = record("codap")
    for call in run.rounds:
        if call.ctx.round:
            continue
        for name, fresh in select(call.state, "component.").items():
            rows = fresh.flatten(1)
            torch.testing.assert_close(
                rows @ rows.T, torch.eye(len(rows), dtype=rows.dtype), rtol=1e-5, atol=1e-5
            )
            old = call.state.get(name.replace("component.", "past.", 1))
            if call.ctx.task.index:
                assert (rows @ old.flatten(1).T).abs().max() < 1e-5


def test_codap_classical_gram_schmidt_needs_orthonormal_rows(noise):
    old, draws = orthonormal(noise(0, DIM), noise(3, DIM)), noise(2, DIM)
    torch.testing.assert_close(gram_schmidt(old, draws), orthonormal(old, draws), **CLOSE)
    rows = old + 0.3 * noise(3, DIM)
    assert (gram_schmidt(rows, draws) @ rows.T).abs().max() > 1e-3
    assert (orthonormal(rows, draws) @ rows.T).abs().max() < 1e-9


def test_codap_classical_gram_schmidt_by_hand():
    """Compare the remainder of Gram-Schmidt with a value worked out by hand.

    Old row (2, 0), draws (1, 1): shadow (1, 0), remainder (0, 1).
    """
    assert gram_schmidt(torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 1.0]])).tolist() == [
        [0.0, 1.0]
    ]


def test_codap_old_components_are_frozen_and_contribute(record, batch_of):
    run = record("codap")
    for t in (1, 2):
        for name, value in select(run.states[t], "past.").items():
            old_state = run.states[t - 1]
            parts = [
                old_state[k]
                for k in (name, name.replace("past.", "component.", 1))
                if k in old_state
            ]
            assert torch.equal(value, torch.cat(parts))
    data, state = batch_of(run.method, run.bench.test, torch.arange(4)), run.states[2]
    with_old, without = (
        run.method.prefixes(state, data.query),
        run.method.prefixes(drop(state, "past."), data.query),
    )
    assert all((with_old[k] - without[k]).abs().max() > 1e-6 for k in with_old)


def test_codap_weights_are_cosines(record, batch_of):
    run = record("codap")
    data = batch_of(run.method, run.bench.test, torch.arange(4))
    weights = run.method.weights(run.states[2], 0, data.query)
    assert weights.abs().max() <= 1 + 1e-12
    torch.testing.assert_close(
        run.method.weights(run.states[2], 0, 7 * data.query), weights, **CLOSE
    )


def test_codap_rejects_invalid_number_of_components(backbone, tasks, rng):
    with pytest.raises(FczooError, match=r"codap\.components is 100, more than the 32 dimensions"):
        create_method("codap").begin_task({}, tasks[0], backbone, rng)
    with pytest.raises(FczooError, match=r"codap\.components is 2, fewer than the 3 tasks"):
        create_method("codap", components=2).begin_task({}, tasks[0], backbone, rng)
