"""Robust aggregators: limits on the influence of a hostile minority."""

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fczoo import FczooError, Payload, Tree
from fczoo.aggregators.averaging import uniform
from fczoo.core.registry import make_aggregator
from fczoo.testing import check_aggregator

some = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**31)
SPECS = {  # spec -> uploads that it needs
    "median": 1,
    "trimmed_mean:1": 3,
    "trimmed_mean:2": 5,
    "krum:1": 4,
    "multi_krum:2": 5,
    "norm_clip": 1,
    "norm_clip:2": 1,
}
specs = pytest.mark.parametrize("spec", SPECS)


def uploads(count: int, seed: int, centre: float = 0.0) -> list[Payload]:
    rng = torch.Generator().manual_seed(seed)
    samples = torch.randint(1, 99, (count,), generator=rng)
    return [
        Payload(
            {
                "a": centre + torch.randn(3, 2, generator=rng),
                "b": centre + torch.randn(4, generator=rng),
            },
            k,
            n,
        )
        for k, n in enumerate(samples.tolist())
    ]


def as_tree(tree: Mapping[str, torch.Tensor]) -> Tree:
    return dict(tree)


def hostile_upload(payload: Payload, value: float) -> Payload:
    return payload.holding({k: torch.full_like(v, value) for k, v in payload.items()})


@pytest.mark.parametrize(("spec", "fewest"), SPECS.items())
def test_every_robust_aggregator_passes_check(spec, fewest):
    check_aggregator(spec, fewest=fewest)


@specs
@some
@given(seed=seeds, count=st.integers(5, 9))
def test_client_order_does_not_matter(spec, seed, count):
    payloads, merge = uploads(count, seed), make_aggregator(spec)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    one, two = merge(payloads), merge([payloads[i] for i in order])
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert one.keys() == as_tree(payloads[0]).keys()


@specs
@some
@given(seed=seeds, shift=st.floats(-50, 50))
def test_aggregators_are_shift_equivariant(spec, seed, shift):
    payloads = [p.holding({k: v.double() for k, v in p.items()}) for p in uploads(7, seed)]
    moved_payloads = [p.holding({k: v + shift for k, v in p.items()}) for p in payloads]
    one, two = make_aggregator(spec)(payloads), make_aggregator(spec)(moved_payloads)
    assert all(torch.allclose(one[k] + shift, two[k], atol=1e-9) for k in one)


@some
@given(seed=seeds, count=st.integers(1, 11), value=st.sampled_from([-1e30, -3.0, 0.0, 7.0, 1e30]))
def test_median_breaks_down_at_half(seed, count, value):
    """Stay within the honest values while fewer than half of the clients are hostile.

    With half of them hostile, the median breaks down.
    """
    payloads = uploads(count, seed)
    hostile_count = (count - 1) // 2
    honest = payloads[hostile_count:]
    median = make_aggregator("median")(
        [*(hostile_upload(p, value) for p in payloads[:hostile_count]), *honest]
    )
    for name, tensor in median.items():
        rows = torch.stack([p[name] for p in honest])
        assert (tensor >= rows.amin(0)).all()
        assert (tensor <= rows.amax(0)).all()
    half = (count + 1) // 2
    broken = make_aggregator("median")(
        [*(hostile_upload(p, 1e30) for p in payloads[:half]), *payloads[half:]]
    )
    assert (broken["a"] > 1e29).all()


@some
@given(
    seed=seeds,
    trim=st.integers(1, 3),
    extra=st.integers(1, 4),
    value=st.sampled_from([-1e30, 1e30]),
)
def test_trimmed_mean_tolerates_trimmed_clients(seed, trim, extra, value):
    payloads = uploads(2 * trim + extra, seed)
    honest = payloads[trim:]
    average = make_aggregator(f"trimmed_mean:{trim}")(
        [*(hostile_upload(p, value) for p in payloads[:trim]), *honest]
    )
    for name, tensor in average.items():
        rows = torch.stack([p[name] for p in honest])
        assert (tensor >= rows.amin(0) - 1e-6).all()
        assert (tensor <= rows.amax(0) + 1e-6).all()


@some
@given(seed=seeds, bad=st.integers(1, 3), value=st.sampled_from([-1e6, 50.0, 1e6]))
def test_krum_selects_honest_uploads(seed, bad, value):
    payloads = uploads(2 * bad + 3, seed)
    honest = payloads[bad:]
    all_payloads = [*(hostile_upload(p, value) for p in payloads[:bad]), *honest]
    chosen = make_aggregator(f"krum:{bad}")(all_payloads)
    assert any(all(torch.equal(chosen[k], p[k]) for k in chosen) for p in honest)
    average = make_aggregator(f"multi_krum:{bad}")(all_payloads)
    assert all(torch.allclose(average[k], v, atol=1e-5) for k, v in uniform(honest).items())


@some
@given(seed=seeds, value=st.sampled_from([1e3, 1e12]))
def test_norm_clip_bounds_hostile_influence(seed, value):
    payloads = uploads(9, seed)
    average = make_aggregator("norm_clip")([hostile_upload(payloads[0], value), *payloads[1:]])
    size = torch.cat([v.flatten() for v in as_tree(average).values()]).norm()
    assert size < 5  # standard normal in ten dimensions: the honest ones are about 3.2 away


def test_small_cases_by_hand():
    def line(*values: float) -> list[Payload]:
        return [Payload({"x": torch.tensor([float(v)])}, k) for k, v in enumerate(values)]

    assert make_aggregator("median")(line(1, 9, 2))["x"] == 2
    assert make_aggregator("median")(line(1, 9, 2, 4))["x"] == 3
    assert make_aggregator("trimmed_mean:1")(line(1, 100, 2, 3, -50))["x"] == 2
    assert (
        make_aggregator("krum:1")(line(0, 1, 1.5, 3, 100))["x"] == 1
    )  # scores 3.25, 1.25, 2.5, 6.25 and more
    assert make_aggregator("multi_krum:1")(line(0, 1, 2, 3, 100))["x"] == 1.5
    assert make_aggregator("norm_clip")(line(0, 1, 2, 3, 102))["x"] == pytest.approx(
        2 + (-1 - 1 + 0 + 1 + 1) / 5
    )


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("medain", "did you mean median"),
        ("median:2", "aggregator median has no options"),
        ("trimmed_mean:-1", "at least 0"),
        ("krum:some", "it must be a whole number"),
    ],
)
def test_invalid_spec_is_rejected(spec, says):
    with pytest.raises(FczooError, match=says):
        make_aggregator(spec)


@pytest.mark.parametrize(
    ("spec", "needed"), [("trimmed_mean:2", 5), ("krum:2", 5), ("multi_krum:1", 4)]
)
def test_too_few_uploads_are_rejected(spec, needed):
    make_aggregator(spec)(uploads(needed, 0))
    with pytest.raises(
        FczooError, match=f"{spec} needs at least {needed} uploads and got {needed - 1}"
    ):
        make_aggregator(spec)(uploads(needed - 1, 0))


@pytest.mark.parametrize("name", ["hgp", "pilora", "fcilpt", "fppl"])
def test_robust_aggregators_accept_every_upload_kind(make_bench, small_method, name):
    for spec in ("median", "norm_clip"):
        assert len(make_bench(aggregator=spec, epochs=1).run(small_method(name)).accuracy) == 3
