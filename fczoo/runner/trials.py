"""The images of a trial of ``fczoo tune``: training images alone, some to train on, some to score it."""

from dataclasses import dataclass, replace

import numpy as np

from fczoo.core.errors import FczooError
from fczoo.core.seeds import numpy_stream
from fczoo.data.dataset import Images, rows
from fczoo.data.partition import Partition
from fczoo.data.stream import Stream
from fczoo.federation.settings import Settings
from fczoo.federation.stream import arranged, whole_stream


@dataclass(frozen=True)
class Effort:
    """How much is spent on each method."""

    trials: int = 16
    tasks: int = 3  # first tasks of the stream that a trial runs
    held_out: float = 0.2  # part of each class's training images on which a trial is scored
    score_per_class: int | None = None  # so many instead, beside those that ``train_per_class`` keeps
    seed: int = 0


def tasks_of_trial(settings: Settings, asked: int) -> int:
    """The first ``asked`` tasks, or all where there are fewer."""
    return min(asked, settings.task_count)


def trial_stream(settings: Settings, effort: Effort) -> tuple[Stream, Partition]:
    """What a trial trains on and is scored on, and who owns which image when."""
    return arranged(settings, trial_images(settings, effort))


def trial_images(settings: Settings, effort: Effort) -> Stream:
    """The first tasks alone; of each class a part of the training images stands in for the test images."""
    scored_on, kept = effort.score_per_class, settings.train_per_class
    if scored_on is not None and kept is not None:
        settings = replace(settings, train_per_class=kept + scored_on)
    whole = whole_stream(settings)
    tasks = whole.tasks[: effort.tasks]
    stop, labels = tasks[-1].stop, whole.train.labels
    rng, held, known = numpy_stream("tuning", effort.seed), [], []
    for task in tasks:
        known.append(whole.positions(whole.train, task))
        for c in np.unique(labels[known[-1]]):
            own = known[-1][labels[known[-1]] == c]
            count = scored_on or max(1, round(effort.held_out * len(own)))
            if count >= len(own):
                problem = f"a class has {len(own)} training images, too few to hold any out"
                raise FczooError(f"{problem}; keep more")
            held.append(rng.permutation(own)[:count])
    scored = np.sort(np.concatenate(held))
    trained = np.setdiff1d(np.concatenate(known), scored)

    def take(index: np.ndarray) -> Images:
        return Images(whole.train.pixels[index], labels[index], rows(whole.train.domains, index))

    return replace(
        whole,
        train=take(trained),
        test=take(scored),
        train_index=whole.train_index[trained],
        class_order=whole.class_order[:stop],
        classes=whole.classes[:stop],
        tasks=tuple(replace(task, classes=stop, count=len(tasks)) for task in tasks),
        split="training images held out",
    )
