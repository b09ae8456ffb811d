"""Federated LoRA: exact averages of FFA-LoRA, and of FedLoRA with its residual."""

import pytest
import torch

from fczoo import Payload, Settings, Task, Tree, create_method
from fczoo.aggregators.averaging import fedavg
from fczoo.core.tree import select
from fczoo.runner.cost import random_backbone
from helpers_golden import golden
from helpers_payload import server_context

CLOSE = {"rtol": 2e-5, "atol": 1e-6}
SPLIT = {"qkv": ("0.q", "0.k", "0.v"), "proj": ("0.proj",)}  # recorded layer -> names in fczoo


def merged_delta(method, state: Tree, layer: str) -> torch.Tensor:
    """Return the change that LoRA makes to a recorded layer's weight in evaluation."""
    plugs = method.plugs(state)
    return torch.cat([plugs[f"lora.{name}.b"] @ plugs[f"lora.{name}.a"] for name in SPLIT[layer]])


def test_ffa_lora_matches_recorded_outputs(tasks):
    """Reproduce the recorded B, head and evaluated weights.

    There are three tasks and three clients; A is drawn for each task.
    """
    g = golden("ffa_lora_fed")
    method, past = create_method("ffalora", merge="mean"), {}
    for t in range(3):
        factors = {
            f"fixed.{name}.a": g[f"in.A_init_t{t}.{layer}"]
            for layer, names in SPLIT.items()
            for name in names
        }
        payloads = []
        for k in range(3):
            upload = {f"head.{part}": g[f"in.t{t}k{k}.head.{part}"] for part in ("weight", "bias")}
            for layer, names in SPLIT.items():
                thirds = g[f"in.t{t}k{k}.B.{layer}"].split(5)
                upload |= {f"lora.{name}.b": part for name, part in zip(names, thirds, strict=True)}
            payloads.append(Payload(upload, k, int(g["in.n"][k])))
        state = method.server_update(
            {**past, **factors}, method.aggregate(payloads, fedavg), server_context(tasks[0])
        )
        for part in ("weight", "bias"):
            torch.testing.assert_close(state[f"head.{part}"], g[f"out.head_t{t}.{part}"], **CLOSE)
        for layer, names in SPLIT.items():
            merged_b = torch.cat([state[f"lora.{name}.b"] for name in names])
            torch.testing.assert_close(merged_b, g[f"out.B_t{t}.{layer}"], **CLOSE)
            torch.testing.assert_close(
                g[f"in.W0.{layer}"] + merged_delta(method, state, layer),
                g[f"out.eval_weight_t{t}.{layer}"],
                **CLOSE,
            )
        for name, value in select(state, "fixed.", "lora.").items():
            earlier = f"past.{name.partition('.')[2]}"
            past[earlier] = (
                torch.cat([past[earlier], value[None]]) if earlier in past else value[None]
            )


def test_ffa_lora_uploads_b_of_all_blocks():
    """Count the entries of B in blocks of width d.

    q, k, v, proj and fc2 have d r each and fc1 has 4 d r: 9 d r, or 6912 r with d = 768.
    """
    task = Task(0, 0, 2, 4, 2)
    backbone = random_backbone(Settings(backbone="vit_tiny_patch16_224.augreg_in21k_ft_in1k"))
    state = create_method("ffalora", rank=3).begin_task(
        {}, task, backbone, torch.Generator().manual_seed(0)
    )
    assert sum(v.numel() for v in select(state, "lora.").values()) == 12 * 9 * 192 * 3


def test_ffa_lora_keeps_a_frozen(make_bench, small_method, watch):
    run = watch(make_bench(), small_method("ffalora", blocks=(0, 2)))
    first = run.rounds[0].state
    for name, value in select(first, "fixed.").items():
        assert torch.equal(run.states[2][name], value)
    assert torch.equal(first["fixed.0.q.a"], first["fixed.0.v.a"])
    assert not torch.equal(run.states[2]["lora.2.fc1.b"], first["lora.2.fc1.b"])


@pytest.mark.parametrize(("merge", "width"), [("one", 1), ("sum", 3), ("mean", 3)])
def test_ffa_lora_merge_sets_rank_of_pairs(make_bench, small_method, watch, merge, width):
    """Use the rank of the merge in the forward pass after three tasks.

    In the mean each task contributes a third of its update.
    """
    run = watch(
        make_bench(rounds=1, epochs=1), small_method("ffalora", blocks=(0,), merge=merge, rank=2)
    )
    plugs = run.method.plugs(run.states[2])
    assert plugs["lora.0.q.a"].shape == (2 * width, 32)
    assert plugs["lora.0.q.b"].shape == (
        32,
        2 * width,
    )
    if merge == "mean":
        torch.testing.assert_close(3 * plugs["lora.0.q.b"][:, :2], run.states[0]["lora.0.q.b"])


def test_fedlora_residual_makes_average_exact(make_bench, small_method, watch):
    """Compare weight + B A on the server with the mean of the clients' weight + B_k A_k.

    The mean is weighted by samples.
    """
    run = watch(make_bench(rounds=1, epochs=1), small_method("fedlora", blocks=(0, 1)))
    call, new_state = run.rounds[0], run.states[0]
    samples = sum(p.num_samples for p in call.payloads)
    for layer, rows in (("0.q", slice(0, 32)), ("0.v", slice(64, 96)), ("1.fc2", slice(None))):
        name = f"full.blocks.{layer[0]}.{'mlp.fc2' if 'fc2' in layer else 'attn.qkv'}.weight"
        mean = sum(
            p.num_samples / samples * (p[f"lora.{layer}.b"] @ p[f"lora.{layer}.a"])
            for p in call.payloads
        )
        ours = new_state[name][rows] + new_state[f"lora.{layer}.b"] @ new_state[f"lora.{layer}.a"]
        torch.testing.assert_close(ours, call.state[name][rows] + mean, rtol=1e-9, atol=1e-9)
    key_rows = new_state["full.blocks.0.attn.qkv.weight"][32:64]
    assert torch.equal(
        key_rows, call.state["full.blocks.0.attn.qkv.weight"][32:64]
    )  # k has no LoRA


def test_fedlora_has_no_residual_for_equal_clients(rng):
    pair = {
        "lora.0.q.a": torch.randn(2, 4, generator=rng),
        "lora.0.q.b": torch.randn(4, 2, generator=rng),
    }
    mean = create_method("fedlora").aggregate([Payload(pair, k, k + 1) for k in range(3)], fedavg)
    assert mean["residual.0.q"].abs().max() < 1e-6
