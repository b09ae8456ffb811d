"""Settings of the code released with PILoRA."""

from fczoo.core.registry import register_release
from fczoo.papers.protocol import Release, Statement, state
from fczoo.papers.protocols.pilora import PILoRA

CODE = "Ghy0501/PILoRA"
SCRIPTS = "its scripts"


@register_release("pilora")
class ReleasedPILoRA(Release):
    """Ghy0501/PILoRA: the first task's LoRA only in testing, shards of labels, ten epochs."""

    repository = "Ghy0501/PILoRA, commit 6d1c4ef"
    proposes = ("pilora",)
    seeds = Statement((2023,), CODE)
    settings = {
        **{name: PILoRA.settings[name] for name in ("backbone", "mean", "std")},
        **state(SCRIPTS, tasks=10, clients=10, participation=1.0, rounds=30, batch_size=64),
        "epochs": Statement(10, "its default, which its scripts do not change; the paper: 5"),
        **state(CODE, augment="pilora", test_crop=1.0, class_order="natural"),
    }
    datasets = {
        "cifar100": {
            "partition": Statement("shards:6", "alpha shards of neighbouring labels a client"),
            "train_per_class": Statement(400, "the first 80 % of each class"),
        },
        "tinyimagenet": {
            "partition": Statement("shards:12", "alpha shards of neighbouring labels a client"),
            "train_per_class": Statement(400, "the first 80 % of each class"),
        },
    }
    splits = {"quantity": "shards"}
    methods = {
        "pilora": {
            **state(
                CODE,
                rank=4,
                blocks=(0,),
                weight_decay=1e-5,
                pull=1e-3,
                ortho=0.5,
                sparse=0.01,
                sharpness=1.0,
                distance="rms",
                support="all",
                temperature=0.2,
                reweight="distance",
                unheld="average",
                head_tune=False,
            ),
            "schedule": Statement("cosine_late", "the cosine is one round late"),
            "merge": Statement("first", "the evaluated model has the first task's LoRA only"),
            "local": Statement("current", "clients switch to the current task's LoRA"),
            "means": Statement("running", "over all views in training"),
            "lr_prototype": Statement(2e-3, SCRIPTS),
            "lr_lora": Statement(1e-5, SCRIPTS),
        }
    }
    dataset_options = {"tinyimagenet": {"pilora": {"lr_lora": Statement(5e-6, SCRIPTS)}}}
    notes = (
        "It draws the split again for every client and round, and ends CIFAR-100's later tasks "
        "early on the "
        "test images: neither is offered (docs/readings.md).",
    )
