"""The privacy ledger: epsilon of an institution over runs, and its budget."""

import multiprocessing

import pytest

from fczoo import FczooError, Settings
from fczoo.security.privacy import composed_epsilon, epsilon
from fczoo.sites.ledger import PrivacyLedger
from fczoo.sites.messages import CALL, REFUSAL, Call, Refusal, deserialize, serialize
from fczoo.sites.site import Site
from helpers_sites import NAMES, LocalConnection, own_scenario, server_of, sites_of

NOISY = {"dp_clip": 1.0, "dp_noise": 8.0, "dp_secure": True}
SETTINGS = Settings(dataset="toy", **NOISY)


def test_epsilon_composes_over_noise_levels():
    """Compose noise by the sum of 1 / multiplier^2; 1/8^2 + 1/4^2 is five times 1/8^2."""
    assert composed_epsilon([], 1e-5) == 0
    assert composed_epsilon([(8.0, 1)], 1e-5) == pytest.approx(epsilon(8.0, 1, 1e-5), rel=1e-3)
    twice = composed_epsilon([(8.0, 2)], 1e-5)
    assert twice == pytest.approx(composed_epsilon([(8.0 / 2**0.5, 1)], 1e-5))
    assert composed_epsilon([(8.0, 1), (4.0, 1)], 1e-5) == pytest.approx(
        composed_epsilon([(8.0, 5)], 1e-5)
    )
    assert composed_epsilon([(1.0, 10_000)], 1e-5) > 10_000  # no overflow


def test_budget_covers_runs_and_datasets(tmp_path):
    three = composed_epsilon([(8.0, 3)], 1e-5)
    ledger = PrivacyLedger(tmp_path / "new" / "ledger.json", three + 1e-6)
    ledger.spend(SETTINGS, "data", "first")
    ledger.spend(SETTINGS, "data", "second")
    ledger.check(SETTINGS)
    ledger.spend(SETTINGS, "other data", "second")
    assert ledger.epsilon() == pytest.approx(three)
    for step in (lambda: ledger.check(SETTINGS), lambda: ledger.spend(SETTINGS, "d", "third")):
        with pytest.raises(FczooError, match="would raise the institution's epsilon to"):
            step()
    assert ledger.epsilon() == pytest.approx(three)
    PrivacyLedger(ledger.path).spend(SETTINGS, "data", "third")  # it also counts without a budget
    assert ledger.epsilon() == pytest.approx(composed_epsilon([(8.0, 4)], 1e-5))


def test_budget_ignores_larger_delta_of_agreement(tmp_path):
    """Compute the budget at delta 1e-5 (epsilon 0.93), not at the agreed 0.5 (epsilon 0)."""
    lax = Settings(dataset="toy", **NOISY, dp_delta=0.5)
    with pytest.raises(FczooError, match=r"epsilon to 0\.926, above its budget of 0\.9;"):
        PrivacyLedger(tmp_path / "ledger.json", 0.9).check(lax)


def test_run_without_noise_is_rejected_only_with_budget(tmp_path):
    plain = Settings(dataset="toy")
    PrivacyLedger(tmp_path / "ledger.json").spend(plain, "data", "run")
    assert not (tmp_path / "ledger.json").exists()
    with pytest.raises(FczooError, match="uploads of this run have no noise; agree on dp_clip"):
        PrivacyLedger(tmp_path / "ledger.json", 3.0).check(plain)


def test_damaged_ledger_is_rejected(tmp_path):
    path = tmp_path / "ledger.json"
    PrivacyLedger(path).spend(SETTINGS, "data", "run")
    path.write_text(path.read_text().replace('"uploads": 1', '"uploads": 0'))
    with pytest.raises(FczooError, match="is not a valid privacy ledger: its content does not"):
        PrivacyLedger(path).spend(SETTINGS, "data", "run")


def spend_often(path, budget, done):
    for _ in range(6):
        try:
            PrivacyLedger(path, budget).spend(SETTINGS, "data", "run")
            done.put(1)
        except FczooError:
            done.put(0)


def test_concurrent_processes_share_budget(tmp_path):
    """Spend a budget for five uploads by twelve attempts of two processes."""
    path, budget = tmp_path / "ledger.json", composed_epsilon([(8.0, 5)], 1e-5) + 1e-6
    context = multiprocessing.get_context("fork")
    done = context.Queue()
    both = [context.Process(target=spend_often, args=(path, budget, done)) for _ in range(2)]
    for process in both:
        process.start()
    passed = sum(done.get(timeout=60) for _ in range(12))
    for process in both:
        process.join()
    assert passed == 5


def test_server_cannot_exceed_budget(make_bench, small_method, tmp_path):
    """Refuse enrolment once the budget is spent, also at a site with a new folder.

    A repeated request is answered from the folder and counts once.
    """
    bench = make_bench(rounds=1, epochs=1, batch_size=8, **NOISY)
    method = small_method("fedavg", tune="head")
    ledger = PrivacyLedger(tmp_path / "ledger.json", composed_epsilon([(8.0, 2)], 1e-5) + 1e-6)
    site = Site(own_scenario(bench, 0), method, 0, 0, NAMES, tmp_path, ledger)
    connection = LocalConnection(sites_of(bench, method, tmp_path / "sites"))
    server_of(bench, method, connection, "run 0").run()
    question = next(q for number, q, _ in connection.passed[3:] if number == 0)
    call = connection.passed[0][1]
    terms = deserialize(CALL, call, Call)[0].terms
    site.answer(serialize(CALL, Call("run 0", terms)))
    first = site.answer(question)
    assert site.answer(question) == first
    assert ledger.epsilon() == pytest.approx(composed_epsilon([(8.0, 1)], 1e-5))
    ledger.spend(bench.settings, "data", "another federation")
    answer = site.answer(serialize(CALL, Call("run 1", terms)))
    assert (
        "would raise the institution's epsilon" in deserialize(REFUSAL, answer, Refusal)[0].reason
    )
    # the ledger survives the folder of the site
    other = Site(own_scenario(bench, 0), method, 0, 0, NAMES, tmp_path / "sites" / "1", ledger)
    answer = other.answer(serialize(CALL, Call("run 2", terms)))
    assert (
        "would raise the institution's epsilon" in deserialize(REFUSAL, answer, Refusal)[0].reason
    )
    assert site.answer(question) == first


def test_upload_is_recorded_before_it_is_sent(make_bench, small_method, tmp_path, monkeypatch):
    bench = make_bench(rounds=1, epochs=1, batch_size=8, **NOISY)
    method = small_method("fedavg", tune="head")
    connection = LocalConnection(sites_of(bench, method, tmp_path))
    ledger = PrivacyLedger(tmp_path / "ledger.json")
    connection.sites[0].ledger = ledger
    stored = []
    store_state = Site._store_state

    def note(self, state):
        if self.number == 0 and state.answers:
            stored.append(sum(r.uploads for r in ledger._read()))
        store_state(self, state)

    monkeypatch.setattr(Site, "_store_state", note)
    server_of(bench, method, connection).run()
    assert stored == [1, 2, 3]  # one round of each of three tasks
