"""Task correlation of Powder: initial state of tasks, their profiles, and W and V from these.

Piao et al., ICML 2024. Each task belongs to one client. T: tasks that have begun, in this order; C:
classes of the run; M: prompts of a task in a block; D: feature dimensions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._powder_prompts import PARTS
from fczoo.core.tree import Tree, select
from fczoo.core.types import Batch, ServerContext, Task

RELATED = 3  # largest entries of V that are kept per class
HARD_CODED, LAST = (10, 15), 5  # tasks and profile entries that released code fixes


def begin_client_tasks(state: Tree, sums: Tree, ctx: ServerContext) -> Tree:
    """Begin a task for each client that has new images.

    Its prompts start from common initial values, whose prompt weights fill its columns of profiles.

    Args:
        state: State with T tasks.
        sums: ``class.count`` [K, c] and ``class.sum`` [K, c, blocks (T + 1) M].
        ctx: Server context, with the numbers of the K clients.

    Returns:
        The state with T + K tasks.
    """
    # Profiles of the new tasks. The last column, of the initial values, is repeated per new task.
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
    starts = {f"pool.{part}": state[f"start.{part}"] for part in PARTS}
    starts |= {name: state[name.replace("task.", "head.")] for name in select(state, "task.")}
    for name, start in starts.items():
        rows[name] = start.expand(new, *start.shape)
    # Profiles of earlier tasks have zeros in the new columns; W gets rows of the identity.
    before = {**state, "profile.mean": F.pad(state["profile.mean"], (0, 0, 0, new))}
    joined = {k: torch.cat([before[k], v.to(before[k])]) for k, v in rows.items()}
    return {**state, **joined, "weight": extend_weights(state["weight"], new)}


def renew_profiles(state: Tree, merged: Tree, share: Tensor, task: Task) -> Tree:
    """Replace the profiles of current tasks by those that their clients sent.

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


def merge_clients(state: Tree, merged: Tree, share: Tensor) -> Tree:
    """Store each client's prompts in its task's rows; average head rows over class holders.

    Args:
        state: State with T tasks.
        merged: Uploads [K, ...] of K clients.
        share: Current task of each client [K, T].

    Returns:
        The state with the new prompts and rows.
    """
    next_state, holders = dict(state), share @ state["holds"]  # [K, C]
    of_all = {f"own.{part}": f"pool.{part}" for part in PARTS}
    of_all |= {name: name.replace("rows.", "task.") for name in select(merged, "rows.")}
    for own, name in of_all.items():  # each task is one client's: add its change
        next_state[name] = state[name] + torch.tensordot(share.mT, merged[own].to(share), 1)
    for name, value in select(merged, "head.").items():  # uniform mean over clients with the class
        owner = holders.view(*holders.shape, *[1] * (value.dim() - 2)).to(value)
        mean = (owner * value).sum(0) / owner.sum(0).clamp(min=1)
        next_state[name] = torch.where(owner.sum(0) > 0, mean, state[name].to(value))
    return next_state


def correlate(state: Tree, power: int, clients: int = 0) -> Tree:
    """Compute W of the clients' current tasks, and the largest V of each of their classes.

    Rows of finished tasks stay as they were when the task was last a current one.

    Args:
        state: State with the profiles of T tasks.
        power: Exponent of the cosines.
        clients: Number of clients, by which released code numbers the tasks that it compares by the
            last five entries; 0: compare all pairs over the tasks that both profiles know.

    Returns:
        The state with ``weight`` [T, T] and ``share`` [T, C].
    """
    holds, length, means = state["holds"], state["profile.length"], state["profile.mean"]
    current = is_current(state["client"])
    # Profile of a task: mean over its classes; classes without images are 0 in the sum.
    of_task = means.sum(1) / holds.sum(1).clamp(min=1)[:, None, None, None]
    # W: cosine of the profiles of two tasks, to the power rho, each row divided by its sum.
    weight = similarities(of_task, of_task, length, length)
    if clients:
        late = is_hard_coded(state["client"], clients)
        weight = torch.where(late[:, None] & late, last_similarities(of_task, length), weight)
    weight = weight**power
    weight = weight / weight.sum(1, keepdim=True).clamp(min=1e-12)
    # V: the same for two classes, with the three largest entries per row. The loss reads only
    # max_j V_yj, so only this is stored.
    share = state["share"].clone()
    pairs, pair_length = means.flatten(0, 1), length.repeat_interleave(holds.shape[1])
    for task, classes in enumerate(means):
        value = similarities(classes, pairs, length[task].expand(len(classes)), pair_length)
        value = (value**power * holds.flatten()).unflatten(1, holds.shape)  # [C, T, C]
        value[:, task] = torch.diag(holds[task])  # 0 between different classes of one task
        top = value.flatten(1).topk(min(RELATED, value[0].numel()), 1).values
        largest = top[:, 0] / top.sum(1).clamp(min=1e-12)
        share[task] = torch.where(current[task], holds[task] * largest, share[task])
    # Matrix products of other sizes differ in the last bits. Rounding keeps rows of V bit for bit
    # if their profiles are unchanged, so the server does not broadcast them again.
    decimals = 12 if share.dtype == torch.float64 else 7
    return {
        **state,
        "weight": torch.where(current[:, None], weight, state["weight"]),
        "share": share.round(decimals=decimals),
    }


def client_rows(state: Tree, clients: Tensor) -> Tensor:
    """Return the current task of each client, one-hot [K, T]."""
    rows = (state["client"] == clients.to(state["client"])[:, None]) & is_current(state["client"])
    return rows.to(state["weight"])


def is_current(client: Tensor) -> Tensor:
    """Return the mask [T] of tasks that are the last of their client, from client numbers [T]."""
    later = torch.ones(len(client), len(client), device=client.device).triu(1) > 0
    return ~((client[:, None] == client) & later).any(1)


def own_row(tree: Tree, batch: Batch) -> Tensor:
    """Return the current task of the batch's client, one-hot [T]."""
    return ((tree["client"] == batch.client[:1]) & is_current(tree["client"])).to(batch.w)


def extend_weights(weight: Tensor, new: int) -> Tensor:
    """Return W [T + new, T + new], in which new tasks have rows of the identity."""
    identity = torch.eye(new, dtype=weight.dtype, device=weight.device)
    joined: Tensor = torch.block_diag(weight, identity)  # without types in torch
    return joined


def class_profiles(state: Tree, sums: Tree, task: Task) -> Tensor:
    """Return profiles: mean prompt weights per client and class [K, C, blocks, T', M].

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
    """Compute the cosine of profiles over the tasks that both contain, mean over blocks.

    Args:
        a: Profiles [N, blocks, T, M], 0 beyond their tasks.
        b: Profiles [N', blocks, T, M].
        a_length: Tasks of each profile [N].
        b_length: Tasks of each profile [N'].

    Returns:
        Absolute cosines [N, N'].
    """
    number = torch.arange(a.shape[2], device=a.device)
    in_a, in_b = (number < n[:, None] for n in (a_length, b_length))
    dot = torch.einsum("nbtm,kbtm->nkb", a, b)
    a_square = torch.einsum("nbtm,kt->nkb", a.square(), in_b.to(a))
    b_square = torch.einsum("kbtm,nt->nkb", b.square(), in_a.to(b))
    cosine = dot / (a_square * b_square).sqrt().clamp(min=1e-12)
    return cosine.mean(-1).abs()


def is_hard_coded(client: Tensor, clients: int) -> Tensor:
    """Return the mask [T] of tasks 10 to 14, numbered by local number * K + client."""
    same = client[:, None] == client
    number = same.tril(-1).sum(1) * clients + client
    return (number >= HARD_CODED[0]) & (number < HARD_CODED[1])


def last_similarities(profiles: Tensor, length: Tensor) -> Tensor:
    """Compute the cosine of the last five entries of profiles, mean over blocks [N, N].

    Args:
        profiles: Profiles [N, blocks, T, M], 0 beyond their tasks.
        length: Tasks of each profile [N].

    Returns:
        Absolute cosines [N, N].
    """
    entry = length[:, None] - LAST + torch.arange(LAST, device=length.device)  # [N, 5]
    index = entry.clamp(min=0)[:, None, :, None].expand(
        -1, profiles.shape[1], -1, profiles.shape[3]
    )
    last = F.normalize(profiles.gather(2, index).flatten(2), dim=2)
    return torch.einsum("nbd,kbd->nkb", last, last).mean(-1).abs()
