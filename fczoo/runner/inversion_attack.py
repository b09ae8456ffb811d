"""Inversion attacks: reconstruct images from a client's upload.

The attacker is an honest-but-curious server that inspects one client's upload of the first task.
It attacks the client with the fewest images, whose upload reveals most about each. It knows method,
weights and broadcast. It starts from grey images and optimizes them by gradient descent to match

- ``feature``: the feature of one image; no method sends it, so it bounds the other attacks;
- ``prototype``: a class mean that the client sends; it ignores variances;
- ``update``: the direction of the change in the client's trained tensors, such as prompts.

An inversion discloses an image if it is closer to one of the client's images than the mean image.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fczoo.core.method import Method
from fczoo.core.payload import Payload, Uploads
from fczoo.core.tree import Tree, select
from fczoo.core.types import Context, HasClientMemory, HasTeacher, Task
from fczoo.data.views import get_augment
from fczoo.federation.batches import Client
from fczoo.federation.benchmark import Benchmark
from fczoo.federation.client_engine import ClientEngine
from fczoo.federation.device import Plan
from fczoo.federation.server import broadcast, to_device
from fczoo.models.classifier import prediction_batch
from fczoo.reports.figure_data import ImageGrid
from fczoo.runner.cost import simulate_task

STEPS = 300  # of gradient descent
LEARNING_RATE = 0.1  # learning rate of Adam, on pixels before the logistic function
SMOOTHNESS = 1.0  # weight of the mean difference between neighbouring pixels
MAX_IMAGES = 500  # of the task, over which the mean image is computed

HEADERS = (
    "method",
    "from",
    "distance",
    "MSE to the nearest image",
    "PSNR, dB",
    "PSNR of the mean image, dB",
)

Target = Literal["feature", "prototype", "update"]


@dataclass(frozen=True)
class Inversion:
    """Images [n, 3, S, S] reconstructed from one kind of target, and the client's nearest ones."""

    target: Target
    classes: list[int]
    images: Tensor  # reconstructions, pixels in [0, 1]
    nearest_images: Tensor  # the client's nearest images
    distance: float  # final distance to the target; 0: features or directions are the same
    error: float  # mean squared error to the nearest image, mean over images
    mean_image_error: float  # mean squared error of the mean image, mean over images


def mean_squared_errors(images: Tensor, others: Tensor) -> Tensor:
    """Return the mean squared errors [n, m] between two sets of images.

    Args:
        images: Images [n, 3, S, S].
        others: Images [m, 3, S, S].
    """
    return torch.stack([(others - image).square().flatten(1).mean(1) for image in images])


def signal_to_noise(error: float) -> float:
    """Convert a mean squared error of pixels in [0, 1] to a peak signal-to-noise ratio in dB.

    Args:
        error: Mean squared error.
    """
    return float(-10 * np.log10(error)) if error else float("inf")


def class_means(upload: Payload, groups: Uploads, task: Task) -> dict[int, Tensor]:
    """Return the class means [D] of an upload, by class.

    Args:
        upload: Upload of one client.
        groups: Declared groups of the upload.
        task: Task of the upload.

    Returns:
        Mean feature by class; empty if the upload has none.
    """
    for prefix, group in groups.items():
        means, count = upload.get(f"{prefix}mean"), upload.get(f"{prefix}count")
        if means is None and f"{prefix}sum" in upload and count is not None:
            means = upload[f"{prefix}sum"] / count.clamp(min=1)[:, None]
        if means is None or group.projected or not group.statistics:
            continue
        first = task.start if group.layout == "classes" else 0
        labels = upload.get(f"{prefix}label", torch.arange(first, first + len(means)))
        return {
            int(label): means[row]
            for row, label in enumerate(labels.tolist())
            if count is None or count[row] > 0
        }
    return {}


def invert_uploads(bench: Benchmark, method: Method, steps: int = STEPS) -> list[Inversion]:
    """Attack a client's upload of the first task.

    Args:
        bench: Data, partition and backbone of a run.
        method: Method of the run.
        steps: Steps of gradient descent.

    Returns:
        The inversion of features, then one per kind of target that the method sends.
    """
    attack = _Attack(bench, method, steps)
    classes = attack.classes
    match_client = attack.match_features(attack.broadcast, attack.client_features)
    inversions = [attack.invert("feature", match_client, classes)]
    for phase, upload in attack.uploads.items():
        if means := class_means(upload, method.training().uploads, attack.task):
            tree = {**attack.broadcast, **attack.trained_tensors(phase)}
            sent_classes = [c for c in classes if c in means]
            match_means = attack.match_features(tree, torch.stack([means[c] for c in sent_classes]))
            inversions.append(attack.invert("prototype", match_means, sent_classes))
            break
    if attack.trained_tensors("round") and not isinstance(method, HasTeacher | HasClientMemory):
        inversions.append(attack.invert("update", attack.match_update(), classes))
    return inversions


class _Attack:
    """One client's images and uploads of the first task."""

    def __init__(self, bench: Benchmark, method: Method, steps: int):
        settings, self.steps = bench.settings, steps
        self.bench, self.method, self.backbone = bench, method, bench.backbone
        self.task = bench.stream.tasks[0]
        rng = torch.Generator().manual_seed(0)
        state = to_device(method.begin_task({}, self.task, self.backbone, rng), self.backbone)
        plan = Plan(settings.epochs, settings.batch_size, get_augment(settings.augment), 0)
        engine = ClientEngine(method, self.backbone, bench.train, plan)
        clients = bench.clients(self.task, method.training().data_scope)
        self.client: Client = min(clients, key=lambda client: len(client.index))
        self.broadcast = broadcast(method, state)
        self.uploads, _ = simulate_task(engine, self.client, self.task, state, rng)
        labels = bench.train.labels.cpu()
        self.labels = labels[self.client.index]
        self.classes: list[int] = torch.unique(self.labels).tolist()
        positions = torch.from_numpy(bench.stream.positions(bench.stream.train, self.task))
        self.mean_image = self.pixels(positions[:MAX_IMAGES]).mean(0, keepdim=True)
        first = [int((self.labels == c).nonzero()[0]) for c in self.classes]
        self.examples = self.client.index[torch.tensor(first)]
        self.client_features = self.features(self.broadcast, self.pixels(self.examples)).detach()

    def trained_tensors(self, phase: str) -> Tree:
        """Return the trained tensors in the upload of a round; empty for other phases."""
        optims = self.method.training().optims
        return (
            select(self.uploads[phase].tensors, *optims) if phase == "round" in self.uploads else {}
        )

    def pixels(self, index: Tensor) -> Tensor:
        """Return images [n, 3, S, S] as the network sees them, in [0, 1]."""
        return self.backbone.raw_pixels(self.bench.train.view(index).float())

    def features(self, tree: Tree, images: Tensor) -> Tensor:
        """Compute features [n, D] of images in [0, 1]."""
        batch = prediction_batch(
            self.method.training().inputs, self.backbone, self.backbone.normalise(images)
        )
        return self.method.features(self.backbone, tree, batch)

    def match_features(self, tree: Tree, targets: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a loss: the relative squared distance of images' features to targets [n, D]."""
        sizes = targets.square().sum(1)

        def loss(images: Tensor) -> Tensor:
            return ((self.features(tree, images) - targets).square().sum(1) / sizes).mean()

        return loss

    def match_update(self) -> Callable[[Tensor], Tensor]:
        """Return a loss: 1 - cosine between the images' negative gradient and the update.

        There is one image per class.
        """
        tensors, ctx = self.trained_tensors("round"), Context(self.task, 0, 1, self.broadcast)
        change = torch.cat([(tensors[k] - self.broadcast[k]).flatten() for k in tensors])
        leaves = {k: self.broadcast[k].clone().requires_grad_() for k in tensors}
        counts = torch.bincount(self.labels, minlength=self.task.classes).to(change)

        def loss(images: Tensor) -> Tensor:
            batch = prediction_batch(
                self.method.training().inputs, self.backbone, self.backbone.normalise(images)
            )
            labels = torch.tensor(self.classes, device=images.device)
            batch = batch._replace(y=labels, class_count=counts)
            of_batch, _ = self.method.loss(self.backbone, leaves, batch, ctx)
            gradients = torch.autograd.grad(
                of_batch, [*leaves.values()], create_graph=True, materialize_grads=True
            )
            gradient = torch.cat([g.flatten() for g in gradients])
            return 1 + torch.cosine_similarity(gradient, change, 0)

        return loss

    def invert(
        self, target: Target, distance: Callable[[Tensor], Tensor], classes: list[int]
    ) -> Inversion:
        """Optimize grey images, one per class, and compare them with the client's images."""
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            images = descend(distance, self.mean_image, len(classes), self.steps)
            final_distance = float(distance(images).detach())
        nearest, errors, mean_errors = [], [], []
        for i, c in enumerate(classes):
            indices = (
                self.client.index[self.labels == c] if target != "feature" else self.examples[[i]]
            )
            candidates = self.pixels(indices)
            (error,) = mean_squared_errors(images[[i]], candidates)
            nearest.append(candidates[error.argmin()])
            errors.append(float(error.min()))
            mean_errors.append(float(mean_squared_errors(self.mean_image, candidates).min()))
        return Inversion(
            target,
            classes,
            images,
            torch.stack(nearest),
            final_distance,
            float(np.mean(errors)),
            float(np.mean(mean_errors)),
        )


def descend(distance: Callable[[Tensor], Tensor], like: Tensor, number: int, steps: int) -> Tensor:
    """Optimize images for a small distance, with a penalty on differences of neighbouring pixels.

    Args:
        distance: Function of images [n, 3, S, S] with pixels in [0, 1].
        like: An image [1, 3, S, S] with the size and device of the result.
        number: Number of images n.
        steps: Steps of Adam; the start is grey with a little noise.

    Returns:
        Images [n, 3, S, S] with pixels in [0, 1].
    """
    noise = torch.randn(number, *like.shape[1:], generator=torch.Generator().manual_seed(0))
    values = (0.1 * noise).to(like).requires_grad_()
    optimizer = torch.optim.Adam([values], lr=LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        images = values.sigmoid()
        roughness = images.diff(dim=-1).abs().mean() + images.diff(dim=-2).abs().mean()
        (distance(images) + SMOOTHNESS * roughness).backward()
        optimizer.step()
    return values.detach().sigmoid()


def inversion_rows(by_method: Mapping[str, list[Inversion]]) -> list[tuple[str, ...]]:
    """Return rows of a table with the columns ``HEADERS``.

    Args:
        by_method: Inversions by label of the method.
    """
    return [
        (
            label,
            i.target,
            f"{i.distance:.3f}",
            f"{i.error:.4f}",
            f"{signal_to_noise(i.error):.1f}",
            f"{signal_to_noise(i.mean_image_error):.1f}",
        )
        for label, inversions in by_method.items()
        for i in inversions
    ]


def inversion_grid(name: str, label: str, inversions: list[Inversion]) -> ImageGrid:
    """Return a grid of a method's inversions, each below the client's nearest image.

    Args:
        name: Name of the figure.
        label: Label of the method.
        inversions: Inversions of one client.
    """
    rows = {}
    for i in inversions:
        rows["image" if i.target == "feature" else f"nearest to {i.target}"] = i.nearest_images
        rows[f"from {i.target}, {signal_to_noise(i.error):.1f} dB"] = i.images
    pixels = torch.stack([*rows.values()]).movedim(2, -1).cpu().numpy()
    return ImageGrid(
        name=f"{name} {label}",
        caption=f"{label}: images that a server reconstructs from one client's upload",
        x="class",
        y="",
        pixels=pixels,
        rows=[*rows],
        columns=[str(c + 1) for c in inversions[0].classes],
        of_methods=False,
    )
