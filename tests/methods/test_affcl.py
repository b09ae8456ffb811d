"""AF-FCL: flow, replay and data step against recorded outputs of the official code."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fczoo import Batch, Context, Task, Tree, create_method
from fczoo.baselines._affcl_flow import COUPLINGS, credibility, decode, encode, mix_rows, start_flow
from fczoo.baselines.affcl import head_outputs
from fczoo.core.method import task_exchanges
from helpers_golden import F32, compare, golden
from helpers_payload import server_context

LAYERS = {
    "initial_layer": "first",
    "final_layer": "last",
    **{
        f"blocks.{block}.{theirs}": f"{block}.{ours}"
        for block in range(2)
        for theirs, ours in {
            "linear_layers.0": "inner",
            "linear_layers.1": "outer",
            "context_layer": "gate",
        }.items()
    },
}
TASK = Task(0, 0, 5, 5, 1)


def flow_of(g: Tree) -> tuple[Tree, Tensor]:
    """Return the recorded flow under the names of this package, and its permutations."""
    flow = {
        f"flow.{k}.{ours}.{part}": g[
            f"in.flow._transform._transforms.{2 * k + 1}.transform_net.{theirs}.{part}"
        ]
        for k in range(COUPLINGS)
        for theirs, ours in LAYERS.items()
        for part in ("weight", "bias")
    }
    orders = [g[f"in.flow._transform._transforms.{2 * k}._permutation"] for k in range(COUPLINGS)]
    return flow, torch.stack(orders)


def test_flow() -> None:
    """Compare codes, log-densities and samples of the flow."""
    g = golden("affcl_flow")
    (flow, order), hot = flow_of(g), F.one_hot(g["in.y"], 5).float()
    codes, log_density = encode(flow, order, g["in.x"], hot)
    compare("affcl_flow", codes, g["out.noise"], F32)
    compare("affcl_flow", log_density, g["out.log_prob"], F32)
    compare("affcl_flow", decode(flow, order, g["in.draw"], hot), g["out.sample"], F32)


@given(st.integers(2, 7), st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_decoding_inverts_encoding(dim: int, seed: int) -> None:
    """Check also the log-density against the Jacobian's determinant from autograd."""
    generator = torch.Generator().manual_seed(seed)
    tree = start_flow(dim, 3, 6, generator)
    flow = {name: 2 * value.double() for name, value in tree.items() if name != "permutation"}
    features = torch.randn(2, dim, generator=generator, dtype=torch.float64)
    hot = torch.eye(3, dtype=torch.float64)[:2]
    codes, log_density = encode(flow, tree["permutation"], features, hot)
    back = decode(flow, tree["permutation"], codes, hot)
    torch.testing.assert_close(back, features, rtol=1e-6, atol=1e-7)

    def code_of_first(row: Tensor) -> Tensor:
        return encode(flow, tree["permutation"], row[None], hot[:1])[0][0]

    jacobian = torch.autograd.functional.jacobian(code_of_first, features[0])
    normal = torch.distributions.Normal(0.0, 1.0).log_prob(codes[0]).sum()
    expected = normal + torch.linalg.slogdet(jacobian).logabsdet
    torch.testing.assert_close(log_density[0], expected)


RECORDED_WEIGHTS = {
    "mixed": "out.weight",
    "latent": "alt.weight_latent",
    "feature": "alt.weight_feature",
}


@pytest.mark.parametrize("space", RECORDED_WEIGHTS)
def test_credibility(space: str) -> None:
    """Compare q and w. The released code sets w = 0 for a class with one image; here w = q."""
    g = golden("affcl_classifier_task0")
    flow, order = flow_of(g)
    hidden = features_of(g)
    hot = F.one_hot(g["in.y"], 5).float()
    replayed = g["in.draw"], g["out.generated"], g["in.labels"]
    w, q = credibility(flow, order, hidden, hot, replayed, space)
    compare("affcl_classifier_task0", q, g["out.prob_mean"], F32)
    recorded = g[RECORDED_WEIGHTS[space]]
    single = g["in.labels"] == 2
    assert (recorded[single] == 0).all()
    if space != "mixed":
        recorded = torch.where(single, q, recorded)
    compare("affcl_classifier_task0", w, recorded, F32)


def features_of(g: Tree) -> Tensor:
    """Return the official features: a layer in front of the flow that is fc1 there."""
    rows = F.linear(g["in.x"], g["in.classifier.fc1.weight"], g["in.classifier.fc1.bias"])
    return F.leaky_relu(rows)


def head_of(g: Tree, prefix: str) -> Tree:
    names = {"fc2": "fc2", "fc_classifier": "out"}
    return {
        f"classifier.{ours}.{part}": g[f"{prefix}.{theirs}.{part}"].clone()
        for theirs, ours in names.items()
        for part in ("weight", "bias")
    }


def test_replay_and_data_losses_in_first_task() -> None:
    """Compare both losses and their gradients; the replay moves only the second hidden layer."""
    g = golden("affcl_classifier_task0")
    k_loss, k_kd, k_feature, k_output, theta = g[
        "in.k_lossflow_kdlast_kdfeature_kdoutput_theta"
    ].tolist()
    weights = {"k_loss": k_loss, "k_kd": k_kd, "k_feature": k_feature, "k_output": k_output}
    method = create_method("affcl", space="mixed", theta=theta, **weights)
    (flow, order), features = flow_of(g), features_of(g)
    rows, labels = torch.arange(8) + 0.5, g["in.labels"] + 0.5
    draws = torch.zeros(8, 6)
    draws[:, 3], draws[:, 4], draws[:, 5] = labels / 5, rows / 8, rows / 8
    shared = {"permutation": order, "noise": g["in.draw"] / 2**0.5}  # mixes each row with itself
    batch = Batch(features, g["in.y"], torch.ones(8), features, draws=draws)
    head = {k: v.requires_grad_() for k, v in head_of(g, "in.classifier").items()}
    loss = method.replay_loss({**flow, **head}, features, batch, Context(TASK, 0, 1, shared))
    compare("affcl_classifier_task0", loss, g["out.c_loss_flow"], F32)
    gradients = torch.autograd.grad(loss, list(head.values()), allow_unused=True)
    for name, gradient in zip(head, gradients, strict=True):
        if name.startswith("classifier.fc2"):
            recorded = g[f"out.replay_grad.{name.removeprefix('classifier.')}"]
            compare("affcl_classifier_task0", gradient, recorded, F32, name)
        else:
            assert gradient is None
    # data step: after the replay step of the released code, with fc1 first
    moved = {k: v.requires_grad_() for k, v in head_of(g, "out.after_replay_step").items()}
    front = [g[f"out.after_replay_step.fc1.{part}"] for part in ("weight", "bias")]
    features = F.leaky_relu(F.linear(g["in.x"], *front))
    loss = method.data_loss(moved, features, batch, {})
    compare("affcl_classifier_task0", loss, g["out.c_loss"], F32)
    for name, gradient in zip(moved, torch.autograd.grad(loss, list(moved.values())), strict=True):
        theirs = name.removeprefix("classifier.").replace("out.", "fc_classifier.")
        compare("affcl_classifier_task0", gradient, g[f"out.grad.{theirs}"], F32)


def test_feature_distillation_is_zero_for_equal_models() -> None:
    """Give a feature term of 0, and the entropy at T = 2 as output term."""
    method = create_method("affcl", k_kd=1.0, k_output=1.0)
    head = {"classifier.out.weight": torch.zeros(4, 3), "classifier.out.bias": torch.zeros(4)}
    features = torch.ones(2, 3)
    batch = Batch(features, torch.tensor([0, 1]), torch.ones(2), features, teacher=features)
    # cross-entropy log 4 plus entropy log 4
    assert float(method.data_loss(head, features, batch, head)) == pytest.approx(2 * 1.3862944)
    moved = batch._replace(teacher=features + 2)
    assert float(method.data_loss(head, features, moved, head)) == pytest.approx(
        2 * 1.3862944 + 0.5 * 4
    )


def test_feature_scale_by_hand() -> None:
    """Compute mean 3 and variance 8/3 from features 1 and 3 of one class and 5 of another.

    Later tasks do not collect these sums.
    """
    method = create_method("affcl")
    state = {"scale.mean": torch.zeros(1), "scale.std": torch.ones(1)}
    sums = {
        "class.count": torch.tensor([2.0, 1.0]),
        "class.sum": torch.tensor([[4.0], [5.0]]),
        "class.squares": torch.tensor([[10.0], [25.0]]),
    }
    after = method.update_from("task_start", state, sums, server_context(TASK))
    assert after["scale.mean"].tolist() == [3.0]
    assert after["scale.std"].tolist() == pytest.approx([(8 / 3) ** 0.5])
    later = Task(1, 5, 6, 6, 2)
    boundaries = [[e.boundary for e in task_exchanges(method, task, 1)] for task in (TASK, later)]
    assert boundaries == [["task_start", None], [None]]


def test_noise_is_standard_normal() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(1024, 4, generator=generator)
    noise = mix_rows(table, torch.rand(20000, 2, generator=generator))
    assert float(noise.mean()) == pytest.approx(0, abs=0.05)
    assert float(noise.std()) == pytest.approx(1, abs=0.05)


def test_head_has_two_hidden_layers() -> None:
    """Multiply a negative sum by 0.01 in each hidden layer."""
    layer = {"weight": torch.tensor([[1.0]]), "bias": torch.tensor([0.0])}
    head = {f"classifier.{n}.{part}": v for n in ("fc1", "fc2", "out") for part, v in layer.items()}
    outputs = head_outputs(head, torch.tensor([[2.0], [-1.0]]))
    assert outputs[:, 0].tolist() == pytest.approx([2.0, -0.0001])
