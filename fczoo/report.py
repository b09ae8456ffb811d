"""Tables of finished runs."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from .runner import Bench

SHOWN = ("A_N", "Avg", "FAA", "forgetting")
LEGEND = (
    "A_N, Avg, FAA, forgetting in percent: all seen test images after the last task; mean of that over tasks; mean of the\n"
    "tasks' accuracies after the last task; mean drop from each old task's best. MB up: a client's upload in a round (1 MB = 10^6 bytes)."
)


@dataclass(frozen=True)
class Row:
    """Summary of one method over its seeds; a metric is (mean, sample standard deviation or None)."""

    method: str
    seeds: list[int]
    metrics: dict[str, tuple[float, float | None]]
    bytes_up: float  # per client and round
    bytes_down: float
    trained_scalars: int
    seconds: float  # a run


def to_text(rows: Sequence[Row], style: str = "simple") -> str:
    """The table that ``bench`` prints."""
    body = [[r.method, *(_number(r.metrics[m]) for m in SHOWN), f"{r.bytes_up / 1e6:.3f}", _time(r.seconds)] for r in rows]
    return tabulate(body, ["method", *SHOWN, "MB up", "time"], tablefmt=style, disable_numparse=True, colalign=("left", *["right"] * 6))


def to_markdown(rows: Sequence[Row]) -> str:
    """The same table in Markdown."""
    return to_text(rows, "github")


def to_csv(rows: Sequence[Row]) -> str:
    """Every metric, unrounded."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(rows[0].metrics)
    spread = [f"{n} std" for n in names]
    writer.writerow(["method", "seeds", *names, *spread, "bytes up", "bytes down", "trained scalars", "seconds"])
    for r in rows:
        mean, std = zip(*(r.metrics[n] for n in names), strict=True)
        writer.writerow(
            [r.method, len(r.seeds), *mean, *("" if s is None else s for s in std), r.bytes_up, r.bytes_down, r.trained_scalars, r.seconds]
        )
    return out.getvalue()


def describe(bench: Bench, seeds: Sequence[int]) -> str:
    """What was run, in two lines."""
    s, sizes = bench.settings, sorted({t.size for t in bench.stream.tasks})
    classes = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    order = "natural class order" if s.class_order_seed is None else f"class order seed {s.class_order_seed}"
    order = order if s.class_order == "natural" else "given class order"
    joining = f" and {s.joining} more a task" if s.joining else ""
    images = f"{len(bench.stream.train_index)} training and {len(bench.stream.test.labels)} test images"
    return (
        f"{s.dataset}: {len(bench.stream.tasks)} tasks of {classes} classes, {images}, {order}; "
        f"{s.clients} clients{joining}, {s.partition} (seed {s.partition_seed}, {bench.partition.sha256[:8]}), participation {s.participation:g}\n"
        f"{bench.backbone.config.name} ({bench.backbone.sha256[:8]}, {s.precision}, {bench.backbone.device}); {s.rounds} rounds x {s.epochs} epochs, "
        f"batch {s.batch_size}, augmentation {s.augment}; seeds {', '.join(map(str, seeds))}"
    )


def _number(value: tuple[float, float | None]) -> str:
    mean, std = value
    return f"{mean:.1f}" if std is None else f"{mean:.1f} ± {std:.1f}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
