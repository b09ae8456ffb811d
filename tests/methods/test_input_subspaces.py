"""FOT and the subspaces of earlier inputs, against recorded outputs and by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fczoo import Task, create_method
from fczoo.core.tree import select
from fczoo.functional.input_subspaces import extend_basis, remove_subspace
from helpers_golden import golden
from helpers_payload import server_context

TIGHT = {"rtol": 1e-8, "atol": 1e-10}


def projector(basis: Tensor) -> Tensor:
    return basis @ basis.mT


def empty_basis(size: int) -> Tensor:
    return torch.zeros(size, 0, dtype=torch.float64)


def test_bases_match_recorded_outputs():
    g, basis = golden("gpm_basis"), empty_basis(9)
    for t in range(3):
        x, old_size = g[f"in.X_t{t}"].double(), basis.shape[1]
        basis = extend_basis(basis, x @ x.mT, float(g["in.threshold"]))
        assert basis.shape[1] - old_size == int(g[f"out.r_t{t}"])
        torch.testing.assert_close(projector(basis), g[f"out.projector_t{t}"].double(), **TIGHT)
        energy = (basis.mT @ x).square().sum() / x.square().sum()
        torch.testing.assert_close(energy, g[f"out.energy_t{t}"].double(), **TIGHT)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), threshold=st.floats(0.05, 1.0), parts=st.integers(1, 4))
def test_basis_holds_energy_for_every_partition(seed, threshold, parts):
    rng = torch.Generator().manual_seed(seed)
    first, x = (torch.randn(6, 15, generator=rng, dtype=torch.float64) for _ in range(2))
    old = extend_basis(empty_basis(6), first @ first.mT, 0.4)
    basis = extend_basis(
        old, sum(x[:, k::parts] @ x[:, k::parts].mT for k in range(parts)), threshold
    )
    torch.testing.assert_close(
        basis.mT @ basis, torch.eye(basis.shape[1], dtype=torch.float64), **TIGHT
    )
    assert (basis.mT @ x).square().sum() / x.square().sum() >= threshold - 1e-9
    torch.testing.assert_close(projector(basis) @ old, old, **TIGHT)
    change = torch.randn(3, 6, generator=rng, dtype=torch.float64)
    assert (remove_subspace(change, basis) @ basis).abs().max() < 1e-10


def test_basis_by_hand():
    """Compare the directions of a basis with values worked out by hand.

    Energies 9 and 1 along two axes: 0.9 takes the first, 0.91 both; ``least`` takes one even for 0.
    """
    gram = torch.diag(torch.tensor([9.0, 1.0]))
    assert [extend_basis(empty_basis(2), gram, e).shape[1] for e in (0.0, 0.9, 0.91, 1.0)] == [
        0,
        1,
        2,
        2,
    ]
    assert extend_basis(empty_basis(2), gram, 0.0, least=1).abs().tolist() == [[1.0], [0.0]]
    full = torch.eye(2, dtype=torch.float64)
    assert extend_basis(full, gram, 1.0, least=1).shape[1] == 2  # there is nothing to add
    assert not extend_basis(empty_basis(2), torch.zeros(2, 2), 0.9, least=1).numel()


def test_fot_matches_recorded_outputs():
    """Reproduce the recorded sketches, projections and bases with FOT.

    The paper's rule is ``extend_basis`` on the Gram matrix of the residuals, which a sketch Y
    estimates.

    Its threshold is (r - (1 - e)) / r, for the clients' mean ratio r of norms.
    """
    g = golden("fot")
    layers, bases = [f"layers.{i}.weight" for i in (0, 3, 6, 9)], {}
    weights, epsilon = g["in.weights"], float(g["in.epsilon"])
    last = {k.removeprefix("in.net."): v for k, v in g.items() if k.startswith("in.net.")}
    for t in range(2):
        for name, start in last.items():
            local = [g[f"in.local_t{t}k{k}.{name}"] for k in range(2)]
            mean = sum(w * v for w, v in zip(weights, local, strict=True))
            if name in bases:
                mean = start + remove_subspace(mean - start, bases[name])
            torch.testing.assert_close(mean, g[f"out.global_t{t}.{name}"], rtol=1e-4, atol=1e-5)
            last[name] = mean
        for name in layers:
            sketch = sum(g[f"out.sketch_t{t}k{k}.{name}"].double() for k in range(2))
            images = [len(g[f"in.x_t{t}k{k}"]) for k in range(2)]
            ratios = [float(g[f"out.ratio_t{t}k{k}.{name}"]) for k in range(2)]
            ratio = sum(n * r for n, r in zip(images, ratios, strict=True)) / sum(images)
            threshold = (ratio - (1 - epsilon)) / ratio
            residual = extend_basis(
                empty_basis(len(sketch)), sketch @ sketch.mT, threshold, least=1
            )
            old = bases.get(name, empty_basis(len(sketch)))
            bases[name] = torch.linalg.qr(torch.cat([old, residual], 1)).Q
            official = g[f"out.projector_t{t}.{name}"].double()
            torch.testing.assert_close(projector(bases[name]), official, rtol=1e-4, atol=1e-5)
        epsilon += float(g["in.eps_inc"])


def test_fot_first_task_equals_uniform_fedavg(make_bench, watch):
    options = {"rounds": 1, "epochs": 1}
    fot = watch(make_bench(**options), create_method("fot")).rounds[1].state
    plain = (
        watch(make_bench(aggregator="uniform", **options), create_method("fedavg")).rounds[1].state
    )
    for name, value in select(plain, "full.", "head.").items():
        assert torch.equal(fot[name], value)


def test_fot_changes_are_orthogonal_to_old_inputs(record):
    run = record("fot")
    old, new = run.states[0], run.states[1]
    largest_change = 0.0
    for name, basis in select(old, "basis.").items():
        weight = f"full.{name.removeprefix('basis.')}.weight"
        change = new[weight] - old[weight]
        assert (change @ basis).abs().max() < 1e-10
        assert new[name].shape[1] > basis.shape[1] or basis.shape[1] == len(basis)
        largest_change = max(largest_change, float(change.abs().max()))
    assert largest_change > 1e-6


def test_fot_threshold_of_one_freezes_layers(rng):
    method = create_method("fot", threshold=1.0)

    task, weight = Task(1, 2, 4, 4, 2), torch.randn(3, 2, generator=rng)
    state = {"full.x.weight": weight, "basis.x": torch.eye(2, dtype=torch.float64)}
    new = method.server_update(state, {"full.x.weight": weight + 1}, server_context(task))
    torch.testing.assert_close(new["full.x.weight"], weight)
    assert pytest.approx(0.0, abs=1e-6) == float((new["full.x.weight"] - weight).abs().max())
