"""Check of methods: all rules, including those of client memory and saved models."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fczoo.core.errors import FczooError
from fczoo.core.method import Method, task_exchanges
from fczoo.core.tree import nbytes
from fczoo.core.types import Exchange
from fczoo.federation.evaluate import predictions
from fczoo.federation.run import FederatedRun
from fczoo.federation.warm_start import keeps_client_memory
from fczoo.models.classifier import prediction_tensors
from fczoo.models.storage import load_model, save_model
from fczoo.testing import hostile_uploads as hostile
from fczoo.testing import method_rules as rules
from fczoo.testing import training_rules as training
from fczoo.testing.method_under_test import MethodUnderTest, batch_of, need_same
from fczoo.testing.toy_benchmark import need, need_one_line, small_method

HEADER = 120  # bytes in a file for name, shape and offset of each tensor


def check_loaded_model(subject: MethodUnderTest) -> None:
    """Check that a saved and loaded model gives the last evaluation's logits, bit for bit.

    Methods with ``own_models`` have no global model, so saving must raise an error of one line.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    run = _evaluated_run(subject, 3)
    with TemporaryDirectory(prefix="fczoo-") as folder:
        if not subject.method.training().own_models:
            _check_saved_model(subject, run, Path(folder))
            return
        try:
            save_model(folder, run)
        except FczooError as error:
            need_one_line(error, subject.name)
            return
    raise AssertionError(
        f"{subject.name} has own_models, but save_model stores a model of the server"
    )


def check_continued_model(subject: MethodUnderTest) -> None:
    """Check that a run continues from a saved model with the same results, bit for bit.

    Methods with client memory may have other results, or refuse in one line. Methods with
    ``own_models`` are not checked.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    if subject.method.training().own_models:
        return
    record, name = subject.run(torch.float32, together=3), subject.name
    bench = record.bench
    with TemporaryDirectory(prefix="fczoo-") as temporary:
        folder = Path(temporary)
        save_model(folder / "first", _evaluated_run(subject, 2))
        further_bench = replace(
            bench,
            settings=replace(bench.settings, start_from=str(folder / "first")),
            stream=replace(bench.stream, learned_count=2),
        )
        run = further_bench.start(subject.method)
        try:
            run.run()
        except FczooError as error:
            need_one_line(error, name)
            need(
                keeps_client_memory(subject.method),
                f"{name} cannot continue from a saved model: {error}",
            )
            return
        _check_saved_model(subject, run, folder / "second")
        need(
            run.result.accuracy[:2] == record.result.accuracy[:2],
            f"{name} loses the earlier accuracies if it continues from a saved model",
        )
        if not keeps_client_memory(subject.method):
            sentence = f"{name} has a different state if it continues from a saved model"
            need_same(run.state, record.states[2], sentence)
            need(
                run.result.accuracy == record.result.accuracy,
                f"{name} has different accuracies if it continues from a saved model",
            )


def _evaluated_run(subject: MethodUnderTest, tasks: int) -> FederatedRun:
    """Return the recorded run with its state and result after some tasks."""
    record = subject.run(torch.float32, together=3)
    run = record.bench.start(subject.method)
    run.server.state = record.states[tasks - 1]
    run.server.result = replace(record.result, accuracy=record.result.accuracy[:tasks])
    return run


def _check_saved_model(subject: MethodUnderTest, run: FederatedRun, folder: Path) -> None:
    """Save and load the model of a run, and compare its outputs with the last evaluation."""
    bench, name = run.scenario, subject.name
    task, index = bench.stream.tasks[-1], torch.arange(len(bench.test.labels))
    with torch.inference_mode():
        save_model(folder, run)
        need(
            (folder / "model.safetensors").is_file(),
            f"the model of {name} has no tensors; predict must read the state",
        )
        model = load_model(folder, backbone=bench.backbone)
        read = prediction_tensors(subject.method, bench.backbone, run.state, task)
        size = (folder / "model.safetensors").stat().st_size
        need(
            size <= 1.1 * nbytes(read) + HEADER * (1 + len(read)),
            f"the saved model of {name} has {size} bytes, but prediction reads {nbytes(read)}",
        )
        images = bench.test.view(index)
        batch = batch_of(subject.method, bench.test, index)
        answers, _ = predictions(subject.method, bench, run.state, index, task, len(index))
        try:
            logits, features = model(images), model.features(images)
        except (FczooError, KeyError, RuntimeError) as error:
            raise AssertionError(
                f"a loaded model of {name} cannot predict: {type(error).__name__} {error}; predict "
                "and features must read the same tensors for every image"
            ) from error
        expected = subject.method.features(bench.backbone, run.state, batch)
        need_same(
            {"features": features},
            {"features": expected},
            f"a loaded model of {name} gives other features",
        )
        expected = subject.method.predict(bench.backbone, run.state, batch, task)
        seen = bench.classes_with_images(task)
        need_same(
            {"logits": logits[:, seen]},
            {"logits": expected[:, seen]},
            f"a loaded model of {name} gives other logits",
        )
        need(
            torch.equal(logits.argmax(1), answers),
            f"a loaded model of {name} predicts other classes than the run's last evaluation",
        )


def check_exemplars(subject: MethodUnderTest) -> None:
    """Check that exemplars are distinct images of the client, at most ``memory`` of them.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    run, name = subject.run(), subject.name
    key = subject.method.training().exemplars
    if not key:
        return
    client_images: dict[int, set[int]] = {}
    for client in (client for call in run.calls for client in call.clients):
        images = torch.cat([client.index, client.earlier]).tolist()
        client_images[client.number] = client_images.get(client.number, set()) | set(images)
    memories = run.calls[-1].engine.memories
    need(any(len(m.get(key, ())) for m in memories.values()), f"{name} stores no exemplar in {key}")
    budget = getattr(subject.method, "memory", None)
    for number, memory in memories.items():
        exemplar_indices = memory[key].tolist()
        need(
            set(exemplar_indices) <= client_images[number],
            f"{name}'s client {number} stores exemplars that are not its own images",
        )
        need(
            len(set(exemplar_indices)) == len(exemplar_indices),
            f"{name}'s client {number} stores an exemplar twice",
        )
        fits_budget = budget is None or len(exemplar_indices) <= budget
        need(
            fits_budget,
            f"{name}'s client {number} stores {len(exemplar_indices)} exemplars, memory={budget}",
        )


def check_client_memory(subject: MethodUnderTest) -> None:
    """Check that client memory consists of finite tensors that are never changed in place.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    run, name = subject.run(), subject.name
    for call in run.calls:
        for number, memory in call.memories.items():
            for key, value in memory.items():
                need(
                    isinstance(value, torch.Tensor),
                    f"{name} stores {key}, which is not a tensor, in client memory",
                )
                need(
                    value.isfinite().all(),
                    f"{name}'s client {number} stores {key}, which is not finite, in its memory",
                )
            live_memory = call.live_memories[number]
            sentence = f"{name}'s client {number} changes its memory in place; return a new tree"
            need_same(live_memory, memory, sentence)


def check_exchange_order(subject: MethodUnderTest) -> None:
    """Check that exchanges of a task have the order of ``task_exchanges``.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    positions = []
    for call in subject.run().calls:
        ctx = call.ctx
        if call.phase == "train" or call.phase == "balanced":
            exchange = Exchange(ctx.task, ctx.round, balanced=ctx.balanced)
        else:
            exchange = Exchange(ctx.task, boundary=call.phase)
        order = list(task_exchanges(subject.method, ctx.task, ctx.rounds))
        positions.append((ctx.task.index, order.index(exchange)))
    need(
        positions == sorted(positions),
        f"{subject.name} has exchanges that are not in the order of task_exchanges",
    )


METHOD_RULES: tuple[Callable[[MethodUnderTest], None], ...] = (
    rules.check_dataclass,
    rules.check_options_survive_json,
    rules.check_description,
    rules.check_search_spaces,
    rules.check_dataset_options,
    rules.check_first_state,
    rules.check_declared_uploads,
    rules.check_finite_uploads,
    rules.check_upload_bytes,
    rules.check_begin_task_changes_no_input,
    rules.check_server_changes_no_upload,
    rules.check_combined_settings,
    rules.check_broadcast,
    rules.check_clients_without_private_state,
    training.check_clients_change_no_state,
    training.check_append_only_rows,
    training.check_backbone_weights,
    training.check_padding,
    training.check_logits,
    training.check_logits_of_batches,
    training.check_features,
    training.check_accuracy,
    training.check_recurring_classes,
    training.check_same_seed,
    training.check_other_seed,
    training.check_batched_clients,
    training.check_batched_clients_in_float32,
    check_client_memory,
    check_exemplars,
    check_exchange_order,
    check_loaded_model,
    check_continued_model,
    hostile.check_changed_uploads,
)
"""Functions that raise AssertionError if a ``MethodUnderTest`` breaks the rule in the docstring."""


def check_method(method: str | Method) -> None:
    """Check that a method follows all rules; a broken one raises AssertionError.

    The method runs a few times in the toy benchmark, with clients one by one and in one batch, in
    float64 and float32. This takes some seconds for a head on frozen features, and up to a minute
    for prompts in six blocks.

    The docstrings of ``METHOD_RULES`` have the details:

    - The method is a frozen dataclass, whose options have descriptions and survive JSON.
    - Server and clients do not modify their inputs.
    - Every tensor of an upload is declared, finite and counted; private state reaches no client.
    - Padding has no effect.
    - ``predict`` returns logits of the classes seen and ``features`` one row per image, independent
      of the batch.
    - A run is reproducible, and independent of the number of clients in a batch.
    - A saved model predicts the same after loading, and learns further tasks with the same results.
    - No hostile upload stops the server.

    Args:
        method: Registered name, whose integer options are reduced by ``small_method``, or an
            instance, which is used unchanged.

    Raises:
        AssertionError: A rule is broken.
    """
    subject = MethodUnderTest(small_method(method) if isinstance(method, str) else method)
    for rule in METHOD_RULES:
        rule(subject)
