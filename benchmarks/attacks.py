"""Accuracy under attack, with and without robust aggregation.

python benchmarks/attacks.py --seeds 0,1,2
"""

import argparse
import statistics

from tabulate import tabulate

from fczoo import Bench, FczooError, Settings, create_method

ATTACKS = ("none", "sign-flip:5", "scale:20", "gaussian:20", "label-flip")
DEFENCES = ("fedavg", "median", "trimmed_mean:2", "krum:2", "multi_krum:2", "norm_clip")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--partition", default="dirichlet:0.5")
    parser.add_argument("--attackers", type=float, default=0.2)
    options = parser.parse_args()
    seeds, rows = [int(s) for s in options.seeds.split(",")], []
    method = create_method("fedavg", "digits", tune="head")
    for attack in ATTACKS:
        row = [attack]
        for defence in DEFENCES:
            hostile = {} if attack == "none" else {"attack": attack, "attackers": options.attackers}
            settings = Settings.for_dataset("digits", tasks=2, clients=10, partition=options.partition, aggregator=defence, device="cpu", **hostile)
            bench = Bench.open(settings)
            try:
                row.append(f"{statistics.fmean(bench.run(method, seed).metrics['Avg'] for seed in seeds):.1f}")
            except FczooError as error:
                row.append(f"stopped: {error}")
        rows.append(row)
    print(tabulate(rows, ["attack", *DEFENCES], disable_numparse=True))


if __name__ == "__main__":
    main()
