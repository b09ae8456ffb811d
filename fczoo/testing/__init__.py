"""Checks of data sets, methods, partitioners, ... for authors of plug-ins, and a toy benchmark.

Like scikit-learn's ``check_estimator``, each check raises AssertionError with one sentence on what
is wrong and what to do. The checks do not need pytest::

    from fczoo.testing import check_partitioner

    def test_mine() -> None:
        check_partitioner("mine:0.5")

fczoo's own tests run the same checks on everything that it registers. hypothesis chooses the random
cases, if it is installed.
"""

from fczoo.testing.data_parts import check_dataset, check_partitioner
from fczoo.testing.federation_parts import check_aggregator, check_attack, check_local_training
from fczoo.testing.methods import check_method
from fczoo.testing.model_parts import check_augmentation, check_backbone, check_metric
from fczoo.testing.toy_benchmark import (
    small_method,
    toy_backbone,
    toy_bench,
    toy_partition,
    toy_stream,
)

__all__ = [
    "check_aggregator",
    "check_attack",
    "check_augmentation",
    "check_backbone",
    "check_dataset",
    "check_local_training",
    "check_method",
    "check_metric",
    "check_partitioner",
    "small_method",
    "toy_backbone",
    "toy_bench",
    "toy_partition",
    "toy_stream",
]
