"""Text of a suite's page: tested differences, ranks, values and the origin of its rows."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from fczoo.core.options import plural
from fczoo.core.registry import METHODS
from fczoo.reports.paper_style_tables import display_label
from fczoo.reports.run_config import recorded_config
from fczoo.reports.run_folder import RunRecord
from fczoo.reports.runs import Experiment, Line
from fczoo.reports.significance import LEVEL, CriticalDifference, holm_correction, interval, p_value
from fczoo.reports.tables import COLUMNS, entry_of
from fczoo.reports.text_format import option_word


@dataclass(frozen=True)
class Difference:
    """Difference of two rows in A_N, with its test."""

    setting: str
    higher: str  # name of the row with the higher mean over the shared seeds
    lower: str
    points: float
    bounds: tuple[float, float] | None  # 95 % interval; None: the difference does not vary
    p: float | None  # two-sided paired t test; None: not tested
    seeds: int  # number of shared seeds

    def sentence(self, corrected_p: float | None, several_settings: bool) -> str:
        """Describe the difference in one sentence.

        Args:
            corrected_p: p value corrected for all comparisons of the suite.
            several_settings: Whether to name the setting.
        """
        interval_text = (
            f", 95 % interval {self.bounds[0]:.1f} to {self.bounds[1]:.1f}" if self.bounds else ""
        )
        amount = f"{self.points:.1f} points{interval_text}"
        start = f"{self.setting}: " if several_settings else ""
        if corrected_p is None:
            constant_note = "the difference is the same for every seed"
            reason = "one seed" if self.seeds == 1 else constant_note
            return f"- {start}{self.higher} is {amount} above {self.lower} (not tested: {reason})."
        p = f"p = {corrected_p:.2g}"
        if corrected_p < LEVEL:
            return (
                f"- {start}{self.higher} is significantly better than {self.lower} ({p}; {amount})."
            )
        rows = f"{self.higher} and {self.lower}"
        return f"- {start}{rows} do not differ significantly ({p}; {amount})."


def heading(experiment: Experiment) -> str:
    """Return data set and partition of an experiment.

    Args:
        experiment: Runs of a suite in one setting.
    """
    return f"{experiment.settings['dataset']}, {experiment.bench_file.partition['spec']}"


def difference_sentences(
    experiments: Sequence[Experiment], compare: Sequence[tuple[str, str]]
) -> list[str]:
    """Describe each comparison in one sentence, with p values corrected for their number (Holm).

    Args:
        experiments: Runs of a suite, one experiment per setting.
        compare: Labels of the two rows of each comparison; rows without runs are left out.

    Returns:
        A sentence on the test, and a Markdown list; empty without comparisons.
    """
    differences = [x for e in experiments for pair in compare if (x := _difference(e, pair))]
    if not differences:
        return []
    p_values = {i: x.p for i, x in enumerate(differences) if x.p is not None}
    corrected_p = holm_correction(p_values)
    has_settings = len({x.setting for x in differences}) > 1
    count = plural(len(p_values), "comparison")
    test = (
        f"Paired t tests of A_N over the seeds, with p values corrected for {count} (Holm) and "
        "95 % intervals that are not corrected:"
    )
    return [
        test if p_values else "Differences of A_N:",
        "\n".join(x.sentence(corrected_p.get(i), has_settings) for i, x in enumerate(differences)),
    ]


def _difference(experiment: Experiment, pair: tuple[str, str]) -> Difference | None:
    """Return the difference of two rows; None if a row is missing or they share no seed."""
    lines = {line.label: line for line in experiment.lines}
    entries = [entry_of(lines[label], COLUMNS["A_N"]) for label in pair if label in lines]
    if len(entries) < 2 or entries[0] is None or entries[1] is None:
        return None
    first, second = entries[0], entries[1]
    seeds = sorted(first.by_seed.keys() & second.by_seed.keys())
    if not seeds:
        return None
    by_seed = [first.by_seed[seed] - second.by_seed[seed] for seed in seeds]
    names = [row_name(lines[label]) for label in pair]
    if statistics.fmean(by_seed) < 0:
        names, by_seed = names[::-1], [-difference for difference in by_seed]
    points, p = statistics.fmean(by_seed), p_value(first, second)
    bounds = interval(by_seed)
    return Difference(heading(experiment), names[0], names[1], points, bounds, p, len(seeds))


def row_name(line: Line) -> str:
    """Return the method's name as in its paper, or the row's own name in the suite.

    Args:
        line: Row of a suite.
    """
    return display_label(line) if line.label == line.records[0].method else line.label


def rank_sentence(ranks: CriticalDifference) -> str:
    """Describe mean ranks, their test, and how to read their picture.

    Args:
        ranks: Mean ranks over seeds and settings.
    """
    blocks = f"{ranks.blocks} combinations of seed and setting"
    text = f"Mean ranks of {len(ranks.ranks)} rows over {blocks}"
    if ranks.p >= LEVEL:
        return (
            f"{text}: Friedman's test finds no significant difference (p = {ranks.p:.2g}), so the "
            "ranks are not compared."
        )
    best = next(iter(ranks.ranks))
    worse_count = sum(rank - ranks.ranks[best] > ranks.distance for rank in ranks.ranks.values())
    verb = "is" if worse_count == 1 else "are"
    note = (
        "In the diagram, two rows whose bars overlap do not differ significantly; the shaded area "
        "marks the bar of the best row."
        if ranks.is_informative
        else "These two numbers are so close that the page has no diagram."
    )
    return (
        f"{text}: Friedman's test finds a significant difference (p = {ranks.p:.2g}). The critical "
        f"difference is {ranks.distance:.1f} ranks (Nemenyi, 5 %); the largest possible difference "
        f"is {len(ranks.ranks) - 1}. {note} {best} has the best rank, {ranks.ranks[best]:.1f}; "
        f"{worse_count} of {len(ranks.ranks) - 1} others {verb} significantly worse. Upper bounds "
        "and ablations have no rank."
    )


def changed_options(line: Line) -> str:
    """Format the options of a row that the user or a search changed.

    Args:
        line: Row of a suite.
    """
    config = recorded_config(line.records[0])
    if config.method not in METHODS.names():
        return "unknown: the method is not installed"
    options = config.changed_options("--set", "--tuned")
    short = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in options.items()}
    return ", ".join(f"{k}={option_word(v)}" for k, v in short.items()) or "–"


def _origin(record: RunRecord) -> str:
    """Describe the versions and processors of a run."""
    versions = record.result.versions if record.result else {}
    hardware = record.bench_file.hardware
    processors = [str(hardware.get("cpu", "unknown processor")), *hardware.get("gpus", [])]
    names = ("fczoo", "python", "torch")
    return "; ".join(
        [*(f"{name} {versions.get(name, '?')}" for name in names), " and ".join(processors)]
    )


def letters_of_origins(experiments: Sequence[Experiment]) -> dict[str, str]:
    """Assign a letter to each origin (versions and processors) of runs, most frequent first.

    Args:
        experiments: Runs of a suite.

    Returns:
        Letters by origin.
    """
    records = [record for e in experiments for line in e.lines for record in line.records]
    origins = [_origin(record) for record in records]
    by_frequency = sorted(dict.fromkeys(origins), key=lambda origin: -origins.count(origin))
    return {origin: chr(ord("a") + i) for i, origin in enumerate(by_frequency)}


def letters_of(line: Line, origins: Mapping[str, str]) -> str:
    """Return the letters of a row's origins.

    Args:
        line: Row of a suite.
        origins: Letters by origin, from ``letters_of_origins``.
    """
    return ", ".join(sorted({origins[_origin(record)] for record in line.records}))


def replication_note(replications: Iterable[RunRecord]) -> str:
    """Describe the column of replications; empty without any.

    Args:
        replications: Repeated runs.
    """
    origins = [_origin(record) for record in replications]
    if not origins:
        return ""
    places = " and ".join(dict.fromkeys(origins))
    return (
        f"The column of replications has the A_N of {plural(len(origins), 'repeated run')} "
        f"({places}) minus A_N of the runs above, as the mean difference over pairs of runs with "
        "equal code and options."
    )


def origin_table(origins: Mapping[str, str]) -> str:
    """Format the table of versions and processors.

    Args:
        origins: Letters by origin.
    """
    rows = [[letter, origin] for origin, letter in origins.items()]
    return tabulate(rows, ["origin", "versions and processor"], tablefmt="github")
