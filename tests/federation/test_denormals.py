"""Subnormal numbers, on which processors are slow, count as zero while one thread trains."""

from collections.abc import Iterator

import pytest
import torch

from fczoo.federation.device import flushed_denormals
from fczoo.testing.toy_benchmark import small_method, toy_bench

SMALLEST = torch.finfo(torch.float32).tiny  # the smallest normal number


def tenth() -> float:
    """Return a tenth of the smallest normal number, as torch computes it here."""
    return (torch.tensor(SMALLEST) / 10).item()


@pytest.fixture
def restore_threads() -> Iterator[None]:
    thread_count = torch.get_num_threads()
    yield
    torch.set_num_threads(thread_count)


@pytest.fixture
def flush_support(restore_threads) -> None:
    """Skip if the processor cannot flush denormals."""
    torch.set_num_threads(1)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    torch.set_flush_denormal(False)


def test_denormals_are_flushed_only_inside_context(flush_support):
    assert tenth() == pytest.approx(SMALLEST / 10)
    with flushed_denormals():
        assert tenth() == 0
    assert tenth() == pytest.approx(SMALLEST / 10)
    with pytest.raises(ValueError), flushed_denormals():
        raise ValueError
    assert tenth() == pytest.approx(SMALLEST / 10)


def test_global_flush_setting_is_kept(flush_support):
    torch.set_flush_denormal(True)
    try:
        with flushed_denormals():
            assert tenth() == 0
        assert tenth() == 0
    finally:
        torch.set_flush_denormal(False)


def test_several_threads_are_not_flushed(restore_threads):
    torch.set_num_threads(2)
    with flushed_denormals():
        assert tenth() > 0


def test_clients_flush_denormals_but_server_does_not(flush_support):
    values: dict[str, set[float]] = {"loss": set(), "server": set()}

    class RecordingMethod(type(small_method("fedproto"))):
        def loss(self, *args):
            values["loss"].add(tenth())
            return super().loss(*args)

        def server_update(self, *args):
            values["server"].add(tenth())
            return super().server_update(*args)

    toy_bench(torch.float32).run(RecordingMethod(), 0)
    assert values["loss"] == {0.0} and min(values["server"]) > 0
