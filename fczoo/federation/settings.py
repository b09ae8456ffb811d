"""The settings of a run: everything except the method."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any, Literal

from fczoo.backbones.names import canonical_backbone
from fczoo.core.errors import use_python_names
from fczoo.core.options import check_options, option
from fczoo.core.registry import PARTITIONERS
from fczoo.data.dataset import Resize, domains_of
from fczoo.federation import settings_checks as checks
from fczoo.protocols.registry import sources, spell_names
from fczoo.protocols.source import Source

GROUPS = "data", "population", "training", "machine", "robustness"
DATA, POPULATION, TRAINING, MACHINE, ROBUSTNESS = GROUPS
"""Groups of settings, as ``fczoo bench --help`` lists them."""

AUTO = "auto"  # precision that is chosen by speed; stored is the chosen one
MOST_CLIENTS = 1_000_000
SEEDED_SETTINGS = {
    "training": None,
    "partition": "partition_seed",
    "class-order": "class_order_seed",
}
"""What the seed of a run may move, and the setting that says so."""


@dataclass(frozen=True)
class Settings:
    """Everything about a run except the method; ``fczoo show settings`` lists the fields."""

    dataset: str = option("digits", "Name of a data set; see `fczoo list datasets`", group=DATA)
    protocol: str | None = option(
        None,
        "Take a paper's settings where you give none, see `fczoo list protocols`; none: quick on a CPU",
        group=TRAINING,
    )
    as_released: str | None = option(
        None,
        "Follow released code where it differs from the protocol; see `fczoo list releases`",
        group=TRAINING,
    )
    hf_columns: str | None = option(
        None, "Columns of a data set hf:, as image=img,label=fine_label; none: by type", group=DATA
    )
    data_root: str | None = option(
        None, "Folder that holds the data sets; none: FCZOO_HOME/data", group=DATA
    )
    start_from: str | None = option(
        None,
        "Kept model to continue from: METHOD/seedN of a run folder, or that folder",
        group=DATA,
    )
    backbone: str = option(
        "vit_nano_32",
        "A name of `fczoo list backbones`, a weight file, or NAME:FILE",
        group=TRAINING,
    )
    image_size: int | None = option(
        None, "Side of the input images, in pixels; none: the checkpoint's", low=1, group=TRAINING
    )
    mean: tuple[float, ...] | None = option(
        None, "Mean per input channel, to normalise by; none: the checkpoint's", group=TRAINING
    )
    std: tuple[float, ...] | None = option(
        None, "Deviation per input channel, to normalise by; none: the checkpoint's", group=TRAINING
    )
    pool: Literal["cls", "mean", "cls+mean"] | None = option(
        None, "Feature: class token, mean of patches, or both; none: the backbone's", group=TRAINING
    )
    norm_by_dataset: bool = option(
        False,
        "Normalise by mean and standard deviation of the data set, not of the checkpoint",
        quirk="fed-mammoth",
        group=TRAINING,
    )
    partition: str = option(
        "dirichlet:0.5",
        "Split of the images over clients: iid, dirichlet:BETA, quantity:ALPHA, overlap:PART, "
        "shards:ALPHA, size:POWER, dirichlet-size:ALPHA, domains, natural, or file:PATH",
        group=POPULATION,
    )
    tasks: int | tuple[int, ...] | Literal["domains"] = option(
        5,
        "Number of tasks; or the classes per task, 50,10,10; or domains: one task per domain",
        low=1,
        group=DATA,
    )
    base_classes: int | None = option(
        None, "Few-shot increments: classes of the first task, with --ways", low=1, group=DATA
    )
    ways: int | None = option(None, "Few-shot: classes of each later task", low=1, group=DATA)
    shots: int | None = option(
        None, "Training images per class after the first task; none: all", low=1, group=DATA
    )
    imbalance: float | None = option(
        None, "Long tail: images of the rarest class per most common", low=1e-6, high=1, group=DATA
    )
    blurry: float = option(
        0.0, "Share of each class's images that other tasks get", low=0, high=1, group=DATA
    )
    label_noise: float = option(
        0.0, "Share of each client's labels that are wrong", low=0, high=1, group=DATA
    )
    stop_after_tasks: int | None = option(
        None, "End the run after task NUMBER of the stream; none: all", low=1, group=TRAINING
    )
    clients: int = option(
        5, "Number of clients at the start", low=1, high=MOST_CLIENTS, group=POPULATION
    )
    joining: int = option(
        0, "Number of new clients at each later task", low=0, high=MOST_CLIENTS, group=POPULATION
    )
    transition: float = option(
        1.0,
        "Share of the earlier clients that get images of a new task, from 0 to 1",
        low=0,
        high=1,
        group=POPULATION,
    )
    moving: int | None = option(
        None,
        "Number of clients that move to their next task at a time, in rotation; none: all",
        low=1,
        group=POPULATION,
    )
    task_order: Literal["same", "own"] = option(
        "same", "Order of the tasks: the same for all, or each client's own", group=POPULATION
    )
    participation: float = option(
        1.0,
        "Clients that train per round: up to 1 their share, above 1 their number",
        low=0,
        group=POPULATION,
    )
    draw_among: Literal["data", "joined"] = option(
        "data",
        "Sample participants among clients with images of the task, or among all joined ones",
        group=POPULATION,
    )
    client_draw: Literal["round", "task"] = option(
        "round",
        "Sample participants once per round or once per task",
        quirk={"task": "fed-mammoth"},
        group=POPULATION,
    )
    client_devices: str | None = option(
        None, "Clients' speeds, for a virtual clock: phones, cross-silo or FILE", group=POPULATION
    )
    deadline: float | None = option(
        None, "Seconds after which a round leaves late clients out", low=1e-3, group=POPULATION
    )
    over_select: float | None = option(
        None, "Ask this many times the participants, take the first", low=1, group=POPULATION
    )
    rounds: int = option(3, "Number of communication rounds per task", low=1, group=TRAINING)
    eval_every: int = option(
        0,
        "Also test on all classes seen so far after every this many rounds of a task; 0: after "
        "tasks only",
        low=0,
        group=TRAINING,
    )
    epochs: int = option(2, "Number of local epochs per round", low=1, group=TRAINING)
    personal_epochs: int = option(
        0,
        "Number of epochs of fine-tuning at each client after the last task, on a copy, to test "
        "personal models; 0: none",
        low=0,
        group=TRAINING,
    )
    batch_size: int = option(16, "Number of images per local batch", low=1, group=TRAINING)
    augment: str = option(
        "none",
        "Random view of the training images: none, flip, crop, ... (see fczoo list augmentations)",
        group=TRAINING,
    )
    test_crop: float = option(
        1.0,
        "Share of each image side that test images keep; at 224 pixels 0.875 resizes to 256 "
        "and crops the middle 224",
        low=0.1,
        high=1,
        group=TRAINING,
    )
    cache_queries: bool = option(
        False,
        "Compute the query features of each training image once, without augmentation; saves "
        "one forward per step",
        group=TRAINING,
    )
    local: str | None = option(
        None, "Rule of local training for any method; see `fczoo list local`", group=TRAINING
    )
    server_optimizer: str | None = option(
        None, "Server's step along the average: fedavgm, fedadam, fedyogi, ...", group=TRAINING
    )
    compress: str | None = option(
        None, "Code of uploaded changes: int8, fp16, topk:PART or lowrank:RANK", group=TRAINING
    )
    train_per_class: int | None = option(
        None, "Use only the first NUMBER training images per class; none: all", low=1, group=DATA
    )
    test_per_class: int | None = option(
        None, "Use only the first NUMBER test images of each class; none: all", low=1, group=DATA
    )
    stored_size: int | None = option(
        None,
        "Side of the cached copies of image files, in pixels; none: the data set's",
        low=1,
        group=DATA,
    )
    resize: Resize = option(
        "crop", "Make image files square: crop their centre, or squash the whole", group=DATA
    )
    class_order: Literal["natural"] | tuple[int, ...] = option(
        "natural",
        "Order in which classes arrive: natural, or a list of all original labels",
        low=0,
        group=DATA,
    )
    class_order_seed: int | None = option(
        None, "Seed that shuffles the classes; none: the order of --class-order", low=0, group=DATA
    )
    partition_seed: int = option(0, "Seed of the split over clients", low=0, group=POPULATION)
    vary: tuple[Literal["training", "partition", "class-order"], ...] = option(
        ("training",),
        "What each seed of --seeds changes: training (always), partition, class-order; "
        "deviations are over all of these",
        group=POPULATION,
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = option(
        "auto", "Device of the run; auto: cuda if there is one, else mps, else cpu", group=MACHINE
    )
    precision: Literal["fp32", "bf16", "fp64", "auto"] = option(
        "fp32",
        "Number format of frozen weights and computation; auto: the faster of fp32 and bf16",
        group=MACHINE,
    )
    deterministic: bool = option(
        False,
        "Use only operations that give the same bits every time, or fail; slower on CUDA",
        group=MACHINE,
    )
    together: Literal["auto"] | int = option(
        "auto", "Number of clients per batched forward; auto: 1 on a CPU", low=1, group=MACHINE
    )
    aggregator: str | None = option(
        None,
        "Aggregator that replaces a method's averages, such as median; see `fczoo list "
        "aggregators`; none: the method's own",
        group=ROBUSTNESS,
    )
    outliers: float | None = option(
        None,
        "Leave out class statistics whose distance from the clients' centre is above NUMBER "
        "median distances; none: keep all",
        low=1,
        group=ROBUSTNESS,
    )
    merge_statistics: Literal["median", "trimmed_mean", "geometric_median"] | None = option(
        None,
        "Merge class statistics by a robust centre of the clients'; none: merge as sent",
        group=ROBUSTNESS,
    )
    drop_rate: float = option(
        0.0,
        "Probability that a participant drops out of a round, from 0 to 1",
        low=0,
        high=1,
        group=ROBUSTNESS,
    )
    min_clients: int = option(
        1, "Fewest valid uploads per round; with fewer the run stops", low=1, group=ROBUSTNESS
    )
    attack: str | None = option(
        None,
        "Attack of the hostile clients, such as scale:10; see `fczoo list attacks`",
        group=ROBUSTNESS,
    )
    attackers: float = option(
        0.2,
        "Share of the clients that are hostile, with --attack, from 0 to 1",
        low=0,
        high=1,
        group=ROBUSTNESS,
    )
    min_class_count: int = option(
        1,
        "Smallest number of images of a class whose statistics a client sends",
        low=1,
        group=ROBUSTNESS,
    )
    dp_clip: float | None = option(
        None,
        "Largest L2 norm C of an uploaded change; none: not clipped",
        low=1e-12,
        group=ROBUSTNESS,
    )
    dp_noise: float = option(
        0.0,
        "Standard deviation of noise per coordinate, in units of C; the run reports epsilon",
        low=0,
        group=ROBUSTNESS,
    )
    dp_delta: float = option(
        1e-5, "Delta for which the run reports epsilon", low=1e-12, high=0.5, group=ROBUSTNESS
    )
    dp_subsampling: bool = option(
        False,
        "Report epsilon for an observer who does not see which clients are sampled",
        group=ROBUSTNESS,
    )
    dp_secure: bool = option(
        False, "Draw noise from a cryptographic source; no run repeats it", group=ROBUSTNESS
    )

    @use_python_names
    def __post_init__(self) -> None:
        check_options(self)
        vary = tuple(w for w in SEEDED_SETTINGS if w == "training" or w in self.vary)
        values = {"backbone": canonical_backbone(self.backbone)}
        values |= checks.place_data(self.dataset, self.data_root, self.hf_columns)
        for name, value in {**spell_names(vars(self)), **values, "vary": vary}.items():
            object.__setattr__(self, name, value)
        checks.check_participation(self.participation, self.clients)
        checks.check_stream(self)

    @property
    def root(self) -> Path | None:
        """Return the folder of the data; None for FCZOO_HOME/data."""
        return Path(self.data_root).expanduser() if self.data_root else None

    def portable(self) -> dict[str, Any]:
        """Return plain values: last names of files and folders, no defaults of later settings."""
        return checks.portable(self)

    @property
    def task_count(self) -> int:
        """Return the number of tasks."""
        if isinstance(self.tasks, str):
            return len(domains_of(self.dataset))
        return self.tasks if isinstance(self.tasks, int) else len(self.tasks)

    def with_seed(self, seed: int) -> "Settings":
        """Return the settings of a run whose ``seed`` also sets what ``vary`` names.

        Raises FczooError if a saved partition or a list of classes leaves nothing to vary.
        """
        checks.check_vary(self.vary, self.partition, self.class_order)
        seeds: dict[str, Any] = {
            field: seed for field in map(SEEDED_SETTINGS.get, self.vary) if field
        }
        return replace(self, **seeds)

    def participant_count(self, candidates: int) -> int:
        """Return the number of participants per round among the candidates."""
        share = self.participation
        return min(int(share), candidates) if share > 1 else max(1, round(share * candidates))

    def asked_count(self, candidates: int) -> int:
        """Return the number of clients that a round selects, at least its participants."""
        asked = (self.over_select or 1) * self.participant_count(candidates)
        return min(ceil(asked), candidates)

    @staticmethod
    @use_python_names
    def for_dataset(dataset: str | None, **changes: Any) -> "Settings":
        """Build the settings of a data set's, protocol's or release's schedule with changes.

        The word ``none`` means None. With ``start_from`` they are those of the model's run, and
        ``dataset`` may be None. Raises FczooError for unknown names and wrong values.
        """
        settings: Settings = checks.settings_for(Settings, dataset, changes)
        return settings

    @cached_property
    def partitioner(self) -> Any:
        """Return the partitioner, None with a saved partition. Raises FczooError."""
        return None if self.partition.startswith("file:") else PARTITIONERS.create(self.partition)

    def check(self) -> None:
        """Raise FczooError for an unknown name or a wrong value, without loading data."""
        checks.check_settings(self)

    @property
    def sources(self) -> dict[str, Source]:
        """Return the protocol and release of the run, by name; later ones take precedence."""
        return sources(self.protocol, self.as_released)

    def method_options(self, method: str) -> dict[str, Any]:
        """Return a method's options in protocol and release for this data set and partition."""
        beta, origins = getattr(self.partitioner, "beta", None), self.sources.values()
        options = (source.options(method, self.dataset, beta, vars(self)) for source in origins)
        return {name: value for part in options for name, value in part.items()}
