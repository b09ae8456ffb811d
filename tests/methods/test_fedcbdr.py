"""FedCBDR: the scaled loss, leverage scores, and the joint draw of exemplars."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fczoo import Batch, Context, Task, create_method
from fczoo.baselines.fedcbdr import BINS, leverage_scores, places_of, pseudo_inverse
from fczoo.core.types import whole_batch
from helpers_golden import compare, golden
from helpers_official import Features
from helpers_payload import server_context

TASK = Task(1, 2, 4, 6, 3)


def test_loss_of_old_and_new_images() -> None:
    """Compare the loss and its gradient with the recorded output; a single mean differs."""
    g, method = golden("fedcbdr_tts"), create_method("fedcbdr")
    logits = g["in.logits"].clone().requires_grad_()
    batch = Batch(logits, g["in.labels"], torch.ones(8, dtype=torch.float64), logits)
    loss = method.scaled_loss(logits, batch, int(g["in.old"]))
    compare("fedcbdr_tts", loss, g["out.loss"], 1e-8)
    (gradient,) = torch.autograd.grad(loss, logits)
    compare("fedcbdr_tts", gradient, g["out.grad"], 1e-8)
    assert abs(float(loss.detach() - g["alt.one_mean"])) > 0.1


def test_loss_without_replay_and_in_first_task() -> None:
    method, logits = create_method("fedcbdr"), torch.zeros(2, 4)
    batch = whole_batch(logits, torch.tensor([2, 3]))
    # new images only: 0.8 log 4; in the first task plain cross-entropy
    assert float(method.scaled_loss(logits, batch, 2)) == pytest.approx(0.8 * 1.3862944)
    assert float(method.scaled_loss(logits, batch, 0)) == pytest.approx(1.3862944)


def test_leverage_scores_by_hand() -> None:
    """Score two images that share a direction, (1, 0) and (2, 0), and a third with its own."""
    features = torch.tensor([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 3.0, 0.0]])
    gram = features.mT @ features
    scores = leverage_scores(features, pseudo_inverse(gram).float())
    assert scores.tolist() == pytest.approx([0.2, 0.8, 1.0])
    # only the leading direction: 9 > 5
    scores = leverage_scores(features, pseudo_inverse(gram, leading=1).float())
    assert scores.tolist() == pytest.approx([0.0, 0.0, 1.0])


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_leverage_scores_sum_to_rank(images: int, width: int, seed: int) -> None:
    """Check also that neither a rotation of features nor the partition changes the scores."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(images, width, generator=generator, dtype=torch.float64)
    scores = leverage_scores(features, pseudo_inverse(features.mT @ features))
    assert float(scores.sum()) == pytest.approx(min(images, width), abs=1e-6)
    assert ((scores > -1e-9) & (scores < 1 + 1e-9)).all()
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]
    turned = features @ turn
    split = turned[: images // 2].mT @ turned[: images // 2]
    gram = split + turned[images // 2 :].mT @ turned[images // 2 :]
    torch.testing.assert_close(leverage_scores(turned, pseudo_inverse(gram)), scores)


def test_places_of_waiting_times_by_hand() -> None:
    """Map waiting times to 1024 / 12 places per decade, with 1 in the middle."""
    waits = torch.tensor([0.0, 1e-6, 1.0, 1.03, 1e7], dtype=torch.float64)
    assert places_of(waits).tolist() == [0, 0, 512, 513, BINS - 1]


class ClientImages:
    """Hold the labels and features of one client's images by position."""

    def __init__(self, labels: Tensor, features: Tensor, index: Tensor) -> None:
        self.all_labels, self.features, self.index = labels, features, index
        self.earlier = torch.empty(0, dtype=torch.int64)

    def labels(self, index: Tensor) -> Tensor:
        return self.all_labels[index]

    def batches(self, index: Tensor):
        if len(index):
            yield whole_batch(self.features[index], self.labels(index), self.features[index])


@pytest.mark.parametrize("sampling", ["leverage", "uniform"])
def test_clients_draw_equal_number_per_class(sampling: str) -> None:
    """Keep five images of each class over both clients, of 40 of class 2 and 8 of class 3.

    The server's last place decides; a client first keeps up to five images of each class.
    """
    method = create_method("fedcbdr", per_task=10, sampling=sampling, tune="head")
    labels = torch.tensor([2] * 40 + [3] * 8)
    features = torch.randn(48, 3, generator=torch.Generator().manual_seed(5))
    clients = [
        ClientImages(labels, features, torch.arange(48)[torch.arange(48) % 2 == k]) for k in (0, 1)
    ]
    state = {
        "last_place": torch.full((6,), BINS - 1),
        "draw_seed": torch.tensor([3]),
        "leverage": pseudo_inverse(features.mT @ features).float(),
    }
    ctx = Context(TASK, 0, 1, state)
    answers = [method.end_task_client(Features(), data, ctx) for data in clients]
    for memory, _ in answers:
        assert torch.bincount(labels[memory["exemplar.index"]]).tolist()[2] == 5
    places = sum(upload["places"] for _, upload in answers)
    after = method.update_from("after_rounds", state, {"places": places}, server_context(TASK))
    assert "leverage" not in after
    kept = [
        method.before_training(Features(), data, Context(TASK, 0, 1, after, memory))[
            "exemplar.index"
        ]
        for data, (memory, _) in zip(clients, answers, strict=True)
    ]
    number = torch.bincount(labels[torch.cat(kept)], minlength=4)
    # four if the fifth and the sixth image share a place
    assert number[2:].max() <= 5
    assert number[2:].min() >= 4


def test_images_with_higher_scores_are_drawn_more_often() -> None:
    """Draw an image with four times the score of the other first in four of five draws."""
    method = create_method("fedcbdr", per_task=1, tune="head")
    task = Task(0, 0, 1, 1, 1)
    features = torch.tensor([[1.0], [2.0]])  # scores 0.2 and 0.8
    data = ClientImages(torch.zeros(2, dtype=torch.int64), features, torch.arange(2))
    first = 0
    for seed in range(500):
        state = {
            "last_place": torch.tensor([BINS - 1]),
            "draw_seed": torch.tensor([seed]),
            "leverage": torch.tensor([[0.2]]),
        }
        memory, _ = method.end_task_client(Features(), data, Context(task, 0, 1, state))
        first += int(memory["exemplar.index"]) == 1
    assert 0.74 < first / 500 < 0.86


def test_quotas_sum_to_budget() -> None:
    method = create_method("fedcbdr", per_task=7)
    assert method.quotas(Task(0, 0, 3, 6, 2)).tolist() == [3, 2, 2]
