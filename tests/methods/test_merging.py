"""FisherAvg, RegMean and LoRM: the server's merges equal recorded outputs and those by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fczoo import Context, FczooError, Payload, Task, create_method
from fczoo.aggregators.averaging import fedavg
from fczoo.core.backbone import LAYERS
from fczoo.core.registry import make_aggregator
from fczoo.core.tree import nbytes, select
from fczoo.functional.input_subspaces import layer_grams, unpack_gram
from fczoo.functional.lora import fused_plugs
from fczoo.functional.regmean import divide_by_gram, regression_mean, regression_mean_of_b
from helpers_golden import golden
from helpers_methods import batch
from helpers_payload import server_context

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
TIGHT = {"rtol": 1e-9, "atol": 1e-9}


def pack_gram(gram: Tensor) -> Tensor:
    """Pack a symmetric matrix as clients send it: only the diagonal if the rest is zero."""
    if not (gram - torch.diag(gram.diagonal())).any():
        return gram.diagonal()
    i, j = torch.triu_indices(*gram.shape)
    return gram[i, j]


# --- FisherAvg


def test_fisher_weights_by_hand():
    """Compare Fisher weights with values worked out by hand.

    In the first coordinate the sums are 27 and 1, and their means over 9 images and 1 image weigh
    3 : 1, so (3 * 2 + 6) / 4 = 3; sums give (27 * 2 + 6) / 28. The second has no Fisher
    information: the mean is 4.
    """
    payloads = [
        Payload(
            {"head.bias": torch.tensor([2.0, 3.0]), "fisher.head.bias": torch.tensor([27.0, 0.0])},
            0,
            9,
        ),
        Payload(
            {"head.bias": torch.tensor([6.0, 5.0]), "fisher.head.bias": torch.tensor([1.0, 0.0])},
            1,
            1,
        ),
    ]
    for fisher, first in (("true", 3), ("weighted", 60 / 28)):
        method = create_method("fisheravg", fisher=fisher)
        aggregate = method.aggregate(payloads, make_aggregator(method.training().averaging))
        assert aggregate.keys() == {"head.bias"}
        assert aggregate["head.bias"].tolist() == pytest.approx([first, 4])


def test_fisher_information_of_all_classes_by_hand():
    """Compare the Fisher information of a head with values worked out by hand.

    The logits of two classes are 0 and log 3, so p = 1/4 and 3/4. For all classes it is
    p_j (1 - p_j) = 3/16 in either bias. For label 1 only it is p_1 (1 - p_1)^2 = 3/64 in its bias
    and p_1 p_0^2 = 3/64 in the other. Weights have it times the feature's square, here 4.
    """
    head = {
        "head.weight": torch.tensor([[0.0], [0.5 * math.log(3)]]).double(),
        "head.bias": torch.zeros(2).double(),
    }
    image, task = batch(torch.tensor([[2.0]]).double(), [1]), Task(0, 0, 2, 2, 1)
    for fisher, value in (("true", 3 / 16), ("weighted", 3 / 64)):
        method = create_method("fisheravg", fisher=fisher, tune="head")
        sums = method.collect("after_training", None, head, image, Context(task, 0, 1, {}))
        assert sums["fisher.head.bias"].tolist() == pytest.approx([value, value])
        assert sums["fisher.head.weight"].flatten().tolist() == pytest.approx([4 * value] * 2)


def test_fisher_doubles_upload_size(record):
    upload = record("fisheravg").rounds[0].payloads[0]
    assert nbytes(select(upload.tensors, "fisher.")) == nbytes(upload.drop("fisher.").tensors)
    rows = upload["fisher.head.weight"]
    assert rows[:3].abs().sum() > 0 and not rows[3:].any()  # of the task's classes


# --- Gram matrices


def test_gram_matrices_of_tokens(rng):
    x, weight = torch.randn(4, 3, 5, generator=rng).double(), torch.tensor([1.0, 1.0, 1.0, 0.0])
    rows = x[:3].flatten(0, 1)
    full, half, only_diagonal = (
        layer_grams({"fc": x}, weight, gamma)["gram.fc"] for gamma in (1.0, 0.25, 0.0)
    )
    torch.testing.assert_close(unpack_gram(full, 5), rows.mT @ rows, **TIGHT)
    diagonal = torch.diag((rows.mT @ rows).diagonal())
    torch.testing.assert_close(
        unpack_gram(half, 5), (rows.mT @ rows) / 4 + 3 * diagonal / 4, **TIGHT
    )
    torch.testing.assert_close(unpack_gram(only_diagonal, 5), diagonal, **TIGHT)
    assert [len(g) for g in (full, half, only_diagonal)] == [15, 15, 5]


def test_regmean_matches_recorded_outputs():
    g = golden("regmean_singular")
    weights = [g[f"in.W{k}"] for k in range(3)]
    solution = regression_mean(weights, [pack_gram(g[f"in.gram{k}"]) for k in range(3)])
    torch.testing.assert_close(solution, g["out.merged_dead_input"], rtol=1e-4, atol=1e-5)
    solution = regression_mean(weights, [pack_gram(g[f"in.low_rank_gram{k}"]) for k in range(3)])
    torch.testing.assert_close(solution, g["alt.merged_low_rank_rcond1e-6"], rtol=1e-3, atol=1e-4)
    assert (solution - g["quirk.merged_low_rank_noise"]).abs().max() > 1


def test_regmean_by_hand():
    """Compare the mean of RegMean with a value worked out by hand.

    Inputs 1 and 3 of two clients with weights 2 and 4: (2 * 1 + 4 * 9) / 10; a dead input gives 0.
    """
    weights = [torch.tensor([[2.0, 5.0]]), torch.tensor([[4.0, 7.0]])]
    solution = regression_mean(weights, [torch.tensor([1.0, 0.0]), torch.tensor([9.0, 0.0])])
    torch.testing.assert_close(solution, torch.tensor([[3.8, 0.0]]))


def test_regression_mean_is_least_squares_solution(rng):
    """Solve one least-squares problem over all clients' inputs.

    The targets of a client are the outputs of its own weight. The mean of B solves it likewise.
    """
    inputs = [torch.randn(9, 4, generator=rng).double() for _ in range(3)]
    weights = [torch.randn(2, 4, generator=rng).double() for _ in range(3)]
    grams = [pack_gram(x.mT @ x) for x in inputs]
    goal = torch.cat([x @ w.mT for x, w in zip(inputs, weights, strict=True)])
    best = torch.linalg.lstsq(torch.cat(inputs), goal).solution.mT
    torch.testing.assert_close(regression_mean(weights, grams), best, **TIGHT)
    torch.testing.assert_close(regression_mean(weights[::-1], grams[::-1]), best, **TIGHT)
    torch.testing.assert_close(regression_mean(weights[:1] * 3, grams), weights[0], **TIGHT)

    down, ups = (
        torch.randn(2, 4, generator=rng).double(),
        torch.randn(3, 5, 2, generator=rng).double(),
    )
    goal = torch.cat([x @ down.mT @ up.mT for x, up in zip(inputs, ups, strict=True)])
    best = torch.linalg.lstsq(torch.cat(inputs) @ down.mT, goal).solution.mT
    torch.testing.assert_close(regression_mean_of_b(ups, down, torch.stack(grams)), best, **TIGHT)


def test_diagonal_gram_is_divided_per_input(rng):
    gram, w = torch.tensor([2.0, 0.5, 1.0]), torch.randn(2, 3, generator=rng)
    torch.testing.assert_close(divide_by_gram(w * gram, gram), w.double(), rtol=1e-6, atol=1e-6)


def test_regmean_and_lorm_keep_head_rows_of_old_classes(record):
    for name in ("regmean", "lorm"):
        states = record(name).states
        assert torch.equal(states[0]["head.weight"][:3], states[2]["head.weight"][:3])
        assert not torch.equal(states[0]["head.weight"][3:], states[2]["head.weight"][3:])


@pytest.mark.parametrize("name", ["regmean", "lorm"])
@pytest.mark.parametrize(
    "refused", [{"min_class_count": 2}, {"outliers": 3.0}], ids=["rare", "outliers"]
)
def test_second_moments_reject_min_class_count_and_outliers(make_bench, name, refused):
    with pytest.raises(
        FczooError, match=f"the second moments over all classes that {name} uploads"
    ):
        make_bench(**refused).check(create_method(name))


# --- LoRM


def test_lorm_trains_b_and_a_alternately(make_bench, watch):
    run = watch(make_bench(rounds=3, epochs=1), create_method("lorm", rank=2))
    factors = [
        sorted({n.split(".")[0] for n in c.payloads[0]} - {"gram", "head"}) for c in run.rounds
    ]
    assert factors == 3 * [["lora_b"], ["lora_a"], ["lora_b"]]


def test_lorm_upload_size(backbone):
    """Compare upload sizes with formulas for width D, MLP width m and rank r.

    A block has B (5 D + m) r, A (3 D + m) r and diagonals 3 D + m; the head has a Gram matrix.
    """
    method, task = create_method("lorm", rank=2), Task(0, 0, 3, 7, 3)
    state = method.begin_task({}, task, backbone, torch.Generator())
    d, m, blocks = backbone.dim, backbone.config.mlp_dim, backbone.depth
    count = {k: sum(v.numel() for v in select(state, k).values()) for k in ("lora_a.", "lora_b.")}
    assert count == {"lora_a.": blocks * (3 * d + m) * 2, "lora_b.": blocks * (5 * d + m) * 2}
    x = torch.zeros(2, 3, 16, 16, dtype=torch.float64)
    batch = SimpleNamespace(x=x, w=torch.ones(2))
    context = SimpleNamespace(shared=state, task=task)
    sums = method.collect("after_training", backbone, {}, batch, context)
    assert sum(v.numel() for v in sums.values()) == blocks * (3 * d + m) + d * (d + 1) // 2


def test_lorm_matches_recorded_outputs():
    """Reproduce two tasks, each with a round of B, a round of A and the merge of tasks."""
    g = golden("lorm_fed_diag")
    method, state = create_method("lorm", rank=2), {}
    weights = {f"blocks.0.{layer}.weight": g[f"in.W0.{layer}.weight"] for layer in LAYERS}
    backbone = SimpleNamespace(weights=weights)
    for t in range(2):
        task = Task(t, 0, 5, 5, 2)  # all rows of the head, as in the released code
        state = {k: v for k, v in state.items() if not k.startswith("full.")}
        if t:
            for layer in LAYERS:
                for side in "ab":
                    state[f"past_lora_{side}.blocks.0.{layer}"] = state[
                        f"lora_{side}.blocks.0.{layer}"
                    ][None]
        for layer in LAYERS:
            state[f"lora_a.blocks.0.{layer}"] = g[f"in.t{t}.B.server_A.{layer}.weight"]
            state[f"lora_b.blocks.0.{layer}"] = g[f"in.t{t}.B.server_B.{layer}.weight"]
        for turn in "BA":
            payloads = []
            for k in range(3):
                at, side = f"in.t{t}.{turn}.k{k}", turn.lower()
                tree = {f"lora_{side}.blocks.0.{n}": g[f"{at}.{turn}.{n}.weight"] for n in LAYERS}
                tree |= {f"gram.blocks.0.{n}": pack_gram(g[f"{at}.gram.{n}"]) for n in LAYERS}
                head = {f"head.{n}": g[f"{at}.head.{n}"] for n in ("weight", "bias")}
                tree |= {**head, "gram.head": pack_gram(g[f"{at}.gram.head"])}
                payloads.append(Payload(tree, k, int(g["in.n"][k])))
            state |= {k: v for k, v in payloads[0].only("head.").items() if k not in state}
            state = method.server_update(
                state, method.aggregate(payloads, fedavg), server_context(task)
            )
            plugs = fused_plugs(state)
            for layer in LAYERS:
                solution = state[f"lora_{turn.lower()}.blocks.0.{layer}"]
                torch.testing.assert_close(
                    solution, g[f"out.t{t}.{turn}.merged_{turn}.{layer}.weight"], **CLOSE
                )
                parts = "qkv" if layer == "attn.qkv" else [layer.split(".")[1]]
                update = torch.cat([plugs[f"lora.0.{p}.b"] @ plugs[f"lora.0.{p}.a"] for p in parts])
                official = g[f"out.t{t}.{turn}.eval_weight.{layer}.weight"]
                torch.testing.assert_close(g[f"in.W0.{layer}.weight"] + update, official, **CLOSE)
            for name in ("weight", "bias"):
                torch.testing.assert_close(
                    state[f"head.{name}"], g[f"out.t{t}.{turn}.head.{name}"], **CLOSE
                )
        sums = {
            f"gram.blocks.0.{n}": sum(
                pack_gram(g[f"in.t{t}.final.k{k}.gram.{n}"]) for k in range(3)
            )
            for n in LAYERS
        }
        context = replace(server_context(task), backbone=backbone)
        state = method.update_from("task_end", state, sums, context)
        for layer in LAYERS:
            official = g[f"out.t{t}.run_weights_gram.{layer}.weight"].double()
            torch.testing.assert_close(
                state[f"total.product.blocks.0.{layer}"], official, rtol=1e-3, atol=1e-4
            )
            weight = state[f"full.blocks.0.{layer}.weight"]
            official = g[f"out.t{t}.task_end_weight.{layer}.weight"]
            torch.testing.assert_close(weight, official, rtol=1e-3, atol=1e-4)
