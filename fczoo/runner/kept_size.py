"""Estimated size of the server's state at the end of a run, from shapes only."""

import numpy as np
import torch

from fczoo.core.method import Method
from fczoo.core.options import with_fewest_steps
from fczoo.core.registry import DATASETS
from fczoo.core.tree import Tree, nbytes
from fczoo.core.vit_config import ViTConfig
from fczoo.data.dataset import Images
from fczoo.data.stream import make_tasks
from fczoo.data.views import Augment, ImageStore
from fczoo.federation.batches import Client
from fczoo.federation.device import Plan
from fczoo.federation.engine import ClientEngine
from fczoo.federation.local_rules import ControlVariates, make_local_training
from fczoo.federation.local_trainer import skip_steps
from fczoo.federation.settings import Settings
from fczoo.runner.cost import uploads
from fczoo.runner.outline import Outlines, outline_backbone

CLASSES = 2  # of the client in each task: the state has rows for all of them anyway


def state_sizes(method: Method, settings: Settings, classes: int, config: ViTConfig) -> list[int]:
    """Estimate the bytes of the server's state after each task, which a run may keep.

    The state after the first two tasks is known from shapes; it grows as much in each further one.

    Args:
        method: Method of the run.
        settings: Settings of the run.
        classes: Number of classes; 0 for that of the data set.
        config: Configuration of the backbone.
    """
    count = classes or DATASETS.get(settings.dataset).classes
    tasks = make_tasks(settings.dataset, count, settings.tasks)
    fast, sizes = with_fewest_steps(method), list[int]()
    state: Tree = {}
    with Outlines():
        backbone, rng = outline_backbone(config), torch.Generator().manual_seed(0)
        for task in tasks[:2]:
            labels = np.arange(task.start, min(task.start + CLASSES, task.stop)).repeat(2)
            images = Images(np.zeros((len(labels), 8, 8, 3), np.uint8), labels)
            engine = ClientEngine(
                fast,
                backbone,
                ImageStore(images, backbone),
                Plan(1, len(labels), Augment(), seed=0, pass_size=len(labels)),
                controls=ControlVariates(make_local_training(settings.local)),
                make_optimizers=skip_steps,
            )
            state = fast.begin_task(state, task, backbone, rng)
            _, state = uploads(engine, Client(0, torch.arange(len(labels))), task, state, rng)
            sizes.append(nbytes(state))
    growth = sizes[-1] - sizes[0]
    return [sizes[0] + growth * index for index in range(len(tasks))]
