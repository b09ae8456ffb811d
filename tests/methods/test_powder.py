"""Powder: mixed prompts and distillation against recorded outputs, tasks and merge by hand."""

import math

import pytest
import torch
from torch import Tensor

from fczoo import Batch, Task, Tree, create_method
from fczoo.baselines._powder_correlation import (
    begin_client_tasks,
    correlate,
    is_current,
    is_hard_coded,
    last_similarities,
    own_row,
    similarities,
)
from fczoo.baselines._powder_prompts import (
    block_weights,
    mix,
    not_true_divergence,
    own_rows,
    task_logits,
)
from fczoo.core.types import ServerContext, whole_batch
from helpers_golden import F32, compare, error, golden

NAMES = {"key": "k_share_4", "attention": "a_share_4", "prompt": "p_share_4"}
TASK = Task(0, 0, 2, 3, 2)


class Tokens:
    """Replace a backbone: return the prompt tokens of its block, flat."""

    depth = 12

    def check_blocks(self, blocks: tuple[int, ...], label: str) -> None:
        assert blocks == (4,)

    def __call__(self, images: Tensor, plugs: Tree) -> Tensor:
        return plugs["tokens.4"].flatten(1)


def context(*senders: int) -> ServerContext:
    return ServerContext(TASK, 0, 2, 3, len(senders), 1, None, None, senders)


@pytest.mark.parametrize("case", ["few", "many"])
def test_client_prompts_match_recorded_outputs(case: str) -> None:
    """Compare the prompts that enter a block, their mean weights and the gradients.

    Rows are those of begun tasks. The recorded gradient is that of the prompts' sum of squares, and
    reaches only the client's task.
    """
    g, method = golden("powder_prompt"), create_method("powder", blocks=(4,))
    begun, own = g[f"in.{case}.trained"], int(g[f"in.{case}.own"])
    pool = {f"pool.{k}": g[f"in.{name}"][begun][:, None] for k, name in NAMES.items()}
    leaves = {f"own.{k}": torch.zeros_like(pool[f"pool.{k}"][0]) for k in NAMES}
    for leaf in leaves.values():
        leaf.requires_grad_()
    width = 4 * 5
    tree = {
        **pool,
        **leaves,
        "client": begun,  # one client per task
        "weight": g["in.weight"][begun][:, begun],
        "head.weight": torch.eye(width),
        "head.bias": torch.zeros(width),
    }
    y, numbers = torch.zeros(4, dtype=torch.int64), torch.full((4,), own)
    batch = Batch(g["in.query"], y, torch.ones(4), g["in.query"], client=numbers)
    tokens = method.client_logits(Tokens(), tree, batch).view(4, 4, 5)
    compare("powder_prompt", tokens[:, :2], g[f"out.{case}.key_prefix"], F32)
    compare("powder_prompt", tokens[:, 2:], g[f"out.{case}.value_prefix"], F32)
    gradients = torch.autograd.grad(tokens.square().sum(), list(leaves.values()))
    for gradient, name in zip(gradients, NAMES.values(), strict=True):
        recorded = g[f"out.{case}.grad.{name}"]
        compare("powder_prompt", gradient[0], recorded[own], F32)
        assert not recorded[torch.arange(6) != own].any()
    chosen = tree["weight"][begun == own][0].argsort(descending=True)[:3]
    mixture = mix({k: pool[f"pool.{k}"] for k in NAMES}, tree["weight"][chosen])
    alpha = block_weights(g["in.query"], mixture, 0)
    compare("powder_prompt", alpha.mean(0), g[f"out.{case}.mean_alpha"], F32)


def test_server_prompts_mix_all_tasks() -> None:
    g, method = golden("powder_prompt"), create_method("powder", blocks=(4,))
    begun = g["in.few.trained"]
    state = {f"pool.{k}": g[f"in.{name}"][begun][:, None] for k, name in NAMES.items()}
    state["weight"] = g["in.weight"][begun][:, begun]
    batch = whole_batch(g["in.query"], torch.zeros(4, dtype=torch.int64), g["in.query"])
    tokens = method.features(Tokens(), state, batch).view(4, 4, 5)
    compare("powder_prompt", tokens[:, :2], g["out.server.key_prefix"], F32)
    compare("powder_prompt", tokens[:, 2:], g["out.server.value_prefix"], F32)


def test_not_true_distillation_matches_recorded_output() -> None:
    """Compare the term, times 9, and its gradient; classes 4 to 7 are the task's."""
    g, method = golden("powder_ntd"), create_method("powder")
    logits = g["in.logits"].clone().requires_grad_()
    mask = torch.zeros(10, dtype=torch.bool)
    mask[g["in.current"]] = True
    batch = whole_batch(g["in.logits"], g["in.y"])
    share = g["in.fc_weight"].amax(1)[g["in.y"]]
    tau = float(g["in.tau"])
    assert method.temperature == tau
    term = not_true_divergence(logits / tau, g["in.logits_last_round"] / tau, share, mask, batch)
    compare("powder_ntd", method.distil * term, g["out.ntd"], F32)
    (gradient,) = torch.autograd.grad(method.distil * term, logits)
    compare("powder_ntd", gradient, g["out.ntd_grad"], F32)
    # The released slice without the true class contains all other classes of the task.
    assert torch.equal(g["quirk.ntd_task_incremental"], g["out.ntd"])
    everything = not_true_divergence(
        logits / tau, g["in.logits_last_round"] / tau, share, mask | True, batch
    )
    assert error(method.distil * everything, g["out.ntd"]) > 0.1


def test_not_true_distillation_of_two_classes_is_zero() -> None:
    """Remove the true class, so that the other has probability 1; ignore padding."""
    z, r = torch.tensor([[0.0, 3.0, 9.0]]), torch.tensor([[1.0, -2.0, 5.0]])
    mask = torch.tensor([True, True, False])
    batch = whole_batch(z, torch.tensor([1]))
    assert float(not_true_divergence(z, r, torch.zeros(1), mask, batch)) == 0.0


def test_current_tasks_and_row_of_client() -> None:
    client = torch.tensor([0, 1, 0, 2])
    assert is_current(client).tolist() == [False, True, True, True]
    batch = Batch(*4 * [torch.ones(2)], client=torch.tensor([0, 0]))
    assert own_row({"client": client}, batch).tolist() == [0.0, 0.0, 1.0, 0.0]


def test_similarities_by_hand() -> None:
    """Compare profiles over the tasks of the shorter one: (3, 4) and (3, 4, 12) have cosine 1."""
    a = torch.tensor([[3.0, 4.0, 0.0], [0.0, 5.0, 0.0]]).view(2, 1, 3, 1)
    b = torch.tensor([3.0, 4.0, 12.0]).view(1, 1, 3, 1)
    values = similarities(a, b, torch.tensor([2, 3]), torch.tensor([3]))
    assert values[:, 0].tolist() == pytest.approx([1.0, 4 / 13])


def tasks_of_two_clients() -> Tree:
    """Return the state in which two clients have begun a task, with profiles of one prompt."""
    method = create_method("powder", blocks=(4,), components=1, length=1)

    class Small(Tokens):
        dim = token_dim = 2

    state = method.begin_task({}, TASK, Small(), torch.Generator().manual_seed(0))
    count = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
    sums = {"class.count": count, "class.sum": torch.tensor([[[1.0], [0.0]], [[0.5], [-0.5]]])}
    return begin_client_tasks(state, sums, context(1, 0))


def test_tasks_start_from_same_prompts() -> None:
    """Start tasks of clients 1 and 0 with profiles of the initial prompts."""
    state = tasks_of_two_clients()
    assert state["client"].tolist() == [1, 0]
    assert torch.equal(state["pool.key"], state["start.key"].expand(2, -1, -1, -1))
    assert torch.equal(state["weight"], torch.eye(2))
    assert state["holds"].tolist() == [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    assert state["profile.mean"][:, :2, 0, :, 0].tolist() == [
        [[0.5, 0.5], [0.0, 0.0]],
        [[0.5, 0.5], [-0.5, -0.5]],
    ]
    assert state["profile.length"].tolist() == [2, 2]


def test_correlations_by_hand() -> None:
    """Compare weights and shares with values worked out by hand.

    Task means are (0.5, 0.5) and (0, 0), so W has no weight of the second task. Class 0 of both
    tasks and class 1 of the second have cosines of 1. Class 0 counts two of them. Class 1 has
    three, and the one with its own task does not count.
    """
    state = correlate(tasks_of_two_clients(), 2)
    assert state["weight"].tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert state["share"].tolist() == [
        pytest.approx([1 / 3, 0.0, 0.0]),
        pytest.approx([1 / 2, 1 / 2, 0.0]),
    ]


def test_identical_profiles_have_equal_weights() -> None:
    state = tasks_of_two_clients()
    state["profile.mean"] = state["profile.mean"].abs()
    assert correlate(state, 30)["weight"].tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_server_moves_prompts_and_averages_rows_over_holders() -> None:
    """Give both clients class 0 and client 0 class 1; no client has class 2."""
    method, state = create_method("powder", blocks=(4,), components=1), tasks_of_two_clients()
    state |= {"head.weight": torch.full((3, 2), 9.0), "head.bias": torch.full((3,), 9.0)}
    queries = torch.tensor([[1.0], [2.0]]).view(2, 1, 1, 1)
    rows = torch.tensor([[2.0, 2.0, 2.0], [4.0, 4.0, 4.0]])
    merged = {
        "clients": torch.tensor([0, 1]),
        "own.key": queries.expand(2, 1, 1, 2),
        "own.attention": queries.expand(2, 1, 1, 2),
        "own.prompt": queries[..., None].expand(2, 1, 1, 1, 2),
        "head.weight": rows[..., None].expand(2, 3, 2),
        "head.bias": rows,
    }
    after = method.server_update(state, merged, context(0, 1))
    moved = after["pool.key"] - state["pool.key"]
    torch.testing.assert_close(moved[:, 0, 0], torch.tensor([[2.0, 2.0], [1.0, 1.0]]))
    assert not after["own.key"].any()
    assert after["head.bias"].tolist() == [3.0, 2.0, 9.0]
    assert after["head.weight"][:, 0].tolist() == [3.0, 2.0, 9.0]


def test_equal_shares_average_divergences() -> None:
    """Compute KL of (1/2, 1/2) and (3/4, 1/4), which is log(2/3^.5), with equal V."""
    received = torch.zeros(2, 3)
    logits = torch.tensor([[0.0, math.log(3), 0.0], [0.0, math.log(3), 0.0]])
    batch = whole_batch(logits, torch.tensor([0, 0]))
    mask = torch.ones(3, dtype=torch.bool)
    term = not_true_divergence(logits, received, torch.zeros(2), mask, batch)
    assert float(term) == pytest.approx(math.log(2 / 3**0.5))


def test_last_similarities_of_hard_coded_tasks_by_hand() -> None:
    """Compare similarities of the last five entries with values worked out by hand.

    With two clients, tasks 10 to 14 are the sixth and seventh of both and the eighth of client 0.
    The last five of six entries (9, 1, 0, 0, 0, 0) and of five (1, 0, 0, 0, 0) are equal. Over the
    five tasks that both know the cosine is 9 / 82^0.5.
    """
    client = torch.tensor([0, 1] * 8)
    assert is_hard_coded(client, 2).nonzero()[:, 0].tolist() == [10, 11, 12, 13, 14]
    profiles = torch.tensor([[9.0, 1, 0, 0, 0, 0], [1.0, 0, 0, 0, 0, 0]]).view(2, 1, 6, 1)
    length = torch.tensor([6, 5])
    assert last_similarities(profiles, length)[0].tolist() == pytest.approx([1.0, 1.0])
    known = similarities(profiles, profiles, length, length)[0]
    assert known.tolist() == pytest.approx([1.0, 9 / 82**0.5])


def test_last_entries_are_compared_for_hard_coded_pairs_only() -> None:
    """Keep the weights of profiles with two entries; tasks 0, 9 and 15 are not hard-coded."""
    state = tasks_of_two_clients()
    state["client"] = torch.tensor([10, 11])
    plain, late = correlate(state, 2), correlate(state, 2, 12)
    assert torch.equal(plain["weight"], late["weight"])  # the last five are all entries
    assert not is_hard_coded(torch.tensor([0, 9, 15]), 16).any()


def test_task_rows_by_hand() -> None:
    """Add a client's change to the rows of its task only."""
    rows = torch.arange(6.0).view(2, 3, 1)
    tree = {
        **{"task.weight": rows, "task.bias": rows[..., 0]},
        **{"rows.weight": torch.full((3, 1), 10.0), "rows.bias": torch.zeros(3)},
    }
    head = own_rows(tree, torch.tensor([0.0, 1.0]))
    assert head["head.weight"][:, 0].tolist() == [13.0, 14.0, 15.0]
    assert head["head.bias"].tolist() == [3.0, 4.0, 5.0]


def test_first_task_of_true_class_gives_logits() -> None:
    """Give images of class 1 to task 0: it has classes 0 and 1, task 1 has 1 and 2."""
    state = {
        "holds": torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]),
        "task.weight": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])[..., None],
        "task.bias": torch.zeros(2, 3),
    }
    logits = task_logits(state, torch.ones(3, 1), torch.tensor([0, 1, 2]))
    assert logits.tolist() == [[1.0, 2.0, -1e4], [1.0, 2.0, -1e4], [-1e4, 5.0, 6.0]]


def test_server_moves_rows_of_client_tasks() -> None:
    """Move rows of a client's task by its change, and no others, without a shared head."""
    method = create_method("powder", blocks=(4,), components=1, length=1, task_rows=True)
    assert list(method.training().optims) == ["own.", "rows."]

    class Small(Tokens):
        dim = token_dim = 2

    state = method.begin_task({}, TASK, Small(), torch.Generator().manual_seed(0))
    state["head.bias"] = torch.tensor([1.0, 2.0, 3.0])
    sums = {
        "class.count": torch.tensor([[2.0, 0.0], [1.0, 1.0]]),
        "class.sum": torch.zeros(2, 2, 1),
    }
    state = begin_client_tasks(state, sums, context(1, 0))
    assert state["task.bias"].tolist() == [[1.0, 2.0, 3.0]] * 2
    merged = {
        "clients": torch.tensor([0]),
        **{k: v[None] for k, v in state.items() if k.startswith(("own.", "rows."))},
    }
    merged["rows.bias"] = torch.tensor([[5.0, 0.0, 0.0]])
    after = method.server_update(state, merged, context(0))
    assert after["task.bias"].tolist() == [[1.0, 2.0, 3.0], [6.0, 2.0, 3.0]]
    assert not after["rows.bias"].any()
