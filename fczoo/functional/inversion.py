"""Gradients of single images through a small fixed network, and the images that can be read back out of them.

GLFC (Dong et al., CVPR 2022) lets clients upload such gradients so that its server can tell a good old
model. Who holds one holds, in effect, the image.
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


def lenet(classes: int, rng: torch.Generator) -> Tree:
    """Weights of a small network that nobody trains: three convolutions of 12 channels and a linear layer.

    All are drawn from U(-0.5, 0.5) and shared by all clients and the server.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(len(STRIDES)):
        shapes[f"lenet.conv{i}.weight"] = (CHANNELS, CHANNELS if i else 3, 5, 5)
        shapes[f"lenet.conv{i}.bias"] = (CHANNELS,)
    shapes |= {"lenet.linear.weight": (classes, FLAT), "lenet.linear.bias": (classes,)}
    return {name: torch.empty(shape).uniform_(-0.5, 0.5, generator=rng) for name, shape in shapes.items()}


def lenet_logits(net: Tree, images: Tensor) -> Tensor:
    """Logits [B, C] of images [B, 3, 32, 32] in [0, 1]."""
    for i, stride in enumerate(STRIDES):
        kernel, bias = net[f"lenet.conv{i}.weight"], net[f"lenet.conv{i}.bias"]
        images = torch.sigmoid(F.conv2d(images, kernel, bias, stride=stride, padding=2))
    return F.linear(images.flatten(1), net["lenet.linear.weight"], net["lenet.linear.bias"])


def image_gradient(net: Tree, image: Tensor, label: Tensor, create_graph: bool = False) -> Tree:
    """Gradient of the cross-entropy of one image [3, 32, 32] with respect to every weight of the network."""
    leaves = {k: v.detach().requires_grad_() for k, v in select(net, "lenet.").items()}
    loss = F.cross_entropy(lenet_logits(leaves, image[None]), label[None])
    gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=create_graph)
    return dict(zip(leaves, gradients, strict=True))


def to_lenet_size(images: Tensor) -> Tensor:
    """Images [B, 3, H, W] in [0, 1] as the small network takes them, [B, 3, 32, 32]."""
    small = F.interpolate(images, (SIZE, SIZE), mode="bilinear", antialias=True, align_corners=False)
    return small.clamp(0, 1)


def read_label(gradient: Tree) -> Tensor:
    """The label of the image behind a gradient; features are positive, so only its row is negative."""
    return gradient["lenet.linear.weight"].sum(1).argmin()


def mismatch(net: Tree, image: Tensor, label: Tensor, target: Tree) -> Tensor:
    """Sum over all weights of (gradient of ``image`` - ``target``)^2."""
    found = image_gradient(net, image, label, create_graph=True)
    return torch.stack([(found[k] - target[k]).square().sum() for k in target]).sum()


def reconstruct(
    net: Tree, target: Tree, steps: int, inner: int, kept: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The image whose gradient is ``target``, sought by L-BFGS (rate 0.1) from noise, and its label.

    Returns the last ``kept`` or fewer of the images after each of ``steps`` steps of ``inner`` iterations,
    [kept, 3, 32, 32], clamped to [0, 1]; it ends early where the search diverges.
    """
    label = read_label(target)
    dtype = target["lenet.linear.bias"].dtype
    image = torch.randn(3, SIZE, SIZE, generator=rng, device=rng.device, dtype=dtype).requires_grad_()
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
