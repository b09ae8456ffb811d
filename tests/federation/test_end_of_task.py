"""The end of a task: exemplars, the balanced round, and statistics."""

from dataclasses import dataclass, replace

import pytest
import torch

from fczoo import Optim, Training
from fczoo.core.payload import Payload, per_class, per_seen_class, whole_tensors
from fczoo.core.types import Task
from fczoo.federation.callbacks import Callback
from fczoo.federation.checkpoint import memory_bytes
from fczoo.functional.exemplars import Rehearsal
from fczoo.functional.heads import head_logits, linear_head
from fczoo.security.outliers import means_of
from fczoo.security.upload_validation import validate_uploads


@dataclass(frozen=True)
class KeepsFirstImages(Rehearsal):
    """Keep the first images, and count the images of each class in every batch."""

    name = "keeper"
    paper = "by hand"
    memory: int = 6
    choice: str = "first"

    def training(self):
        uploads = {
            "seen": whole_tensors("counts"),
            "kept": whole_tensors("counts"),
            "images": whole_tensors("counts"),
        }
        optims = {"head.": Optim("sgd", lr=0.1)}
        training = Training(
            optims,
            inputs=["query"],
            uploads=uploads,
            collect_at={"task_end"},
            balanced={"head.weight": Optim()},
        )
        return self.rehearsing(training)

    def features(self, backbone, tree, batch):
        return batch.query

    def begin_task(self, state, task, backbone, rng):
        none = {"kept": torch.zeros(7), "images": torch.zeros(7)}
        return state or {**linear_head(task, backbone.dim, rng), **none}

    def loss(self, backbone, train, batch, ctx):
        train = {**ctx.shared, **train}
        loss = torch.nn.functional.cross_entropy(
            head_logits(train, batch.query), batch.y, reduction="none"
        )
        return batch.mean(loss), {"seen": count_classes(batch)}

    def end_task_client(self, backbone, data, ctx):
        memory, _ = super().end_task_client(backbone, data, ctx)
        labels = data.labels(memory["exemplar.index"])
        return memory, {"kept": torch.bincount(labels, minlength=7).double()}

    def collect(self, phase, backbone, tree, batch, ctx):
        return {"images": count_classes(batch)}

    def update_from(self, phase, state, sums, ctx):
        assert sums.keys() == {"kept" if phase == "after_rounds" else "images"}
        return {**state, **sums}

    def predict(self, backbone, state, batch, task):
        return head_logits(state, batch.query)[:, : task.stop]


def count_classes(batch) -> torch.Tensor:
    return torch.zeros(7, dtype=batch.w.dtype).scatter_add(0, batch.y, batch.w)


@pytest.fixture(scope="module")
def run(make_bench, watch):
    return watch(make_bench(epochs=1), KeepsFirstImages())


@pytest.mark.parametrize("together", [1, 3])
def test_exemplars_are_used_in_next_task(make_bench, watch, together):
    run = watch(make_bench(epochs=1, together=together), KeepsFirstImages())
    for call in run.calls:
        if call.phase != "train":
            continue
        task = call.ctx.task
        for client, payload in zip(call.clients, call.payloads, strict=True):
            class_counts = torch.bincount(run.bench.train.labels[client.index], minlength=7)
            batch_counts = payload["seen"]
            assert torch.equal(batch_counts[task.start :], class_counts[task.start :].double())
            assert bool(batch_counts[: task.start].any()) == (task.index > 0)
            assert batch_counts[: task.start].sum() <= 6


def test_balanced_round_uses_only_exemplars(run, make_bench, watch):
    moments = [(call.ctx.task.index, call.phase) for call in run.calls]
    one = ["train", "train", "after_rounds", "balanced", "task_end"]
    assert moments == [(t, m) for t in range(3) for m in one if t or m != "balanced"]
    for call in run.calls:
        if call.phase == "balanced":
            assert [p.num_samples for p in call.payloads] == [len(c.index) for c in call.clients]
            assert all("head.bias" not in p and p["seen"].sum() <= 6 for p in call.payloads)
    rounds: list[dict] = []

    class RecordsRounds(Callback):
        def round(self, record):
            rounds.append(record)

    result = make_bench(epochs=1).run(KeepsFirstImages(), callback=RecordsRounds())
    assert [r["round"] for r in rounds] == [0, 1, 0, 1, 2, 0, 1, 2]
    assert result.accuracy == run.result.accuracy


def test_client_without_new_images_counts_its_exemplars(run):
    """Count exemplars in a task in which their client has no images.

    The third client has none in the second task.
    """
    second = next(c for c in run.calls if c.phase == "after_rounds" and c.ctx.task.index == 1)
    assert [c.number for c in second.clients] == [0, 1, 2]
    assert not len(second.clients[2].index)
    assert second.payloads[2].num_samples == 6 == int(second.payloads[2]["kept"].sum())
    assert torch.equal(run.states[1]["kept"], sum(p["kept"] for p in second.payloads))


def test_collect_at_task_end_counts_images_and_exemplars(run):
    class_counts = torch.bincount(run.bench.train.labels, minlength=7).double()
    images, exemplars = run.states[1]["images"], run.states[1]["kept"]
    assert torch.equal(images[3:5], class_counts[3:5])
    assert torch.equal(images[:3], exemplars[:3])
    assert exemplars[:3].any()


def test_memory_is_split_equally_over_classes(run):
    """Split six images over the classes that a client has ever held.

    Lists are shortened from their end.
    """
    first, second = (c for c in run.calls if c.phase == "after_rounds" and c.ctx.task.index < 2)
    assert first.payloads[0]["kept"].tolist()[:3] == [2, 2, 2]
    assert second.payloads[0]["kept"].tolist()[:5] == [1, 1, 1, 1, 1]


def test_trains_on_selects_training_images(make_bench, watch):
    class ChoosesTrainingImages(KeepsFirstImages):
        def training(self):
            def chosen(data, exemplars):
                return torch.cat([data.index[:1], exemplars, exemplars])

            return replace(super().training(), trains_on=chosen)

    run = watch(make_bench(epochs=1), ChoosesTrainingImages())
    for call in (c for c in run.calls if c.phase == "train"):
        for client, payload in zip(call.clients, call.payloads, strict=True):
            exemplars = len(call.memories.get(client.number, {}).get("exemplar.index", ()))
            assert payload["seen"].sum() == 1 + 2 * exemplars


def test_resumed_run_keeps_client_memory(make_bench, tmp_path, run):
    from fczoo.federation.checkpoint import Checkpoint

    class SimulatedStop(Exception):
        pass

    saves: list[int] = []

    def stop() -> None:
        saves.append(1)
        if len(saves) == 5:
            raise SimulatedStop

    bench, path = make_bench(epochs=1), tmp_path / "checkpoint"
    with pytest.raises(SimulatedStop):
        bench.run(KeepsFirstImages(), checkpoint=Checkpoint(path, stop))
    assert (
        bench.run(KeepsFirstImages(), checkpoint=Checkpoint(path)).accuracy == run.result.accuracy
    )


def test_memory_bytes_count_pixels():
    memory = {"exemplar.index": torch.arange(5), "bias": torch.zeros(2)}
    assert memory_bytes(memory, "exemplar.index", 48) == 5 * 48 + 8


def test_rows_per_seen_class_are_validated():
    task, group = Task(1, 2, 5, 7, 3), per_seen_class("count", "sum")
    training = Training(uploads={"kept.": group, "class.": per_class("count")})

    def upload(classes: int) -> Payload:
        return Payload(
            {"kept.count": torch.ones(classes), "kept.sum": torch.ones(classes, 4)}, 0, 9
        )

    assert validate_uploads({0: upload(5)}, {}, training, task, {0: 9})[1] == {}
    reason = validate_uploads({0: upload(3)}, {}, training, task, {0: 9})[1][0]
    assert reason == "kept.count has shape (3,), expected (5,)"
    means = means_of(upload(5), "kept.", group, task)
    assert means is not None and means.labels.tolist() == [0, 1, 2, 3, 4]
