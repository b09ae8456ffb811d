"""FedAvg: what is trained."""

import pytest
import torch


@pytest.mark.parametrize("tune", ["full", "lora", "head"])
def test_fedavg_trains_what_it_is_told(make_bench, small_method, watch, tune):
    run = watch(make_bench(rounds=1, epochs=1), small_method("fedavg", tune=tune))
    before, after = run.rounds[0].state, run.states[2]
    kinds = {"full": {"head", "full"}, "lora": {"head", "lora"}, "head": {"head"}}[tune]
    assert {name.partition(".")[0] for name in after} == kinds
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert {name.partition(".")[0] for name in moved} == kinds
    assert set(run.rounds[0].payloads[0]) == {*after, "num_samples", "client"}
