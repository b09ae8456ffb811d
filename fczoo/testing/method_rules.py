"""What every method keeps: what it declares, what the server does, what goes over the wire."""

import json
import pickle
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.core.options import build, spaces
from fczoo.core.payload import HEADER_BYTES, Payload, content_of
from fczoo.core.registry import METHODS, create_method
from fczoo.core.tree import Tree, drop, nbytes, select
from fczoo.federation.downlink import broadcast
from fczoo.testing.recording import Call, Record, copied
from fczoo.testing.subject import Subject, need_same
from fczoo.testing.trials import need, need_documented
from fczoo.testing.world import TASKS, toy_backbone

LEAST_TUNED, MOST_TUNED = 2, 4  # options: a search of some twenty trials finds nothing in more

# --- what a method is


def is_a_value(subject: Subject) -> None:
    """A method is a frozen dataclass: equal to its copy, hashable, and unchanged by pickling."""
    method: Any = subject.method
    name = subject.name
    need(is_dataclass(method), f"{name} is no dataclass; put @dataclass(frozen=True) below its registration")
    for f in fields(method):
        try:
            setattr(method, f.name, getattr(method, f.name))
        except FrozenInstanceError:
            continue
        raise AssertionError(f"{name}.{f.name} can be set after creation; write @dataclass(frozen=True)")
    try:
        copy = pickle.loads(pickle.dumps(method))
    except (pickle.PicklingError, AttributeError) as error:
        raise AssertionError(f"{name} cannot be pickled; define its class at the top of a module") from error
    need(
        copy == method and hash(copy) == hash(method) and type(copy) is type(method),
        f"{name} is another one after pickling; keep nothing but hyper-parameters in it",
    )


def options_survive_json(subject: Subject) -> None:
    """The hyper-parameters can be written to a run folder and read again."""
    method: Any = subject.method
    again = build(type(method), subject.name, json.loads(json.dumps(asdict(method), allow_nan=False)))
    need(again == method, f"{subject.name} is another one when its options are read from JSON")


def says_where_to_tune(subject: Subject) -> None:
    """``tune=`` of two to four of its options, or of its only one, says where ``fczoo tune`` looks."""
    cls, name = type(subject.method), subject.name
    space, least = spaces(cls), min(LEAST_TUNED, len(fields(cls)))
    need(
        least <= len(space) <= MOST_TUNED,
        f"{name} has a space to tune for {len(space)} of its options; give {least} to {MOST_TUNED} one, "
        'rates among them: option(..., tune=(1e-4, 1e-1, "log")) or tune=[values]',
    )
    for option, where in space.items():
        for value in where[:2] if isinstance(where, tuple) else where:
            try:
                build(cls, name, {option: value})
            except FczooError as error:
                raise AssertionError(
                    f"{name}.{option} is to be tuned over a value that it refuses: {error}"
                ) from error


def says_what_it_is(subject: Subject) -> None:
    """It is registered, and explains itself, its paper and each hyper-parameter."""
    cls, name = type(subject.method), subject.name
    need(
        name and METHODS.get(name) is cls,
        f"{cls.__name__} is not registered; put @register_method(NAME) above it",
    )
    need_documented(cls, name)
    need(cls.paper, f"{name} does not say where it comes from; set the class attribute paper")


def values_for_data_sets_are_valid(subject: Subject) -> None:
    """What ``tuned`` sets for a data set are options of the method, within their limits."""
    for dataset, values in type(subject.method).tuned.items():
        try:
            method = create_method(subject.name, dataset)
        except FczooError as error:
            raise AssertionError(f"{subject.name}.tuned[{dataset!r}] cannot be used: {error}") from error
        kept = {key: getattr(method, key) for key in values}
        need(kept == dict(values), f"{subject.name}.tuned[{dataset!r}] is changed on creation; write {kept}")


# --- the server


def begins_from_an_empty_state(subject: Subject) -> None:
    """The first task's state is made from nothing, is finite, and holds all that clients train."""
    method, name = subject.method, subject.name
    state = method.begin_task({}, TASKS[0], toy_backbone(), torch.Generator().manual_seed(0))
    need(state, f"{name}.begin_task returns nothing for an empty state; return the first task's tensors")
    _need_finite(state, f"{name}.begin_task")
    for prefix in method.training().optims:
        need(select(state, prefix), f"{name} trains {prefix}, which begin_task does not make")
        private = prefix.startswith(method.private or ("\0",))
        need(not private, f"{name} trains {prefix}, which is private and never reaches a client")


def a_new_task_leaves_the_old_state_alone(subject: Subject) -> None:
    """``begin_task`` changes no tensor that it is given."""
    run = subject.run()
    old = copied(run.states[0])
    subject.method.begin_task(run.states[0], TASKS[1], run.bench.backbone, torch.Generator().manual_seed(0))
    need_same(run.states[0], old, f"{subject.name}.begin_task changes the old state in place; copy first")


def uploads_are_left_alone(subject: Subject) -> None:
    """``aggregate``, ``server_update`` and ``absorb`` change no upload."""
    for call in subject.run().calls:
        for sent, kept in zip(call.payloads, call.kept, strict=True):
            need_same(kept, sent, f"{subject.name} changes an upload in place on the server; copy first")


def private_state_is_not_broadcast(subject: Subject) -> None:
    """No client gets what the method keeps private."""
    private, run = subject.method.private, subject.run()
    if not private:
        return
    for state in run.states.values():
        need(
            select(state, *private), f"{subject.name}.private names {private}, which the state does not have"
        )
        need(
            not select(broadcast(subject.method, state), *private),
            f"{subject.name} broadcasts private tensors",
        )
    for call in run.calls:
        need(not select(call.ctx.shared, *private), f"{subject.name} shows private tensors to its clients")


def clients_need_no_private_state(subject: Subject) -> None:
    """Clients compute the same from a state without its private part."""
    private = subject.method.private
    if not private:
        return
    for call in subject.run().last_calls.values():
        for ours, theirs in zip(_again(call, drop(call.state, *private)), call.payloads, strict=True):
            need_same(
                ours, theirs, f"{subject.name}'s clients upload something else without the private state"
            )


def _again(call: Call, state: Tree) -> list[Payload]:
    engine = replace(call.engine, memories={**call.memories})
    if call.moment == "conclude":
        return engine.conclude(call.clients, replace(call.ctx, shared=state))
    if call.moment == "begin" or call.moment == "end":
        return list(engine.survey(call.moment, state, call.clients, call.ctx))
    return engine.train(state, call.clients, call.ctx)


# --- what goes over the wire


def every_upload_is_declared(subject: Subject) -> None:
    """Every tensor of an upload is trained (``Training.optims``) or belongs to a group of
    ``Training.uploads``."""
    training = subject.method.training()
    for call in subject.run().calls:
        for name in {name for payload in call.payloads for name in payload}:
            need(
                content_of(name, training.trained, training.uploads) is not None,
                f"{subject.name} uploads {name!r} without declaring it; name its group in training().uploads",
            )


def uploads_are_finite_and_signed(subject: Subject) -> None:
    """Each client uploads finite tensors under its own number, and no honest upload is turned away."""
    run, name = subject.run(), subject.name
    need(run.calls, f"{name} asks its clients for nothing; declare what they train or survey them")
    for call in run.calls:
        need(len(call.payloads) == len(call.clients), f"{name} has another number of uploads than of clients")
        for client, payload in zip(call.clients, call.payloads, strict=True):
            own = len(client.index)
            if call.moment == "conclude":  # images of the task and exemplars, each once
                own = payload.num_samples if own <= payload.num_samples <= own + len(client.earlier) else -1
            signed = payload.client == client.number and payload.num_samples == own
            need(signed, f"{name} signs an upload for another client; leave client and num_samples alone")
            _need_finite(payload.tensors, f"{name}'s client {client.number} in {call.moment}")
    rejected = run.result.rejected
    need(not rejected, f"{name} has an honest upload turned away: {rejected and rejected[0]['reason']}")


def uploads_are_counted_in_bytes(subject: Subject) -> None:
    """The bytes of the result are those of the uploads, and some."""
    run: Record = subject.run()
    payloads = [p for call in run.calls for p in call.payloads if p or call.moment != "conclude"]
    expected = sum(nbytes(payload.tensors) + HEADER_BYTES for payload in payloads)
    need(
        run.result.bytes_up == expected > 0 and run.result.client_rounds == len(payloads),
        f"{subject.name} uploads {expected} bytes in {len(payloads)} uploads, but the result counts "
        f"{run.result.bytes_up} in {run.result.client_rounds}; upload by pack, stats, finish and survey "
        "alone",
    )


def _need_finite(tree: Tree, label: str) -> None:
    for name, value in tree.items():
        need(isinstance(value, Tensor), f"{label} has {name}, which is no tensor; make it one")
        need(value.isfinite().all(), f"{label} has {name}, which is not finite; look for a division by 0")
