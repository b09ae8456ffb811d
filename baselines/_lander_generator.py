"""Generator of LANDER (Tran et al., CVPR 2024): images from the anchors of their classes.

Its input is the anchor of the image's class, without noise. Consecutive images of a batch share an
input layer, and each round of synthesis draws these layers again. So two images of a class differ
only by their position in the batch. The layers after the input layers are TARGET's generator.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._target_generator import generate_images, image_generator
from fczoo.core.tree import Tree

PADDING = 4  # pixels of the random crops


def lander_generator(
    anchor: int, batch: int, rows: int, hidden: int, width: int, side: int, rng: torch.Generator
) -> Tree:
    """Create the weights of the generator.

    Args:
        anchor: Entries of an anchor.
        batch: Images per batch.
        rows: Rows of the batch that share an input layer.
        hidden: Outputs of an input layer.
        width: Channels of the last layers.
        side: Height and width of the images, pixels.
        rng: Random generator.

    Returns:
        Weights of the norm of the anchors, of the input layers [L, ...] and of the rest.
    """
    device, layers = rng.device, -(-batch // rows)
    return {
        "input_norm.weight": torch.ones(anchor, device=device),
        "input_norm.bias": torch.zeros(anchor, device=device),
        **input_layers(layers, hidden, anchor, rng),
        **image_generator(hidden, width, side, rng),
    }


def input_layers(layers: int, hidden: int, anchor: int, rng: torch.Generator) -> Tree:
    """Draw the input layers: weights from N(0, 1), biases 0. New layers make rounds differ."""
    weights = torch.randn(layers, hidden, anchor, generator=rng, device=rng.device)
    return {"input.weight": weights, "input.bias": torch.zeros(layers, hidden, device=rng.device)}


def lander_images(generator: Tree, anchors: Tensor, rows: int, side: int) -> Tensor:
    """Generate images from anchors; norms use the statistics of the batch.

    Args:
        generator: Weights of ``lander_generator``.
        anchors: Anchors [B, e] of the images' classes.
        rows: Rows of the batch that share an input layer.
        side: Height and width of the images, pixels.

    Returns:
        Images [B, 3, side, side] with values in (0, 1).
    """
    # Batch norm of the anchors, then rows r i to r i + r - 1 of the batch pass input layer i.
    weight, bias = generator["input_norm.weight"], generator["input_norm.bias"]
    inputs = F.batch_norm(anchors, None, None, weight, bias, training=True)
    parts = zip(inputs.split(rows), generator["input.weight"], generator["input.bias"], strict=True)
    hidden = torch.cat([F.linear(part, weight, bias) for part, weight, bias in parts])
    return generate_images(generator, hidden, side)


def balanced_labels(count: int, classes: int, rng: torch.Generator) -> Tensor:
    """Return labels [count]: full cycles over all classes, then random labels for the rest."""
    cycles = torch.arange(classes, device=rng.device).repeat(count // classes)
    others = torch.randint(classes, (count % classes,), generator=rng, device=rng.device)
    return torch.cat([cycles, others])


def crop_and_flip(images: Tensor, rng: torch.Generator) -> Tensor:
    """Return random crops of padded images, each flipped with probability 1/2.

    Args:
        images: Images [B, 3, S, S].
        rng: Random generator.
    """
    count, side, device = len(images), images.shape[-1], rng.device
    corners = torch.randint(2 * PADDING + 1, (2, count, 1), generator=rng, device=device)
    flips = torch.rand(count, 1, generator=rng, device=device) < 0.5
    places = torch.arange(side, device=device)
    columns = corners[1] + torch.where(flips, places.flip(0), places)
    padded = F.pad(images, (PADDING,) * 4)
    numbers = torch.arange(count, device=device)[:, None, None]
    rows = corners[0] + places
    return padded.permute(0, 2, 3, 1)[numbers, rows[:, :, None], columns[:, None]].permute(
        0, 3, 1, 2
    )
