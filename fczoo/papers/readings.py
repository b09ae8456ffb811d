"""The readings of a printed number: as the paper prints it, and as its released code does it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fczoo.backbones.timm_vit import input_statistics
from fczoo.core.files import through_json
from fczoo.core.options import flag, quirks
from fczoo.core.registry import METHODS, PARTITIONERS, RELEASES, create_method
from fczoo.data.normalisation import released_norm
from fczoo.federation.settings import Settings
from fczoo.papers.printed import Number, Paper, plain_split
from fczoo.papers.protocol import Stated
from fczoo.reports.runs import WITHOUT_EFFECT, Experiment, Line
from fczoo.reports.words import option_word, setting_word

IGNORED = (*WITHOUT_EFFECT, "partition_seed")  # what cannot change what is compared, or no paper states
NORMALISATION = ("mean", "std", "norm_by_dataset")  # three settings that say one thing
NEVER_SAID = ("precision", "deterministic", "vary")
"""What papers do not say of their runs, beside what protocols mark as open."""
ROUGHLY = ("backbone", "partition", "class_order_seed", "train_per_class")
"""Of which even an open setting says something."""


@dataclass(frozen=True)
class Reading:
    """One way to read what a printed number was measured with."""

    name: str
    who: str  # says so, in a difference: paper or code
    settings: Settings
    method: str
    options: Mapping[str, Any]  # of the method, all of them
    given: Mapping[str, Any]  # settings that the protocol alone does not give, as the command line takes them
    set: Mapping[str, Any]  # the same of options
    open: frozenset[str]  # settings, and options as ``.name``, with which any run agrees

    @property
    def words(self) -> list[str]:
        """What a command says for it beside protocol, method, data set, split and tasks."""
        said: list[str] = []
        for name, value in self.given.items():
            said += [flag(name), option_word(value)]
        for name, value in self.set.items():
            said += ["--set", f"{self.method}.{name}={option_word(value)}"]
        return said


def readings(paper: Paper, number: Number) -> list[Reading]:
    """The print's reading, then the released code's, where it is public and has the method.

    Raises FczooError where the protocol has no such data set or split.
    """
    row = paper.row(number)
    protocol, release = paper.protocol, RELEASES.get(paper.release) if paper.release else None
    stated = protocol.stated(row.dataset)
    given = {k: "none" if v is None else v for k, v in _printed(stated).items()}
    settings, method = paper.settings(number, **given), row.method or ""
    known = protocol.hyperparameters(method, row.dataset)
    chosen = {**_printed(known), **row.options}
    left = {k for k, v in stated.items() if v.open} | {f".{k}" for k, v in known.items() if v.open}
    if method not in protocol.proposes:
        left |= {f".{name}" for name in _unstated(method, known) - row.options.keys()}
    left |= set(NEVER_SAID) - stated.keys()
    if row.split is None:
        left.add("split")
    found = [_reading("the print", "paper", settings, method, {**given, **row.settings}, chosen, left)]
    if release and (method in release.methods or method in release.tuned.get(row.dataset, {})):
        split = release.split(paper.settings(number).partition)
        code = {"as_released": paper.release, "partition": split}
        has = set(release.stated(row.dataset)) | {
            f".{k}" for k in release.hyperparameters(method, row.dataset)
        }
        found.append(
            _reading(
                f"the released code ({paper.release})",
                "code",
                paper.settings(number, **code),
                method,
                {"as_released": paper.release, **row.settings},
                row.options,
                left - has,
            )
        )
    return found


def _reading(
    name: str,
    who: str,
    settings: Settings,
    method: str,
    given: Mapping[str, Any],
    chosen: Mapping[str, Any],
    left: set[str],
) -> Reading:
    options = {**settings.method_options(method), **chosen}
    made = asdict(create_method(method, settings.dataset, **options)) if method in METHODS.names() else {}
    return Reading(name, who, settings, method, through_json(made), given, chosen, frozenset(left))


def _printed(stated: Mapping[str, Stated]) -> dict[str, Any]:
    """What the print has where the protocol follows something else."""
    return {name: value.printed for name, value in stated.items() if value.printed is not ...}


def _unstated(method: str, stated: Mapping[str, Stated]) -> set[str]:
    """Options of which a paper that compares with the method says nothing, deviations of code aside."""
    if method not in METHODS.names():
        return set()
    options = METHODS.options(method)
    return options.keys() - stated.keys() - {quirk.field for quirk in quirks(options)}


def differences(experiment: Experiment, line: Line, reading: Reading, seeds: int) -> list[str]:
    """Every setting and option in which the runs behind a line differ from a reading, of ``seeds`` runs."""
    found = []
    ours, theirs = settings_of(experiment), through_json(reading.settings.portable())
    for name in (n for n in theirs if n not in (*IGNORED, *NORMALISATION)):
        if not _agrees(name, ours, theirs, reading.open):
            found.append((name, setting_word(name, ours[name]), setting_word(name, theirs[name])))
    if "mean" not in reading.open and _normalised(ours) != _normalised(theirs):
        found.append(("normalisation", _normalisation_word(ours), _normalisation_word(theirs)))
    if len(line.seeds) < seeds:
        found.append(("seeds", str(len(line.seeds)), str(seeds)))
    for name, value in line.results[0].options.items():
        if f".{name}" not in reading.open and name in reading.options and value != reading.options[name]:
            wanted = option_word(reading.options[name])
            found.append((f"{reading.method}.{name}", option_word(value), wanted))
    return [f"{name} {here} ({reading.who}: {there})" for name, here, there in found]


def left_open(experiment: Experiment, line: Line, reading: Reading) -> list[str]:
    """What the paper does not say, where the runs have other than the protocol."""
    ours, theirs = settings_of(experiment), through_json(reading.settings.portable())
    options = line.results[0].options
    settings = [
        f"{name} {setting_word(name, ours[name])}"
        for name in theirs
        if name in reading.open and ours[name] != theirs[name]
    ]
    return settings + [
        f"{reading.method}.{name} {option_word(options[name])}"
        for name, value in reading.options.items()
        if f".{name}" in reading.open and name in options and options[name] != value
    ]


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """The settings of runs, with split and backbone by their full names."""
    about = experiment.about
    return {
        **through_json(experiment.settings),
        "partition": about.partition["spec"],
        "backbone": about.backbone["name"],
    }


def _agrees(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], left: frozenset[str]) -> bool:
    if name in left and name not in ROUGHLY:
        return True
    a, b = ours[name], theirs[name]
    if name == "partition":
        return "split" in left or _split(a, name in left) == _split(b, name in left)
    if name == "backbone" and name in left:
        return str(a).split(".")[0] == str(b).split(".")[0]  # timm: ARCHITECTURE.WEIGHTS
    if name == "class_order_seed":
        if name not in left:
            return bool("class_order" in left or a == b)
        return (a is None) == (b is None)
    if name == "train_per_class" and name in left:
        return a in (None, b)  # all images, as papers have them that do not say
    return bool(_tasks(a) == _tasks(b) if name == "tasks" else a == b)


def _tasks(value: Any) -> Any:
    return len(value) if isinstance(value, list) and len(set(value)) == 1 else value


def _split(spec: str, roughly: bool) -> Any:
    """A split so that two ways of writing the same are equal; ``roughly``: whatever papers print of it."""
    if spec.startswith("file:"):
        return spec
    made = PARTITIONERS.create(spec)
    return (plain_split(spec), getattr(made, "scope", "")) if roughly else made


def _normalised(settings: Mapping[str, Any]) -> list[tuple[float, ...]]:
    """Mean and standard deviation of the input, those of the checkpoint where nothing else is said."""
    said = settings["mean"], settings["std"]
    if settings["norm_by_dataset"]:
        mean, std = released_norm(settings["dataset"])
        said = said[0] or mean, said[1] or std
    return [tuple(a or b) for a, b in zip(said, input_statistics(settings["backbone"]), strict=True)]


def _normalisation_word(settings: Mapping[str, Any]) -> str:
    return " and ".join(map(option_word, _normalised(settings)))
