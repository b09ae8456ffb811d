"""Outputs of official implementations of methods with exemplars, reproduced (tests/methods/golden/README.md).

``out`` is what the default must give, ``quirk`` what it must not give.
"""

import pytest
import torch

from fczoo import Context, Task, create_method
from fczoo.functional.exemplars import exemplar_sums
from fczoo.functional.herding import herding
from helpers_golden import golden
from helpers_official import Features, grads, same, whole
from helpers_payload import server_context


class Kept:
    """Stands in for a client's images: features and labels by position."""

    def __init__(self, features, labels):
        self.whole = whole(features, labels)

    def batches(self, index):
        yield whole(self.whole.x[index], self.whole.y[index])


@pytest.mark.parametrize(("normalise", "choice"), [(True, "normalised"), (False, "raw")])
def test_herding_is_mammoths(normalise: bool, choice: str) -> None:
    g = golden("herding_mammoth")
    chosen = []
    for c in g["in.labels"].unique():
        own = (g["in.labels"] == c).nonzero()[:, 0]
        each = int(g["in.buffer_size"]) // 3
        chosen.append(own[herding(g["in.feats"][own], each, normalise=normalise)])
    assert torch.cat(chosen).tolist() == g[f"out.{choice}_idx"].tolist()
    other = {"normalised": "raw", "raw": "normalised"}[choice]
    assert torch.cat(chosen).tolist() != g[f"out.{other}_idx"].tolist()


@pytest.mark.parametrize("old", [0, 4])
def test_icarl_loss(old: int) -> None:
    g, number = golden("icarl_mammoth"), int(old > 0)
    logits = g["in.loss.logits"][:, :8].clone().requires_grad_()
    data = whole(logits, g["in.loss.label"], g["in.loss.old_sigmoid"].logit())
    head = {"head.weight": torch.eye(8), "head.bias": torch.zeros(8)}
    method = create_method("icarl")
    ctx = Context(Task(number, old, 8, 8, 2), 0, 1, {})
    loss, _ = method.loss(Features(), head, data, ctx)
    assert same(loss, g[f"out.loss{number}_seen"]) and not same(loss, g[f"quirk.loss{number}_all_columns"])
    assert same(grads(loss, logits)[0], g[f"out.loss{number}_seen_grad"])


def test_icarl_answers_by_the_nearest_mean_of_exemplars() -> None:
    g, task = golden("icarl_mammoth"), Task(0, 0, 5, 5, 1)
    method, kept = create_method("icarl"), Kept(g["in.exemplar_feats"], g["in.exemplar_labels"])
    sums = exemplar_sums(torch.arange(40), kept, lambda batch: batch.x, 5)
    empty = {"mean": torch.zeros(5, 12), "count": torch.zeros(5)}
    state = method.concluded(empty, sums, server_context(task))
    test = whole(g["in.test_feats"], torch.zeros(15, dtype=torch.int64))
    scores = method.predict(Features(), state, test, task)
    assert scores.argmax(1).tolist() == g["out.pred"].tolist()
    assert same(-scores, g["out.dist"]) and not same(-scores, g["quirk.dist_with_hflip"])
