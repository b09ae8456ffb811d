"""Bytes of a broadcast that clients do not have yet."""

import json

import torch

from fczoo.federation.downlink import Ledger


def test_what_has_not_changed_since_a_client_was_told_is_not_sent_again():
    """Two tensors of 4 and 8 bytes, of which the second changes once."""
    first = {"a": torch.zeros(1), "b": torch.zeros(2)}
    second = {"a": torch.zeros(1), "b": torch.ones(2)}
    ledger = Ledger()
    ledger.update({}, first)
    assert ledger.send(first, [0, 1]) == 2 * 12
    assert ledger.send(first, [0]) == 0
    ledger.update(first, second)
    assert ledger.send(second, [0, 2]) == 8 + 12
    ledger.update(second, second)
    resumed = Ledger()
    resumed.restore(json.loads(json.dumps(ledger.notes())))
    assert resumed.send(second, [0, 1, 2]) == 0 + 8 + 0


def test_of_a_stack_that_grows_only_new_rows_are_sent():
    """Rows of 8 bytes: one, then two more; another client has none of them, and a changed row brings all."""
    ledger, stacks = Ledger(), [torch.ones(n, 2) for n in (0, 1, 3)]
    sent = []
    for before, after in zip([None, *stacks], stacks, strict=False):
        ledger.update({"past": before} if before is not None else {}, {"past": after})
        sent.append(ledger.send({"past": after}, [0]))
    assert sent == [0, 8, 16]
    resumed = Ledger()
    resumed.restore(json.loads(json.dumps(ledger.notes())))
    assert resumed.send({"past": stacks[2]}, [0, 1]) == 0 + 24
    other = torch.cat([torch.zeros(1, 2), torch.ones(3, 2)])
    resumed.update({"past": stacks[2]}, {"past": other})
    assert resumed.send({"past": other}, [0]) == 32
    resumed.update({"past": other}, {"past": other[:2]})
    assert resumed.send({"past": other[:2]}, [0]) == 16


def test_what_comes_back_is_sent_again():
    """Control variates are zero, and not sent, as a task begins."""
    variates, ledger = {"c": torch.zeros(1)}, Ledger()
    ledger.update({}, variates)
    assert ledger.send(variates, [0]) == 4
    ledger.update({}, variates)
    assert ledger.send(variates, [0]) == 4


def test_a_ledger_keeps_one_number_a_client():
    state, ledger = {f"layer.{i}": torch.zeros(1) for i in range(50)}, Ledger()
    ledger.update({}, state)
    ledger.send(state, range(1000))
    assert len(json.dumps(ledger.notes())) < 1000 * 12 + 50 * 20
