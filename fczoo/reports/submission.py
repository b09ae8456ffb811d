"""Submissions: check run folders before their results enter an archive."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.files import encode_json, read_json
from fczoo.core.registry import DATASETS, create_method
from fczoo.data.client_stages import uses_stages
from fczoo.data.partition import load_partition
from fczoo.data.partition_file import PARTITION
from fczoo.data.stream import DOMAINS, make_tasks
from fczoo.federation.environment import code_of, digest
from fczoo.federation.result import Result
from fczoo.reports.archive import read_archive, write_archive
from fczoo.reports.run_folder import (
    BENCH,
    RESULT,
    BenchFile,
    RunRecord,
    Runs,
    current_settings,
    recorded_settings,
)
from fczoo.reports.runs import WITHOUT_EFFECT, identity, read_runs, with_defaults

VERSIONS = ("fczoo", "python", "torch", "torchvision", "timm", "numpy", "code")
ROUNDING_TOLERANCE = 1e-4  # largest deviation of an image count from a whole number
RERUN_ADVICE = "run it again with this version of fczoo"
IMAGE_SETTINGS = ("dataset", "train_per_class", "test_per_class", "stored_size", "resize")
"""Settings that determine the images of a run, together with the class order."""


def submit(place: Path, archive: Path, write: bool = True) -> tuple[int, list[str]]:
    """Check the run folders at or below a path and append their runs to an archive.

    Args:
        place: Run folder, or folder that contains run folders.
        archive: CSV file; it is created if needed.
        write: Whether to write the archive; False: only check.

    Returns:
        Number of runs, and one line per fault; if there is a fault, no run is entered.

    Raises:
        FczooError: No run is found, or a file is damaged.
    """
    new_runs = [_rename_runs(runs, place) for runs in read_runs([place])]
    archive_runs = read_archive(archive) if archive.exists() else []
    faults = [
        fault
        for i, runs in enumerate(new_runs)
        for fault in _faults(runs, [*archive_runs, *new_runs[:i]], archive)
    ]
    if write and not faults:
        archive.parent.mkdir(parents=True, exist_ok=True)
        write_archive([*archive_runs, *new_runs], archive)
    return sum(len(runs.records) for runs in new_runs), faults


def _rename_runs(runs: Runs, place: Path) -> Runs:
    """Add the submitted folder's name to the names of its subfolders' runs."""
    if runs.folder is None:
        raise FczooError(
            f"{runs.place} is not a run folder; give the folder that fczoo bench wrote"
        )
    if runs.folder == place:
        return runs
    return dataclasses.replace(runs, name=f"{place.resolve().name}/{runs.name}")


def _faults(runs: Runs, archive_runs: Sequence[Runs], archive: Path) -> Iterator[str]:
    """Yield the reasons to reject a folder."""
    assert runs.folder is not None
    yield from _unfinished_runs(runs, runs.folder)
    yield from _missing_checksums(runs, runs.folder)
    yield from _code_faults(runs)
    for record in runs.records:
        if record.result is not None:
            yield from _contradictions(record, record.result, runs.folder)
            yield from _impossible_values(record, record.result)
            yield from _test_set_faults(record, record.result)
    yield from _different_images(runs, archive_runs, archive)
    yield from _duplicates(runs, archive_runs, archive)


def _unfinished_runs(runs: Runs, folder: Path) -> Iterator[str]:
    problems = {(record.method, record.seed): record.problem for record in runs.records}
    for method in runs.bench_file.methods:
        for seed in runs.bench_file.seeds:
            if problem := problems.get((method, seed), "not started"):
                fault = (
                    f"{folder}: {method} seed {seed} is not finished ({' '.join(problem.split())})"
                )
                yield f"{fault}; continue with `fczoo bench --resume --out {folder}`"


def _missing_checksums(runs: Runs, folder: Path) -> Iterator[str]:
    """Yield files without a checksum; other files were verified when they were read."""
    files = [
        folder / BENCH,
        *(record.folder / RESULT for record in runs.records if record.result and record.folder),
    ]
    for path in files:
        if "sha256" not in read_json(path, "file of a run"):
            problem = "has no checksum: an older version or another program wrote it"
            yield f"{path} {problem}; {RERUN_ADVICE}"


def _code_faults(runs: Runs) -> Iterator[str]:
    bench_file = runs.bench_file
    if bench_file.changed_code:
        when = ", ".join(str(change.get("when", "?")) for change in bench_file.changed_code)
        problem = f"the code changed between its runs ({when}; --accept-changed-code)"
        yield f"{runs.place}: {problem}; {RERUN_ADVICE}"
    if not bench_file.code:
        yield f"{runs.place}: {BENCH} has no hashes of the code; {RERUN_ADVICE}"
        return
    for record in runs.records:
        result_digest = record.result.versions.get("code") if record.result else None
        code_digest = _digest(bench_file, record)
        if result_digest and code_digest and result_digest != code_digest:
            problem = f"the code hash of its result differs from that in {BENCH}"
            yield f"{record.place}: {problem}; {RERUN_ADVICE}"


def _digest(bench_file: BenchFile, record: RunRecord) -> str:
    """Return the recorded hash of one run's code; empty if its modules are unknown here."""
    if len(bench_file.methods) == 1:
        return digest(bench_file.code)
    try:
        method = create_method(record.method, **bench_file.methods[record.method])
        modules = code_of(recorded_settings(bench_file.settings), method)
    except FczooError:  # a missing plug-in, or options that this version does not have
        return ""
    if not modules.keys() <= bench_file.code.keys():  # this version has other modules
        return ""
    return digest({name: bench_file.code[name] for name in modules})


def _contradictions(record: RunRecord, result: Result, folder: Path) -> Iterator[str]:
    """Yield differences between a result and its folder, and missing versions."""
    bench_file, partition = record.bench_file, load_partition(folder / PARTITION)
    if missing := [name for name in VERSIONS if not result.versions.get(name)]:
        problem = f"the versions of {', '.join(missing)} are not recorded"
        yield f"{record.place}: {problem}; {RERUN_ADVICE}"
    result_settings, folder_settings = (
        with_defaults(current_settings(result.settings)),
        with_defaults(bench_file.settings),
    )
    spec, sha256 = result.partition.get("spec", ""), result.partition.get("sha256", "")
    sha256 = partition.sha256 if partition.has_hash(sha256, spec) else sha256
    differing_names = [
        name
        for name in folder_settings
        if name not in (*WITHOUT_EFFECT, "min_clients")
        and result_settings[name] != folder_settings[name]
    ]
    pairs: tuple[tuple[str, Any, Any], ...] = (
        ("method and seed", (result.method, result.seed), (record.method, record.seed)),
        ("options", result.options, bench_file.methods[record.method]),
        ("settings " + ", ".join(differing_names), bool(differing_names), False),
        ("backbone", result.backbone.get("sha256"), bench_file.backbone["sha256"]),
        ("partition", sha256, bench_file.partition["sha256"]),
        ("hash of the partition file", partition.sha256, bench_file.partition["sha256"]),
        ("data set of the partition", partition.dataset, folder_settings["dataset"]),
        ("class order", result.class_order, list(partition.class_order)),
        ("number of tasks", len(result.task_sizes), len(partition.tasks)),
    )
    for quantity, result_value, folder_value in pairs:
        if result_value != folder_value:
            yield (
                f"{record.place}: files disagree on {quantity}; submit the unchanged files of one "
                "fczoo bench command"
            )


def _impossible_values(record: RunRecord, result: Result) -> Iterator[str]:
    """Yield impossible values of a result."""
    correct_counts = [
        a * n / 100
        for row in result.accuracy
        for a, n in zip(row, result.test_counts, strict=False)
    ]
    if any(abs(count - round(count)) > ROUNDING_TOLERANCE for count in correct_counts):
        problem = "an accuracy does not match a whole number of test images"
        yield f"{record.place}: {problem}; {RERUN_ADVICE}"
    if result.uploaded and result.bytes_up != (content_bytes := sum(result.uploaded.values())):
        yield (
            f"{record.place}: bytes_up is {result.bytes_up}, but the entries of its field "
            f"'uploaded' add up to {content_bytes}; {RERUN_ADVICE}"
        )


def _test_set_faults(record: RunRecord, result: Result) -> Iterator[str]:
    """Yield numbers of classes, tasks or test images that do not match the data set."""
    settings = with_defaults(record.bench_file.settings)
    name = settings["dataset"]
    advice = f"see `fczoo data check {name}`"
    if name not in DATASETS:
        yield (
            f"{record.place}: data set {name} is unknown here, so its test images cannot be "
            "checked; install its plug-in"
        )
        return
    if not record.bench_file.data.get("sha256") or not record.bench_file.split:
        yield f"{record.place}: the hash of its images is not recorded; {RERUN_ADVICE}"
    cls = DATASETS.get(name)
    has_stages = uses_stages(settings["moving"], settings["task_order"])
    if settings["start_from"]:
        yield (
            f"{record.place}: it starts from a kept model, so it does not train the first tasks; "
            "submit a run of all tasks"
        )
        return
    if settings["stop_after_tasks"]:
        yield (
            f"{record.place}: it stops after task {settings['stop_after_tasks']} of "
            f"{settings['tasks']}; submit a run of all tasks"
        )
        return
    if settings["tasks"] == DOMAINS or has_stages or settings["blurry"]:
        return
    classes, sizes = len(result.class_order), list(result.task_sizes)
    if cls.classes and classes != cls.classes:
        yield f"{record.place}: {classes} classes, but {name} has {cls.classes}; {advice}"
    if sizes != (
        schedule_sizes := [task.size for task in make_tasks(name, classes, settings["tasks"])]
    ):
        yield (
            f"{record.place}: tasks of {sizes} classes, "
            f"but its settings make {schedule_sizes}; {RERUN_ADVICE}"
        )
    if cls.official is None:
        return
    official_per_class, test_limit = cls.official.test_per_class, settings["test_per_class"]
    if official_per_class:
        official_counts = [
            size * min(official_per_class, test_limit or official_per_class)
            for size in result.task_sizes
        ]
        if result.test_counts != official_counts:
            mismatch = f"{result.test_counts} test images per task, but {name} has"
            yield f"{record.place}: {mismatch} {official_counts} with these settings; {advice}"
    elif test_limit is None and cls.official.test and sum(result.test_counts) != cls.official.test:
        mismatch = f"{sum(result.test_counts)} test images, but {name} has {cls.official.test}"
        yield f"{record.place}: {mismatch}; {advice}"


def _different_images(runs: Runs, archive_runs: Sequence[Runs], archive: Path) -> Iterator[str]:
    """Yield a fault if runs in the archive used other images with the same settings."""
    images_key = _images(runs)
    for archive_entry in archive_runs:
        if images_key is None or _images(archive_entry) != images_key:
            continue
        for quantity, our_hash, archive_hash in (
            (
                "images",
                runs.bench_file.data.get("sha256"),
                archive_entry.bench_file.data.get("sha256"),
            ),
            ("test part", runs.bench_file.split, archive_entry.bench_file.split),
        ):
            if our_hash and archive_hash and our_hash != archive_hash:
                mismatch = (
                    f"{runs.place}: SHA-256 of {quantity} ({our_hash[:12]}) differs from that of "
                    f"{archive_entry.name} in {archive}"
                )
                advice = f"fczoo data check {runs.bench_file.settings['dataset']}"
                yield f"{mismatch} ({archive_hash[:12]}), with the same settings; see `{advice}`"
                return


def _images(runs: Runs) -> tuple[Any, ...] | None:
    """Return a key of the images of a folder's runs; None if none is finished."""
    settings = with_defaults(runs.bench_file.settings)
    orders = [record.result.class_order for record in runs.records if record.result]
    domains = settings["tasks"] == DOMAINS
    return (*(settings[name] for name in IMAGE_SETTINGS), domains, orders[0]) if orders else None


def _duplicates(runs: Runs, archive_runs: Sequence[Runs], archive: Path) -> Iterator[str]:
    archive_names = {
        (
            identity(archive_entry.bench_file),
            *_key(record),
        ): f"{archive_entry.name}/{record.method}/seed{record.seed}"
        for archive_entry in archive_runs
        for record in archive_entry.records
    }
    records_with_names = [
        (record, archive_names.get((identity(runs.bench_file), *_key(record))))
        for record in runs.records
    ]
    for record, archive_name in records_with_names:
        if archive_name:
            yield (
                f"{record.place} is in {archive} already, as {archive_name}; "
                "submit a folder without it"
            )
    if runs.name in {archive_entry.name for archive_entry in archive_runs} and not any(
        archive_name for _, archive_name in records_with_names
    ):
        yield (
            f"{runs.place}: {archive} has other runs in a folder called {runs.name}; "
            "rename this folder"
        )


def _key(record: RunRecord) -> tuple[str, str, int]:
    return (
        record.method,
        encode_json(record.result.options if record.result else {}, sort_keys=True),
        record.seed,
    )
