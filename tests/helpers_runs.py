"""Run folders written by hand."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fczoo import Result, Settings, create_method
from fczoo.core.files import write_json
from fczoo.core.metrics import all_metrics
from fczoo.data.partition import Partition

COUNTS = [10, 10]
PARTITION = Partition(
    "digits",
    "iid",
    0,
    tuple(range(10)),
    tuple((np.arange(t * 4, t * 4 + 2), np.arange(t * 4 + 2, t * 4 + 4)) for t in range(2)),
)


def write_run(
    folder: Path,
    methods: dict[str, dict[int, float]],
    options: dict | None = None,
    backbone: str = "vit_nano_32",
    **settings: Any,
) -> Path:
    """Write a run folder by hand.

    Args:
        folder: The folder to create.
        methods: Accuracy on the first task at the end, in percent, by method and seed.
        options: Options of every method.
        backbone: Name of the backbone.
        settings: Settings other than those of two tasks and two clients on digits.

    Returns:
        The folder.
    """
    values = (
        Settings.for_dataset("digits").portable()
        | {"tasks": 2, "clients": 2, "partition": "iid"}
        | settings
    )
    about_backbone = {"name": backbone, "sha256": "b" * 64}
    split = {"spec": values["partition"], "sha256": PARTITION.sha256}
    seeds = sorted({s for runs in methods.values() for s in runs})
    folder.mkdir(parents=True)
    PARTITION.save(folder / "partition.json")
    about = {
        "methods": {m: options or {} for m in methods},
        "seeds": seeds,
        "settings": values,
        "backbone": about_backbone,
        "partition": split,
    }
    about |= {
        "device": "cpu",
        "versions": {"torch": "2"},
        "command": ["fczoo", "bench", "--methods", ",".join(methods)],
    }
    write_json(folder / "bench.json", about)
    for method, runs in methods.items():
        for seed, last in runs.items():
            matrix = [[90.0], [last, 80.0]]
            result = Result(
                method,
                options or {},
                values,
                seed,
                about_backbone,
                split,
                list(range(10)),
                [5, 5],
                COUNTS,
                12,
                accuracy=matrix,
            )
            result.metrics = all_metrics(matrix, COUNTS)
            result.bytes_up, result.bytes_down, result.client_rounds, result.seconds = (
                4_000_000,
                2_000_000,
                2,
                1.5,
            )
            result.uploaded = {"parameters": 3_000_000, "counts": 1_000_000}
            result.phases, result.client_storage, result.peak_memory = (
                {"training": 1.0, "evaluation": 0.5},
                3_000_000,
                {"run": 5_000_000},
            )
            run_folder = folder / method / f"seed{seed}"
            run_folder.mkdir(parents=True)
            write_json(run_folder / "result.json", {"finished": True, **asdict(result)})
            rounds = [
                {
                    "task": t,
                    "round": 0,
                    "clients": [0, 1],
                    "loss": 1.0 - t / 2,
                    "bytes_up": 2_000_000,
                    "bytes_down": 0,
                }
                for t in range(2)
            ]
            (run_folder / "rounds.jsonl").write_text(
                "".join(json.dumps({**r, "seconds": 0.5}) + "\n" for r in rounds)
            )
    return folder


def tune(folder: Path, trials: int, found_for: list[str]) -> None:
    """Record in a run folder that the values of some methods come from a search.

    Args:
        folder: The run folder.
        trials: Number of trials of the search.
        found_for: The methods.
    """
    path = folder / "bench.json"
    record = {
        "trials": trials,
        "tasks": 3,
        "dataset": "digits",
        "image_steps": 100,
        "methods": found_for,
    }
    write_json(path, {**json.loads(path.read_text()), "tuned": record})


def write_one(
    folder: Path, method: str, by_seed: dict[int, float], epochs: int = 1, **options
) -> None:
    """Write a run folder of one method with its own values and these options.

    See ``write_run``.

    Args:
        folder: The folder to create.
        method: Name of the method.
        by_seed: Accuracy on the first task at the end, in percent, by seed.
        epochs: Local epochs per round.
        options: Options of the method.
    """
    instance = create_method(method, **options)
    plain = {name: getattr(instance, name) for name in type(instance).__dataclass_fields__}
    write_run(folder, {method: by_seed}, plain, partition="dirichlet:0.5", epochs=epochs)
