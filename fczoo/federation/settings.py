"""The settings of a run: everything but the method."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from fczoo.core.errors import FczooError
from fczoo.core.options import build, check_options, option
from fczoo.core.registry import DATASETS, PARTITIONERS, PROTOCOLS

HALF, IMAGENET, CLIP = (
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
    (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD),
)
RELEASED_NORM = {
    "cifar100": HALF,
    "imagenet_r": HALF,
    "imagenet_a": IMAGENET,
    "cub200": IMAGENET,
    "eurosat": CLIP,
    "cars196": ((0.0,) * 3, (1.0,) * 3),
}
"""Mean and standard deviation by data set in fed-mammoth, the code released with HGP."""


@dataclass(frozen=True)
class Settings:
    """Everything about a run but the method. ``for_dataset`` fills in a data set's own schedule."""

    dataset: str = option("digits", "registered data set")
    protocol: str | None = option(
        None, "registered protocol that these settings follow where nothing else was given"
    )
    data_root: str | None = option(None, "folder that holds the data; none: FCZOO_HOME/data")
    backbone: str = option("vit_nano_32", "name, weight file, or NAME:FILE")
    image_size: int | None = option(None, "input size; none: the checkpoint's own", low=1)
    mean: tuple[float, ...] | None = option(None, "input mean; none: the checkpoint's own")
    std: tuple[float, ...] | None = option(None, "input standard deviation; none: the checkpoint's own")
    norm_by_dataset: bool = option(
        False,
        "mean and standard deviation by data set, whatever the checkpoint was trained with",
        quirk="fed-mammoth",
    )
    partition: str = option("dirichlet:0.5", "partitioner, or file:PATH of a saved partition")
    tasks: int | tuple[int, ...] = option(
        5, "tasks into which the classes are cut, or the number of classes of each", low=1
    )
    clients: int = option(5, "clients at the start", low=1)
    joining: int = option(0, "new clients at each later task", low=0)
    transition: float = option(1.0, "part of the earlier clients that get data of a new task", low=0, high=1)
    participation: float = option(
        1.0, "part of the clients that train in a round or, above 1, their number", low=0
    )
    draw_among: Literal["data", "joined"] = option(
        "data", "participants are drawn among clients with data of the task, or all that have joined"
    )
    client_draw: Literal["round", "task"] = option(
        "round", "draw participants for each round, or once a task", quirk={"task": "fed-mammoth"}
    )
    rounds: int = option(3, "rounds a task", low=1)
    epochs: int = option(2, "local epochs a round", low=1)
    batch_size: int = option(16, "local batch size", low=1)
    augment: str = option("none", "random view of the training images")
    test_crop: float = option(
        1.0,
        "part of each side that the test view keeps; 0.875: resize to 256, cut out the middle 224",
        low=0.1,
        high=1,
    )
    cache_queries: bool = option(
        False, "keep query features of the test view in training, too, instead of one forward a step"
    )
    train_per_class: int | None = option(None, "first training images of each class; none: all", low=1)
    test_per_class: int | None = option(None, "first test images of each class; none: all", low=1)
    stored_size: int | None = option(
        None, "side in pixels at which image files are kept; none: the data set's own", low=1
    )
    class_order: Literal["natural"] | tuple[int, ...] = option(
        "natural", "natural, or original labels in order of arrival", low=0
    )
    class_order_seed: int | None = option(None, "shuffles the classes; none: as class_order says", low=0)
    partition_seed: int = option(0, "seed of the split over clients", low=0)
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "auto: cuda, else mps, else cpu")
    precision: Literal["fp32", "bf16", "fp64"] = option(
        "fp32", "type in which the frozen weights are held and computed"
    )
    deterministic: bool = option(
        False, "use only operations that give the same bits each time, or fail; slower on CUDA"
    )
    together: Literal["auto"] | int = option("auto", "clients in one forward; auto: 1 on the CPU", low=1)
    aggregator: str | None = option(None, "aggregator of whatever a method averages; none: the method's own")
    outliers: float | None = option(
        None,
        "class statistics further from the clients' centre than this many median distances are left out; none: kept",
        low=1,
    )
    drop_rate: float = option(
        0.0, "probability that a client of a round is not heard of again in it", low=0, high=1
    )
    min_clients: int = option(1, "sound uploads without which a run stops", low=1)
    attack: str | None = option(None, "what hostile clients do; none: there are none")
    attackers: float = option(0.2, "part of the clients that are hostile, with an attack", low=0, high=1)
    min_class_count: int = option(
        1, "images of a class without which a client withholds its statistics", low=1
    )
    dp_clip: float | None = option(None, "largest norm C of an uploaded change; none: not clipped", low=1e-12)
    dp_noise: float = option(0.0, "standard deviation of the noise on each coordinate, in C", low=0)
    dp_delta: float = option(1e-5, "delta for which epsilon is stated", low=1e-30, high=0.5)

    def __post_init__(self) -> None:
        check_options(self)
        if not self.participation:
            raise FczooError(
                "--participation is 0, so nobody would train; give a part up to 1 or a whole number of clients"
            )
        if self.participation > 1 and self.participation % 1:
            raise FczooError(
                f"--participation is {self.participation:g}; it must be a part up to 1 or a whole number of clients"
            )
        if self.participation > self.clients:
            raise FczooError(
                f"--participation {self.participation:g} asks for more than the {self.clients} clients at the start; raise --clients"
            )

    @property
    def normalisation(self) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        """Mean and standard deviation of the input; None: the checkpoint's own. Raises FczooError where none is known for the data set."""
        if not self.norm_by_dataset:
            return self.mean, self.std
        if self.dataset not in RELEASED_NORM:
            raise FczooError(
                f"--norm-by-dataset knows no values for {self.dataset}; known: {', '.join(RELEASED_NORM)}"
            )
        mean, std = RELEASED_NORM[self.dataset]
        return self.mean or mean, self.std or std

    @property
    def root(self) -> Path | None:
        """Folder that holds the data; None: FCZOO_HOME/data."""
        return Path(self.data_root).expanduser() if self.data_root else None

    def portable(self) -> dict[str, Any]:
        """As plain values, files and folders by their last name: where they lay is nobody else's business."""
        return {
            k: shorten(v) if k in ("data_root", "backbone", "partition") else v
            for k, v in asdict(self).items()
        }

    @property
    def task_count(self) -> int:
        """Number of tasks."""
        return self.tasks if isinstance(self.tasks, int) else len(self.tasks)

    def drawn(self, candidates: int) -> int:
        """Clients that take part in a round, out of so many."""
        if self.participation > 1:
            return min(int(self.participation), candidates)
        return max(1, round(self.participation * candidates))

    @staticmethod
    def for_dataset(dataset: str, **changes: Any) -> "Settings":
        """The data set's own schedule or, with ``protocol``, that protocol's, changed where a value other than None is given.

        Raises FczooError for unknown names and values that do not fit.
        """
        given = {k: v for k, v in changes.items() if v is not None}
        defaults = {"dataset": dataset, **asdict(DATASETS.get(dataset).defaults)}
        stated = PROTOCOLS.get(given["protocol"]).stated(dataset) if "protocol" in given else {}
        if "class_order" in given:
            stated.pop("class_order_seed", None)
        plain = {k: v.value for k, v in stated.items() if not callable(v.value)}
        tasks = build(Settings, "bench", {**defaults, **plain, **given}).task_count
        return build(
            Settings, "bench", {**defaults, **{k: v.given(tasks) for k, v in stated.items()}, **given}
        )

    def method_options(self, method: str) -> dict[str, Any]:
        """What the protocol states for a method on this data set and partition; nothing without a protocol."""
        if self.protocol is None:
            return {}
        partitioner = None if self.partition.startswith("file:") else PARTITIONERS.create(self.partition)
        return PROTOCOLS.get(self.protocol).options(method, self.dataset, getattr(partitioner, "beta", None))


def shorten(word: str | None) -> str | None:
    """``NAME:FOLDER/FILE`` -> ``NAME:FILE``; words without a folder as they are."""
    if word is None or "/" not in word:
        return word
    before, _, last = word.rstrip("/").rpartition("/")
    name, colon, _ = before.partition(":")
    return f"{name}:{last}" if colon else last
