"""Sites that send invalid or hostile messages: the run continues without them."""

import re
import tracemalloc
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save

from fczoo import FczooError
from fczoo.federation.remote import unpack_request
from fczoo.sites.federation_config import check_image_counts, read_agreement, write_agreement
from fczoo.sites.messages import (
    ENROLMENT,
    LARGEST_HEADER,
    UPLOAD,
    Enrolment,
    InvalidMessage,
    Refusal,
    UploadInfo,
    deserialize,
    is_call,
    refusal_reason,
    serialize,
)
from fczoo.sites.messages import REFUSAL as REFUSAL_FORM
from fczoo.sites.server import Sites
from fczoo.sites.site_data import server_scenario
from helpers_sites import LocalConnection, server_of, sites_of

CPU = torch.device("cpu")


class HostileConnection(LocalConnection):
    """Change the answers of site 0 after its enrolment."""

    def __init__(self, sites, change):
        super().__init__(sites)
        self.change = change

    def __call__(self, questions, limit, /):
        enrols = not self.passed
        answers = dict(super().__call__(questions, limit))
        if 0 in answers and not enrols:
            answers[0] = self.change(answers[0])
        return answers


def change_upload(change_info=None, change_tensors=None):
    def change(answer):
        info, tensors = deserialize(UPLOAD, answer, UploadInfo)
        info = replace_fields(info, **(change_info or {}))
        tensors = {n: change_tensors(v) for n, v in tensors.items()} if change_tensors else tensors
        return serialize(UPLOAD, info, tensors)

    return change


def replace_fields(info, **changes):
    fields = {name: getattr(info, name) for name in info.__struct_fields__}
    return type(info)(**{**fields, **changes})


def change_dtype(dtype):
    return change_upload(change_tensors=lambda v: v.to(dtype))


CHANGES = {
    "float64": (change_dtype(torch.float64), "is float64, expected float32"),
    "float16": (change_dtype(torch.float16), "is float16, expected float32"),
    "bfloat16": (change_dtype(torch.bfloat16), "is bfloat16, expected float32"),
    "float8": (change_dtype(torch.float8_e4m3fn), "is float8_e4m3fn, expected float32"),
    "int64": (change_dtype(torch.int64), "is int64, expected float32"),
    "complex": (change_dtype(torch.complex64), "is torch.complex64, expected dense real numbers"),
    "no elements": (change_upload(change_tensors=lambda v: v[:0]), "has shape (0,"),
    "size zero": (change_upload(change_tensors=lambda v: v.new_empty((3, 0))), "has shape (3, 0)"),
    "exemplars": (
        change_upload({"exemplars": []}),
        "sent exemplar counts of 0 tasks, expected 3",
    ),
    "no images": (change_upload({"images": 0}), "claims 0 images"),
    "many images": (change_upload({"images": 10_000_000}), "claims 10000000 images, but has"),
    "refusal": (lambda _: serialize(REFUSAL_FORM, Refusal("no\x1b[2J" * 9999)), "refused: no[2Jno"),
}


def writes_complex_numbers() -> bool:
    try:
        return bool(save({"a": torch.zeros(1, dtype=torch.complex64)}))
    except KeyError:
        return False


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("method", ["fedavg", "icarl"])
def test_hostile_site_does_not_end_run(make_bench, small_method, tmp_path, caplog, name, method):
    """Reject its uploads also in the second task, where only two sites have images."""
    change, reason = CHANGES[name]
    if name == "complex" and not writes_complex_numbers():
        pytest.skip("this version of safetensors writes no complex numbers")
    bench = make_bench(torch.float32, rounds=1, epochs=1, batch_size=8)
    options = {} if method == "icarl" else {"tune": "head"}
    chosen = small_method(method, **options)
    connection = HostileConnection(sites_of(bench, chosen, tmp_path), change)
    result = server_of(bench, chosen, connection).run()
    assert len(result.accuracy) == 3
    assert {r["client"] for r in result.rejected} == {0}
    assert all(reason in r["reason"] for r in result.rejected)
    for record in caplog.records:
        line = record.getMessage()
        assert line.isprintable() and len(line) < 300


def test_local_steps_above_schedule_are_rejected(make_bench, small_method, tmp_path):
    """Reject local steps of FedNova above the number that the schedule allows.

    A site with n images has 2 epochs of ceil(n / 3) steps in each task.
    """
    bench = make_bench(epochs=2, rounds=1, batch_size=3, local="fednova")
    method = small_method("fedavg", tune="head")

    def change(answer):
        info, tensors = deserialize(UPLOAD, answer, UploadInfo)
        steps = {n: v + 1 for n, v in tensors.items() if n == "local_steps"}
        return serialize(UPLOAD, info, {**tensors, **steps})

    result = server_of(
        bench, method, HostileConnection(sites_of(bench, method, tmp_path), change)
    ).run()
    images = [len(task[0]) for task in bench.partition.tasks]
    steps = [2 * -(-n // 3) for n in images]
    assert [(entry["client"], entry["reason"]) for entry in result.rejected] == [
        (0, f"local_steps has a count of {s + 1}, but the limit is {s} for {n} images")
        for s, n in zip(steps, images, strict=True)
        if n
    ]


class SometimesHostileConnection(LocalConnection):
    """Change the answers of site 0 while only this site gets questions."""

    def __init__(self, sites, change):
        super().__init__(sites)
        self.change, self.alone = change, 0

    def __call__(self, questions, limit, /):
        answers = super().__call__(questions, limit)
        if list(questions) == [0]:
            self.alone += 1
            answer = self.change(answers[0])
            return {} if answer is None else {0: answer}
        return answers


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("fedavg", "2 exchanges with"),  # two rounds
        ("fedncm", "1 exchange with"),  # statistics as the task begins
        ("fedclm", "3 exchanges with"),  # two rounds, statistics as the task ends
        ("dolfin", "4 exchanges with"),  # two rounds, statistics at both ends
    ],
)
def test_hostile_only_site_of_task_does_not_end_run(make_bench, small_method, tmp_path, name, note):
    """Reject all uploads of the second task, of which only the hostile site has images."""
    bench = make_bench(epochs=1, rounds=2, batch_size=8)
    tasks = list(bench.partition.tasks)
    tasks[1] = type(tasks[1])([tasks[1][0], tasks[1][0][:0], tasks[1][0][:0]])
    bench = replace(bench, partition=replace(bench.partition, tasks=tuple(tasks)))
    change = {"fedavg": lambda _: None, "fedncm": change_upload({"images": 10**6})}.get(
        name, lambda _: serialize(REFUSAL_FORM, Refusal("no time"))
    )
    connection = SometimesHostileConnection(sites_of(bench, small_method(name), tmp_path), change)
    run = server_of(bench, small_method(name), connection)
    result = run.run()
    assert connection.alone and len(result.accuracy) == 3
    assert {entry["task"] for entry in result.skipped} == {1}
    assert result.remark.endswith(f"{note} fewer than 1 valid upload: the state did not change")
    reasons = {"fedavg": "dropped out", "fedncm": "claims 1000000 images, but has"}
    for entry in result.rejected:
        assert entry["client"] == 0
        assert entry["reason"].startswith(reasons.get(name, "refused: no time"))


def test_too_few_uploads_are_not_merged(make_bench, small_method, tmp_path, monkeypatch):
    """Require valid uploads of three sites; one site never sends one."""
    method, bench = small_method("fedavg"), make_bench(epochs=1, rounds=1, min_clients=3)
    connection = HostileConnection(sites_of(bench, method, tmp_path), change_upload({"images": 0}))
    run, merged = server_of(bench, method, connection), []
    monkeypatch.setattr(run.server, "merge", lambda *uploads: merged.append(uploads))
    result = run.run()
    assert len(result.accuracy) == 3 and not merged
    assert [entry["moment"] for entry in result.skipped if entry["moment"] == 0] == [0, 0, 0]


def test_site_failure_at_task_end_is_recorded(make_bench, small_method, tmp_path):
    """Record refusals of site 1 when sites choose the exemplars of iCaRL."""
    bench, method = make_bench(epochs=1, rounds=1), small_method("icarl")

    class RefusingConnection(LocalConnection):
        def __call__(self, questions, limit, /):
            answers = dict(super().__call__(questions, limit))
            if 1 in answers and b"after_rounds" in questions[1]:
                answers[1] = serialize(REFUSAL_FORM, Refusal("no disk"))
            return answers

    result = server_of(bench, method, RefusingConnection(sites_of(bench, method, tmp_path))).run()
    assert result.rejected == [
        {"task": t, "moment": "after_rounds", "client": 1, "reason": "refused: no disk"}
        for t in range(3)
    ]


def test_server_without_sites_ends_run(make_bench, small_method, tmp_path):
    bench = make_bench(epochs=1, rounds=3)

    class LosingConnection(LocalConnection):
        def __call__(self, questions, limit, /):
            lost = {k for k in questions if len(self.passed) >= 6}  # after enrolment and a round
            answers = super().__call__(questions, limit)
            return {k: answer for k, answer in answers.items() if k not in lost}

    run = server_of(
        bench,
        small_method("fedavg"),
        LosingConnection(sites_of(bench, small_method("fedavg"), tmp_path)),
    )
    words = "no site sends valid uploads in task 1, round 2; site paris: dropped out; site rome: "
    with pytest.raises(
        FczooError, match=f"^{words}.*; start the sites, then the server to resume$"
    ):
        run.run()


def test_image_count_above_agreement_is_rejected(make_bench, small_method):
    def connection(questions, limit):
        return dict.fromkeys(questions, serialize(ENROLMENT, Enrolment([1, 10_000_000, 1], None)))

    with pytest.raises(
        FczooError,
        match=r"paris has 10000000 images of task 2, but the agreement allows 100000; agree on",
    ):
        server_of(make_bench(), small_method("fedavg"), connection)
    check_image_counts("paris", [10, 0], {"paris": 10, "rome": 5})
    with pytest.raises(FczooError, match="site rome has 6 images of task 1"):
        check_image_counts("rome", [6], {"paris": 10, "rome": 5})


def test_agreement_reads_max_images(tmp_path):
    write_agreement(tmp_path, "fedncm", ["paris", "rome"], [["a"], ["b"]], {"rounds": 1})
    assert read_agreement(tmp_path).max_images == 100_000  # an agreement without it
    run = tmp_path / "run.toml"
    text = run.read_text()
    run.write_text(f"max_images = 300\n{text}")
    assert read_agreement(tmp_path).max_images == 300
    run.write_text(f"max_images = {{paris = 300, rome = 20}}\n{text}")
    assert read_agreement(tmp_path).max_images == {"paris": 300, "rome": 20}
    run.write_text(f"max_images = {{paris = 300}}\n{text}")
    with pytest.raises(
        FczooError, match="max_images must name each of the sites, or be one number"
    ):
        read_agreement(tmp_path)


def test_server_memory_depends_on_largest_site_only(make_bench):
    """Limit the memory for ten sites with 100,000 images of each of three tasks.

    The server stores 2 arrays of 300,000 int64 and 4 bytes per image, instead of 2 x 24 MB.
    """
    bench = make_bench(clients=10)
    enrolments = [Enrolment([100_000] * 3, None)] * 10
    tracemalloc.start()
    scenario = server_scenario(bench.settings, bench.stream, bench.backbone, bench.test, enrolments)
    size, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [len(c.index) for c in scenario.clients(bench.stream.tasks[1])] == [100_000] * 10
    assert size < 25e6
    assert peak < 40e6


def test_refusal_reason_is_short_line():
    answer = serialize(REFUSAL_FORM, Refusal("no\x1b[31m\nway " + "x " * 1_000_000))
    sites = Sites(["paris"], lambda *_: {0: answer})
    assert list(sites.uploads([0], answer, 10)) == [None]
    assert sites.failures[0].startswith("refused: no[31m way x x x")
    assert len(sites.failures[0]) < 300
    assert len(refusal_reason(answer)) > 2_000_000


def test_message_header_size_is_limited():
    """Limit the part of an answer that becomes Python objects, however many tensors it has."""
    answer = serialize(REFUSAL_FORM, Refusal("x" * (LARGEST_HEADER + 1)))
    reason = rf"its header has \d+ bytes, but the limit is {LARGEST_HEADER}"
    for read in (refusal_reason, is_call, lambda content: deserialize(UPLOAD, content, UploadInfo)):
        with pytest.raises(InvalidMessage, match=reason):
            read(answer)
    sites = Sites(["paris"], lambda *_: {0: answer})
    assert list(sites.uploads([0], b"", 10)) == [None]
    assert re.fullmatch(f"sent an invalid upload: {reason}", sites.failures[0])


def test_divergence_caused_by_one_site_does_not_end_run(make_bench, small_method, tmp_path):
    """Let the flow of AF-FCL overflow: site 1 uploads 900 times its change."""
    bench, method = make_bench(torch.float32, rounds=1), small_method("affcl")

    class ScalingConnection(LocalConnection):
        def __call__(self, questions, limit, /):
            answers = dict(super().__call__(questions, limit))
            enrols = len(self.passed) == 3
            request = None if enrols or 1 not in answers else unpack_request(questions[1], CPU)[0]
            if request and request.boundary is None:
                state, (info, tensors) = request.state, deserialize(UPLOAD, answers[1], UploadInfo)
                scaled = {n: state[n] + 900 * (v - state[n]) for n, v in tensors.items()}
                answers[1] = serialize(UPLOAD, info, scaled)
            return answers

    result = server_of(bench, method, ScalingConnection(sites_of(bench, method, tmp_path))).run()
    assert len(result.accuracy) == 3
    last = [r["reason"] for r in result.rejected if r["task"] == 2]
    assert last == ["diverged, loss nan"] * 3
    assert result.remark.endswith("with fewer than 1 valid upload: the state did not change")


def test_divergence_in_first_round_ends_run(make_bench, small_method, tmp_path):
    bench, method = make_bench(torch.float32, rounds=2), small_method("affcl", lr=1e30)
    with pytest.raises(FczooError, match=r"no site sends valid uploads in task 1, round 1.*lower"):
        server_of(bench, method, LocalConnection(sites_of(bench, method, tmp_path))).run()


def test_too_few_uploads_for_aggregator_keep_state(make_bench, small_method, tmp_path):
    """Skip the second task: two sites have images, but ``trimmed_mean:1`` needs three."""
    bench = make_bench(epochs=1, rounds=1, aggregator="trimmed_mean:1")
    method = small_method("fedavg", tune="head")
    connection = LocalConnection(sites_of(bench, method, tmp_path))
    result = server_of(bench, method, connection).run()
    assert len(result.accuracy) == 3
    assert [entry["task"] for entry in result.skipped] == [1]
    note = "1 exchange with too few uploads for trimmed_mean:1: the state did not change"
    assert result.remark.endswith(note)
