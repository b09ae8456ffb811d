"""Switch off one part of a method at a time: does the accuracy move the way the paper says?

python benchmarks/ablations.py --seeds 0,1,2 --out results/ablations-digits.json
"""

import json
import statistics
from pathlib import Path

import click
from tabulate import tabulate

import fczoo

# method -> (label, options); the first row is the whole method, the rest are the paper's ablations of it
ABLATIONS: dict[str, list[tuple[str, dict[str, object]]]] = {
    "pilora": [
        ("re-weighted prototypes", {"head_tune": False, "lr_prototype": 0.1}),
        ("plain average", {"head_tune": False, "lr_prototype": 0.1, "reweight": "average"}),
    ],
    "hgp": [
        ("rebalance all seen classes", {}),
        ("old classes only", {"rebalance": "old"}),
        ("current classes only", {"rebalance": "current"}),
        ("no rebalance", {"rebalance": "none"}),
    ],
    "fcilpt": [("pools sorted", {}), ("not sorted", {"sort": False})],
    "fppl": [
        ("whole", {}),
        ("no fusion (best task's prompt)", {"fusion": "hard"}),
        ("no contrast", {"unify": 0.0}),
        ("debias with last task's prototypes", {"pool": False}),
        ("no debias", {"debias": False}),
    ],
}


@click.command()
@click.option("--methods", default=",".join(ABLATIONS), show_default=True)
@click.option("--seeds", default="0", show_default=True)
@click.option("--dataset", default="digits", show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(methods: str, seeds: str, dataset: str, out: Path | None) -> None:
    """Print A_N and Avg of every ablation, mean over the seeds."""
    bench = fczoo.Bench.open(fczoo.Settings.for_dataset(dataset))
    rows = []
    for name in methods.split(","):
        for label, options in ABLATIONS[name]:
            results = [
                bench.run(fczoo.create_method(name, dataset, **options), int(seed))
                for seed in seeds.split(",")
            ]
            a_n, avg = ([r.metrics[m] for r in results] for m in ("A_N", "Avg"))
            rows.append({"method": name, "what": label, "options": options, "A_N": a_n, "Avg": avg})
            click.echo(
                f"{name} {label}: A_N {statistics.fmean(a_n):.1f}, Avg {statistics.fmean(avg):.1f}", err=True
            )
    body = [[r["method"], r["what"], statistics.fmean(r["A_N"]), statistics.fmean(r["Avg"])] for r in rows]
    click.echo(tabulate(body, ["method", "what", "A_N", "Avg"], floatfmt=".1f"))
    if out:
        out.write_text(json.dumps({"dataset": dataset, "seeds": seeds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
