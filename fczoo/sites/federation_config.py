"""Configuration of a federation between institutions: three short files that all parties share."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import Count, convert_json, encode_json, read_json, through_json, write_json
from fczoo.core.method import Method
from fczoo.core.options import nearest
from fczoo.core.registry import create_method
from fczoo.data.stream import Stream
from fczoo.federation.environment import code_of, digest, digest_of, versions
from fczoo.federation.settings import Settings
from fczoo.federation.uplink import Uplink

SITE_SETTINGS = (
    "data_root",
    "backbone",
    "device",
    "together",
)  # settings that each site may choose
# settings that only a simulation can have
SIMULATION_SETTINGS = (
    *("attack", "drop_rate", "train_per_class", "joining", "moving", "task_order"),
    *("base_classes", "ways", "shots", "imbalance", "blurry", "label_noise"),
    "personal_epochs",
    *("start_from", "stop_after_tasks", "client_devices", "deadline", "over_select"),
)


def terms_of(
    s: Settings,
    stream: Stream,
    backbone: Backbone,
    method: Method,
    seed: int,
    sites: Sequence[str],
) -> dict[str, Any]:
    """Return everything that affects results except the images, as plain values.

    Args:
        s: Settings of the run. Those that each site may choose (``SITE_SETTINGS``) are left out.
        stream: Classes and their schedule.
        backbone: Frozen backbone.
        method: Method with its options.
        seed: Seed of the run.
        sites: Names of the sites; their order gives the numbers of the clients.

    Returns:
        Class list, schedule, method, seed, sites, settings, hash of the backbone, and versions.
    """
    terms = {
        "class list": _class_list(stream),
        "schedule": [list(stream.classes[task.start : task.stop]) for task in stream.tasks],
        "method": {"name": method.name, **asdict(method)},
        "seed": seed,
        "sites": list(sites),
        "setting": {name: value for name, value in asdict(s).items() if name not in SITE_SETTINGS},
        "backbone": backbone.sha256,
        "version": {
            **versions(),
            "source of fczoo": digest(code_of(s, method)),
            "source of fczoo.sites": digest_of("fczoo.sites.site"),
        },
    }
    plain: dict[str, Any] = through_json(terms)
    return plain


def check_terms(own: Mapping[str, Any], other: Mapping[str, Any], where: str) -> None:
    """Raise FczooError that names the first term in which two parties differ.

    Args:
        own: Terms of this party, from ``terms_of``.
        other: Terms of the other party.
        where: Description of the other party in the message, such as "at the server".

    Raises:
        FczooError: A term differs.
    """
    own_terms, other_terms = (dict(_leaves("", terms)) for terms in (own, other))
    for term in sorted(
        own_terms.keys() | other_terms.keys(), key=lambda term: (term not in own_terms, term)
    ):
        own_value, other_value = own_terms.get(term, "missing"), other_terms.get(term, "missing")
        if own_value != other_value:
            raise FczooError(
                f"{term} is {own_value} here and {other_value} {where}; make them equal"
            )


def check_sites(settings: Settings, method: Method) -> None:
    """Check that a run is possible and protects the sites between institutions.

    Args:
        settings: Settings of the run.
        method: Method of the run.

    Raises:
        FczooError: A setting works in simulations only, the method pools images of clients, or the
            server could subtract the noise.
    """
    for name in SIMULATION_SETTINGS:
        if getattr(settings, name) != getattr(Settings(), name):
            raise FczooError(f"{name} works in simulations only, not between sites; leave it out")
    if settings.tasks == "domains":
        raise FczooError(
            "the tasks of sites follow a schedule of classes; leave out tasks = domains"
        )
    if method.training().data_scope == "pooled":
        raise FczooError(
            f"{method.name} trains on the images of all clients in one place, which sites do not "
            "share; choose another method"
        )
    if method.training().own_models:
        raise FczooError(
            f"{method.name} has no model at the server to evaluate, only one at each client; run "
            "it in a simulation with fczoo bench"
        )
    if settings.dp_noise and not settings.dp_secure:
        raise FczooError(
            "a server that knows the seed can subtract the noise drawn from it; set dp_secure = "
            "true"
        )
    Uplink(method, settings, 0, settings.clients).check()


def _class_list(stream: Stream) -> list[str]:
    """Return the names of the classes by their original labels."""
    by_label = sorted(zip(stream.class_order, stream.classes, strict=True))
    return [name for _, name in by_label]


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every plain value of nested lists and dictionaries, with its path."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{place} {name}".strip(), inner)
    elif isinstance(value, list):
        yield f"length of {place}", len(value)
        for number, inner in enumerate(value):
            yield from _leaves(f"{place}, entry {number + 1}", inner)
    else:
        yield place, value


CLASSES, SCHEDULE, RUN = "classes.txt", "schedule.json", "run.toml"
DATASET = "imagefolder"
FIXED_SETTINGS = {
    "dataset": "each site has its own folder of images",
    "data_root": "each site has its own folder of images",
    "clients": "the clients are the sites",
    "partition": "each site has its own images",
    "tasks": f"the tasks are in {SCHEDULE}",
    "class_order": f"{SCHEDULE} gives the order",
    "class_order_seed": f"{SCHEDULE} gives the order",
}
"""Settings that an agreement cannot change, with the reason."""


ImageLimit = int | Mapping[str, int]
"""Most images of one task at a site: the same number for all sites, or one per site name."""
DEFAULT_IMAGES = 100_000  # limit of agreements that state none


def check_image_counts(site: str, images: Sequence[int], limit: ImageLimit) -> None:
    """Check that a site has, or reports, at most the agreed number of images of each task.

    The weight of a site is the number of images that it reports, which no one else can verify.

    Args:
        site: Name of the site.
        images: Number of images of each task.
        limit: Agreed limit.

    Raises:
        FczooError: The limit is exceeded.
    """
    site_limit = limit if isinstance(limit, int) else limit[site]
    for task, count in enumerate(images):
        if count > site_limit:
            raise FczooError(
                f"site {site} has {count} images of task {task + 1}, but the agreement allows "
                f"{site_limit}; agree on another max_images in {RUN}, or use fewer images"
            )


class _Run(msgspec.Struct, forbid_unknown_fields=True):
    """Content of ``run.toml``."""

    method: str
    sites: list[str]
    seed: Count = 0
    answer_mb: Count | None = None
    max_images: Count | dict[str, Count] = DEFAULT_IMAGES
    options: dict[str, Any] = {}
    settings: dict[str, Any] = {}


class _Schedule(msgspec.Struct, forbid_unknown_fields=True):
    """Content of ``schedule.json``."""

    tasks: list[list[str]]


@dataclass(frozen=True)
class FederationConfig:
    """Configuration that server and sites share; paths of images and weights differ by site."""

    sites: tuple[str, ...]
    classes: tuple[str, ...]  # names of folders; their positions are the labels
    tasks: tuple[tuple[str, ...], ...]  # the classes of each task
    method: Method
    seed: int
    settings: Settings
    max_images: ImageLimit = DEFAULT_IMAGES  # of one task at a site
    answer_mb: int | None = None  # largest upload in MB; None: as ``upload_limit`` estimates

    @property
    def order(self) -> tuple[int, ...]:
        """Return the label of each class, in order of arrival."""
        return tuple(self.classes.index(name) for task in self.tasks for name in task)

    def number(self, site: str) -> int:
        """Return the index of a site by name.

        Args:
            site: Name of the site.

        Returns:
            Its index in ``sites``, from 0 up.

        Raises:
            FczooError: No site has this name.
        """
        if site not in self.sites:
            raise FczooError(f"no site is called {site!r}; {nearest(site, list(self.sites))}")
        return self.sites.index(site)


def write_agreement(
    folder: Path,
    method: str,
    sites: Sequence[str],
    tasks: Sequence[Sequence[str]],
    settings: dict[str, Any],
) -> None:
    """Write the three files of an agreement into a folder, for distribution to all sites.

    Args:
        folder: Folder, which is created if missing.
        method: Name of the method.
        sites: Names of the sites.
        tasks: Class names of each task.
        settings: Settings of the run by name.

    Raises:
        FczooError: One of the files exists already, or the agreement is invalid.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (CLASSES, SCHEDULE, RUN):
        if (folder / name).exists():
            raise FczooError(f"{folder / name} exists already; choose another folder")
    classes = sorted(name for task in tasks for name in task)
    (folder / CLASSES).write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")
    write_json(folder / SCHEDULE, {"tasks": [list(task) for task in tasks]})
    setting_lines = "".join(f"{name} = {encode_json(value)}\n" for name, value in settings.items())
    head = f"method = {encode_json(method)}\nsites = {encode_json(list(sites))}\nseed = 0\n"
    (folder / RUN).write_text(f"{head}\n[options]\n\n[settings]\n{setting_lines}", encoding="utf-8")
    read_agreement(folder)


def read_agreement(folder: Path) -> FederationConfig:
    """Read the federation's configuration in a folder.

    Args:
        folder: Folder with the three files of the agreement.

    Returns:
        The configuration.

    Raises:
        FczooError: A file is missing or invalid; the message names it.
    """
    classes = _classes(folder / CLASSES)
    tasks = _tasks(folder / SCHEDULE, classes)
    run = _run(folder / RUN)
    for name in run.settings:
        if reason := FIXED_SETTINGS.get(name):
            raise FczooError(f"{folder / RUN}: {name} cannot be set here: {reason}; remove {name}")
    method = create_method(run.method, **run.options)
    settings = Settings.for_dataset(
        DATASET,
        **run.settings,
        clients=len(run.sites),
        tasks=tuple(len(task) for task in tasks),
        class_order=tuple(classes.index(name) for task in tasks for name in task),
    )
    settings.check()
    check_sites(settings, method)
    sites = tuple(run.sites)
    limits = run.max_images, run.answer_mb
    return FederationConfig(sites, classes, tasks, method, run.seed, settings, *limits)


def _classes(path: Path) -> tuple[str, ...]:
    """Read the class list: one name per line, each once."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise FczooError(f"cannot read the class list {path}: {first_line(error)}") from error
    names = tuple(line.strip() for line in lines if line.strip())
    if twice := sorted(name for name in set(names) if names.count(name) > 1):
        raise FczooError(f"{path} names class {twice[0]} twice; name each once")
    if invalid_names := [name for name in names if Path(name).name != name or name.startswith(".")]:
        raise FczooError(
            f"{path}: {invalid_names[0]!r} cannot name a folder; "
            "each line names the folder of a class"
        )
    if not names:
        raise FczooError(f"{path} is empty; write the name of one class per line")
    return names


def _tasks(path: Path, classes: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Read the schedule: each class of the list in one task."""
    try:
        schedule = convert_json(read_json(path, "schedule"), _Schedule)
    except ValueError as error:
        raise FczooError(f"{path} is not a valid schedule: {error}") from error
    scheduled_names = [name for task in schedule.tasks for name in task]
    if unknown := sorted(set(scheduled_names) - set(classes)):
        raise FczooError(
            f"{path} names class {unknown[0]}, which is not in {CLASSES}; add it there, or "
            "remove it from the schedule"
        )
    if missing := sorted(set(classes) - set(scheduled_names)):
        raise FczooError(
            f"{path} has no task for class {missing[0]}; put each class of {CLASSES} into one task"
        )
    if len(scheduled_names) > len(classes):
        twice = next(name for name in scheduled_names if scheduled_names.count(name) > 1)
        raise FczooError(f"{path} names class {twice} twice; put each class into one task")
    if not all(schedule.tasks):
        raise FczooError(f"{path} has a task without classes; remove this task")
    return tuple(map(tuple, schedule.tasks))


def _run(path: Path) -> _Run:
    try:
        run = convert_json(tomllib.loads(path.read_text(encoding="utf-8")), _Run)
    except FileNotFoundError:
        raise FczooError(f"no {RUN} at {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FczooError(f"{path} is not a valid {RUN}: {first_line(error)}") from error
    if not run.sites or len(set(run.sites)) < len(run.sites):
        raise FczooError(f"{path}: sites must be a list of different names")
    if isinstance(run.max_images, dict) and run.max_images.keys() != set(run.sites):
        raise FczooError(f"{path}: max_images must name each of the sites, or be one number")
    return run
