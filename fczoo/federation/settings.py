"""The settings of a run: everything except the method."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any, Literal

from fczoo.backbones.names import canonical_backbone
from fczoo.core.errors import use_python_names
from fczoo.core.options import check_options
from fczoo.core.registry import PARTITIONERS
from fczoo.data.dataset import Resize, domains_of
from fczoo.federation import settings_checks as checks
from fczoo.federation.setting_groups import (
    data_option,
    machine_option,
    population_option,
    robustness_option,
    training_option,
)
from fczoo.protocols.registry import sources, spell_names
from fczoo.protocols.stated_values import Source

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

    dataset: str = data_option("digits", "Name of a data set; see `fczoo list datasets`")
    protocol: str | None = training_option(
        None,
        "Settings of a paper, or quick (minutes on a CPU), for options that you do not give; see "
        "`fczoo list protocols`; none: the data set's schedule",
    )
    as_released: str | None = training_option(
        None,
        "Follow released code where it differs from the protocol; see `fczoo list releases`",
    )
    hf_columns: str | None = data_option(
        None,
        "Columns of a data set hf:PLACE (Hugging Face), such as image=img,label=fine,group=writer; "
        "none: images and labels found by their types, no groups",
    )
    data_root: str | None = data_option(None, "Folder of the data sets; none: FCZOO_HOME/data")
    start_from: str | None = data_option(
        None,
        "Kept model to continue from: METHOD/seedN of a run folder, or the run folder",
    )
    backbone: str = training_option(
        "vit_nano_32",
        "A name of `fczoo list backbones`, a weight file, or NAME:FILE (NAME with weights of FILE)",
    )
    image_size: int | None = training_option(
        None, "Side of the input images, in pixels; none: that of the weights", low=1
    )
    mean: tuple[float, ...] | None = training_option(
        None,
        "Mean per input channel, which is subtracted from inputs, for pixels from 0 to 1; none: "
        "that of the weights",
    )
    std: tuple[float, ...] | None = training_option(
        None,
        "Standard deviation per input channel, by which inputs are divided, for pixels from 0 to "
        "1; none: that of the weights",
    )
    pool: Literal["cls", "mean", "cls+mean"] | None = training_option(
        None, "Feature: class token, mean of patches, or both; none: the backbone's"
    )
    norm_by_dataset: bool = training_option(
        False,
        "Normalise by mean and standard deviation of the data set, not of the weights",
        quirk="fed-mammoth",
    )
    partition: str = population_option(
        "dirichlet:0.5",
        "Partition of images over clients: iid, dirichlet:0.5, ... (see `fczoo list "
        "partitioners`), or file:PATH",
    )
    tasks: int | tuple[int, ...] | Literal["domains"] = data_option(
        5,
        "Number of tasks; or classes per task, such as 50,10,10; or domains: one task per domain",
        low=1,
    )
    base_classes: int | None = data_option(
        None, "Few-shot: number of classes of the first task; needs --ways", low=1
    )
    ways: int | None = data_option(None, "Few-shot: number of classes per later task", low=1)
    shots: int | None = data_option(
        None, "Training images per class after the first task; none: all", low=1
    )
    imbalance: float | None = data_option(
        None,
        "Long-tailed classes: training images of the rarest class divided by those of the most "
        "common one, above 0 and up to 1; none: as the data set has them",
        low=1e-6,
        high=1,
    )
    blurry: float = data_option(
        0.0, "Share of each class's images that is divided among the other tasks", low=0, high=1
    )
    label_noise: float = data_option(
        0.0, "Share of each client's labels that are wrong", low=0, high=1
    )
    stop_after_tasks: int | None = training_option(
        None, "End the run after task NUMBER of the stream; none: all", low=1
    )
    clients: int = population_option(5, "Number of clients at the start", low=1, high=MOST_CLIENTS)
    joining: int = population_option(
        0, "Number of new clients at each later task", low=0, high=MOST_CLIENTS
    )
    transition: float = population_option(
        1.0,
        "Share of the clients from earlier tasks that get images of a new task, from 0 to 1; "
        "clients that join at its start always get some",
        low=0,
        high=1,
    )
    moving: int | None = population_option(
        None,
        "After every --rounds rounds, NUMBER clients, in turn, move to their next task, and the "
        "others stay in theirs; none: all clients change tasks together",
        low=1,
    )
    task_order: Literal["same", "own"] = population_option(
        "same", "Order of the tasks: the same for all, or each client's own"
    )
    participation: float = population_option(
        1.0,
        "Clients sampled per round: their share (up to 1) or their number (above 1)",
        low=0,
    )
    draw_among: Literal["data", "joined"] = population_option(
        "data",
        "Sample participants among clients with images of the task, or among all joined ones",
    )
    client_draw: Literal["round", "task"] = population_option(
        "round",
        "Sample participants once per round or once per task",
        quirk={"task": "fed-mammoth"},
    )
    client_devices: str | None = population_option(
        None, "Clients' speeds, for a virtual clock: phones, cross-silo or FILE"
    )
    deadline: float | None = population_option(
        None, "Seconds of the virtual clock after which a round leaves out late clients", low=1e-3
    )
    over_select: float | None = population_option(
        None,
        "Factor of over-selection, at least 1: sample NUMBER times as many clients as a round "
        "needs, and merge only the first uploads, as many as it needs; none: 1",
        low=1,
    )
    rounds: int = training_option(3, "Number of communication rounds per task", low=1)
    eval_every: int = training_option(
        0,
        "Number of rounds between tests on all classes seen so far, in addition to the test after "
        "each task; 0: no additional test",
        low=0,
    )
    epochs: int = training_option(2, "Number of local epochs per round", low=1)
    personal_epochs: int = training_option(
        0,
        "Number of epochs of fine-tuning at each client after the last task, on a copy, to test "
        "personal models; 0: none",
        low=0,
    )
    batch_size: int = training_option(16, "Number of images per local batch", low=1)
    augment: str = training_option(
        "none",
        "Random view of the training images: none, flip, crop, ... (see fczoo list augmentations)",
    )
    test_crop: float = training_option(
        1.0,
        "Share of each image side that test images keep; with 0.875 and an image size of 224, "
        "images are resized to 256 pixels and cropped to the middle 224",
        low=0.1,
        high=1,
    )
    cache_queries: bool = training_option(
        False,
        "Compute the query features of each training image once, without augmentation; saves "
        "one forward per step",
    )
    local: str | None = training_option(
        None,
        "Rule that changes local training, for most methods: fedprox, ... (`fczoo list local`)",
    )
    server_optimizer: str | None = training_option(
        None,
        "Optimizer by which the server applies the clients' average change: fedavgm, fedadam, "
        "fedyogi or fedadagrad; none: the average replaces the model",
    )
    compress: str | None = training_option(
        None,
        "Compression of trained tensors that clients upload: int8 or fp16 (8 or 16 bits per "
        "number), topk:PART (largest changes only), or lowrank:RANK; none: no compression",
    )
    train_per_class: int | None = data_option(
        None, "Use only the first NUMBER training images per class; none: all", low=1
    )
    test_per_class: int | None = data_option(
        None, "Use only the first NUMBER test images per class; none: all", low=1
    )
    stored_size: int | None = data_option(
        None,
        "Side of the cached copies of image files, in pixels; none: the data set's",
        low=1,
    )
    resize: Resize = data_option(
        "crop",
        "Make image files square: crop the centre, or resize the whole, which changes its "
        "aspect ratio",
    )
    class_order: Literal["natural"] | tuple[int, ...] = data_option(
        "natural",
        "Order in which classes arrive: natural, or a list of all original labels",
        low=0,
    )
    class_order_seed: int | None = data_option(
        None, "Seed that shuffles the classes; none: the order of --class-order", low=0
    )
    partition_seed: int = population_option(0, "Seed of the partition", low=0)
    vary: tuple[Literal["training", "partition", "class-order"], ...] = population_option(
        ("training",),
        "Random draws that change with each seed of --seeds: always training; partition and "
        "class-order can be added; standard deviations in tables cover these draws",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = machine_option(
        "auto", "Device of the run; auto: cuda, else mps, else cpu"
    )
    precision: Literal["fp32", "bf16", "fp64", "auto"] = machine_option(
        "fp32",
        "Number format of frozen weights and computation; auto: the faster of fp32 and bf16",
    )
    deterministic: bool = machine_option(
        False,
        "Use only operations that give the same bits every time, or fail; slower on CUDA",
    )
    together: Literal["auto"] | int = machine_option(
        "auto",
        "Number of clients per batched forward; auto: all on CUDA if each trains at most 4 million "
        "parameters, else 1",
        low=1,
    )
    aggregator: str | None = robustness_option(
        None,
        "Aggregator that replaces a method's averages, such as median; see `fczoo list "
        "aggregators`; none: the method's own",
    )
    outliers: float | None = robustness_option(
        None,
        "Leave out class statistics whose distance from the clients' centre is more than NUMBER "
        "times the median distance; none: keep all",
        low=1,
    )
    merge_statistics: Literal["median", "trimmed_mean", "geometric_median"] | None = (
        robustness_option(
            None,
            "Robust centre that replaces the sum or mean of the clients' class statistics; none: "
            "no replacement",
        )
    )
    drop_rate: float = robustness_option(
        0.0,
        "Probability that a participant drops out of a round, from 0 to 1",
        low=0,
        high=1,
    )
    min_clients: int = robustness_option(
        1,
        "Number of valid uploads that a round needs; with fewer, the run stops, or skips the "
        "round if --attack is given",
        low=1,
    )
    attack: str | None = robustness_option(
        None,
        "Attack of the hostile clients, such as scale:10; see `fczoo list attacks`",
    )
    attackers: float = robustness_option(
        0.2,
        "Share of the clients that are hostile, with --attack, from 0 to 1",
        low=0,
        high=1,
    )
    min_class_count: int = robustness_option(
        1, "Clients send statistics only of classes with at least NUMBER of their images", low=1
    )
    dp_clip: float | None = robustness_option(
        None,
        "Largest L2 norm C of an uploaded change; none: not clipped",
        low=1e-12,
    )
    dp_noise: float = robustness_option(
        0.0,
        "Standard deviation of noise per coordinate, in units of --dp-clip; the run reports "
        "epsilon",
        low=0,
    )
    dp_delta: float = robustness_option(
        1e-5, "Delta for which the run reports epsilon", low=1e-12, high=0.5
    )
    dp_subsampling: bool = robustness_option(
        False,
        "Report epsilon for an observer who does not see which clients are sampled",
    )
    dp_secure: bool = robustness_option(
        False, "Draw noise from a cryptographic source; such runs cannot be repeated bit for bit"
    )

    @use_python_names
    def __post_init__(self) -> None:
        check_options(self)
        vary = tuple(w for w in SEEDED_SETTINGS if w == "training" or w in self.vary)
        values = {"backbone": canonical_backbone(self.backbone)}
        values |= checks.locate_data(self.dataset, self.data_root, self.hf_columns)
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

    def sampled_count(self, candidates: int) -> int:
        """Return the number of clients that a round selects, at least its participants."""
        sampled = (self.over_select or 1) * self.participant_count(candidates)
        return min(ceil(sampled), candidates)

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
