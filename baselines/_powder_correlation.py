"""Correlated tasks of Powder: prompts mixed by W, profiles of tasks, and W and V from them.

Piao et al., ICML 2024. Each task belongs to one client; T tasks have begun, and are in this order.
Sizes are C classes of the run, M prompts of a task in a block, and D dimensions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.tree import Tree
from fczoo.core.types import Batch, ServerContext, Task
from fczoo.functional.prompts import component_weights

PARTS = ("key", "attention", "prompt")  # K, A, P
EXCLUDED = -1e4  # logit of a class outside a softmax
RELATED = 3  # classes whose V counts


def begin_client_tasks(state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
    """Begin a task of each client that has new images.

    Its prompts are those at which all begin, so that its columns of a profile have their weights.

    Args:
        state: State with T tasks.
        sums: ``class.count`` [K, c] and ``class.sum`` [K, c, blocks (T + 1) M].
        ctx: Server context, with the numbers of the K clients.

    Returns:
        The state with T + K tasks.
    """
    new, old = len(ctx.senders), len(state["client"])
    profiles = class_profiles(state, sums, ctx.task)  # [K, C, blocks, T + 1, M]
    of_new = profiles[..., -1:, :].expand(*profiles.shape[:3], new, -1)
    rows = {
        "client": torch.tensor(ctx.senders),
        "share": torch.zeros(new, ctx.task.classes),
        "holds": F.pad(sums["class.count"] > 0, (ctx.task.start, ctx.task.classes - ctx.task.stop)),
        "profile.mean": torch.cat([profiles[..., :-1, :], of_new], 3),
        "profile.length": torch.full((new,), old + new),
    }
    for part in PARTS:
        start = state[f"start.{part}"]
        rows[f"pool.{part}"] = start.expand(new, *start.shape)
    before = {**state, "profile.mean": F.pad(state["profile.mean"], (0, 0, 0, new))}
    joined = {k: torch.cat([before[k], v.to(before[k])]) for k, v in rows.items()}
    return {**state, **joined, "weight": extended(state["weight"], new)}


def renew_profiles(state: Tree, merged: Tree, share: Tensor, task: Task) -> Tree:
    """Replace the profiles of tasks by those of their clients' last round.

    Args:
        state: State with T tasks.
        merged: ``class.count`` [K, c] and ``class.sum`` [K, c, blocks T M] of K clients.
        share: Current task of each client [K, T].
        task: The task or stage.

    Returns:
        The state with the new profiles.
    """
    profiles = class_profiles(state, merged, task).to(share)  # [K, C, blocks, T, M]
    sent = share.sum(0) > 0
    means = torch.tensordot(share.mT, profiles, 1)
    return {
        **state,
        "profile.mean": torch.where(sent.view(-1, 1, 1, 1, 1), means, state["profile.mean"]),
        "profile.length": torch.where(sent, len(sent), state["profile.length"]),
    }


def correlate(state: Tree, power: int) -> Tree:
    """Compute W of the clients' current tasks, and the largest V of each of their classes.

    Rows of finished tasks stay as they were when the task was last a current one.

    Args:
        state: State with the profiles of T tasks.
        power: Power of the cosines.

    Returns:
        The state with ``weight`` [T, T] and ``share`` [T, C].
    """
    holds, length, means = state["holds"], state["profile.length"], state["profile.mean"]
    current = is_current(state["client"])
    # A task's profile is the mean over its classes; classes without images are 0.
    of_task = means.sum(1) / holds.sum(1).clamp(min=1)[:, None, None, None]
    weight = similarities(of_task, of_task, length, length) ** power
    weight = weight / weight.sum(1, keepdim=True).clamp(min=1e-12)
    share = state["share"].clone()
    pairs, pair_length = means.flatten(0, 1), length.repeat_interleave(holds.shape[1])
    for task, classes in enumerate(means):
        value = similarities(classes, pairs, length[task].expand(len(classes)), pair_length)
        value = (value**power * holds.flatten()).unflatten(1, holds.shape)  # [C, T, C]
        value[:, task] = torch.diag(holds[task])  # 0 between different classes of one task
        top = value.flatten(1).topk(min(RELATED, value[0].numel()), 1).values
        largest = top[:, 0] / top.sum(1).clamp(min=1e-12)
        share[task] = torch.where(current[task], holds[task] * largest, share[task])
    return {
        **state,
        "weight": torch.where(current[:, None], weight, state["weight"]),
        "share": share,
    }


def client_rows(state: Tree, clients: Tensor) -> Tensor:
    """Return which task is the current one of each client [K, T], as 0 and 1."""
    rows = (state["client"] == clients.to(state["client"])[:, None]) & is_current(state["client"])
    return rows.to(state["weight"])


def not_true_divergence(
    logits: Tensor, received: Tensor, share: Tensor, mask: Tensor, batch: Batch
) -> Tensor:
    """Compute sum_b s_b KL of the softmax without the true class, received to current.

    Args:
        logits: Logits [B, C] of the client, divided by the temperature.
        received: Those of the model that it received [B, C].
        share: max_j V_yj of each image's class [B].
        mask: Classes of the softmax [C].
        batch: Labels and weights [B].

    Returns:
        The divergence, a scalar.
    """
    others = mask & (F.one_hot(batch.y, len(mask)) == 0)
    now, past = (torch.where(others, z, EXCLUDED).log_softmax(1) for z in (logits, received))
    divergence = (past.exp() * (past - now)).sum(1)
    s = torch.where(batch.w > 0, 1 - share, EXCLUDED).softmax(0)
    return (s * batch.w * divergence).sum()


def is_current(client: Tensor) -> Tensor:
    """Return which tasks are the last of their client [T], of the numbers of clients [T]."""
    later = torch.ones(len(client), len(client), device=client.device).triu(1) > 0
    return ~((client[:, None] == client) & later).any(1)


def own_row(tree: Tree, batch: Batch) -> Tensor:
    """Return which task is the current one of the batch's client [T], as 0 and 1."""
    return ((tree["client"] == batch.client[:1]) & is_current(tree["client"])).to(batch.w)


def extended(weight: Tensor, new: int) -> Tensor:
    """Return W [T + new, T + new]; the row of a new task is that of the identity."""
    identity = torch.eye(new, dtype=weight.dtype, device=weight.device)
    joined: Tensor = torch.block_diag(weight, identity)  # without types in torch
    return joined


def mix(pool: Tree, weight: Tensor) -> Tree:
    """Mix the keys, attentions and prompts of all tasks: sum_j W_ij X_j for each row i of W.

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


def class_profiles(state: Tree, sums: Tree, task: Task) -> Tensor:
    """Return the mean weights of prompts by client and class [K, C, blocks, T', M].

    Args:
        state: State with ``start.key`` [blocks, M, D].
        sums: ``class.count`` [K, c] and ``class.sum`` [K, c, blocks T' M].
        task: The task, with c of C classes.
    """
    blocks, components = state["start.key"].shape[:2]
    mean = sums["class.sum"] / sums["class.count"][..., None].clamp(min=1)
    mean = mean.unflatten(-1, (blocks, -1, components))
    return F.pad(mean, (0, 0, 0, 0, 0, 0, task.start, task.classes - task.stop))


def similarities(a: Tensor, b: Tensor, a_length: Tensor, b_length: Tensor) -> Tensor:
    """Compute the cosine of profiles, mean over blocks, over the tasks that both know.

    Args:
        a: Profiles [N, blocks, T, M], 0 beyond their tasks.
        b: Profiles [N', blocks, T, M].
        a_length: Tasks of each profile [N].
        b_length: Tasks of each profile [N'].

    Returns:
        Cosines [N, N'], without their sign.
    """
    number = torch.arange(a.shape[2], device=a.device)
    in_a, in_b = (number < n[:, None] for n in (a_length, b_length))
    dot = torch.einsum("nbtm,kbtm->nkb", a, b)
    a_square = torch.einsum("nbtm,kt->nkb", a.square(), in_b.to(a))
    b_square = torch.einsum("kbtm,nt->nkb", b.square(), in_a.to(b))
    cosine = dot / (a_square * b_square).sqrt().clamp(min=1e-12)
    return cosine.mean(-1).abs()
