"""Settings of the code released with CODA-Prompt, which has no clients."""

from fczoo.core.registry import register_release
from fczoo.papers.protocol import Release, Statement, state

CODE = "GT-RIPL/CODA-Prompt"
HEAD = state("PyTorch's own start of a linear layer", head_init="default")


@register_release("coda")
class ReleasedCODA(Release):
    """GT-RIPL/CODA-Prompt: one learner holds all images; --clients and --partition share them
    out.
    """

    repository = "GT-RIPL/CODA-Prompt"
    proposes = ("codap",)
    seeds = Statement((0,), "fczoo")
    settings = {
        **state("one learner", clients=1, partition="iid", rounds=1),
        **state(CODE, tasks=10, batch_size=128),
    }
    datasets = {"cifar100": state(CODE, epochs=20), "imagenet_r": state(CODE, epochs=50)}
    methods = {
        "codap": {
            **HEAD,
            **state(CODE, components=100, length=4, blocks=(0, 1, 2, 3, 4), lr=1e-3),
            "ortho": Statement(0.0, "its scripts; the paper: 0.1"),
            "classical_gs": Statement(True, "classical Gram-Schmidt against trained rows"),
        },
        "dualprompt": {
            **HEAD,
            **state(
                "20 and 6 rows, half for keys and half for values",
                expert_length=10,
                general_length=3,
            ),
            "match_all_slots": Statement(True, "matches all slots, trained or not"),
        },
    }
    notes = (
        "Its rate follows part of a cosine over all epochs, which is not offered; nor are its key "
        "table for "
        "each expert block, its key loss summed over the batch, and its L2P++, whose prompts are "
        "prefixes.",
    )
