"""DyTox: recorded outputs, losses, attention by hand, and parts frozen in some rounds."""

import pytest
import torch

from fczoo import Task, create_method
from fczoo.baselines._dytox_task_tokens import (
    copy_block,
    image_tokens,
    init_block,
    task_embeddings,
    task_logits,
)
from fczoo.baselines.dytox import class_binary_cross_entropy
from fczoo.core.tree import select
from helpers_golden import golden

EXACT = {"rtol": 1e-9, "atol": 1e-12}
LAYERS = {
    "attn.q": "q",
    "attn.k": "k",
    "attn.v": "v",
    "attn.proj": "proj",
    "mlp.fc1": "fc1",
    "mlp.fc2": "fc2",
}
OWNER = torch.tensor([0, 0, 0, 1, 1, 2, 2])


def model(g, who: str, tasks: int):
    """Return block, tokens and classifiers of the recorded network.

    The teacher has its own block; tokens and classifiers are the student's.
    """
    tab = {}
    for name, value in select(g, f"in.{who}.tabs.0.").items():
        layer, _, part = name.removeprefix(f"in.{who}.tabs.0.").rpartition(".")
        tab[f"tab.{LAYERS.get(layer, layer)}.{part}"] = value.clone().requires_grad_()
    tokens = (
        torch.cat([g[f"in.student.task_tokens.{i}"][0] for i in range(tasks)])
        .clone()
        .requires_grad_()
    )
    heads = {
        "norm_weight": [g[f"in.student.head.{i}.norm.weight"][None] for i in range(tasks)],
        "norm_bias": [g[f"in.student.head.{i}.norm.bias"][None] for i in range(tasks)],
        "weight": [g[f"in.student.head.{i}.head.weight"] for i in range(tasks)],
        "bias": [g[f"in.student.head.{i}.head.bias"] for i in range(tasks)],
    }
    return tab, tokens, {k: torch.cat(v).clone().requires_grad_() for k, v in heads.items()}


def test_forward_and_losses_match_released_code() -> None:
    g, method, task = golden("dytox_forward"), create_method("dytox"), Task(2, 5, 7, 7, 3)
    tab, tokens, heads = model(g, "student", 3)
    embeddings = task_embeddings(tab, tokens, g["in.x"], int(g["in.num_heads"]))
    for i in range(3):
        torch.testing.assert_close(embeddings[:, i], g[f"out.embedding{i}"], **EXACT)
    logits = task_logits(heads, embeddings, OWNER)
    torch.testing.assert_close(logits, g["out.logits"], **EXACT)
    assert (logits - g["quirk.joint_tokens_logits"]).abs().max() > 1e-3
    div = {
        "norm_weight": g["in.student.head_div.norm.weight"][None],
        "norm_bias": g["in.student.head_div.norm.bias"][None],
        "weight": g["in.student.head_div.head.weight"],
        "bias": g["in.student.head_div.head.bias"],
    }
    divergence_logits = task_logits(div, embeddings[:, -1:], torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(divergence_logits, g["out.div_logits"], **EXACT)
    old_tab, old_tokens, old_heads = model(g, "teacher", 2)
    old_embeddings = task_embeddings(old_tab, old_tokens, g["in.x_teacher"], int(g["in.num_heads"]))
    teacher = task_logits(old_heads, old_embeddings, OWNER[:5]).detach()
    torch.testing.assert_close(teacher, g["out.teacher_logits"], **EXACT)

    loss = method.grown(logits, divergence_logits, teacher, g["in.labels"], task).mean()
    torch.testing.assert_close(loss, g["out.total"], **EXACT)
    classification_loss = (1 - 5 / 7) * class_binary_cross_entropy(logits, g["in.labels"]).mean()
    torch.testing.assert_close(classification_loss, g["out.clf_weighted"], **EXACT)
    loss.backward()
    for ours, name in (
        (heads["bias"].grad[5:], "head.2.head.bias"),
        (heads["weight"].grad[5:], "head.2.head.weight"),
        (heads["norm_weight"].grad[2], "head.2.norm.weight"),
        (tab["tab.q.weight"].grad, "tabs.0.attn.q.weight"),
        (tab["tab.fc2.bias"].grad, "tabs.0.mlp.fc2.bias"),
        (tokens.grad[2:][None], "task_tokens.2"),
    ):
        torch.testing.assert_close(ours, g[f"out.grad.{name}"], **EXACT)


def test_losses_by_hand() -> None:
    """Compare losses with values worked out by hand.

    All logits are 0: (1 - 3/5) ln 2 + ln 2 / 10. A student equal to its teacher has no
    distillation loss.
    """
    method, task = create_method("dytox"), Task(1, 3, 5, 5, 2)
    zero = torch.zeros(2, 5).double()
    loss = method.grown(zero, zero[:, :3], zero[:, :3] + 7, torch.tensor([0, 4]), task)
    assert loss.tolist() == pytest.approx([0.5 * torch.log(torch.tensor(2.0)).item()] * 2)
    assert (
        method.grown(zero, zero[:, :3], torch.eye(3).double()[:2], torch.tensor([0, 4]), task)
        > loss
    ).all()


def test_attention_by_hand(noise) -> None:
    """Compare attention with a value worked out by hand.

    One head, no MLP: e = theta + sum of softmax(q k) v over the token itself and the image's.
    """
    eye, none = torch.eye(2).double(), torch.zeros(2).double()
    tab = {f"tab.{k}.weight": eye for k in ("q", "k", "v", "proj")} | {"tab.proj.bias": none}
    tab |= {f"tab.norm{i}.{p}": none + (p == "weight") for i in (1, 2) for p in ("weight", "bias")}
    tab |= {
        f"tab.fc{i}.{p}": (0 * eye if p == "weight" else none)
        for i in (1, 2)
        for p in ("weight", "bias")
    }
    token, image = torch.tensor([[3.0, 1.0]]).double(), torch.tensor([[[0.0, 2.0]]]).double()
    score = 2 / 2**0.5  # normalised: (1, -1) and (-1, 1)
    token_share = torch.tensor([score, -score]).double().softmax(0)[0]
    step = token_share * torch.tensor([1.0, -1.0]) + (1 - token_share) * torch.tensor([-1.0, 1.0])
    embedding = task_embeddings(tab, token, image, 1)
    torch.testing.assert_close(embedding[0, 0], token[0] + step, rtol=1e-4, atol=1e-4)


def test_task_tokens_are_independent(noise) -> None:
    """Keep embeddings when tokens are added or the image's tokens change order."""
    tab = {k: v.double() for k, v in init_block(8, 32, torch.Generator().manual_seed(0)).items()}
    tokens, image = noise(3, 8), noise(2, 5, 8)
    embeddings = task_embeddings(tab, tokens, image, 2)
    torch.testing.assert_close(
        embeddings[:, :2], task_embeddings(tab, tokens[:2], image, 2), **EXACT
    )
    torch.testing.assert_close(embeddings, task_embeddings(tab, tokens, image.flip(1), 2), **EXACT)


def test_block_parameter_count_matches_paper(backbone) -> None:
    block = init_block(768, 4 * 768, torch.Generator())
    assert sum(v.numel() for v in block.values()) == 7_085_568
    ours, copy = (
        init_block(32, backbone.config.mlp_dim, torch.Generator()),
        copy_block(backbone),
    )
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in copy.items()}
    qkv = backbone.weights["blocks.5.attn.qkv.weight"]
    assert torch.equal(torch.cat([copy[f"tab.{p}.weight"] for p in "qkv"]), qkv)


def test_first_image_token_is_backbone_feature(backbone, noise) -> None:
    images = noise(2, 3, 16, 16)
    patches = image_tokens(backbone, images, {})
    assert patches.shape == (2, 5, 32)
    torch.testing.assert_close(patches[:, 0], backbone(images), **EXACT)
    biases = {"full.norm.bias": backbone.weights["norm.bias"] + 1}
    torch.testing.assert_close(image_tokens(backbone, images, biases), patches + 1, **EXACT)


def test_old_tokens_train_in_balanced_round_only(record) -> None:
    run = record("dytox")
    for call in run.rounds:
        for payload in call.payloads:
            assert ("old.token" in payload) == ("old.bias" in payload) == (call.phase == "balanced")
            assert any(k.startswith("full.") for k in payload) == (call.phase == "train")
            later = call.ctx.task.index > 0 and call.phase == "train"
            assert ("new.divergence_weight" in payload) == later
    last = [call for call in run.calls if call.phase == "balanced"][-1]
    end_state = run.states[2]
    assert not torch.equal(end_state["old.token"], last.state["old.token"])
    assert torch.equal(end_state["full.cls_token"], last.state["full.cls_token"])
    assert end_state["owner"].tolist() == OWNER.tolist()
