"""Checks of the model that a run of every method leaves behind."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fczoo.core.errors import FczooError
from fczoo.federation.evaluate import predictions
from fczoo.models.load import load_model
from fczoo.models.save import save_model
from fczoo.testing.method_under_test import MethodUnderTest, batch_of, need_same
from fczoo.testing.runs import need


def a_loaded_model_predicts_the_same(subject: MethodUnderTest) -> None:
    """Check that a saved and loaded model gives the last evaluation's logits, bit for bit.

    There is no such model where every client has its own.

    Args:
        subject: The method and its runs in the toy world.
    """
    if subject.method.training().own_models:
        return
    record, name = subject.run(torch.float32), subject.name
    bench, task = record.bench, record.bench.stream.tasks[-1]
    index = torch.arange(len(bench.test.labels))
    run = bench.start(subject.method)
    run.server.state, run.server.result = record.states[task.index], record.result
    with TemporaryDirectory(prefix="fczoo-") as folder, torch.inference_mode():
        save_model(folder, run)
        need(
            (Path(folder) / "model.safetensors").is_file(),
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
