"""Small image generator for data-free distillation (TARGET, Zhang et al., ICCV 2023)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.core.tree import Tree

SLOPE = 0.2  # negative slope of LeakyReLU


def image_generator(noise: int, width: int, size: int, rng: torch.Generator) -> Tree:
    """Create the weights of a generator that turns noise into images.

    A linear layer makes maps with 2 ``width`` channels at a quarter of the size. Three convolutions
    turn them into images. All layers have PyTorch's default initialisation.

    Args:
        noise: Noise values per image.
        width: Base number of channels.
        size: Height and width of the images, pixels.
        rng: Random generator.

    Returns:
        Weights of the linear layer, the convolutions and the norms.
    """
    corner = -(-size // 4)
    shapes: dict[str, tuple[int, ...]] = {
        "linear.weight": (2 * width * corner**2, noise),
        "linear.bias": (2 * width * corner**2,),
        "conv0.weight": (2 * width, 2 * width, 3, 3),
        "conv1.weight": (width, 2 * width, 3, 3),
        "conv2.weight": (3, width, 3, 3),
        "conv2.bias": (3,),
    }
    inputs = {"linear": noise, "conv0": 18 * width, "conv1": 18 * width, "conv2": 9 * width}
    tree: Tree = {}
    for name, shape in shapes.items():
        bound = inputs[name.partition(".")[0]] ** -0.5
        weights = torch.empty(shape, device=rng.device)
        tree[name] = weights.uniform_(-bound, bound, generator=rng)
    for i, channels in enumerate((2 * width, 2 * width, width)):
        tree[f"norm{i}.weight"] = torch.ones(channels, device=rng.device)
        tree[f"norm{i}.bias"] = torch.zeros(channels, device=rng.device)
    return tree


def generate_images(generator: Tree, z: Tensor, size: int) -> Tensor:
    """Generate images from noise; norms use the statistics of the batch.

    Args:
        generator: Weights of ``image_generator``.
        z: Noise [B, noise].
        size: Height and width of the images, pixels.

    Returns:
        Images [B, 3, size, size] with values in (0, 1).
    """

    def norm(maps: Tensor, i: int) -> Tensor:
        weight, bias = generator[f"norm{i}.weight"], generator[f"norm{i}.bias"]
        return F.batch_norm(maps, None, None, weight, bias, training=True)

    def larger(maps: Tensor, i: int) -> Tensor:
        """Double the size of the maps and apply convolution ``i``."""
        maps = F.interpolate(maps, scale_factor=2.0, mode="nearest")
        maps = F.conv2d(maps, generator[f"conv{i}.weight"], padding=1)
        return F.leaky_relu(norm(maps, i + 1), SLOPE)

    # Linear, norm, two blocks of (upsample, convolution, norm, LeakyReLU), convolution, sigmoid.
    maps = F.linear(z, generator["linear.weight"], generator["linear.bias"])
    channels = generator["norm0.weight"].shape[0]
    corner = round((maps.shape[1] // channels) ** 0.5)
    maps = larger(larger(norm(maps.view(len(z), channels, corner, corner), 0), 0), 1)
    maps = F.conv2d(maps, generator["conv2.weight"], generator["conv2.bias"], padding=1)
    return maps[..., :size, :size].sigmoid()
