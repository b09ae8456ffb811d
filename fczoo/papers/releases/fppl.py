"""Settings of the code released with FPPL."""

from fczoo.core.registry import register_release
from fczoo.papers.protocol import Release, Statement, state
from fczoo.papers.protocols.fppl import FPPL

CODE = "ycheoo/FPPL"


@register_release("fppl")
class ReleasedFPPL(Release):
    """ycheoo/FPPL: local prototypes of augmented images, pixels in [0, 1], one capped split."""

    repository = "ycheoo/FPPL"
    proposes = ("fppl",)
    seeds = FPPL.seeds
    settings = FPPL.settings
    datasets = FPPL.datasets
    methods = {
        **FPPL.methods,
        "fppl": {
            **FPPL.methods["fppl"],
            **state(CODE, fusion="soft", debias=True, pool=True),
            "view": Statement("train", "local prototypes of augmented images"),
        },
    }
    notes = (
        "Its forgetting divides by all tasks and lets the last row be the best (forgetting_best "
        "here).",
        "Its wo_pool takes the last classes by number (docs/readings.md).",
    )
