"""Gradients of single images through a small fixed network (LeNet), and their inversion.

Clients of GLFC (Dong et al., CVPR 2022) upload such gradients, from which the server reconstructs
images to select the old model. Whoever has the gradient can recover the image and its label.
"""

from collections import deque

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.tree import Tree, select

SIZE = 32  # pixels
STRIDES = (2, 2, 1)
CHANNELS = 12
FLAT = CHANNELS * 8 * 8


def lenet_shapes(classes: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights ``lenet.*`` for a number of classes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(len(STRIDES)):
        shapes[f"lenet.conv{i}.weight"] = (CHANNELS, CHANNELS if i else 3, 5, 5)
        shapes[f"lenet.conv{i}.bias"] = (CHANNELS,)
    return shapes | {"lenet.linear.weight": (classes, FLAT), "lenet.linear.bias": (classes,)}


def lenet(classes: int, rng: torch.Generator) -> Tree:
    """Create the small fixed network: three convolutions of 12 channels and a linear layer.

    All clients and the server share it, and it is never trained.

    Args:
        classes: Number of classes C of the run.
        rng: Generator of the weights, from U(-0.5, 0.5).

    Returns:
        Weights ``lenet.*``.
    """
    return {
        name: torch.empty(shape).uniform_(-0.5, 0.5, generator=rng)
        for name, shape in lenet_shapes(classes).items()
    }


def lenet_logits(net: Tree, images: Tensor) -> Tensor:
    """Compute logits of the small network.

    Args:
        net: Weights ``lenet.*``.
        images: Images [B, 3, 32, 32] in [0, 1].

    Returns:
        Logits [B, C].
    """
    for i, stride in enumerate(STRIDES):
        kernel, bias = net[f"lenet.conv{i}.weight"], net[f"lenet.conv{i}.bias"]
        images = torch.sigmoid(F.conv2d(images, kernel, bias, stride=stride, padding=2))
    return F.linear(images.flatten(1), net["lenet.linear.weight"], net["lenet.linear.bias"])


def image_gradient(net: Tree, image: Tensor, label: Tensor, create_graph: bool = False) -> Tree:
    """Compute the gradient of one image's cross-entropy with respect to all weights.

    Args:
        net: Weights ``lenet.*``.
        image: Image [3, 32, 32] in [0, 1].
        label: Its class, a scalar.
        create_graph: Keep the graph, for gradients of the gradient.

    Returns:
        Gradient by weight name.
    """
    leaves = {k: v.detach().requires_grad_() for k, v in select(net, "lenet.").items()}
    loss = F.cross_entropy(lenet_logits(leaves, image[None]), label[None])
    gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=create_graph)
    return dict(zip(leaves, gradients, strict=True))


def to_lenet_size(images: Tensor) -> Tensor:
    """Resize images to the input size of the small network.

    Args:
        images: Images [B, 3, H, W] in [0, 1].

    Returns:
        Images [B, 3, 32, 32] in [0, 1].
    """
    small = F.interpolate(
        images, (SIZE, SIZE), mode="bilinear", antialias=True, align_corners=False
    )
    return small.clamp(0, 1)


def read_label(gradient: Tree) -> Tensor:
    """Return the label of the image behind a gradient.

    Features of the small network are sigmoids, so positive: in the gradient of the linear weight
    only the row of the label is negative.

    Args:
        gradient: Gradient of ``image_gradient``.

    Returns:
        The label, a scalar.
    """
    return gradient["lenet.linear.weight"].sum(1).argmin()


def mismatch(net: Tree, image: Tensor, label: Tensor, target: Tree) -> Tensor:
    """Compute the squared distance between the gradient of ``image`` and ``target``.

    Args:
        net: Weights ``lenet.*``.
        image: Image [3, 32, 32].
        label: Its class, a scalar.
        target: Gradient to match.

    Returns:
        The mismatch, a scalar.
    """
    gradient = image_gradient(net, image, label, create_graph=True)
    return torch.stack([(gradient[k] - target[k]).square().sum() for k in target]).sum()


def reconstruct(
    net: Tree, target: Tree, steps: int, inner: int, kept: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Reconstruct the image whose gradient is ``target``, by L-BFGS (rate 0.1) from noise.

    The search ends early if it diverges.

    Args:
        net: Weights ``lenet.*``.
        target: Gradient of the image.
        steps: Steps of L-BFGS.
        inner: Iterations per step.
        kept: Maximum number of images to return.
        rng: Generator of the noise.

    Returns:
        The images after the last steps, ``kept`` or fewer, [kept, 3, 32, 32], clamped to [0, 1],
            and their label.
    """
    # Label first; then match the gradient, starting from an image of N(0, 1) pixels.
    label = read_label(target)
    dtype = target["lenet.linear.bias"].dtype
    image = torch.randn(
        3, SIZE, SIZE, generator=rng, device=rng.device, dtype=dtype
    ).requires_grad_()
    optimizer = torch.optim.LBFGS([image], lr=0.1, max_iter=inner)
    images: deque[Tensor] = deque([image.detach().clone()], maxlen=kept)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = mismatch(net, image, label, target)
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(closure)
        if not image.isfinite().all():
            break
        images.append(image.detach().clone())
    return torch.stack(list(images)).clamp(0, 1), label
