"""Rules of methods: training, predictions and seeds; see ``method_rules``."""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.method import Method
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, Context, HasClientMemory, HasTeacher
from fczoo.data.views import ImageStore
from fczoo.federation.local_trainer import check_loss_result
from fczoo.federation.server import broadcast
from fczoo.functional.heads import LinearHead
from fczoo.testing.method_under_test import Call, MethodUnderTest, batch_of, models_of, need_same
from fczoo.testing.toy_benchmark import CONFIG, TASKS, need, random_weights, toy_bench

SUM_TOLERANCE = 1e-9  # float64: only the order of sums differs
TRAINING_TOLERANCE = 1e-7  # float64, after Adam, which divides rounding errors by eps = 1e-8
FLOAT32_TOLERANCE = 1e-3  # float32: Adam amplifies rounding errors of zero gradients

# --- training


def check_batched_clients(subject: MethodUnderTest) -> None:
    """Check that three clients in one batched forward have the same results as one by one.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    subject = _with_gradient(subject)
    run, together, name = subject.run(), subject.run(together=3), subject.name
    need(
        len(run.calls) == len(together.calls),
        f"{name} has a different number of exchanges with --together 3",
    )
    for call, batched_call in zip(run.calls, together.calls, strict=True):
        for actual, expected in zip(call.payloads, batched_call.payloads, strict=True):
            location = (
                f"task {call.ctx.task.index + 1}, round {call.ctx.round + 1}, "
                f"client {actual.client}"
            )
            need_same(
                actual,
                expected,
                f"{name} uploads different values with --together 3 in {location}",
                TRAINING_TOLERANCE,
            )
    for task in run.states:
        answers = {"logits": subject.logits(run, task)}, {"logits": subject.logits(together, task)}
        need_same(
            *answers, f"{name} predicts different logits after training with --together 3", 1e-6
        )
    need(
        run.result.accuracy == together.result.accuracy,
        f"{name} has a different accuracy with --together 3",
    )


def _with_gradient(subject: MethodUnderTest) -> MethodUnderTest:
    """Return a variant of the method whose gradient exceeds rounding errors.

    Adam would amplify rounding errors. A student that equals its teacher, with new head rows of
    zeros, has no gradient; its head therefore starts at random. If the state contains teachers, the
    optimizer is also SGD.
    """
    if not isinstance(subject.method, LinearHead):
        return subject
    if isinstance(subject.method, HasTeacher):
        return MethodUnderTest(replace(subject.method, head_init="default"))
    if any(select(state, "teacher.") for state in subject.run().states.values()):
        return MethodUnderTest(replace(subject.method, head_init="default", optimizer="sgd"))
    return subject


def check_batched_clients_in_float32(subject: MethodUnderTest) -> None:
    """Check in float32 that first uploads of single and batched clients agree, and a whole run.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    uploads = (subject.first_uploads(torch.float32, together) for together in (1, 3))
    for actual, expected in zip(*uploads, strict=True):
        sentence = f"client {actual.client} uploads different values in float32 with --together 3"
        need_same(actual, expected, f"{subject.name}'s {sentence}", FLOAT32_TOLERANCE)
    subject.run(torch.float32, together=3)


def check_clients_change_no_state(subject: MethodUnderTest) -> None:
    """Check that clients do not change the broadcast state.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    for call in subject.run().calls:
        need_same(
            call.state_after,
            call.state,
            f"{subject.name}'s clients change the broadcast state; copy first",
        )


def check_append_only_rows(subject: MethodUnderTest) -> None:
    """Check that rows of ``append_only`` state are unchanged in the next task, bit for bit.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    run, frozen = subject.run(), subject.method.append_only
    states = [run.states[t] for t in sorted(run.states)]
    for old_state, new_state in pairwise(states):
        for key, rows in select(old_state, *frozen).items():
            rows_unchanged = torch.equal(new_state[key][: len(rows)], rows)
            need(
                rows_unchanged,
                f"{subject.name} changes frozen rows of {key}; only add rows, or leave it out of "
                "append_only",
            )
    for prefix in frozen:
        has_rows = any(len(v) for v in select(states[-1], prefix).values())
        need(has_rows, f"{subject.name}.append_only names {prefix}, which is not in the state")


def check_backbone_weights(subject: MethodUnderTest) -> None:
    """Check that no weight of the backbone changes in a run.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    weights = {k: v.double() for k, v in random_weights(CONFIG).items()}
    sentence = f"{subject.name} changes the backbone's weights; train full_weights() instead"
    need_same(subject.run().bench.backbone.weights, weights, sentence)


def check_padding(subject: MethodUnderTest) -> None:
    """Check that padding (random rows of weight 0) changes no loss, gradient or statistic.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    method, run = subject.method, subject.run()
    backbone = run.bench.backbone
    for call in run.last_calls.values():
        phase = call.phase
        real_batch = batch_of(method, run.bench.train, call.clients[0].index[:3])
        random_draws = torch.rand(
            len(real_batch.y), method.training().draws, generator=torch.Generator().manual_seed(0)
        )
        client = torch.full_like(real_batch.client, call.clients[0].number)
        real_batch = real_batch._replace(draws=random_draws.to(real_batch.w), client=client)
        padded_batch = _with_padding(real_batch)
        sentence = f"{subject.name} counts padding (rows of weight 0) in {phase}; use Batch.mean"
        if phase == "after_rounds":  # this phase has no padding
            continue
        if phase == "train" or phase == "balanced":
            ctx = call.ctx
            train = select(
                call.state, *method.training().active_optims(ctx.task, ctx.round, ctx.balanced)
            )
            ctx = _context_with_memory(call, method, backbone)
            pairs = (
                _gradients(subject, backbone, train, batch, ctx)
                for batch in (real_batch, padded_batch)
            )
            for short, long in zip(*pairs, strict=True):
                need_same(short, long, sentence, SUM_TOLERANCE)
            if "after_training" not in method.training().collect_at:
                continue
            short, long = (
                method.collect("after_training", backbone, train, batch, call.ctx)
                for batch in (real_batch, padded_batch)
            )
        else:
            broadcast_state = broadcast(method, call.state)
            short, long = (
                method.collect(phase, backbone, broadcast_state, b, call.ctx)
                for b in (real_batch, padded_batch)
            )
        need_same(short, long, sentence, SUM_TOLERANCE)


def _with_padding(batch: Batch, rows: int = 2) -> Batch:
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
        client=torch.cat([batch.client, batch.client[:1].expand(rows)]),
    )


def _context_with_memory(call: Call, method: Method, backbone: Backbone) -> Context:
    """Return the context of a call with the memory of its first client."""
    client = call.clients[0]
    ctx = replace(call.ctx, memory=call.memories.get(client.number, {}))
    if not isinstance(method, HasClientMemory):
        return ctx
    with torch.no_grad():
        data = call.engine.trainer.images_of(client)
        return replace(ctx, memory=method.before_training(backbone, data, ctx))


def _gradients(
    subject: MethodUnderTest, backbone: Backbone, train: Tree, batch: Batch, ctx: Context
) -> tuple[Tree, Tree]:
    """Return the loss and the sums of a step, and the gradient of the loss."""
    method = subject.method
    leaves = {k: v.clone().requires_grad_() for k, v in train.items()}
    if isinstance(method, HasTeacher):
        teacher = method.teacher_outputs(backbone, ctx.shared, batch, ctx.task).detach()
        batch = batch._replace(teacher=teacher)
    loss, sums = check_loss_result(method.loss(backbone, leaves, batch, ctx), subject.name)
    need(
        loss.requires_grad,
        f"{subject.name}.loss does not depend on trained tensors; look for a detach()",
    )
    gradients = torch.autograd.grad(
        loss, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    need(
        any(g.abs().max() > 0 for g in gradients),
        f"{subject.name}.loss has only zero gradients; nothing is trained",
    )
    return {**sums, "loss of the check": loss.detach()}, dict(zip(leaves, gradients, strict=True))


# --- predictions


def check_logits(subject: MethodUnderTest) -> None:
    """Check that ``predict`` gives one finite logit for each class seen so far.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    run = subject.run()
    for task in TASKS:
        logits = subject.logits(run, task.index)
        expected_shape = (len(run.bench.test.labels), task.stop)
        need(
            logits.shape == expected_shape,
            f"{subject.name}.predict returns {list(logits.shape)} instead of one logit per class "
            "seen, [B, task.stop]",
        )
        need(logits.isfinite().all(), f"{subject.name}.predict returns logits that are not finite")


def check_logits_of_batches(subject: MethodUnderTest) -> None:
    """Check that an image gets the same logits in any batch and order.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    run = subject.run()
    index = torch.arange(len(run.bench.test.labels))
    full_batch = {"logits": subject.logits(run, 2)}
    single_images = {"logits": subject.logits(run, 2, batch_size=1)}
    reversed_order = {"logits": subject.logits(run, 2, index.flip(0), batch_size=5).flip(0)}
    for logits in (single_images, reversed_order):
        sentence = (
            f"{subject.name}.predict returns logits that depend on other images of the batch; "
            "compute each row from its image only"
        )
        need_same(logits, full_batch, sentence, SUM_TOLERANCE)


def check_features(subject: MethodUnderTest) -> None:
    """Check that ``features`` returns one finite row per image, independent of the batch.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    record, method = subject.run(), subject.method
    store, state = record.bench.test, record.states[len(TASKS) - 1]
    index = torch.arange(min(6, len(store.labels)))
    features = method.features(store.backbone, state, batch_of(method, store, index))
    need(
        features.ndim == 2 and len(features) == len(index) and bool(features.isfinite().all()),
        f"{method.name}.features returns {list(features.shape)}, or values that are not finite; "
        "return one finite row per image, [B, D]",
    )
    single = [
        method.features(store.backbone, state, batch_of(method, store, i[None])) for i in index
    ]
    need_same(
        {"features": torch.cat(single)},
        {"features": features},
        f"{method.name}.features returns rows that depend on other images of the batch",
        SUM_TOLERANCE,
    )


def check_accuracy(subject: MethodUnderTest) -> None:
    """Check that the result's accuracies match ``predict`` on each task seen so far.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    run = subject.run()
    labels = run.bench.test.labels
    need(
        len(run.result.accuracy) == len(TASKS), f"{subject.name} is not evaluated after every task"
    )
    for t, row in enumerate(run.result.accuracy):
        correct = (subject.answers(run, t) == labels).double()
        expected_row = []
        for past_task in TASKS[: t + 1]:
            of_task = (labels >= past_task.start) & (labels < past_task.stop)
            expected_row.append(100 * correct[:, of_task].mean().item())
        same = len(row) == len(expected_row) and torch.allclose(
            torch.tensor(row), torch.tensor(expected_row)
        )
        need(same, f"{subject.name} has accuracies {row}, but its predictions give {expected_row}")


def check_recurring_classes(subject: MethodUnderTest) -> None:
    """Check that the method learns recurring classes from all domains, or rejects such tasks.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    bench, name = toy_bench(domains=True, rounds=1, epochs=1, batch_size=8), subject.name
    if not subject.method.supports_recurring_classes:
        try:
            bench.run(subject.method)
        except FczooError as error:
            need("tasks domains" in str(error), f"{name} fails with recurring classes: {error}")
            return
        raise AssertionError(
            f"{name} runs with recurring classes, but does not set "
            "supports_recurring_classes = True"
        )
    other_pixels = bench.stream.train.pixels.copy()
    other_pixels[bench.stream.train.domains == 0] ^= 255  # inverts the images of the first domain
    other_bench = replace(
        bench, train=ImageStore(bench.stream.train._replace(pixels=other_pixels), bench.backbone)
    )
    states = []
    for scenario in (bench, other_bench):
        run = scenario.start(subject.method)
        result = run.run()
        shape = [len(row) for row in result.accuracy]
        need(shape == [1, 2], f"{name} is not evaluated on every domain seen")
        states.append(models_of(run))
    first, second = states
    need(
        any(not torch.equal(value, second[key]) for key, value in first.items()),
        f"{name} ends in the same state whatever the images of the first domain are; if labels "
        "recur, combine new statistics with old ones",
    )


# --- seeds


def check_same_seed(subject: MethodUnderTest) -> None:
    """Check that a repeated run has the same accuracies and state after two tasks, bit for bit.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    run, second_run = subject.run(), subject.start(tasks=2)
    sentence = (
        f"{subject.name} is not reproducible with the same seed; draw only from rng, keep no state"
    )
    need(second_run.result.accuracy == run.result.accuracy[:2], sentence)
    need_same([*second_run.models.values()][-1], run.states[1], sentence)


def check_other_seed(subject: MethodUnderTest) -> None:
    """Check that another seed gives other trained tensors in the first task.

    Args:
        subject: The method and its runs in the toy benchmark.
    """
    run = subject.run()
    if not run.rounds:
        return
    prefixes = tuple(subject.method.training().optims)
    states = [run.states[0], subject.start(tasks=1, seed=1).state]
    if subject.method.training().own_models:
        states, prefixes = [models_of(subject.start(1, seed=seed)) for seed in (0, 1)], ("client",)
    first, second = (select(state, *prefixes) for state in states)
    differ = any(not torch.equal(value, second[name]) for name, value in first.items())
    need(differ, f"{subject.name} trains identically with another seed; draw from rng")
