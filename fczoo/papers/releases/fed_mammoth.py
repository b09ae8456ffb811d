"""What fed-mammoth does, the code released with HGP, for HGP and for the methods that it compares with."""

from fczoo.core.registry import register_release
from fczoo.papers.protocol import Release, Stated, same
from fczoo.papers.protocols.hgp import HGP, RATES, column

CODE = "fed-mammoth"
LINE = "given on the command line; these are the paper's, appendix H"
HEAD = {
    **same("PyTorch's own start of a linear layer", head_init="default"),
    **same("its default, AdamW without weight decay", optimizer="adamw", weight_decay=0.0),
}
FULL = {**HEAD, **same("all weights are trained", tune="full")}


@register_release("fed-mammoth")
class FedMammoth(Release):
    """aimagelab/fed-mammoth: prefixes that start at zero, statistics of raw images, 16 bit."""

    repository = "aimagelab/fed-mammoth, commit 09a9508"
    proposes = ("hgp",)
    seeds = Stated((42,), "its default seed")
    settings = {
        "backbone": HGP.settings["backbone"],
        "norm_by_dataset": Stated(True, "by data set, whatever the checkpoint"),
        "precision": Stated("bf16", "16 bit mixed precision, its default; bf16 is fczoo's nearest"),
        **same(CODE, augment="hgp", test_crop=0.875, class_order="natural", client_draw="task"),
        **same("its scripts, as the paper", clients=10, participation=1.0, rounds=5, epochs=5, batch_size=16),
    }
    datasets = {
        name: {
            "tasks": stated["tasks"],
            "partition": Stated(
                stated["partition"].value, "an owner for each image, drawn anew until all have 6 images"
            ),
        }
        for name, stated in HGP.datasets.items()
    }
    methods = {
        "fedavg": FULL,
        "hgp": {
            **HEAD,
            "init": Stated("zeros", "its Gram-Schmidt fills no rows, so all prefixes stay equal"),
            **same(
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
            "server_cosine": Stated(False, "late code: no schedule; early code: cosine"),
            "keep_single": Stated(False, "classes of which a client has one image are dropped"),
            "stats_unnormalised": Stated(True, "statistics of raw images"),
        },
        "ewc": {
            **FULL,
            **same("its defaults", strength=1.0, decay=0.9, fisher="weighted"),
            "amp_vanish": Stated(True, "the penalty's gradient is added before loss scaling is undone"),
            "modulo_labels": Stated(True, "y % c, wrong where tasks differ in size"),
            "skip_last_round": Stated(True, "the last round only brings the global weights"),
        },
        "lwf": {
            **FULL,
            **same("its defaults", strength=0.5, temperature=2.0),
            "distill_current": Stated(True, "teacher and student are cut to the current task"),
        },
        "l2p": {
            **HEAD,
            **same(CODE, size=10, chosen=5, length=5, selection="image", positions="random"),
            "pooled": Stated("cls+prompt", "mean over the class token and the prompts"),
            "no_key_loss": Stated(True, "keys keep their random start"),
        },
        "dualprompt": {
            **HEAD,
            **same(CODE, general_length=5, expert_length=20, warm_start=False),
            "no_key_loss": Stated(True, "keys keep their random start"),
            "match_all_slots": Stated(True, "matches all slots, trained or not"),
            "reshape_bug": Stated(True, "reshapes gathered prompts, so that keys, values and images mix"),
        },
        "codap": {
            **HEAD,
            **same(CODE, components=100, length=4, blocks=(0, 1, 2, 3, 4), ortho=0.0, classical_gs=True),
        },
        "fedproto": {
            **FULL,
            **same(CODE, strength=0.1, per_sample=False, infer="head", stats_unnormalised=True),
        },
        "ccvr": {
            **FULL,
            **same(
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
            **same(
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
            "means": Stated("running", "over all views in training"),
            "unheld": Stated("server", "a class that nobody in the round holds keeps its prototype"),
            "lr_lora": HGP.methods["pilora"]["lr_lora"],
        },
        "fisheravg": {**FULL, "stats_unnormalised": Stated(True, "Fisher information of raw images")},
        "regmean": {
            **FULL,
            "weight_decay": Stated(0.1, "its default"),
            "view": Stated("train", "Gram matrices of the views in training"),
        },
        "lorm": {**HEAD, "view": Stated("train", "Gram matrices of the views in training")},
        "target": {
            **FULL,
            **same("its defaults", strength=25.0, synthesis_rounds=30, warmup=20),
            "exclude_last_label": Stated(True, "labels are drawn with an exclusive upper end"),
        },
        "ffalora": {
            **same("PyTorch's own start of a linear layer", head_init="default"),
            **same("its defaults", optimizer="adamw", weight_decay=0.1, rank=16, lr=3e-4),
            "blocks": Stated(tuple(range(12)), "all blocks"),
            "merge": Stated("mean", "training sees the current task's pair alone"),
        },
        "joint": {**FULL, "setting": Stated("central", "one place holds everything")},
    }
    tuned = {
        dataset: {
            **{
                method: {field: Stated(stated.value, LINE) for field, stated in options.items()}
                for method, options in methods.items()
            },
            "hgp": {
                "lr": Stated(column(dataset, RATES["hgp"]), LINE),
                "server_lr": Stated(column(dataset, RATES["hgp"]), "late code: the clients' rate"),
            },
        }
        for dataset, methods in HGP.tuned.items()
    }
    notes = (
        "Its mean accuracy is the share of all seen test images (A_N here), not the paper's FAA.",
        "Its labels are cut by y % c in FisherAVG, too; LoRM's own instructions take 10 rounds a task on "
        "Cars-196 and ImageNet-A, and 3e-3 on CIFAR-100 at beta 0.5.",
        "Its early version trained HGP's clients at 1e-3 with a cosine over the steps of a round, and its "
        "server at 0.01 with a cosine: --set hgp.lr=0.001 --set hgp.schedule=cosine_local --set "
        "hgp.server_lr=0.01 --set hgp.server_cosine=on.",
    )
