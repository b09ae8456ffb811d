"""Settings of fed-mammoth, the code released with HGP, for HGP and its compared methods."""

from fczoo.core.registry import register_release
from fczoo.papers.protocol import Release, Statement, state
from fczoo.papers.protocols.hgp import HGP, RATES, column

CODE = "fed-mammoth"
LINE = "given on the command line; these are the paper's, appendix H"
HEAD = {
    **state("PyTorch's own start of a linear layer", head_init="default"),
    **state("its default, AdamW without weight decay", optimizer="adamw", weight_decay=0.0),
}
FULL = {**HEAD, **state("all weights are trained", tune="full")}


@register_release("fed-mammoth")
class FedMammoth(Release):
    """aimagelab/fed-mammoth: prefixes that start at zero, statistics of raw images, 16 bit."""

    repository = "aimagelab/fed-mammoth, commit 09a9508"
    proposes = ("hgp",)
    seeds = Statement((42,), "its default seed")
    settings = {
        "backbone": HGP.settings["backbone"],
        "norm_by_dataset": Statement(True, "by data set, whatever the checkpoint"),
        "precision": Statement(
            "bf16", "16 bit mixed precision, its default; bf16 is fczoo's nearest"
        ),
        **state(CODE, augment="hgp", test_crop=0.875, class_order="natural", client_draw="task"),
        **state(
            "its scripts, as the paper",
            clients=10,
            participation=1.0,
            rounds=5,
            epochs=5,
            batch_size=16,
        ),
    }
    datasets = {
        name: {
            "tasks": statements["tasks"],
            "partition": Statement(
                statements["partition"].value,
                "an owner for each image, drawn again until all have 6 images",
            ),
        }
        for name, statements in HGP.datasets.items()
    }
    methods = {
        "fedavg": FULL,
        "hgp": {
            **HEAD,
            "init": Statement(
                "zeros", "its Gram-Schmidt fills no rows, so all prefixes stay equal"
            ),
            **state(
                CODE,
                prefix_len=100,
                blocks=(0, 1, 2, 3, 4),
                schedule="constant",
                clip=1.0,
                rebalance="all",
                server_epochs=5,
                per_class=256,
                draw="epoch",
                spread=3.0,
                logit_norm=0.1,
                class_weights="uniform",
            ),
            "server_cosine": Statement(False, "late code: no schedule; early code: cosine"),
            "keep_single": Statement(False, "a client's classes with a single image are dropped"),
            "stats_unnormalised": Statement(True, "statistics of raw images"),
        },
        "ewc": {
            **FULL,
            **state("its defaults", strength=1.0, decay=0.9, fisher="weighted"),
            "amp_vanish": Statement(
                True, "the penalty's gradient is added before loss scaling is undone"
            ),
            "modulo_labels": Statement(True, "y % c, wrong where tasks differ in size"),
            "skip_last_round": Statement(True, "the last round only brings the global weights"),
        },
        "lwf": {
            **FULL,
            **state("its defaults", strength=0.5, temperature=2.0),
            "distill_current": Statement(True, "teacher and student are cut to the current task"),
        },
        "l2p": {
            **HEAD,
            **state(CODE, size=10, chosen=5, length=5, selection="image", positions="random"),
            "pooled": Statement("cls+prompt", "mean over the class token and the prompts"),
            "no_key_loss": Statement(True, "keys keep their random start"),
        },
        "dualprompt": {
            **HEAD,
            **state(CODE, general_length=5, expert_length=20, warm_start=False),
            "no_key_loss": Statement(True, "keys keep their random start"),
            "match_all_slots": Statement(True, "matches all slots, trained or not"),
            "reshape_bug": Statement(
                True, "reshapes gathered prompts, so that keys, values and images mix"
            ),
        },
        "codap": {
            **HEAD,
            **state(
                CODE, components=100, length=4, blocks=(0, 1, 2, 3, 4), ortho=0.0, classical_gs=True
            ),
        },
        "fedproto": {
            **FULL,
            **state(CODE, strength=0.1, per_sample=False, infer="head", stats_unnormalised=True),
        },
        "ccvr": {
            **FULL,
            **state(
                CODE,
                gaussian="mixture",
                calibrate="each_round",
                covariance="diagonal",
                calibrated="current",
                logit_norm=0.1,
                per_class=256,
                server_epochs=5,
                server_lr=0.01,
                stats_unnormalised=True,
            ),
        },
        "pilora": {
            **state(
                CODE,
                rank=4,
                blocks=(0,),
                merge="sum",
                local="merged",
                sparse=0.01,
                weight_decay=1e-5,
                distance="rms",
                temperature=0.2,
                reweight="distance",
                head_tune=False,
            ),
            "means": Statement("running", "over all views in training"),
            "unheld": Statement(
                "server", "a class that no one in the round holds keeps its prototype"
            ),
            "lr_lora": HGP.methods["pilora"]["lr_lora"],
        },
        "fisheravg": {
            **FULL,
            "stats_unnormalised": Statement(True, "Fisher information of raw images"),
        },
        "regmean": {
            **FULL,
            "weight_decay": Statement(0.1, "its default"),
            "view": Statement("train", "Gram matrices of the views in training"),
        },
        "lorm": {**HEAD, "view": Statement("train", "Gram matrices of the views in training")},
        "target": {
            **FULL,
            **state("its defaults", strength=25.0, synthesis_rounds=30, warmup=20),
            "exclude_last_label": Statement(True, "labels are drawn with an exclusive upper end"),
        },
        "ffalora": {
            **state("PyTorch's own start of a linear layer", head_init="default"),
            **state("its defaults", optimizer="adamw", weight_decay=0.1, rank=16, lr=3e-4),
            "blocks": Statement(tuple(range(12)), "all blocks"),
            "merge": Statement("mean", "training sees the current task's pair only"),
        },
        "joint": {**FULL, "setting": Statement("central", "one place holds everything")},
    }
    dataset_options = {
        dataset: {
            **{
                method: {
                    field: Statement(statement.value, LINE) for field, statement in options.items()
                }
                for method, options in methods.items()
            },
            "hgp": {
                "lr": Statement(column(dataset, RATES["hgp"]), LINE),
                "server_lr": Statement(
                    column(dataset, RATES["hgp"]), "late code: the clients' rate"
                ),
            },
        }
        for dataset, methods in HGP.dataset_options.items()
    }
    notes = (
        "Its mean accuracy is the share of all seen test images (A_N here), not the paper's FAA.",
        "Its labels are cut by y % c in FisherAVG, too; LoRM's own instructions take 10 rounds a "
        "task on "
        "Cars-196 and ImageNet-A, and 3e-3 on CIFAR-100 at beta 0.5.",
        "Its early version trained HGP's clients at 1e-3 with a cosine over the steps of a round, "
        "and its "
        "server at 0.01 with a cosine: --set hgp.lr=0.001 --set hgp.schedule=cosine_local --set "
        "hgp.server_lr=0.01 --set hgp.server_cosine=on.",
    )
