"""Attacks: uploads and labels of hostile clients, and errors of invalid attacks."""

from dataclasses import replace

import pytest
import torch

from fczoo import FczooError
from fczoo.core.payload import Payload
from fczoo.core.registry import ATTACKS
from fczoo.core.types import Exchange, Task
from fczoo.data.views import ImageStore
from fczoo.testing import check_attack

TASK = Task(0, 0, 2, 4, 2)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("sign-flip", [-1.0, -3.0]), ("sign-flip:2", [-3.0, -7.0]), ("scale:3", [7.0, 13.0])],
)
def test_forged_uploads(make_bench, small_method, spec, expected):
    attackers = make_bench(attack=spec, attackers=1.0).uplink(small_method("hgp"), 0).attackers
    honest = {
        "head.weight": torch.tensor([3.0, 5.0]),
        "gauss.count": torch.ones(2),
        "gauss.var": torch.ones(2),
        "gauss.label": torch.arange(2),
    }
    forgery = attackers.forge(
        [Payload(honest, 1)], {"head.weight": torch.ones(2)}, Exchange(TASK, 0)
    )[0]
    assert forgery["head.weight"].tolist() == expected  # the honest change is [2, 4]
    assert all(
        torch.equal(forgery[k], honest[k]) for k in ("gauss.count", "gauss.var", "gauss.label")
    )


def test_gaussian_noise_has_given_scale(make_bench, small_method):
    attackers = (
        make_bench(attack="gaussian:10", attackers=1.0).uplink(small_method("hgp"), 0).attackers
    )
    payload = Payload({"head.weight": torch.full((10000,), 2.0)}, 1)
    noise = (
        attackers.forge([payload], {"head.weight": torch.ones(10000)}, Exchange(TASK, 0))[0][
            "head.weight"
        ]
        - 1
    )
    assert float(noise.std()) == pytest.approx(10, rel=0.05)
    assert abs(float(noise.mean())) < 0.5


def test_label_flip_changes_only_labels_of_attackers(make_bench, small_method, stream, partition):
    attackers = (
        make_bench(attack="label-flip", attackers=0.34).uplink(small_method("fedavg"), 0).attackers
    )
    labels = attackers.mislabel(stream, partition)
    (hostile,) = attackers.numbers
    for task, parts in zip(stream.tasks, partition.tasks, strict=True):
        for client, index in enumerate(parts):
            rows = [list(stream.train_index).index(i) for i in index]
            true = stream.train.labels[rows]
            assert (
                labels[rows] == (task.start + task.stop - 1 - true if client == hostile else true)
            ).all()


def test_label_flip_store_shares_pixels_and_views(make_bench, small_method):
    bench = make_bench(attack="label-flip", attackers=0.34)
    honest = ImageStore(bench.stream.train, bench.backbone, test_crop=0.5)
    attackers = bench.uplink(small_method("fedavg"), 0).attackers
    honest.query(torch.arange(3))  # its cached queries must not be used for the other
    hostile = attackers.store(bench.stream, bench.partition, honest)
    assert hostile.test_crop == 0.5
    assert hostile.pixels.data_ptr() == honest.pixels.data_ptr()
    assert torch.equal(hostile.view(torch.arange(3)), honest.view(torch.arange(3)))
    assert torch.equal(hostile.query(torch.arange(3)), honest.query(torch.arange(3)))
    assert not torch.equal(hostile.labels, honest.labels)


@pytest.mark.parametrize("attack", ATTACKS.names("fczoo.security"))
@pytest.mark.parametrize("part", [0.0, 0.1])
def test_attack_without_attackers_is_rejected(make_bench, small_method, attack, part):
    spec = ATTACKS.canonical(attack)
    says = (
        rf"attackers {part:g} of 3 clients selects no client, so attack {spec} .* "
        "give attackers 0.33"
    )
    with pytest.raises(FczooError, match=says):
        make_bench(attack=attack, attackers=part).check(small_method("fedavg"))


@pytest.mark.parametrize("name", ATTACKS.names("fczoo.security"))
def test_every_attack_passes_check(name):
    check_attack(name)


def test_unknown_attack_is_rejected(make_bench, small_method):
    with pytest.raises(
        FczooError, match=r"no attack is called 'sing-flip'; did you mean sign-flip"
    ):
        make_bench(attack="sing-flip").check(small_method("fedavg"))


def test_label_flip_rejects_shared_images(make_bench, small_method, stream, partition):
    """Reject false labels if clients share images.

    The last client also has all images of the first one.
    """
    overlap = replace(partition, tasks=tuple((*parts[:-1], parts[0]) for parts in partition.tasks))
    bench = make_bench(attack="label-flip", attackers=0.34)
    attackers = bench.uplink(small_method("fedavg"), 0).attackers
    with pytest.raises(
        FczooError,
        match=r"clients share images, .* would also flip labels of honest clients",
    ):
        attackers.mislabel(stream, overlap)
    scenario = replace(bench, partition=overlap)
    with pytest.raises(FczooError, match=r"without shared images, such as dirichlet:0\.5"):
        scenario.check(small_method("fedavg"))
    replace(scenario, settings=replace(bench.settings, attack="sign-flip")).check(
        small_method("fedavg")
    )


def test_clients_send_forged_uploads(make_bench, small_method, watch):
    """Send back the broadcast if an attacker multiplies its change by zero."""
    run = watch(make_bench(attack="scale:0", attackers=0.34, rounds=1), small_method("fedavg"))
    (hostile,) = run.bench.uplink(run.method, 0).attackers.numbers
    for call in run.rounds:
        for upload in call.payloads:
            unchanged = all(torch.equal(value, call.state[name]) for name, value in upload.items())
            assert unchanged == (upload.client == hostile)
