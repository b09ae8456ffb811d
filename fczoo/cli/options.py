"""Command-line options generated from ``Settings``, and examples and headings of ``--help``."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import Field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from fczoo.cli.other_tools import check_spaces
from fczoo.cli.values import check_not_empty
from fczoo.core.names import match
from fczoo.core.options import flag
from fczoo.core.registry import Registry
from fczoo.data.dataset import Defaults
from fczoo.federation.setting_groups import GROUPS
from fczoo.federation.settings import Settings
from fczoo.protocols.registry import REGISTRY_OF_SETTING
from fczoo.reports.text_format import option_word

COMMAND_GROUPS: dict[str, tuple[str, ...]] = {
    "Start here": ("doctor", "bench", "report", "plot", "list", "show"),
    "Use a model": ("predict", "evaluate", "export", "cite"),
    "Data and partitions": ("data", "partition"),
    "Papers": ("papers", "reproduce", "compare", "claims"),
    "Tune and publish": ("tune", "suite", "leaderboard", "submit"),
    "Extend and deploy": ("new", "site"),
}
"""Commands by heading, in the order of ``fczoo --help``."""

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "fczoo": (
        ("fczoo bench --methods pilora,hgp,fppl", "a first table, on digits, in about a minute"),
        ("fczoo report results", "the tables of all runs again"),
    ),
    "bench": (
        ("fczoo bench --methods pilora,hgp", "two methods on digits"),
        ("fczoo bench --methods all --dataset cifar100 --seeds 0-2", "all methods, three seeds"),
        ("fczoo bench --methods hgp --partition dirichlet:0.1", "another partition"),
        ("fczoo bench --methods hgp --sweep hgp.lr=0.01,0.1", "each value of an option"),
        (
            "fczoo bench --protocol hgp --dataset cifar100 --dry-run",
            "the cost of a paper's settings",
        ),
        ("fczoo bench --resume", "continue the newest run in results/"),
    ),
    "tune": (
        ("fczoo tune --methods hgp --dataset cifar100 --out tuned", "search the options of HGP"),
    ),
    "plot": (
        ("fczoo plot results/run-1 --kind curves --out curves.pdf", "accuracy after each task"),
        (
            "fczoo plot results/run-1 --kind tsne --method hgp --out features.svg",
            "features of test images from the stored model",
        ),
    ),
    "report": (
        ("fczoo report results/run-1", "the tables of a run folder"),
        ("fczoo report results --html page.html", "one page with figures"),
    ),
    "predict": (
        ("fczoo predict results/run-1/hgp/seed0 photo.png", "the five best classes of an image"),
        (
            "fczoo predict results/run-1 'scans/*.png' --format csv > scans.csv",
            "a CSV file of predictions",
        ),
    ),
    "evaluate": (
        ("fczoo evaluate results/run-1/hgp/seed0", "repeat the run's last evaluation"),
        ("fczoo evaluate results/run-1/hgp/seed0 --data-root DIR", "other labelled images"),
    ),
    "export": (
        ("fczoo export results/run-1/fedavg/seed0 --format timm", "weights for timm.create_model"),
        (
            "fczoo export results/run-1/hgp/seed0 --format torch --out hgp.pt2",
            "a program of torch.export",
        ),
    ),
    "cite": (("fczoo cite hgp,pilora", "BibTeX of two methods and of fczoo"),),
    "suite": (("fczoo suite run digits --jobs 2", "tune and run missing or outdated rows"),),
    "suite run": (("fczoo suite run digits --jobs 2", "tune and run missing or outdated rows"),),
    "suite status": (("fczoo suite status digits", "which rows are current, and the time left"),),
    "suite report": (("fczoo suite report digits", "the page of a suite, from its archive"),),
    "leaderboard": (("fczoo leaderboard --out site", "web pages of the suites in results/"),),
    "submit": (("fczoo submit results/run-1 --dry-run", "check a run folder"),),
    "partition": (
        ("fczoo partition --dataset digits --partition dirichlet:0.1", "images per client"),
    ),
    "data": (("fczoo data fetch cifar100", "download CIFAR-100"),),
    "data fetch": (("fczoo data fetch cifar100 --data-root DIR", "download CIFAR-100 into DIR"),),
    "data check": (("fczoo data check cifar100", "compare a copy with the official numbers"),),
    "papers": (("fczoo papers hgp T1", "one printed table"),),
    "compare": (("fczoo compare results/run-1 --paper hgp", "a run next to the paper's numbers"),),
    "reproduce": (
        ("fczoo reproduce hgp/cifar100/dirichlet:0.05", "run and judge a printed result"),
    ),
    "claims": (("fczoo claims", "all claims, with the verdict of the runs here"),),
    "list": (("fczoo list methods", "all methods, by group"),),
    "show": (("fczoo show hgp", "options, what is trained, what is sent"),),
    "doctor": (("fczoo doctor", "what this machine has, and what is missing"),),
    "new": (("fczoo new method mine", "a package fczoo-mine with a method to edit"),),
    "site": (("fczoo site init OUT --agreed DIR --address HOST:9092", "folders for all sites"),),
    "site init": (
        ("fczoo site init OUT --agreed DIR --address HOST:9092", "folders for all sites"),
    ),
    "site job": (("fczoo site job OUT --agreed DIR", "a job for NVIDIA FLARE"),),
    "site start": (("fczoo site start FOLDER --images DIR", "take part as the site of FOLDER"),),
    "site status": (("fczoo site status FOLDER", "the state of the server's run"),),
}
"""Examples by command, each with its effect."""

COMMON_OPTIONS = frozenset(
    [
        *("--config", "--methods", "--seeds", "--set", "--sweep", "--tuned"),
        *("--trials", "--first-tasks", "--seed", "--plot"),
        *(
            "--dataset",
            "--data-root",
            "--download",
            "--tasks",
            "--train-per-class",
            "--test-per-class",
        ),
        *("--partition", "--clients", "--participation"),
        *("--protocol", "--backbone", "--image-size", "--rounds", "--epochs", "--batch-size"),
        *("--device", "--precision", "--aggregator", "--attack"),
        *("--out", "--resume", "--dry-run", "--jobs"),
    ]
)
"""Options of long commands that ``--help`` lists; ``--help-all`` lists all options."""


Command = TypeVar("Command", bound=Callable[..., Any])

RUNS, OUTPUT = "runs", "output"  # headings of options that are not settings
DATA_FOLDER = "[default: FCZOO_HOME/data; FCZOO_HOME is ~/.cache/fczoo unless set]"
ALL_OPTIONS = "fczoo.all_options"  # key of a context in which --help lists all options


def normalize_token(token: str) -> str:
    """Convert an option or command to its registered spelling: ``batch_size`` -> ``batch-size``.

    Args:
        token: Option or command as typed.
    """
    return token.lower().replace("_", "-")


PLACEHOLDERS = {
    "data_root": "FOLDER",
    "hf_columns": "image=NAME,label=NAME",
    "client_devices": "NAME|FILE",
    "backbone": "NAME|FILE",
    "start_from": "FOLDER",
    "tasks": "NUMBER|NUMBERS|domains",
    "class_order": "natural|NUMBERS",
    "mean": "NUMBERS",
    "std": "NUMBERS",
    "vary": "NAMES",
}
"""Placeholder of a setting's value in ``--help``, if its type does not determine it."""

TYPES: dict[Any, str] = {
    type(click.INT): "NUMBER",
    type(click.FLOAT): "NUMBER",
    click.Path: "FOLDER",
    type(click.STRING): "NAME",
}
"""Placeholder in ``--help`` by type of click, including subclasses such as ranges."""

CONTEXT = {"token_normalize_func": normalize_token, "max_content_width": 120}


class Name(click.Choice[str]):
    """Type of a choice of names; case, ``-`` and ``_`` do not matter."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        choice: str = super().convert(match(str(value), self.choices) or value, param, ctx)
        return choice


class GroupedOption(click.Option):
    """Option that ``--help`` lists below a heading."""

    def __init__(self, *arguments: Any, group: str = "options", **more: Any):
        super().__init__(*arguments, **more)
        self.group = group


class ExampleCommand(click.Command):
    """Command whose ``--help`` starts with examples and has placeholders of values."""

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        for param in self.params:
            if isinstance(param, click.Option) and not param.is_flag and param.metavar is None:
                param.metavar = next(
                    (metavar for kind, metavar in TYPES.items() if isinstance(param.type, kind)),
                    None,
                )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            if not ctx.resilient_parsing and not self.no_args_is_help:
                check_not_empty(self, ctx, args)
            return super().parse_args(ctx, args)
        except click.UsageError as error:  # click omits the context of an option without its value
            error.ctx = error.ctx or ctx
            raise

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if examples := EXAMPLES.get(ctx.command_path.removeprefix("fczoo ")):
            with formatter.section("Examples"):
                for command, meaning in examples:
                    formatter.write(f"  {command}\n      {meaning}\n")
        super().format_help_text(ctx, formatter)


class ExampleGroup(ExampleCommand, click.Group):
    """Group of commands whose ``--help`` starts with examples and does not cut sentences."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        groups = COMMAND_GROUPS if self.name == "fczoo" else {}
        sections = {
            heading: [n for n in members if n in names] for heading, members in groups.items()
        }
        grouped_names = {name for section in sections.values() for name in section}
        sections["Commands"] = [name for name in names if name not in grouped_names]
        for heading, section in sections.items():
            if section:
                with formatter.section(heading):
                    formatter.write_dl([(name, _sentence(self.commands[name])) for name in section])


class GroupedCommand(ExampleCommand):
    """Command whose ``--help`` lists options below headings, after its examples.

    With ``common_options``, names such as ``--rounds``, ``--help`` lists only these options, and
    ``--help-all`` lists all.
    """

    def __init__(self, *arguments: Any, common_options: Collection[str] = (), **more: Any):
        super().__init__(*arguments, **more)
        self.context_settings = {**CONTEXT, **self.context_settings}
        self.common_options = common_options
        if common_options:
            self.params.append(
                click.Option(
                    ["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_print_all_options,
                    help="Show all options and exit.",
                )
            )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        takes_words = any(isinstance(param, click.Argument) for param in self.params)
        if not takes_words and (advice := check_spaces(args)):
            raise click.UsageError(advice, ctx)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        omitted_count = 0
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            group = getattr(param, "group", "options")
            if not record or isinstance(param, click.Argument):
                continue
            rare = (
                self.common_options
                and group != "options"
                and param.opts[0] not in self.common_options
            )
            if rare and not ctx.meta.get(ALL_OPTIONS):
                omitted_count += 1
            else:
                sections.setdefault(group, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading.capitalize()):
                formatter.write_dl(records)
        if omitted_count:
            formatter.write(f"\n{omitted_count} more options: {ctx.command_path} --help-all\n")


def _print_all_options(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Print the help page with all options, and exit."""
    if value and not ctx.resilient_parsing:
        ctx.meta[ALL_OPTIONS] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _sentence(command: click.Command) -> str:
    """Return the whole first sentence of a command's help."""
    return command.get_short_help_str(limit=1000)


def grouped_option(group: str, *names: str, **more: Any) -> Callable[[Command], Command]:
    """Return ``click.option`` for an option below a heading.

    Args:
        group: The heading.
        names: Names of the option.
        more: Other arguments of ``click.option``.
    """
    return click.option(*names, cls=GroupedOption, group=group, **more)


def settings_options(names: Iterable[str] = ()) -> Callable[[Command], Command]:
    """Return a decorator that adds all or some options of ``Settings``, by group.

    ``Settings`` parses their values.

    Args:
        names: Names of settings. Empty: all.
    """
    setting_fields = [f for f in fields(Settings) if not names or f.name in names]

    def add(command: Command) -> Command:
        fields_by_group = [
            f for group in GROUPS for f in setting_fields if f.metadata["group"] == group
        ]
        for field in reversed(fields_by_group):
            command = _setting(field)(command)
        return command

    return add


def _setting(field: Field[Any]) -> Callable[[Command], Command]:
    hint, name = get_type_hints(Settings)[field.name], flag(field.name)
    meaning, _, gloss = field.metadata["meaning"].partition("; none: ")
    default = option_word(field.default) + (f" ({gloss})" if gloss else "")
    if field.name in {f.name for f in fields(Defaults)}:
        default = "set by the data set"
    if field.name == "protocol":
        default = "quick without GPU or cluster, else none"
    if hint is bool:
        name = f"{name}/--no-{name.removeprefix('--')}"
        default = "on" if field.default else "off"
    option_arguments: dict[str, Any] = {"help": f"{meaning}  [default: {default}]", "default": None}
    if hint is not bool:
        option_arguments["metavar"] = _metavar(field.name, hint)
        option_arguments["shell_complete"] = complete(
            REGISTRY_OF_SETTING.get(field.name), _choices(hint)
        )
    return grouped_option(field.metadata["group"], name, **option_arguments)


def _metavar(name: str, hint: Any) -> str:
    """Return the placeholder of a value in ``--help``: a word in capitals, or the choices."""
    if name in PLACEHOLDERS:
        return PLACEHOLDERS[name]
    parts = [part for part in (get_args(hint) or (hint,)) if part is not type(None)]
    if get_origin(hint) is Literal:
        return "|".join(map(str, parts))
    if get_origin(hint) is tuple:
        return "|".join(_choices(hint)) or "NUMBERS"
    labels = [
        "NUMBER" if part in (int, float) else "|".join(map(str, _choices(part))) or "NAME"
        for part in parts
    ]
    return "|".join(labels)


def _choices(hint: Any) -> tuple[str, ...]:
    """Return the literal strings among an option's values."""
    parts = (hint, *get_args(hint))
    return tuple(
        choice for part in parts if get_origin(part) is Literal for choice in get_args(part)
    )


def complete(
    registry: Registry[Any] | None, words: tuple[str, ...] = ()
) -> Callable[..., list[str]]:
    """Return a callback that completes the last item of a comma-separated list, without imports.

    Args:
        registry: Registry whose names are completions; None: no registry.
        words: Other completions.

    Returns:
        Callback for ``shell_complete`` of click.
    """

    def offer(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        prefix, comma, last = incomplete.rpartition(",")
        candidates = [*words, *(registry.names() if registry else ())]
        return [
            f"{prefix}{comma}{candidate}" for candidate in candidates if candidate.startswith(last)
        ]

    return offer
