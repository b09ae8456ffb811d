"""Norms of updates: rejected outliers, and valid updates next to converged clients."""

import pytest
import torch

from fczoo.core.payload import Payload
from fczoo.core.training import Optim, Training
from fczoo.core.types import Task
from fczoo.security.upload_validation import validate_uploads

TASK = Task(0, 0, 2, 4, 2)
TRAINING = Training({"head": Optim()})


def test_norm_limit_among_converged_clients():
    """Accept a client that still learns while the others have converged, up to a limit.

    Start [2, 3] of twos, norm 4.9; three clients move by 1e-6, the last by 19 (norm 46.5) or 21
    (51.4).
    """
    start = torch.full((2, 3), 2.0)
    still = {k: Payload({"head": start + 1e-6}, k, 5) for k in range(1, 4)}

    def reasons(change: float) -> dict[int, str]:
        payloads = {**still, 0: Payload({"head": start + change}, 0, 5)}
        return validate_uploads(
            payloads, {"head": start}, TRAINING, TASK, dict.fromkeys(payloads, 5)
        )[1]

    assert reasons(19.0) == {}
    assert reasons(21.0) == {0: "its update has norm 51.4, but the limit is 49"}


@pytest.mark.parametrize(("factor", "rejected"), [(900.0, set()), (1100.0, {1})])
def test_norm_limit_of_two_updates(factor, rejected):
    """Compare the longer of two updates with the other one.

    Start [2, 3] of 0.01, norm 0.0245; one client moves by 0.01, the other by a multiple.
    """
    start = torch.full((2, 3), 0.01)
    payloads = {
        0: Payload({"head": start + 0.01}, 0, 5),
        1: Payload({"head": start + factor * 0.01}, 1, 5),
    }
    valid, reasons = validate_uploads(payloads, {"head": start}, TRAINING, TASK, {0: 5, 1: 5})
    assert set(reasons) == rejected
    assert len(valid) == 2 - len(rejected)
