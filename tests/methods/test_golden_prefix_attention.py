"""Recorded outputs of CODA-Prompt's prefix attention (tests/methods/golden/README.md),
reproduced through this package's own functions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo import Tree
from fczoo.core.vit_forward import attend
from helpers_backbone import attention_of, one_block
from helpers_golden import F32, error, golden


def test_backbone_prefix_attention() -> None:
    g = golden("prefix_attention")
    backbone = one_block(g, int(g["in.heads"]))

    def run(plugs: Tree) -> Tensor:
        return attention_of(backbone, g["in.x"], 5, plugs)

    assert error(run({}), g["out.y_no_prefix"]) < F32
    assert error(run({"prefix.0.k": g["in.pk"], "prefix.0.v": g["in.pv"]}), g["out.y"]) < F32
    assert (
        error(run({"prefix.0.k": g["in.pv"], "prefix.0.v": g["in.pk"]}), g["out.y"]) > 1e-2
    )  # swapped
    assert (
        error(
            run({"prefix.0.k": g["in.pk"][:1].expand(3, -1, -1), "prefix.0.v": g["in.pv"]}),
            g["out.y"],
        )
        > 1e-2
    )  # keys of the first sample for all
    assert error(run({}), g["out.y"]) > 1e-2


def test_prefix_attention_by_concatenation() -> None:
    """Reproduce the recorded output with the formula.

    Prefix rows precede the projected keys and values; each head is a slice of the width.
    """
    g = golden("prefix_attention")
    query, key, value = F.linear(g["in.x"], g["in.qkv_w"], g["in.qkv_b"]).chunk(3, -1)

    def heads(rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (int(g["in.heads"]), -1)).transpose(1, 2)

    output = attend(
        heads(query),
        heads(torch.cat([g["in.pk"], key], 1)),
        heads(torch.cat([g["in.pv"], value], 1)),
    )
    assert (
        error(
            F.linear(output.transpose(1, 2).flatten(2), g["in.proj_w"], g["in.proj_b"]), g["out.y"]
        )
        < F32
    )
