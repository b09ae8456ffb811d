"""Test decoding of image files and folders of users."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from fczoo import Benchmark, FczooError, Settings, create_method
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import Images
from fczoo.data.folder_layout import read_folders
from fczoo.data.image_files import ImageFiles, UnreadableImage, class_folders, prepare
from fczoo.data.stream import make_stream, with_resize
from fczoo.data.views import DRAWS, ImageStore, get_augment
from fczoo.models.classifier import EvaluationTransform

pytestmark = pytest.mark.usefixtures("cache")
EVERY = np.arange(12)
VIEW = EvaluationTransform(8, 8, 1.0, (0.0,) * 3, (1.0,) * 3)

# ---------------------------------------------------------------- one image


@pytest.mark.parametrize(
    ("mode", "colour", "suffix", "expected_pixel"),
    [
        ("RGB", (200, 100, 50), "png", (200, 100, 50)),
        ("L", 90, "jpg", (90, 90, 90)),
        ("1", 1, "png", (255, 255, 255)),
        ("LA", (90, 0), "png", (90, 90, 90)),
        ("RGBA", (200, 100, 50, 0), "png", (200, 100, 50)),
        ("CMYK", (0, 255, 255, 0), "jpg", (254, 0, 0)),
        ("YCbCr", (128, 128, 128), "jpg", (128, 128, 128)),
        ("P", 7, "gif", None),
    ],
)
def test_image_modes_are_converted_to_rgb(
    mode: str, colour: object, suffix: str, expected_pixel: tuple | None, tmp_path: Path
) -> None:
    file = tmp_path / f"image.{suffix}"
    image = Image.new(mode, (9, 7), colour)
    if mode == "P":
        image.putpalette([value for i in range(256) for value in (i, 2 * i % 256, 3 * i % 256)])
        expected_pixel = (7, 14, 21)
    image.save(file)
    pixels = prepare(file, 5)
    assert pixels.shape == (5, 5, 3) and pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - expected_pixel).max() <= 2


@pytest.mark.parametrize("size", [(1, 1), (1, 4000), (4000, 1), (3, 2), (8, 8), (300, 200)])
def test_image_shapes_become_square(size: tuple[int, int], tmp_path: Path) -> None:
    Image.new("RGB", size, (10, 200, 30)).save(tmp_path / "image.png")
    assert (prepare(tmp_path / "image.png", 8) == [10, 200, 30]).all()
    assert prepare(tmp_path / "image.png", 8).shape == (8, 8, 3)


@pytest.mark.parametrize("shape", [(40, 60), (61, 40), (33, 33)])
def test_prepare_crops_centre(shape: tuple[int, int], tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    reference = np.asarray(
        ImageOps.fit(Image.fromarray(pixels), (16, 16), Image.Resampling.BICUBIC)
    )
    assert np.array_equal(prepare(tmp_path / "image.png", 16), reference)


def test_resize_crops_or_squashes(tmp_path: Path, cache: Path) -> None:
    """Crop or squash a ramp of grey values.

    Column x of an image 24 wide and 8 high has the grey value 10 (x + 1/2).

    Cropped to 8 x 8, columns 8 to 15 remain: 85, 95, ... Squashed, column k covers the columns 3k
    to 3k + 2, so that it has 30 (k + 1/2) wherever the kernel does not meet the image's edge.
    """
    ramp = np.tile((10 * (np.arange(24) + 0.5)).astype(np.uint8)[:, None], (8, 1, 3))
    Image.fromarray(ramp).save(tmp_path / "0.png")
    crop = ImageFiles("toy", tmp_path, ("0.png",), np.zeros(1, np.int64), 8)
    squash = with_resize(crop, "squash")
    (cropped,), (squashed,) = (part.take(np.arange(1)).pixels for part in (crop, squash))
    assert cropped[3, :, 0].tolist() == [85, 95, 105, 115, 125, 135, 145, 155]
    assert squashed[3, 2:6, 0].tolist() == [75, 105, 135, 165]
    assert squashed[3, 0, 0] < 25 and squashed[3, 7, 0] > 215
    assert len(list(cache.glob("*.u8"))) == 2  # one cache file per variant


def test_image_of_target_size_is_unchanged(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    assert np.array_equal(prepare(tmp_path / "image.png", 16), pixels)


def test_orientation_tag_applies_only_to_user_images(tmp_path: Path, cache: Path) -> None:
    """Apply the orientation tag to images of users only.

    Tag 6 turns red left and blue right into red above blue. Published data sets stay as stored.
    """
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:, :4, 0] = pixels[:, 4:, 2] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    for part in ("train", "test"):
        for name in "ab":
            (tmp_path / part / name).mkdir(parents=True)
            Image.fromarray(pixels).save(tmp_path / part / name / "0.png", exif=exif)
    file = tmp_path / "train" / "a" / "0.png"
    assert np.array_equal(prepare(file, 8), pixels)
    upright = prepare(file, 8, upright=True)
    assert (upright[:4] == [255, 0, 0]).all() and (upright[4:] == [0, 0, 255]).all()
    stored = read_folders("imagefolder", tmp_path, 8).train
    users = DATASETS.get("imagefolder")().load(tmp_path).train
    assert np.array_equal(stored.take(np.arange(2)).pixels[1], pixels)
    assert np.array_equal(users.take(np.arange(2), 8).pixels[1], upright)
    assert len(list(cache.glob("*.u8"))) == 2  # one cache file per variant
    with Image.open(file) as image:
        view = VIEW(image)
        assert image.getexif()[0x0112] == 6  # the image of the user is unchanged
    assert np.array_equal(255 * view.permute(1, 2, 0).numpy(), upright)


def test_16_bit_image_is_rejected_with_advice(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(tmp_path / "a" / "0.png")
    files = ImageFiles("toy", tmp_path, ("a/0.png",), np.zeros(1, np.int64), 8)
    with pytest.raises(FczooError) as caught:
        files.take(np.arange(1))
    with Image.open(tmp_path / "a" / "0.png") as image:
        mode = image.mode
    assert mode in ("I;16", "I")  # I before Pillow 10.1
    problem = f"cannot read image {tmp_path}/a/0.png: mode {mode} has more than 8 bits per channel"
    advice = "convert it to 8 bits, or see `fczoo data check toy` for all such files"
    assert str(caught.value) == f"{problem}; {advice}"
    with (
        Image.open(tmp_path / "a" / "0.png") as image,
        pytest.raises(FczooError, match=r"more than 8 bits per channel; convert it to 8 bits$"),
    ):
        VIEW(image)


def test_damaged_image_files_are_rejected(tmp_path: Path) -> None:
    valid_file = tmp_path / "good.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(
        valid_file
    )
    valid_bytes = valid_file.read_bytes()
    for name, content in (
        ("empty.png", b""),
        ("text.jpg", b"hello"),
        ("short.png", valid_bytes[: len(valid_bytes) // 2]),
    ):
        (tmp_path / name).write_bytes(content)
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(tmp_path / "deep.png")
    for name in ("empty.png", "text.jpg", "short.png", "deep.png", "missing.png"):
        with pytest.raises(
            UnreadableImage, match=rf"^cannot read image {tmp_path / name}: ."
        ) as caught:
            prepare(tmp_path / name, 8)
        assert "\n" not in str(caught.value)


def test_postscript_with_image_suffix_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reject PostScript in a file with the suffix of an image.

    Pillow would pass it to Ghostscript, which executes the content of the file.
    """
    calls: list[object] = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *rest: calls.append(rest) or 1 / 0)
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "image.png").write_bytes(script)
    with pytest.raises(UnreadableImage, match=r"image\.png: cannot identify image file"):
        prepare(tmp_path / "image.png", 8)
    assert not calls


def test_png_with_jpg_suffix_is_read(tmp_path: Path) -> None:
    """Read a usual format under another suffix, such as a PNG file among ImageNet's JPEG files."""
    Image.new("RGB", (8, 8), (10, 200, 30)).save(tmp_path / "image.jpg", "PNG")
    assert (prepare(tmp_path / "image.jpg", 8) == [10, 200, 30]).all()


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes")
def test_named_pipe_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "image.png")
    with pytest.raises(UnreadableImage, match="it is not an ordinary file"):
        prepare(tmp_path / "image.png", 8)


# ---------------------------------------------------------------- folders of users


def test_class_folders_are_read(files: ImageFiles) -> None:
    stream = make_stream("imagefolder", files.root, tasks=3)
    assert stream.classes == ("class0", "class1", "class2")
    assert stream.train.pixels.shape == (9, 256, 256, 3)
    assert np.bincount(stream.test.labels).tolist() == [1, 1, 1]


@pytest.mark.parametrize("test", ["test", "val"])
def test_train_and_test_folders_are_read(test: str, files: ImageFiles) -> None:
    for name in files.names[:6]:
        for part in ("train", test):
            (files.root / part / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(files.root / name, files.root / part / name)
    stream = make_stream("imagefolder", files.root, tasks=3, stored_size=16)
    assert len(stream.train.labels) == len(stream.test.labels) == 6
    assert np.array_equal(stream.train.pixels, stream.test.pixels)
    shutil.rmtree(files.root / test / "class1")
    with pytest.raises(FczooError, match="have different classes: class1 is only in train/"):
        make_stream("imagefolder", files.root, tasks=3)


def test_unusable_folders_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(FczooError, match=r"no folder .*--data-root"):
        make_stream("imagefolder", tmp_path / "missing")
    (tmp_path / "own").mkdir()
    with pytest.raises(FczooError, match="no class folders in"):
        make_stream("imagefolder", tmp_path / "own")
    for name in ("a", ".hidden"):
        (tmp_path / "own" / name).mkdir()
    (tmp_path / "own" / "a" / "notes.txt").write_text("no image")
    with pytest.raises(FczooError, match=r"no image in .*a \(1 such classes\)"):
        class_folders(tmp_path / "own")
    Image.new("RGB", (4, 4)).save(tmp_path / "own" / "a" / "only.png")
    with pytest.raises(FczooError, match="too small to hold out test images"):
        make_stream("imagefolder", tmp_path / "own")


def test_stored_size_needs_image_files() -> None:
    with pytest.raises(
        FczooError,
        match="have a fixed side of 32 pixels; leave out --stored-size, which is for image files",
    ):
        make_stream("digits", stored_size=64)
    assert make_stream("digits", stored_size=32).train.pixels.shape[1] == 32


# ---------------------------------------------------------------- image stores and benchmarks


def test_cached_store_equals_memory_store(files: ImageFiles, backbone) -> None:
    cache_images = files.take(EVERY)
    stores = [
        ImageStore(images, backbone)
        for images in (cache_images, Images(np.array(cache_images.pixels), cache_images.labels))
    ]
    assert np.shares_memory(
        stores[0].pixels.numpy(), cache_images.pixels
    )  # the pixels are not copied into memory
    index, draws = (
        torch.tensor([3, 0, 11]),
        torch.rand(3, DRAWS, generator=torch.Generator().manual_seed(0)),
    )
    assert torch.equal(*(store.view(index) for store in stores))
    assert torch.equal(
        *(store.training_view(index, get_augment("crop"), draws) for store in stores)
    )


def test_benchmark_on_image_files(files: ImageFiles) -> None:
    settings = Settings.for_dataset(
        "imagefolder",
        data_root=str(files.root),
        backbone="vit_nano_32",
        tasks=3,
        clients=2,
        rounds=1,
        epochs=1,
        stored_size=32,
    )
    result = Benchmark.open(settings).run(create_method("fedncm"))
    assert len(result.accuracy) == 3 and result.test_counts == [1, 1, 1]


def test_missing_data_and_weights_are_reported_together(tmp_path: Path) -> None:
    for name in ("tinyimagenet", "cars196"):
        settings = Settings.for_dataset(name)
        with pytest.raises(FczooError) as caught:
            Benchmark.open(settings)
        cls, message = DATASETS.get(name), str(caught.value)
        for phrase in (
            cls.folder,
            cls.source,
            "data_root",
            f"the weights {settings.backbone} are not on this machine",
            "or give a copy as backbone FILE",
            str(tmp_path),
        ):
            assert phrase in message
        assert ("fczoo data fetch" in message) == bool(cls.archives)
        assert "\n" not in message
    (tmp_path / "home" / "data" / "cifar-100-python").mkdir(parents=True)  # an empty folder
    with pytest.raises(
        FczooError, match=r"no weight file at nowhere.*; cifar100 in .* is incomplete"
    ):
        Benchmark.open(Settings.for_dataset("cifar100", backbone="nowhere.safetensors"))
    with pytest.raises(FczooError, match=r"the weight file nowhere\.safetensors does not exist$"):
        Benchmark.open(Settings.for_dataset("tinyimagenet", backbone="nowhere.safetensors"))
