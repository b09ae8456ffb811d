"""What the papers' methods promise, one by one, and every named option of every method."""

import math
import types
import typing
from dataclasses import fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo import Batch, Context, FczooError, Task, create_method
from fczoo.aggregate import fedavg
from fczoo.backbone import Backbone
from fczoo.core import drop, select
from fczoo.engine import broadcast
from fczoo.gaussians import draw_features, normalised_cross_entropy
from fczoo.registry import METHODS

CLOSE = {"rtol": 1e-10, "atol": 1e-10}  # float64
DIM = 32


@pytest.fixture
def images_batch(make_bench, batch_of):
    """Six test images with query features."""
    return batch_of(create_method("fcilpt"), make_bench().test, torch.arange(6))


# --- options


def named_values(cls: type) -> list[tuple[str, object]]:
    """(field, value) for each choice that the type of a field lists: literals, true and false, none."""
    found = []
    for field, hint in typing.get_type_hints(cls).items():
        if field not in {f.name for f in fields(cls)}:
            continue
        for part in typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,):
            if typing.get_origin(part) is typing.Literal:
                found += [(field, value) for value in typing.get_args(part)]
            elif part is bool:
                found += [(field, True), (field, False)]
            elif part is types.NoneType:
                found.append((field, None))
    return found


@pytest.mark.parametrize(("name", "option", "value"), [(name, *pair) for name in METHODS.names() for pair in named_values(METHODS.get(name))])
def test_every_named_option_runs(make_bench, small_method, name, option, value):
    result = make_bench(torch.float32, rounds=1, epochs=1, batch_size=8).run(small_method(name, **{option: value}))
    assert result.options[option] == value
    assert [len(row) for row in result.accuracy] == [1, 2, 3]


def test_named_options_are_found():
    """So that the test above cannot become empty unnoticed."""
    found = named_values(METHODS.get("hgp"))
    assert {("init", "zeros"), ("clip", None), ("server_cosine", False), ("logit_norm", None)} <= set(found)
    assert not any(option in ("lr", "blocks", "name", "paper") for option, _ in found)


# --- what crosses the wire


@pytest.mark.parametrize(
    ("name", "down", "up"),
    [
        ("pilora", "past. lora. frozen. prototype", "lora. prototype class.count class.mean"),
        ("hgp", "prefix. head.", "prefix. head. gauss.label gauss.count gauss.mean gauss.var"),
        ("fcilpt", "pool. common head.", "pool. common head. usage"),
        ("fppl", "past. prompt. fusion. head. prototype.", "prompt. fusion. head. local.label local.mean"),
    ],
)
def test_the_methods_send_what_their_papers_say(record, name, down, up):
    run = record(name)
    for sent, names in ((broadcast(run.method, run.states[2]), down), (drop(run.rounds[-1].payloads[0], "num_samples", "client"), up)):
        assert all(select(sent, prefix) for prefix in names.split())
        assert not drop(sent, *names.split())


# --- PILoRA


def pilora_state(noise, past: int) -> dict[str, Tensor]:
    """Seven classes of which 3, 4 are the current ones; ``past`` earlier tasks' LoRA beside the current one."""
    state = {"frozen.before": noise(3, DIM), "prototype": noise(2, DIM), "frozen.after": noise(2, DIM)}
    for part in "qv":
        state |= {f"lora.0.{part}.a": noise(4, DIM), f"lora.0.{part}.b": 0.2 * noise(DIM, 4)}
        if past:
            state |= {f"past.0.{part}.a": noise(past, 4, DIM), f"past.0.{part}.b": 0.2 * noise(past, DIM, 4)}
    return state


def shifted(backbone: Backbone, change: dict[str, Tensor]) -> Backbone:
    """The backbone with q and v of its first block changed by the given matrices."""
    weight = backbone.weights["blocks.0.attn.qkv.weight"].clone()
    weight[:DIM] += change["q"]
    weight[2 * DIM :] += change["v"]
    return Backbone(backbone.config, {**backbone.weights, "blocks.0.attn.qkv.weight": weight})


def rms(features: Tensor, prototypes: Tensor) -> Tensor:
    return torch.tensor(
        [[math.sqrt(sum((a - b) ** 2 for a, b in zip(f, p, strict=True)) / len(f)) for p in prototypes.tolist()] for f in features.tolist()]
    )


def test_pilora_with_zero_b_is_the_frozen_backbone(backbone, images_batch, noise, tasks):
    state = pilora_state(noise, past=2)
    state |= {k: torch.zeros_like(v) for k, v in state.items() if k.endswith(".b")}
    logits = create_method("pilora").predict(backbone, state, images_batch, tasks[1])
    table = torch.cat([state["frozen.before"], state["prototype"]])
    torch.testing.assert_close(logits, -rms(backbone(images_batch.x), table).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("past", [0, 1, 2])
@pytest.mark.parametrize("merge", ["sum", "factor_sum", "first"])
def test_pilora_merges_lora_of_all_tasks(backbone, images_batch, noise, tasks, merge, past):
    """With one task every merge is that task; later: sum of B_i A_i, (sum B)(sum A), or B_1 A_1 alone."""
    state, change = pilora_state(noise, past), {}
    for part in "qv":
        pairs = [(state[f"past.0.{part}.a"][i], state[f"past.0.{part}.b"][i]) for i in range(past)]
        pairs.append((state[f"lora.0.{part}.a"], state[f"lora.0.{part}.b"]))
        change[part] = {
            "sum": sum(b @ a for a, b in pairs),
            "factor_sum": sum(b for _, b in pairs) @ sum(a for a, _ in pairs),
            "first": pairs[0][1] @ pairs[0][0],
        }[merge]
    logits = create_method("pilora", merge=merge).predict(backbone, state, images_batch, tasks[1])
    expected = -rms(shifted(backbone, change)(images_batch.x), torch.cat([state["frozen.before"], state["prototype"]]))
    torch.testing.assert_close(logits, expected.double(), rtol=1e-5, atol=1e-5)


def test_pilora_overlap_with_earlier_lora():
    """Sum of |A_i A_t'| over earlier tasks and over q and v: zero exactly when all rows are orthogonal."""
    method = create_method("pilora", ortho=1.0, sparse=0.0)
    now = {"lora.0.q.a": torch.tensor([[1.0, 0, 0, 0], [0, 2.0, 0, 0]]), "lora.0.v.a": torch.tensor([[0, 0, 3.0, 0]])}

    def penalty(q: list, v: list) -> float:
        return float(method.lora_penalty(now, {"past.0.q.a": torch.tensor(q), "past.0.v.a": torch.tensor(v)}))

    assert penalty([[[0, 0, 5.0, 1.0]]], [[[1.0, 1.0, 0, -1.0]]]) == 0
    assert penalty([[[1.0, -3.0, 0, 0]]], [[[1.0, 1.0, 0, -1.0]]]) == 1 + 6
    assert penalty([[[0, 0, 1.0, 0]]], [[[0, 0, -2.0, 0]]]) == 6
    assert penalty([[[1.0, 0, 0, 0]], [[-1.0, 1.0, 0, 0]]], [[[0, 0, 0, 1.0]], [[0, 0, 1.0, 1.0]]]) == 1 + (1 + 2) + 3  # two earlier tasks
    assert penalty([[[-1.0, 3.0, 0, 0]]], [[[1.0, 1.0, 0, -1.0]]]) == 7  # the sign of a row does not matter
    assert float(method.lora_penalty(now, {})) == 0  # no earlier task


def test_pilora_size_of_a():
    now = {"lora.0.q.a": torch.tensor([[1.0, -2.0]]), "lora.0.v.a": torch.tensor([[0.5, 0.0]]), "lora.0.q.b": torch.full((2, 1), 100.0)}
    assert float(create_method("pilora", ortho=0.5, sparse=0.01).lora_penalty(now, {})) == pytest.approx(0.035)


def test_pilora_prototype_loss_by_hand():
    """One feature at distance 1 of its own and 3 of the other prototype (root mean square over two dimensions)."""
    method = create_method("pilora", pull=0.1, support="task", sharpness=2.0)
    task = Task(0, 0, 2, 2, 1)
    train = {"prototype": torch.tensor([[1.0, 1.0], [3.0, -3.0]])}
    shared = {"frozen.before": torch.empty(0, 2), "frozen.after": torch.empty(0, 2)}
    batch = Batch(torch.empty(1, 0), torch.tensor([0]), torch.ones(1), torch.empty(1, 0))
    loss = method.prototype_loss(torch.zeros(1, 2), train, batch, Context(task, 0, 1, shared))
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-2.0 * (3 - 1))) + 0.1 * 1)


def test_pilora_has_a_finite_gradient_on_its_prototype():
    method = create_method("pilora")
    features = torch.ones(1, 4, requires_grad=True)
    method.distances(features, torch.ones(1, 4)).sum().backward()
    assert torch.equal(features.grad, torch.zeros(1, 4))


def test_pilora_keeps_what_it_froze(record, tasks):
    run = record("pilora")
    first, second, last = (run.states[t] for t in range(3))
    begin = run.rounds[0].state
    assert not torch.equal(first["prototype"], begin["prototype"]), "nothing was trained"
    assert torch.equal(second["frozen.before"], first["prototype"])
    assert torch.equal(last["frozen.before"], torch.cat([first["prototype"], second["prototype"]]))
    assert torch.equal(torch.cat([first["frozen.after"][2:]]), second["frozen.after"]) and not len(last["frozen.after"])
    for name, value in select(first, "lora.").items():
        past = name.replace("lora.", "past.")
        assert past not in first
        assert torch.equal(second[past], value[None])
        assert torch.equal(last[past], torch.stack([value, second[name]]))


def test_pilora_keeps_the_prototype_of_a_class_that_nobody_holds_in_head_tune(tasks, noise):
    method = create_method("pilora", head_tune=True)
    before = noise(3, DIM)
    sums = {"class.count": torch.tensor([2.0, 0.0, 1.0]), "class.sum": noise(3, DIM)}
    after = method.absorb("begin", {"prototype": before}, sums, tasks[0])["prototype"]
    torch.testing.assert_close(after, torch.stack([sums["class.sum"][0] / 2, before[1], sums["class.sum"][2]]).to(after))


# --- HGP


def mixture(labels: list[int], counts: list[float], means: list, variances: list) -> dict[str, Tensor]:
    return {
        "gauss.label": torch.tensor(labels),
        "gauss.client": torch.arange(len(labels)),
        "gauss.count": torch.tensor(counts, dtype=torch.float64),
        "gauss.mean": torch.tensor(means, dtype=torch.float64),
        "gauss.var": torch.tensor(variances, dtype=torch.float64),
    }


def test_hgp_draws_client_means_when_the_spread_is_zero(rng):
    gauss = mixture([0, 0, 2, 2], [3, 1, 4, 0], [[1.0, 1.0], [2.0, -2.0], [7.0, 0.0], [99.0, 99.0]], [[5.0, 5.0]] * 4)
    x, y = draw_features(gauss, 800, rng, spread=0.0)
    assert len(x) == len(y) == 800
    drawn = {(label, *row) for label, row in zip(y.tolist(), x.tolist(), strict=True)}
    assert drawn == {(0, 1.0, 1.0), (0, 2.0, -2.0), (2, 7.0, 0.0)}  # never the one without images, never class 1


@pytest.mark.parametrize(("by_count", "share"), [(False, 0.5), (True, 4 / 24)])
def test_hgp_draws_classes_evenly_or_by_count(rng, by_count, share):
    gauss = mixture([0, 0, 2], [3, 1, 20], [[0.0], [1.0], [2.0]], [[1.0]] * 3)
    x, y = draw_features(gauss, 10_000, rng, spread=0.0, by_count=by_count)
    assert (y == 0).double().mean() == pytest.approx(share, abs=0.02)  # four standard deviations
    assert (x[y == 0] == 0).double().mean() == pytest.approx(0.75, abs=0.04)


def test_hgp_draws_follow_the_law_of_total_variance(rng):
    """Class mean: sum pi mu. Variance: spread * sum pi var + sum pi (mu - mean)^2. pi = 3/4, 1/4."""
    gauss = mixture([1, 1], [3, 1], [[0.0, 4.0], [8.0, 4.0]], [[1.0, 2.0], [5.0, 0.0]])
    x, y = draw_features(gauss, 200_000, rng, spread=3.0)
    assert set(y.tolist()) == {1}
    np.testing.assert_allclose(x.mean(0), [2.0, 4.0], atol=0.05)
    within, between = np.array([0.75 * 1 + 0.25 * 5, 0.75 * 2]), np.array([0.75 * 4 + 0.25 * 36, 0.0])
    np.testing.assert_allclose(x.var(0), 3 * within + between, rtol=0.02)


def test_hgp_clients_with_equal_statistics_count_as_one(rng):
    """Client shares 1 : 2 + 3 of class 0 as 1 : 5."""
    split = mixture([0, 0, 0], [5, 10, 15], [[0.0], [1.0], [1.0]], [[1.0], [2.0], [2.0]])
    joint = mixture([0, 0], [5, 25], [[0.0], [1.0]], [[1.0], [2.0]])
    for gauss in (split, joint):
        x, _ = draw_features(gauss, 100_000, rng, spread=3.0)
        assert float(x.mean()) == pytest.approx(5 / 6, abs=0.03)
        assert float(x.var()) == pytest.approx(3 * (1 / 6 + 2 * 5 / 6) + 1 / 6 * 5 / 6, rel=0.03)


def test_hgp_statistics_by_hand():
    """Class 5 has values 1, 3, 5: mean 3, variance 4. Class 6 has none, class 7 one: it gets class 5's variance."""
    count, total, squares = [3.0, 0.0, 1.0], [[9.0], [0.0], [7.0]], [[35.0], [0.0], [49.0]]
    sums = {"class.count": torch.tensor(count), "class.sum": torch.tensor(total), "class.squares": torch.tensor(squares)}
    found = create_method("hgp").pack({}, sums, Context(Task(1, 5, 8, 8, 2), 0, 1, {}))
    assert found["gauss.label"].tolist() == [5, 7] and found["gauss.count"].tolist() == [3, 1]
    assert found["gauss.mean"].tolist() == [[3.0], [7.0]]
    assert found["gauss.var"].tolist() == [[4.0], [4.0]]
    alone = create_method("hgp").pack({}, {k: v[2:] for k, v in sums.items()}, Context(Task(1, 7, 8, 8, 2), 0, 1, {}))
    assert alone["gauss.label"].tolist() == [7] and alone["gauss.var"].tolist() == [[0.0]]


def test_hgp_keeps_a_class_of_which_a_client_has_one_image(record):
    """In the third task client 1 has a single image."""
    run = record("hgp")
    (payload,) = [p for p in run.rounds[-1].payloads if p["client"] == 1]
    assert payload["num_samples"] == 1 and payload["gauss.count"].tolist() == [1]
    held = run.states[2]
    row = (held["gauss.client"] == 1) & (held["gauss.label"] == payload["gauss.label"])
    assert row.sum() == 1 and torch.equal(held["gauss.mean"][row], payload["gauss.mean"])


def test_hgp_keeps_the_gaussians_of_finished_tasks(record):
    run = record("hgp")
    for earlier, later, stop in ((0, 1, 3), (1, 2, 5)):
        old, new = run.states[earlier], run.states[later]
        kept = new["gauss.label"] < stop
        for key in ("gauss.label", "gauss.client", "gauss.count", "gauss.mean", "gauss.var"):
            assert torch.equal(new[key][kept], old[key])
        assert (~kept).any()
    assert sorted(set(run.states[2]["gauss.label"].tolist())) == list(range(7))


@pytest.mark.parametrize(("window", "moved"), [("all", range(5)), ("current", (3, 4)), ("old", (0, 1, 2)), ("none", ())])
def test_hgp_rebalance_moves_only_head_rows_of_its_window(record, rng, tasks, backbone, window, moved):
    run = record("hgp")
    state = run.states[1]
    payload = {**select(state, "prefix.", "head."), "num_samples": torch.tensor(1), "client": torch.tensor(0)}
    payload |= {k: v[:0] for k, v in select(state, "gauss.").items()}
    method = create_method("hgp", rebalance=window, server_epochs=2, per_class=8)
    after = method.server_update(state, method.aggregate([payload], fedavg), tasks[1], backbone, rng)
    for name, value in select(state, "prefix.", "gauss.").items():
        assert torch.equal(after[name], value)
    changed = [c for c in range(7) if not torch.equal(after["head.weight"][c], state["head.weight"][c])]
    assert changed == list(moved)
    assert [c for c in range(7) if after["head.bias"][c] != state["head.bias"][c]] == list(moved)


@pytest.mark.parametrize("norm", [0.1, None])
def test_hgp_rebalance_loss_by_hand(norm):
    """Logits (3, 4) of norm 5 become (6, 8) at temperature 0.1; as they are without."""
    loss = normalised_cross_entropy(torch.tensor([[3.0, 4.0]]), torch.tensor([0]), norm)
    assert float(loss) == pytest.approx(math.log(1 + math.exp(2.0 if norm else 1.0)), rel=1e-5)


@pytest.mark.parametrize("init", ["zeros", "normal", "uniform"])
def test_hgp_rows_of_a_prefix_that_starts_at_zero_never_differ(make_bench, small_method, watch, init):
    run = watch(make_bench(rounds=1), small_method("hgp", init=init, blocks=(0, 3)))
    for name, rows in select(run.states[2], "prefix.").items():
        apart = (rows - rows[:1]).abs().max()
        assert apart < 1e-12 if init == "zeros" else apart > 1e-2, name
        assert not torch.equal(rows, run.rounds[0].state[name]), f"{name} was not trained"


@pytest.mark.parametrize(("init", "bound"), [("uniform", DIM**-0.5), ("zeros", 0.0)])
def test_hgp_bounds_of_the_start(backbone, tasks, rng, init, bound):
    prefixes = select(create_method("hgp", init=init).begin_task({}, tasks[0], backbone, rng), "prefix.")
    assert len(prefixes) == 10 and all(v.shape == (100, DIM) for v in prefixes.values())
    assert all(0.98 * bound <= v.abs().max() <= bound for v in prefixes.values())


# --- FCILPT


def test_fcilpt_usage_counts_every_choice(record):
    """N prompts for each image in each of the two epochs."""
    run = record("fcilpt")
    assert run.rounds
    for call in run.rounds:
        for payload in call.payloads:
            assert payload["usage"].sum() == run.method.chosen * int(payload["num_samples"]) * 2
            assert payload["usage"].min() >= 0 and len(payload["usage"]) == run.method.size


def pool(noise, size: int = 6) -> dict[str, Tensor]:
    return {"pool.key": noise(size, DIM), "pool.prompt": noise(size, 2, DIM), "common": noise(1, DIM)}


def test_fcilpt_chooses_the_nearest_keys_whatever_their_length(backbone, images_batch, noise):
    method, tree = create_method("fcilpt", size=6, chosen=3), pool(noise)
    similarity, chosen = method.choose(backbone, tree, images_batch)
    by_hand = [[float(q @ k / (q.norm() * k.norm())) for k in tree["pool.key"]] for q in images_batch.q]
    for row, values, picked in zip(by_hand, similarity.tolist(), chosen.tolist(), strict=True):
        assert picked == sorted(range(6), key=lambda i: -row[i])[:3]
        assert values == pytest.approx([row[i] for i in picked])
    assert len({tuple(sorted(row)) for row in chosen.tolist()}) > 1  # images differ
    longer = {**tree, "pool.key": tree["pool.key"] * torch.tensor([1e-3, 7.0, 1.0, 1e4, 0.2, 3.0])[:, None]}
    assert torch.equal(method.choose(backbone, longer, images_batch._replace(q=images_batch.q * 50))[1], chosen)


def test_fcilpt_with_the_embedded_class_token_asks_the_same_for_all(backbone, images_batch, noise):
    method, tree = create_method("fcilpt", size=6, chosen=3, query="embed_cls"), pool(noise)
    similarity, chosen = method.choose(backbone, tree, images_batch)
    assert (chosen == chosen[0]).all() and similarity.std(0).max() < 1e-12
    key = F.normalize(tree["pool.key"], dim=-1) @ F.normalize(backbone.class_token(), dim=0)
    assert chosen[0].tolist() == key.argsort(descending=True)[:3].tolist()


@pytest.mark.parametrize(("keys", "far"), [("same", 0.0), ("opposite", 6.0), ("random", None)])
def test_fcilpt_key_loss_lies_between_0_and_2n(backbone, images_batch, noise, tasks, keys, far):
    """L_QP is the sum over the N = 3 chosen keys of 1 - cos, averaged over images; the loss adds it divided by lambda."""
    batch = images_batch._replace(q=images_batch.q[:1].expand(6, -1), y=images_batch.y * 0)
    tree = {**pool(noise, 4), "head.weight": noise(7, DIM), "head.bias": noise(7)}
    if keys != "random":
        tree["pool.key"] = batch.q[:1] * torch.tensor([1.0, 2.0, 0.5, 3.0])[:, None] * (1 if keys == "same" else -1)
    context = Context(tasks[0], 0, 1, {})
    weak, strong = (create_method("fcilpt", size=4, chosen=3, strength=s).loss(backbone, tree, batch, context)[0] for s in (0.5, 1.0))
    found = float(weak - strong)  # 2 L_QP - L_QP
    if far is not None:
        assert found == pytest.approx(far, abs=1e-9)
    else:
        cosine = F.cosine_similarity(batch.q[:1], tree["pool.key"])
        assert found == pytest.approx(float((1 - cosine.topk(3).values).sum()), abs=1e-9) and 0 < found < 6


def test_fcilpt_padding_is_not_counted_as_use(backbone, images_batch, noise, tasks):
    tree = {**pool(noise), "head.weight": noise(7, DIM), "head.bias": noise(7)}
    batch = images_batch._replace(w=torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64), y=images_batch.y * 0)
    _, sums = create_method("fcilpt", size=6, chosen=3).loss(backbone, tree, batch, Context(tasks[0], 0, 1, {}))
    assert sums["usage"].sum() == 3 * 4


def test_fcilpt_cannot_choose_more_prompts_than_there_are():
    with pytest.raises(FczooError, match=r"fcilpt\.chosen is 5, more than the 4 prompts"):
        create_method("fcilpt", size=4)


def test_fcilpt_old_clients_train_again_on_their_last_task(make_bench, small_method, watch):
    """The client without images of the second task sits it out, or moves the head rows of what it learned in the first."""
    present = {}
    for choice in ("idle", "previous_task"):
        run = watch(make_bench(), small_method("fcilpt", support="local", old_clients=choice))
        present[choice] = [sorted(c.number for c in call.clients) for call in run.rounds]
        for call in run.rounds:
            for client, payload in zip(call.clients, call.payloads, strict=True):
                held = set(run.bench.train.labels[client.index].tolist())
                moved = {c for c in range(7) if not torch.equal(payload["head.bias"][c], call.state["head.bias"][c])}
                assert moved == (held if len(held) > 1 else set())
                new = held <= set(range(call.ctx.task.start, call.ctx.task.stop))
                assert new or (choice == "previous_task" and call.ctx.task.index == 1 and held <= {0, 1, 2})
    assert present["idle"][2:4] != present["previous_task"][2:4] == [[0, 1, 2]] * 2


def test_fcilpt_tells_an_image_of_an_old_class_from_all_classes_seen(backbone, images_batch, noise, tasks):
    """In the second task (classes 3 and 4 of 5 seen) of a head that says ln(1 to 7) whatever the image shows."""
    bias = torch.arange(1, 8, dtype=torch.float64).log()
    tree = {**pool(noise), "head.weight": torch.zeros(7, DIM, dtype=torch.float64), "head.bias": bias}
    for label, of_all in ((1, 2 / (1 + 2 + 3 + 4 + 5)), (4, 5 / (4 + 5))):
        batch = images_batch._replace(y=torch.full_like(images_batch.y, label))
        loss, _ = create_method("fcilpt", size=6, chosen=3, old_clients="previous_task", strength=1e12).loss(
            backbone, tree, batch, Context(tasks[1], 0, 1, {})
        )
        assert float(loss) == pytest.approx(-math.log(of_all), abs=1e-9)


# --- FPPL


def one_hot_prompts(noise, seen: int, total: int = 4) -> dict[str, Tensor]:
    """Prompts p_i whose entries are all e_i, so that a fused prompt shows the weights."""
    prompts = torch.eye(total, DIM, dtype=torch.float64)[:, None].expand(-1, 2, -1)
    tree = {"fusion.key": noise(total, DIM), "fusion.scale": torch.tensor(4.0, dtype=torch.float64), "prompt.1": prompts[seen - 1]}
    return {**tree, "past.1": prompts[: seen - 1]} if seen > 1 else tree


def test_fppl_in_the_first_task_every_image_gets_its_prompt(noise):
    method = create_method("fppl", blocks=(1,))
    tree = {**one_hot_prompts(noise, 1), "prompt.1": noise(2, DIM)}
    fused = method.fused_prompts(tree, noise(5, DIM))["deep.1"]
    assert torch.equal(fused, tree["prompt.1"].expand(5, -1, -1))


@pytest.mark.parametrize("seen", [2, 3])
def test_fppl_mixes_prompts_by_softmax_over_the_tasks_seen(noise, seen):
    method, tree, query = create_method("fppl", blocks=(1,)), one_hot_prompts(noise, seen), noise(5, DIM)
    weights = method.fused_prompts(tree, query)["deep.1"][:, 0, :4]
    expected = [[math.exp(4 * float(q @ k / (q.norm() * k.norm()))) for k in tree["fusion.key"][:seen]] for q in query]
    torch.testing.assert_close(weights[:, :seen], torch.tensor([[e / sum(row) for e in row] for row in expected], dtype=torch.float64), **CLOSE)
    assert (weights >= 0).all() and (weights[:, seen:] == 0).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(5, dtype=torch.float64), **CLOSE)
    longer = {**tree, "fusion.key": tree["fusion.key"] * torch.tensor([3.0, 0.1, 50.0, 2.0])[:, None]}
    torch.testing.assert_close(method.fused_prompts(longer, 9 * query)["deep.1"][:, 0, :4], weights, **CLOSE)


def test_fppl_hard_fusion_takes_the_best_task_alone(noise):
    tree, query = one_hot_prompts(noise, 3), noise(8, DIM)
    weights = create_method("fppl", blocks=(1,), fusion="hard").fused_prompts(tree, query)["deep.1"][:, 0, :3]
    best = F.cosine_similarity(query[:, None], tree["fusion.key"][None, :3], dim=-1).argmax(1)
    assert torch.equal(weights, torch.eye(3, dtype=torch.float64)[best]) and len(best.unique()) > 1


def test_fppl_a_new_prompt_starts_as_the_last_one(record, backbone, tasks, rng):
    run = record("fppl")
    state = run.method.begin_task(run.states[0], tasks[1], backbone, rng)
    assert state["prototype.mean"].shape == (2, DIM) and not state["prototype.known"].any()
    for name, prompt in select(run.states[0], "prompt.").items():
        assert torch.equal(state[name], prompt)
        assert torch.equal(state[name.replace("prompt.", "past.")], prompt[None])


def test_fppl_keeps_the_prompts_it_froze(record):
    run = record("fppl")
    assert any(not torch.equal(v, run.rounds[0].state[k]) for k, v in select(run.states[0], "prompt.").items()), "nothing was trained"
    for name, prompt in select(run.states[0], "prompt.").items():
        past = name.replace("prompt.", "past.")
        assert torch.equal(run.states[1][past], prompt[None])
        assert torch.equal(run.states[2][past], torch.stack([prompt, run.states[1][name]]))
        assert not torch.equal(run.states[1][name], prompt)


def contrast(features: Tensor, labels: list[int], prototypes: Tensor, known: list[float], w: list[float] | None = None) -> float:
    """L_ur at temperature 0.5 in a task of classes 4, 5, ..."""
    count = len(labels)
    batch = Batch(torch.empty(count, 0), torch.tensor(labels), torch.tensor(w or [1.0] * count, dtype=torch.float64), torch.empty(count, 0))
    task = Task(1, 4, 4 + len(prototypes), 9, 2)
    shared = {"prototype.mean": prototypes, "prototype.known": torch.tensor(known, dtype=torch.float64)}
    return float(create_method("fppl", temperature=0.5).contrast(features, batch, Context(task, 0, 1, shared)))


def test_fppl_contrast_is_zero_with_one_class_or_without_prototypes(noise):
    assert contrast(noise(3, DIM), [4, 4, 4], noise(1, DIM), [1.0]) == 0
    assert contrast(noise(3, DIM), [4, 5, 6], noise(3, DIM), [0.0, 0.0, 0.0]) == 0
    assert contrast(noise(3, DIM), [5, 5, 5], noise(3, DIM), [0.0, 1.0, 0.0]) == 0  # the only known one
    assert contrast(noise(3, DIM), [4, 6, 4], noise(3, DIM), [0.0, 1.0, 0.0]) == 0  # nobody's own is known
    assert contrast(noise(3, DIM), [4, 5, 6], noise(3, DIM), [1.0, 1.0, 0.0]) > 0


def test_fppl_contrast_by_hand():
    """Cosines 1 and 0 at temperature 0.5; the third class is not known, its sample and the padding are left out."""
    features = torch.tensor([[2.0, 0.0], [0.0, 5.0], [1.0, 1.0], [9.0, 9.0]], dtype=torch.float64)
    prototypes = torch.tensor([[3.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    found = contrast(features, [4, 4, 6, 4], prototypes, [1.0, 1.0, 0.0], w=[1, 1, 1, 0])
    near, far = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    assert found == pytest.approx((near + far) / 2)


def test_fppl_contrast_is_bounded(noise):
    """By log n + 2 / tau."""
    worst = contrast(-torch.eye(DIM, dtype=torch.float64)[:3], [4, 5, 6], torch.eye(DIM, dtype=torch.float64)[:3], [1.0] * 3)
    assert math.log(3) < worst <= math.log(3) + 2 / 0.5


def fppl_update(noise, tasks, rng, labels: list[int], **options):
    """State before and after a server step of the second task with one prototype a label from each of two clients."""
    method = create_method("fppl", **options)
    mean = noise(2 * len(labels), DIM)
    rows = {"local.label": torch.tensor(labels * 2), "local.client": torch.tensor([0] * len(labels) + [1] * len(labels)), "local.mean": mean}
    old = {"local.label": torch.tensor([0, 2]), "local.client": torch.tensor([5, 5]), "local.mean": noise(2, DIM)}
    state = {"head.weight": noise(7, DIM), "head.bias": noise(7), "prompt.0": noise(2, DIM), "fusion.key": noise(3, DIM), **old}
    merged = {**{k: state[k] for k in ("head.weight", "head.bias", "prompt.0", "fusion.key")}, **rows}
    return state, method.server_update(state, merged, tasks[1], None, rng), mean


@pytest.mark.parametrize(("options", "moved"), [({}, [0, 2, 3, 4]), ({"pool": False}, [3, 4]), ({"debias": False}, [])])
def test_fppl_debias_moves_only_head_rows_of_classes_with_prototypes(noise, tasks, rng, options, moved):
    state, after, _ = fppl_update(noise, tasks, rng, [3, 4], **options)
    assert [c for c in range(7) if not torch.equal(after["head.weight"][c], state["head.weight"][c])] == moved
    assert [c for c in range(7) if after["head.bias"][c] != state["head.bias"][c]] == moved
    for name in ("prompt.0", "fusion.key"):
        assert torch.equal(after[name], state[name])


def test_fppl_global_prototypes_are_plain_means_over_the_holders(noise, tasks, rng):
    _, after, mean = fppl_update(noise, tasks, rng, [4])
    assert after["prototype.known"].tolist() == [0.0, 1.0]
    torch.testing.assert_close(after["prototype.mean"], torch.stack([torch.zeros(DIM, dtype=torch.float64), mean.mean(0)]), **CLOSE)
    assert after["local.label"].tolist() == [0, 2, 4, 4] and after["local.client"].tolist() == [5, 5, 0, 1]


def test_fppl_local_prototypes_are_means_of_the_trained_features(record, batch_of):
    """The last upload of the first client, worked out again from its trained prompts."""
    run = record("fppl")
    call = run.rounds[-1]
    client, payload = call.clients[0], call.payloads[0]
    batch = batch_of(run.method, run.bench.train, client.index)
    tree = {**call.ctx.shared, **select(payload, "prompt.", "fusion.")}
    features = run.bench.backbone(batch.x, run.method.fused_prompts(tree, batch.q))
    assert payload["local.label"].tolist() == sorted(set(batch.y.tolist()))
    for label, mean in zip(payload["local.label"], payload["local.mean"], strict=True):
        torch.testing.assert_close(mean, features[batch.y == label].mean(0), rtol=1e-9, atol=1e-9)


# --- baselines


@pytest.mark.parametrize("distance", ["euclid", "cosine"])
def test_fedncm_is_the_nearest_mean_of_all_images(make_bench, watch, batch_of, distance):
    run = watch(make_bench(), create_method("fedncm", distance=distance))
    train, test = run.bench.train, run.bench.test
    data, asked = (batch_of(run.method, store, torch.arange(len(store.labels))) for store in (train, test))
    means = torch.stack([data.q[data.y == c].mean(0) for c in range(7)])
    torch.testing.assert_close(run.states[2]["mean"], means, rtol=1e-9, atol=1e-9)
    logits = run.method.predict(run.bench.backbone, run.states[2], asked, run.bench.stream.tasks[2])
    near = F.cosine_similarity(asked.q[:, None], means[None], dim=-1) if distance == "cosine" else -torch.cdist(asked.q, means)
    assert torch.equal(logits.argmax(1), near.argmax(1))


def test_fedncm_never_answers_a_class_without_images(backbone, tasks):
    state = {"mean": torch.zeros(7, DIM, dtype=torch.float64), "count": torch.tensor([1.0, 0, 1, 0, 0, 0, 0])}
    state["mean"][0] = 100.0
    state["mean"][2] = -100.0
    asked = Batch(torch.empty(1, 0), torch.tensor([0]), torch.ones(1), torch.zeros(1, DIM, dtype=torch.float64))
    assert create_method("fedncm").predict(backbone, state, asked, tasks[0]).argmax() in (0, 2)


@pytest.mark.parametrize("tune", ["full", "lora", "head"])
def test_fedavg_trains_what_it_is_told(make_bench, small_method, watch, tune):
    run = watch(make_bench(rounds=1, epochs=1), small_method("fedavg", tune=tune))
    before, after = run.rounds[0].state, run.states[2]
    kinds = {"full": {"head", "full"}, "lora": {"head", "lora"}, "head": {"head"}}[tune]
    assert {name.partition(".")[0] for name in after} == kinds
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert {name.partition(".")[0] for name in moved} == kinds
    assert set(run.rounds[0].payloads[0]) == {*after, "num_samples", "client"}


def test_fcilpt_softmax_over_local_classes_leaves_other_rows_alone(make_bench, small_method, watch):
    """A client moves the head rows of the classes that it holds; with the task's softmax, those of the whole task."""
    for support in ("local", "task"):
        run = watch(make_bench(), small_method("fcilpt", support=support))
        lacking = 0
        for call in run.rounds:
            for client, payload in zip(call.clients, call.payloads, strict=True):
                held = set(run.bench.train.labels[client.index].tolist())
                moved = {c for c in range(7) if not torch.equal(payload["head.bias"][c], call.state["head.bias"][c])}
                task = set(range(call.ctx.task.start, call.ctx.task.stop))
                lacking += held < task
                assert moved == (task if support == "task" else held if len(held) > 1 else set())
        assert lacking
