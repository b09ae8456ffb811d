"""Rules of methods: declaration, server functions and uploads.

Each function raises AssertionError with one sentence on what is wrong and what to do.
"""

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
from fczoo.federation.server import broadcast
from fczoo.testing.method_under_test import Call, MethodUnderTest, Record, copy_tree, need_same
from fczoo.testing.toy_benchmark import (
    FAMILIES,
    TASKS,
    need,
    need_documented,
    need_one_line,
    toy_backbone,
    toy_bench,
)

MIN_TUNED_OPTIONS, MAX_TUNED_OPTIONS = 2, 4  # twenty trials are too few for more options

# --- declaration


def check_dataclass(subject: MethodUnderTest) -> None:
    """Check that a method is a frozen dataclass, hashable and unchanged by pickling.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    method: Any = subject.method
    name = subject.name
    need(
        is_dataclass(method),
        f"{name} is not a dataclass; put @dataclass(frozen=True) below @register_method",
    )
    for f in fields(method):
        try:
            setattr(method, f.name, getattr(method, f.name))
        except FrozenInstanceError:
            continue
        raise AssertionError(
            f"{name}.{f.name} can be changed after creation; write @dataclass(frozen=True)"
        )
    try:
        copy = pickle.loads(pickle.dumps(method))
    except (pickle.PicklingError, AttributeError) as error:
        raise AssertionError(
            f"{name} cannot be pickled; define its class at the top of a module"
        ) from error
    need(
        copy == method and hash(copy) == hash(method) and type(copy) is type(method),
        f"{name} differs after pickling; its fields may only be hyper-parameters",
    )


def check_options_survive_json(subject: MethodUnderTest) -> None:
    """Check that a method is unchanged if its hyper-parameters pass through JSON.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    method: Any = subject.method
    restored_method = build(
        type(method), subject.name, json.loads(json.dumps(asdict(method), allow_nan=False))
    )
    need(
        restored_method == method,
        f"{subject.name} differs when its options are read from JSON",
    )


def check_search_spaces(subject: MethodUnderTest) -> None:
    """Check that two to four options, or the only one, have a search space for ``fczoo tune``.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    cls, name = type(subject.method), subject.name
    space, min_options = spaces(cls), min(MIN_TUNED_OPTIONS, len(fields(cls)))
    need(
        min_options <= len(space) <= MAX_TUNED_OPTIONS,
        f"{name} has a search space for {len(space)} of its options; {min_options} to "
        f"{MAX_TUNED_OPTIONS} options, the learning rates among them, must have one: "
        'option(..., tune=(1e-4, 1e-1, "log")) or tune=[values]',
    )
    for option, search_space in space.items():
        for value in search_space[:2] if isinstance(search_space, tuple) else search_space:
            try:
                build(cls, name, {option: value})
            except FczooError as error:
                raise AssertionError(
                    f"{name}.{option} has a search space with an invalid value: {error}"
                ) from error


def check_description(subject: MethodUnderTest) -> None:
    """Check that the method is registered and describes itself, its paper and each hyper-parameter.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    cls, name = type(subject.method), subject.name
    need(
        name and METHODS.get(name) is cls,
        f"{cls.__name__} is not registered; put @register_method(NAME) above it",
    )
    need_documented(cls, name)
    need(cls.paper, f"{name} does not name its source; set the class attribute paper")


def check_dataset_options(subject: MethodUnderTest) -> None:
    """Check that ``dataset_options`` are options of the method, within their limits.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    for dataset, values in type(subject.method).dataset_options.items():
        try:
            method = create_method(subject.name, dataset)
        except FczooError as error:
            raise AssertionError(
                f"{subject.name}.dataset_options[{dataset!r}] cannot be used: {error}"
            ) from error
        actual_values = {key: getattr(method, key) for key in values}
        need(
            actual_values == dict(values),
            f"creating {subject.name} changes the values of its dataset_options[{dataset!r}]; "
            f"write {actual_values}",
        )


# --- the server


def check_first_state(subject: MethodUnderTest) -> None:
    """Check that the first state is finite and contains all tensors that clients train.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    method, name = subject.method, subject.name
    state = method.begin_task({}, TASKS[0], toy_backbone(), torch.Generator().manual_seed(0))
    need(
        state,
        f"{name}.begin_task returns nothing for an empty state; return the first task's tensors",
    )
    _need_finite(state, f"{name}.begin_task")
    for prefix in method.training().optims:
        need(select(state, prefix), f"{name} trains {prefix}, which begin_task does not create")
        private = prefix.startswith(method.server_only or ("\0",))
        need(
            not private, f"{name} trains {prefix}, which is server_only and never reaches a client"
        )


def check_begin_task_changes_no_input(subject: MethodUnderTest) -> None:
    """Check that ``begin_task`` changes no tensor of the state that it receives.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    run = subject.run()
    old = copy_tree(run.states[0])
    subject.method.begin_task(
        run.states[0], TASKS[1], run.bench.backbone, torch.Generator().manual_seed(0)
    )
    need_same(
        run.states[0], old, f"{subject.name}.begin_task changes the old state in place; copy first"
    )


def check_server_changes_no_upload(subject: MethodUnderTest) -> None:
    """Check that ``aggregate``, ``server_update`` and ``update_from`` change no upload.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    for call in subject.run().calls:
        for upload_copy, live_upload in zip(call.payloads, call.live_uploads, strict=True):
            need_same(
                live_upload,
                upload_copy,
                f"{subject.name} changes an upload in place on the server; copy first",
            )


CHOICES: dict[str, tuple[str, ...]] = {
    "family": tuple(FAMILIES),
    "partition": ("domains", "domains:0.5", "natural", "size:1.2", "dirichlet-size:0.5"),
    "server_optimizer": (
        *("fedavgm:0.9", "fedavgm:0.5", "fedadam:0.01"),
        *("fedyogi:0.01", "fedadagrad:0.01"),
    ),
    "compress": ("int8", "fp16", "topk:0.1", "topk:0.5", "lowrank:2"),
}
"""Settings of a combined run. Consecutive methods in the registry get different combinations; any
25 of them cover each pair of values once.
"""


def combination(number: int) -> dict[str, Any]:
    """Return one value of each of ``CHOICES``: row ``number`` of an orthogonal array of 25 rows.

    Args:
        number: Number of the row, which repeats after 25.
    """
    row, column = number % 5, number // 5
    picks = (row, column, row + column, row + 2 * column)
    return {name: values[i % 5] for (name, values), i in zip(CHOICES.items(), picks, strict=True)}


def check_combined_settings(subject: MethodUnderTest) -> None:
    """Check a run with another backbone family, partition, server optimizer and compression.

    Clients have one domain or group each, or different numbers of images. A method that trains or
    sends nothing must refuse server optimizer and compression in one line; a method without
    ``Training.averages_trained`` must refuse a server optimizer.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    training, name = subject.method.training(), subject.name
    settings: dict[str, Any] = combination(METHODS.names().index(name))
    sends = bool(training.trained_prefixes) and not training.own_models
    able = {"compress": sends, "server_optimizer": sends and training.averages_trained}
    for option, is_able in able.items():
        try:
            toy_bench(**{option: settings[option]}).check(subject.method)
        except FczooError as error:
            need_one_line(error, name)
            need(not is_able, f"{name} does not work with {option}: {error}")
            del settings[option]
    run = subject.start(2, rounds=1, epochs=1, **settings)
    text = ", ".join(f"{option} {value}" for option, value in settings.items())
    reason = next((entry["reason"] for entry in run.result.rejected), "")
    need(not run.result.rejected, f"{name}'s honest upload is rejected with {text}: {reason}")


def check_broadcast(subject: MethodUnderTest) -> None:
    """Check that no client receives ``server_only`` state.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    server_only, run = subject.method.server_only, subject.run()
    if not server_only:
        return
    for state in run.states.values():
        need(
            select(state, *server_only),
            f"{subject.name}.server_only names {server_only}, which the state does not have",
        )
        need(
            not select(broadcast(subject.method, state), *server_only),
            f"{subject.name} broadcasts server_only tensors",
        )
    for call in run.calls:
        need(
            not select(call.ctx.shared, *server_only),
            f"{subject.name} shows server_only tensors to its clients",
        )


def check_clients_without_private_state(subject: MethodUnderTest) -> None:
    """Check that clients compute the same results without ``server_only`` state.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    server_only = subject.method.server_only
    if not server_only:
        return
    for call in subject.run().last_calls.values():
        for actual, expected in zip(
            _repeat_call(call, drop(call.state, *server_only)), call.payloads, strict=True
        ):
            need_same(
                actual,
                expected,
                f"{subject.name}'s uploads depend on server_only tensors, which clients lack",
            )


def _repeat_call(call: Call, state: Tree) -> list[Payload]:
    engine = replace(call.engine, memories={**call.memories})
    if call.phase == "after_rounds":
        return engine.end_task_client(call.clients, replace(call.ctx, shared=state))
    if call.phase != "train" and call.phase != "balanced":
        return list(engine.collect(call.phase, state, call.clients, call.ctx))
    return engine.train(state, call.clients, call.ctx)


# --- uploads


def check_declared_uploads(subject: MethodUnderTest) -> None:
    """Check that every tensor of an upload is declared, as trained or in a group of uploads.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    training = subject.method.training()
    for call in subject.run().calls:
        for name in {name for payload in call.payloads for name in payload}:
            need(
                content_of(name, training.trained_prefixes, training.uploads) is not None,
                f"{subject.name} uploads {name!r} without declaring it; add its group to "
                "training().uploads",
            )


def check_finite_uploads(subject: MethodUnderTest) -> None:
    """Check that uploads are finite, carry their client's number, and are not rejected.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    run, name = subject.run(), subject.name
    need(run.calls, f"{name} requests nothing from clients; declare trained tensors or statistics")
    for call in run.calls:
        need(
            len(call.payloads) == len(call.clients),
            f"{name} has {len(call.payloads)} uploads for {len(call.clients)} clients",
        )
        for client, payload in zip(call.clients, call.payloads, strict=True):
            sample_count = len(client.index)
            if call.phase == "after_rounds":  # images of the task and exemplars, each once
                sample_count = (
                    payload.num_samples
                    if sample_count <= payload.num_samples <= sample_count + len(client.earlier)
                    else -1
                )
            signature_matches = (
                payload.client == client.number and payload.num_samples == sample_count
            )
            need(
                signature_matches,
                f"{name} changes client or num_samples of an upload; leave both unchanged",
            )
            _need_finite(payload.tensors, f"{name}'s client {client.number} in {call.phase}")
    rejections = run.result.rejected
    need(
        not rejections,
        f"{name}'s honest upload is rejected: {rejections and rejections[0]['reason']}",
    )


def check_upload_bytes(subject: MethodUnderTest) -> None:
    """Check that the result counts the bytes of all uploads, which are more than zero.

    With ``own_models`` they must be zero, because clients send nothing.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    run: Record = subject.run()
    if subject.method.training().own_models:
        need(
            not any(p.tensors for call in run.calls for p in call.payloads)
            and run.result.bytes_up == run.result.bytes_down == run.result.client_rounds == 0,
            f"{subject.name} has own_models, but its clients exchange tensors; upload nothing",
        )
        return
    payloads = [p for call in run.calls for p in call.payloads if p or call.phase != "after_rounds"]
    expected_bytes = sum(nbytes(payload.tensors) + HEADER_BYTES for payload in payloads)
    need(
        run.result.bytes_up == expected_bytes > 0 and run.result.client_rounds == len(payloads),
        f"{subject.name} uploads {expected_bytes} bytes in {len(payloads)} uploads, but the result "
        f"counts {run.result.bytes_up} in {run.result.client_rounds}; upload only by make_upload, "
        "collect, after_training and end_task_client",
    )


def _need_finite(tree: Tree, label: str) -> None:
    for name, value in tree.items():
        need(isinstance(value, Tensor), f"{label} has {name}, which is not a tensor; make it one")
        need(
            value.isfinite().all(),
            f"{label} has {name}, which is not finite; look for a division by 0",
        )
