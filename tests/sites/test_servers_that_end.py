"""A server that ends in the middle of a run: another one goes on from its folder, and no number changes."""

from collections import defaultdict

import pytest
import torch

from fczoo import FczooError
from fczoo.federation.wire import form_of, seal_of
from fczoo.sites.begun import BEGUN, CHECKPOINT
from fczoo.sites.messages import CALL, question_in
from fczoo.sites.site import Site
from helpers_sites import Here, own_world, server_of, sites_of


class Killed(BaseException):
    """As by a power cut: nobody catches it."""


class Doomed(Here):
    """The server loses the answers of every exchange once, and its process with them; so do all sites."""

    def __init__(self, begun):
        super().__init__({})
        self.begun, self.lost = begun, set()

    def __call__(self, questions, /):
        self.sites = {number: self.begun(number) for number in questions}
        answers = super().__call__(questions)
        content = next(iter(questions.values()))
        if form_of(content) != CALL:
            asked, _ = question_in(content, torch.device("cpu"))
            exchange = asked.ctx.task.index, asked.ctx.round, asked.boundary
            if exchange not in self.lost:
                self.lost.add(exchange)
                raise Killed
        return answers


def finished(bench, method, way, folder):
    """The run as it is over, and how many servers it took."""
    servers = 0
    while True:
        servers += 1
        run = server_of(bench, method, way, f"run {servers}", folder)
        try:
            run.run_to(folder / "result.json")
            return run, servers
        except Killed:
            continue


def begun_in(bench, method, folder):
    """What begins a site from its folder."""

    def begun(number: int) -> Site:
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        return Site(own_world(bench, number), method, 0, number, place)

    return begun


@pytest.mark.parametrize("name", ["icarl", "lwf", "glfc", "fedcof", "pilora", "podnet"])
def test_every_exchange_may_be_the_last_of_a_server(make_bench, small_method, tmp_path, name):
    """Also where it has asked before a round, or after the last one, and has saved nothing since."""
    settings = {"epochs": 1, "local": "scaffold" if name == "lwf" else None, "participation": 0.7}
    method, bench = small_method(name), make_bench(**settings)
    way = Doomed(begun_in(bench, method, tmp_path))
    there, servers = finished(bench, method, way, tmp_path)
    here = server_of(bench, method, Here(sites_of(bench, method, tmp_path / "undisturbed")))
    here.run()
    assert servers == len(way.lost) + 1 > 3
    for figure in ("accuracy", "metrics", "bytes_up", "bytes_down", "client_rounds", "uploaded", "rejected"):
        assert repr(getattr(there.result, figure)) == repr(getattr(here.result, figure)), figure
    assert all(torch.equal(there.state[key], value) for key, value in here.state.items())
    assert (tmp_path / "result.json").exists() and not (tmp_path / CHECKPOINT).exists()


def test_noise_is_drawn_once_for_each_question(make_bench, small_method, tmp_path):
    """A second draw would tell more than was promised."""
    noisy = {"dp_clip": 0.1, "dp_noise": 1.0, "dp_secure": True, "epochs": 1}
    method, bench = small_method("fedavg"), make_bench(**noisy)
    way = Doomed(begun_in(bench, method, tmp_path))
    run, _ = finished(bench, method, way, tmp_path)
    said = defaultdict(set)
    for number, question, answer in way.passed:
        if form_of(question) != CALL:
            said[number, seal_of(question)].add(answer)
    assert len(said) < len(way.passed) / 2  # most of it was asked again
    assert run.result.privacy and all(len(answers) == 1 for answers in said.values())


def stopped(make_bench, small_method, folder):
    """Method, bench and sites of a run that has ended in its third exchange."""
    method, bench = small_method("fedavg"), make_bench(epochs=1)

    class Cut(Here):
        def __call__(self, questions, /):
            if len(self.passed) == 9:  # three enrolments, two rounds
                raise Killed
            return super().__call__(questions)

    sites = sites_of(bench, method, folder)
    with pytest.raises(Killed):
        server_of(bench, method, Cut(sites), "first", folder).run()
    return method, bench, sites


def test_a_finished_run_is_followed_by_a_new_one(make_bench, small_method, tmp_path):
    method, bench, sites = stopped(make_bench, small_method, tmp_path)
    server_of(bench, method, Here(sites), "second", tmp_path).run_to(tmp_path / "result.json")
    assert {site.standing.run for site in sites.values()} == {"first"}
    server_of(bench, method, Here(sites), "third", tmp_path)
    assert {site.standing.run for site in sites.values()} == {"third"}


def test_a_site_that_has_lost_what_it_kept_does_not_go_on(make_bench, small_method, tmp_path):
    """It would answer without its memory, and with noise of which it has given away some already."""
    method, bench, _ = stopped(make_bench, small_method, tmp_path)
    (tmp_path / "1" / "kept.safetensors").unlink()
    with pytest.raises(
        FczooError, match=r"^site rome: the site has kept nothing of this run; begin it anew$"
    ):
        server_of(bench, method, Here(sites_of(bench, method, tmp_path)), "second", tmp_path)


def test_what_goes_on_is_what_began(make_bench, small_method, tmp_path, monkeypatch):
    method, bench, sites = stopped(make_bench, small_method, tmp_path)
    words = (
        r"^setting batch_size is 5 here and 4 in the run that goes on; .* or remove .*checkpoint\.safetensors"
    )
    with pytest.raises(FczooError, match=words):
        server_of(make_bench(epochs=1, batch_size=5), method, Here(sites), "second", tmp_path)
    monkeypatch.setattr(sites[2], "_classes", lambda: [0])
    with pytest.raises(FczooError, match=r"^site lyon has other images than when the run began"):
        server_of(bench, method, Here(sites), "second", tmp_path)


@pytest.mark.parametrize("content", ["nothing", "{}", '{"run": 1, "terms": {}, "enrolments": []}'])
def test_a_damaged_beginning_is_told(make_bench, small_method, tmp_path, content):
    method, bench, sites = stopped(make_bench, small_method, tmp_path)
    (tmp_path / BEGUN).write_text(content)
    with pytest.raises(FczooError, match=r"begun\.json is no (valid )?beginning of a run"):
        server_of(bench, method, Here(sites), "second", tmp_path)
