"""Claims over two settings: the printed numbers, and verdicts on rows written by hand."""

import shlex
from dataclasses import asdict

import pytest

from fczoo import create_method
from fczoo.cli.bench import bench
from fczoo.papers.claims import PrintedClaim, claims, get_claim
from fczoo.papers.claims_between_settings import TwoSettingClaim
from fczoo.papers.printed_numbers import get_paper, papers
from fczoo.reports.runs import read_experiments
from helpers_papers import output_of
from helpers_runs import write_run

TWO_SETTING_CLAIMS = [claim for claim in claims().values() if isinstance(claim, TwoSettingClaim)]


@pytest.mark.parametrize("claim", TWO_SETTING_CLAIMS, ids=lambda claim: claim.name)
def test_claim_across_has_positive_printed_gain(claim):
    assert claim.gain > 0
    assert len(claim.drops) == len(claim.sides)
    assert (claim.worse is None) != (claim.most is None)
    assert claim.is_runnable
    for command in claim.full_scale_commands[1:]:
        bench.make_context("bench", shlex.split(command)[2:])


@pytest.mark.parametrize(
    ("name", "key", "start", "end", "metric", "place"),
    [
        ("pilora-robust-classes", "T1", "alpha=6", "alpha=2", "A_N", ("PILoRA", "L2P+FL")),
        ("pilora-robust-classes-lga", "T2", "alpha=12", "alpha=4", "A_N", ("PILoRA", "LGA")),
        ("pilora-robust-skew", "T1", "beta=0.5", "beta=0.05", "A_N", ("PILoRA", "EWC+FL")),
        ("hgp-robust-skew", "T1", "beta=0.5", "beta=0.05", "FAA", ("HGP", "L2P")),
        ("hgp-robust-skew-pip", "T1", "beta=0.5", "beta=0.05", "FAA", ("HGP", "PIP")),
        ("fppl-robust-fedcprompt", "T5", "IID", "non-IID", "Abar", ("FPPL", "Fed-CPrompt")),
        ("hgp-participation", "AppE", "100%", "20%", "FAA", ("HGP",)),
        ("hgp-participation-tenth", "AppE", "100%", "10%", "FAA", ("HGP",)),
    ],
)
def test_drops_equal_printed_table(name, key, start, end, metric, place):
    claim = get_claim(name)
    values = {
        (n.partition.split("participation ")[-1].split(" beta")[0], n.method): n.value
        for n in get_paper(claim.paper).numbers
        if (n.table, n.metric) == (key, metric)
        and get_paper(claim.paper).row(n).dataset == claim.dataset
    }
    assert claim.drops == [round(values[start, m] - values[end, m], 2) for m in place]


def write_side(folder, by_seed, settings, **options):
    """Write the runs of FPPL at one setting."""
    values = {"partition": "dirichlet:0.5", "vary": ["training", "partition"], **settings}
    write_run(folder, {"fppl": by_seed}, asdict(create_method("fppl", **options)), **values)


def test_verdict_over_two_partitions(tmp_path):
    """Compare losses of 2, 3 and 4 points with a pool to 12, 14 and 13 without; the gain is 10."""
    high = {0: 80.0, 1: 82.0, 2: 84.0}
    claim = get_claim("fppl-pool-skew")
    page = "claims", claim.name, "--results", str(tmp_path)
    assert output_of(*page).endswith("not run here\n")
    runs = {
        "a": ("dirichlet:1", True, high),
        "b": ("dirichlet:0.01", True, {0: 78.0, 1: 79.0, 2: 80.0}),
        "c": ("dirichlet:1", False, high),
        "d": ("dirichlet:0.01", False, {0: 68.0, 1: 68.0, 2: 71.0}),
    }
    for name, (split, pool, by_seed) in runs.items():
        assert output_of(*page).endswith("not run here\n")
        write_side(tmp_path / name, by_seed, {"partition": split}, pool=pool)
    # FAA is the mean of two tasks, of which only the first differs
    assert "holds: +5.0 [" in output_of(*page)


def test_verdict_without_competitor(tmp_path):
    """Subtract half of the lost 8, 9 and 10 points from the allowed 3 points."""
    for name, clients, by_seed in (
        ("a", 10, {0: 80.0, 1: 80.0, 2: 80.0}),
        ("b", 40, {0: 72.0, 1: 71.0, 2: 70.0}),
    ):
        write_side(tmp_path / name, by_seed, {"clients": clients})
    (verdict,) = get_claim("fppl-clients").verdicts(read_experiments([tmp_path]))
    assert verdict[0] == "does not hold"
    assert verdict[1].startswith("-1.5 [-2.7, -0.3] over 3 seeds")


def test_every_table_has_claim():
    tables = {(p.key, n.table) for p in papers().values() for n in p.numbers}
    of_claims = {
        (claim.paper, word)
        for claim in claims().values()
        if isinstance(claim, PrintedClaim | TwoSettingClaim)
        for word in (claim.table if isinstance(claim, PrintedClaim) else claim.source).split()
    }
    assert tables <= of_claims
