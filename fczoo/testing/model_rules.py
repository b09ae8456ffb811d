"""Checks of the model that a run of every method leaves behind."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fczoo.core.errors import FczooError
from fczoo.federation.evaluate import predictions
from fczoo.federation.run import FederatedRun
from fczoo.federation.start import keeps_client_memory
from fczoo.models.load import load_model
from fczoo.models.save import save_model
from fczoo.testing.method_under_test import MethodUnderTest, batch_of, need_same
from fczoo.testing.runs import need, need_one_line


def a_loaded_model_predicts_the_same(subject: MethodUnderTest) -> None:
    """Check that a saved and loaded model gives the last evaluation's logits, bit for bit.

    Args:
        subject: The method and its runs in the toy world.
    """
    with TemporaryDirectory(prefix="fczoo-") as folder:
        _check_kept(subject, _evaluated_run(subject, 3), Path(folder))


def a_kept_model_continues(subject: MethodUnderTest) -> None:
    """Check that a run continues from its kept model with the same numbers, bit for bit.

    Methods whose clients keep something continue without it, or refuse in one line.

    Args:
        subject: The method and its runs in the toy world.
    """
    record, name = subject.run(torch.float32), subject.name
    bench = record.bench
    with TemporaryDirectory(prefix="fczoo-") as temporary:
        folder = Path(temporary)
        save_model(folder / "first", _evaluated_run(subject, 2))
        further_bench = replace(
            bench,
            settings=replace(bench.settings, start_from=str(folder / "first")),
            stream=replace(bench.stream, learned=2),
        )
        run = further_bench.start(subject.method)
        try:
            run.run()
        except FczooError as error:
            need_one_line(error, name)
            need(keeps_client_memory(subject.method), f"{name} does not continue: {error}")
            return
        _check_kept(subject, run, folder / "second")
        need(
            run.result.accuracy[:2] == record.result.accuracy[:2],
            f"{name} loses the accuracies of the tasks before it continues",
        )
        if not keeps_client_memory(subject.method):
            sentence = f"{name} continues with another state than in one go"
            need_same(run.state, record.states[2], sentence)
            need(
                run.result.accuracy == record.result.accuracy,
                f"{name} continues with other accuracies than in one go",
            )


def _evaluated_run(subject: MethodUnderTest, tasks: int) -> FederatedRun:
    """Return the recorded run as it was after some tasks."""
    record = subject.run(torch.float32)
    run = record.bench.start(subject.method)
    run.server.state = record.states[tasks - 1]
    run.server.result = replace(record.result, accuracy=record.result.accuracy[:tasks])
    return run


def _check_kept(subject: MethodUnderTest, run: FederatedRun, folder: Path) -> None:
    """Save the model of a run, load it and compare its outputs with the last evaluation."""
    bench, name = run.world, subject.name
    task, index = bench.stream.tasks[-1], torch.arange(len(bench.test.labels))
    with torch.inference_mode():
        save_model(folder, run)
        need(
            (folder / "model.safetensors").is_file(),
            f"the model of {name} has no tensors; predict must read the state",
        )
        model = load_model(folder, backbone=bench.backbone)
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
            {"features": features}, {"features": expected}, f"a loaded model of {name} differs"
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
