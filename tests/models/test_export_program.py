"""Exports of saved models as programs with the same logits."""

import json
import sys

import pytest
import torch
from torch import Tensor

from fczoo.core.errors import FczooError
from fczoo.models import export
from fczoo.models.export import export_model
from helpers_export import assert_same_logits

IS_OLDEST = torch.__version__.startswith("2.6.")
NOT_TRACED = pytest.mark.skipif(IS_OLDEST, reason="torch 2.6 cannot trace the module re")
NO_ONNX = pytest.mark.skipif(IS_OLDEST, reason="torch 2.6 and onnxscript 0.5 do not fit")
METHODS = ["fedavg", "hgp", "l2p", "fedncm", "pilora", pytest.param("dytox", marks=NOT_TRACED)]


@pytest.mark.parametrize("method", METHODS)
def test_torch_program_gives_model_logits(method, models, tmp_path):
    model = models(method)
    path = tmp_path / "out.pt2"
    network = eval(export_model(model, "torch", path), {"torch": torch})
    assert_same_logits(network, model)
    export_metadata = {"classes": "", "mean": "", "image_size": ""}
    torch.export.load(path, extra_files=export_metadata)
    assert json.loads(export_metadata["classes"]) == list("0123456789")
    assert (
        json.loads(export_metadata["mean"]) == [0.5, 0.5, 0.5]
        and export_metadata["image_size"] == "32"
    )


@NO_ONNX
@pytest.mark.parametrize("method", ["fedavg", "hgp", "fedncm"])
def test_onnx_program_gives_model_logits(method, models, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = models(method)
    code = export_model(model, "onnx", tmp_path / "out.onnx")
    session = eval(code, {"onnxruntime": onnxruntime})

    def network(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])

    assert_same_logits(network, model)
    export_metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(export_metadata["classes"]) == list("0123456789")


def test_unsupported_onnx_operator_is_reported(models, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    path = tmp_path / "out.onnx"
    with pytest.raises(FczooError) as caught:
        export_model(models("l2p"), "onnx", path)
    assert str(caught.value).startswith("l2p cannot be exported to onnx: torch.onnx cannot")
    assert "aten.sort" in str(caught.value) and "\n" not in str(caught.value)
    assert not path.exists()


def test_missing_onnx_package_is_reported(models, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    path = tmp_path / "out.onnx"
    with pytest.raises(FczooError, match=r"onnxruntime; run pip install 'fczoo\[onnx\]'$"):
        export_model(models("fedncm"), "onnx", path)
    assert not path.exists()


def test_tracing_failure_is_reported(models, tmp_path, monkeypatch):
    def fail(*arguments, **more):
        raise RuntimeError("a branch depends on the images\nand more lines")

    monkeypatch.setattr(export.torch.export, "export", fail)
    with pytest.raises(FczooError) as caught:
        export_model(models("fedncm"), "torch", tmp_path / "out.pt2")
    assert str(caught.value) == (
        "fedncm cannot be exported to torch: torch.export cannot trace it: a branch depends on the "
        "images"
    )
    assert not (tmp_path / "out.pt2").exists()
