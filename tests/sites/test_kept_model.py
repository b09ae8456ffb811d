"""The server of real sites stores the final global model."""

import json

import torch

import fczoo
from helpers_sites import LocalConnection, server_of, sites_of


def test_server_stores_final_model(make_bench, small_method, tmp_path):
    bench, method = make_bench(epochs=1), small_method("fedncm")
    run = server_of(bench, method, LocalConnection(sites_of(bench, method, tmp_path / "sites")))
    folder = tmp_path / "server"
    folder.mkdir()
    run.run_to(folder / "result.json")
    result = json.loads((folder / "result.json").read_text())
    model = fczoo.load_model(folder, backbone=bench.backbone)
    assert model.record.metrics == result["metrics"]
    labels = torch.from_numpy(bench.stream.test.labels)
    logits = model(bench.test.view(torch.arange(len(labels))))
    accuracy = 100 * float((logits.argmax(1) == labels).double().mean())
    assert abs(accuracy - result["metrics"]["A_N"]) < 1e-9
