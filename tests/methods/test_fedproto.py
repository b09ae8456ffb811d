"""FedProto: the global prototypes."""

from typing import Any
from unittest import mock

import torch

from fczoo.core.tree import Tree, select


def test_class_keeps_prototype_while_holders_are_absent(make_bench, small_method, watch):
    """Keep the mean feature of the last holders of a class.

    One client in three takes part in each round.
    """
    method, servers = small_method("fedproto"), list[Tree]()
    update = type(method).server_update

    def record_update(*args: Any) -> Tree:
        servers.append(update(*args))
        return servers[-1]

    with mock.patch.object(type(method), "server_update", record_update):
        run = watch(make_bench(participation=0.34, rounds=4, epochs=1), method)
    absent = 0
    for call, next_call, server in zip(run.rounds, run.rounds[1:], servers, strict=False):
        if call.ctx.task.index != next_call.ctx.task.index:
            continue
        count = torch.stack([p["class.count"] for p in call.payloads]).sum(0)
        total = torch.stack([p["class.sum"] for p in call.payloads]).sum(0)
        for c in range(call.ctx.task.size):
            flag, mean = (next_call.state[f"prototype.{name}"][c] for name in ("known", "mean"))
            assert torch.equal(server["all.mean"][call.ctx.task.start + c], mean)
            if count[c]:
                assert flag == 1 and torch.allclose(mean, total[c] / count[c])
            else:
                absent += int(call.state["prototype.known"][c])
                assert torch.equal(flag, call.state["prototype.known"][c])
                assert torch.equal(mean, call.state["prototype.mean"][c])
    assert absent, "no known class was ever absent"
    assert select(run.states[2], "all.known")["all.known"].bool().all()
