"""Sites that are killed, are silent, send damaged data or differ from the agreement."""

from dataclasses import replace

import pytest

from fczoo import FczooError
from fczoo.federation.checkpoint import format_of
from fczoo.sites.messages import (
    CALL,
    ENROLMENT,
    REFUSAL,
    Call,
    Enrolment,
    Refusal,
    deserialize,
    serialize,
)
from fczoo.sites.site import HOW_TO_RESTART, Site
from helpers_sites import NAMES, LocalConnection, own_scenario, server_of, simulate, sites_of


class RestartingConnection(LocalConnection):
    """Restart all sites before each second exchange; repeat each third exchange.

    Sites are also restarted before the repetition, which must give the same answers.
    """

    def __init__(self, start_site, sites):
        super().__init__(sites)
        self.start_site, self.exchanges, self.lost = start_site, 0, 0

    def __call__(self, questions, limit, /):
        self.exchanges += 1
        if self.exchanges % 2 == 0:
            self.sites |= {number: self.start_site(number) for number in questions}
        answers = super().__call__(questions, limit)
        if self.exchanges % 3 == 0:
            self.lost += 1
            self.sites |= {number: self.start_site(number) for number in questions}
            assert super().__call__(questions, limit) == answers  # bit for bit
        return answers


@pytest.mark.parametrize("name", ["icarl", "lwf", "glfc", "fedcof"])
def test_killed_sites_resume_from_their_folders(make_bench, small_method, tmp_path, name):
    method, bench = (
        small_method(name),
        make_bench(epochs=1, local="scaffold" if name == "lwf" else None),
    )

    def start_site(number: int) -> Site:
        return Site(own_scenario(bench, number), method, 0, number, NAMES, tmp_path / str(number))

    connection = RestartingConnection(start_site, sites_of(bench, method, tmp_path))
    remote, simulation = server_of(bench, method, connection), simulate(bench, method)
    assert repr(remote.run().accuracy) == repr(simulation.run().accuracy)
    assert connection.lost


def test_silent_site_is_recorded_as_dropped_out(make_bench, small_method, tmp_path):
    bench, method = make_bench(epochs=1), small_method("fedavg")

    class SilentSiteConnection(LocalConnection):
        def __call__(self, questions, limit, /):
            answers = dict(super().__call__(questions, limit))
            if len(self.passed) == 6:  # the first round, after three enrolments
                del answers[1]
            return answers

    run = server_of(bench, method, SilentSiteConnection(sites_of(bench, method, tmp_path)))
    result = run.run()
    assert result.rejected == [{"task": 0, "moment": 0, "client": 1, "reason": "dropped out"}]


@pytest.mark.parametrize("rubbish", [b"", b"nothing", b"\0" * 100])
def test_damaged_answers_are_reported_and_ignored(
    make_bench, small_method, tmp_path, caplog, rubbish
):
    bench, method = make_bench(epochs=1, rounds=1), small_method("fedavg")

    class DamagingConnection(LocalConnection):
        def __call__(self, questions, limit, /):
            answers = dict(super().__call__(questions, limit))
            return answers if len(self.passed) == 3 else {**answers, 2: rubbish}

    run = server_of(bench, method, DamagingConnection(sites_of(bench, method, tmp_path)))
    result = run.run()
    assert {entry["client"] for entry in result.rejected} == {2}
    assert all(entry["reason"].startswith("sent an invalid upload: ") for entry in result.rejected)
    assert "site lyon: sent an invalid upload: " in caplog.text


def test_answer_to_other_question_is_ignored(make_bench, small_method, tmp_path, caplog):
    bench, method = make_bench(epochs=1, rounds=2), small_method("fedavg")

    class LateConnection(LocalConnection):
        def __call__(self, questions, limit, /):
            answers = dict(super().__call__(questions, limit))
            if len(self.passed) == 9:  # repeat the answer of site 0 to the first round
                answers[0] = next(a for k, q, a in self.passed[3:] if k == 0)
            return answers

    result = server_of(bench, method, LateConnection(sites_of(bench, method, tmp_path))).run()
    assert [entry["client"] for entry in result.rejected] == [0]
    assert "sent the answer to another request" in caplog.text


@pytest.mark.parametrize(
    ("enrolment", "words"),
    [
        (Enrolment([1, 1], [0]), "tasks or classes that are not in the schedule"),
        (Enrolment([1, 1, 1], [7]), "tasks or classes that are not in the schedule"),
        (Enrolment([1, 1, 10**12], None), "site paris sent an invalid enrolment: images"),
    ],
)
def test_invalid_enrolments_are_rejected(make_bench, small_method, enrolment, words):
    def connection(questions, limit):
        return dict.fromkeys(questions, serialize(ENROLMENT, enrolment))

    with pytest.raises(FczooError, match=words):
        server_of(make_bench(), small_method("fedavg"), connection)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 5}, "setting batch_size is 5 here and 4 at the server"),
        ({"min_class_count": 3}, "setting min_class_count is 3 here and 1 at the server"),
    ],
)
def test_site_rejects_other_settings(make_bench, small_method, tmp_path, changes, words):
    """Reject other settings, also those that protect data less than agreed."""
    method, bench = small_method("fedncm"), make_bench()
    sites = sites_of(bench, method, tmp_path)
    sites[1] = sites_of(make_bench(**changes), method, tmp_path / "other")[1]
    with pytest.raises(FczooError, match=f"^site rome: {words}"):
        server_of(bench, method, LocalConnection(sites))


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"class list": [*"aBcdefg"]}, "class list, entry 2 is b here and B at the server"),
        ({"class list": [*"abcdef"]}, "class list, entry 7 is g here and missing at the server"),
        (
            {"schedule": [["a"], ["b"], [*"cdefg"]]},
            "length of schedule, entry 1 is 3 here and 1 at the server",
        ),
        ({"version": {"torch": "1.0"}}, "version torch is .* here and 1.0 at the server"),
        ({"method": {"name": "fedncm"}}, "method name is fedavg here and fedncm at the server"),
        ({"seed": 1}, "seed is 0 here and 1 at the server"),
        (
            {"sites": ["rome", "paris", "lyon"]},
            "sites, entry 1 is paris here and rome at the server",
        ),
    ],
)
def test_site_rejects_other_terms(make_bench, small_method, tmp_path, terms, words):
    bench, method = make_bench(), small_method("fedavg")

    class OtherTermsConnection(LocalConnection):
        def __call__(self, questions, limit, /):
            calls = {site: change_terms(call) for site, call in questions.items()}
            return super().__call__(calls, limit)

    def change_terms(content: bytes) -> bytes:
        call, _ = deserialize(CALL, content, Call)
        new = {k: {**call.terms[k], **v} if isinstance(v, dict) else v for k, v in terms.items()}
        return serialize(CALL, Call(call.run, {**call.terms, **new}))

    with pytest.raises(FczooError, match=f"^site paris: {words}; make them equal$"):
        server_of(bench, method, OtherTermsConnection(sites_of(bench, method, tmp_path)))


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("joint", {}, "images of all clients in one place"),
        ("fedavg", {"attack": "sign-flip", "attackers": 0.4}, "attack works in simulations only"),
        ("fedavg", {"drop_rate": 0.1}, "drop_rate works in simulations only"),
        ("fedavg", {"dp_clip": 1.0, "dp_noise": 1.0}, "dp_secure = true"),
    ],
)
def test_sites_reject_unsupported_settings(
    make_bench, small_method, tmp_path, name, settings, words
):
    with pytest.raises(FczooError, match=words):
        sites_of(make_bench(**settings), small_method(name), tmp_path)


def test_site_rejects_invalid_questions(make_bench, small_method, tmp_path):
    bench, method = make_bench(epochs=1, rounds=1), small_method("fedavg")
    sites = sites_of(bench, method, tmp_path)
    connection = LocalConnection(sites)
    server_of(bench, method, connection, "first").run()
    question = next(q for _, q, _ in connection.passed if format_of(q) != CALL)
    server_of(bench, method, connection, "second")
    long_name = serialize(CALL, Call("x" * 65, {}))  # which the ledger would store
    expected = ((question, "not enrolled in this run"), (b"nothing", "damaged"))
    for content, words in (*expected, (long_name, "run: Expected `str` of length <= 64")):
        answer = sites[0].answer(content)
        assert format_of(answer) == REFUSAL
        assert words in deserialize(REFUSAL, answer, Refusal)[0].reason


def test_site_with_changed_agreement_leaves_run(make_bench, small_method, tmp_path, caplog):
    """Restart a site in the middle of a run, when the server does not compare terms."""
    bench, method = make_bench(epochs=1, rounds=1), small_method("fedavg")
    connection = LocalConnection(sites_of(bench, method, tmp_path))
    run = server_of(bench, method, connection)
    assert sites_of(bench, method, tmp_path)[0].state.run == "a run"
    connection.sites[0] = sites_of(make_bench(epochs=2, rounds=1), method, tmp_path)[0]
    result = run.run()
    reason = f"refused: the site has not enrolled in this run; {HOW_TO_RESTART}"
    assert {(r["client"], r["reason"]) for r in result.rejected} == {(0, reason)}
    assert f"site paris: {reason}" in caplog.text


def test_failed_site_is_skipped_and_error_text_stays_private(
    make_bench, small_method, tmp_path, monkeypatch, caplog
):
    bench, method = make_bench(epochs=1, rounds=1), small_method("fedavg")
    sites = sites_of(bench, method, tmp_path)
    run = server_of(bench, method, LocalConnection(sites))

    def fail(*_: object) -> None:
        raise RuntimeError("patient 4711")

    monkeypatch.setattr(sites[1], "_client", fail)
    result = run.run()
    reason = "refused: RuntimeError at the site; see its log"
    assert {(r["client"], r["reason"]) for r in result.rejected} == {(1, reason)}
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warnings and set(warnings) == {f"site rome: {reason}; the round continues without it"}
    for number in (0, 2):
        monkeypatch.setattr(sites[number], "_client", fail)
    words = f"no site sends valid uploads in task 1, round 1; site paris: {reason}; site rome"
    with pytest.raises(FczooError, match=f"^{words}"):
        server_of(bench, method, LocalConnection(sites), "another").run()


def test_damaged_site_folder_is_rejected(make_bench, small_method, tmp_path):
    bench, method = make_bench(), small_method("fedavg")
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "kept.safetensors").write_bytes(b"nothing")
    with pytest.raises(FczooError, match=r"kept\.safetensors is not a valid state of a site"):
        sites_of(bench, method, tmp_path)


def test_task_without_images_at_any_site_is_rejected(make_bench, small_method, tmp_path):
    """Accept classes that some site has; reject a task without images."""
    bench, method = make_bench(epochs=1), small_method("fedncm")
    run = server_of(bench, method, LocalConnection(sites_of(bench, method, tmp_path)))
    assert run.scenario.classes_with_images(bench.stream.tasks[-1]).all()
    sites = sites_of(bench, method, tmp_path / "again")
    for site in sites.values():
        site.scenario = replace(site.scenario, partition=without_last_task(site.scenario.partition))
    with pytest.raises(FczooError, match="no site has an image of task 3"):
        server_of(bench, method, LocalConnection(sites))
    assert len(NAMES) == 3


def without_last_task(partition):
    empty = [part[:0] for part in partition.tasks[-1]]
    return replace(partition, tasks=(*partition.tasks[:-1], type(partition.tasks[-1])(empty)))
