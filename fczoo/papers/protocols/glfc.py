"""The experiments of GLFC (Dong et al., CVPR 2022), on a vision transformer."""

from fczoo.core.registry import register_protocol
from fczoo.papers.protocol import Protocol, Statement, state

CODE = "released code"
SLOW = {
    **state("released code: PyTorch's own start of a linear layer", head_init="default"),
    **state(
        "FPPL's slow learner; GLFC's SGD at 2.0 belongs to a ResNet-18 from scratch",
        lr=1e-2,
        lr_backbone=1e-4,
    ),
}


@register_protocol("glfc")
class GLFC(Protocol):
    """A growing population: 90 % of the earlier clients move on to a new task; long local
    training.
    """

    paper = "Dong et al., Federated Class-Incremental Learning (CVPR 2022)"
    proposes = ("glfc",)
    seeds = Statement((0,), "not stated")
    settings = {
        "backbone": Statement(
            "vit_base_patch16_224.augreg_in21k",
            "replaces the paper's ResNet-18, as ViT-B/16 does in FPPL and FCILPT",
        ),
        "tasks": Statement(10, "paper: 10 tasks"),
        **state(
            "paper and released code",
            clients=30,
            transition=0.9,
            participation=10.0,
            draw_among="joined",
        ),
        "partition": Statement(
            "overlap:0.6", "released code: 6 of a task's 10 classes, with all their images"
        ),
        "rounds": Statement(
            lambda tasks: max(100 // tasks, 1), "released code: 100 rounds over all tasks"
        ),
        **state(CODE, epochs=20, batch_size=128, aggregator="uniform"),
        "augment": Statement(
            "crop", "released code: random crop and horizontal flip; nearest of fczoo's"
        ),
        "class_order": Statement("natural", "not stated"),
    }
    datasets = {
        "cifar100": {
            "joining": Statement(
                lambda tasks: 100 // tasks, "released code: as many clients as a task has classes"
            )
        },
        "tinyimagenet": {
            "joining": Statement(
                lambda tasks: 200 // tasks, "released code: as many clients as a task has classes"
            ),
            "partition": Statement(
                "overlap:0.6",
                "paper: 60 % of a task's classes; the released code's 6 are those of a task of 10",
            ),
        },
    }
    release = "glfc"
    methods = {
        **dict.fromkeys(("fedavg", "ewc", "lwf"), SLOW),
        "glfc": {
            **SLOW,
            **state("paper and released code", memory=2000, threshold=1.2, relation=0.5),
            **state(CODE, perturb_steps=50, inversion_steps=250, reconstructions=20),
        },
    }
    notes = (
        (
            "A client without new data that is drawn trains nothing; the released code lets it "
            "train on "
            "its earlier classes."
        ),
    )
