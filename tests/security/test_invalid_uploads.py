"""Broken and hostile clients: a server rejects their uploads, logs why, and the run continues."""

import json
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

from fczoo.core.errors import FczooError
from fczoo.core.payload import Payload, samples, whole_tensors
from fczoo.core.payload import rows as rows_of
from fczoo.core.registry import METHODS
from fczoo.core.training import Optim, Training
from fczoo.core.types import Exchange, Task
from fczoo.federation.callbacks import Callback
from fczoo.federation.client_engine import ClientEngine
from fczoo.security.upload_validation import LARGEST_NORM, UploadValidator, validate_uploads
from helpers_methods import quick_method

TASK = Task(0, 0, 2, 4, 2)
BEFORE = {"head": torch.zeros(2, 3)}
TRAINING = Training({"head": Optim()}, uploads={"gauss.": rows_of("count", "var")})


def upload(number: int, rows: int = 2, **changes):
    rng = torch.Generator().manual_seed(number)
    gauss = {
        "gauss.label": torch.arange(rows),
        "gauss.count": torch.ones(rows),
        "gauss.var": torch.ones(rows, 3),
    }
    client, num_samples = changes.pop("client", number), changes.pop("num_samples", 5)
    payload = {"head": torch.randn(2, 3, generator=rng), **gauss}
    payload |= {k.replace("__", "."): v for k, v in changes.items()}
    return Payload({k: v for k, v in payload.items() if v is not None}, client, num_samples)


def validate_with_others(bad, count: int = 4):
    payloads = {**{k: upload(k, rows=k % 3) for k in range(1, count)}, 0: bad}
    return validate_uploads(payloads, BEFORE, TRAINING, TASK, dict.fromkeys(payloads, 5))


NAN, INF = torch.full((2, 3), math.nan), torch.full((2, 3), math.inf)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Payload({}), "dropped out"),
        (upload(0, head=NAN), "head is not finite"),
        (upload(0, head=INF), "head is not finite"),
        (upload(0, head=torch.zeros(3, 2)), r"head has shape (3, 2), expected (2, 3)"),
        (
            upload(0, head=torch.zeros(2, 3, dtype=torch.int64)),
            "head is int64, expected float32",
        ),
        (upload(0, head=None), "lacks head"),
        (upload(0, gauss__var=None), "lacks gauss.var"),
        (upload(0, extra=torch.zeros(1)), "sent extra, which the server did not request"),
        (upload(0, gauss__var=torch.ones(1, 3)), "gauss.var has shape (1, 3), expected (2, 3)"),
        (upload(0, gauss__var=-torch.ones(2, 3)), "gauss.var has a variance below 0"),
        (upload(0, gauss__count=-torch.ones(2)), "gauss.count has a count below 0"),
        (upload(0, client=2), "claims to be client 2"),
        (upload(0, num_samples=-5), "claims -5 images"),
        (
            upload(0, head=torch.zeros(2, 3).to_sparse()),
            "head is torch.sparse_coo, expected dense real numbers",
        ),
        (
            upload(0, head=torch.zeros(2, 3, dtype=torch.complex64)),
            "head is torch.complex64, expected dense",
        ),
        (
            upload(0, gauss__label=torch.tensor([0, 10**6])),
            "gauss.label names class 1000000; the client may have 0",
        ),
        (
            upload(0, gauss__label=torch.tensor([-1, 1])),
            "gauss.label has a count below 0",
        ),
        (upload(0, gauss__label=torch.tensor([1, 1])), "gauss.label names a class twice"),
        (upload(0, head=torch.full((2, 3), 1e12)), "its update has norm 2.45e+12"),
        (upload(0, head=torch.full((2, 3), 1e30)), "head has a value of 1e+30, but the limit"),
        (upload(0, num_samples=6), "claims 6 images, but has 5"),
        (upload(0, num_samples=2**62), "claims 4611686018427387904 images, but has 5"),
        (
            upload(0, gauss__count=torch.tensor([3.0, 3.0])),
            "gauss.count adds up to 6, more than 5 images",
        ),
        (
            upload(0, gauss__count=torch.full((2,), 2**62)),
            "gauss.count is int64, expected float32",
        ),
        (
            upload(0, gauss__count=torch.full((2,), 2.0**40)),
            "gauss.count adds up to 2.19902e+12, more than 5",
        ),
    ],
)
def test_invalid_upload_is_rejected_with_reason(bad, reason):
    valid, reasons = validate_with_others(bad)
    assert [p.client for p in valid] == [1, 2, 3]
    assert reasons.keys() == {0}
    assert reason in reasons[0]
    assert "\n" not in reasons[0]


def test_counts_are_bounded_by_images_and_epochs():
    """Limit ``usage`` by the images of the client and ``local_steps`` by its steps."""
    uploads = {"usage": whole_tensors("counts"), "local_steps": whole_tensors("counts")}
    training, limits = replace(TRAINING, uploads=uploads), {0: {"usage": 10, "local_steps": 4}}

    def reasons(usage, steps):
        names = {"gauss.label": None, "gauss.count": None, "gauss.var": None}
        counts = {"usage": torch.tensor(usage), "local_steps": torch.tensor(steps)}
        uploads = {0: upload(0, **names, **counts)}
        return validate_uploads(uploads, BEFORE, training, TASK, {0: 5}, counts=limits)[1]

    assert reasons([10.0, 0.0], 4.0) == {}
    assert reasons([10.0, 11.0], 4.0) == {
        0: "usage has a count of 11, but the limit is 10 for 5 images"
    }
    assert reasons([9.0, 9.0], 1e6) == {
        0: "local_steps has a count of 1e+06, but the limit is 4 for 5 images"
    }


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (
            {"gauss__label": torch.tensor([0.0, 1.0])},
            "gauss.label is float32, expected an integer type",
        ),
        (
            {"gauss__label": torch.tensor([[0], [1]])},
            "gauss.label has rows of shape (1,), expected a number",
        ),
        (
            {"gauss__count": torch.ones(2, 3)},
            "gauss.count has rows of shape (3,), expected a number",
        ),
        ({"gauss__var": torch.ones(2)}, "gauss.var has rows of shape (), expected a vector"),
        (
            {"gauss__cov": torch.ones(2, 3, 4)},
            "gauss.cov has rows of shape (3, 4), expected a square matrix",
        ),
        ({"gauss__cov": torch.ones(2, 4, 4)}, "expected a square matrix of side 3"),
    ],
)
def test_statistics_are_checked_against_declaration(bad, reason):
    """Check a statistic against its declaration.

    It is the only upload, so it cannot be compared with others.
    """
    training = replace(TRAINING, uploads={"gauss.": rows_of("count", "var", "cov")})
    valid = {"gauss__cov": torch.eye(3).expand(2, 3, 3)}
    assert validate_uploads({0: upload(0, **valid)}, BEFORE, training, TASK, {0: 5})[1] == {}
    reasons = validate_uploads({0: upload(0, **{**valid, **bad})}, BEFORE, training, TASK, {0: 5})[
        1
    ]
    assert reason in reasons[0]


def test_valid_uploads_may_differ_in_rows_and_norm():
    long_upload = upload(0, head=0.5 * LARGEST_NORM * torch.ones(2, 3))
    assert (
        validate_with_others(upload(0, rows=0))[1]
        == validate_with_others(upload(0, rows=1))[1]
        == validate_with_others(long_upload)[1]
        == {}
    )


def test_gradients_of_images_are_optional_but_validated():
    training = replace(
        TRAINING, uploads={**TRAINING.uploads, "image.": samples("gradients of single images")}
    )
    some = [upload(k, image__a=torch.ones(k, 4), image__b=torch.ones(k, 2, 2)) for k in range(1, 3)]
    invalid = upload(3, image__a=torch.ones(2, 4), image__b=torch.ones(1, 2, 2))
    valid, reasons = validate_uploads(
        {0: upload(0), 1: some[0], 2: some[1], 3: invalid},
        BEFORE,
        training,
        TASK,
        dict.fromkeys(range(4), 5),
    )
    assert len(valid) == 3
    assert reasons == {3: "image.b has shape (1, 2, 2), expected (2, 2, 2)"}


def test_round_with_too_few_valid_uploads_raises():
    validator = UploadValidator("toy", TRAINING, min_valid=2)
    with pytest.raises(
        FczooError, match=r"1 of 1 uploads are valid, 2 needed; lower --min-clients"
    ):
        validator.validate({0: upload(0)}, {0: 5}, {}, Exchange(TASK, 2))
    with pytest.raises(
        FczooError,
        match=(
            r"toy stopped in task 1, round 3: 1 of 2 uploads are valid, 2 needed; client 1: "
            r"dropped out"
        ),
    ):
        validator.validate({0: upload(0)}, {0: 5, 1: 5}, {}, Exchange(TASK, 2))
    with pytest.raises(
        FczooError,
        match=r"toy diverged .* client 1: diverged, loss nan; lower its learning rates",
    ):
        validator.validate(
            {0: upload(0), 1: Payload({})},
            {0: 5, 1: 5},
            {},
            Exchange(TASK, 2),
            {0: 1.0, 1: math.nan},
        )


class Log(Callback):
    def __init__(self):
        self.records = []

    def round(self, record):
        self.records.append(record)


def spoil_first(payloads):
    """Make the first client's trained tensors NaN."""
    first, *others = payloads
    broken = {k: v * math.nan if v.is_floating_point() else v for k, v in first.items()}
    return [first.holding(broken), *others]


def repeat_first(payloads):
    """Let the first client send its class statistics 50 times, as if it were 50 clients."""
    names = [n for n in payloads[0] if n.startswith(("gauss.", "local."))]
    many = {n: payloads[0][n].repeat(50, *[1] * (payloads[0][n].dim() - 1)) for n in names}
    return [payloads[0].holding({**payloads[0], **many}), *payloads[1:]]


@pytest.mark.parametrize(
    ("name", "options"), [("hgp", {}), ("fppl", {}), ("ccvr", {"calibrate": "each_round"})]
)
def test_client_with_repeated_rows_is_rejected(make_bench, small_method, name, options):
    bench, train = make_bench(rounds=1, epochs=1, outliers=4.0), ClientEngine.train
    with mock.patch.object(ClientEngine, "train", lambda *a: repeat_first(train(*a))):
        result = bench.run(small_method(name, **options))
    rejections = [r for r in result.rejected if "names a class twice" in r["reason"]]
    assert len(rejections) == 3 and result.rejected == rejections


@pytest.mark.parametrize("name", [name for name in METHODS.names() if name != "local"])
def test_every_method_continues_without_broken_client(make_bench, name):
    """Continue without a broken client.

    It is rejected in every upload, in the log and in the result, whose numbers are all finite.
    """
    small = {"rounds": 1, "epochs": 1, "batch_size": 8}
    bench, method, log = make_bench(**small), quick_method(name), Log()
    train, collect = ClientEngine.train, ClientEngine.collect
    with (
        mock.patch.object(ClientEngine, "train", lambda *a: spoil_first(train(*a))),
        mock.patch.object(ClientEngine, "collect", lambda *a: spoil_first(collect(*a))),
    ):
        if method.training().data_scope == "pooled":
            with pytest.raises(FczooError, match="0 of 1 uploads are valid"):
                bench.run(method, 0, log)
            return
        result = bench.run(method, 0, log)
    assert result.rejected
    assert all(r["client"] == 0 and "not finite" in r["reason"] for r in result.rejected)
    assert all(math.isfinite(a) for row in result.accuracy for a in row)
    assert all(
        r["rejected"] and r["clients"][0] == r["rejected"][0]["client"] and math.isfinite(r["loss"])
        for r in log.records
    )
    json.dumps(result.rejected, allow_nan=False)


def test_dropped_clients_are_listed_and_depend_on_seed(make_bench, small_method):
    runs = [
        make_bench(drop_rate=0.4).run(small_method("fedavg", tune="head"), seed)
        for seed in (0, 0, 1)
    ]
    assert runs[0].rejected == runs[1].rejected != runs[2].rejected
    assert runs[0].rejected
    assert {r["reason"] for r in runs[0].rejected} == {"dropped out"}
    assert runs[0].client_rounds == 16 - len(runs[0].rejected)  # 3 + 3 + 2 + 2 + 3 + 3 were drawn


def test_too_few_clients_stop_the_run(make_bench, small_method):
    with pytest.raises(
        FczooError,
        match=r"fedavg stopped in task 2, round 1: 2 of 2 uploads are valid, 3 needed",
    ):
        make_bench(min_clients=3).run(small_method("fedavg", tune="head"))


# --- hostile clients


def test_attackers_match_setting_and_depend_on_seed(make_bench, small_method):
    bench = make_bench(attack="scale:5", attackers=0.67)
    attackers = {
        seed: bench.uplink(small_method("fedavg"), seed).attackers.numbers for seed in range(8)
    }
    assert all(len(numbers) == 2 for numbers in attackers.values())
    assert len(set(attackers.values())) > 1
    assert make_bench().uplink(small_method("fedavg"), 0).attackers.numbers == frozenset()
