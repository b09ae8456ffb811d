"""What was trained in finished tasks, kept task by task beside what is trained now."""

import torch

from fczoo.core.tree import Tree, select


def joined_past(state: Tree, now: str, past: str) -> Tree:
    """``PAST X`` [t, ...] for each ``NOW X`` of a state: the values of all t tasks, the current one last.

    ``now`` and ``past`` are prefixes of names, such as ``lora.`` and ``past.``; the state has ``PAST X`` of
    the tasks before, or none in the first.
    """
    joined: Tree = {}
    for name, value in select(state, now).items():
        earlier = past + name.removeprefix(now)
        joined[earlier] = torch.cat([state[earlier], value[None]]) if earlier in state else value[None]
    return joined
