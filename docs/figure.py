"""A method's figure: what clients train and send and what the server keeps, drawn from what is
measured.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from html import escape

from fczoo.core.method import Method
from fczoo.core.tree import Tree, nbytes
from fczoo.core.types import EndsTasks, HasClientMemory
from fczoo.federation.settings import Settings
from fczoo.runner.cost import measure

WIDTH, EDGE, LINE = 360, 12, 26
TRAINED_COLOUR, STATISTICS_COLOUR, FIXED_COLOUR = "#3b7dd8", "#e07b39", "#7f7f80"
LEGEND = (
    ("trained", TRAINED_COLOUR),
    ("measured", STATISTICS_COLOUR),
    ("kept as it is", FIXED_COLOUR),
)
UPLOADS = {
    "task_start": "up as a task begins",
    "round": "up in a round",
    "after_rounds": "up after the rounds",
    "balanced": "up in a round on exemplars",
    "task_end": "up as a task ends",
}
BOLD = 'font-weight="600"'


@dataclass
class Canvas:
    """An SVG that grows downwards; text takes the colour of the page."""

    parts: list[str] = field(default_factory=list)
    y: float = 0.0  # where the next line begins

    def text(self, x: float, words: str, style: str = "") -> None:
        self.parts.append(f'<text x="{x}" y="{self.y + 17}" {style}>{escape(words)}</text>')

    def chips(self, left: float, chips: Iterable[tuple[str, str]]) -> None:
        """Write words in coloured boxes, in as many lines as they need."""
        x = left
        for words, colour in chips:
            width = 7.0 * len(words) + 12
            if x > left and x + width > WIDTH - EDGE - 4:
                x, self.y = left, self.y + LINE
            box = f'x="{x:.0f}" y="{self.y + 2}" width="{width:.0f}" height="21" rx="4"'
            self.parts.append(
                f'<rect {box} fill="{colour}" fill-opacity="0.25" stroke="{colour}"/>'
            )
            self.text(round(x + width / 2), words, 'text-anchor="middle"')
            x += width + 6
        self.y += LINE

    def frame(self, top: float) -> None:
        """Draw a box around all lines from ``top`` on."""
        size = f'width="{WIDTH - 8}" height="{self.y + 6 - top}"'
        style = 'rx="8" fill="none" stroke="currentColor" opacity="0.6"'
        self.parts.append(f'<rect x="4" y="{top + 1}" {size} {style}/>')

    def arrow(self, x: float, start: float, end: float) -> None:
        """Draw a vertical arrow."""
        head = end - 7 if end > start else end + 7
        path = f"M{x} {start}V{end}M{x - 5} {head}L{x} {end}L{x + 5} {head}"
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
        )

    def svg(self, title: str) -> str:
        view = (
            f'viewBox="0 0 {WIDTH} {self.y + 6:.0f}" '
            f'style="width:100%;max-width:{1.2 * WIDTH:.0f}px"'
        )
        head = f'<svg {view} role="img" fill="currentColor" font-size="13">'
        return "\n".join([head, f"<title>{escape(title)}</title>", *self.parts, "</svg>"])


def draw(method: Method, dataset: str) -> str:
    """Draw the server above, a client below, and between them what is sent, as inline SVG."""
    cost, training = measure(method, Settings.for_dataset(dataset)), method.training()
    canvas = Canvas()
    canvas.text(EDGE, "server", BOLD)
    canvas.y += LINE
    if cost.trained_tensors:
        canvas.text(EDGE, f"merges by {training.averaging}", 'opacity="0.75"')
        canvas.y += LINE - 4
    if method.server_only:
        canvas.chips(EDGE, [(f"keeps {p.rstrip('.')}", FIXED_COLOUR) for p in method.server_only])
    canvas.frame(0)
    top = canvas.y = canvas.y + 10
    for phase, label in UPLOADS.items():
        tree = {**cost.second_task_uploads.get(phase, {}), **cost.first_task_uploads.get(phase, {})}
        if tree:
            canvas.text(EDGE + 24, f"{label}: {size(tree)}")
            canvas.y += LINE - 2
            canvas.chips(EDGE + 24, groups(tree, heads(training.trained_prefixes)))
    canvas.arrow(EDGE + 8, canvas.y + 2, top + 2)
    top = canvas.y = canvas.y + 8
    if cost.broadcast:
        canvas.text(EDGE + 24, f"down as a task begins: {size(cost.broadcast)}")
        canvas.y += LINE + 2
        canvas.arrow(EDGE + 8, top, canvas.y - 2)
    top = canvas.y = canvas.y + 4
    canvas.text(EDGE, "client", BOLD)
    canvas.y += LINE
    trains_network = any(name.startswith("full.") for name in cost.trained_tensors)
    canvas.chips(
        EDGE,
        [
            ("backbone", TRAINED_COLOUR if trains_network else FIXED_COLOUR),
            *parameters(cost.trained_tensors),
        ],
    )
    fixed_parts = [(f"holds {name}", FIXED_COLOUR) for name in heads(cost.stored_broadcast)]
    if isinstance(method, HasClientMemory | EndsTasks):
        fixed_parts.append(("exemplars" if training.exemplars else "its own memory", FIXED_COLOUR))
    if fixed_parts:
        canvas.chips(EDGE, fixed_parts)
    canvas.frame(top)
    canvas.y += 12
    canvas.chips(4, LEGEND)
    return canvas.svg(f"What {method.name} trains and sends")


def size(tree: Tree) -> str:
    """Return the bytes of a tree in words."""
    count = nbytes(tree)
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def heads(names: Iterable[str]) -> list[str]:
    """Return the first words of tensors' names, each once."""
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


def parameters(tree: Tree) -> list[tuple[str, str]]:
    """Return chips of what is trained next to the backbone's own weights."""
    return [(name, TRAINED_COLOUR) for name in heads(tree) if name != "full"]


def groups(tree: Tree, trained: Collection[str]) -> list[tuple[str, str]]:
    """Return chips of an upload: parameters by first word, statistics of a group in one chip."""
    names_by_group: dict[str, list[str]] = {}
    for name in tree:
        first, _, suffix = name.partition(".")
        group_names = names_by_group.setdefault(first, [])
        if first not in trained and suffix and "." not in suffix:
            group_names.append(suffix)
    chips = []
    for first, group_names in names_by_group.items():
        words = (
            "backbone"
            if first == "full"
            else ": ".join(filter(None, [first, ", ".join(group_names)]))
        )
        chips.append((words, TRAINED_COLOUR if first in trained else STATISTICS_COLOUR))
    return chips
