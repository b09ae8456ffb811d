"""DOLFIN: LoRA pairs orthogonal to the attention inputs of earlier tasks."""

from itertools import pairwise

import torch

from fczoo import create_method
from fczoo.baselines.dolfin import leading_outside
from fczoo.core.tree import select
from fczoo.functional.lora import fixed_plugs


def test_leading_directions_by_hand():
    """Choose the directions of most energy outside the basis.

    Energies are 4, 3, 2, 1 along four axes. The first axis belongs to an earlier task.
    """
    gram, basis = (
        torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]).double()),
        torch.eye(4).double()[:, :1],
    )
    assert leading_outside(gram, basis, 2).abs().tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]
    assert leading_outside(gram, basis, 4).abs().tolist() == [
        [0, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
        [0, 0, 0, 0],
    ]
    assert not leading_outside(gram, torch.eye(4).double(), 2).any()
    directions = leading_outside(gram, basis[:, :0], 1)
    assert directions.abs().tolist() == [[1, 0, 0, 0]]


def test_first_pairs_span_leading_directions_of_all_images(make_bench, batch_of):
    bench, method = make_bench(rounds=1, epochs=1), create_method("dolfin", rank=2)
    run = bench.start(method)
    next(iter(run))
    task = bench.stream.tasks[0]
    index = torch.from_numpy(bench.stream.positions(bench.stream.train, task))
    _, inputs = bench.backbone.features_and_taps(
        batch_of(method, bench.train, index).x, ["blocks.0.attn.qkv"], fixed_plugs(run.state)
    )
    x = inputs["blocks.0.attn.qkv"].flatten(0, 1)  # no pair changes the input of block 0
    leading = torch.linalg.eigh(x.mT @ x).eigenvectors[:, -2:]
    for part in "kv":
        chosen = run.state[f"fixed.0.{part}.a"]
        torch.testing.assert_close(chosen.mT @ chosen, leading @ leading.mT, rtol=1e-8, atol=1e-10)


def test_later_pairs_are_orthogonal_to_earlier_inputs(make_bench):
    """Check B A x = 0 for every x in the basis of earlier tasks, whose pairs do not change."""
    states = []
    run = make_bench().start(create_method("dolfin", rank=2, threshold=0.9))
    for _ in run:
        states.append(dict(run.state))
    assert len(states) == 3
    for old, new in pairwise(states):
        for name, basis in select(old, "basis.").items():
            block = name.removeprefix("basis.")
            assert 0 < basis.shape[1] < len(basis)
            assert new[name].shape[1] > basis.shape[1]
            for part in "kv":
                down, up = new[f"fixed.{block}.{part}.a"], new[f"lora.{block}.{part}.b"]
                torch.testing.assert_close(down @ down.mT, torch.eye(2, dtype=down.dtype))
                assert up.abs().max() > 1e-6
                assert (up @ down @ basis.to(down)).abs().max() < 1e-10
                past = new[f"past.{block}.{part}.a"]
                assert torch.equal(past[-1], old[f"fixed.{block}.{part}.a"])


def test_lora_a_is_not_uploaded(record):
    (payload, *_) = record("dolfin").rounds[0].payloads
    assert not any(name.endswith(".a") for name in payload.tensors)
