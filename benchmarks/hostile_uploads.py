"""Change uploads of every method at random, and let the server receive them.

    python benchmarks/hostile_uploads.py --changes 200 --seed 1

Each method runs once in the toy world. The server must admit or reject each changed upload, merge
what it admits, and raise no error.
"""

import argparse
import sys

import torch

from fczoo.core.registry import METHODS
from fczoo.testing.hostile_uploads import check_hostile_uploads
from fczoo.testing.method_under_test import MethodUnderTest
from fczoo.testing.world import small_method


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=",".join(METHODS.names()))
    parser.add_argument("--changes", type=int, default=100, help="changed uploads per method")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    for name in options.methods.split(","):
        try:
            check_hostile_uploads(
                MethodUnderTest(small_method(name)), options.changes, options.seed
            )
            print(f"{name}: {options.changes} changed uploads", flush=True)
        except AssertionError as error:
            failed += 1
            print(error, file=sys.stderr, flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
