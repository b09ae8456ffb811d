"""Adapters that clients train in the first task only, for methods that are solved from sums."""

import pytest
import torch

from fczoo.core.tree import select
from fczoo.core.vit_config import ViTConfig
from fczoo.functional.adapters import adapters
from fczoo.testing import check_method
from fczoo.testing.method_under_test import batch_of

ADAPTER_METHODS = ["stsa", "stsae", "ranpac"]


def test_adapter_parameter_count_matches_paper():
    """Count the parameters of 64-wide adapters in all twelve blocks of ViT-B."""
    config = ViTConfig("vit_b", 224, 16, dim=768, depth=12, heads=12, mlp_dim=3072)
    plugs = adapters(config, 64, torch.Generator().manual_seed(0))
    assert sum(value.numel() for value in plugs.values()) == 1_189_632
    assert not any(value.any() for name, value in plugs.items() if not name.endswith(".down"))
    assert float(plugs["adapter.3.down"].abs().max()) == pytest.approx(768**-0.5, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTER_METHODS)
def test_method_with_adapters_passes_conformance_kit(small_method, name):
    check_method(small_method(name, adapt="adapter"))


@pytest.mark.parametrize("name", ADAPTER_METHODS)
def test_adapters_train_in_first_task_only(make_bench, small_method, watch, name):
    run = watch(
        make_bench(rounds=2, epochs=1, together=3),
        small_method(name, adapt="adapter", bottleneck=4),
    )
    moments = [(call.ctx.task.index, call.phase) for call in run.calls]
    assert moments == [
        (0, "train"),
        (0, "train"),
        (0, "task_end"),
        (1, "task_end"),
        (2, "task_end"),
    ]
    first, *later = (select(run.states[t], "adapter.") for t in range(3))
    assert first.keys() == adapters(run.bench.backbone.config, 4, torch.Generator()).keys()
    assert all(value.any() for value in first.values())
    assert all(torch.equal(value, tree[key]) for tree in later for key, value in first.items())
    assert not any(select(state, "head.") for state in run.states.values())
    assert select(run.calls[1].state, "head.")["head.weight"].shape == (3, 32)


@pytest.mark.parametrize("name", ADAPTER_METHODS)
def test_adapters_with_zero_rate_match_frozen_backbone(make_bench, small_method, watch, name):
    """Leave the sums over classes and STSA's solution unchanged at rate 0.

    At the end of a task RanPAC holds out other images and STSA-E draws other parts: these are not
    compared.
    """
    still = watch(make_bench(rounds=1, epochs=1), small_method(name, adapt="adapter", lr=0.0))
    plain = watch(make_bench(rounds=1, epochs=1), small_method(name))
    same = plain.states[2] if name == "stsa" else ("moment.target", "moment.count")
    for key in same:
        torch.testing.assert_close(still.states[2][key], plain.states[2][key], rtol=1e-9, atol=1e-9)
    assert name != "stsa" or still.result.accuracy == plain.result.accuracy


def test_first_task_trains_on_cosine_logits(make_bench, small_method, watch):
    """Use the cross-entropy of cosines as loss, and average uploads uniformly."""
    run = watch(make_bench(rounds=1, epochs=1), small_method("stsa", adapt="adapter", bottleneck=3))
    call = run.calls[0]
    for name in select(call.state, "adapter.", "head."):
        mean = sum(payload[name] for payload in call.payloads) / len(call.payloads)
        torch.testing.assert_close(run.calls[1].state.get(name, mean), mean, rtol=1e-12, atol=1e-12)
    method, index = run.method, call.clients[0].index[:2]
    batch = batch_of(method, run.bench.train, index)
    loss, _ = method.loss(run.bench.backbone, call.state, batch, call.ctx)
    features = torch.nn.functional.normalize(run.bench.backbone(batch.x), dim=1)
    rows = torch.nn.functional.normalize(call.state["head.weight"].double(), dim=1)
    cross_entropy = torch.nn.functional.cross_entropy(features @ rows.mT, batch.y)
    torch.testing.assert_close(loss.double(), cross_entropy, rtol=1e-6, atol=1e-6)
