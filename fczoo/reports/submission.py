"""Run folders on their way into an archive: what is checked before somebody else's result enters a table."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.files import encode_json, read_json
from fczoo.core.registry import DATASETS, create_method
from fczoo.data.asynchronous import in_stages
from fczoo.data.partition import load_partition
from fczoo.data.stream import DOMAINS, make_tasks
from fczoo.federation.code import code_of, digest
from fczoo.federation.result import Result
from fczoo.reports.archive import read_archive, write_archive
from fczoo.reports.run_folder import (
    ABOUT,
    PARTITION,
    RESULT,
    About,
    Cell,
    Runs,
    as_read,
    recorded_settings,
)
from fczoo.reports.runs import WITHOUT_EFFECT, filled, identity, read_runs

VERSIONS = ("fczoo", "python", "torch", "torchvision", "timm", "numpy", "code")
WHOLE = 1e-4  # images by which a rounded percentage may miss a whole number
AGAIN = "run it again with this version of fczoo"
DATA = ("dataset", "train_per_class", "test_per_class", "stored_size")
"""Settings that, with the order of classes, say which images a run sees."""


def submit(place: Path, archive: Path, enter: bool = True) -> tuple[int, list[str]]:
    """Check the run folders at or below a place and, with ``enter``, append their runs to an archive.

    Returns how many runs there are, and every fault in a line; with a fault nothing is entered. Raises
    FczooError where nothing can be read or a file is damaged.
    """
    found = [_named(runs, place) for runs in read_runs([place])]
    entered = read_archive(archive) if archive.exists() else []
    faults = [
        fault for i, runs in enumerate(found) for fault in _faults(runs, [*entered, *found[:i]], archive)
    ]
    if enter and not faults:
        archive.parent.mkdir(parents=True, exist_ok=True)
        write_archive([*entered, *found], archive)
    return sum(len(runs.cells) for runs in found), faults


def _named(runs: Runs, place: Path) -> Runs:
    """The runs of a folder by its name; those of folders below it by its name and theirs."""
    if runs.folder is None:
        raise FczooError(f"{runs.place} stands in an archive; give the run folder that fczoo bench wrote")
    if runs.folder == place:
        return runs
    return dataclasses.replace(runs, name=f"{place.resolve().name}/{runs.name}")


def _faults(runs: Runs, entered: Sequence[Runs], archive: Path) -> Iterator[str]:
    """Everything for which a folder is not taken."""
    assert runs.folder is not None
    yield from _incomplete(runs, runs.folder)
    yield from _unsealed(runs, runs.folder)
    yield from _code(runs)
    for cell in runs.cells:
        if cell.result is not None:
            yield from _contradictions(cell, cell.result, runs.folder)
            yield from _impossible(cell, cell.result)
            yield from _test_set(cell, cell.result)
    yield from _other_data(runs, entered, archive)
    yield from _there_already(runs, entered, archive)


def _incomplete(runs: Runs, folder: Path) -> Iterator[str]:
    problems = {(cell.method, cell.seed): cell.problem for cell in runs.cells}
    for method in runs.about.methods:
        for seed in runs.about.seeds:
            if problem := problems.get((method, seed), "not begun"):
                where = f"{folder}: {method} seed {seed} is not finished ({' '.join(problem.split())})"
                yield f"{where}; go on with `fczoo bench --resume --out {folder}`"


def _unsealed(runs: Runs, folder: Path) -> Iterator[str]:
    """Files without a checksum; where there is one, it was compared as the file was read."""
    files = [folder / ABOUT, *(cell.folder / RESULT for cell in runs.cells if cell.result and cell.folder)]
    for path in files:
        if "sha256" not in read_json(path, "file of a run"):
            yield f"{path} has no checksum: an older version wrote it, or no fczoo did; {AGAIN}"


def _code(runs: Runs) -> Iterator[str]:
    about = runs.about
    if about.changed_code:
        when = ", ".join(str(change.get("when", "?")) for change in about.changed_code)
        yield f"{runs.place}: code changed between its runs ({when}), and that was accepted; {AGAIN}"
    if not about.code:
        yield f"{runs.place}: {ABOUT} has no hashes of the code; {AGAIN}"
        return
    for cell in runs.cells:
        made_by = cell.result.versions.get("code") if cell.result else None
        expected = _digest(about, cell)
        if made_by and expected and made_by != expected:
            yield f"{cell.place}: its result was made by other code than {ABOUT} names; {AGAIN}"


def _digest(about: About, cell: Cell) -> str:
    """The hash of the code of one run by the folder's description; empty where that cannot be told here."""
    if len(about.methods) == 1:
        return digest(about.code)
    try:
        method = create_method(cell.method, **about.methods[cell.method])
        modules = code_of(recorded_settings(about.settings), method)
    except FczooError:  # of a plug-in, or of options that this version does not have
        return ""
    if not modules.keys() <= about.code.keys():  # this version is made of other modules
        return ""
    return digest({name: about.code[name] for name in modules})


def _contradictions(cell: Cell, result: Result, folder: Path) -> Iterator[str]:
    """In what a result does not belong to its folder, and what it leaves out."""
    about, partition = cell.about, load_partition(folder / PARTITION)
    if missing := [name for name in VERSIONS if not result.versions.get(name)]:
        yield f"{cell.place}: the versions of {', '.join(missing)} are not recorded; {AGAIN}"
    own, told = filled(as_read(result.settings)), filled(about.settings)
    spec, sha256 = result.partition.get("spec", ""), result.partition.get("sha256", "")
    sha256 = partition.sha256 if partition.has_hash(sha256, spec) else sha256
    other = [
        name for name in told if name not in (*WITHOUT_EFFECT, "min_clients") and own[name] != told[name]
    ]
    pairs: tuple[tuple[str, Any, Any], ...] = (
        ("method and seed", (result.method, result.seed), (cell.method, cell.seed)),
        ("options", result.options, about.methods[cell.method]),
        ("settings " + ", ".join(other), bool(other), False),
        ("backbone", result.backbone.get("sha256"), about.backbone["sha256"]),
        ("partition", sha256, about.partition["sha256"]),
        ("partition file", partition.sha256, about.partition["sha256"]),
        ("data set of the partition", partition.dataset, told["dataset"]),
        ("class order", result.class_order, list(partition.class_order)),
        ("number of tasks", len(result.task_sizes), len(partition.tasks)),
    )
    for what, here, there in pairs:
        if here != there:
            yield f"{cell.place}: {what} differs from the folder's description; take the files of one bench"


def _impossible(cell: Cell, result: Result) -> Iterator[str]:
    """Figures that no run has."""
    hits = [a * n / 100 for row in result.accuracy for a, n in zip(row, result.test_counts, strict=False)]
    if any(abs(hit - round(hit)) > WHOLE for hit in hits):
        yield f"{cell.place}: an accuracy is no whole number of its task's test images; {AGAIN}"
    if result.uploaded and result.bytes_up != (sent := sum(result.uploaded.values())):
        yield f"{cell.place}: bytes_up is {result.bytes_up}, but its kinds of content are {sent}; {AGAIN}"


def _test_set(cell: Cell, result: Result) -> Iterator[str]:
    """Where the numbers of classes and test images are not those of the data set."""
    settings = filled(cell.about.settings)
    name = settings["dataset"]
    advice = f"see `fczoo data check {name}`"
    if name not in DATASETS.names():
        yield f"{cell.place}: data set {name} is not known here, nor are its test images; install its plug-in"
        return
    if not cell.about.data.get("sha256") or not cell.about.split:
        yield f"{cell.place}: it does not say which images it saw; {AGAIN}"
    cls = DATASETS.get(name)
    staged = in_stages(settings["moving"], settings["task_order"])
    if settings["tasks"] == DOMAINS or staged:
        return
    classes, sizes = len(result.class_order), list(result.task_sizes)
    if cls.classes and classes != cls.classes:
        yield f"{cell.place}: {classes} classes, but {name} has {cls.classes}; {advice}"
    if sizes != (made := [task.size for task in make_tasks(name, classes, settings["tasks"])]):
        yield f"{cell.place}: tasks of {sizes} classes, but its settings make {made}; {AGAIN}"
    if cls.official is None:
        return
    each, wanted = cls.official.test_per_class, settings["test_per_class"]
    if each:
        expected = [size * min(each, wanted or each) for size in result.task_sizes]
        if result.test_counts != expected:
            told = f"{sum(result.test_counts)} test images, but {name} gives {sum(expected)}"
            yield f"{cell.place}: {told} with these settings, task by task; {advice}"
    elif wanted is None and cls.official.test and sum(result.test_counts) != cls.official.test:
        told = f"{sum(result.test_counts)} test images, but {name} has {cls.official.test}"
        yield f"{cell.place}: {told}; {advice}"


def _other_data(runs: Runs, entered: Sequence[Runs], archive: Path) -> Iterator[str]:
    """Where the archive has runs on the same images by name, and these were others."""
    mine = _images(runs)
    for other in entered:
        if mine is None or _images(other) != mine:
            continue
        for what, here, there in (
            ("images", runs.about.data.get("sha256"), other.about.data.get("sha256")),
            ("test part", runs.about.split, other.about.split),
        ):
            if here and there and here != there:
                told = f"{runs.place}: its {what} ({here[:12]}) are not those of {other.name} in {archive}"
                advice = f"fczoo data check {runs.about.settings['dataset']}"
                yield f"{told} ({there[:12]}), with the same settings; see `{advice}`"
                return


def _images(runs: Runs) -> tuple[Any, ...] | None:
    """What says which images a folder's runs see; None where none is finished."""
    settings = filled(runs.about.settings)
    orders = [cell.result.class_order for cell in runs.cells if cell.result]
    domains = settings["tasks"] == DOMAINS
    return (*(settings[name] for name in DATA), domains, orders[0]) if orders else None


def _there_already(runs: Runs, entered: Sequence[Runs], archive: Path) -> Iterator[str]:
    known = {
        (identity(other.about), *_key(cell)): f"{other.name}/{cell.method}/seed{cell.seed}"
        for other in entered
        for cell in other.cells
    }
    found = [(cell, known.get((identity(runs.about), *_key(cell)))) for cell in runs.cells]
    for cell, there in found:
        if there:
            yield f"{cell.place} stands in {archive} already, as {there}; submit a folder without it"
    if runs.name in {other.name for other in entered} and not any(there for _, there in found):
        yield f"{runs.place}: {archive} has other runs in a folder called {runs.name}; rename this one"


def _key(cell: Cell) -> tuple[str, str, int]:
    return cell.method, encode_json(cell.result.options if cell.result else {}, sort_keys=True), cell.seed
