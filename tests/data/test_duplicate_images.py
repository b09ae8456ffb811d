"""Test images that are in the training and the test part, or in two classes."""

import logging
import shutil
from pathlib import Path

import pytest

from fczoo.data.stream import make_stream
from fczoo.data.verify import verify
from helpers_images import parts


@pytest.fixture(autouse=True)
def fczoo_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))


def test_shared_images_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts(tmp_path)
    for i in range(2):
        shutil.copy(tmp_path / "train" / "a" / f"{i}.png", tmp_path / "test" / "a" / f"{i}.png")
    table, wrong = verify("imagefolder", tmp_path)
    assert table.splitlines()[-1] == "2 test images are also training images"
    assert wrong == []
    with caplog.at_level(logging.WARNING):
        stream = make_stream("imagefolder", tmp_path, tasks=1)
    remark = "imagefolder: 2 test images are also training images"
    assert stream.remarks == (remark,) and remark in caplog.messages
    assert make_stream("digits").remarks == ()


def test_image_in_two_classes_is_reported(tmp_path: Path) -> None:
    parts(tmp_path)
    shutil.copy(tmp_path / "train" / "a" / "0.png", tmp_path / "train" / "b" / "8.png")
    assert (
        "1 image is in more than one class, such as a and b" in verify("imagefolder", tmp_path)[0]
    )
