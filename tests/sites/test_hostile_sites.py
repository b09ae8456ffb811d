"""Sites that send what no honest site sends: the run continues without them."""

import tracemalloc

import pytest
import torch

from fczoo import FczooError
from fczoo.sites.federation_config import check_image_counts, read_agreement, write_agreement
from fczoo.sites.messages import (
    ENROLMENT,
    UPLOAD,
    About,
    Enrolment,
    Refusal,
    deserialize,
    refusal_reason,
    serialize,
)
from fczoo.sites.messages import REFUSAL as REFUSAL_FORM
from fczoo.sites.server import Sites
from fczoo.sites.site_data import server_world
from helpers_sites import LocalConnection, server_of, sites_of


class Hostile(LocalConnection):
    """Change what site 0 answers, after its enrolment."""

    def __init__(self, sites, change):
        super().__init__(sites)
        self.change = change

    def __call__(self, questions, limit, /):
        enrols = not self.passed
        answers = dict(super().__call__(questions, limit))
        if 0 in answers and not enrols:
            answers[0] = self.change(answers[0])
        return answers


def upload(change_about=None, change_tensors=None):
    def change(answer):
        about, tensors = deserialize(UPLOAD, answer, About)
        about = replace_fields(about, **(change_about or {}))
        tensors = {n: change_tensors(v) for n, v in tensors.items()} if change_tensors else tensors
        return serialize(UPLOAD, about, tensors)

    return change


def replace_fields(about, **changes):
    fields = {name: getattr(about, name) for name in about.__struct_fields__}
    return type(about)(**{**fields, **changes})


def as_type(dtype):
    return upload(change_tensors=lambda v: v.to(dtype))


CHANGES = {
    "float64": (as_type(torch.float64), "is float64, expected float32"),
    "float16": (as_type(torch.float16), "is float16, expected float32"),
    "bfloat16": (as_type(torch.bfloat16), "is bfloat16, expected float32"),
    "float8": (as_type(torch.float8_e4m3fn), "is float8_e4m3fn, expected float32"),
    "int64": (as_type(torch.int64), "is int64, expected float32"),
    "complex": (as_type(torch.complex64), "is torch.complex64, expected dense real numbers"),
    "no elements": (upload(change_tensors=lambda v: v[:0]), "has shape (0,"),
    "size zero": (upload(change_tensors=lambda v: v.new_empty((3, 0))), "has shape (3, 0)"),
    "exemplars": (upload({"exemplars": []}), "dropped out"),
    "no images": (upload({"images": 0}), "claims 0 samples"),
    "many images": (upload({"images": 10_000_000}), "claims 10000000 samples, it has"),
    "refusal": (lambda _: serialize(REFUSAL_FORM, Refusal("no\x1b[2J" * 9999)), "dropped out"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("method", ["fedavg", "icarl"])
def test_one_site_does_not_end_a_run(make_bench, small_method, tmp_path, caplog, name, method):
    """It is the first of two sites in the second task, so no majority says what is valid."""
    change, reason = CHANGES[name]
    bench = make_bench(torch.float32, rounds=1, epochs=1, batch_size=8)
    options = {} if method == "icarl" else {"tune": "head"}
    chosen = small_method(method, **options)
    way = Hostile(sites_of(bench, chosen, tmp_path), change)
    result = server_of(bench, chosen, way).run()
    assert len(result.accuracy) == 3
    assert {r["client"] for r in result.rejected} == {0}
    assert all(reason in r["reason"] for r in result.rejected)
    for record in caplog.records:
        line = record.getMessage()
        assert line.isprintable() and len(line) < 300


def test_a_site_cannot_claim_more_images_than_agreed(make_bench, small_method):
    def way(questions, limit):
        return dict.fromkeys(questions, serialize(ENROLMENT, Enrolment([1, 10_000_000, 1], None)))

    with pytest.raises(
        FczooError,
        match=r"site paris has 10000000 images of task 2, but the agreement allows 100000; agree on",
    ):
        server_of(make_bench(), small_method("fedavg"), way)
    check_image_counts("paris", [10, 0], {"paris": 10, "rome": 5})
    with pytest.raises(FczooError, match="site rome has 6 images of task 1"):
        check_image_counts("rome", [6], {"paris": 10, "rome": 5})


def test_the_agreement_states_the_limit(tmp_path):
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


def test_a_server_needs_memory_for_the_largest_site_only(make_bench):
    """Ten sites with 100,000 images of each of three tasks: 2 arrays of 300,000 int64 and indices
    of 4 bytes per image, instead of 2 x 24 MB and more."""
    bench = make_bench(clients=10)
    enrolments = [Enrolment([100_000] * 3, None)] * 10
    tracemalloc.start()
    world = server_world(bench.settings, bench.stream, bench.backbone, bench.test, enrolments)
    size, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [len(c.index) for c in world.clients(bench.stream.tasks[1])] == [100_000] * 10
    assert size < 25e6
    assert peak < 40e6


def test_refusals_are_one_short_line():
    answer = serialize(REFUSAL_FORM, Refusal("no\x1b[31m\nway " + "x" * 30_000_000))
    sites = Sites(["paris"], lambda *_: {0: answer})
    with pytest.raises(FczooError) as caught:
        list(sites.uploads([0], answer, 10))
    assert str(caught.value).startswith("site paris: no[31m way ")
    assert len(str(caught.value)) < 300
    assert len(refusal_reason(answer)) > 30_000_000
