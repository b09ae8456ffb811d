"""Saved models that the export tests share."""

from functools import lru_cache

import pytest

import fczoo
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.settings import Settings
from fczoo.models.classifier import Classifier
from helpers_export import Models

SMALL = {"train_per_class": 4, "test_per_class": 2, "rounds": 1, "epochs": 1, "tasks": 2}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return a function that trains a method on digits and loads its saved model."""
    bench = Benchmark.open(Settings.for_dataset("digits", **SMALL, clients=2))

    @lru_cache
    def train(method: str) -> Classifier:
        run = bench.start(method)
        run.run()
        return fczoo.load_model(fczoo.save_model(tmp_path_factory.mktemp(method), run))

    return train
