"""Outputs of official implementations of baselines, reproduced (tests/methods/golden/README.md).

``out`` holds outputs of the default, ``quirk`` those of the option of that name.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo import Context, Task, Tree, create_method
from fczoo.aggregators.averaging import fedavg, uniform
from fczoo.core.payload import Payload
from fczoo.functional.exemplars import herding
from fczoo.functional.heads import head_logits, train_head
from fczoo.functional.losses import normalised_cross_entropy, task_cross_entropy
from helpers_golden import golden
from helpers_methods import compared_method
from helpers_official import Features, TanhLayer, flat, grads, network, query_batch, same
from helpers_payload import server_context

# --- EWC

TASKS = (Task(0, 0, 4, 7, 2), Task(1, 4, 7, 7, 2))


def ewc_state(method, g: Tree) -> list[Tree]:
    """Return the server's state after each of the two tasks."""
    states, state = [], {}
    for t, task in enumerate(TASKS):
        state = {**state, **network(g[f"in.theta_global{t}"], 5, 6, 7)}
        payloads, ctx = [], Context(task, 0, 1, state)
        for k in range(2):
            x, y = g[f"in.x{t}{k}"], g[f"in.y{t}{k}"]
            payloads.append(
                Payload(
                    method.collect("task_end", TanhLayer(), state, query_batch(x, y), ctx),
                    k,
                    len(y),
                )
            )
            assert same(flat(fishers(payloads[-1])), g[f"out.fisher_sum{t}{k}"])
            if t == 1:
                wrong = create_method("ewc", modulo_labels=True).collect(
                    "task_end", TanhLayer(), state, query_batch(x, y), ctx
                )
                assert same(flat(fishers(wrong)), g[f"quirk.fisher_sum_modulo_label1{k}"])
                assert not same(
                    flat(fishers(payloads[-1])), g[f"quirk.fisher_sum_modulo_label1{k}"]
                )
        sums = {name: payloads[0][name] + payloads[1][name] for name in payloads[0]}
        state = method.update_from(
            "task_end",
            state,
            sums,
            server_context(task, num_samples=sum(p.num_samples for p in payloads)),
        )
        states.append(state)
    return states


def fishers(tree: Tree) -> Tree:
    return {k.removeprefix("fisher."): v for k, v in tree.items() if k.startswith("fisher.")}


def test_ewc_fisher_and_anchor() -> None:
    g = golden("ewc_fed")
    method = create_method("ewc", strength=float(g["in.lambda"]), decay=float(g["in.gamma"]))
    for t, state in enumerate(ewc_state(method, g)):
        assert same(flat(fishers(state)), g[f"out.server_fisher{t}"])
        assert same(
            flat({k.removeprefix("anchor."): v for k, v in state.items()}), g[f"out.checkpoint{t}"]
        )
        n = [len(g[f"in.y{t}{k}"]) for k in range(2)]
        payloads = [Payload({"theta": g[f"in.client_params{t}{k}"]}, k, n[k]) for k in range(2)]
        assert same(fedavg(payloads)["theta"], g[f"out.params_weighted{t}"])


def test_ewc_penalty() -> None:
    g = golden("ewc_fed")
    options = {"strength": float(g["in.lambda"]), "decay": float(g["in.gamma"])}
    state = ewc_state(create_method("ewc", **options), g)[0]
    ctx, batch = Context(TASKS[1], 0, 2, state), query_batch(g["in.x_local"], g["in.y_local"])

    def gradient(**more) -> tuple[Tensor, Tensor]:
        train = {
            k: v.clone().requires_grad_() for k, v in network(g["in.theta_local"], 5, 6, 7).items()
        }
        loss, _ = create_method("ewc", **options, **more).loss(TanhLayer(), train, batch, ctx)
        return loss, flat(dict(zip(train, grads(loss, *train.values()), strict=True)))

    loss, slope = gradient()
    assert same(loss, g["out.ce"] + g["out.penalty_value"])
    assert same(slope, g["out.grad_ce_plus_penalty"])
    assert not same(slope, g["quirk.grad_amp_vanish"])
    assert same(gradient(amp_vanish=True)[1], g["quirk.grad_amp_vanish"])
    none = create_method("ewc", **{**options, "strength": 0.0}).loss(
        TanhLayer(), network(g["in.theta_local"], 5, 6, 7), batch, ctx
    )[0]
    assert same(none, g["out.ce"])


# --- LwF


def test_lwf_distils_old_classes() -> None:
    g, task = golden("lwf_mammoth"), Task(1, 6, 10, 10, 2)
    options = {"temperature": float(g["in.T"]), "strength": float(g["in.alpha"])}
    student = g["in.student"].clone().requires_grad_()
    batch = query_batch(student, g["in.label"], g["in.teacher"])
    kd = create_method("lwf", **options).distillation(student, batch, task)
    assert same(kd, g["out.kd"]) and same(grads(kd, student)[0], g["out.kd_grad"])
    assert not grads(create_method("lwf", **options).distillation(student, batch, task), student)[
        0
    ][:, 6:].any()
    assert same(
        create_method("lwf", **options).distillation(g["in.teacher"], batch, task), g["out.kd_self"]
    )

    identity = {"head.weight": torch.eye(10), "head.bias": torch.zeros(10)}
    total = create_method("lwf", **options).loss(
        Features(), identity, batch, Context(task, 0, 1, {})
    )[0]
    assert same(total, g["out.total_ce_over_cur"])
    assert same(grads(total, student)[0], g["out.total_grad"])
    wrong = create_method("lwf", **options, distill_current=True).loss(
        Features(), identity, batch, Context(task, 0, 1, {})
    )[0]
    assert not same(wrong, g["out.total_ce_over_cur"])
    by_hand = (
        -((g["in.teacher"][:, 6:] / 2).softmax(1) * (g["in.student"][:, 6:] / 2).log_softmax(1))
        .sum(1)
        .mean()
    )
    torch.testing.assert_close(
        wrong, task_cross_entropy(g["in.student"], batch, task) + 0.5 * by_hand
    )


# --- FedProto


def test_fedproto_prototypes_and_average() -> None:
    g, task = golden("fedproto"), Task(1, 4, 7, 7, 2)
    method, payloads = compared_method("fedproto"), []
    for k in range(3):
        feats, labels = g[f"in.feats{k}"], g[f"in.labels{k}"]
        sums = method.collect(
            "after_training", Features(), {}, query_batch(feats, labels), Context(task, 0, 1, {})
        )
        for c in set(labels.tolist()):
            n = sums["class.count"][c - 4]
            assert int(n) == int(g[f"out.k{k}.c{c}.n"])
            assert same(sums["class.sum"][c - 4] / n, g[f"out.k{k}.c{c}.proto"])
        payloads.append(Payload({"theta": g[f"in.params{k}"], **sums}, k, len(labels)))
    aggregate = method.aggregate(payloads, uniform)
    assert method.training().averaging == "uniform"
    assert same(aggregate["theta"], g["out.params_uniform"])
    start = {"all.mean": torch.zeros(7, 6), "all.known": torch.zeros(7)}
    state = method.server_update(start, aggregate, server_context(task))
    assert same(state["prototype.mean"], torch.stack([g[f"out.global.c{c}"] for c in (4, 5, 6)]))
    assert not same(
        state["prototype.mean"],
        torch.stack([g[f"alt.official_unweighted_global.c{c}"] for c in (4, 5, 6)]),
    )
    assert same(state["all.mean"][4:], state["prototype.mean"])
    assert not state["all.mean"][:4].any()


def test_fedproto_loss() -> None:
    g, task = golden("fedproto"), Task(1, 4, 7, 7, 2)
    prototypes = {
        "prototype.mean": torch.stack([g[f"out.global.c{c}"] for c in (4, 5, 6)]),
        "prototype.known": torch.ones(3),
    }
    feats, logits = (g[f"in.batch_{k}"].clone().requires_grad_() for k in ("feats", "logits"))
    batch, method = query_batch(feats, g["in.batch_label"]), compared_method("fedproto")
    assert method.strength == pytest.approx(float(g["in.ld"]))
    loss = task_cross_entropy(logits, batch, task) + method.strength * method.distance(
        feats, batch, Context(task, 1, 2, prototypes)
    )
    assert same(loss, g["out.loss"])
    for ours, name in zip(grads(loss, feats, logits), ("feats", "logits"), strict=True):
        assert same(ours, g[f"out.grad_{name}"])
    first = {"prototype.mean": torch.zeros(3, 6), "prototype.known": torch.zeros(3)}
    loss = task_cross_entropy(logits, batch, task) + method.strength * method.distance(
        feats, batch, Context(task, 0, 2, first)
    )
    assert same(loss, g["out.loss_first_round"])
    assert same(grads(loss, logits)[0], g["out.grad_logits_first_round"])


def test_fedproto_distance_per_sample() -> None:
    """Compare the distance per sample with the official one.

    Class 6 has no prototype: it gives 0 and stays in the denominator.
    """
    g, task = golden("fedproto"), Task(1, 4, 7, 7, 2)
    mean = torch.stack([g["out.global.c4"], g["out.global.c5"], torch.full((6,), 9.0)])
    prototypes = {"prototype.mean": mean, "prototype.known": torch.tensor([1.0, 1.0, 0.0])}
    train = {k: v.clone().requires_grad_() for k, v in network(g["in.ps.theta"], 5, 6, 7).items()}
    features = TanhLayer()(g["in.ps.x"], train)
    batch = query_batch(features, g["in.batch_label"])
    distance = create_method("fedproto").distance(features, batch, Context(task, 1, 2, prototypes))
    assert same(distance, g["alt.per_sample.loss_proto"])
    total = F.cross_entropy(head_logits(train, features), g["in.batch_label"]) + distance
    assert same(total, g["alt.per_sample.loss_total"])
    new_theta = flat(train) - 0.01 * flat(
        dict(zip(train, grads(total, *train.values()), strict=True))
    )
    assert same(new_theta, g["alt.per_sample.theta_after_sgd"])
    assert not same(
        compared_method("fedproto").distance(features, batch, Context(task, 1, 2, prototypes)),
        g["alt.per_sample.loss_proto"],
    )


# --- CCVR


@pytest.mark.parametrize("quirk", [False, True])
def test_ccvr_statistics(quirk: bool) -> None:
    """Compare statistics with the recorded output.

    Client 0 has a single image of class 5, which is left out except with ``triple_pass``.
    """
    g, task = golden("ccvr_fed"), Task(1, 3, 7, 7, 2)
    method = (
        compared_method("ccvr", covariance="full", triple_pass=True)
        if quirk
        else compared_method("ccvr")
    )
    for k in range(3):
        batch = query_batch(g[f"in.feats{k}"], g[f"in.labels{k}"])
        ctx = Context(task, 0, 1, {})
        upload = method.make_upload(
            {}, method.collect("after_training", Features(), {}, batch, ctx), ctx
        )
        rows = method.aggregate([Payload(upload)], lambda payloads: dict(payloads[0]))
        tag = f"quirk.full.k{k}" if quirk else f"out.k{k}"
        assert rows["gauss.label"].tolist() == [c for c in range(3, 7) if f"{tag}.c{c}.n" in g]
        for i, c in enumerate(rows["gauss.label"].tolist()):
            assert int(rows["gauss.count"][i]) == int(g[f"{tag}.c{c}.n"])
            if quirk:
                assert same(rows["gauss.cov"][i], g[f"{tag}.c{c}.cov"])
            else:
                assert same(rows["gauss.mean"][i], g[f"{tag}.c{c}.mean"])
                assert same(rows["gauss.var"][i], g[f"{tag}.c{c}.var"])


def test_ccvr_default_full_covariance_is_unbiased() -> None:
    g, ctx = golden("ccvr_fed"), Context(Task(1, 3, 7, 7, 2), 0, 1, {})
    method = compared_method("ccvr", covariance="full")
    rows = method.make_upload(
        {},
        method.collect(
            "after_training", Features(), {}, query_batch(g["in.feats0"], g["in.labels0"]), ctx
        ),
        ctx,
    )
    for label, cov in zip(rows["gauss.label"].tolist(), rows["gauss.cov"], strict=True):
        assert same(cov, g["in.feats0"][g["in.labels0"] == label].T.cov())
        assert not same(cov, g[f"quirk.full.k0.c{label}.cov"])


def test_ccvr_calibration() -> None:
    """Take the official twenty steps on the recorded draws: five epochs of four batches."""
    g, losses = golden("ccvr_fed"), []
    method = compared_method("ccvr")
    n = [len(g[f"in.labels{k}"]) for k in range(3)]
    payloads = [Payload({"theta": g[f"in.params{k}"]}, k, n[k]) for k in range(3)]
    theta = fedavg(payloads)["theta"]
    assert same(theta, g["out.avg_params"])
    epochs = iter(zip(g["in.batches"].split(4), g["in.targets"].split(4), strict=True))

    def draw() -> tuple[Tensor, Tensor]:
        x, y = next(epochs)
        return x.flatten(0, 1), y.flatten() + 3

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        losses.append(normalised_cross_entropy(logits, labels, method.logit_norm))
        return losses[-1]

    head = {"head.weight": theta[:56].view(7, 8), "head.bias": theta[56:]}
    new_head = train_head(
        head, (3, 7), draw, loss, method.server_epochs, method.server_lr, int(g["in.how_many"])
    )
    assert same(torch.stack(losses), g["out.step_losses"])
    assert same(new_head["head.weight"], g["out.head_w"])
    assert same(new_head["head.bias"], g["out.head_b"])
    assert torch.equal(new_head["head.weight"][:3], head["head.weight"][:3])


# --- GLFC


@pytest.mark.parametrize("scenario", ["mixed", "nolearned", "onlynew", "onlyold"])
def test_glfc_loss_matches_official_code(scenario):
    g = golden("glfc_loss")
    method, old_classes = create_method("glfc"), torch.zeros(8, dtype=torch.bool)
    old_classes[g[f"in.{scenario}.learned"].long()] = True
    logits = g["in.logits"].clone().requires_grad_()
    data = query_batch(g["in.logits"], g[f"in.{scenario}.label"].long(), g["in.old_logits"])
    assert same(method.weights(logits, data, old_classes), g[f"out.{scenario}.w"])
    compensation, relations = (
        method.compensated_loss(logits, data, old_classes),
        method.relations(logits, data, 4),
    )
    assert same(compensation, g[f"out.{scenario}.loss_gc"])
    assert same(
        torch.autograd.grad(compensation, logits, retain_graph=True)[0],
        g[f"out.{scenario}.grad_gc"],
    )
    assert same(relations, g[f"out.{scenario}.loss_rd"])
    total = (1 - method.relation) * compensation + method.relation * relations
    assert same(total, g[f"out.{scenario}.loss_total"])
    assert same(torch.autograd.grad(total, logits)[0], g[f"out.{scenario}.grad_total"])


def test_herding_matches_official_code():
    g = golden("glfc_herding")
    assert herding(g["in.feat_a"], int(g["in.m_a"])).tolist() == g["out.sel_a"].tolist()
    assert (
        herding(g["in.feat_b"], int(g["in.m_b"])).tolist() == g["alt.sel_b_no_duplicates"].tolist()
    )
    assert (
        herding(g["in.feat_b"], int(g["in.m_b"]), repeats=True).tolist()
        == g["quirk.sel_b_with_duplicates"].tolist()
    )
