"""Figures of the diagnostics of a run, where it has any."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.federation.diagnostics import FILE, read
from fczoo.reports.figure import Colours, Curves, Figure, Heat, Points, number_labels
from fczoo.reports.runs import Line

Records = dict[str, list[dict[str, Any]]]  # kind -> its records, by task


def insights(line: Line) -> Iterator[Figure]:
    """Yield figures of the diagnostics of one line's first seed.

    Args:
        line: Row of a table; one from an archive has no diagnostics.

    Raises:
        FczooError: The records are invalid.
    """
    folder = line.records[0].folder
    if folder is None:  # an archive keeps no diagnostics
        return
    try:
        yield from _insights(line, read(folder))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FczooError(
            f"{folder / FILE} is not a valid list of diagnostics: {type(error).__name__} {error}"
        ) from error


def _insights(line: Line, found: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    records: Records = {}
    for record in found:
        records.setdefault(record["kind"], []).append(record)
    seed = f"{line.label}, seed {line.seeds[0]}"
    if "confusion" in records:
        yield _square(
            f"why confusion {line.label}",
            f"{seed}: images of a task taken for a class of another, % (after the last task)",
            "answered",
            100 * np.array(records["confusion"][-1]["matrix"], dtype=float),
            "orange",
        )
    if "clients" in records:
        yield _clients(records["clients"], line.label, seed)
    if "lora" in records:
        yield _square(
            f"why lora {line.label}",
            f"{seed}: cosine between the LoRA updates of the tasks",
            "task",
            np.array(records["lora"][-1]["matrix"], dtype=float),
            "purple to orange",
            "{:.1f}",
            (-1, 1),
        )
    if "choices" in records:
        yield _choices(records["choices"][-1], line.label, seed)
    if "reweight" in records:
        yield _reweight(records["reweight"], line.label, seed)
    if "task drift" in records:
        yield _drift(records["task drift"], line.label, seed)


def _square(
    name: str,
    caption: str,
    columns: str,
    values: np.ndarray,
    colours: Colours,
    show: str = "{:.0f}",
    limits: tuple[float, float] = (0, 100),
) -> Heat:
    """Return a heat map of tasks against tasks."""
    return Heat(
        name=name,
        caption=caption,
        x=columns,
        y="task",
        values=values.astype(float),
        rows=number_labels(len(values)),
        columns=number_labels(values.shape[1]),
        colours=colours,
        show=show,
        low=limits[0],
        high=limits[1],
    )


def _clients(records: list[dict[str, Any]], label: str, seed: str) -> Heat:
    count = 1 + max(c["client"] for r in records for c in r["clients"])
    values = np.full((len(records), count), np.nan)
    for row, record in enumerate(records):
        for client in record["clients"]:
            values[row, client["client"]] = client["entropy"]
    return Heat(
        name=f"why clients {label}",
        caption=(
            f"{seed}: evenness of each client's answers on the task's test images after local "
            "training"
        ),
        x="client",
        y="task",
        values=values,
        rows=[str(r["task"] + 1) for r in records],
        columns=number_labels(count, first=0),
        colours="purple",
        show="{:.1f}",
        low=0,
        high=1,
    )


def _choices(record: dict[str, Any], label: str, seed: str) -> Heat:
    values = 100 * np.array(record["share"], dtype=float)
    return Heat(
        name=f"why choices {label}",
        caption=f"{seed}: share of each prompt in a task's test images' choices, % (last task)",
        x="prompt",
        y="images of task",
        values=values,
        rows=number_labels(len(values)),
        columns=number_labels(values.shape[1]),
        colours="green",
        low=0,
    )


def _reweight(records: list[dict[str, Any]], label: str, seed: str) -> Points:
    return Points(
        name=f"why reweight {label}",
        caption=f"{seed}: weight of a client's prototype against its share of the class's images",
        x="share of the class's images",
        y="weight of the client's prototype",
        points={
            f"task {r['task'] + 1}": np.stack(
                [np.ravel(r["share"]), np.ravel(r["weights"])], 1
            ).astype(float)
            for r in records
        },
        diagonal=True,
        of_methods=False,
    )


def _drift(records: list[dict[str, Any]], label: str, seed: str) -> Curves:
    return Curves(
        name=f"why drift {label}",
        caption=f"{seed}: how far trained tensors moved in each task, relative to their size",
        x="task",
        y="change / size",
        curves={
            prefix.rstrip("."): np.array([[r["by prefix"][prefix] for r in records]], dtype=float)
            for prefix in records[0]["by prefix"]
        },
        log=True,
        of_methods=False,
    )
