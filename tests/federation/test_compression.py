"""``--compress``: codes of uploads, by hand, by their error bounds, and in runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fczoo import FczooError, Settings, create_method
from fczoo.core.payload import Payload
from fczoo.core.registry import COMPRESSIONS
from fczoo.core.tree import nbytes
from fczoo.core.types import Exchange
from fczoo.federation.batches import Client
from fczoo.federation.compression import (
    decode_upload,
    encode_upload,
    encoded_form,
    make_compression,
)
from fczoo.runner.cost import first_round
from helpers_engine import TASK, run_to_end

SPECS = ("int8", "fp16", "topk:0.3", "lowrank:2")


def test_int8_by_hand():
    """Compare with the scale 254 / 127 = 2; 3 / 2 and 5 / 2 are rounded to even numbers."""
    code = make_compression("int8").encode(torch.tensor([[254.0, 3.0], [-254.0, 5.0]]))
    assert code["values"].tolist() == [[127, 2], [-127, 2]] and code["scale"] == 2
    assert code["values"].dtype == torch.int8 and nbytes(code) == 4 + 4
    zero = make_compression("int8").encode(torch.zeros(3))
    assert zero["values"].tolist() == [0, 0, 0]


def test_fp16_by_hand():
    """Round 2051 to a multiple of 2, and clamp 1e6 to the largest number of float16."""
    code = make_compression("fp16").encode(torch.tensor([2051.0, 1e6, -0.5]))
    assert code["values"].tolist() == [2052, 65504, -0.5] and nbytes(code) == 6


def test_topk_by_hand():
    """Keep three of ten entries; of the equal ones, -2, keep the first."""
    value = torch.tensor([1.0, -2, 0, 5, -2, 0, 0, 3, 0, -2])
    code = make_compression("topk:0.3").encode(value)
    assert code["positions"].tolist() == [1, 3, 7] and code["values"].tolist() == [-2, 5, 3]
    assert nbytes(code) == 3 * (4 + 4)
    decoded = make_compression("topk:0.3").decode(code, value)
    assert decoded.tolist() == [0, -2, 0, 5, 0, 0, 0, 3, 0, 0]
    assert len(make_compression("topk:0.01").encode(value)["values"]) == 1  # at least one


def test_lowrank_by_hand():
    """Encode a product of two vectors exactly, and the larger direction of diag(4, 1)."""
    matrix = torch.tensor([[1.0, 2, 3, 4], [2, 4, 6, 8], [-1, -2, -3, -4]], dtype=torch.float64)
    rank_one = make_compression("lowrank:1")
    code = rank_one.encode(matrix)
    assert nbytes(code) == 8 * (3 + 4)
    torch.testing.assert_close(rank_one.decode(code, matrix), matrix, rtol=1e-12, atol=1e-12)
    diagonal = torch.diag(torch.tensor([4.0, 1.0], dtype=torch.float64))
    close = make_compression("lowrank:1,iterations=20").decode(
        make_compression("lowrank:1,iterations=20").encode(diagonal), diagonal
    )
    assert close.flatten().tolist() == pytest.approx([4, 0, 0, 0], abs=1e-9)


def bound(spec: str, value: torch.Tensor) -> float:
    """Return the largest Euclidean error that a code may have."""
    size, flat = value.numel(), value.abs().flatten().sort().values
    if spec == "int8":
        return float(flat[-1]) / 127 / 2 * size**0.5 * 1.001
    if spec == "fp16":
        return float(value.norm()) * 2.0**-11 + size**0.5 * 2.0**-25
    if spec.startswith("topk"):
        return float(flat[: size - max(1, round(0.3 * size))].norm()) * (1 + 1e-9)
    return float(value.norm()) * (1 + 1e-6)  # the error of a projection


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=40, deadline=None, database=None)
@given(st.data())
def test_codes_match_layout_and_error_bound(spec, data):
    rows, columns, seed = (data.draw(st.integers(1, n)) for n in (6, 9, 10**6))
    scale = 10.0 ** data.draw(st.integers(-6, 4))
    rng = torch.Generator().manual_seed(seed)
    value = scale * torch.randn(rows, columns, generator=rng, dtype=torch.float64)
    compression = make_compression(spec)
    code, again, form = (
        compression.encode(value),
        compression.encode(value),
        compression.layout(value),
    )
    assert code.keys() == form.keys() == again.keys()
    for part, tensor in code.items():
        assert (tensor.shape, tensor.dtype) == (form[part].shape, form[part].dtype)
        assert torch.equal(tensor, again[part])
    decoded = compression.decode(code, value)
    assert (decoded.shape, decoded.dtype) == (value.shape, value.dtype)
    assert float((decoded - value).norm()) <= bound(spec, value)


def test_every_compression_is_tested():
    assert {spec.partition(":")[0] for spec in SPECS} == set(COMPRESSIONS.names())


# --- uploads


START = {"head.weight": torch.full((4, 6), 0.5)}
EXCHANGE = Exchange(TASK, 0)


@pytest.mark.parametrize("spec", SPECS)
def test_error_feedback_sums_to_exact_total(spec):
    """Compare decoded changes plus the last residual with the sum of all changes."""
    compression, rng, residuals = make_compression(spec), torch.Generator().manual_seed(0), {}
    exact = decoded = torch.zeros(4, 6)
    for _ in range(5):
        change = torch.randn(4, 6, generator=rng)
        upload = Payload({**START, "head.weight": START["head.weight"] + change}, 3, 7)
        encoded, residuals = encode_upload(compression, upload, START, residuals)
        arrived = decode_upload(compression, encoded, START)
        assert arrived.keys() == upload.keys() and (arrived.client, arrived.num_samples) == (3, 7)
        exact, decoded = exact + change, decoded + arrived["head.weight"] - START["head.weight"]
    torch.testing.assert_close(decoded + residuals["head.weight"], exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_statistics_are_exact_and_code_bytes_are_counted(spec):
    compression, sums = make_compression(spec), torch.randn(3, 50)
    upload = Payload({**START, "class.sum": sums})
    encoded, _ = encode_upload(compression, upload, START, {})
    assert encoded["class.sum"] is sums
    size = {"int8": 24 + 4, "fp16": 48, "topk:0.3": 7 * 8, "lowrank:2": 4 * 2 * (4 + 6)}[spec]
    assert nbytes(encoded.tensors) == size + 600
    assert nbytes(encoded_form(compression, upload, START).tensors) == nbytes(encoded.tensors)


def test_tensor_is_uncompressed_if_code_is_not_smaller():
    upload = Payload({"w": torch.ones(2, 2)})
    encoded, residuals = encode_upload(make_compression("lowrank:4"), upload, dict(upload), {})
    assert encoded["w"] is upload["w"] and not residuals


def test_codes_of_uncompressed_tensors_are_ignored():
    code = {"w@values": torch.empty(0), "w@positions": torch.empty(0, dtype=torch.int32)}
    decoded = decode_upload(make_compression("topk"), Payload(code), {"w": torch.empty(0, 3)})
    assert decoded.keys() == code.keys()


def test_damaged_code_is_rejected(make_bench):
    uplink = make_bench(compress="topk:0.2").uplink(create_method("fedavg", tune="head"), 0)
    shared = {"head.weight": torch.zeros(2, 8), "head.bias": torch.zeros(2)}
    valid = uplink.send([Payload(dict(shared), 0, 1)], shared, EXCHANGE)[0]
    values, positions = (valid[f"head.weight@{part}"] for part in ("values", "positions"))
    damage = [
        {"head.weight@positions": positions + 16},
        {"head.weight@positions": positions.flip(0)},
        {"head.weight@positions": positions.long()},
        {"head.weight@values": values[:2]},
        {"head.weight@values": values * float("nan")},
    ]
    uploads = [valid, *(Payload({**valid, **part}, k, 1) for k, part in enumerate(damage, 1))]
    clients = [Client(p.client, torch.arange(1)) for p in uploads]
    arrival = uplink.arrive(uploads, clients, shared, EXCHANGE)
    assert [p.client for p in arrival.payloads] == [0]
    assert arrival.payloads[0].keys() == shared.keys()
    reasons = [entry["reason"] for entry in arrival.rejected]
    assert reasons == ["lacks head.weight"] * 4 + ["head.weight is not finite"]
    assert arrival.total_bytes == sum(nbytes(p.tensors) + 16 for p in uploads)


def test_clipped_uploads_have_no_error_feedback(make_bench):
    method, change = create_method("fedavg", tune="head"), torch.rand(2, 8)
    shared = {"head.weight": torch.zeros(2, 8), "head.bias": torch.zeros(2)}
    upload = Payload({**shared, "head.weight": change}, 0, 1)
    for clip, kept in ((None, True), (5.0, False)):
        residuals: dict[int, dict[str, torch.Tensor]] = {}
        uplink = make_bench(compress="topk:0.2", dp_clip=clip).uplink(method, 0)
        uplink.send([upload], shared, EXCHANGE, residuals)
        assert bool(residuals) == kept


# --- runs


@pytest.mark.parametrize("spec", SPECS)
def test_batched_clients_send_same_codes(make_bench, small_method, spec):
    method = small_method("hgp", optimizer="sgd")
    one, together = (
        run_to_end(make_bench(compress=spec, together=n, epochs=1, tasks=3), method) for n in (1, 3)
    )
    assert not one.result.rejected
    for name, value in one.state.items():
        torch.testing.assert_close(together.state[name], value, rtol=1e-6, atol=1e-7)
    assert one.result.bytes_up == together.result.bytes_up


def test_compression_saves_bytes_and_stores_residuals(make_bench, small_method):
    method = small_method("fedavg", tune="head")
    plain, ours = (
        run_to_end(make_bench(compress=spec, epochs=1), method) for spec in (None, "int8")
    )
    weight, bias = (plain.state[f"head.{name}"].numel() for name in ("weight", "bias"))
    saved = 8 * (weight + bias) - (weight + bias + 2 * 4)
    assert plain.result.bytes_up - ours.result.bytes_up == saved * plain.result.client_rounds
    assert ours.result.client_storage == plain.result.client_storage + 8 * (weight + bias)


def test_dry_run_counts_code_bytes():
    method = create_method("fedavg", "digits", tune="head")
    first = {
        spec: first_round(method, Settings.for_dataset("digits", compress=spec)).upload_bytes
        for spec in (None, "topk:0.1")
    }
    weight, bias = 10 * 128, 10  # of float32
    assert first[None] == 4 * (weight + bias)
    assert first["topk:0.1"] == 8 * (weight // 10 + 1)


def test_compression_without_training_is_rejected(make_bench):
    with pytest.raises(
        FczooError, match="compress int8 applies to trained tensors, but fedncm trains"
    ):
        make_bench(compress="int8").check(create_method("fedncm"))
