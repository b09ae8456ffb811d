"""Does each baseline do what it is for? Pairs of runs on the digits that differ in that one thing.

A claim holds when the mean difference over the seeds is at least the margin and every seed has its sign.
Claims that do not hold are printed as such.

    python benchmarks/behaviour.py --seeds 0,1,2 --out behaviour-digits.json
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fczoo.baselines.codap import CODAPrompt
from fczoo.baselines.dualprompt import DualPrompt
from fczoo.baselines.l2p import L2P
from tabulate import tabulate
from torch import Tensor

from fczoo import Method, Settings, create_method
from fczoo.core.tree import Tree
from fczoo.core.types import Batch
from fczoo.federation.benchmark import Bench
from fczoo.functional.prompts import highest

MARGIN = 2.0  # points
FEW = {"train_per_class": 40, "rounds": 2, "batch_size": 8}  # for methods that train the whole network


def at_random(query: Tensor, number: int) -> Tensor:
    """Scores [B, number] that depend on the image but say nothing about it."""
    steps = torch.arange(1, number + 1, dtype=query.dtype, device=query.device)
    return (query.sum(-1, keepdim=True) * 1e4 * steps).sin()


class RandomL2P(L2P):
    """Prompts chosen without regard to the image."""

    def choose(self, tree: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
        return super().choose(tree, batch)[0], highest(at_random(batch.query, self.size), self.chosen)


class RandomDualPrompt(DualPrompt):
    """Experts chosen without regard to the image."""

    def match(self, state: Tree, query: Tensor) -> Tensor:
        return highest(at_random(query, len(self._slots(state, "key"))), 1)[:, 0]


class RandomCODAPrompt(CODAPrompt):
    """Components weighted without regard to the image."""

    def weights(self, tree: Tree, block: int, query: Tensor) -> Tensor:
        return at_random(query, len(self._rows(tree, block, "key")))


@dataclass(frozen=True)
class Claim:
    """``ours`` has the better figure than ``theirs``: higher, or lower for forgetting."""

    text: str
    metric: str
    ours: Method
    theirs: Method
    settings: dict[str, Any]


def control(cls: type[Method], name: str) -> Method:
    """The random control with the values that the method has on the digits."""
    return cls(**vars(create_method(name, "digits")))


def claims() -> list[Claim]:
    def make(name: str, **options: Any) -> Method:
        return create_method(name, "digits", **options)

    slow = {"lr": 1e-3}
    return [
        Claim(
            "EWC (lambda 1e4) forgets less than FedAvg",
            "forgetting",
            make("ewc", strength=1e4),
            make("fedavg"),
            FEW,
        ),
        Claim("LwF forgets less than FedAvg", "forgetting", make("lwf"), make("fedavg"), FEW),
        Claim(
            "EWC (lambda 1e4) forgets less, head rate 1e-3",
            "forgetting",
            make("ewc", strength=1e4, **slow),
            make("fedavg", **slow),
            FEW,
        ),
        Claim(
            "LwF forgets less, head rate 1e-3", "forgetting", make("lwf", **slow), make("fedavg", **slow), FEW
        ),
        Claim(
            "CCVR beats no calibration, Dirichlet 0.05",
            "A_N",
            make("ccvr"),
            make("fedavg"),
            {**FEW, "partition": "dirichlet:0.05"},
        ),
        Claim(
            "CCVR over all classes seen beats no calibration, Dirichlet 0.05",
            "A_N",
            make("ccvr", calibrated="all"),
            make("fedavg"),
            {**FEW, "partition": "dirichlet:0.05"},
        ),
        Claim("GLFC's memory reduces forgetting", "forgetting", make("glfc"), make("glfc", memory=0), FEW),
        Claim("L2P beats random prompts", "A_N", make("l2p"), control(RandomL2P, "l2p"), {}),
        Claim(
            "DualPrompt beats random experts",
            "A_N",
            make("dualprompt"),
            control(RandomDualPrompt, "dualprompt"),
            {},
        ),
        Claim("CODA-P beats random weights", "A_N", make("codap"), control(RandomCODAPrompt, "codap"), {}),
        Claim("Joint training beats FedAvg", "A_N", make("joint", setting="federated"), make("fedavg"), FEW),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    seeds = [int(s) for s in arguments.seeds.split(",")]
    known: dict[tuple, list[dict[str, float]]] = {}

    def figures(method: Method, settings: dict[str, Any]) -> list[dict[str, float]]:
        key = (type(method), method, tuple(sorted(settings.items())))
        if key not in known:
            bench = Bench.open(Settings.for_dataset("digits", **settings))
            known[key] = [bench.run(method, seed).metrics for seed in seeds]
        return known[key]

    rows = []
    for claim in claims():
        started = time.perf_counter()
        ours, theirs = (
            [m[claim.metric] for m in figures(method, claim.settings)]
            for method in (claim.ours, claim.theirs)
        )
        sign = -1 if claim.metric == "forgetting" else 1
        gains = [sign * (a - b) for a, b in zip(ours, theirs, strict=True)]
        holds = statistics.fmean(gains) >= MARGIN and min(gains) > 0
        rows.append(
            {
                "claim": claim.text,
                "metric": claim.metric,
                "ours": ours,
                "theirs": theirs,
                "gain": statistics.fmean(gains),
                "holds": holds,
            }
        )
        print(
            f"{claim.text}: {'holds' if holds else 'DOES NOT HOLD'}, {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        if arguments.out:
            arguments.out.write_text(
                json.dumps(
                    {"seeds": seeds, "margin": MARGIN, "torch": torch.__version__, "claims": rows}, indent=1
                )
                + "\n"
            )
    shown = [replace_lists(r) for r in rows]
    print(tabulate(shown, headers="keys", tablefmt="github", floatfmt=".1f"))


def replace_lists(row: dict[str, Any]) -> dict[str, Any]:
    """Lists of figures as words."""
    return {k: ", ".join(f"{x:.1f}" for x in v) if isinstance(v, list) else v for k, v in row.items()}


if __name__ == "__main__":
    main()
