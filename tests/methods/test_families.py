"""Methods of each kind of plug on other families than the first ViT, end to end."""

import pytest

from fczoo import FczooError, Settings
from fczoo.core.backbone import Backbone
from fczoo.core.vit_config import Rope, ViTConfig
from fczoo.data.views import ImageStore
from fczoo.federation.benchmark import Benchmark
from fczoo.testing.world import (
    random_weights,
    small_method,
    toy_partition,
    toy_stream,
)

SIZE = {"image_size": 16, "patch_size": 8, "dim": 32, "depth": 6, "heads": 4, "mlp_dim": 64}
FAMILIES = {
    "dinov2": {"layer_scale": True, "register_tokens": 2, "position": "patches"},
    "eva02": {
        "rope": Rope(reference=4),
        "swiglu": True,
        "mlp_norm": True,
        "pool": "mean",
        "norm_after_pool": True,
    },
    "siglip": {"class_token": False, "pool": "attention", "activation": "gelu_tanh"},
}


def bench_of(**parts) -> Benchmark:
    config, stream = ViTConfig("family", **SIZE, **parts), toy_stream()
    backbone = Backbone(config, random_weights(config))
    settings = Settings(
        dataset="toy", tasks=3, clients=3, rounds=1, epochs=1, batch_size=4, device="cpu"
    )
    stores = (ImageStore(stream.train, backbone), ImageStore(stream.test, backbone))
    return Benchmark(settings, stream, toy_partition(), backbone, *stores)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["hgp", "l2p", "afc", "dytox", "lorm"])
def test_methods_run_on_other_families(family, method):
    """Run prefixes, prompts, taps, own tokens and LoRA over all tasks."""
    result = bench_of(**FAMILIES[family]).run(small_method(method), 0)
    assert len(result.accuracy) == 3


def test_methods_with_prefixes_take_features_of_twice_the_width():
    bench = bench_of(pool="cls+mean")
    for method in ("hgp", "dualprompt"):
        assert len(bench.run(small_method(method), 0).accuracy) == 3
    with pytest.raises(FczooError, match="which this method pools; take pool cls or mean"):
        bench.run(small_method("l2p"), 0)
