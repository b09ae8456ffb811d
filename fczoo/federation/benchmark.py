"""What the runs of one benchmark share, and how one is opened and run."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from fczoo import __version__
from fczoo.backbones.load import load_backbone
from fczoo.backbones.weights import weights_needed
from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError, named_as_in_python
from fczoo.core.files import home
from fczoo.core.method import Method
from fczoo.core.options import build, quoted
from fczoo.core.registry import DATASETS, create_method
from fczoo.core.seeds import check_seed
from fczoo.core.tree import sha256_of
from fczoo.core.types import Training
from fczoo.data.dataset import Dataset, Images
from fczoo.data.feature_cache import FeatureFile, pixels_sha256
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream
from fczoo.data.views import QUERY_BLOCK, ImageStore
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.code import digest_of
from fczoo.federation.device import DTYPES, pick_device, reproducible
from fczoo.federation.diagnostics import Probe
from fczoo.federation.environment import hardware
from fczoo.federation.observer import Observer, Silent
from fczoo.federation.precision import resolve_precision, warn_of_slow_bf16
from fczoo.federation.result import Result
from fczoo.federation.rounds import Run
from fczoo.federation.settings import Settings
from fczoo.federation.sound import check_stateless
from fczoo.federation.spread import Elsewhere
from fczoo.federation.stream import open_stream
from fczoo.federation.world import World

log = logging.getLogger("fczoo")


def need_data(dataset: str, root: Path | None, backbone: str) -> None:
    """Raise FczooError where a data set is not there, saying how to get it and missing weights, too."""
    found: Dataset = DATASETS.get(dataset)()
    if found.folder:
        try:
            found.locate(root or home() / "data")
        except FczooError as error:
            weights = weights_needed(backbone)
            raise FczooError(f"{error}; {weights}" if weights else str(error)) from error


def need_weights(settings: Settings) -> None:
    """Raise FczooError if a protocol replaces the backbone by weights that need a download."""
    missing = weights_needed(settings.backbone)
    for name, source in settings.followed.items():
        stated = source.stated(settings.dataset).get("backbone") if source.replaces_backbone else None
        if missing and stated and stated.value == settings.backbone:
            taken = f"{name} takes {settings.backbone} on {settings.dataset} ({stated.source})"
            raise FczooError(f"{taken}; {missing}")


def _data_problem(settings: Settings) -> list[str]:
    """What is wrong with the data, too, so that all that is missing is said at once."""
    try:
        open_stream(settings, pixels=False)
    except FczooError as error:
        return [str(error)]
    return []


def open_stores(
    parts: Iterable[Images], backbone: Backbone, test_crop: float, folder: Path | None = None
) -> Iterator[ImageStore]:
    """Each part beside the backbone; frozen features are kept on disk, under all that they depend on.

    ``folder`` is a cache other than the user's.
    """

    @cache
    def shared() -> dict[str, Any]:
        machine = hardware()
        return {
            "view": [test_crop, QUERY_BLOCK],
            "weights": sha256_of(backbone.weights),
            "backbone": asdict(backbone.config),
            "device": [backbone.device.type, machine["cpu"], machine["threads"], machine["gpus"]],
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "versions": [__version__, torch.__version__],
            "code": digest_of("fczoo.core.backbone", "fczoo.data.views"),
        }

    def kept(images: Images) -> FeatureFile:
        return FeatureFile({"pixels": pixels_sha256(images.pixels), **shared()}, folder)

    for images in parts:
        yield ImageStore(images, backbone, test_crop, partial(kept, images))


def as_method(given: object, dataset: str) -> Method:
    """Return a method given as itself, as its class or by name, with its values for ``dataset``.

    Raises FczooError for anything else.
    """
    if isinstance(given, Method):
        return given
    if isinstance(given, type) and issubclass(given, Method):
        return build(given, given.name or given.__name__, given.tuned.get(dataset, {}))
    if isinstance(given, str):
        return create_method(given, dataset)
    raise FczooError(f"{quoted(given)} is not a method; give a name such as 'hgp', or create_method('hgp')")


@dataclass(frozen=True, repr=False)
class Bench(World):
    """A benchmark: what its runs share, and how to open and run it."""

    def __repr__(self) -> str:
        s = self.settings
        return f"<Bench: {s.dataset} in {s.task_count} tasks, {self.partition!r}, {self.backbone!r}>"

    @staticmethod
    def open(
        settings: Settings | str, streams: Callable[[Settings], tuple[Stream, Partition]] = open_stream
    ) -> "Bench":
        """Load data, partition and backbone. Raises FczooError for whatever is missing or does not fit.

        ``settings`` may be the name of a data set, for its own schedule. ``streams`` takes the place of
        ``open_stream``.
        """
        if isinstance(settings, str):
            settings = Settings.for_dataset(settings)
        if not isinstance(settings, Settings):
            raise FczooError(f"{quoted(settings)} is not Settings; give the name of a data set, or Settings")
        settings = resolve_precision(settings)
        warn_of_slow_bf16(settings)
        device, dtype = pick_device(settings.device), DTYPES[settings.precision]
        settings.check()
        s = settings
        need_data(s.dataset, s.root, s.backbone)
        need_weights(s)
        mean, std = s.normalisation
        try:  # first the backbone: decoding images takes longer
            backbone = load_backbone(s.backbone, image_size=s.image_size, mean=mean, std=std)
        except FczooError as error:
            raise FczooError("; ".join([str(error), *_data_problem(s)])) from error
        backbone = backbone.to(device, dtype)
        stream, partition = streams(s)
        stores = open_stores((stream.train, stream.test), backbone, s.test_crop)
        return Bench(settings, stream, partition, backbone, *stores)

    def check(self, method: Method) -> None:
        """Raise FczooError where ``method`` cannot start on this backbone; nothing is run or written."""
        training: object = method.training()
        if not isinstance(training, Training):
            problem = f"{method.name}.training returns {type(training).__name__}"
            raise FczooError(f"{problem}; return a fczoo.Training")
        check_stateless(self.settings.aggregator or training.averaging)
        self.check_labels(method)
        self.check_least(method)
        uplink = self.uplink(method, 0)
        uplink.check()
        uplink.attackers.check(self.partition)
        method.begin_task({}, self.stream.tasks[0], self.backbone, torch.Generator())

    def run(
        self,
        method: Method | type[Method] | str,
        seed: int = 0,
        observer: Observer | None = None,
        checkpoint: Checkpoint | None = None,
        probe: Probe | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> Result:
        """Train ``method`` over all tasks; the same settings and seed give the same result on one device.

        With ``checkpoint`` the run is saved after every round, and goes on from what was saved there. A
        ``probe`` records diagnostics and changes nothing. Clients act here, one group after another, or
        ``elsewhere``, with the same numbers.
        """
        made, number = as_method(method, self.settings.dataset), check_seed(seed)
        with reproducible(self.settings.deterministic):
            return Run(self, made, number, observer or Silent(), checkpoint, probe, elsewhere).run()

    def start(
        self, method: Method | type[Method] | str, seed: int = 0, observer: Observer | None = None
    ) -> Run:
        """A run to be stepped through, task by task: ``for task in bench.start(method): ...``.

        After each step ``run.state`` is the server's state and ``run.result`` holds what is known so far;
        what happens in a round reaches ``observer``.
        """
        made, number = as_method(method, self.settings.dataset), check_seed(seed)
        return Run(self, made, number, observer or Silent(), None, None)


@named_as_in_python
def run(
    method: Method | type[Method] | str,
    *,
    seed: int = 0,
    observer: Observer | None = None,
    dataset: str = "digits",
    **settings: Any,
) -> Result:
    """Run one method: ``fczoo.run("pilora", dataset="digits", rounds=2)``, or one with options of its own.

    ``settings`` are the fields of ``Settings``; those not given follow the data set's defaults. The
    method's options are its own: a warning names those for which the data set has other values.
    """
    dataset = DATASETS.canonical_name(dataset)
    chosen = Settings.for_dataset(dataset, **settings).seeded(check_seed(seed))
    method = as_method(method, dataset)
    fields = type(method).__dataclass_fields__
    tuned = type(method).tuned.get(DATASETS.get(dataset).name, {})
    other = {k: v for k, v in tuned.items() if getattr(method, k) == fields[k].default != v}
    if other:
        named = ", ".join(f"{k}={v}" for k, v in other.items())
        log.warning(
            "%s has %s on %s; fczoo.create_method(%r, %r) takes the data set's values",
            method.name,
            named,
            dataset,
            method.name,
            dataset,
        )
    return Bench.open(chosen).run(method, seed, observer)
