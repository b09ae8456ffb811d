"""Does sorting FCILPT's pools by use bring like prompts together? How alike the clients' prompts are,
place by place.

    python benchmarks/alignment.py
    python benchmarks/alignment.py --dataset cifar100 --data-root DIR \
        --backbone FILE.safetensors --image-size 112 --precision bf16

For every round, over the clients' uploads: how many orders of use there are, how far the prompts in one place
agree (mean cosine over pairs of clients) before and after sorting, and the share of images that choose each
prompt, most chosen first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from fczoo.methods.fcilpt import FCILPT
from tabulate import tabulate
from torch import Tensor

from fczoo import Bench, Settings, Tree, create_method
from fczoo.core.types import ServerAggregator

ROWS: list[list[Any]] = []


def agreement(pools: Sequence[Tensor]) -> float:
    """Mean cosine between prompts [M, L, D] in the same place of two clients' pools."""
    prompts = F.normalize(torch.stack([p.flatten(1) for p in pools]), dim=-1)  # [clients, M, L D]
    cosines = torch.einsum("amd,bmd->abm", prompts, prompts).mean(-1)
    return float((cosines.sum() - cosines.trace()) / (len(pools) * (len(pools) - 1)))


@dataclass(frozen=True)
class Watched(FCILPT):
    """FCILPT that notes every round's uploads."""

    def aggregate(self, payloads: Sequence[Tree], average: ServerAggregator) -> Tree:
        orders = [p["usage"].argsort(descending=True, stable=True) for p in payloads]
        pools = [p["pool.prompt"] for p in payloads]
        share = (
            torch.stack([p["usage"] / p["usage"].sum() * self.chosen for p in payloads])
            .mean(0)
            .sort(descending=True)
            .values
        )
        by_rank = agreement([pool[order] for pool, order in zip(pools, orders, strict=True)])
        row = [self.sort, len(ROWS) + 1, len({tuple(o.tolist()) for o in orders}), agreement(pools), by_rank]
        ROWS.append([*row, " ".join(f"{s:.2f}" for s in share.tolist())])
        return super().aggregate(payloads, average)


@click.command(context_settings={"show_default": True})
@click.option("--dataset", default="digits")
@click.option("--data-root", type=click.Path(path_type=Path))
@click.option("--backbone")
@click.option("--image-size", type=int)
@click.option("--precision", default="fp32")
@click.option("--clients", default=10)
@click.option("--images", default=10, help="Of each class.")
@click.option("--rounds", default=4)
@click.option("--epochs", default=3)
@click.option("--tasks", default=2, help="The first tasks to look at.")
@click.option("--lr", default=0.03)
@click.option("--init", default="symmetric")
@click.option("--pooled", default="prompt")
def main(
    dataset: str,
    data_root: Path | None,
    images: int,
    tasks: int,
    lr: float,
    init: str,
    pooled: str,
    **options: Any,
) -> None:
    """How alike clients' prompts are, by slot and by rank, with sorting and without."""
    given = {
        **options,
        "data_root": str(data_root) if data_root else None,
        "train_per_class": images,
        "test_per_class": 2,
        "augment": "none",
    }
    bench = Bench.open(Settings.for_dataset(dataset, **given))
    bench = replace(bench, stream=replace(bench.stream, tasks=bench.stream.tasks[:tasks]))
    options = create_method("fcilpt", dataset, lr=lr, init=init, pooled=pooled).__dict__
    for sort in (True, False):
        ROWS.clear()
        bench.run(Watched(**{**options, "sort": sort}))
        click.echo(
            tabulate(
                ROWS,
                ["sorted", "round", "orders", "alike by slot", "by rank", "share of images"],
                floatfmt=".3f",
            )
        )


if __name__ == "__main__":
    main()
