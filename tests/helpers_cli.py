"""Words of the command line that several tests share."""

import shlex

TINY = shlex.split("--train-per-class 8 --test-per-class 4 --rounds 1 --epochs 1 --tasks 3 --clients 3")
"""A run on digits in a second or two."""
