"""What every method keeps: training, answers, seeds."""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.method import Distils, Method, Remembers, Surveys
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Context
from fczoo.data.views import ImageStore
from fczoo.federation.downlink import broadcast
from fczoo.federation.learning import loss_and_sums
from fczoo.functional.heads import LinearHead
from fczoo.testing.recording import Call
from fczoo.testing.subject import Subject, batch_of, need_same
from fczoo.testing.trials import need
from fczoo.testing.world import CONFIG, TASKS, random_weights, toy_bench

TIGHT = 1e-9  # float64: only the order of sums differs
TRAINED = 1e-7  # the same after Adam, which divides the rounding of a zero gradient by eps = 1e-8
SINGLE = 1e-3  # float32: Adam blows up the rounding of gradients that are zero but for rounding

# --- training


def clients_together_equal_clients_one_by_one(subject: Subject) -> None:
    """Three clients in one batched forward upload and answer as they do one after another."""
    subject = _with_gradient(subject)
    run, together, name = subject.run(), subject.run(together=3), subject.name
    need(len(run.calls) == len(together.calls), f"{name} has other rounds when clients train together")
    for one, several in zip(run.calls, together.calls, strict=True):
        for ours, theirs in zip(one.payloads, several.payloads, strict=True):
            where = f"task {one.ctx.task.index + 1}, round {one.ctx.round + 1}, client {ours.client}"
            need_same(ours, theirs, f"{name} uploads something else with --together 3 in {where}", TRAINED)
    for task in run.states:
        answers = {"logits": subject.logits(run, task)}, {"logits": subject.logits(together, task)}
        need_same(*answers, f"{name} answers otherwise after training with --together 3", 1e-6)
    need(run.result.accuracy == together.result.accuracy, f"{name} has another accuracy with --together 3")


def _with_gradient(subject: Subject) -> Subject:
    """The method with a gradient larger than rounding, which Adam blows up, from a task's first step on.

    A student equal to its teacher, below new head rows of zeros, has none: its head starts at random
    instead. Where it is its teacher's equal on other images than its own, plain gradient descent has to do.
    """
    if not isinstance(subject.method, LinearHead):
        return subject
    if isinstance(subject.method, Distils):
        return Subject(replace(subject.method, head_init="default"))
    if any(select(state, "teacher.") for state in subject.run().states.values()):
        return Subject(replace(subject.method, head_init="default", optimizer="sgd"))
    return subject


def so_they_do_in_single_precision(subject: Subject) -> None:
    """The first uploads agree in float32, too."""
    one, together = subject.run(torch.float32), subject.run(torch.float32, together=3)
    for ours, theirs in zip(one.calls[0].payloads, together.calls[0].payloads, strict=True):
        sentence = (
            f"{subject.name}'s client {ours.client} uploads something else in float32 with --together 3"
        )
        need_same(ours, theirs, sentence, SINGLE)


def clients_leave_the_state_alone(subject: Subject) -> None:
    """What the server broadcasts is read-only."""
    for call in subject.run().calls:
        need_same(call.after, call.state, f"{subject.name}'s clients change the broadcast state; copy first")


def frozen_rows_stay(subject: Subject) -> None:
    """Under ``frozen``, the rows of one task's state are the first rows of the next one's, bit for bit."""
    run, frozen = subject.run(), subject.method.frozen
    states = [run.states[t] for t in sorted(run.states)]
    for before, after in pairwise(states):
        for key, rows in select(before, *frozen).items():
            kept = torch.equal(after[key][: len(rows)], rows)
            need(
                kept, f"{subject.name} changes frozen rows of {key}; only add rows, or leave it out of frozen"
            )
    for prefix in frozen:
        filled = any(len(v) for v in select(states[-1], prefix).values())
        need(filled, f"{subject.name}.frozen names {prefix}, which the state never has")


def the_backbone_stays_frozen(subject: Subject) -> None:
    """No weight of the backbone changes in a run."""
    weights = {k: v.double() for k, v in random_weights(CONFIG).items()}
    sentence = f"{subject.name} changes the backbone's weights; train full_weights() instead"
    need_same(subject.run().bench.backbone.weights, weights, sentence)


def padding_changes_nothing(subject: Subject) -> None:
    """Rows of weight 0 with garbage for pixels and features give the same loss, gradient and sums."""
    method, run = subject.method, subject.run()
    backbone = run.bench.backbone
    for call in run.last_calls.values():
        moment = call.moment
        real = batch_of(method, run.bench.train, call.clients[0].index[:3])
        drawn = torch.rand(len(real.y), method.training().draws, generator=torch.Generator().manual_seed(0))
        real = real._replace(draws=drawn.to(real.w))
        padded = _with_garbage(real)
        sentence = f"{subject.name} counts padding, rows of weight 0, in {moment}; average by Batch.mean"
        if moment == "conclude":  # it sees batches without padding
            continue
        if moment == "train" or moment == "balanced":
            ctx = call.ctx
            train = select(call.state, *method.training().active_optims(ctx.task, ctx.round, ctx.balanced))
            ctx = _recalled(call, method, backbone)
            pairs = (_gradients(subject, backbone, train, batch, ctx) for batch in (real, padded))
            for short, long in zip(*pairs, strict=True):
                need_same(short, long, sentence, TIGHT)
            if method.training().stats == "none":
                continue
            short, long = (method.stats(backbone, train, batch, call.ctx) for batch in (real, padded))
        else:
            assert isinstance(method, Surveys)
            shared = broadcast(method, call.state)
            surveyed = (method.survey(moment, backbone, shared, b, call.ctx.task) for b in (real, padded))
            short, long = surveyed
        need_same(short, long, sentence, TIGHT)


def _with_garbage(batch: Batch, rows: int = 2) -> Batch:
    rng = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return 10 * torch.randn(rows, *like.shape[1:], generator=rng, dtype=like.dtype)

    return Batch(
        torch.cat([batch.x, noise(batch.x)]),
        torch.cat([batch.y, batch.y[:1].expand(rows)]),
        torch.cat([batch.w, batch.w.new_zeros(rows)]),
        torch.cat([batch.query, noise(batch.query)]),
        position=torch.cat([batch.position, batch.position[:1].expand(rows)]),
        draws=torch.cat([batch.draws, noise(batch.draws).abs() % 1]),
    )


def _recalled(call: Call, method: Method, backbone: Backbone) -> Context:
    """The context of a call with what its first client remembers."""
    client = call.clients[0]
    ctx = replace(call.ctx, memory=call.memories.get(client.number, {}))
    if not isinstance(method, Remembers):
        return ctx
    with torch.no_grad():
        data = call.engine.side.images_of(client)
        return replace(ctx, memory=method.prepare(backbone, data, ctx))


def _gradients(
    subject: Subject, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
) -> tuple[Tree, Tree]:
    """Loss and sums; gradient of the loss."""
    method = subject.method
    leaves = {k: v.clone().requires_grad_() for k, v in train.items()}
    if isinstance(method, Distils):
        teacher = method.teach(backbone, ctx.shared, batch, ctx.task).detach()
        batch = batch._replace(teacher=teacher)
    loss, sums = loss_and_sums(method.loss(backbone, leaves, batch, ctx), subject.name)
    need(loss.requires_grad, f"{subject.name}.loss does not depend on what it trains; look for a detach()")
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    need(any(g.abs().max() > 0 for g in found), f"{subject.name}.loss has no gradient; nothing is trained")
    return {**sums, "loss of the check": loss.detach()}, dict(zip(leaves, found, strict=True))


# --- answers


def answers_are_logits_of_the_classes_seen(subject: Subject) -> None:
    """``predict`` gives one finite logit for each class seen so far."""
    run = subject.run()
    for task in TASKS:
        logits = subject.logits(run, task.index)
        expected = (len(run.bench.test.labels), task.stop)
        need(
            logits.shape == expected, f"{subject.name}.predict gives {list(logits.shape)}, not [B, task.stop]"
        )
        need(logits.isfinite().all(), f"{subject.name}.predict gives logits that are not finite")


def answers_do_not_depend_on_the_batch(subject: Subject) -> None:
    """An image is answered alike alone, in company, and in any order."""
    run = subject.run()
    index = torch.arange(len(run.bench.test.labels))
    whole = {"logits": subject.logits(run, 2)}
    alone = {"logits": subject.logits(run, 2, batch_size=1)}
    turned = {"logits": subject.logits(run, 2, index.flip(0), batch_size=5).flip(0)}
    for other in (alone, turned):
        sentence = (
            f"{subject.name}.predict answers an image otherwise in another batch; treat rows one by one"
        )
        need_same(other, whole, sentence, TIGHT)


def features_are_rows_of_images(subject: Subject) -> None:
    """``features`` gives a finite row an image under the last state, whatever the batch."""
    record, method = subject.run(), subject.method
    store, state = record.bench.test, record.states[len(TASKS) - 1]
    index = torch.arange(min(6, len(store.labels)))
    found = method.features(store.backbone, state, batch_of(method, store, index))
    need(
        found.ndim == 2 and len(found) == len(index) and bool(found.isfinite().all()),
        f"{method.name}.features gave {tuple(found.shape)}, or not finite; give a row an image, [B, D]",
    )
    single = [method.features(store.backbone, state, batch_of(method, store, i[None])) for i in index]
    need_same(
        {"features": torch.cat(single)},
        {"features": found},
        f"{method.name}.features of an image depends on the others in its batch",
        TIGHT,
    )


def accuracy_covers_every_task_seen(subject: Subject) -> None:
    """The result's accuracies are those of ``predict`` on the test images of each task seen."""
    run = subject.run()
    labels = run.bench.test.labels
    need(len(run.result.accuracy) == len(TASKS), f"{subject.name} is not evaluated after every task")
    for t, row in enumerate(run.result.accuracy):
        right = (subject.logits(run, t).argmax(1) == labels).double()
        expected = []
        for seen in TASKS[: t + 1]:
            expected.append(100 * right[(labels >= seen.start) & (labels < seen.stop)].mean().item())
        same = len(row) == len(expected) and torch.allclose(torch.tensor(row), torch.tensor(expected))
        need(same, f"{subject.name} has accuracies {row} where its predictions have {expected}")


def labels_that_come_back_are_added_to(subject: Subject) -> None:
    """Where the tasks are domains of the same classes, the method learns from all, or is refused."""
    bench, name = toy_bench(domains=True, rounds=1, epochs=1), subject.name
    if not subject.method.returning:
        try:
            bench.run(subject.method)
        except FczooError as error:
            need("--tasks domains" in str(error), f"{name} fails where labels come back: {error}")
            return
        raise AssertionError(f"{name} runs where labels come back, but does not say returning = True")
    others = bench.stream.train.pixels.copy()
    others[bench.stream.train.domains == 0] ^= 255  # another first domain
    other = replace(bench, train=ImageStore(bench.stream.train._replace(pixels=others), bench.backbone))
    states = []
    for world in (bench, other):
        run = world.start(subject.method)
        result = run.run()
        shape = [len(row) for row in result.accuracy]
        need(shape == [1, 2], f"{name} is not evaluated on every domain seen")
        states.append(run.state)
    first, second = states
    need(
        any(not torch.equal(value, second[key]) for key, value in first.items()),
        f"{name} ends the same whatever it saw in the first domain; add to what the state has of a label",
    )


# --- seeds


def the_same_seed_gives_the_same_run(subject: Subject) -> None:
    """Accuracies and the final state are the same in a second run, bit for bit."""
    run, again = subject.run(), subject.run(copy=1)
    sentence = f"{subject.name} gives another run from the same seed; draw from rng alone and keep no state"
    need(again.result.accuracy == run.result.accuracy, sentence)
    need_same(again.states[2], run.states[2], sentence)


def another_seed_gives_another_run(subject: Subject) -> None:
    """Where something is trained, another seed trains something else."""
    run = subject.run()
    if not run.rounds:
        return
    trained = tuple(subject.method.training().optims)
    ours, theirs = (select(r.states[2], *trained) for r in (run, subject.run(seed=1)))
    differ = any(not torch.equal(value, theirs[name]) for name, value in ours.items())
    need(differ, f"{subject.name} trains the same from another seed; draw from rng")
