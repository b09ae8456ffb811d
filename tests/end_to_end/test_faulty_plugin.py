"""Test that invalid output of registered functions ends in one error line."""

from collections.abc import Iterator

import numpy as np
import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.core.registry import AGGREGATORS, PARTITIONERS
from helpers_cli import TINY


@pytest.fixture(autouse=True)
def remove_faulty_entries() -> Iterator[None]:
    yield
    for registry in (AGGREGATORS, PARTITIONERS):
        registry._entries.pop("faulty", None)


def split_equally(labels, clients, rng):
    """Split the images into equal parts, in order."""
    return np.array_split(np.arange(len(labels)), clients)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda labels, clients, rng: [np.arange(len(labels))], "returned 1 lists for 3 clients"),
        (
            lambda labels, clients, rng: [np.arange(len(labels))] * clients,
            "returned the same image twice",
        ),
        (
            lambda labels, clients, rng: [p + 1 for p in split_equally(labels, clients, rng)],
            "position 32 for 32 images",
        ),
        (
            lambda labels, clients, rng: [p / 2 for p in split_equally(labels, clients, rng)],
            "other than lists of positions",
        ),
        (split_equally, ""),
    ],
)
def test_partitioner_output_is_checked(made, says: str) -> None:
    PARTITIONERS.register("faulty")(made)
    split = ["partition", *TINY[:4], "--tasks", "3", "--clients", "3", "--partition"]
    outcome = CliRunner().invoke(main, [*split, "faulty"])
    assert outcome.exit_code == (1 if says else 0), outcome.output
    assert says in outcome.stderr, outcome.output
    assert outcome.stderr.count("\n") == bool(says)
    assert "has no options" in CliRunner().invoke(main, [*split, "faulty:2"]).stderr


@pytest.mark.parametrize(
    ("merge", "says"),
    [
        (lambda payloads: {}, "aggregator faulty returned no head."),
        (
            lambda payloads: {k: v * float("nan") for k, v in payloads[0].items()},
            "that is not finite; fix",
        ),
        (lambda payloads: dict(payloads[0]), ""),
    ],
)
def test_aggregator_output_is_checked(merge, says: str, tmp_path) -> None:
    AGGREGATORS.register("faulty")(merge)
    run = [
        "bench",
        "--methods",
        "fedavg",
        "--set",
        "fedavg.tune=head",
        "--aggregator",
        "faulty",
        *TINY,
    ]
    outcome = CliRunner().invoke(main, [*run, "--out", str(tmp_path / "run")])
    assert outcome.exit_code == (1 if says else 0), outcome.output
    assert says in outcome.stderr, outcome.output
