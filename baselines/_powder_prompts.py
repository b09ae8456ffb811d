"""Prompts of Powder: initial values, mixture and weights; and the not-true distillation.

Piao et al., ICML 2024. Each task belongs to one client. T: tasks that have begun; C: classes of the
run; M: prompts of a task in a block; D: feature dimensions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.tree import Tree, strip_prefix
from fczoo.core.types import Batch
from fczoo.functional.prompts import component_weights

PARTS = ("key", "attention", "prompt")  # K, A, P
EXCLUDED = -1e4  # logit of a class outside a softmax


def start_prompts(
    sizes: tuple[int, int, int], classes: int, dims: tuple[int, int], rng: torch.Generator
) -> Tree:
    """Create the common initial values of all tasks' prompts, and empty tables of the tasks.

    Args:
        sizes: Blocks, prompts M of a task in a block, and tokens of a prompt.
        classes: Classes C of the run.
        dims: Dimension of features and of tokens.
        rng: Random generator.

    Returns:
        ``start.*``, the draw from U(0, 1); ``own.*``, the change of a client's task; ``pool.*`` of
            all tasks [0, ...]; and the order, correlations and profiles of the tasks.
    """
    blocks, components, length = sizes
    vectors, tokens = (blocks, components, dims[0]), (blocks, components, length, dims[1])
    shapes = {"key": vectors, "attention": vectors, "prompt": tokens}
    start = {k: torch.empty(shape).uniform_(0, 1, generator=rng) for k, shape in shapes.items()}
    return {
        **{f"start.{k}": v for k, v in start.items()},
        **{f"own.{k}": torch.zeros_like(v) for k, v in start.items()},
        **{f"pool.{k}": v[None][:0] for k, v in start.items()},
        "client": torch.empty(0, dtype=torch.int64),  # client of each task [T], in order of start
        "weight": torch.empty(0, 0),  # W [T, T]
        "share": torch.empty(0, classes),  # max_j V_yj per task and class
        "holds": torch.empty(0, classes),  # whether a task has images of a class
        "profile.mean": torch.empty(0, classes, blocks, 0, components),
        "profile.length": torch.empty(0, dtype=torch.int64),
    }


def start_rows(head: Tree) -> Tree:
    """Create head rows for each task: ``task.*`` of all tasks, ``rows.*`` of the client's change.

    Args:
        head: ``head.weight`` [C, D] and ``head.bias`` [C], the start of each task's rows.
    """
    rows: Tree = {}
    for name, value in strip_prefix(head, "head.").items():
        rows |= {f"task.{name}": value[None][:0], f"rows.{name}": torch.zeros_like(value)}
    return rows


def pool_of(tree: Tree) -> Tree:
    """Return ``key``, ``attention`` and ``prompt`` [T, ...] of all tasks."""
    return {part: tree[f"pool.{part}"] for part in PARTS}


def own_pool(tree: Tree, row: Tensor) -> Tree:
    """Return ``key``, ``attention`` and ``prompt`` [T, ...] with the client's own change added.

    Args:
        tree: ``pool.*`` [T, ...] of all tasks, and their change ``own.*`` [...] by the client.
        row: Task of the client, one-hot [T].
    """
    pool: Tree = {}
    for part in PARTS:
        shape = (-1, *[1] * tree[f"own.{part}"].dim())
        pool[part] = tree[f"pool.{part}"] + row.view(shape) * tree[f"own.{part}"]
    return pool


def own_rows(tree: Tree, row: Tensor) -> Tree:
    """Return the head of the client's task, as ``head.weight`` [C, D] and ``head.bias`` [C].

    Args:
        tree: ``task.*`` [T, ...] of all tasks, and their change ``rows.*`` [...] by the client.
        row: Task of the client, one-hot [T].
    """
    return {
        f"head.{part}": torch.tensordot(row.to(tree[f"task.{part}"]), tree[f"task.{part}"], 1)
        + tree[f"rows.{part}"]
        for part in ("weight", "bias")
    }


def task_logits(state: Tree, features: Tensor, labels: Tensor) -> Tensor:
    """Compute logits [B, C] by the head rows of the first task that has images of the true class.

    Args:
        state: ``task.*`` [T, ...] of all tasks, and ``holds`` [T, C].
        features: Features [B, D].
        labels: True classes [B].

    Returns:
        Logits; EXCLUDED for classes that this task does not have.
    """
    of_task = state["holds"][:, labels].argmax(0)  # [B] the first one
    logits = torch.einsum("bd,tcd->btc", features, state["task.weight"]) + state["task.bias"]
    chosen = logits[torch.arange(len(labels), device=labels.device), of_task]
    return torch.where(state["holds"][of_task] > 0, chosen, EXCLUDED)


def not_true_divergence(
    logits: Tensor, received: Tensor, share: Tensor, mask: Tensor, batch: Batch
) -> Tensor:
    """Compute the not-true distillation: sum_b s_b KL(softmax received || softmax current).

    Both softmaxes leave out the true class.

    Args:
        logits: Logits [B, C] of the client, divided by the temperature.
        received: Logits [B, C] of the received model, divided by the temperature.
        share: max_j V_yj of each image's class [B].
        mask: Mask [C] of the classes in the softmax.
        batch: Labels and weights [B].

    Returns:
        The divergence, a scalar.
    """
    others = mask & (F.one_hot(batch.y, len(mask)) == 0)
    now, past = (torch.where(others, z, EXCLUDED).log_softmax(1) for z in (logits, received))
    # KL per image, then weights s: softmax over the batch of 1 - max_j V_yj.
    divergence = (past.exp() * (past - now)).sum(1)
    s = torch.where(batch.w > 0, 1 - share, EXCLUDED).softmax(0)
    return (s * batch.w * divergence).sum()


def mix(pool: Tree, weight: Tensor) -> Tree:
    """Mix keys, attentions and prompts of all tasks: sum_j W_ij X_j for each row i of W.

    Args:
        pool: ``key``, ``attention`` and ``prompt`` [T, ...].
        weight: Rows of W [S, T].

    Returns:
        The same names, [S, ...].
    """
    return {k: torch.tensordot(weight.to(v), v, 1) for k, v in pool.items()}


def block_weights(query: Tensor, mixture: Tree, position: int) -> Tensor:
    """Compute alpha_m = cos(q * A_m, K_m) [B, S M] of the mixed prompts of one block."""
    attention, keys = (mixture[k][:, position].flatten(0, 1) for k in ("attention", "key"))
    return component_weights(query, attention, keys)
