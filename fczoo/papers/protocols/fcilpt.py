"""The experiments of FCILPT (Liu et al., arXiv 2310.08948)."""

from fczoo.core.registry import register_protocol
from fczoo.papers.protocol import Protocol, Statement, state

PAPER = "paper, experiments"
HEAD = state("not stated; PyTorch's own start of a linear layer", open=True, head_init="default")

MEMORY = state(
    "paper: 2,000 exemplars per client for the methods that it compares with", memory=2000
)


@register_protocol("fcilpt")
class FCILPT(Protocol):
    """A growing population of clients that own 60 % of a task's classes whole; ten are drawn in a
    round.
    """

    paper = "Liu et al., Federated Class-Incremental Learning with Prompting (arXiv 2310.08948)"
    proposes = ("fcilpt",)
    seeds = Statement((0,), "not stated")
    settings = {
        "backbone": Statement(
            "vit_base_patch16_224.augreg_in21k",
            "paper: ViT-B/16; its weights are not stated, these are those of L2P, on which it "
            "builds",
            open=True,
        ),
        **state("paper: pixels in [0, 1]", mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)),
        "tasks": Statement(10, "paper, tables 1 to 3; on CIFAR-100 also 5 and 20, tables 4 and 6"),
        **state(
            "paper: the population of GLFC",
            clients=30,
            transition=0.9,
            participation=10.0,
            draw_among="joined",
            partition="overlap:0.6",
        ),
        "joining": Statement(
            lambda tasks: 100 // tasks, "paper: 10 clients a task of 10 tasks, 20 of 5, 5 of 20"
        ),
        "rounds": Statement(
            lambda tasks: 20 if tasks <= 5 else 10, "paper: 10 rounds a task, 20 with 5 tasks"
        ),
        "aggregator": Statement("uniform", "paper, algorithm 1"),
        **state(PAPER, epochs=5, batch_size=16),
        **state("paper: resize to 224", augment="none", test_crop=1.0),
        "class_order": Statement("natural", "not stated", open=True),
    }
    datasets = {
        "cifar100": {},
        "miniimagenet": {"stored_size": Statement(224, "paper: images of 224x224 pixels")},
        "tinyimagenet": {},
    }
    methods = {
        "fcilpt": {
            **HEAD,
            "lr": Statement(0.03, "paper; L2P scales this rate by batch/256"),
            "query": Statement(
                "cls",
                "as in L2P; the paper: the embedded class token, which is the same for all images",
                printed="embed_cls",
            ),
            **state(
                "not stated; as in L2P",
                open=True,
                strength=10.0,
                init="symmetric",
                pooled="prompt",
                support="task",
                head_lr=None,
            ),
            "old_clients": Statement(
                "idle", "not stated; GLFC's code lets them train again", open=True
            ),
        },
        "fedavg": {
            **HEAD,
            "lr": Statement(
                0.03, "table 7's row without prompts: the paper's only rate", open=True
            ),
        },
        **dict.fromkeys(("glfc", "lga", "icarl", "bic", "ssil"), HEAD | MEMORY),
        **dict.fromkeys(("lucir", "podnet", "dde", "geodl", "afc", "dytox"), MEMORY),
    }
    dataset_options = {
        "cifar100": {"fcilpt": state(PAPER, size=10, chosen=5, length=5, common_length=5)},
        "miniimagenet": {"fcilpt": state(PAPER, size=19, chosen=4, length=6, common_length=5)},
        "tinyimagenet": {"fcilpt": state(PAPER, size=24, chosen=8, length=5, common_length=1)},
    }
    notes = (
        "A client without new data that is drawn trains nothing and is left out of the mean; "
        "GLFC's "
        "code lets it train on its earlier classes "
        "(here with fcilpt.old_clients=previous_task).",
        (
            "Mini-ImageNet: 500 training and 100 test images of each class. The baselines of "
            "tables 1 to 3 "
            "use a ResNet-18 and exemplars."
        ),
    )
