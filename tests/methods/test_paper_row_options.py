"""Options for rows of papers' tables: FedNCM+FT by FedAvg, L2P with LoRA, parts of FCILPT."""

import torch
import torch.nn.functional as F

from fczoo.core.tree import select
from fczoo.testing.method_under_test import record_run
from fczoo.testing.toy_benchmark import small_method, toy_bench


def watch_small_run(name, **options):
    return record_run(toy_bench(rounds=1, epochs=1), small_method(name, **options), 0)


def test_fedavg_from_class_means_equals_fedncm_with_fine_tuning():
    """Start rows at FedNCM's unit-norm means, which rate 0 keeps and training moves."""
    means = watch_small_run("fedncm").states[2]["mean"]
    still, training = (
        watch_small_run("fedavg", tune="lora", head_init="means", lr=rate, lr_backbone=rate).states[
            2
        ]
        for rate in (0.0, 0.1)
    )
    torch.testing.assert_close(still["head.weight"], F.normalize(means, dim=-1))
    assert not still["head.bias"].any()
    assert not any(v.any() for k, v in still.items() if k.endswith(".b"))
    assert (training["head.weight"] - still["head.weight"]).abs().max() > 0.01
    assert any(v.any() for k, v in training.items() if k.endswith(".b"))


def test_l2p_with_lora_starts_from_same_pool():
    """Start pool and head as without LoRA: pairs are drawn last and start at zero."""
    plain, with_lora = (
        watch_small_run("l2p", lr=0.0, head_init="default", **options)
        for options in ({}, {"lora": True, "lr_lora": 0.1})
    )
    pairs = select(with_lora.states[2], "lora.")
    assert pairs and all(value.any() for value in pairs.values())
    for name, value in plain.states[2].items():
        assert torch.equal(with_lora.states[2][name], value), name


def test_fcilpt_without_pool_uses_common_prompt_only():
    run = watch_small_run("fcilpt", chosen=0)
    assert all(not payload["usage"].any() for call in run.rounds for payload in call.payloads)
    assert torch.isfinite(run.states[2]["common"]).all()
