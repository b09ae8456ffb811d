"""Servers that end in the middle of a run: another server resumes with equal numbers."""

from collections import defaultdict

import pytest
import torch

from fczoo import FczooError
from fczoo.federation.checkpoint import content_hash, format_of
from fczoo.sites.messages import CALL, read_request
from fczoo.sites.site import HOW_TO_RESTART, Site
from fczoo.sites.site_data import CHECKPOINT, RUN_START_FILE
from helpers_sites import NAMES, LocalConnection, own_scenario, server_of, sites_of


class PowerCut(BaseException):
    """Simulate a power cut: nothing catches it."""


class FailingConnection(LocalConnection):
    """Restart all sites per exchange; end the server once after every exchange."""

    def __init__(self, start_site):
        super().__init__({})
        self.start_site, self.lost = start_site, set()

    def __call__(self, questions, limit, /):
        self.sites = {number: self.start_site(number) for number in questions}
        answers = super().__call__(questions, limit)
        content = next(iter(questions.values()))
        if format_of(content) != CALL:
            request, _ = read_request(content, torch.device("cpu"))
            exchange = request.ctx.task.index, request.ctx.round, request.boundary
            if exchange not in self.lost:
                self.lost.add(exchange)
                raise PowerCut
        return answers


def run_until_done(bench, method, connection, folder):
    """Start servers until the run has finished; return the run and their number."""
    servers = 0
    while True:
        servers += 1
        run = server_of(bench, method, connection, f"run {servers}", folder)
        try:
            run.run_to(folder / "result.json")
            return run, servers
        except PowerCut:
            continue


def site_starter(bench, method, folder):
    """Return a function that starts a site from its folder."""

    def start_site(number: int) -> Site:
        site_folder = folder / str(number)
        site_folder.mkdir(exist_ok=True)
        return Site(own_scenario(bench, number), method, 0, number, NAMES, site_folder)

    return start_site


@pytest.mark.parametrize("name", ["icarl", "lwf", "glfc", "fedcof", "pilora", "podnet"])
def test_server_resumes_after_any_exchange(make_bench, small_method, tmp_path, name):
    """End a server at every exchange; the resumed run has the same numbers.

    The server may end before the checkpoint of the exchange.
    """
    settings = {"epochs": 1, "local": "scaffold" if name == "lwf" else None, "participation": 0.7}
    if name != "fedcof":  # which trains nothing
        settings |= {"compress": "topk:0.2", "server_optimizer": "fedavgm:0.5"}
    method, bench = small_method(name), make_bench(**settings)
    connection = FailingConnection(site_starter(bench, method, tmp_path))
    run, servers = run_until_done(bench, method, connection, tmp_path)
    reference = server_of(
        bench, method, LocalConnection(sites_of(bench, method, tmp_path / "undisturbed"))
    )
    reference.run()
    assert servers == len(connection.lost) + 1 > 3
    for figure in (
        "accuracy",
        "metrics",
        "bytes_up",
        "bytes_down",
        "client_rounds",
        "uploaded",
        "rejected",
    ):
        assert repr(getattr(run.result, figure)) == repr(getattr(reference.result, figure)), figure
    assert all(torch.equal(run.state[key], value) for key, value in reference.state.items())
    assert (tmp_path / "result.json").exists() and not (tmp_path / CHECKPOINT).exists()


def test_noise_is_drawn_once_per_question(make_bench, small_method, tmp_path):
    """Draw noise once per question; a second draw would increase epsilon."""
    noisy = {"dp_clip": 0.1, "dp_noise": 1.0, "dp_secure": True, "epochs": 1, "batch_size": 8}
    method, bench = small_method("fedavg", tune="head"), make_bench(**noisy)
    connection = FailingConnection(site_starter(bench, method, tmp_path))
    run, _ = run_until_done(bench, method, connection, tmp_path)
    answers_by_question = defaultdict(set)
    for number, question, answer in connection.passed:
        if format_of(question) != CALL:
            answers_by_question[number, content_hash(question)].add(answer)
    assert len(answers_by_question) < len(connection.passed) / 2  # most questions were repeated
    assert run.result.privacy
    assert all(len(answers) == 1 for answers in answers_by_question.values())


def stop_run(make_bench, small_method, folder):
    """Stop a run in its third exchange; return method, bench and sites."""
    method, bench = small_method("fedavg"), make_bench(epochs=1)

    class PowerCutConnection(LocalConnection):
        def __call__(self, questions, limit, /):
            if len(self.passed) == 9:  # three enrolments, two rounds
                raise PowerCut
            return super().__call__(questions, limit)

    sites = sites_of(bench, method, folder)
    with pytest.raises(PowerCut):
        server_of(bench, method, PowerCutConnection(sites), "first", folder).run()
    return method, bench, sites


def test_finished_run_is_followed_by_new_run(make_bench, small_method, tmp_path):
    method, bench, sites = stop_run(make_bench, small_method, tmp_path)
    server_of(bench, method, LocalConnection(sites), "second", tmp_path).run_to(
        tmp_path / "result.json"
    )
    assert {site.state.run for site in sites.values()} == {"first"}
    server_of(bench, method, LocalConnection(sites), "third", tmp_path)
    assert {site.state.run for site in sites.values()} == {"third"}


def test_site_without_state_cannot_resume(make_bench, small_method, tmp_path):
    """Reject a site that has lost its state: it would draw noise a second time."""
    method, bench, _ = stop_run(make_bench, small_method, tmp_path)
    (tmp_path / "1" / "kept.safetensors").unlink()
    with pytest.raises(
        FczooError, match=f"^site rome: the site has no state of the resumed run; {HOW_TO_RESTART}$"
    ):
        server_of(
            bench, method, LocalConnection(sites_of(bench, method, tmp_path)), "second", tmp_path
        )


def test_resumed_run_rejects_changed_settings_or_images(
    make_bench, small_method, tmp_path, monkeypatch
):
    method, bench, sites = stop_run(make_bench, small_method, tmp_path)
    words = (
        r"^setting batch_size is 5 here and 4 in the resumed run; .* or remove "
        r".*checkpoint\.safetensors"
    )
    with pytest.raises(FczooError, match=words):
        server_of(
            make_bench(epochs=1, batch_size=5), method, LocalConnection(sites), "second", tmp_path
        )
    monkeypatch.setattr(sites[2], "_classes", lambda: [0])
    with pytest.raises(FczooError, match=r"^the images of site lyon have changed since"):
        server_of(bench, method, LocalConnection(sites), "second", tmp_path)


@pytest.mark.parametrize("content", ["nothing", "{}", '{"run": 1, "terms": {}, "enrolments": []}'])
def test_damaged_run_start_file_is_rejected(make_bench, small_method, tmp_path, content):
    method, bench, sites = stop_run(make_bench, small_method, tmp_path)
    (tmp_path / RUN_START_FILE).write_text(content)
    with pytest.raises(
        FczooError, match=r"begun\.json is not (the|a valid) record of a run's start"
    ):
        server_of(bench, method, LocalConnection(sites), "second", tmp_path)
