"""Generator of MFCL (Babakniya et al., NeurIPS 2023): images from noise, and its training.

Unlike in TARGET's generator, norm layers keep running statistics. Clients use it in eval mode, in
which an image does not depend on the other images of its batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fczoo.baselines._data_free_replay import Model, Moments
from fczoo.baselines._target_generator import SLOPE, image_generator
from fczoo.core.tree import Tree

EPSILON = (1e-5, 0.8, 0.8, 1e-5)  # of the norms; 0.8 in the inner ones as in released code
BUFFERS = (".mean", ".var")  # suffixes of the names of running statistics
MOMENTUM = 0.1  # of the running statistics


@dataclass(frozen=True)
class GeneratorConfig:
    """Hyper-parameters of the generator's training."""

    generator_steps: int
    generator_batch: int
    lr_generator: float
    content: float  # weight of the cross-entropy to the teacher's own prediction
    content_temperature: float
    entropy: float  # weight of the class balance
    smooth: float  # weight of the smoothness
    prior_weight: float  # weight of the KL divergence of activation moments


def mfcl_generator(noise: int, width: int, side: int, rng: torch.Generator) -> Tree:
    """Create the weights and running statistics of the generator.

    Args:
        noise: Noise values per image.
        width: Channels of the last layers; the first ones have twice as many.
        side: Height and width of the images, pixels.
        rng: Random generator.

    Returns:
        Weights of the linear layer, the convolutions and the norms; ``normN.mean`` and
            ``normN.var`` of four norms, of which the last one has no weights.
    """
    tree = image_generator(noise, width, side, rng)
    for i, inputs in enumerate((2 * width, 2 * width)):
        channels = len(tree[f"conv{i}.weight"])
        bound = (9 * inputs) ** -0.5
        bias = torch.empty(channels, device=rng.device)
        tree[f"conv{i}.bias"] = bias.uniform_(-bound, bound, generator=rng)
    for i, channels in enumerate((2 * width, 2 * width, width, 3)):
        tree[f"norm{i}.mean"] = torch.zeros(channels, device=rng.device)
        tree[f"norm{i}.var"] = torch.ones(channels, device=rng.device)
    return tree


def mfcl_images(generator: Tree, z: Tensor, side: int, training: bool = False) -> Tensor:
    """Generate images in the normalised space of the model.

    Args:
        generator: Weights and running statistics.
        z: Noise [B, noise].
        side: Height and width of the images, pixels.
        training: Whether the norms use the statistics of the batch; the running statistics are
            then updated in place.

    Returns:
        Images [B, 3, side, side], without bounds.
    """

    def norm(maps: Tensor, i: int) -> Tensor:
        mean, var = generator[f"norm{i}.mean"], generator[f"norm{i}.var"]
        weight, bias = generator.get(f"norm{i}.weight"), generator.get(f"norm{i}.bias")
        return F.batch_norm(maps, mean, var, weight, bias, training, MOMENTUM, EPSILON[i])

    def convolve(maps: Tensor, i: int) -> Tensor:
        return F.conv2d(maps, generator[f"conv{i}.weight"], generator[f"conv{i}.bias"], padding=1)

    def larger(maps: Tensor, i: int) -> Tensor:
        maps = F.interpolate(maps, scale_factor=2.0, mode="nearest")
        return F.leaky_relu(norm(convolve(maps, i), i + 1), SLOPE)

    # Linear, norm, two blocks of (upsample, convolution, norm, LeakyReLU), convolution, tanh, norm.
    rows = F.linear(z, generator["linear.weight"], generator["linear.bias"])
    channels = len(generator["norm0.weight"])
    corner = math.isqrt(rows.shape[1] // channels)
    maps = norm(rows.view(len(z), channels, corner, corner), 0)
    images = convolve(larger(larger(maps, 0), 1), 2)
    return norm(images[..., :side, :side].tanh(), 3)


def train_generator(
    start: Tree,
    config: GeneratorConfig,
    teacher: Model,
    prior: Sequence[Moments],
    side: int,
    rng: torch.Generator,
) -> Tree:
    """Train the generator of the last task further, with a new optimizer.

    Args:
        start: Weights and running statistics.
        config: Hyper-parameters.
        teacher: The model whose task has ended.
        prior: Moments of the clients' activations, one per compared layer; may be empty.
        side: Height and width of the images, pixels.
        rng: Random generator.

    Returns:
        The new weights and running statistics.
    """
    # Running statistics are not trained; ``mfcl_images`` updates them.
    generator = {
        name: value.detach().clone().requires_grad_(not name.endswith(BUFFERS))
        for name, value in start.items()
    }
    weights = [value for value in generator.values() if value.requires_grad]
    optimizer = torch.optim.Adam(weights, config.lr_generator)
    noise = generator["linear.weight"].shape[1]
    for _ in range(config.generator_steps):
        z = torch.randn(config.generator_batch, noise, generator=rng, device=rng.device)
        generator_step(generator, optimizer, z.to(weights[0]), config, teacher, prior, side)
    return {name: value.detach() for name, value in generator.items()}


def generator_step(
    generator: Tree,
    optimizer: torch.optim.Optimizer,
    z: Tensor,
    config: GeneratorConfig,
    teacher: Model,
    prior: Sequence[Moments],
    side: int,
) -> Tensor:
    """Take one step of the generator, and return its images [B, 3, side, side] before the step.

    Args:
        generator: Weights and running statistics, changed in place.
        optimizer: Optimizer of the weights.
        z: Noise [B, noise].
        config: Hyper-parameters.
        teacher: The model whose task has ended.
        prior: Moments of the clients' activations, one per compared layer; may be empty.
        side: Height and width of the images, pixels.
    """
    # L_G, term by term (released: Teacher.get_images).
    images = mfcl_images(generator, z, side, training=True)
    reply = teacher(images)
    # Certainty: L_ce(z / T, argmax z). At the released T = 1000 it is nearly constant, so the other
    # terms decide.
    logits = reply.logits / config.content_temperature
    loss = config.content * F.cross_entropy(logits, reply.logits.argmax(1))
    # Balance: 1 - H(p) / log C, with the mean prediction p.
    loss = loss + config.entropy * imbalance(reply.logits)
    # Smoothness: mean squared difference to the blurred image.
    loss = loss + config.smooth * F.mse_loss(images, blur(images))
    # Prior: per layer KL(prior || batch) between Gaussians, see ``divergence_of``.
    if prior:  # mean over layers
        terms = [divergence_of(m, p) for m, p in zip(reply.moments, prior, strict=True)]
        loss = loss + config.prior_weight * torch.stack(terms).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return images.detach()


def imbalance(logits: Tensor) -> Tensor:
    """Compute 1 - H(p) / log C of the mean prediction p; 0 if p is uniform.

    Args:
        logits: Logits [B, C].

    Returns:
        A scalar from 0 to 1; 0 for a single class.
    """
    classes = logits.shape[1]
    if classes == 1:
        return logits.new_zeros(())
    p = logits.softmax(1).mean(0)
    entropy: Tensor = -torch.special.xlogy(p, p).sum()
    return 1 - entropy / math.log(classes)


def divergence_of(batch: Moments, prior: Moments) -> Tensor:
    """Compute KL(prior || batch) between Gaussians, mean over channels, a scalar.

    Args:
        batch: Moments of the generated images.
        prior: Moments of the clients' images.
    """
    variance, target = batch.variance + 1e-8, prior.variance + 1e-8
    offset = (prior.mean - batch.mean).square()
    return ((variance / target).log() - 1 + (target + offset) / variance).mean() / 2


def blur(images: Tensor) -> Tensor:
    """Filter images [B, 3, S, S] by a Gaussian of 5 x 5 pixels and standard deviation sqrt 2."""
    steps = torch.arange(-2, 3, device=images.device, dtype=images.dtype).square()
    kernel = (-(steps[:, None] + steps) / 4).exp()
    kernel = (kernel / kernel.sum()).expand(3, 1, 5, 5)
    return F.conv2d(F.pad(images, (2, 2, 2, 2), mode="reflect"), kernel, groups=3)


def standard_normal(uniform: Tensor) -> Tensor:
    """Map uniform numbers in [0, 1) to standard normal ones by the inverse normal CDF.

    A loss does not draw random numbers; it reads ``Batch.draws``, which are uniform.

    Args:
        uniform: Uniform numbers of any shape.
    """
    return 2**0.5 * torch.erfinv(2 * uniform.clamp(min=2**-25) - 1)
