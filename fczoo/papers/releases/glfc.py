"""Settings of the code released with GLFC."""

from fczoo.core.registry import register_release
from fczoo.papers.protocol import Release, Statement, state
from fczoo.papers.protocols.glfc import GLFC

CODE = "conditionWang/FCIL"


@register_release("glfc")
class ReleasedGLFC(Release):
    """conditionWang/FCIL: SGD at 2.0, exemplars that repeat, a best accuracy that is never
    reset.
    """

    repository = "conditionWang/FCIL"
    proposes = ("glfc",)
    seeds = GLFC.seeds
    settings = GLFC.settings
    datasets = GLFC.datasets
    methods = {
        "glfc": {
            **state("PyTorch's own start of a linear layer", head_init="default"),
            **state("all weights are trained", tune="full"),
            **state(CODE, optimizer="sgd", lr=2.0, lr_backbone=2.0, weight_decay=1e-5),
            **state(
                CODE,
                detector="entropy",
                threshold=1.2,
                relation=0.5,
                memory=2000,
                proxy="reconstruct",
            ),
            **state(
                CODE, perturb_steps=50, perturb_lr=0.2, inversion_steps=250, reconstructions=20
            ),
            "repeated_exemplars": Statement(True, "herding may choose an image again"),
            "perturb_raw": Statement(True, "blurs with pixels in [0, 1]"),
            "best_perf_no_reset": Statement(True, "the best accuracy is never reset"),
        }
    }
    notes = (
        "The network is a ResNet-18 from scratch there, a vision transformer here; for it 2.0 is "
        "too high: "
        "--set glfc.lr=0.01 --set glfc.lr_backbone=0.0001 --set glfc.optimizer=adam.",
    )
