"""Initial values and learning rate of the linear head."""

import pytest
import torch
import torch.nn.functional as F

from fczoo import FczooError, create_method
from fczoo.core.registry import METHODS
from fczoo.functional.heads import LinearHead, PromptedHead
from fczoo.protocols.registry import PROTOCOLS
from fczoo.testing.method_under_test import SHORT
from helpers_methods import CLOSE, first_tasks, quick_method

HEAD_METHODS = [name for name in METHODS.names() if issubclass(METHODS.get(name), LinearHead)]
PROMPT_METHODS = [
    "l2p",
    "dualprompt",
    "codap",
    "fcilpt",
    "fppl",
    "hgp",
    "pip",
    "fedcprompt",
    "powder",
]
# UOPP has another rate in later tasks.


def test_every_head_method_has_head_options():
    head_methods = {
        name for name in METHODS.names() if "head." in create_method(name).training().optims
    }
    assert head_methods == set(HEAD_METHODS)
    prompted = {name for name in HEAD_METHODS if issubclass(METHODS.get(name), PromptedHead)}
    assert prompted == {*PROMPT_METHODS, "uopp"}


@pytest.mark.parametrize("name", HEAD_METHODS)
def test_head_init_is_zeros_pytorch_or_timm(small_method, backbone, tasks, rng, name):
    def start(**options):
        return small_method(name, **options).begin_task({}, tasks[0], backbone, rng)

    assert not start()["head.weight"].any() and not start()["head.bias"].any()
    weight, bound = start(head_init="default")["head.weight"], backbone.dim**-0.5
    assert 0.9 * bound < weight.abs().max() <= bound
    timm_head = start(head_init="normal")
    assert 0.015 < timm_head["head.weight"].std() < 0.025
    assert not timm_head["head.bias"].any()


# Clients of joint and local send no means; UOPP's head is that of the first task.
@pytest.mark.parametrize("name", sorted({*HEAD_METHODS} - {"joint", "local", "uopp"}))
def test_head_init_means_equals_class_means(make_bench, watch, batch_of, name):
    """Start new rows at class means of the features that the head reads.

    Rows of earlier classes keep their values of the last task.
    """
    bench = first_tasks(make_bench(rounds=1, **SHORT), 2)
    run = watch(bench, quick_method(name, head_init="means"))
    call = next(c for c in run.rounds if c.ctx.task.index == 1)
    begin = next(c for c in run.calls if c.ctx.task.index == 1 and c.phase == "task_start")
    data = batch_of(run.method, run.bench.train, torch.arange(len(run.bench.train.labels)))
    features = run.method.trained_features(run.bench.backbone, begin.state, data)
    for c in (3, 4):
        mean = features[data.y == c].mean(0)
        torch.testing.assert_close(call.state["head.weight"][c], F.normalize(mean, dim=0), **CLOSE)
        assert call.state["head.bias"][c] == 0
    assert torch.equal(call.state["head.weight"][:3], run.states[0]["head.weight"][:3])
    assert not call.state["head.weight"][5:].any()


@pytest.mark.parametrize("name", PROMPT_METHODS)
def test_head_has_separate_learning_rate(small_method, name):
    """Use head_lr for the head, or the prompts' rate without it."""
    for head_lr, rate in ((None, 0.25), (0.5, 0.5), (0.0, 0.0)):
        optims = small_method(name, lr=0.25, head_lr=head_lr).training().optims
        assert {o.lr for prefix, o in optims.items() if prefix != "head."} == {0.25}
        assert optims["head."].lr == rate


@pytest.mark.parametrize("protocol", [p for p in PROTOCOLS.names("fczoo.") if p != "quick"])
def test_protocols_keep_head_init_of_papers_code(protocol):
    """Keep the initial head of the papers' code in their protocols.

    Without a protocol the head starts at zero.
    """
    cls, names = PROTOCOLS.get(protocol), set()
    for dataset in cls.datasets:
        for name in HEAD_METHODS:
            values = cls.hyperparameters(name, dataset)
            if values:
                names.add(name)
                as_timm = protocol == "hgp" and name not in ("hgp", "l2p", "codap", "pip")
                assert values["head_init"].value == ("normal" if as_timm else "default")
                assert values["head_init"].source
    assert names
    assert PROTOCOLS.get("quick").hyperparameters("hgp", "digits") == {}


@pytest.mark.parametrize("name", HEAD_METHODS)
def test_optimizer_option_applies_to_all_tensors(name):
    method = create_method(name, optimizer="sgd", momentum=0.9, weight_decay=0.01)
    for optim in method.training().optims.values():
        assert (optim.name, optim.momentum, optim.weight_decay) == ("sgd", 0.9, 0.01)
    with pytest.raises(
        FczooError, match=f"{name}.momentum is only for {name}.optimizer=sgd; leave out"
    ):
        create_method(name, optimizer="adam", momentum=0.9)
