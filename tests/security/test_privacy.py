"""Disclosures of uploads, and differential privacy."""

import builtins
import math

import pytest
import torch

from fczoo import FczooError, create_method
from fczoo.cli.show import part_page
from fczoo.core.payload import Payload, content_of, per_class, rows
from fczoo.core.training import Optim, Training
from fczoo.core.types import Exchange, Task
from fczoo.federation.settings import Settings
from fczoo.reports.captions import notes
from fczoo.reports.runs import read_experiments
from fczoo.security.privacy import (
    DISCLOSURES,
    Draw,
    Privacy,
    epsilon,
    sampled_epsilon,
)

TASK = Task(0, 0, 2, 4, 2)
TRAINING = Training(
    {"w": Optim(), "v": Optim(), "head": Optim()},
    uploads={"gauss.": rows("count", "mean"), "class.": per_class("count", "sum")},
)
ROUND = Exchange(TASK, 0)
START = {"w": torch.ones(3), "v": torch.zeros(2, 2)}


def upload(client: int = 0):
    return Payload({"w": torch.tensor([4.0, 1.0, 1.0]), "v": torch.full((2, 2), 2.0)}, client, 3)


def gaussian_delta(multiplier: float, eps: float) -> float:
    """Return delta(epsilon) of the Gaussian mechanism, with sensitivity 1.

    Source: Balle and Wang, ICML 2018, theorem 8.
    """

    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    return phi(0.5 / multiplier - eps * multiplier) - math.exp(eps) * phi(
        -0.5 / multiplier - eps * multiplier
    )


@pytest.mark.parametrize(
    ("noise", "uploads", "delta"),
    [(2.0, 1, 1e-5), (8.0, 1, 1e-5), (20.0, 15, 1e-5), (40.0, 100, 1e-6)],
)
def test_epsilon_matches_closed_form(noise, uploads, delta):
    """Compare with the closed form: T uploads of multiplier m are one of m / sqrt(T)."""
    ours = epsilon(noise, uploads, delta)
    multiplier = noise / 2 / math.sqrt(uploads)
    assert gaussian_delta(multiplier, ours) == pytest.approx(delta, rel=0.02)


def test_epsilon_of_known_mechanism():
    """Compare with epsilon 4.377 of multiplier 1 at delta 1e-5.

    The value is found in the closed form by bisection.
    """
    low, high = 0.0, 50.0
    for _ in range(200):
        low, high = (
            (mid, high) if gaussian_delta(1.0, mid := (low + high) / 2) > 1e-5 else (low, mid)
        )
    assert epsilon(2.0, 1, 1e-5) == pytest.approx(low, rel=1e-3)
    assert epsilon(0.0, 1, 1e-5) == math.inf
    assert epsilon(4.0, 10, 1e-5) < epsilon(4.0, 20, 1e-5) < epsilon(2.0, 20, 1e-5)


def test_updates_are_clipped_as_vector_and_noise_has_given_size():
    """Clip updates as one vector, and add noise of the given size.

    The change is (3, 0, 0) and four times 2: norm 5.
    """
    short_change = Privacy(0, clip=1.0).protect([upload()], START, TRAINING, ROUND)[0]
    assert torch.allclose(short_change["w"], torch.tensor([1.6, 1.0, 1.0]))
    assert torch.allclose(short_change["v"], torch.full((2, 2), 0.4))
    short = Privacy(0, clip=50.0).protect([upload()], START, TRAINING, ROUND)[0]
    assert all(torch.allclose(short[k], v) for k, v in upload().items())
    large = {"w": torch.zeros(40000)}
    one, again, second_client = (
        Privacy(0, clip=2.0, noise=3.0).protect(
            [Payload(large, k)], large, TRAINING, Exchange(TASK, r)
        )[0]["w"]
        for k, r in ((0, 0), (0, 0), (1, 0))
    )
    assert float(one.std()) == pytest.approx(6, rel=0.02)
    assert torch.equal(one, again)
    assert not torch.equal(one, second_client)


def test_clients_send_clipped_updates(make_bench, small_method, watch):
    run = watch(make_bench(dp_clip=0.01, rounds=1), small_method("fedavg"))
    for call in run.rounds:
        for upload in call.payloads:
            change = torch.cat([(v - call.state[k]).flatten() for k, v in upload.items()])
            assert 0 < change.norm() <= 0.01 * (1 + 1e-9)


def test_nonfinite_update_is_not_sent():
    """Do not send an update that is not finite.

    It has no norm, so its finite coordinates could not be clipped.
    """
    nan_update = Payload(
        {"w": torch.tensor([math.nan, 500.0, 1.0]), "v": torch.full((2, 2), 2.0)}, 4, 3
    )
    inf_update = Payload(
        {"w": torch.tensor([math.inf, 1.0, 1.0]), "v": torch.full((2, 2), 2.0)}, 5, 3
    )
    out = Privacy(0, clip=1.0).protect([nan_update, inf_update, upload()], START, TRAINING, ROUND)
    assert [len(p) for p in out] == [0, 0, 2] and out[0].client == 4


def test_noise_hides_diverged_training():
    """Send noise around the start if training diverges, as for an update of zero.

    Else a server could choose states with which training diverges only for some images. The secure
    noise is z C = 2.
    """
    start = {"w": torch.full((20000,), 7.0)}
    privacy = Privacy(0, clip=1.0, noise=2.0, secure=True)
    for tensors in ({}, {"w": torch.full((20000,), math.nan)}):
        (out,) = privacy.protect([Payload(tensors, 4, 3)], start, TRAINING, ROUND)
        assert (out.client, out.num_samples, list(out)) == (4, 3, ["w"])
        assert float(out["w"].mean()) == pytest.approx(7, abs=0.1)
        assert float(out["w"].std()) == pytest.approx(2, rel=0.05)
    (empty,) = privacy.protect([Payload({}, 4, 0)], start, TRAINING, ROUND)
    assert not empty  # a client without images, whose number is public


def test_rounding_does_not_enlarge_update():
    """Add the noise before rounding.

    Around 2^25 float32 has steps of 4: updates of 2.1 must not become 4 before the noise. Clipped
    to norm 300, 20,000 updates of 4 become 2.12. With noise of z C = 150 their mean is 2.12 with a
    deviation of 150 / sqrt(20,000) = 1.06 if rounding comes last, and else 4.
    """
    start = {"w": torch.full((20000,), 2.0**25)}
    uploads = [Payload({"w": start["w"] + 4}, c, 3) for c in range(40)]
    privacy = Privacy(0, clip=300.0, noise=0.5, secure=True)
    out = privacy.protect(uploads, start, TRAINING, ROUND)
    mean = torch.stack([p["w"].double() - 2.0**25 for p in out]).mean()
    assert float(mean) == pytest.approx(2.12, abs=0.7)  # four deviations of 40 uploads


def test_clipping_rejects_undeclared_tensor():
    raw = Payload({**upload().tensors, "raw.sums": torch.full((3,), 1e6)})
    with pytest.raises(FczooError, match=r"the method also uploads 'raw.sums'"):
        Privacy(0, clip=1e-6).protect([raw], START, TRAINING, ROUND)


def test_secure_noise_is_normal_and_ignores_seed():
    large = {"w": torch.zeros(40000)}
    one, two = (
        Privacy(0, clip=2.0, noise=3.0, secure=True).protect(
            [Payload(large)], large, TRAINING, ROUND
        )[0]["w"]
        for _ in range(2)
    )
    assert one.dtype == torch.float32 and not torch.equal(one, two)
    assert float(one.std()) == pytest.approx(6, rel=0.05)
    assert abs(float(one.mean())) < 0.3
    assert float((one.abs() < 6).double().mean()) == pytest.approx(
        0.6827, abs=0.02
    )  # within one deviation


def test_statistics_of_rare_classes_are_withheld():
    count = torch.tensor([1.0, 5.0, 2.0])
    rows = {"gauss.label": torch.arange(3), "gauss.count": count, "gauss.mean": torch.ones(3, 4)}
    table = {"class.count": count, "class.sum": torch.ones(3, 4)}
    out = Privacy(0, min_class_count=2).protect(
        [Payload({**rows, **table, "head": torch.ones(3)}), Payload({})], {}, TRAINING, ROUND
    )
    assert out[0]["gauss.label"].tolist() == [1, 2]
    assert out[0]["gauss.mean"].shape == (2, 4)
    assert torch.equal(out[0]["head"], torch.ones(3))
    assert out[0]["class.count"].tolist() == [0, 5, 2]
    assert out[0]["class.sum"].sum(1).tolist() == [0, 4, 4]
    assert not out[1]


@pytest.mark.parametrize("name", ["fedncm", "hgp", "pilora"])
def test_run_continues_without_rare_classes(make_bench, small_method, watch, name):
    record = watch(make_bench(min_class_count=4), small_method(name))
    assert len(record.result.accuracy) == 3


def test_noisy_run_reports_epsilon(make_bench, small_method):
    result = make_bench(dp_clip=1.0, dp_noise=30.0).run(small_method("fedavg", tune="head"))
    assert result.privacy == {"epsilon": epsilon(30.0, 6, 1e-5), "delta": 1e-5}
    assert make_bench().run(small_method("fedncm")).privacy == {}


def test_subsampling_credit_needs_secret_draws(make_bench, small_method):
    """Give credit for subsampling only if the draws are secret.

    There are three tasks of two rounds. One of 3, 2 and 3 clients is drawn per round or per task.
    """
    method = small_method("fedavg", tune="head")
    noisy = {"dp_clip": 1.0, "dp_noise": 30.0, "participation": 0.34, "epochs": 1}
    public, unseen, by_task, all_drawn = (
        make_bench(**{**noisy, **options}).run(method).privacy["epsilon"]
        for options in (
            {},
            {"dp_subsampling": True},
            {"dp_subsampling": True, "client_draw": "task"},
            {"dp_subsampling": True, "participation": 1.0},
        )
    )
    assert public == all_drawn == epsilon(30.0, 6, 1e-5)
    draws = [Draw(3, 1, 1, 2), Draw(2, 1, 1, 2), Draw(3, 1, 1, 2)]
    assert unseen == sampled_epsilon(30.0, draws, 1e-5) < public
    assert by_task == sampled_epsilon(30.0, [Draw(n, 1, 2, 1) for n in (3, 2, 3)], 1e-5) < public


def test_subsampling_credit_grows_with_fewer_clients():
    """Give more credit if fewer clients are drawn, and none if all take part.

    Renyi accounting gives no less than the exact epsilon.
    """
    epsilons = [sampled_epsilon(4.0, [Draw(100, m, 1, 50)], 1e-5) for m in (1, 10, 30)]
    full_participation = sampled_epsilon(4.0, [Draw(100, 100, 1, 50)], 1e-5)
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] < epsilon(4.0, 50, 1e-5) <= full_participation
    assert sampled_epsilon(4.0, [Draw(9, 9, 1, 0), Draw(100, 1, 1, 50)], 1e-5) == epsilons[0]


@pytest.mark.parametrize(
    ("settings", "name", "says"),
    [
        ({"dp_noise": 1.0}, "fedavg", "dp_noise needs dp_clip"),
        (
            {"dp_clip": 1.0, "dp_noise": 1e-300},
            "fedavg",
            "dp_noise 1e-300 is too small to protect clients",
        ),
        (
            {"dp_clip": 1.0, "dp_secure": True},
            "fedavg",
            "dp_secure selects the source of the noise",
        ),
        ({"dp_clip": 1.0, "dp_subsampling": True}, "fedavg", "dp_subsampling lowers epsilon"),
        ({"dp_clip": 1.0}, "hgp", "hgp also uploads class means, class variances, counts"),
        ({"dp_clip": 1.0}, "fedncm", "fedncm also uploads class means, counts, surveys"),
        ({"min_class_count": 2}, "fppl", "fppl uploads local. without counts"),
    ],
)
def test_invalid_privacy_settings_are_rejected(make_bench, small_method, settings, name, says):
    with pytest.raises(FczooError, match=says):
        make_bench(**settings).check(small_method(name))


def test_too_small_delta_is_rejected():
    with pytest.raises(FczooError, match=r"dp.delta is 1e-18.*1e-12"):
        Settings(dp_delta=1e-18)


def test_missing_dp_accounting_is_reported(monkeypatch):
    epsilon.cache_clear()
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("dp_accounting"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FczooError, match=r"pip install 'fczoo\[privacy\]'"):
        epsilon(1.0, 1, 1e-5)


def test_min_class_count_rejects_sums_over_all_classes():
    """Reject withholding rare classes from sums over all classes.

    DDE sends the mean feature of all of a client's images, FedRidge their second moments.
    """
    for name, content in (("dde", "class means"), ("fedridge", "second moments")):
        with pytest.raises(
            FczooError, match=f"--min-class-count cannot remove a class from the {content} over all"
        ):
            Privacy(0, min_class_count=2).check(create_method(name))
    Privacy(0, min_class_count=2).check(create_method("lucir"))


def test_show_lists_disclosures_of_uploads():
    page = part_page("hgp", "digits")
    assert "What a server could learn" in page
    assert DISCLOSURES["class variances"] in page
    assert "gauss.var" in page
    assert DISCLOSURES["gradients of single images"] not in page
    assert content_of("gauss.count", (), create_method("hgp").training().uploads) == "counts"


@pytest.mark.parametrize(
    ("name", "tensor", "content"),
    [
        ("fedncm", "class.sum", "class means"),
        ("fedridge", "gram", "second moments"),
        ("stsae", "part0.sum", "class means"),
        ("podnet", "class.squares", "class variances"),
        ("icarl", "kept.sum", "class means"),
    ],
)
def test_show_lists_disclosures_at_task_boundaries(name, tensor, content):
    _, _, page = part_page(name, "digits").partition("What a server could learn")
    (line,) = [line for line in page.splitlines() if line.startswith(f"{content} (")]
    assert tensor in line and DISCLOSURES[content] in line


def test_table_notes_scope_of_epsilon(make_run, tmp_path):
    for name, noise in (("noisy", 2.0), ("plain", 0.0)):
        make_run(tmp_path / name, {"one": {0: 70.0}}, dp_clip=1.0, dp_noise=noise)
    sentence = (
        "epsilon, at delta 1e-05, is for all data of one client; losses, numbers of images and "
        "diagnostics have no noise"
    )
    has_sentence = [
        any(sentence in note for note in notes(read_experiments([tmp_path / n])[0]))
        for n in ("noisy", "plain")
    ]
    assert has_sentence == [True, False]
    settings = {"dp_clip": 1.0, "dp_noise": 2.0, "dp_subsampling": True}
    (experiment,) = read_experiments([make_run(tmp_path / "drawn", {"one": {0: 70.0}}, **settings)])
    assert any("only if the sampled clients and the sender" in note for note in notes(experiment))
