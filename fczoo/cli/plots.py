"""Figures that commands write in addition to their output."""

from pathlib import Path
from typing import TYPE_CHECKING

from fczoo.core.errors import FczooError

if TYPE_CHECKING:
    from fczoo.runner.tune.tuned_file import TunedFile  # imports torch

MIN_LABEL_SHARE = 0.08  # smallest share of a bar that is labelled with its option


def check_plot(path: Path) -> None:
    """Raise FczooError unless a figure can be written to ``path``.

    Args:
        path: File of the figure.

    Raises:
        FczooError: matplotlib is not installed, the folder does not exist, or the suffix is not a
            format of matplotlib.
    """
    from fczoo.reports.drawing import picture_class

    if not path.absolute().parent.is_dir():
        raise FczooError(f"--plot {path}: no folder {path.parent}; create it first")
    kinds = sorted(picture_class()().canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise FczooError(
            f"--plot {path} names no kind of picture; its suffix must be one of "
            f".{', .'.join(kinds)}"
        )


def write_importance(path: Path, tuned: "TunedFile") -> None:
    """Plot one bar per method: the share of its score's variance that each option explains.

    Args:
        path: File of the figure, which ``check_plot`` must accept.
        tuned: Outcome of a search.

    Raises:
        FczooError: No method has shares: too few options, or trials that all score the same.
    """
    from matplotlib.figure import Figure

    from fczoo.reports.drawing import COLOURS

    shares = {
        name: search.importance for name, search in tuned.methods.items() if search.importance
    }
    if not shares:
        raise FczooError(
            f"--plot {path} has nothing to show: no method has two options that matter"
        )
    figure = Figure(figsize=(8, 0.8 + 0.4 * len(shares)), layout="constrained")
    axes = figure.subplots()
    for row, parts in enumerate(shares.values()):
        bar_start = 0.0
        for colour, (option, share) in zip(COLOURS, parts.items(), strict=False):
            axes.barh(row, 100 * share, left=bar_start, color=colour, edgecolor="white")
            if share >= MIN_LABEL_SHARE:
                axes.text(bar_start + 50 * share, row, option, ha="center", va="center", fontsize=8)
            bar_start += 100 * share
    axes.set_yticks(range(len(shares)), list(shares))
    axes.invert_yaxis()
    axes.set(
        xlim=(0, 100), xlabel="share of the score's variance that an option explains, % (fANOVA)"
    )
    figure.savefig(path, dpi=140)
