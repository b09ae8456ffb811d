"""A protocol for a look: minutes on a CPU, any data set, the bundled backbone."""

from fczoo.core.registry import register_protocol
from fczoo.papers.protocol import Protocol, Stated, same


@register_protocol("quick")
class Quick(Protocol):
    """Shows that all works, not which method is best; on digits, what bench does without a protocol."""

    paper = "none: fczoo's own"
    proposes = ("pilora", "hgp", "fppl")
    seeds = Stated((0,), "fczoo")
    settings = same(
        "fczoo",
        backbone="vit_nano_32",
        tasks=5,
        clients=5,
        partition="dirichlet:0.5",
        rounds=3,
        epochs=2,
        batch_size=16,
        augment="none",
        train_per_class=20,
        test_per_class=20,
    )
    datasets = {"digits": same("fczoo: all images", train_per_class=None, test_per_class=None)}
    any_dataset = True
    notes = (
        (
            "The bundled backbone was trained on Tiny-ImageNet: its figures on that data set and on "
            "subsets of ImageNet mean nothing."
        ),
    )
