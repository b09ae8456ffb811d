"""Captions of an experiment's tables: the heading above and the notes below."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.options import plural
from fczoo.core.registry import create_method
from fczoo.data.client_stages import uses_stages
from fczoo.data.stream_variants import describe_variants
from fczoo.reports.run_config import DATASET, SET, TUNED, recorded_config
from fczoo.reports.run_folder import BenchFile
from fczoo.reports.runs import Experiment, Line
from fczoo.reports.text_format import early_tasks, option_word
from fczoo.security.outliers import EXTREME_FACTOR
from fczoo.security.privacy import has_class_counts


def describe(experiment: Experiment) -> str:
    """Describe data, partition, backbone, schedule, and any attack, defence or privacy.

    Args:
        experiment: Experiment of a table.

    Returns:
        Two to four lines.
    """
    pretraining = experiment.bench_file.contamination
    lines = [
        _data(experiment),
        _training(experiment),
        "; ".join(conditions(experiment)),
        pretraining,
    ]
    return "\n".join(line for line in lines if line)


def _data(experiment: Experiment) -> str:
    s, result, split = experiment.settings, experiment.first_result, experiment.split
    sizes = sorted(set(result.task_sizes))
    first = "the first " if s["stop_after_tasks"] else ""
    classes = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    kind = s["tasks"] if isinstance(s["tasks"], str) else "tasks"
    if "class-order" in s["vary"]:
        order = "class order drawn per seed"
    elif s["class_order"] != "natural":
        order = "given class order"
    elif s["class_order_seed"] is None:
        order = "natural class order"
    else:
        order = f"class order seed {s['class_order_seed']}"
    joining = f" and {s['joining']} more per task" if s["joining"] else ""
    tasks = f"{len(result.task_sizes)} {kind}"
    if uses_stages(s["moving"], s["task_order"]):
        number = "" if isinstance(s["tasks"], str) else f"{experiment.task_count} "
        tasks = f"{number}{kind} in {len(result.task_sizes)} stages"
        joining = f", {s['moving'] or 'all'} continue to their next task at each stage"
        joining += ", each in its own order" if s["task_order"] == "own" else ""
    spec, sha256 = (
        experiment.bench_file.partition["spec"],
        experiment.bench_file.partition["sha256"],
    )
    draw_source = (
        "drawn per seed" if "partition" in s["vary"] else f"seed {split.seed}, {sha256[:8]}"
    )
    per_class_text = ""
    if limit := s["train_per_class"]:
        class_count = sum(result.task_sizes) if first else len(result.class_order)
        has_cap = split.images < limit * class_count
        per_class_text = f" ({'at most ' if has_cap else ''}{limit} per class)"
    training = f"{split.images} training{per_class_text} and " if split.counts else ""
    start = ""
    if s["start_from"]:
        number = f" {result.start['tasks']}" if result.start else ""
        start = f" (the first{number} learned by the kept model {s['start_from']})"
    variant = "".join(f", {words}" for words in describe_variants(s))
    participation_text = (
        "" if _has_no_training(experiment) else f", participation {s['participation']:g}"
    )
    return (
        f"{s['dataset']}: {first}{tasks} of {classes} classes{start}, "
        f"{training}{sum(result.test_counts)} test images, {order}{variant}; "
        f"{s['clients']} clients{joining}, {spec} ({draw_source}){participation_text}"
    )


def _has_no_training(experiment: Experiment) -> bool:
    """Return whether no method of the table trains, so that the schedule has no effect."""
    results = [result for line in experiment.lines for result in line.results]
    return all(
        r.client_rounds and not r.trained_scalars and "training" not in r.phases for r in results
    )


def _training(experiment: Experiment) -> str:
    s, backbone = experiment.settings, experiment.bench_file.backbone
    source = "".join(f"{name}: " for name in schedule_sources(s))
    devices = ", ".join(dict.fromkeys(runs.bench_file.device for runs in experiment.runs))
    pixels = f" at {s['image_size']} px" if s["image_size"] else ""
    pool = f", pool {s['pool']}" if s["pool"] else ""
    schedule = (
        f"{s['rounds']} rounds x {s['epochs']} epochs, batch {s['batch_size']}, augmentation "
        f"{s['augment']}"
    )
    return (
        f"{backbone['name']}{pixels}{pool} (weights {backbone['sha256'][:8]}, {s['precision']}, "
        f"{devices}); {source}{'no training' if _has_no_training(experiment) else schedule}; "
        f"seeds {', '.join(map(str, experiment.seeds))}{_seed_sources(experiment)}"
    )


def schedule_sources(settings: Mapping[str, Any]) -> list[str]:
    """Return the source of a run's schedule: a protocol, released code, or none.

    Args:
        settings: Settings of the run with all fields.
    """
    protocol, release = settings["protocol"], settings["as_released"]
    return [
        *([f"protocol {protocol}"] if protocol else []),
        *([f"as {release}"] if release else []),
    ]


def _seed_sources(experiment: Experiment) -> str:
    """Describe what the seeds vary."""
    if len(experiment.seeds) == 1:
        return ""
    draws = "the methods' draws" if _has_no_training(experiment) else "training"
    words = [
        draws if name == "training" else name.replace("-", " ")
        for name in experiment.settings["vary"]
    ]
    word_list = f"{', '.join(words[:-1])} and {words[-1]}" if words[1:] else f"{words[0]} only"
    return f" of {word_list}"


def conditions(experiment: Experiment) -> list[str]:
    """Describe the attack, defence, dropout and privacy of the runs.

    Results under different conditions are not comparable.

    Args:
        experiment: Experiment of a table.

    Returns:
        One text per condition.
    """
    s, trains = experiment.settings, not _has_no_training(experiment)
    descriptions = []
    if s["attack"] is not None:
        descriptions.append(f"attack {s['attack']} by {100 * s['attackers']:g} % of the clients")
    if s["aggregator"] is not None and trains:
        descriptions.append(f"aggregator {s['aggregator']}")
    if s["local"] is not None:
        descriptions.append(f"local training {s['local']}")
    if s["server_optimizer"] is not None:
        descriptions.append(f"server optimizer {s['server_optimizer']}")
    if s["compress"] is not None:
        feedback = "" if s["dp_clip"] is None else " without error feedback"
        descriptions.append(f"uploads compressed by {s['compress']}{feedback}")
    if s["client_devices"] is not None:
        descriptions.append(f"client devices {s['client_devices']}")
    if s["deadline"] is not None and trains:
        descriptions.append(f"deadline {s['deadline']:g} s")
    if s["over_select"] is not None and trains:
        descriptions.append(f"over-selection {s['over_select']:g}")
    if s["outliers"] is not None:
        descriptions.append(f"outliers beyond {s['outliers']:g} times the median distance left out")
    if s["merge_statistics"] is not None:
        descriptions.append(f"class statistics merged by {s['merge_statistics']}")
    if s["drop_rate"] and trains:
        descriptions.append(f"drop rate {s['drop_rate']:g}")
    if s["min_clients"] > 1:
        descriptions.append(f"at least {s['min_clients']} valid uploads per round")
    if s["min_class_count"] > 1 and _withholds_classes(experiment):
        descriptions.append(f"class statistics of at least {s['min_class_count']} images per class")
    if s["dp_clip"] is not None:
        descriptions.append(f"uploads clipped to norm {s['dp_clip']:g}")
    if s["dp_noise"]:
        descriptions.append(f"noise {s['dp_noise']:g}{_epsilon(experiment)}")
    return descriptions


def _withholds_classes(experiment: Experiment) -> bool:
    """Return whether a method of the table may upload class counts."""
    for runs in experiment.runs:
        for name, options in runs.bench_file.methods.items():
            try:
                training = create_method(name, **options).training()
            except FczooError:
                return True
            if has_class_counts(training.uploads):
                return True
    return False


def _epsilon(experiment: Experiment) -> str:
    """Describe the epsilon that the runs recorded."""
    privacy = [
        r.privacy for line in experiment.lines for r in line.results if "epsilon" in r.privacy
    ]
    if not privacy:
        return ""
    low, high = (extreme(p["epsilon"] for p in privacy) for extreme in (min, max))
    epsilon = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
    return f", epsilon {epsilon} at delta {experiment.settings['dp_delta']:g}"


def notes(experiment: Experiment) -> list[str]:
    """Return notes on data and methods, warnings, and one line per unfinished run.

    Args:
        experiment: Experiment of a table.
    """
    remarks = dict.fromkeys(
        r for runs in experiment.runs for r in runs.bench_file.data.get("remarks", ())
    )
    lines = [
        *remarks,
        *(f"{line.label}: {line.remark}" for line in experiment.lines if line.remark),
    ]
    lines += dict.fromkeys(
        _search_note(runs.bench_file) for runs in experiment.runs if runs.bench_file.tuned
    )
    if experiment.settings["dp_noise"]:
        lines.append(
            f"epsilon, at delta {experiment.settings['dp_delta']:g}, is for all data of one "
            "client; losses, numbers of images and diagnostics have no noise and are not covered"
        )
    if experiment.settings["dp_subsampling"]:
        lines.append(
            "epsilon is valid only if the sampled clients and the sender of each upload are secret"
        )
    for line in experiment.lines:
        texts = (*_changed_options(experiment, line), _rejections(line), _outlier_note(line))
        lines += [f"{line.label}: {text}" for text in texts if text]
    lines += [f"warning: {line}" for line in warnings_of(experiment) if line not in remarks]
    return lines + [
        f"not finished: {c.method} seed {c.seed}: {c.problem}" for c in experiment.unfinished_runs
    ]


def warnings_of(experiment: Experiment) -> list[str]:
    """Return the distinct warnings of all run folders of an experiment.

    Args:
        experiment: Experiment of a table.
    """
    return list(
        dict.fromkeys(line for runs in experiment.runs for line in runs.bench_file.warnings)
    )


def _search_note(bench_file: BenchFile) -> str:
    """Describe the search that found the options of some methods, and its effort."""
    search = bench_file.tuned
    trials_text = f"{search['trials']} trials of {search['image_steps']} image-steps each"
    tasks = early_tasks(search["tasks"])
    data_words = f"{tasks} of {search['dataset']}, with a separate class order and partition"
    differences = [f"{k}={option_word(v)}" for k, v in search.get("other_settings", {}).items()]
    if search.get("weights", bench_file.backbone["sha256"]) != bench_file.backbone["sha256"]:
        differences.append("other weights of the backbone")
    differences_text = f", with {', '.join(differences)}" if differences else ""
    scoring = f", scored on {search['scored']} images" if "scored" in search else ""
    return (
        f"values found by fczoo tune, {trials_text}, on {data_words}{scoring}{differences_text}: "
        f"{', '.join(search['methods'])}"
    )


def _changed_options(experiment: Experiment, line: Line) -> list[str]:
    """List options that are not defaults, by origin: user, protocol or data set."""
    config = recorded_config(line.records[0])
    texts = (
        ([SET], "set by the user"),
        ([TUNED], "found by fczoo tune"),
        (config.source_names, ", ".join(config.source_names)),
        ([DATASET], f"the method's values for {experiment.settings['dataset']}"),
    )
    lists = ((config.changed_options(*origins), text) for origins, text in texts)
    return [f"{_option_list(options)}, {text}" for options, text in lists if options]


def _option_list(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={option_word(value)}" for name, value in options.items())


def _rejections(line: Line) -> str:
    """Describe the number of rejected and lost uploads and the three most frequent reasons."""
    reasons = Counter(r["reason"] for result in line.results for r in result.rejected)
    if not reasons:
        return ""
    reasons_text = "; ".join(f"{number} x {reason}" for reason, number in reasons.most_common(3))
    ending = "; …" if len(reasons) > 3 else ""
    return f"uploads rejected or lost: {reasons.total()}, {reasons_text}{ending}"


def _outlier_note(line: Line) -> str:
    """Describe clients whose class statistics were far from the others' but used."""
    counts = sum((Counter(result.far) for result in line.results), Counter[str]())
    if not counts:
        return ""
    clients = ", ".join(
        f"client {client} ({plural(number, 'upload')})" for client, number in counts.most_common(3)
    )
    return (
        f"class statistics more than {EXTREME_FACTOR:g} times the median distance from the "
        f"clients' centre: {clients}{', …' if len(counts) > 3 else ''}; exclude them with "
        "--outliers, or merge robustly with --merge-statistics"
    )
