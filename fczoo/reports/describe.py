"""What was run, in words: the heading of an experiment's tables and the notes below them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fczoo.data.asynchronous import in_stages
from fczoo.reports.chosen import chosen
from fczoo.reports.contamination import contamination_of
from fczoo.reports.run_folder import About
from fczoo.reports.runs import Experiment, Line
from fczoo.reports.words import early_tasks, option_word
from fczoo.security.outliers import FAR


def describe(experiment: Experiment) -> str:
    """Describe data and split, backbone and schedule, and attack, defence and privacy where any is on."""
    known = contamination_of(experiment.about)
    lines = [_data(experiment), _training(experiment), "; ".join(conditions(experiment)), known]
    return "\n".join(line for line in lines if line)


def _data(experiment: Experiment) -> str:
    s, result, split = experiment.settings, experiment.first, experiment.split
    sizes = sorted(set(result.task_sizes))
    classes = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    kind = s["tasks"] if isinstance(s["tasks"], str) else "tasks"
    if "class-order" in s["vary"]:
        order = "class order by the run's seed"
    elif s["class_order"] != "natural":
        order = "given class order"
    elif s["class_order_seed"] is None:
        order = "natural class order"
    else:
        order = f"class order seed {s['class_order_seed']}"
    joining = f" and {s['joining']} more a task" if s["joining"] else ""
    if in_stages(s["moving"], s["task_order"]):
        number = "" if isinstance(s["tasks"], str) else f"{experiment.task_count} "
        kind = f"stages of {number}{kind},"
        joining = f", {s['moving'] or 'all'} of which go on to their next task at a time"
        joining += ", each in an order of its own" if s["task_order"] == "own" else ""
    spec, sha256 = experiment.about.partition["spec"], experiment.about.partition["sha256"]
    drawn = "by the run's seed" if "partition" in s["vary"] else f"seed {split.seed}, {sha256[:8]}"
    each = f" ({s['train_per_class']} per class)" if s["train_per_class"] else ""
    training = f"{split.images} training{each} and " if split.counts else ""
    part = "" if _only_surveys(experiment) else f", participation {s['participation']:g}"
    return (
        f"{s['dataset']}: {len(result.task_sizes)} {kind} of {classes} classes, "
        f"{training}{sum(result.test_counts)} test images, {order}; "
        f"{s['clients']} clients{joining}, {spec} ({drawn}){part}"
    )


def _only_surveys(experiment: Experiment) -> bool:
    """Return whether no row of the table trains, so that the schedule has no effect on it."""
    results = [result for line in experiment.lines for result in line.results]
    return all(r.client_rounds and not r.trained_scalars and "training" not in r.phases for r in results)


def _training(experiment: Experiment) -> str:
    s, backbone = experiment.settings, experiment.about.backbone
    source = "".join(f"{word}: " for word in followed(s))
    devices = ", ".join(dict.fromkeys(runs.about.device for runs in experiment.runs))
    pixels = f" at {s['image_size']} px" if s["image_size"] else ""
    schedule = (
        f"{s['rounds']} rounds x {s['epochs']} epochs, batch {s['batch_size']}, augmentation {s['augment']}"
    )
    return (
        f"{backbone['name']}{pixels} ({backbone['sha256'][:8]}, {s['precision']}, {devices}); "
        f"{source}{'no training' if _only_surveys(experiment) else schedule}; "
        f"seeds {', '.join(map(str, experiment.seeds))}{_moved(experiment)}"
    )


def followed(settings: Mapping[str, Any]) -> list[str]:
    """Whose schedule a run took: a protocol's, released code's, or nobody's."""
    protocol, release = settings["protocol"], settings["as_released"]
    return [*([f"protocol {protocol}"] if protocol else []), *([f"as {release}"] if release else [])]


def _moved(experiment: Experiment) -> str:
    """What the seeds of several runs move, so what their spread is a spread of."""
    if len(experiment.seeds) == 1:
        return ""
    words = [word.replace("-", " ") for word in experiment.settings["vary"]]
    listed = f"{', '.join(words[:-1])} and {words[-1]}" if words[1:] else f"{words[0]} alone"
    return f" of {listed}"


def conditions(experiment: Experiment) -> list[str]:
    """Attack, defence, loss of uploads and privacy, as far as they are on.

    Numbers with and without them do not compare.
    """
    s, trains = experiment.settings, not _only_surveys(experiment)
    found = []
    if s["attack"] is not None:
        found.append(f"attack {s['attack']} by {s['attackers']:g} of the clients")
    if s["aggregator"] is not None and trains:
        found.append(f"aggregator {s['aggregator']}")
    if s["local"] is not None:
        found.append(f"local training {s['local']}")
    if s["outliers"] is not None:
        found.append(f"outliers beyond {s['outliers']:g} median distances left out")
    if s["merge_statistics"] is not None:
        found.append(f"class statistics merged from their {s['merge_statistics']}")
    if s["drop_rate"] and trains:
        found.append(f"drop rate {s['drop_rate']:g}")
    if s["min_clients"] > 1:
        found.append(f"at least {s['min_clients']} clients")
    if s["min_class_count"] > 1:
        found.append(f"statistics of at least {s['min_class_count']} images of a class")
    if s["dp_clip"] is not None:
        found.append(f"uploads clipped to norm {s['dp_clip']:g}")
    if s["dp_noise"]:
        found.append(f"noise {s['dp_noise']:g}{_epsilon(experiment)}")
    return found


def _epsilon(experiment: Experiment) -> str:
    """The privacy that the noise gives, as the runs recorded it."""
    privacy = [r.privacy for line in experiment.lines for r in line.results if "epsilon" in r.privacy]
    if not privacy:
        return ""
    low, high = (choose(p["epsilon"] for p in privacy) for choose in (min, max))
    epsilon = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
    return f", epsilon {epsilon} at delta {experiment.settings['dp_delta']:g}"


def notes(experiment: Experiment) -> list[str]:
    """Return notes on data and methods, warnings, and one line for each unfinished run."""
    found = list(dict.fromkeys(r for runs in experiment.runs for r in runs.about.data.get("remarks", ())))
    found += [f"{line.label}: {line.remark}" for line in experiment.lines if line.remark]
    found += dict.fromkeys(_tuned(runs.about) for runs in experiment.runs if runs.about.tuned)
    if experiment.settings["dp_noise"]:
        found.append(
            f"epsilon, at delta {experiment.settings['dp_delta']:g}, is for all data of one client together; "
            f"losses, numbers of images and diagnostics carry no noise"
        )
    if experiment.settings["dp_subsampling"]:
        found.append("epsilon counts on nobody seeing which clients are drawn, nor whose an upload is")
    for line in experiment.lines:
        texts = (*_changed_options(experiment, line), _rejections(line), _far(line))
        found += [f"{line.label}: {text}" for text in texts if text]
    found += [f"warning: {line}" for line in warnings_of(experiment)]
    return found + [f"not finished: {c.method} seed {c.seed}: {c.problem}" for c in experiment.unfinished]


def warnings_of(experiment: Experiment) -> list[str]:
    """Return the warnings of all run folders of an experiment, each once; remarks on images are others."""
    abouts = [runs.about for runs in experiment.runs]
    remarks = {remark for about in abouts for remark in about.data.get("remarks", ())}
    return [w for w in dict.fromkeys(w for about in abouts for w in about.warnings) if w not in remarks]


def _tuned(about: About) -> str:
    """How the options of some methods were found: a table shows with how much effort."""
    tuned = about.tuned
    each = f"{tuned['trials']} trials of {tuned['image_steps']} image-steps each"
    tasks = early_tasks(tuned["tasks"])
    where = f"{tasks} of {tuned['dataset']}, in an order and a split of their own"
    other = [f"{k}={option_word(v)}" for k, v in tuned.get("other_settings", {}).items()]
    if tuned.get("weights", about.backbone["sha256"]) != about.backbone["sha256"]:
        other.append("other weights of the backbone")
    under = f", with {', '.join(other)}" if other else ""
    scored = f", scored on {tuned['scored']} images" if "scored" in tuned else ""
    return f"values found by fczoo tune, {each}, on {where}{scored}{under}: {', '.join(tuned['methods'])}"


def _changed_options(experiment: Experiment, line: Line) -> list[str]:
    """The options of a method that are not its defaults: the user's, the protocol's, the data set's."""
    options = chosen(line)
    texts = (
        (options.by_user, "other than by default"),
        (options.stated, options.followed),
        (options.for_dataset, f"the method's values for {experiment.settings['dataset']}"),
    )
    return [f"{_listed(values)}, {text}" for values, text in texts if values]


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={option_word(value)}" for name, value in options.items())


def _rejections(line: Line) -> str:
    """How many uploads were turned away or lost, with the three most frequent reasons."""
    reasons = Counter(r["reason"] for result in line.results for r in result.rejected)
    if not reasons:
        return ""
    often = "; ".join(f"{number} x {reason}" for reason, number in reasons.most_common(3))
    return f"uploads turned away or lost: {reasons.total()}, {often}{'; …' if len(reasons) > 3 else ''}"


def _far(line: Line) -> str:
    """Whose class statistics lay far from the other clients' and were used all the same."""
    far = sum((Counter(result.far) for result in line.results), Counter[str]())
    if not far:
        return ""
    named = ", ".join(f"client {client} in {number}" for client, number in far.most_common(3))
    return (
        f"uploads with class statistics more than {FAR:g} median distances from the other clients': {named}"
        f"{' …' if len(far) > 3 else ''}; --outliers leaves them out, --merge-statistics bears them"
    )
