"""Groups of settings, in the order in which ``fczoo bench --help`` lists them."""

from functools import partial

from fczoo.core.options import option

GROUPS = "data", "population", "training", "machine", "robustness"

data_option, population_option, training_option, machine_option, robustness_option = (
    partial(option, group=group) for group in GROUPS
)
"""``option`` for the fields of ``Settings`` in one group."""
