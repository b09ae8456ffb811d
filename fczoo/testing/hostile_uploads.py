"""Check of a method's server against hostile uploads.

One upload of a recorded exchange is changed at random: its type, shape, values, memory layout,
names, sender or number of images. The server must accept or reject it, and merge accepted uploads.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fczoo.core.errors import FczooError, silence_warnings
from fczoo.core.payload import Payload
from fczoo.core.types import Exchange
from fczoo.federation.server import Server
from fczoo.federation.uplink import Arrival
from fczoo.testing.method_under_test import Call, MethodUnderTest, copy_tree
from fczoo.testing.toy_benchmark import Draw, check_random_cases, need, need_one_line

CHANGES_PER_METHOD = 6

TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64),
)
CHANGES: Mapping[str, Callable[[Tensor], Tensor]] = {
    **{f"as {str(dtype).removeprefix('torch.')}": lambda v, t=dtype: v.to(t) for dtype in TYPES},  # type: ignore[misc]
    "without elements": lambda v: v.new_empty((0, *v.shape[1:])),
    "of size zero": lambda v: v.new_empty((*v.shape[:-1], 0)),
    "a scalar": lambda v: v.new_ones(()),
    "with one more dimension": lambda v: v[None],
    "flat": lambda v: v.flatten(),
    "with twice the rows": lambda v: torch.cat([v, v]) if v.dim() else v,
    "with one row fewer": lambda v: v[:-1] if v.dim() else v,
    "expanded": lambda v: v.flatten()[:1].sum().expand(v.shape),
    "transposed": lambda v: v.mT if v.dim() > 1 else v,
    "in other strides": lambda v: v.mT.contiguous().mT if v.dim() > 1 else v,
    "sparse": lambda v: v.to_sparse(),
    "negative": lambda v: -v.abs() - 1,
    "zero": torch.zeros_like,
    "permuted": lambda v: v.flip(0) if v.dim() else v,
    "times a million": lambda v: v * 1_000_000,
    "squared": lambda v: v * v,
    **{
        f"of {value:g}": lambda v, x=value: torch.full_like(  # type: ignore[misc]
            v, x if v.is_floating_point() else 2**62
        )
        for value in (math.nan, math.inf, -math.inf, 1e38, -1e38, 1e30, 1e6, 1e-45, 0.5)
    },
    "with one NaN": lambda v: torch.where(
        torch.arange(v.numel()).view(v.shape) == 0, math.nan, v.double()
    ).to(v),
}
"""Changes of one tensor, by their names in messages."""
COUNTS = (-(2**62), -1, 0, 1, 10**6, 2**62)  # claimed numbers of images


def check_changed_uploads(subject: MethodUnderTest) -> None:
    """Check that the server continues after any upload of a client.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    check_hostile_uploads(subject, CHANGES_PER_METHOD, seed=0)


def check_hostile_uploads(subject: MethodUnderTest, times: int, seed: int) -> None:
    """Change uploads of a recorded run at random and send them to the server.

    Args:
        subject: The method and its runs in the toy benchmark.
        times: Number of changed uploads.
        seed: Seed of the changes.

    Raises:
        AssertionError: The server raises an error, rejects another upload, or gives no reason of
            one line.
    """
    run = subject.run()
    server = Server(run.bench, subject.method, 0)
    calls = [call for call in run.calls if sum(map(bool, call.payloads)) > 1]

    def check(draw: Draw) -> None:
        call = calls[draw(0, len(calls) - 1)]
        place = draw(0, len(call.payloads) - 1)
        changed, change = _change(call.payloads[place], draw)
        place_in_run = f"task {call.ctx.task.index + 1}, {call.phase}"
        label = f"{subject.name}, hostile upload {change} in {place_in_run}"
        payloads = [p.holding(copy_tree(p.tensors)) for p in call.payloads]
        payloads[place] = changed
        try:
            with silence_warnings():
                arrival = receive(server, call, payloads)
        except (FczooError, RuntimeError, ValueError, TypeError, LookupError) as error:
            raise AssertionError(f"{label}: {type(error).__name__}: {error}") from error
        for rejection in arrival.rejected:
            need_one_line(FczooError(rejection["reason"]), label)
            need(
                rejection["client"] == place_of(call, place),
                f"{label}: the server rejects an upload of an honest client: {rejection}",
            )

    if calls:
        check_random_cases(check, times, seed)


def place_of(call: Call, place: int) -> int:
    """Return the number of the client at a position in a recorded exchange."""
    return call.clients[place].number


def _change(payload: Payload, draw: Draw) -> tuple[Payload, str]:
    """Return the changed upload and a description of the change."""
    if not payload:
        return payload, "that is empty"
    names, kind = list(payload), draw(0, 9)
    name = names[draw(0, len(names) - 1)]
    if kind == 0:
        count = COUNTS[draw(0, len(COUNTS) - 1)]
        return replace(payload, num_samples=count), f"of {count} images"
    if kind == 1:
        return replace(payload, client=payload.client + 1), "of another client"
    if kind == 2:
        return payload.holding({n: v for n, v in payload.items() if n != name}), f"without {name}"
    if kind == 3:
        return payload.holding({**payload, f"{name}\n\ud800": payload[name]}), "with an odd name"
    change = list(CHANGES)[draw(0, len(CHANGES) - 1)]
    alike = [n for n in names if kind != 4 or n.rpartition(".")[0] == name.rpartition(".")[0]]
    group = alike if kind == 4 else [name]  # one tensor, or its whole group
    tensors = {n: CHANGES[change](payload[n]) for n in group}
    return payload.holding({**payload, **tensors}), f"with {name} {change}"


def receive(server: Server, call: Call, payloads: list[Payload]) -> Arrival:
    """Receive and merge uploads at a server in the state of a recorded exchange.

    Args:
        server: Server of the method; its state is replaced by that of the exchange.
        call: The exchange.
        payloads: Uploads of its clients in order; empty ones count as not sent.

    Returns:
        The arrival, whose valid uploads are merged.
    """
    server.replace_state(copy_tree(call.server_state))
    clients = [
        replace(client, index=torch.arange(honest.num_samples))
        for client, honest in zip(call.clients, call.payloads, strict=True)
    ]
    task, uplink = call.ctx.task, server.uplink
    if call.phase == "train" or call.phase == "balanced":
        exchange = Exchange(task, call.ctx.round, balanced=call.ctx.balanced)
        form = next(filter(None, call.payloads)) if len(clients) < 3 else None
        arrival = uplink.arrive(payloads, clients, call.state, exchange, form=form)
        if arrival.payloads:
            server.merge(arrival.payloads, exchange)
        return arrival
    exchange = Exchange(task, boundary=call.phase)
    if uplink.sums_on_arrival and call.phase != "after_rounds":
        form = next(filter(None, call.payloads))
        arrival, folded = uplink.collect(payloads, clients, exchange, form)
    else:
        sent = [k for k, honest in enumerate(call.payloads) if honest]
        form = call.payloads[sent[0]] if len(sent) < 3 else None  # there is no majority
        senders, uploads = [clients[k] for k in sent], [payloads[k] for k in sent]
        arrival = uplink.arrive(uploads, senders, call.state, exchange, form=form)
        folded = {}
    server.update_from(call.phase, arrival.payloads, task, folded)
    return arrival
