"""Options that are there for rows of papers' tables: FedNCM+FT by FedAvg, L2P with LoRA, parts of FCILPT."""

import torch
import torch.nn.functional as F

from fczoo.core.tree import select
from fczoo.testing.recording import watch
from fczoo.testing.world import small_method, toy_bench


def watched(name, **options):
    return watch(toy_bench(rounds=1, epochs=1), small_method(name, **options), 0)


def test_fedavg_from_class_means_is_fedncm_with_fine_tuning():
    """Rate 0: the rows are FedNCM's means, of length 1; else training moves them."""
    means = watched("fedncm").states[2]["mean"]
    still, moved = (
        watched("fedavg", tune="lora", head_init="means", lr=rate, lr_backbone=rate).states[2]
        for rate in (0.0, 0.1)
    )
    torch.testing.assert_close(still["head.weight"], F.normalize(means, dim=-1))
    assert not still["head.bias"].any() and not any(v.any() for k, v in still.items() if k.endswith(".b"))
    assert (moved["head.weight"] - still["head.weight"]).abs().max() > 0.01
    assert any(v.any() for k, v in moved.items() if k.endswith(".b"))


def test_l2p_with_lora_trains_pairs_beside_the_same_pool():
    """The pairs are drawn last and start as nothing, so that pool and head start as without them."""
    plain, both = (
        watched("l2p", lr=0.0, head_init="default", **more) for more in ({}, {"lora": True, "lr_lora": 0.1})
    )
    pairs = select(both.states[2], "lora.")
    assert pairs and all(value.any() for value in pairs.values())
    for name, value in plain.states[2].items():
        assert torch.equal(both.states[2][name], value), name


def test_fcilpt_without_a_pool_has_its_common_prompt_alone():
    run = watched("fcilpt", chosen=0)
    assert all(not payload["usage"].any() for call in run.rounds for payload in call.payloads)
    assert torch.isfinite(run.states[2]["common"]).all()
