"""Bytes of a broadcast that clients do not have yet."""

import json

import torch

from fczoo.federation.server import BroadcastTracker


def test_unchanged_tensors_are_not_sent_again():
    """Send a client only tensors that changed since its last broadcast.

    Two tensors have 4 and 8 bytes; the second changes once.
    """
    first = {"a": torch.zeros(1), "b": torch.zeros(2)}
    second = {"a": torch.zeros(1), "b": torch.ones(2)}
    ledger = BroadcastTracker()
    ledger.update({}, first)
    assert ledger.send(first, [0, 1]) == {0: 12, 1: 12}
    assert ledger.send(first, [0]) == {0: 0}
    ledger.update(first, second)
    assert ledger.send(second, [0, 2]) == {0: 8, 2: 12}
    ledger.update(second, second)
    copy = BroadcastTracker()
    copy.restore(json.loads(json.dumps(ledger.notes())))
    assert copy.send(second, [0, 1, 2]) == {0: 0, 1: 8, 2: 0}


def test_only_new_rows_of_growing_stack_are_sent():
    """Send only the new rows of a growing stack.

    Rows have 8 bytes: one, then two more. Another client has none of them. After a change of a row
    all rows are sent.
    """
    ledger, stacks = BroadcastTracker(), [torch.ones(n, 2) for n in (0, 1, 3)]
    byte_counts = []
    for old, new in zip([None, *stacks], stacks, strict=False):
        ledger.update({"past": old} if old is not None else {}, {"past": new})
        byte_counts.append(ledger.send({"past": new}, [0])[0])
    assert byte_counts == [0, 8, 16]
    copy = BroadcastTracker()
    copy.restore(json.loads(json.dumps(ledger.notes())))
    assert copy.send({"past": stacks[2]}, [0, 1]) == {0: 0, 1: 24}
    new_stack = torch.cat([torch.zeros(1, 2), torch.ones(3, 2)])
    copy.update({"past": stacks[2]}, {"past": new_stack})
    assert copy.send({"past": new_stack}, [0]) == {0: 32}
    copy.update({"past": new_stack}, {"past": new_stack[:2]})
    assert copy.send({"past": new_stack[:2]}, [0]) == {0: 16}


def test_tensor_with_earlier_value_is_sent_again():
    """Send a tensor again that returns to an earlier value.

    Control variates are zero, and not sent, at the start of a task.
    """
    variates, ledger = {"c": torch.zeros(1)}, BroadcastTracker()
    ledger.update({}, variates)
    assert ledger.send(variates, [0]) == {0: 4}
    ledger.update({}, variates)
    assert ledger.send(variates, [0]) == {0: 4}


def test_tracker_stores_one_number_per_client():
    state, ledger = {f"layer.{i}": torch.zeros(1) for i in range(50)}, BroadcastTracker()
    ledger.update({}, state)
    ledger.send(state, range(1000))
    assert len(json.dumps(ledger.notes())) < 1000 * 12 + 50 * 20
