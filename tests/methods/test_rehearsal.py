"""Methods with exemplars: their distinctive steps, worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fczoo import Context, Task, create_method
from fczoo.baselines.bic import fit_bias, validation_split
from fczoo.baselines.dde import colliding_effect, neighbours, remove_momentum_effect
from fczoo.baselines.geodl import flow_kernel, geodesic_loss
from fczoo.functional.cosine import cosines, imprint_head, margin_ranking
from fczoo.functional.exemplars import herding, residual_herding
from helpers_methods import CLOSE, batch

# --- exemplars


def test_residual_herding_by_hand():
    """Compare the selection with one worked out by hand.

    Unit features at 0, 60 and 90 degrees have the mean (.5, .622). The middle one comes first, and
    with w = (.5, .378) once more; then w = (.5, .134) points most to the one at 0 degrees.
    """
    angles = torch.tensor([0.0, math.pi / 3, math.pi / 2], dtype=torch.float64)
    features = 3 * torch.stack([angles.cos(), angles.sin()], 1)
    assert residual_herding(features, 2).tolist() == [1, 0]
    assert residual_herding(features, 9, turns=2).tolist() == [1]
    assert sorted(residual_herding(features, 9).tolist()) == [0, 1, 2]


def test_herding_keeps_order_of_ties():
    """Keep the order of two images that are equally near to their mean up to rounding."""
    for scale in (1.0, 1 + 1e-9):
        features = torch.tensor([[1.0, 0.0], [0.0, scale]], dtype=torch.float64)
        assert herding(features, 2, normalise=False).tolist() == [0, 1]
        assert residual_herding(features, 2).tolist() == [0, 1]


# --- LUCIR


def test_margin_ranking_by_hand():
    """Compare the margin ranking loss with a value worked out by hand.

    One exemplar with cosine .9, new classes at .6 and .2: mean of [.5 - .9 + .6]_+ = .2 and 0.
    """
    scores = torch.tensor([[0.9, 0.6, 0.2], [0.1, 0.3, 0.5]], dtype=torch.float64)
    data = batch(scores, [0, 2])  # the second image is new and does not count
    assert float(margin_ranking(scores, data, 1, hardest=2, margin=0.5)) == pytest.approx(0.1)
    assert float(margin_ranking(scores, data, 1, hardest=1, margin=0.5)) == pytest.approx(0.2)
    assert float(margin_ranking(scores, batch(scores, [1, 2]), 1, 2, 0.5)) == 0


def test_imprinting_by_hand():
    """Set rows to means of unit features at their old norm; keep a class without images."""
    state = {"head.new": torch.tensor([[0.0, 2.0], [0.0, 2.0]])}
    sums = {
        "class.count": torch.tensor([3.0, 0.0]),
        "class.sum": torch.tensor([[3.0, 0.0], [0.0, 0.0]]),
    }
    assert imprint_head(state, sums)["head.new"].tolist() == [[2.0, 0.0], [0.0, 2.0]]


@torch.no_grad()
def test_lucir_distillation_by_hand(noise):
    """Compare LUCIR's distillation with a value worked out by hand.

    Two old and two new classes give the weight 5 sqrt(2 / 2). Features equal to the teacher's give
    no distillation.
    """
    method, task = create_method("lucir"), Task(1, 2, 4, 4, 2)
    features, old = noise(3, 5), noise(2, 5)
    train = {"head.new": noise(2, 5), "sigma": torch.tensor(4.0, dtype=torch.float64)}
    ctx = Context(task, 0, 1, {"head.old": old})

    class IdentityBackbone:
        def __call__(self, images, plugs=None):
            return images

    def total(teacher):
        return method.loss(IdentityBackbone(), train, batch(features, [2, 3, 2], teacher), ctx)[0]

    scores = cosines(features, torch.cat([old, train["head.new"]]))
    plain = torch.nn.functional.cross_entropy(4 * scores, torch.tensor([2, 3, 2]))
    assert float(total(features)) == pytest.approx(float(plain))
    assert float(total(-features)) == pytest.approx(float(plain) + 10)  # 1 - cos = 2


@pytest.mark.parametrize("name", ["lucir", "geodl"])
def test_new_rows_start_at_mean_feature_of_all_clients(record, name):
    run = record(name)
    for call in run.rounds:
        if call.ctx.round == 0 and call.phase == "train":
            index = torch.cat([c.index for c in call.clients])
            labels = run.bench.train.labels[index]
            assert run.method.tune == "full"
            plugs = {k: v for k, v in call.state.items() if k.startswith("full.")}
            features = run.bench.backbone(run.bench.train.view(index), plugs)
            features = torch.nn.functional.normalize(features, dim=-1)
            for row, c in enumerate(range(call.ctx.task.start, call.ctx.task.stop)):
                mean = features[labels == c].mean(0)
                assert float(
                    cosines(mean[None], call.state["head.new"][row][None])
                ) == pytest.approx(1)


# --- BiC


class LabelStore:
    """Replace a client's images: its positions are 0, 1, 2, ..."""

    def __init__(self, labels, index):
        self.all, self.index = torch.tensor(labels), torch.tensor(index)

    def labels(self, index):
        return self.all[index]


def test_bic_holds_out_equal_images_per_class():
    """Hold out the same number of images of every class.

    Four exemplars of class 0 and two of class 1: one each at a quarter, and one of each new class.
    """
    data = LabelStore([0, 0, 0, 0, 1, 1, 2, 2, 2, 3], [6, 7, 8, 9])
    exemplars = torch.arange(6)
    training, validation = validation_split(data, exemplars, 0.25)
    assert sorted(validation.tolist()) == [
        3,
        5,
        8,
    ]  # class 3 has a single image, which is trained on
    assert sorted([*training.tolist(), *validation.tolist()]) == list(range(10))
    training, validation = validation_split(data, exemplars[:0], 0.25)
    assert not len(validation) and sorted(training.tolist()) == [6, 7, 8, 9]


def test_bias_fit_corrects_new_class_logits():
    """Correct logits of new classes, which are too high, by alpha and beta."""
    y = torch.tensor([0, 1, 2, 3] * 5)
    logits = 4 * torch.nn.functional.one_hot(y, 4).double()
    too_high = logits + torch.tensor([0.0, 0, 5, 5])
    assert (too_high.argmax(1) != y).any()
    alpha, beta = fit_bias([(too_high, y)], 2, epochs=400, lr=0.05)
    corrections = torch.cat([too_high[:, :2], alpha * too_high[:, 2:] + beta], 1)
    assert (corrections.argmax(1) == y).all()
    assert fit_bias([(too_high, y)], 2, 1, 0.0).tolist() == [
        1.0,
        0.0,
    ]


def test_bic_corrects_last_task_only_and_teacher_uses_correction(record):
    run = record("bic")
    for t in (1, 2):
        scale, task = run.states[t]["correction.scale"], run.bench.stream.tasks[t]
        assert (scale[: task.start] == 1).all()
        assert (scale[task.start : task.stop] != 1).all()
        assert len(scale[task.start : task.stop].unique()) == 1
    last = next(c for c in run.calls if c.phase == "train" and c.ctx.task.index == 2)
    assert torch.equal(last.state["teacher.correction.scale"], run.states[1]["correction.scale"])
    conclude = [c for c in run.calls if c.phase == "after_rounds"][1]
    uploads = [p for p in conclude.payloads if p]
    mean = sum(p["bias"] for p in uploads) / sum(p["validated"] for p in uploads)
    torch.testing.assert_close(mean[0], run.states[1]["correction.scale"][3])


def test_bic_loss_by_hand(noise):
    """Compare BiC's loss with a value worked out by hand.

    Two old of three classes: a third of the cross-entropy, two thirds of 4 times the distillation.
    """
    method, ctx = create_method("bic"), Context(Task(1, 2, 3, 3, 2), 0, 1, {})
    logits, teacher = noise(4, 3), noise(4, 3)
    head = {"head.weight": torch.eye(3).double(), "head.bias": torch.zeros(3).double()}

    class IdentityBackbone:
        def __call__(self, images, plugs=None):
            return images

    y = torch.tensor([0, 2, 2, 1])
    loss, _ = method.loss(IdentityBackbone(), head, batch(logits, y, teacher), ctx)
    plain = torch.nn.functional.cross_entropy(logits, y)
    q, log_p = (teacher[:, :2] / 2).softmax(1), (logits[:, :2] / 2).log_softmax(1)
    assert float(loss) == pytest.approx(float(plain / 3 - 2 / 3 * 4 * (q * log_p).sum(1).mean()))


# --- SS-IL


def test_ssil_repeats_exemplars_to_quarter_of_new_images():
    data, chosen = (
        LabelStore([0] * 8 + [1, 1], list(range(8))),
        create_method("ssil").training().trains_on,
    )
    assert chosen is not None
    assert chosen(data, torch.tensor([8])).tolist() == [*range(8), 8, 8]
    assert chosen(data, torch.tensor([8, 9, 9])).tolist() == [
        *range(8),
        8,
        9,
        9,
    ]  # none is omitted
    assert chosen(data, torch.tensor([], dtype=torch.int64)).tolist() == list(range(8))


def test_ssil_separates_old_and_new_logits(noise):
    method, logits = create_method("ssil"), noise(2, 5).requires_grad_()
    (gradient,) = torch.autograd.grad(
        method.separated_loss(logits, torch.tensor([1, 4]), 3).sum(), logits
    )
    assert gradient[0, :3].any() and not gradient[0, 3:].any()
    assert gradient[1, 3:].any() and not gradient[1, :3].any()
    logits = logits.detach()
    groups = torch.tensor([[1.0, 1, 0], [0, 0, 1]], dtype=torch.float64)
    assert float(method.task_distillation(logits[:, :3], logits[:, :3], groups).abs().max()) < 1e-12
    shift = logits[:, :3] + 7 * groups[0]  # a constant on all logits of one task changes nothing
    teacher = noise(2, 3)
    torch.testing.assert_close(
        method.task_distillation(shift, teacher, groups),
        method.task_distillation(logits[:, :3], teacher, groups),
    )


# --- GeoDL


def orthonormal_columns(rows: int, number: int, seed: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(rows, number, generator=rng, dtype=torch.float64)).Q


def test_flow_kernel_of_two_axes_by_hand():
    """Compare the kernel between two axes with a value worked out by hand.

    G = [[1/2, 1/pi], [1/pi, 1/2]]. The loss of the two axes and their distance are 1 - 2 / pi.
    """
    axes = torch.eye(2, dtype=torch.float64)
    kernel = flow_kernel(axes[:, :1], axes[:, 1:])
    entries = [[0.5, 1 / math.pi], [1 / math.pi, 0.5]]
    torch.testing.assert_close(kernel, torch.tensor(entries, dtype=torch.float64), **CLOSE)
    for distance in (False, True):
        loss = geodesic_loss(axes[1:], axes[:1], kernel, distance)
        assert float(loss[0]) == pytest.approx(1 - 2 / math.pi)


@settings(max_examples=25, deadline=None)
@given(st.integers(4, 9), st.integers(1, 4), st.integers(0, 10**6))
def test_flow_kernel_is_symmetric_in_its_arguments(rows, size, seed):
    old, new = orthonormal_columns(rows, size, seed), orthonormal_columns(rows, size, seed + 1)
    kernel = flow_kernel(old, new)
    torch.testing.assert_close(kernel, kernel.mT)
    torch.testing.assert_close(flow_kernel(new, old), kernel, rtol=1e-7, atol=1e-7)
    assert float(kernel.trace()) == pytest.approx(size)
    values = torch.linalg.eigvalsh(kernel)
    assert values.min() > -1e-9 and values.max() < 1 + 1e-9
    torch.testing.assert_close(flow_kernel(old, old), old @ old.mT)


def test_geodl_ignores_padding_and_degenerate_batches(noise):
    method, features, teacher = create_method("geodl"), noise(5, 8), noise(5, 8)
    whole_loss = method.geodesic(features, batch(features, [0] * 5, teacher))
    longer = torch.cat([features, 9 * noise(2, 8)]), torch.cat([teacher, 9 * noise(2, 8)])
    weights = torch.tensor([1.0] * 5 + [0.0] * 2, dtype=torch.float64)
    padded_loss = method.geodesic(longer[0], batch(longer[0], [0] * 7, longer[1], weights))
    torch.testing.assert_close(padded_loss[:5], whole_loss, **CLOSE)
    two = method.geodesic(features[:2], batch(features[:2], [0] * 2, teacher[:2]))
    assert not two.any()
    assert not method.geodesic(features, batch(features, [0] * 5, features)).abs().gt(1e-9).any()


# --- DDE


def test_neighbours_by_hand():
    """Compare neighbours with values worked out by hand.

    Images are on a circle at 0, 10, 30 and 31 degrees; the last one is an exemplar and never a
    neighbour.
    """
    angles = torch.deg2rad(torch.tensor([0.0, 10, 30, 31], dtype=torch.float64))
    features = torch.tensor([[5.0], [1], [2], [3]]).double() * torch.stack(
        [angles.cos(), angles.sin()], 1
    )
    own_row = torch.tensor([0, 1, 2, -1])
    assert neighbours(features, features[:3], own_row, 2).tolist() == [
        [1, 2],
        [0, 2],
        [1, 0],
        [2, 1],
    ]
    assert neighbours(features, features[:3], own_row, 9).shape == (
        4,
        2,
    )  # an image is not its own neighbour
    assert neighbours(features[:1], features[:1], own_row[:1], 9).shape == (1, 0)


def test_colliding_effect_by_hand():
    """Compare the colliding effect with a value worked out by hand.

    An own probability of 1/2 and neighbours certain of the class give -log .75; no neighbours give
    log 2.
    """
    logits, y = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([0])
    sure = torch.tensor([[[1.0, 0.0]] * 3], dtype=torch.float64)
    assert float(colliding_effect(logits, y, sure)) == pytest.approx(-math.log(0.75))
    assert float(colliding_effect(logits, y, sure[:, :0])) == pytest.approx(math.log(2))
    assert float(colliding_effect(logits, y, logits.softmax(1)[:, None])) == pytest.approx(
        math.log(2)
    )


def test_momentum_direction_is_removed(noise):
    features, rows, sigma = noise(4, 6), noise(3, 6), torch.tensor(2.0, dtype=torch.float64)
    plain, h = sigma * cosines(features, rows), noise(6)
    torch.testing.assert_close(
        remove_momentum_effect(features, rows, h, sigma, 0.0), plain, **CLOSE
    )
    torch.testing.assert_close(
        remove_momentum_effect(features, rows, 0 * h, sigma, 0.5), plain, **CLOSE
    )
    logits = remove_momentum_effect(features, rows, h, sigma, 0.5)
    torch.testing.assert_close(
        logits, remove_momentum_effect(features, rows, -7 * h, sigma, 0.5), **CLOSE
    )
    by_hand = plain - 0.5 * cosines(features, h[None]) * sigma * cosines(h[None], rows)
    torch.testing.assert_close(logits, by_hand, **CLOSE)
    assert remove_momentum_effect(h[None], rows, h, sigma, 1.0).abs().max() < 1e-9


def test_dde_keeps_mean_feature_of_last_round(record):
    """Average the clients' features of the last round.

    Clients send none in the first task, which does not use them.
    """
    run = record("dde")
    for call in (c for c in run.calls if c.phase == "train" and c.ctx.round == c.ctx.rounds - 1):
        t, sizes = call.ctx.task.index, [p.num_samples for p in call.payloads]
        assert all(("momentum" in p) == (t > 0) for p in call.payloads)
        sums = [n * p["momentum"] for n, p in zip(sizes, call.payloads, strict=True) if t]
        mean = sum(sums) / sum(sizes) if t else torch.zeros_like(run.states[0]["momentum"])
        torch.testing.assert_close(run.states[t]["momentum"], mean)
    assert all(
        not any(k.startswith("near.") for k in m) for m in run.calls[-1].engine.memories.values()
    )
