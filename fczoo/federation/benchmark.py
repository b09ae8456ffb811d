"""Benchmark: data, partition, backbone and settings that several runs share."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from fczoo import __version__
from fczoo.aggregators.merge import check_stateless
from fczoo.backbones.load import load_backbone
from fczoo.backbones.weights import describe_missing_weights
from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError, use_python_names
from fczoo.core.files import home
from fczoo.core.method import Method
from fczoo.core.options import build, quote
from fczoo.core.registry import DATASETS, METHODS, create_method
from fczoo.core.seeds import check_seed
from fczoo.core.training import Training
from fczoo.core.tree import Tree, select, sha256_of
from fczoo.data.dataset import Dataset, Images
from fczoo.data.feature_cache import FeatureFile, pixels_sha256
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream
from fczoo.data.views import QUERY_BLOCK, ImageStore
from fczoo.federation.batches import view_batches
from fczoo.federation.callbacks import Callback
from fczoo.federation.checkpoint import Checkpoint
from fczoo.federation.data_setup import open_stream
from fczoo.federation.device import (
    DTYPES,
    deterministic_operations,
    pick_device,
    resolve_precision,
    warn_of_slow_bf16,
)
from fczoo.federation.diagnostics import Probe
from fczoo.federation.environment import digest_of, hardware
from fczoo.federation.local_rules import frozen_features_message
from fczoo.federation.remote import Transport
from fczoo.federation.result import Result
from fczoo.federation.run import FederatedRun
from fczoo.federation.scenario import Scenario
from fczoo.federation.server import broadcast, to_device
from fczoo.federation.settings import Settings
from fczoo.federation.settings_checks import normalisation_of
from fczoo.federation.warm_start import load_start, start_options

log = logging.getLogger("fczoo")


def require_data(dataset: str, root: Path | None, backbone: str) -> None:
    """Raise FczooError if a data set is missing.

    The message explains how to get it, and missing weights as well.
    """
    loader: Dataset = DATASETS.get(dataset)()
    if loader.folder:
        try:
            loader.locate(root or home() / "data")
        except FczooError as error:
            weights = describe_missing_weights(backbone)
            raise FczooError(f"{error}; {weights}" if weights else str(error)) from error


def require_weights(settings: Settings) -> None:
    """Raise FczooError if a protocol replaces the backbone by weights that need a download."""
    missing = describe_missing_weights(settings.backbone)
    if missing and (note := replaced_backbone(settings)):
        raise FczooError(f"{note}; {missing}")


def replaced_backbone(settings: Settings) -> str:
    """Return a note that a protocol replaces the data set's backbone, or an empty string.

    The note names the protocol and the reason. It is empty for a backbone that the user chose.
    """
    for name, source in settings.sources.items():
        choice = (
            source.settings_on(settings.dataset).get("backbone")
            if source.replaces_backbone
            else None
        )
        if choice and choice.value == settings.backbone:
            return f"{name} uses {settings.backbone} on {settings.dataset} ({choice.source})"
    return ""


def _data_problem(settings: Settings) -> list[str]:
    """Return problems of the data, so that one error names all that is missing."""
    try:
        open_stream(settings, pixels=False)
    except FczooError as error:
        return [str(error)]
    return []


def open_stores(
    parts: Iterable[Images], backbone: Backbone, test_crop: float, folder: Path | None = None
) -> Iterator[ImageStore]:
    """Open the stores of training and test images.

    Frozen features are cached on disk; the key covers all that they depend on.

    ``folder`` replaces the user's cache.
    """

    @cache
    def shared_key() -> dict[str, Any]:
        machine = hardware()
        return {
            "view": [test_crop, QUERY_BLOCK],
            "weights": sha256_of(backbone.weights),
            "backbone": asdict(backbone.config),
            "device": [backbone.device.type, machine["cpu"], machine["threads"], machine["gpus"]],
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "versions": [__version__, torch.__version__],
            "code": digest_of("fczoo.core.vit_forward", "fczoo.data.views"),
        }

    def feature_file(images: Images) -> FeatureFile:
        return FeatureFile({"pixels": pixels_sha256(images.pixels), **shared_key()}, folder)

    for images in parts:
        yield ImageStore(images, backbone, test_crop, partial(feature_file, images))


def _choose_callback(callback: Callback | None, observer: Callback | None) -> Callback:
    """Return the callback of a run; warn if it is passed by its former name."""
    if observer is not None:
        warnings.warn("the argument observer is now callback", DeprecationWarning, stacklevel=4)
    return callback or observer or Callback()


def to_method(given: object, dataset: str) -> Method:
    """Return a method from an instance, a class or a name; the last two use ``dataset``'s values.

    Raises FczooError for anything else.
    """
    if isinstance(given, Method):
        return given
    if isinstance(given, type) and issubclass(given, Method):
        return build(given, given.name or given.__name__, given.dataset_options.get(dataset, {}))
    if isinstance(given, str):
        return create_method(given, dataset)
    raise FczooError(
        f"{quote(given)} is not a method; give a name such as 'hgp', or create_method('hgp')"
    )


@dataclass(frozen=True, repr=False)
class Benchmark(Scenario):
    """A benchmark: the settings, data, partition and backbone that its runs share."""

    def __repr__(self) -> str:
        s = self.settings
        return (
            f"<Benchmark: {s.dataset} in {len(self.stream.tasks)} tasks, {self.partition!r}, "
            f"{self.backbone!r}>"
        )

    @staticmethod
    @use_python_names
    def open(
        settings: Settings | str,
        streams: Callable[[Settings], tuple[Stream, Partition]] = open_stream,
    ) -> "Benchmark":
        """Load data, partition and backbone.

        Raises FczooError for data or weights that are missing, and for settings that do not fit.

        ``settings`` may be the name of a data set, for its default settings. ``streams`` replaces
        ``open_stream``.
        """
        if isinstance(settings, str):
            settings = Settings.for_dataset(settings)
        if not isinstance(settings, Settings):
            raise FczooError(
                f"{quote(settings)} is not a fczoo.Settings; give one, or the name of a data set"
            )
        settings = resolve_precision(settings)
        warn_of_slow_bf16(settings)
        device, dtype = pick_device(settings.device), DTYPES[settings.precision]
        settings.check()
        s = settings
        require_data(s.dataset, s.root, s.backbone)
        require_weights(s)
        mean, std = normalisation_of(s)
        try:  # first the backbone: decoding images takes longer
            backbone = load_backbone(
                s.backbone, image_size=s.image_size, mean=mean, std=std, pool=s.pool
            )
        except FczooError as error:
            raise FczooError("; ".join([str(error), *_data_problem(s)])) from error
        backbone = backbone.to(device, dtype)
        stream, partition = streams(s)
        stores = open_stores((stream.train, stream.test), backbone, s.test_crop)
        return Benchmark(settings, stream, partition, backbone, *stores)

    @use_python_names
    def check(self, method: Method, seed: int = 0) -> None:
        """Raise FczooError if ``method`` cannot start on this backbone, or from its start model.

        The check runs no round and writes nothing.
        """
        training: object = method.training()
        if not isinstance(training, Training):
            problem = f"{method.name}.training returns {type(training).__name__}"
            raise FczooError(f"{problem}; return a fczoo.Training")
        check_stateless(self.settings.aggregator or training.averaging)
        self.check_labels(method)
        self.check_min_clients(method)
        if self.devices:
            self.devices.check(self.partition.clients)
        uplink = self.uplink(method, 0)
        uplink.check()
        uplink.attackers.check(self.partition)
        state = method.begin_task({}, self.stream.tasks[0], self.backbone, torch.Generator())
        if uplink.rule.reads_features:
            self._check_features(method, state)
        if self.settings.start_from:
            load_start(self, method, seed)

    def _check_features(self, method: Method, state: Tree) -> None:
        """Raise FczooError if the features of an image do not depend on the trained tensors."""
        (batch,) = view_batches(method, self.train, torch.zeros(1, dtype=torch.int64), 1)
        optims = method.training().active_optims(self.stream.tasks[0], 0)
        state = to_device(state, self.backbone)
        leaves = {k: v.clone().requires_grad_() for k, v in select(state, *optims).items()}
        tree = {**broadcast(method, state), **leaves}
        if not method.features(self.backbone, tree, batch).requires_grad:
            raise FczooError(frozen_features_message(self.settings.local or "", method.name))

    @use_python_names
    def run(
        self,
        method: Method | type[Method] | str,
        seed: int = 0,
        callback: Callback | None = None,
        checkpoint: Checkpoint | None = None,
        probe: Probe | None = None,
        transport: Transport | None = None,
        *,
        observer: Callback | None = None,
    ) -> Result:
        """Train ``method`` over all tasks.

        The same settings and seed give the same result on one device.

        With ``checkpoint`` the run is saved after every round, and resumes from the saved state. A
        ``probe`` records diagnostics and changes nothing. Clients run in this process, one group
        after another, or through the transport ``transport``; the results are equal. ``observer``
        is the former name of ``callback``.
        """
        callback = _choose_callback(callback, observer)
        instance, number = to_method(method, self.settings.dataset), check_seed(seed)
        with deterministic_operations(self.settings.deterministic):
            return FederatedRun(
                self, instance, number, callback, checkpoint, probe, transport
            ).run()

    @use_python_names
    def start(
        self,
        method: Method | type[Method] | str,
        seed: int = 0,
        callback: Callback | None = None,
        *,
        observer: Callback | None = None,
    ) -> FederatedRun:
        """Start a run task by task: ``for task in bench.start(method): ...``.

        After each step ``run.state`` is the server's state and ``run.result`` the result so far.
        ``callback`` follows the rounds; ``observer`` is its former name.
        """
        callback = _choose_callback(callback, observer)
        instance, number = to_method(method, self.settings.dataset), check_seed(seed)
        return FederatedRun(self, instance, number, callback, None, None)


@use_python_names
def run(
    method: Method | type[Method] | str,
    *,
    seed: int = 0,
    callback: Callback | None = None,
    observer: Callback | None = None,
    dataset: str | None = None,
    **settings: Any,
) -> Result:
    """Run one method, given by name or as an instance with other options.

    Example: ``fczoo.run("pilora", dataset="digits", rounds=2)``.

    ``settings`` are fields of ``Settings``; the data set, by default ``digits``, sets the others. A
    method given by name or class has the options of the data set. An instance keeps its options; a
    warning names those that differ. With ``start_from``, settings, data set and the options of a
    method given by name come from the model. ``observer`` is the former name of ``callback``.
    """
    callback = _choose_callback(callback, observer)
    chosen = Settings.for_dataset(dataset, **settings).with_seed(check_seed(seed))
    if chosen.start_from and isinstance(method, str):
        name = METHODS.get(method).name
        method = create_method(name, **start_options(chosen.start_from, name))
    method = to_method(method, chosen.dataset)
    fields = type(method).__dataclass_fields__
    dataset_values = type(method).dataset_options.get(chosen.dataset, {})
    differences = {
        k: v for k, v in dataset_values.items() if getattr(method, k) == fields[k].default != v
    }
    if differences and not chosen.start_from:
        listing = ", ".join(f"{k}={v}" for k, v in differences.items())
        log.warning(
            "%s has the general defaults of its options; on %s its defaults are %s; create it with "
            "%s to use these",
            method.name,
            chosen.dataset,
            listing,
            f"fczoo.create_method({method.name!r}, {chosen.dataset!r})",
        )
    return Benchmark.open(chosen).run(method, seed, callback)
