"""Differential privacy of replay methods: protected if clients send only parameters."""

from typing import Any

import pytest
import torch

from fczoo import FczooError
from fczoo.security.privacy import epsilon

CLIP = 0.01
PROTECTED: dict[str, dict[str, Any]] = {"lander": {}, "mfcl": {}, "affcl": {"standardise": False}}


@pytest.mark.parametrize("name", PROTECTED)
def test_whole_upload_is_clipped(make_bench, small_method, watch, name) -> None:
    """Clip uploads, which hold only trained tensors and no statistics, in every task."""
    method = small_method(name, **PROTECTED[name])
    record = watch(make_bench(dp_clip=CLIP, rounds=1, epochs=1), method)
    assert [call for call in record.calls if call.payloads] == record.rounds
    for call in record.rounds:
        for upload in call.payloads:
            change = torch.cat([(v - call.state[k]).flatten() for k, v in upload.items()])
            assert 0 < float(change.norm()) <= CLIP * (1 + 1e-6)


@pytest.mark.parametrize("name", PROTECTED)
def test_noisy_run_reports_epsilon(make_bench, small_method, name) -> None:
    settings = {"dp_clip": CLIP, "dp_noise": 30.0, "rounds": 1, "epochs": 1}
    result = make_bench(**settings).run(small_method(name, **PROTECTED[name]))
    assert result.privacy == {"epsilon": epsilon(30.0, 3, 1e-5), "delta": 1e-5}
    assert not result.rejected


@pytest.mark.parametrize(
    ("name", "options", "sends"),
    [
        ("affcl", {}, "class means, class variances, counts, surveys"),
        ("fedcbdr", {}, "counts, second moments, surveys"),
        ("fedcbdr", {"sampling": "uniform"}, "counts"),
        ("lander", {"prior": "survey"}, "second moments, surveys"),
        ("lander", {"keep": "lowest_loss"}, "losses"),
        ("lander", {"anchors": "frozen_means"}, "class means, counts, surveys"),
        ("mfcl", {"prior": "survey"}, "second moments, surveys"),
        ("powder", {}, "class means, counts, surveys"),
        ("uopp", {}, "class means, class variances, counts, surveys"),
    ],
)
def test_other_uploads_are_rejected_with_one_line(
    make_bench, small_method, name, options, sends
) -> None:
    with pytest.raises(FczooError) as refusal:
        make_bench(dp_clip=1.0).check(small_method(name, **options))
    message = str(refusal.value)
    assert f"{name} also uploads {sends}; choose another method" in message
    assert "\n" not in message
