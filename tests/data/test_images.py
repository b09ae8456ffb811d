"""Compare views of images with Pillow and with constructed pixels."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fczoo import FczooError
from fczoo.core.backbone import Backbone
from fczoo.core.registry import AUGMENTATIONS
from fczoo.data.dataset import Images
from fczoo.data.views import DRAWS, QUERY_BLOCK, Augment, ImageStore, get_augment

MEAN, STD = np.array([0.4, 0.5, 0.6]), np.array([0.2, 0.25, 0.3])  # those of the test backbone


def view_with(**attributes: object) -> Augment:
    """Return an augmentation with these attributes of ``Augment``."""
    made: Augment = type("View", (Augment,), attributes)()
    return made


FULL_CROP = view_with(scale=(1.0, 1.0), ratio=(1.0, 1.0))  # a crop of the whole image


@pytest.fixture
def store_of(backbone):
    def make(pixels: np.ndarray) -> ImageStore:
        return ImageStore(
            Images(pixels.astype(np.uint8), np.zeros(len(pixels), np.int64)), backbone
        )

    return make


@pytest.fixture
def noisy() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3))


def pixels_of(view: Tensor) -> np.ndarray:
    """Invert the normalisation: [B, S, S, 3] in 0..1."""
    return view.permute(0, 2, 3, 1).numpy() * STD + MEAN


def draws(count: int, **columns: float) -> Tensor:
    """Return draws of one half, except for the given columns.

    Args:
        count: Number of images.
        columns: Draws of area, shape, x, y, flip or brightness by name.

    Returns:
        Draws [count, DRAWS].
    """
    out = torch.full((count, DRAWS), 0.5)
    for name, value in columns.items():
        out[:, ("area", "shape", "x", "y", "flip", "brightness").index(name)] = value
    return out


def test_test_view_normalises_per_channel(store_of, noisy):
    view = store_of(noisy).view(torch.tensor([4, 0]))
    assert view.shape == (2, 3, 16, 16) and view.dtype == torch.float64
    np.testing.assert_allclose(
        view.permute(0, 2, 3, 1), (noisy[[4, 0]] / 255 - MEAN) / STD, atol=1e-6
    )


@pytest.mark.parametrize("size", [8, 20, 50])
def test_test_view_resize_matches_pillow(store_of, size):
    pixels = (
        np.random.default_rng(0).integers(70, 186, (2, size, size, 3)).astype(np.uint8)
    )  # Pillow clips overshoot between its passes
    reference = (
        np.stack(
            [
                np.asarray(Image.fromarray(p).resize((16, 16), Image.Resampling.BICUBIC))
                for p in pixels
            ]
        )
        / 255
    )
    np.testing.assert_allclose(
        pixels_of(store_of(pixels).view(torch.arange(2))), reference, atol=1.5 / 255
    )  # and rounds twice


@pytest.mark.parametrize("size", [12, 20, 50])
def test_test_crop_is_centre_of_larger_view(backbone, size):
    """Resize to 20 pixels and cut out the middle 16 to keep 0.8 of each side."""
    pixels = np.random.default_rng(0).integers(70, 186, (2, size, size, 3)).astype(np.uint8)
    larger = (
        np.stack(
            [
                np.asarray(Image.fromarray(p).resize((20, 20), Image.Resampling.BICUBIC))
                for p in pixels
            ]
        )
        / 255
    )
    store = ImageStore(Images(pixels, np.zeros(2, np.int64)), backbone, test_crop=0.8)
    np.testing.assert_allclose(
        pixels_of(store.view(torch.arange(2))), larger[:, 2:18, 2:18], atol=1.5 / 255
    )


def test_view_has_backbone_dtype(backbone, noisy):
    for dtype in (torch.float32, torch.bfloat16):
        store = ImageStore(
            Images(noisy.astype(np.uint8), np.zeros(5, np.int64)), backbone.to(dtype=dtype)
        )
        assert (
            store.view(torch.arange(2)).dtype
            == store.training_view(torch.arange(2), get_augment("crop"), draws(2)).dtype
            == dtype
        )


@pytest.mark.parametrize("size", [16, 24])
def test_training_view_without_augmentation_equals_test_view(store_of, size):
    store, index = (
        store_of(np.random.default_rng(0).integers(0, 256, (3, size, size, 3))),
        torch.arange(3),
    )
    assert torch.equal(
        store.training_view(index, Augment(), torch.rand(3, DRAWS)), store.view(index)
    )


def test_only_augment_none_is_fixed():
    names = AUGMENTATIONS.names()
    assert {name for name in names if get_augment(name).is_fixed} == {"none"}
    assert not view_with(change=lambda self, images, draws: images.flip(2)).is_fixed


@pytest.mark.parametrize("name", AUGMENTATIONS.names())
def test_view_depends_only_on_its_draws(store_of, noisy, name):
    store, index, draw_rows = (
        store_of(noisy),
        torch.arange(5),
        torch.rand(5, DRAWS, generator=torch.Generator().manual_seed(1)),
    )
    views = store.training_view(index, get_augment(name), draw_rows)
    order = torch.tensor([3, 0, 4, 2, 1])
    torch.testing.assert_close(
        store.training_view(index[order], get_augment(name), draw_rows[order]), views[order]
    )
    other_views = store.training_view(index, get_augment(name), 1 - draw_rows)
    assert torch.equal(other_views, views) == get_augment(name).is_fixed


def test_flip_depends_on_draw(store_of, noisy):
    store, index = store_of(noisy), torch.arange(5)
    coin = draws(5)
    coin[:, 4] = torch.tensor([0.0, 0.49, 0.5, 0.51, 0.99])  # below 0.5: flipped
    views = store.training_view(index, get_augment("flip"), coin)
    assert torch.equal(views[:2], store.view(index[:2]).flip(-1))
    assert torch.equal(views[2:], store.view(index[2:]))


def test_full_crop_equals_image_and_flips(store_of, noisy):
    store, index = store_of(noisy), torch.arange(5)
    torch.testing.assert_close(
        store.training_view(index, FULL_CROP, draws(5)), store.view(index), atol=1e-4, rtol=0
    )
    mirror = store.training_view(
        index, view_with(scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=1.0), draws(5)
    )
    torch.testing.assert_close(mirror, store.view(index).flip(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("x", "y"), [(0, 0), (1, 0), (0, 1), (1, 1), (0.5, 0.5)])
def test_quarter_crop_shows_drawn_position(store_of, x, y):
    """Crop at the drawn position.

    On a ramp, brightness identifies the position: a crop of half the side in a corner covers the
    nearer half.
    """
    ramp = np.linspace(20, 220, 16)
    pixels = np.stack(np.broadcast_arrays(ramp[None, :], ramp[:, None], 0.0), -1)[
        None
    ]  # red grows with x, green with y
    quarter = view_with(scale=(0.25, 0.25), ratio=(1.0, 1.0))
    view = (
        pixels_of(store_of(pixels).training_view(torch.arange(1), quarter, draws(1, x=x, y=y)))[0]
        * 255
    )

    def value(
        place: float, where: np.ndarray
    ) -> np.ndarray:  # brightness at the pixel centres of the crop
        at = 8 * place + (where + 0.5) / 2 - 0.5  # in pixels of the original
        return 20 + 200 / 15 * at

    inner = slice(3, 13)  # next to the border, bicubic weights reach over the edge
    np.testing.assert_allclose(
        view[inner, inner, 0], np.broadcast_to(value(x, np.arange(16)[inner]), (10, 10)), atol=2
    )
    np.testing.assert_allclose(
        view[inner, inner, 1],
        np.broadcast_to(value(y, np.arange(16)[inner])[:, None], (10, 10)),
        atol=2,
    )


def test_random_crop_shows_224_of_256_pixels(store_of):
    """Locate an unresized crop by its red values, which are the positions of the pixels."""
    pixels = np.zeros((1, 256, 256, 3))
    pixels[..., 0] = np.arange(256)
    for u, middle in ((0.0, 111.5), (0.5, 127.5), (1.0, 143.5)):
        draw_row = draws(1, area=0.3, shape=0.9, x=u, flip=0.9)
        view = store_of(pixels).training_view(
            torch.tensor([0]), get_augment("randomcrop"), draw_row
        )
        assert 255 * pixels_of(view)[..., 0].mean() == pytest.approx(middle, abs=0.5)


@pytest.mark.parametrize("name", ["crop", "fppl", "hgp", "randomcrop"])
def test_crops_stay_inside_image(store_of, name):
    """Place every crop inside the image.

    A crop beyond the border would mirror the ramps: the view would not grow from left to right
    and from top to bottom.
    """
    ramp = np.linspace(0, 255, 64)
    pixels = np.stack(np.broadcast_arrays(ramp[None, :], ramp[:, None], 0.0), -1)[
        None
    ]  # red grows with x, green with y
    corners = torch.cartesian_prod(*(torch.tensor([0.0, 0.999]) for _ in range(4)))
    draw_rows = torch.cat([corners, torch.rand(200, 4, generator=torch.Generator().manual_seed(0))])
    draw_rows = torch.cat([draw_rows, torch.full((len(draw_rows), 2), 0.99)], 1)  # not flipped
    views = pixels_of(
        store_of(pixels).training_view(
            torch.zeros(len(draw_rows), dtype=torch.int64), get_augment(name), draw_rows
        )
    )
    for channel, axis in ((0, 2), (1, 1)):
        steps = np.diff(views[..., channel], axis=axis)
        assert steps.min() > -0.01
        assert steps.sum(axis).min() > 0.1


@pytest.mark.parametrize("name", ["none", "flip", "crop", "fppl", "hgp", "randomcrop"])
def test_constant_image_stays_constant(store_of, name):
    pixels = np.broadcast_to(np.array([10, 200, 77]), (50, 24, 24, 3))
    views = pixels_of(
        store_of(pixels).training_view(torch.arange(50), get_augment(name), torch.rand(50, DRAWS))
    )
    np.testing.assert_allclose(views * 255, np.broadcast_to([10, 200, 77], views.shape), atol=0.01)


@pytest.mark.parametrize(("draw", "factor"), [(0.0, 0.75), (0.5, 1.0), (0.75, 1.125)])
def test_brightness_multiplies_and_clips(store_of, noisy, draw, factor):
    view = store_of(noisy).training_view(
        torch.arange(5), view_with(brightness=0.25), draws(5, brightness=draw)
    )
    np.testing.assert_allclose(pixels_of(view), np.minimum(noisy / 255 * factor, 1), atol=1e-6)


def test_change_gets_unit_range_crops_and_extra_draws(store_of, noisy):
    """Darken each image by its extra draw and reject a change of shape."""
    dark = view_with(
        more_draws=1, change=lambda self, images, draws: images * draws[..., None, None]
    )
    assert dark.draws == DRAWS + 1
    rows = torch.cat([draws(5), torch.linspace(0, 1, 5)[:, None]], 1)
    views = pixels_of(store_of(noisy).training_view(torch.arange(5), dark, rows))
    factors = np.linspace(0, 1, 5).reshape(5, 1, 1, 1)
    np.testing.assert_allclose(views, noisy / 255 * factors, atol=1e-6)
    flat = view_with(change=lambda self, images, draws: images[:, 0])
    with pytest.raises(
        FczooError, match=r"View.change returned shape \[5, 16, 16\] for images \[5, 3, 16"
    ):
        store_of(noisy).training_view(torch.arange(5), flat, draws(5))


def test_unknown_augmentation_suggests_nearest_name():
    with pytest.raises(FczooError, match=r"no augmentation is called 'flop'; did you mean flip"):
        get_augment("flop")


# --- query features


@pytest.fixture
def many_images(backbone) -> Images:
    count = 2 * QUERY_BLOCK + 11
    pixels = np.random.default_rng(0).integers(0, 256, (count, 16, 16, 3)).astype(np.uint8)
    return Images(pixels, np.zeros(count, np.int64))


def test_query_equals_frozen_feature_of_test_view(backbone, many_images):
    store, index = ImageStore(many_images, backbone), torch.tensor([130, 3, 70, 3])
    torch.testing.assert_close(
        store.query(index), backbone(store.view(index)), rtol=1e-10, atol=1e-10
    )


def test_queries_do_not_depend_on_order(backbone, many_images):
    single = backbone.to(dtype=torch.float32)
    stores, everything = (
        [ImageStore(many_images, single) for _ in range(3)],
        torch.arange(len(many_images.labels)),
    )
    at_once = stores[0].query(everything)
    backwards = torch.cat([stores[1].query(i) for i in everything.flip(0).split(7)]).flip(0)
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(0))
    assert torch.equal(at_once, backwards)
    assert torch.equal(at_once[order], torch.cat([stores[2].query(i) for i in order.split(50)]))


def test_queries_are_computed_once_and_copied(backbone, many_images):
    class Counting(Backbone):
        images = 0

        def __call__(self, images, *rest, **options):
            type(self).images += len(images)
            return super().__call__(images, *rest, **options)

    store = ImageStore(many_images, Counting(backbone.config, backbone.weights))
    first = store.query(torch.arange(QUERY_BLOCK))
    assert Counting.images == QUERY_BLOCK
    copy = first.clone()
    first.zero_()
    assert torch.equal(store.query(torch.arange(QUERY_BLOCK)), copy)
    assert Counting.images == QUERY_BLOCK
    store.query(torch.arange(len(many_images.labels)))
    assert Counting.images == len(many_images.labels)
