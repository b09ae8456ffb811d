"""Test ``fczoo data fetch`` with archives that are packed like the official ones."""

import gzip
import hashlib
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fczoo import FczooError
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import Archive
from fczoo.data.fetch import PLAIN_SUFFIXES, fetch, file_name
from helpers_datasets import ARRAYS, SETS


@pytest.fixture(autouse=True)
def fczoo_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))


def pack_archives(name: str, source: Path, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack a copy like its official archives, with their names but new checksums.

    Args:
        name: Name of the data set.
        source: Folder of the copy.
        served: Folder of the archives.
        monkeypatch: Sets the checksums.
    """
    cls, archives = DATASETS.get(name), []
    served.mkdir()
    for archive in cls.archives:
        file = served / file_name(archive.url)
        if archive.into == "FashionMNIST/raw":
            file.write_bytes(gzip.compress((source / archive.into / file.stem).read_bytes()))
        elif file.suffix in PLAIN_SUFFIXES:
            file.write_bytes((source / archive.into / file.name).read_bytes())
        elif file.suffix == ".zip":
            with zipfile.ZipFile(file, "w") as out:
                for path in sorted((source / archive.into).rglob("*")):
                    out.write(path, path.relative_to(source / archive.into))
        else:
            with tarfile.open(file, "w" if file.suffix == ".tar" else "w:gz") as out:
                for path in sorted(source.iterdir()):
                    out.add(path, path.name)
        content = file.read_bytes()
        archives.append(
            Archive(archive.url, hashlib.md5(content).hexdigest(), len(content), archive.into)
        )
    monkeypatch.setattr(cls, "archives", tuple(archives))


@pytest.mark.parametrize("name", [n for n in (*SETS, *ARRAYS) if DATASETS.get(n).archives])
def test_fetched_dataset_equals_source(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    {**ARRAYS, **{n: entry[0] for n, entry in SETS.items()}}[name](source)
    pack_archives(name, source, tmp_path / "served", monkeypatch)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: True)
    message = fetch(name, root, (tmp_path / "served").as_uri())
    cls = DATASETS.get(name)
    assert str(root / cls.folder) in message and cls.licence in message
    visible = [p.name for p in root.iterdir() if not p.name.startswith(".")]
    assert visible == [Path(cls.folder).parts[0]]
    assert not [p for p in root.glob(".fetch-*") if p.is_dir()]
    ours, theirs = DATASETS.get(name)().load(root), DATASETS.get(name)().load(source)
    assert ours.classes == theirs.classes
    for a, b in ((ours.train, theirs.train), (ours.test, theirs.test)):
        assert np.array_equal(a.labels, b.labels)
        assert getattr(a, "names", None) == getattr(b, "names", None)
    assert "already there" in fetch(name, root, "http://nowhere.invalid")


@pytest.mark.parametrize("name", ["miniimagenet", "cars196", "imagenet_subset"])
def test_manual_dataset_reports_source_and_layout(name: str, tmp_path: Path) -> None:
    cls = DATASETS.get(name)
    with pytest.raises(FczooError) as caught:
        fetch(name, tmp_path)
    for phrase in (
        "cannot be downloaded automatically",
        cls.source,
        cls.layout,
        str(tmp_path),
        f"fczoo data check {name}",
    ):
        assert phrase in str(caught.value)
