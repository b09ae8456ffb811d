"""Exports of kept models as programs, which give the logits of the model."""

import json

import pytest
import torch

from fczoo.core.errors import FczooError
from fczoo.models import export_program
from fczoo.models.export import export_model
from helpers_export import assert_same_logits


@pytest.mark.parametrize("method", ["fedavg", "hgp", "l2p", "fedncm", "pilora", "dytox"])
def test_torch_runs_the_program_of_every_kind_of_method(method, models, tmp_path):
    model = models(method)
    path = tmp_path / "out.pt2"
    network = eval(export_model(model, "torch", path), {"torch": torch})
    assert_same_logits(network, model)
    facts = {"classes": "", "mean": "", "image_size": ""}
    torch.export.load(path, extra_files=facts)
    assert json.loads(facts["classes"]) == list("0123456789")
    assert json.loads(facts["mean"]) == [0.5, 0.5, 0.5] and facts["image_size"] == "32"


def test_a_method_that_torch_cannot_trace_is_one_line(models, tmp_path, monkeypatch):
    def fail(*arguments, **more):
        raise RuntimeError("a branch depends on the images\nand more lines")

    monkeypatch.setattr(export_program.torch.export, "export", fail)
    with pytest.raises(FczooError) as caught:
        export_model(models("fedncm"), "torch", tmp_path / "out.pt2")
    assert str(caught.value) == (
        "fedncm cannot be exported to torch: torch.export cannot trace it: a branch depends on the "
        "images"
    )
    assert not (tmp_path / "out.pt2").exists()
