"""Pictures that a command writes beside what it prints."""

from pathlib import Path
from typing import TYPE_CHECKING

from fczoo.core.errors import FczooError

if TYPE_CHECKING:
    from fczoo.runner.tuning import Tuned  # imports torch

NAMED = 0.08  # share of a bar from which on its option stands in it


def check_plot(path: Path) -> None:
    """Raise FczooError without matplotlib, without the folder, and for a kind of picture not written here."""
    from fczoo.reports.drawing import picture_class

    if not path.absolute().parent.is_dir():
        raise FczooError(f"--plot {path}: there is no folder {path.parent}; make it first")
    kinds = sorted(picture_class()().canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise FczooError(f"--plot {path} names no kind of picture; end it in one of .{', .'.join(kinds)}")


def write_importance(path: Path, tuned: "Tuned") -> None:
    """A bar a method: the share of its score's variance that each option explains, where ``check_plot`` has
    nothing against the path.

    Raises FczooError where no method has shares: too few options, or trials that all score the same.
    """
    from matplotlib.figure import Figure

    from fczoo.reports.drawing import COLOURS

    shares = {name: found.importance for name, found in tuned.methods.items() if found.importance}
    if not shares:
        raise FczooError(f"--plot {path} has nothing to show: no method has two options that matter")
    figure = Figure(figsize=(8, 0.8 + 0.4 * len(shares)), layout="constrained")
    axes = figure.subplots()
    for row, parts in enumerate(shares.values()):
        left = 0.0
        for colour, (option, share) in zip(COLOURS, parts.items(), strict=False):
            axes.barh(row, 100 * share, left=left, color=colour, edgecolor="white")
            if share >= NAMED:
                axes.text(left + 50 * share, row, option, ha="center", va="center", fontsize=8)
            left += 100 * share
    axes.set_yticks(range(len(shares)), list(shares))
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="share of the score's variance that an option explains, % (fANOVA)")
    figure.savefig(path, dpi=140)
