"""Verdicts on claims: the rows that are compared, and expected verdicts computed by hand."""

import json

import pytest

from fczoo import create_method
from fczoo.papers.claims import get_claim
from fczoo.reports.runs import read_experiments
from helpers_runs import tune, write_one, write_run


def test_plain_claim_ignores_ablation(tmp_path):
    write_one(tmp_path / "a", "fedncm", {0: 40.0, 1: 50.0, 2: 60.0})
    write_one(tmp_path / "b", "fecam", {0: 52.0, 1: 60.0, 2: 68.0}, covariance="diagonal")
    assert get_claim("fecam-ncm").verdicts(read_experiments([tmp_path])) == []
    write_one(tmp_path / "c", "fecam", {0: 52.0, 1: 60.0, 2: 68.0})
    assert [
        verdict for verdict, _ in get_claim("fecam-ncm").verdicts(read_experiments([tmp_path]))
    ] == ["holds"]


def test_plain_claim_accepts_runs_without_newer_options(tmp_path):
    write_one(tmp_path / "a", "fedncm", {0: 40.0, 1: 50.0, 2: 60.0})
    old_options = {
        "ridge": 1.0,
        "scaled": False,
        "normalise": False,
        "features": "plain",
    }  # without the newer option lift
    write_run(
        tmp_path / "b",
        {"fedridge": {0: 52.0, 1: 60.0, 2: 68.0}},
        old_options,
        partition="dirichlet:0.5",
    )
    ((verdict, _),) = get_claim("ridge-ncm").verdicts(read_experiments([tmp_path]))
    assert verdict == "holds"


def test_plain_claim_has_paired_test(tmp_path):
    write_one(tmp_path / "a", "fedavg", {0: 52.0, 1: 60.0, 2: 68.0}, tune="head", head_init="means")
    write_one(
        tmp_path / "b", "fedavg", {0: 40.0, 1: 50.0, 2: 60.0}, tune="head", head_init="default"
    )
    write_one(
        tmp_path / "c",
        "fedavg",
        {0: 40.0, 1: 50.0, 2: 60.0},
        tune="head",
        lr=0.5,
        head_init="default",
    )
    ((verdict, text),) = get_claim("head-means").verdicts(read_experiments([tmp_path]))
    assert verdict == "holds" and text.startswith("+5.0 [+2.5, +7.5] over 3 seeds")


def test_verdict_has_paired_difference_and_interval(tmp_path):
    # A_N is (last + 80) / 2: gains of 6, 5 and 4 points, mean 5, standard deviation 1, t(2) = 4.303
    write_one(tmp_path / "a", "pilora", {0: 52.0, 1: 60.0, 2: 68.0}, reweight="distance")
    write_one(tmp_path / "b", "pilora", {0: 40.0, 1: 50.0, 2: 60.0}, reweight="equal")
    ((verdict, text),) = get_claim("pilora-reweight").verdicts(read_experiments([tmp_path]))
    assert verdict == "holds"
    assert text.startswith("+5.0 [+2.5, +7.5] over 3 seeds; digits dirichlet:0.5")


@pytest.mark.parametrize(
    ("better", "worse", "verdict"),
    [
        ({0: 40.0, 1: 50.0, 2: 60.0}, {0: 52.0, 1: 60.0, 2: 68.0}, "does not hold"),
        ({0: 52.0, 1: 40.0, 2: 60.0}, {0: 40.0, 1: 52.0, 2: 60.0}, "no significant difference"),
        ({0: 52.0}, {0: 40.0}, "not tested"),
        ({0: 52.0}, {1: 40.0}, "not tested"),
        (
            {0: 52.0, 1: 62.0, 2: 42.0},
            {0: 40.0, 1: 50.0, 2: 30.0},
            "not tested",
        ),  # 6 points with each seed
    ],
)
def test_verdicts(tmp_path, better, worse, verdict):
    write_one(tmp_path / "a", "pilora", better, reweight="distance")
    write_one(tmp_path / "b", "pilora", worse, reweight="equal")
    ((ours, _),) = get_claim("pilora-reweight").verdicts(read_experiments([tmp_path]))
    assert ours == verdict


def test_runs_with_extra_differences_are_ignored(tmp_path):
    write_one(tmp_path / "a", "pilora", {0: 52.0, 1: 60.0}, reweight="distance", rank=8)
    write_one(tmp_path / "b", "pilora", {0: 40.0, 1: 50.0}, reweight="equal")
    assert get_claim("pilora-reweight").verdicts(read_experiments([tmp_path])) == []


def test_zero_rate_claim_accepts_any_nonzero_rate(tmp_path):
    write_one(
        tmp_path / "a", "pilora", {0: 52.0, 1: 60.0, 2: 68.0}, lr_prototype=0.03, lr_lora=0.002
    )
    write_one(tmp_path / "b", "pilora", {0: 40.0, 1: 50.0, 2: 60.0}, lr_prototype=0.03, lr_lora=0.0)
    rates = {
        "lr_prototype": 0.3,
        "lr_lora": 0.0,
    }  # differs from the first in two rates, so it is no pair
    write_one(tmp_path / "c", "pilora", {0: 10.0, 1: 20.0, 2: 30.0}, **rates)
    ((verdict, text),) = get_claim("pilora-lora").verdicts(read_experiments([tmp_path]))
    assert verdict == "holds" and text.startswith("+5.0 [+2.5, +7.5] over 3 seeds")
    better, worse = get_claim("pilora-lora").sides
    assert "lr_lora" not in better.options and worse.options["lr_lora"] == 0


def test_claim_ignores_method_with_zero_rate(tmp_path):
    write_one(tmp_path / "a", "pilora", {0: 52.0, 1: 60.0}, lr_lora=0.0)
    write_one(tmp_path / "b", "ewc", {0: 40.0, 1: 50.0}, lr_backbone=0.0)
    write_one(tmp_path / "c", "fedavg", {0: 40.0, 1: 50.0})
    write_one(tmp_path / "d", "icarl", {0: 40.0, 1: 50.0})
    experiments = read_experiments([tmp_path])
    assert not any(
        get_claim(n).verdicts(experiments) for n in ("pilora-icarl", "ewc-plain-forgetting")
    )
    write_one(tmp_path / "e", "pilora", {0: 52.0, 1: 60.0}, lr_lora=1e-5)
    write_one(tmp_path / "f", "ewc", {0: 40.0, 1: 50.0}, lr_backbone=1e-5)
    experiments = read_experiments([tmp_path])
    assert len(get_claim("pilora-icarl").verdicts(experiments)) == 1
    assert len(get_claim("ewc-plain-forgetting").verdicts(experiments)) == 1


def test_claim_ignores_head_only_training(tmp_path):
    write_one(tmp_path / "a", "pilora", {0: 40.0, 1: 50.0})
    write_one(tmp_path / "b", "joint", {0: 52.0, 1: 60.0}, tune="head")
    assert get_claim("pilora-joint").verdicts(read_experiments([tmp_path])) == []
    write_one(tmp_path / "c", "joint", {0: 52.0, 1: 60.0}, tune="full")
    write_one(tmp_path / "d", "joint", {0: 62.0, 1: 70.0}, tune="lora")  # as printed for PILoRA
    assert len(get_claim("pilora-joint").verdicts(read_experiments([tmp_path]))) == 2


def test_claim_prefers_method_over_variant(tmp_path):
    write_one(tmp_path / "a", "dualprompt", {0: 52.0, 1: 60.0})
    write_one(tmp_path / "b", "l2p", {0: 40.0, 1: 50.0})
    write_one(tmp_path / "c", "l2p", {0: 62.0, 1: 80.0}, pooled="cls")
    ((verdict, text),) = get_claim("dualprompt-l2p").verdicts(read_experiments([tmp_path]))
    assert verdict == "no significant difference" and text.startswith("+5.5 [")


def test_dataset_options_are_not_ablation(tmp_path):
    """Accept FCILPT with its options for Tiny-ImageNet, which differ from its defaults."""
    method = create_method("fcilpt", "tinyimagenet")
    assert method.common_length != create_method("fcilpt").common_length
    for name, instance in (("fcilpt", method), ("bic", create_method("bic"))):
        plain = {field: getattr(instance, field) for field in type(instance).__dataclass_fields__}
        write_run(tmp_path / name, {name: {0: 52.0}}, plain, dataset="tinyimagenet")
    assert len(get_claim("fcilpt-bic").verdicts(read_experiments([tmp_path]))) == 1


def test_printed_claim_ignores_ablation(tmp_path):
    write_one(tmp_path / "a", "hgp", {0: 52.0, 1: 60.0}, rebalance="none")
    write_one(tmp_path / "b", "l2p", {0: 40.0, 1: 50.0})
    assert get_claim("hgp-l2p").verdicts(read_experiments([tmp_path])) == []


def test_claim_ignores_ablation_of_competitor(tmp_path):
    write_one(tmp_path / "a", "hgp", {0: 52.0, 1: 60.0})
    write_one(tmp_path / "b", "pilora", {0: 40.0, 1: 50.0}, reweight="equal")
    assert get_claim("hgp-pilora").verdicts(read_experiments([tmp_path])) == []


def test_claim_ignores_glfc_with_oracle_detector(tmp_path):
    write_one(tmp_path / "a", "fppl", {0: 52.0, 1: 60.0})
    write_one(tmp_path / "b", "glfc", {0: 40.0, 1: 50.0}, detector="oracle")
    assert get_claim("fppl-glfc").verdicts(read_experiments([tmp_path])) == []
    write_one(tmp_path / "c", "glfc", {0: 40.0, 1: 50.0})
    assert len(get_claim("fppl-glfc").verdicts(read_experiments([tmp_path]))) == 1


def test_printed_and_released_rows_are_not_compared(tmp_path):
    write_one(tmp_path / "a", "pilora", {0: 52.0, 1: 60.0}, reweight="squared")
    write_one(tmp_path / "b", "pilora", {0: 40.0, 1: 50.0}, reweight="distance", ortho=0.0)
    assert get_claim("pilora-orthogonal").verdicts(read_experiments([tmp_path])) == []
    write_one(tmp_path / "c", "pilora", {0: 40.0, 1: 50.0}, reweight="squared", ortho=0.0)
    assert len(get_claim("pilora-orthogonal").verdicts(read_experiments([tmp_path]))) == 1


def test_lower_forgetting_is_better(tmp_path):
    # forgetting is 90 - last
    write_one(tmp_path / "a", "fppl", {0: 80.0, 1: 81.0})
    write_one(tmp_path / "b", "ewc", {0: 60.0, 1: 60.0})
    ((verdict, text),) = get_claim("fppl-ewc-forgetting").verdicts(read_experiments([tmp_path]))
    assert verdict == "holds" and text.startswith("+20.5 ")


def test_strong_skew_claim_ignores_mild_partition(tmp_path):
    write_one(tmp_path / "a", "hgp", {0: 52.0, 1: 60.0})
    write_one(tmp_path / "b", "l2p", {0: 40.0, 1: 50.0})
    experiments = read_experiments([tmp_path])
    assert len(get_claim("hgp-l2p").verdicts(experiments)) == 1
    assert get_claim("hgp-l2p-skew").verdicts(experiments) == []


def test_tuned_sides_may_have_different_rates(tmp_path):
    write_one(
        tmp_path / "a", "pilora", {0: 52.0, 1: 60.0, 2: 68.0}, reweight="distance", lr_prototype=0.1
    )
    write_one(
        tmp_path / "b", "pilora", {0: 40.0, 1: 50.0, 2: 60.0}, reweight="equal", lr_prototype=0.3
    )
    tune(tmp_path / "a", 8, ["pilora"])
    assert get_claim("pilora-reweight").verdicts(read_experiments([tmp_path])) == []
    tune(tmp_path / "b", 8, ["pilora"])
    ((verdict, text),) = get_claim("pilora-reweight").verdicts(read_experiments([tmp_path]))
    assert verdict == "holds" and text.startswith("+5.0 [+2.5, +7.5] over 3 seeds")


@pytest.mark.parametrize(
    ("sizes", "verdict"),
    [
        ([1, 1], "holds"),
        ([3, 3], "does not hold"),
        ([1, 3], "no significant difference"),
        ([2, 2], "no significant difference"),
    ],
)
def test_byte_claim_compares_uploaded_bytes(tmp_path, sizes, verdict):
    # two uploads per run; CODA-P sends 4 MB, so 2 MB per upload
    write_one(tmp_path / "a", "fppl", {0: 52.0, 1: 52.0})
    write_one(tmp_path / "b", "codap", {0: 52.0, 1: 52.0})
    for seed, size in enumerate(sizes):
        path = tmp_path / "a" / "fppl" / f"seed{seed}" / "result.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "bytes_up": 2_000_000 * size}))
    ((ours, text),) = get_claim("fppl-codap-bytes").verdicts(read_experiments([tmp_path]))
    assert ours == verdict
    assert text.startswith(f"{sum(sizes) / 2:.3f} and 2.000 MB up, mean over 2 seeds; digits")
