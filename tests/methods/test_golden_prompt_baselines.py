"""Outputs of official implementations of baselines with prompts, reproduced
(tests/methods/golden/README.md).

``out`` holds outputs of the default, ``quirk`` those of the option of that name.
"""

from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F

from fczoo import Batch, Context, Task, create_method
from helpers_backbone import attention_of, one_block
from helpers_golden import golden
from helpers_official import grads, query_batch, same

# --- L2P


@pytest.mark.parametrize(("tag", "selection"), [("inst", "image"), ("batch", "batch")])
def test_l2p_pool(tag: str, selection: str) -> None:
    g = golden("l2p_pool")
    key, prompt = g["in.K"].clone().requires_grad_(), g["in.P"].clone().requires_grad_()
    tree = {"pool.key": key, "pool.prompt": prompt, "position": torch.zeros(25, 32)}
    method = create_method("l2p", selection=selection, positions="zeros")
    batch = query_batch(g["in.q"], torch.zeros(16, dtype=torch.int64))
    similarity, chosen = method.choose(tree, batch)
    assert torch.equal(chosen, g[f"out.{tag}.idx"].long())
    assert same(similarity, g[f"out.{tag}.similarity"])
    pull = similarity.gather(1, chosen).sum(-1).mean()
    assert same(pull, g[f"out.{tag}.reduce_sim"])
    tokens = torch.cat([method.prompts(tree, chosen), g["in.x_embed"]], 1)
    assert same(tokens, g[f"out.{tag}.prompted_embedding"])
    for gradient, name in zip(
        grads(-0.1 * pull + 0.5 * tokens.square().sum() / 16, key, prompt),
        ("K", "P"),
        strict=True,
    ):
        assert same(gradient, g[f"out.{tag}.grad_{name}"])
    opposite = create_method(
        "l2p", selection={"image": "batch", "batch": "image"}[selection], positions="zeros"
    )
    assert not torch.equal(opposite.choose(tree, batch)[1], chosen)


# --- DualPrompt


@pytest.mark.parametrize("tag", ["train", "test"])
@pytest.mark.parametrize("bug", [False, True])
def test_dualprompt_experts(tag: str, bug: bool) -> None:
    g = golden("dualprompt_eprompt")
    method, right, wrong = (
        create_method("dualprompt", reshape_bug=bug),
        g[f"out.{tag}.prefix"],
        g[f"quirk.{tag}.prefix_reshape_bug"],
    )
    keys = g["in.K"].clone().requires_grad_()
    state = {"past.key": keys[:3], "expert.key": keys[3]}  # four slots, all trained
    chosen = (
        torch.full((4,), int(g["in.task"])) if tag == "train" else method.match(state, g["in.q"])
    )
    assert torch.equal(chosen[:, None], g[f"out.{tag}.idx"].long())
    for layer in range(3):
        key, value = (
            g["in.E"][layer, part].flatten(2)[chosen] for part in range(2)
        )  # [B, L, D]: heads side by side
        prefix = torch.stack(method.prefixes(key, value, torch.ones(len(key))), 1).unflatten(
            -1, (4, 6)
        )
        assert same(prefix, (wrong if bug else right)[layer])
        assert not same(prefix, (right if bug else wrong)[layer])
        if layer == 0:
            plugs = dict(
                zip(
                    ("prefix.0.k", "prefix.0.v"),
                    method.prefixes(key, value, torch.ones(len(key))),
                    strict=True,
                )
            )
            out = attention_of(one_block(g, heads=4), g["in.x"], 7, plugs)
            assert same(
                out, g[f"quirk.{tag}.attn_layer0_reshape_bug" if bug else f"out.{tag}.attn_layer0"]
            )
    pull = F.cosine_similarity(g["in.q"], keys[chosen]).mean()
    assert same(pull, g[f"out.{tag}.reduce_sim"])
    assert same(grads(-pull, keys)[0], g[f"out.{tag}.grad_K"])


def test_dualprompt_loss_attracts_task_key() -> None:
    """Compare the key term with minus lambda times the official mean cosine, with its gradient."""
    g, task = golden("dualprompt_eprompt"), Task(0, 0, 2, 8, 4)
    method = create_method("dualprompt", expert_blocks=(0,), general_blocks=(0,), expert_length=5)
    key = g["in.K"][0].clone().requires_grad_()
    train = {"expert.key": key, "expert.0.k": torch.zeros(5, 24), "expert.0.v": torch.zeros(5, 24)}
    train |= {"head.weight": torch.zeros(8, 24), "head.bias": torch.zeros(8)}
    batch = Batch(
        torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64), torch.ones(4), g["in.q"]
    )
    with_key, without = (
        create_method("dualprompt", **{**asdict(method), "no_key_loss": quirk}).loss(
            one_block(g, heads=4), train, batch, Context(task, 0, 1, {})
        )[0]
        for quirk in (False, True)
    )
    assert same(without - with_key, float(g["in.lambda_key"]) * g["out.train.reduce_sim"])
    assert same(grads(with_key, key)[0], g["out.train.grad_K"][0])


# --- CODA-Prompt


def test_codap_prefixes_weights_and_orthogonality() -> None:
    g = golden("coda_prompt_task0")
    leaves = {k: g[f"in.{k}"].clone().requires_grad_() for k in "PKAq"}
    names = {"prompt": "P", "key": "K", "attention": "A"}
    tree = {
        f"component.{i}.{part}": leaves[k][i, :2] for i in range(5) for part, k in names.items()
    }
    method = create_method("codap", ortho=0.1)
    weights = torch.stack([method.weights(tree, i, leaves["q"]) for i in range(5)])
    assert same(weights, g["out.alpha"])
    plugs = method.prefixes(tree, leaves["q"])
    key, value = (torch.stack([plugs[f"prefix.{i}.{part}"] for i in range(5)]) for part in "kv")
    assert same(key, g["out.prefix_k"]) and same(value, g["out.prefix_v"])
    ortho = method.orthogonality(tree)
    assert same(ortho, sum(g[f"out.ortho_{k}"].sum() for k in "KAP"))
    assert same(0.1 * ortho, g["out.loss_per_layer"].sum())
    total = (key * g["in.Rk"]).sum() + (value * g["in.Rv"]).sum() + 0.1 * ortho
    assert same(total, g["out.J"])
    for gradient, name in zip(grads(total, *leaves.values()), leaves, strict=True):
        assert same(gradient, g[f"out.grad_{name}"])
