"""Critical-difference diagram: mean ranks with bars, which overlap without significance."""

from typing import Any

from fczoo.board.ranks import Critical
from fczoo.reports.drawing import COLOURS, STYLE, import_matplotlib, picture_class

ROW_HEIGHT = 0.19  # inches per method


def draw_critical(critical: Critical) -> Any:
    """Draw mean ranks, each with a bar of Nemenyi's critical difference around it.

    Two methods whose bars overlap are not significantly different (Demšar 2006).

    Args:
        critical: Mean ranks, best first.

    Returns:
        Figure of matplotlib.

    Raises:
        FczooError: matplotlib is not installed.
    """
    with import_matplotlib().rc_context(STYLE):
        picture = picture_class()(figsize=(6.4, 0.9 + ROW_HEIGHT * len(critical.ranks)))
        axes = picture.subplots()
        places = range(len(critical.ranks))
        ranks = list(critical.ranks.values())
        half = critical.distance / 2
        axes.errorbar(
            ranks, places, xerr=half, fmt="o", color=COLOURS[0], markersize=3, linewidth=0.9
        )
        axes.axvspan(ranks[0] - half, ranks[0] + half, color=COLOURS[0], alpha=0.08)
        axes.set_yticks(places, list(critical.ranks))
        axes.set_xlim(0.5, len(ranks) + 0.5)
        axes.set_ylim(len(ranks) - 0.4, -0.6)  # the best on top
        axes.set_xlabel("mean rank by A_N, 1 the best")
        return picture
