"""What a benchmark is called: data set, protocol, backbone and budget, in words and as the name of a file."""

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from fczoo.reports.describe import conditions, followed
from fczoo.reports.runs import Experiment, identity


@dataclass(frozen=True)
class Heading:
    """The four things that make a benchmark, in words."""

    data: str
    protocol: str
    backbone: str
    budget: str
    file: str  # name of its page

    @property
    def title(self) -> str:
        return f"{self.data}, {self.protocol}"

    @property
    def subtitle(self) -> str:
        return f"{self.backbone}; {self.budget}"


def heading(experiment: Experiment) -> Heading:
    """The words for an experiment, and a file name that no other has."""
    s = experiment.settings
    backbone = experiment.about.backbone["name"].split(".")[0]
    if s["image_size"]:
        backbone += f" at {s['image_size']} px"
    budget = [f"{s['rounds']} x {s['epochs']} epochs a task", _images(s)]
    if s["precision"] != "fp32":
        budget.append(s["precision"])
    words = (s["dataset"], s["partition"], experiment.about.backbone["name"].split("_patch")[0])
    data = {name: value for name, value in experiment.about.data.items() if name != "remarks"}
    same = (*identity(experiment.about), *sorted(data.items()))
    unique = hashlib.sha256(repr(same).encode()).hexdigest()[:6]
    name = "-".join([*words, f"{s['rounds']}x{s['epochs']}", unique])
    return Heading(
        data=s["dataset"],
        protocol=_protocol(experiment, s),
        backbone=backbone,
        budget=", ".join(budget),
        file=f"{re.sub(r'[^a-z0-9.]+', '-', name.lower()).strip('-.')}.html",
    )


def _protocol(experiment: Experiment, s: dict[str, Any]) -> str:
    count = len(experiment.first.task_sizes)
    kind = s["tasks"] if isinstance(s["tasks"], str) else "tasks" if count > 1 else "task"
    words = [f"{count} {kind}", f"{s['clients']} clients", experiment.about.partition["spec"]]
    moved = [word.replace("-", " ") for word in s["vary"] if word != "training"]
    by_seed = [f"{' and '.join(moved)} by seed"] if moved else []
    return ", ".join([*words, *by_seed, *followed(s), *conditions(experiment)])


def _images(s: dict[str, Any]) -> str:
    return f"{s['train_per_class']} images a class" if s["train_per_class"] else "all images"
