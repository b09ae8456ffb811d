"""Uploads of a site: privacy protection, and no private state."""

from dataclasses import asdict

import pytest
import torch

from fczoo.core.payload import content_of
from fczoo.federation.checkpoint import format_of, unpack
from fczoo.sites.messages import ENROLMENT, UPLOAD, Enrolment, deserialize
from helpers_sites import LocalConnection, server_of, sites_of

NOTES = {"question", "images", "loss", "exemplars"}


def run_and_collect_uploads(make_bench, method, folder, **settings):
    """Run sites; return the run, all uploads (site, tensors, notes) and the connection."""
    bench = make_bench(epochs=1, **settings)
    connection = LocalConnection(sites_of(bench, method, folder))
    run = server_of(bench, method, connection)
    run.run()
    uploads = []
    for number, _, answer in connection.passed:
        if format_of(answer) == UPLOAD:
            trees, notes = unpack(UPLOAD, answer)
            assert set(trees) == {"payload"} and set(notes) == NOTES
            uploads.append((number, trees["payload"], notes))
    assert uploads
    return run, uploads, connection


@pytest.mark.parametrize("name", ["icarl", "glfc", "lwf", "podnet"])
def test_client_memory_is_not_uploaded(make_bench, small_method, tmp_path, name):
    """Send only tensors that the method declares as uploads."""
    method = small_method(name)
    run, uploads, connection = run_and_collect_uploads(make_bench, method, tmp_path)
    training = run.server.uplink.training
    for _, tensors, _ in uploads:
        assert all(
            content_of(tensor, training.trained_prefixes, training.uploads) for tensor in tensors
        )
    states = [site.state.client_state for site in connection.sites.values()]
    assert any(k.memories or k.teacher_outputs for k in states)
    of_server = [name for memory in run.memories.values() for name in memory]
    assert set(of_server) <= {training.exemplars}


def test_server_knows_only_exemplar_counts(make_bench, small_method, tmp_path):
    run, uploads, connection = run_and_collect_uploads(make_bench, small_method("icarl"), tmp_path)
    for number, site in connection.sites.items():
        exemplars = site.state.client_state.memories[number]["exemplar.index"]
        last = [notes for client, _, notes in uploads if client == number][-1]
        assert sum(last["exemplars"]) == len(exemplars) > 0
        assert len(run.memories[number]["exemplar.index"]) == len(exemplars)


def test_rare_classes_are_not_uploaded(make_bench, small_method, tmp_path):
    _, uploads, connection = run_and_collect_uploads(
        make_bench, small_method("fedncm"), tmp_path, min_class_count=4
    )
    counts = torch.cat(
        [tensors[n] for _, tensors, _ in uploads for n in tensors if n.endswith("count")]
    )
    assert counts[counts > 0].min() >= 4 and (counts == 0).any()
    for _, tensors, _ in uploads:
        (count,) = (value for name, value in tensors.items() if name.endswith("count"))
        (total,) = (value for name, value in tensors.items() if name.endswith("sum"))
        assert not total[count == 0].any()
    enrolments = [
        deserialize(ENROLMENT, a, Enrolment)[0]
        for _, _, a in connection.passed
        if format_of(a) == ENROLMENT
    ]
    for number, enrolment in enumerate(enrolments):
        labels = torch.bincount(connection.sites[number].scenario.train.labels)
        assert enrolment.classes == torch.nonzero(labels >= 4).flatten().tolist()


def test_clipped_uploads_have_no_losses_or_classes(make_bench, small_method, tmp_path):
    run, uploads, connection = run_and_collect_uploads(
        make_bench, small_method("fedavg"), tmp_path, dp_clip=0.01, rounds=1
    )
    assert all(notes["loss"] is None for _, _, notes in uploads)
    for number, question, answer in connection.passed:
        if format_of(answer) == ENROLMENT:
            assert deserialize(ENROLMENT, answer, Enrolment)[0].classes is None
            continue
        state, upload = (
            unpack(format_of(question), question)[0]["state"],
            unpack(UPLOAD, answer)[0]["payload"],
        )
        change = torch.cat([(value - state[name]).flatten() for name, value in upload.items()])
        assert change.norm() <= 0.01 * (1 + 1e-6), number
    assert run.result.rejected == [] and asdict(run.result)["privacy"] == {}


def test_upload_noise_does_not_depend_on_seed(make_bench, small_method, tmp_path):
    """Draw noise without the seed; the server knows the seed and could subtract it."""
    settings = {"dp_clip": 0.1, "dp_noise": 1.0, "dp_secure": True, "rounds": 1, "tasks": 3}
    first, second = (
        run_and_collect_uploads(make_bench, small_method("fedavg"), tmp_path / name, **settings)[1]
        for name in "ab"
    )
    (_, ours, _), (_, theirs, _) = first[0], second[0]
    assert not any(torch.equal(value, theirs[name]) for name, value in ours.items())
