"""Measure accuracy under attack, with and without a defence.

The defence covers what a method averages, and what it merges class by class.

python benchmarks/attacks.py --seeds 0,1,2
"""

import argparse
import statistics

from tabulate import tabulate

from fczoo import Benchmark, FczooError, Settings, create_method

ATTACKS = ("none", "sign-flip:5", "scale:20", "gaussian:20", "label-flip")
AGGREGATORS = {
    name: {"aggregator": name}
    for name in ("fedavg", "median", "trimmed_mean:2", "krum:2", "multi_krum:2", "norm_clip")
}
STATISTICS = {
    "none": {},
    "median": {"aggregator": "median"},
    "outliers 3": {"outliers": 3.0},
    "both": {"aggregator": "median", "outliers": 3.0},
}


def mean_accuracy(method, attack, defence, options, seeds):
    """Return Avg on two tasks of digits, mean over the seeds, or why the run stopped."""
    hostile = {} if attack == "none" else {"attack": attack, "attackers": options.attackers}
    settings = {
        "tasks": 2,
        "clients": 10,
        "partition": options.partition,
        "device": "cpu",
        **hostile,
        **defence,
    }
    bench = Benchmark.open(Settings.for_dataset("digits", **settings))
    try:
        return f"{statistics.fmean(bench.run(method, seed).metrics['Avg'] for seed in seeds):.1f}"
    except FczooError as error:
        return f"stopped: {error}"


def main():
    """Print a table of methods, attacks and defences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--partition", default="dirichlet:0.5")
    parser.add_argument("--attackers", type=float, default=0.2)
    parser.add_argument(
        "--averaged",
        default="fedavg",
        help="methods whose averaging is defended (fedavg: head only); empty: none",
    )
    parser.add_argument(
        "--merged",
        default="fedncm,hgp,fppl",
        help="methods whose class statistics are defended; empty: none",
    )
    options = parser.parse_args()
    seeds = [int(s) for s in options.seeds.split(",")]
    for names, defences in ((options.averaged, AGGREGATORS), (options.merged, STATISTICS)):
        rows = []
        for name in filter(None, names.split(",")):
            method = create_method(name, "digits", **({"tune": "head"} if name == "fedavg" else {}))
            for attack in ATTACKS:
                cells = [
                    mean_accuracy(method, attack, defence, options, seeds)
                    for defence in defences.values()
                ]
                rows.append([name, attack, *cells])
        print(tabulate(rows, ["method", "attack", *defences], disable_numparse=True), flush=True)


if __name__ == "__main__":
    main()
