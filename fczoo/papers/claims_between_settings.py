"""Claims over two settings: the loss of a method from the first setting to the second."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from fczoo.core.options import flag
from fczoo.papers.pair_claims import Claim, ClaimSide, Verdict, least_changed_lines, verdict_of_gain
from fczoo.papers.printed_numbers import Paper, get_paper, plain_split
from fczoo.reports.runs import Experiment, Line, identity, is_rate
from fczoo.reports.significance import SeedValues
from fczoo.reports.tables import COLUMNS, Column, entry_of
from fczoo.reports.text_format import option_word

Settings = Mapping[str, Any]  # partition, clients, participation, tasks, rounds


@dataclass(frozen=True)
class TwoSettingClaim(Claim):
    """Claim that a method loses less between two settings than another, or at most some points."""

    paper: str
    source: str  # table or figure of the paper
    dataset: str
    figure: str
    start: Settings
    end: Settings
    better: Mapping[str, Any]  # method, and options
    drops: list[float]  # printed losses in points: of ``better``, then of ``worse``
    worse: Mapping[str, Any] | None = None
    most: float | None = None  # without ``worse``: points that ``better`` may lose
    # settings of both runs, and options METHOD.OPTION, that differ from the protocol
    shared: Settings = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    small_start: Settings = field(default_factory=dict)  # on digits; empty: ``start``
    small_end: Settings = field(default_factory=dict)  # on digits; empty: ``end``

    @property
    def citation(self) -> str:
        return f"{get_paper(self.paper).name} {self.source}"

    @property
    def sides(self) -> tuple[ClaimSide, ...]:
        """Return the better side, and the worse one if there is one."""
        side_tables = [self.better, *([self.worse] if self.worse else [])]
        return tuple(ClaimSide(side["method"], side.get("options", {})) for side in side_tables)

    @property
    def gain(self) -> float:
        """Return the printed advantage in points."""
        return (self.drops[1] if self.worse else self.most or 0.0) - self.drops[0]

    @property
    def printed_losses(self) -> str:
        """Describe source, settings and printed losses in one sentence."""
        start, end = (
            ", ".join(f"{name} {option_word(value)}" for name, value in settings.items())
            for settings in (self.start, self.end)
        )
        losses = [
            f"{side.method} loses {drop:g}"
            for side, drop in zip(self.sides, self.drops, strict=True)
        ]
        return (
            f"{self.citation}, {self.dataset}: from {start} to {end}, {' and '.join(losses)} "
            f"points of {self.figure}."
        )

    @property
    def column(self) -> Column:
        return COLUMNS[self.figure]

    @property
    def digits_partition(self) -> None:
        return None

    @property
    def regime(self) -> str:
        return "any"

    @property
    def digits_runs(self) -> dict[str, tuple[ClaimSide, Settings]]:
        settings = {"start": self._settings("digits", 0), "end": self._settings("digits", 1)}
        sides = zip(("better", "worse"), self.sides, strict=False)
        return {
            f"{name}-{end_name}": (side, values)
            for (name, side), (end_name, values) in product(sides, settings.items())
        }

    @property
    def full_scale_commands(self) -> list[str]:
        commands = []
        for name, side in zip(("better", "worse"), self.sides, strict=False):
            for end_name, settings in (("start", self.start), ("end", self.end)):
                words = [f"--protocol {self.paper} --methods {side.method}"]
                words += [f"--dataset {self.dataset}"]
                for key, value in {**self.shared, **settings}.items():
                    word = option_word(self._full_split(value) if key == "partition" else value)
                    words.append(f"{flag(key)} {word}")
                words += [
                    f"--set {side.method}.{k}={option_word(v)}" for k, v in side.options.items()
                ]
                side_rates = {
                    k: v for k, v in self.rates.items() if k.startswith(f"{side.method}.")
                }
                words += [f"--set {name}={option_word(rate)}" for name, rate in side_rates.items()]
                words.append(f"--out results/claims/{self.name}/{name}-{end_name}")
                commands.append(f"  fczoo bench {' '.join(words)}")
        return ["At the paper's scale:", *commands]

    def _full_split(self, split: str) -> str:
        """Return the protocol's spec of a split, with all arguments of its partitioner."""
        paper: Paper = get_paper(self.paper)
        specs = paper.protocol.partitions.get(self.dataset, ())
        return next((spec for spec in specs if plain_split(spec) == split), split)

    def verdicts(self, experiments: Sequence[Experiment]) -> list[tuple[Verdict, str]]:
        """Judge the claim in every pair of experiments that differ only in its settings.

        Args:
            experiments: Experiments to search.

        Returns:
            A verdict with its explanation for each pair with all rows.
        """
        starts, ends = (
            [e for e in experiments if _has_settings(e, self._settings(e.settings["dataset"], i))]
            for i in (0, 1)
        )
        judgements = []
        for start, end in product(starts, ends):
            if self._group(start) != self._group(end):
                continue
            pairs = [self._pairs(start, end, side) for side in self.sides]
            judgements += [self._judge(start, lines) for lines in product(*pairs)]
        return judgements

    def _settings(self, dataset: str, index: int) -> Settings:
        """Return the settings at the start (0) or at the end (1); digits may have other ones."""
        small = (self.small_start, self.small_end)[index] if dataset == "digits" else {}
        return small or (self.start, self.end)[index]

    def _group(self, experiment: Experiment) -> tuple[str, ...]:
        """Return a key that is equal for two experiments that the claim compares."""
        names = set(self._settings(experiment.settings["dataset"], 0))
        if "tasks" in names:  # papers divide their rounds by the tasks
            names.add("rounds")
        key = identity(experiment.bench_file, "partition", *names)
        return key if "partition" in names else (*key, experiment.bench_file.partition["spec"])

    def _pairs(
        self, start: Experiment, end: Experiment, side: ClaimSide
    ) -> list[tuple[Line, Line]]:
        """Return pairs of a side's rows in both experiments; learning rates may differ."""
        rows = [
            least_changed_lines([x for x in e.lines if self.matches(x, side)], side)
            for e in (start, end)
        ]
        return [(a, b) for a, b in product(*rows) if _fixed_options(a) == _fixed_options(b)]

    def _judge(
        self, start: Experiment, lines: tuple[tuple[Line, Line], ...]
    ) -> tuple[Verdict, str]:
        losses = [self._losses(*pair) for pair in lines]
        seeds = sorted(set.intersection(*(set(loss) for loss in losses)))
        allowed_losses = losses[1] if self.worse else dict.fromkeys(seeds, self.most or 0.0)
        first = SeedValues({seed: -losses[0][seed] for seed in seeds})
        second = SeedValues({seed: -allowed_losses[seed] for seed in seeds})
        gain = SeedValues({seed: allowed_losses[seed] - losses[0][seed] for seed in seeds})
        origin = f"{start.settings['dataset']}, {lines[0][0].records[0].place}"
        return verdict_of_gain(gain, first, second, origin)

    def _losses(self, start: Line, end: Line) -> dict[int, float]:
        """Return the loss in points from one setting to the other, by seed."""
        values = [
            entry.by_seed if (entry := entry_of(line, self.column)) else {} for line in (start, end)
        ]
        seeds = values[0].keys() & values[1].keys()
        return {seed: self.gain_of(values[0][seed] - values[1][seed]) for seed in seeds}


def _has_settings(experiment: Experiment, settings: Settings) -> bool:
    """Return whether runs have some settings; splits are compared in the papers' short form."""
    ours = {**experiment.settings, "tasks": experiment.task_count}
    ours["partition"] = plain_split(experiment.bench_file.partition["spec"])
    return all(ours[name] == value for name, value in settings.items())


def _fixed_options(line: Line) -> dict[str, Any]:
    return {k: v for k, v in line.results[0].options.items() if not is_rate(k)}
