"""The benchmark grid: methods x seeds on one data stream, written to a run folder as it goes."""

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .checkpoint import Checkpoint, write_safely
from .core import Method
from .errors import FczooError
from .identity import data_sha256
from .record import Result, read_result, versions
from .report import Row, describe, to_csv, to_markdown
from .resume import LOCK, Interrupts, check_same, only_process
from .runner import Bench, create_method
from .settings import Settings, shorten


def run_bench(
    methods: Sequence[str], seeds: Sequence[int], settings: Settings, options: Mapping[str, Mapping[str, Any]], out: Path, resume: bool = False
) -> tuple[str, list[Row]]:
    """Run every method with every seed; returns what was run, in words, and one summary row a method.

    The folder gets ``bench.json``, ``partition.json``, per run ``METHOD/seedN/result.json`` and ``rounds.jsonl``, and
    ``summary.{json,csv,md}``, brought up to date after each run. A folder that holds part of the same grid is carried on:
    finished runs are read back, a broken one goes on after its last round; with ``resume`` there has to be such a folder.
    Raises FczooError for input that cannot work, before anything is written, for a folder that another process or
    configuration has, for a run that fails, after what was finished is on disk, and Interrupted after SIGINT or SIGTERM.
    """
    built = create_methods(methods, settings, options)
    begun = (out / "bench.json").exists()
    if resume and not begun:
        raise FczooError(f"no run to resume in {out}; leave --resume out to begin one there")
    if not begun and out.exists() and (not out.is_dir() or any(p.name not in (LOCK, "bench.json.tmp") for p in out.iterdir())):
        raise FczooError(f"output folder {out} is already in use; give another with --out or remove it")
    with only_process(out):
        return _run_grid(built, seeds, settings, out)


def _run_grid(built: Sequence[Method], seeds: Sequence[int], settings: Settings, out: Path) -> tuple[str, list[Row]]:
    bench = Bench.open(settings)
    for method in built:
        bench.check(method)
    about = {
        "methods": {m.name: asdict(m) for m in built},  # type: ignore[call-overload]
        "seeds": list(seeds),
        "settings": settings.portable(),
        "backbone": {**asdict(bench.backbone.config), "sha256": bench.backbone.sha256},
        "partition": {"spec": bench.partition.spec, "sha256": bench.partition.sha256},
        "split": bench.stream.split,
        "data": {"sha256": data_sha256(bench.stream)},
        "device": str(bench.backbone.device),
        "versions": versions(),
        "command": [shorten(word) for word in sys.argv],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if (out / "bench.json").exists():
        check_same(out, about)
    else:
        write_json(out / "bench.json", about)
    bench.partition.save(out / "partition.json")
    rows: list[Row] = []
    text = describe(bench, seeds)
    for method in built:
        results = []
        for seed in seeds:
            results.append(_run_cell(bench, method, seed, out))
            rows = [*(r for r in rows if r.method != method.name), summarise(results)]
            _write_summary(out, text, rows)
    return text, rows


def _run_cell(bench: Bench, method: Method, seed: int, out: Path) -> Result:
    """One run of the grid: read back if it is finished, else begun or carried on."""
    folder = out / method.name / f"seed{seed}"
    result = read_result(folder / "result.json") if (folder / "result.json").exists() else None
    if result is None or len(result.accuracy) < len(result.task_sizes):
        folder.mkdir(parents=True, exist_ok=True)
        with Interrupts(out) as interrupts, Recorder(folder) as recorder:
            result = bench.run(method, seed, recorder, Checkpoint(folder / "checkpoint.safetensors", interrupts.obey))
    Checkpoint(folder / "checkpoint.safetensors").remove()
    return result


def create_methods(methods: Sequence[str], settings: Settings, options: Mapping[str, Mapping[str, Any]]) -> list[Method]:
    """Methods by name; ``options`` beat the protocol's values, which beat those for the data set and the defaults."""
    if stray := set(options) - set(methods):
        raise FczooError(f"--set {min(stray)}.… names no method of this run ({', '.join(methods)})")
    return [create_method(name, settings.dataset, **{**settings.method_options(name), **options.get(name, {})}) for name in methods]


class Recorder:
    """Observer that shows a progress bar (plain lines where there is no terminal) and writes a run's files."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.log = (folder / "rounds.jsonl").open("a+b")

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.log.close()
        if hasattr(self, "bar"):
            self.bar.close()

    def start(self, method: Method, seed: int, clients: int, rounds: int, done: int) -> None:
        self.log.seek(0)
        if sum(1 for _ in zip(range(done), self.log, strict=False)) < done:
            raise FczooError(f"{self.log.name} lists fewer rounds than the checkpoint beside it; remove {self.folder} to begin this run anew")
        self.log.truncate(self.log.tell())  # rounds that were logged but not saved are run again
        self.label = f"{method.name} seed {seed}"
        self.bar = tqdm(total=rounds, initial=done, desc=self.label, unit="round", disable=not sys.stderr.isatty(), leave=False)

    def client(self, task: int, round: int, loss: float) -> None:
        self.bar.set_postfix_str(f"task {task + 1}, round {round + 1}, loss {loss:.3f}")

    def round(self, record: dict[str, Any]) -> None:
        self.bar.update()
        self.log.write(json.dumps(record).encode() + b"\n")
        self.log.flush()
        os.fsync(self.log.fileno())

    def task(self, result: Result) -> None:
        done = len(result.accuracy)
        write_json(self.folder / "result.json", {"finished": done == len(result.task_sizes), **asdict(result)})
        if self.bar.disable:
            a_t = f"{result.metrics['A_N']:.1f} % over the classes seen"
            print(f"{self.label}: task {done} of {len(result.task_sizes)}, {a_t}, {result.seconds:.0f} s", file=sys.stderr, flush=True)


def summarise(results: Sequence[Result]) -> Row:
    """One method's row: mean and, over several seeds, sample standard deviation."""

    def over(values: Sequence[float]) -> tuple[float, float | None]:
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None

    metrics = {name: over([r.metrics[name] for r in results]) for name in results[0].metrics}
    first = results[0]
    return Row(
        first.method,
        [r.seed for r in results],
        metrics,
        first.bytes_up / max(first.client_rounds, 1),
        first.bytes_down / max(first.client_rounds, 1),
        first.trained_scalars,
        statistics.fmean([r.seconds for r in results]),
    )


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it."""
    write_safely(path, (json.dumps(content, indent=1) + "\n").encode())


def _write_summary(out: Path, text: str, rows: Sequence[Row]) -> None:
    write_json(out / "summary.json", {"about": text, "rows": [asdict(r) for r in rows]})
    (out / "summary.csv").write_text(to_csv(rows))
    (out / "summary.md").write_text(f"{text}\n\n{to_markdown(rows)}\n")
