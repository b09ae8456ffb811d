"""Advice for users of other tools, whose options, commands and values have other names.

All advice is data in this module; a new pointer is one row.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence

from fczoo.core.errors import FczooError
from fczoo.core.names import fold, join_first_names, match
from fczoo.core.registry import METHODS, PARTITIONERS, SPECS

LEARNING_RATE_ADVICE = (
    "the learning rate is an option of each method: --set METHOD.lr=VALUE, e.g. --set hgp.lr=0.001"
)
PARTITION_ADVICE = (
    "the partition over clients is --partition NAME:VALUE, e.g. --partition dirichlet:0.1"
)

OPTIONS: dict[str, tuple[str, str]] = {
    "lr": ("set", LEARNING_RATE_ADVICE),
    "learning-rate": ("set", LEARNING_RATE_ADVICE),
    "wd": ("set", "it is an option of most methods: --set METHOD.weight_decay=VALUE"),
    "lora-rank": ("set", "it is an option of most methods: --set METHOD.rank=VALUE"),
    "memory-size": ("set", "it is an option of methods with exemplars: --set METHOD.memory=VALUE"),
    "buffer-size": ("set", "it is an option of methods with exemplars: --set METHOD.memory=VALUE"),
    "mu": ("local", "it is the weight of FedProx: --local fedprox:MU"),
    "fedprox": ("local", "give --local fedprox:MU"),
    "scaffold": ("local", "give --local scaffold"),
    "fednova": ("local", "give --local fednova"),
    "feddyn": ("local", "give --local feddyn:ALPHA"),
    "moon": ("local", "give --local moon:MU"),
    "server-lr": (
        "server_optimizer",
        "give --server-optimizer fedadam:LR, or fedavgm:MOMENTUM,lr=LR",
    ),
    "server-momentum": ("server_optimizer", "give --server-optimizer fedavgm:MOMENTUM"),
    "compression": ("compress", "give --compress int8, fp16, topk:PART or lowrank:RANK"),
    "model": ("backbone", "give --backbone NAME or --backbone FILE; for methods, --methods NAMES"),
    "arch": ("backbone", "give --backbone NAME or --backbone FILE"),
    "net": ("backbone", "give --backbone NAME or --backbone FILE"),
    "pretrained": ("backbone", "give --backbone NAME or --backbone FILE; all are pre-trained"),
    "checkpoint": ("backbone", "give --backbone FILE for weights, --resume for a run"),
    "weights": ("backbone", "give --backbone FILE"),
    "method": ("methods", "give --methods NAMES, separated by commas"),
    "algorithm": ("methods", "give --methods NAMES, separated by commas"),
    "alg": ("methods", "give --methods NAMES, separated by commas"),
    "strategy": ("methods", "give --methods NAMES, separated by commas"),
    "alpha": ("partition", PARTITION_ADVICE),
    "beta": ("partition", PARTITION_ADVICE),
    "dirichlet": ("partition", PARTITION_ADVICE),
    "dirichlet-alpha": ("partition", PARTITION_ADVICE),
    "dir-alpha": ("partition", PARTITION_ADVICE),
    "concentration": ("partition", PARTITION_ADVICE),
    "split": ("partition", PARTITION_ADVICE),
    "noniid": ("partition", PARTITION_ADVICE),
    "iid": ("partition", "give --partition iid"),
    "gpu": ("device", "give --device cuda; CUDA_VISIBLE_DEVICES chooses among several"),
    "gpus": ("device", "give --device cuda; CUDA_VISIBLE_DEVICES chooses among several"),
    "gpu-id": ("device", "give --device cuda; CUDA_VISIBLE_DEVICES chooses among several"),
    "device-id": ("device", "give --device cuda; CUDA_VISIBLE_DEVICES chooses among several"),
    "num-gpus": ("jobs", "give --jobs auto for one run per GPU"),
    "cuda": ("device", "give --device cuda"),
    "cpu": ("device", "give --device cpu"),
    "workers": ("jobs", "give --jobs NUMBER for parallel runs"),
    "num-workers": ("jobs", "give --jobs NUMBER for parallel runs"),
    "seed": ("seeds", "give --seeds NUMBERS, e.g. --seeds 0 or --seeds 0-2"),
    "batch": ("batch_size", "give --batch-size NUMBER"),
    "bs": ("batch_size", "give --batch-size NUMBER"),
    "local-bs": ("batch_size", "give --batch-size NUMBER"),
    "num-clients": ("clients", "give --clients NUMBER"),
    "num-users": ("clients", "give --clients NUMBER"),
    "n-clients": ("clients", "give --clients NUMBER"),
    "num-rounds": ("rounds", "give --rounds NUMBER, per task"),
    "comm-rounds": ("rounds", "give --rounds NUMBER, per task"),
    "global-rounds": ("rounds", "give --rounds NUMBER, per task"),
    "local-epochs": ("epochs", "give --epochs NUMBER, per round"),
    "local-ep": ("epochs", "give --epochs NUMBER, per round"),
    "num-epochs": ("epochs", "give --epochs NUMBER, per round"),
    "num-tasks": ("tasks", "give --tasks NUMBER"),
    "n-tasks": ("tasks", "give --tasks NUMBER"),
    "classes-per-task": ("tasks", "give the classes of each task: --tasks 20,20,20,20,20"),
    "increment": ("tasks", "give the classes of each task: --tasks 50,10,10,10,10,10"),
    "frac": (
        "participation",
        "give --participation NUMBER, a share up to 1 or a number of clients",
    ),
    "fraction": (
        "participation",
        "give --participation NUMBER, a share up to 1 or a number of clients",
    ),
    "data": (
        "data_root",
        "give --data-root FOLDER for the folder, --dataset NAME for the data set",
    ),
    "data-dir": ("data_root", "give --data-root FOLDER"),
    "data-path": ("data_root", "give --data-root FOLDER"),
    "datasets": ("dataset", "give --dataset NAMES, separated by commas"),
    "img-size": ("image_size", "give --image-size NUMBER"),
    "output": ("out", "give --out FOLDER"),
    "output-dir": ("out", "give --out FOLDER"),
    "save-dir": ("out", "give --out FOLDER"),
    "log-dir": ("out", "give --out FOLDER"),
    "cfg": ("config", "give --config FILE"),
    "fp16": ("precision", "give --precision bf16"),
    "amp": ("precision", "give --precision bf16"),
    "wandb": ("log", "give --log wandb"),
    "tensorboard": ("log", "give --log tensorboard"),
}
"""Our parameter and advice, by option of another tool."""

COMMANDS: dict[str, str] = {
    "run": "fczoo bench",
    "train": "fczoo bench",
    "fit": "fczoo bench",
    "benchmark": "fczoo bench",
    "start": "fczoo bench",
    "launch": "fczoo bench",
    "experiment": "fczoo bench",
    "simulate": "fczoo bench",
    "resume": "fczoo bench --resume",
    "eval": "fczoo evaluate FOLDER; bench evaluates after every task",
    "test": "fczoo evaluate FOLDER; bench evaluates after every task",
    "results": "fczoo report FOLDER",
    "visualize": "fczoo plot FOLDER --kind KIND --out FILE",
    "search": "fczoo tune",
    "sweep": "fczoo bench --sweep METHOD.OPTION=VALUE,VALUE; fczoo tune searches",
    "download": "fczoo data fetch NAME",
    "fetch": "fczoo data fetch NAME",
    "check": "fczoo data check NAME",
    "split": "fczoo partition",
    "info": "fczoo show NAME",
    "describe": "fczoo show NAME",
    "ls": "fczoo list",
    "config": "fczoo show settings",
    "help": "fczoo --help",
    "version": "fczoo --version",
    "env": "fczoo doctor",
}
"""Our command, by command of another tool."""

PARTITIONS: dict[str, str] = {
    "noniid": "dirichlet:0.1",
    "niid": "dirichlet:0.1",
    "skewed": "dirichlet:0.1",
    "lda": "dirichlet:0.1",
    "dir": "dirichlet:0.1",
    "pathological": "shards:2 or quantity:2",
    "uniform": "iid",
    "random": "iid",
    "naturalid": "natural",
    "groupednaturalid": "natural",
    "writer": "natural",
    "user": "natural",
    "hospital": "natural",
    "domain": "domains",
    "powerlaw": "size:1.2",
    "unbalanced": "dirichlet-size:0.5",
    "quantityskew": "dirichlet-size:0.5",
}
"""Our partition, by name of a split in other tools."""

FIELDS: dict[str, str] = {
    "learning-rate": "lr",
    "lrate": "lr",
    "step-size": "lr",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "lora-rank": "rank",
    "memory-size": "memory",
    "buffer-size": "memory",
}
"""Our option of a method, by name in other tools."""

LIST_OPTIONS = {
    **dict.fromkeys(("methods", "dataset", "partition", "log", "vary"), "names"),
    **dict.fromkeys(("seeds", "tasks", "class-order", "mean", "std"), "numbers"),
}
"""Kind of the entries, by option with a comma-separated list."""
MAX_SEED_COUNT = 100  # a larger value of ``--seeds`` is not meant as a number of runs


def option_pointer(option: str, known: Collection[str]) -> str:
    """Return advice for an unknown option.

    Args:
        option: The unknown option.
        known: Parameters of the command.

    Returns:
        What to type, ``--set`` for an option of methods; empty if the command lacks the parameter.
    """
    rows = {fold(name): row for name, row in OPTIONS.items()}
    target, advice = rows.get(fold(option.lstrip("-")), ("", ""))
    if target:
        return advice if target in known else ""
    owners = option_owners(option.lstrip("-")) if "set" in known else {}
    names = list(owners)
    return (
        f"it is an option of {join_first_names(names)}: --set METHOD.{owners[names[0]]}=VALUE"
        if names
        else ""
    )


def option_owners(word: str) -> dict[str, str]:
    """Return the methods that have an option, with the option's spelling.

    Args:
        word: Name of the option in any spelling.

    Returns:
        Spelling by method.
    """
    spellings = {name: match(word, METHODS.options(name)) for name in METHODS.names()}
    return {name: option for name, option in spellings.items() if option}


def command_pointer(command: str, kinds: Iterable[str]) -> str:
    """Return the command to use instead of an unknown one; empty without advice.

    Args:
        command: The unknown command.
        kinds: Kinds that ``fczoo list`` lists.
    """
    if kind := match(command, kinds):
        return f"fczoo list {kind}"
    if method := METHODS.find(command):
        return f"fczoo show {method} or fczoo bench --methods {method}"
    return {fold(name): advice for name, advice in COMMANDS.items()}.get(fold(command), "")


def check_methods(names: Iterable[str]) -> None:
    """Check that names are not those of a local rule, an aggregator or another part of a round.

    Args:
        names: Names that should be methods.

    Raises:
        FczooError: A name is not a method's; the message has the right option.
    """
    for name in names:
        for option in ("local", "aggregator", "server_optimizer", "compress"):
            registered_name = SPECS[option].find(name)
            if registered_name and METHODS.find(name) is None:
                words = f"--{option.replace('_', '-')} {registered_name}"
                advice = f"{registered_name} is an option of a run: {words}"
                raise FczooError(f"no method is called {name!r}; {advice}")


def check_partitions(specs: Iterable[str]) -> None:
    """Check partitions for names of other tools, and for numbers without a name.

    Args:
        specs: Partitions with their options.

    Raises:
        FczooError: Such a partition is given; the message has the right one.
    """
    partitions = list(specs)
    for position, spec in enumerate(partitions):
        name, _, value = spec.partition(":")
        advice = PARTITIONS.get(fold(name))
        if advice and PARTITIONERS.find(name) is None:
            suggestion = (
                f"{advice.partition(':')[0]}:{value}"
                if value and ":" in advice and " or " not in advice
                else advice
            )
            raise FczooError(
                f"--partition {spec} is not a partition here; write --partition {suggestion}"
            )
        if spec.replace(".", "", 1).isdecimal():
            previous_name = partitions[position - 1].partition(":")[0] if position else "dirichlet"
            suggestion = ",".join([*partitions[:position], f"{previous_name}:{spec}"])
            raise FczooError(
                f"--partition has {spec!r} without a name; write --partition {suggestion}"
            )


def check_fields(method: str, fields: Iterable[str], values: Iterable[str]) -> None:
    """Check options for names of other tools, such as ``learning_rate``.

    Args:
        method: Name of the method, for the message.
        fields: Names of its options.
        values: Names of the options that are set.

    Raises:
        FczooError: An option has another name; the message has it.
    """
    field_names, names = list(fields), {fold(option): name for option, name in FIELDS.items()}
    for option in values:
        target = names.get(fold(option))
        if target is None or option in field_names:
            continue
        candidates = sorted(
            (name for name in field_names if set(target.split("_")) <= set(name.split("_"))),
            key=len,
        )
        if candidates:
            advice = f"did you mean {', '.join(candidates)}? (--set {method}.{candidates[0]}=VALUE)"
            raise FczooError(f"{method} has no option {option!r}; {advice}")


def check_spaces(args: Sequence[str]) -> str:
    """Return advice if entries of a list are separated by spaces; empty if not.

    Args:
        args: Arguments of the command.
    """
    for position, argument in enumerate(args):
        name, _, first = argument.removeprefix("--").lower().replace("_", "-").partition("=")
        if argument.startswith("--") and name in LIST_OPTIONS:
            next_values = itertools.takewhile(
                lambda value: not value.startswith("-"), args[position + 1 :]
            )
            values = [value.strip(",") for value in (first, *next_values) if value.strip(",")]
            if len(values) > 1:
                return f"separate {LIST_OPTIONS[name]} by commas: --{name} {','.join(values)}"
    return ""


def single_seed_note(value: object) -> str:
    """Return a note for a single seed, which may have been meant as a number of runs.

    Args:
        value: Value of ``--seeds``.

    Returns:
        The note; empty for other values.
    """
    text = str(value).strip()
    if not (text.isascii() and text.isdecimal()) or not 2 <= int(text) <= MAX_SEED_COUNT:
        return ""
    return f"--seeds {text} is one seed; for {text} seeds give --seeds 0-{int(text) - 1}"
