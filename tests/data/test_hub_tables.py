"""Test ``hf:`` data sets: tables of Hugging Face's ``datasets`` in a folder or as parquet."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from fczoo import FczooError
from fczoo.cli.app import main
from fczoo.core.files import shorten
from fczoo.core.registry import DATASETS
from fczoo.data.fetch import fetch
from fczoo.data.hub_files import HUB_NAME, import_library, locate_dataset
from fczoo.data.stream import make_stream, with_resize
from fczoo.federation.settings import Settings
from helpers_datasets import hub_folder, hub_tables, number_of

try:
    HUB: Any = import_library()
except FczooError:
    pytest.skip("Hugging Face's datasets is not installed (extra hf)", allow_module_level=True)


@pytest.fixture(autouse=True)
def fczoo_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))


def load(folder: Path, columns: str = "") -> Any:
    return DATASETS.get(f"hf:{folder}{columns}")().load(Path())


# ---------------------------------------------------------------- images and labels


@pytest.mark.parametrize("kind", ["saved", "parquet", "parquet of other software"])
def test_storage_formats_give_same_images(kind: str, tmp_path: Path) -> None:
    folder = hub_folder(tmp_path)
    if kind != "saved":
        tables, folder = HUB.load_from_disk(str(folder)), tmp_path / "files"
        if kind != "parquet":  # no names of classes, and images are structs
            struct = {"bytes": HUB.Value("binary"), "path": HUB.Value("string")}
            features = HUB.Features({"image": struct, "label": HUB.Value("uint8")})
            tables = tables.cast(features)
        (folder / "data").mkdir(parents=True)
        for split, name in (("train", "training_0"), ("test", "dev-00000-of-00001")):
            tables[split].to_parquet(str(folder / "data" / f"{name}.parquet"))
    stream = make_stream(f"hf:{folder}", Path(), tasks=5, stored_size=8)
    assert stream.train.labels.tolist() == list(range(10)) * 3
    assert number_of(stream.train.pixels).tolist() == list(range(10)) * 3
    assert number_of(stream.test.pixels).tolist() == list(range(10))
    first = "0" if kind.endswith("software") else "kind 0"
    assert (stream.classes[0], stream.train.pixels.shape) == (first, (30, 8, 8, 3))


def test_resize_crops_or_squashes(tmp_path: Path) -> None:
    """Show the white left third of an image only if it is squashed, not cropped."""
    pixels = np.zeros((8, 24, 3), np.uint8)
    pixels[:, :8] = 255
    table = HUB.Dataset.from_dict({"image": [pixels] * 10, "label": [0, 1] * 5})
    (tmp_path / "files").mkdir()
    table.cast_column("image", HUB.Image()).to_parquet(str(tmp_path / "files" / "train.parquet"))
    part = load(tmp_path / "files").train
    for resize, first, last in (("crop", 0, 0), ("squash", 255, 0)):
        square = with_resize(part, resize).take(np.arange(1), 8).pixels[0]
        assert (square[4, 0, 0], square[4, 7, 0]) == (first, last)


def test_changed_table_is_decoded_again(tmp_path: Path) -> None:
    for first in (0, 5):
        folder = tmp_path / "files"
        folder.mkdir(exist_ok=True)
        classes = [(k + first) % 10 for k in range(10)]
        for split in ("train", "test"):
            hub_tables(classes).to_parquet(str(folder / f"{split}.parquet"))
        images = load(folder).train.take(np.arange(3), 8)
        assert number_of(images.pixels).tolist() == images.labels.tolist() == classes[:3]


def test_integer_labels_are_sorted_classes(tmp_path: Path) -> None:
    table = hub_tables([0, 1, 2, 2, 1, 0]).remove_columns("label")
    table = table.add_column("digit", [7, 3, 9, 9, 3, 7])
    HUB.DatasetDict(train=table, validation=table).save_to_disk(str(tmp_path / "d"))
    data = load(tmp_path / "d")
    assert (data.classes, data.split) == (("3", "7", "9"), "splits train and validation")
    assert data.train.labels.tolist() == [1, 0, 2, 2, 0, 1]


def test_unlabelled_test_split_is_ignored(tmp_path: Path) -> None:
    table = hub_tables(range(10))
    hidden = hub_tables([0, 1]).cast_column("label", HUB.Value("int64")).remove_columns("label")
    hidden = hidden.add_column("label", [-1, -1]).cast_column("label", table.features["label"])
    HUB.DatasetDict(train=table, test=hidden, val=table).save_to_disk(str(tmp_path / "d"))
    data = load(tmp_path / "d")
    assert data.remarks == ("split test hides its labels (-1) and is not used",)
    assert (data.split, len(data.test.labels)) == ("splits train and val", 10)


def test_missing_test_split_is_held_out(tmp_path: Path) -> None:
    hub_tables(list(range(10)) * 5).save_to_disk(str(tmp_path / "d"))
    data = load(tmp_path / "d")
    assert np.bincount(data.train.labels).tolist() == [4] * 10
    assert sorted([*data.train.index, *data.test.index]) == list(range(50))
    assert number_of(data.test.take(np.arange(10), 8).pixels).tolist() == data.test.labels.tolist()


def test_groups_are_read_from_column(tmp_path: Path) -> None:
    table = hub_tables([0, 1, 0, 1], hospital=["B", "A", "C", "A"])
    table = table.cast_column("label", HUB.ClassLabel(names=["no", "yes"]))
    HUB.DatasetDict(train=table, test=table).save_to_disk(str(tmp_path / "d"))
    assert load(tmp_path / "d", ",group=hospital").groups.tolist() == [1, 0, 2, 0]
    assert load(tmp_path / "d").groups is None


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("columns", "named", "message"),
    [
        ({"coarse": [1]}, ",label=fine", "has no column 'fine'; "),
        ({"text": ["a"]}, ",label=text", "labels in 'text' of .* have type string; convert them"),
        ({"part": [-1]}, ",label=part", "split train has 30 negative labels in column 'part'"),
        ({"part": [None]}, ",label=part", "have type null; convert them"),
        ({"text": ["a"]}, ",image=text", "column 'text' of .* holds string, not images"),
        ({}, ",colour=text", "cannot read 'colour=text' as a column; write image=NAME"),
        ({"site": ["a"]}, ",group=place", "has no column 'place'"),
    ],
)
def test_invalid_columns_are_rejected(
    columns: Any, named: str, message: str, tmp_path: Path
) -> None:
    folder = hub_folder(tmp_path, **columns)
    with pytest.raises(FczooError, match=message) as caught:
        load(folder, named)
    assert "\n" not in str(caught.value)


def test_class_label_column_is_preferred(tmp_path: Path) -> None:
    assert load(hub_folder(tmp_path, number=[1])).classes[3] == "kind 3"


def test_ambiguous_and_missing_columns_are_rejected(tmp_path: Path) -> None:
    labels = {"first": [0, 1], "second": [1, 0]}
    table = hub_tables([0, 1], **labels).remove_columns("label")
    HUB.DatasetDict(train=table, test=table).save_to_disk(str(tmp_path / "two"))
    message = r"has 2 columns of .* first \(int64\), second \(int64\); name one with --hf-columns"
    with pytest.raises(FczooError, match=message):
        load(tmp_path / "two")
    assert load(tmp_path / "two", ",label=second").train.labels.tolist() == [1, 0]
    HUB.Dataset.from_dict({"label": [0, 1]}).save_to_disk(str(tmp_path / "none"))
    with pytest.raises(FczooError, match="has no column of images among label"):
        load(tmp_path / "none")


def test_missing_labels_and_images_are_rejected(tmp_path: Path) -> None:
    table = hub_tables([0, 1, 0], part=[0, None, 1])
    HUB.DatasetDict(train=table, test=table).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(FczooError, match="'part' has no value in 1 row of split train"):
        load(tmp_path / "d", ",label=part")
    images = {"image": [None, {"bytes": b"no picture", "path": None}], "label": [0, 1]}
    features = HUB.Features({"image": HUB.Image(), "label": HUB.Value("int64")})
    broken = HUB.Dataset.from_dict(images, features=features)
    HUB.DatasetDict(train=broken, test=broken).save_to_disk(str(tmp_path / "e"))
    data = load(tmp_path / "e")
    for row, reason in ((0, "it has no content"), (1, "cannot identify image")):
        with pytest.raises(FczooError, match=f"image in row {row} of split train .*{reason}"):
            data.train.take(np.array([row]), 8)


def test_inconsistent_classes_and_splits_are_rejected(tmp_path: Path) -> None:
    few = hub_tables([0, 1])
    HUB.DatasetDict(train=few, test=few).save_to_disk(str(tmp_path / "few"))
    with pytest.raises(FczooError, match=r"class kind 2 has no training images .*\(8 such"):
        load(tmp_path / "few")
    HUB.DatasetDict(left=few, right=few).save_to_disk(str(tmp_path / "names"))
    with pytest.raises(FczooError, match="has the splits left, right, but none is called train"):
        load(tmp_path / "names")
    for name in ("a/train-0", "b/train-0"):
        (tmp_path / "both" / name).parent.mkdir(parents=True)
        few.to_parquet(str(tmp_path / "both" / f"{name}.parquet"))
    with pytest.raises(FczooError, match="name the folder of one configuration"):
        load(tmp_path / "both")
    (tmp_path / "both" / "a" / "train-0.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(FczooError, match=r"cannot read .*; save it again"):
        load(tmp_path / "both" / "a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FczooError, match="holds neither a data set of save_to_disk nor parquet"):
        load(tmp_path / "empty")


# ---------------------------------------------------------------- names and locations


def test_dataset_names_contain_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sets" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    root = str(tmp_path / "sets")
    for dataset, data_root in (
        (f"hf:{root}/mine/", None),
        ("hf:sets/mine", None),
        ("HF:mine", root),
    ):
        settings = Settings.for_dataset(dataset, data_root=data_root, hf_columns="label=b,image=a")
        assert settings.dataset == "hf:mine,image=a,label=b"
        assert (settings.data_root, settings.hf_columns) == (root, None)
        assert settings.portable()["data_root"] == "sets"
        assert Settings.for_dataset(settings.dataset, data_root=settings.data_root) == settings
    hub = Settings.for_dataset("hf:org/name,label=b")
    assert (hub.dataset, hub.data_root) == ("hf:org/name,label=b", None)
    assert shorten("hf:org/name,label=b") == "hf:org/name,label=b"
    assert shorten("hf:/home/me/name") == "hf:name"
    assert DATASETS.get("hf:mine") is DATASETS.get("hf:mine")
    assert "hf:mine" in DATASETS and "digits:mine" not in DATASETS
    with pytest.raises(FczooError, match="no data set is called 'digits:mine'"):
        Settings.for_dataset("digits:mine")


@pytest.mark.parametrize(
    ("dataset", "root", "columns", "message"),
    [
        ("digits", None, "label=a", "--hf-columns is for --dataset hf:PLACE, not digits"),
        ("hf:/nowhere", None, None, "hf:/nowhere is neither a folder nor a name on the hub"),
        ("hf:a/b/c/d", None, None, "is neither a folder nor a name on the hub"),
        ("hf:/set", "/data", None, "hf:/set is an absolute path; leave out --data-root"),
    ],
)
def test_invalid_hub_locations_are_rejected(
    dataset: str, root: Any, columns: Any, message: str
) -> None:
    with pytest.raises(FczooError, match=message):
        locate_dataset(dataset, root, columns)


def test_hub_dataset_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def load_dataset(*words: str) -> Any:
        requests.append(words)
        if words[0] == "org/wrong":
            raise ValueError("Config name is missing.\nPlease pick one")
        return HUB.DatasetDict(train=hub_tables(range(10)), test=hub_tables(range(10)))

    monkeypatch.setattr(HUB, "load_dataset", load_dataset)
    message = fetch("hf:org/name/small")
    folder = tmp_path / "home" / "data" / "org" / "name" / "small"
    assert str(folder) in message and requests == [("org/name", "small")]
    assert "is already there" in fetch("hf:org/name/small") and len(requests) == 1
    assert len(make_stream("hf:org/name/small", stored_size=8).train.labels) == 10
    with pytest.raises(FczooError, match=r"org/wrong .*Config name is missing.*ORG/NAME/CONFIG"):
        fetch("hf:org/wrong")
    with pytest.raises(FczooError, match="run `fczoo data fetch hf:org/absent`, or name one"):
        make_stream("hf:org/absent")
    with pytest.raises(FczooError, match="mirror does not apply; set HF_ENDPOINT"):
        fetch("hf:org/other", mirror="http://nowhere.invalid")
    assert not HUB_NAME.fullmatch("/a/folder")


def test_missing_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub_folder(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FczooError) as caught:
        load(folder)
    problem = "data sets hf:PLACE need Hugging Face's package datasets, which"
    assert str(caught.value) == f"{problem} is not installed; run pip install 'fczoo[hf]'"

    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(FczooError) as caught:
        import_library()
    reason = "cannot be imported: No module named 'pyarrow'"
    assert str(caught.value) == f"{problem} {reason}; run pip install 'fczoo[hf]'"


def test_library_is_imported_despite_datasets_folder() -> None:
    code = (
        "import datasets, fczoo.data.hub_files as f; "
        "print(hasattr(datasets, 'Dataset'), hasattr(f.import_library(), 'load_dataset'))"
    )
    root = Path(__file__).parents[2]
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert process.stdout.split() == ["False", "True"], process.stderr


# ---------------------------------------------------------------- commands


def test_hub_run_is_resumed_and_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub_folder(tmp_path, coarse=[1], site=["a"])
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        outcome = CliRunner().invoke(main, list(words))
        assert outcome.exit_code == 0, outcome.output
        return outcome.output

    size = ["--stored-size", "32", "--backbone", "vit_nano_32", "--clients", "2", "--tasks", "2"]
    run("bench", "--methods", "fedncm", "--dataset", f"hf:{folder}", *size, "--out", "out")
    assert str(tmp_path) not in "".join(f.read_text() for f in Path("out").rglob("*.json"))
    assert "already finished, skipped" in run("bench", "--resume", "--out", "out")
    assert "(as in the run)" in run("evaluate", "out")
    given = run("evaluate", "out", "--dataset", "hf:saved", "--hf-columns", "label=label")
    assert "on 10 images" in given
    assert "hf:saved" in run("report", "out")
    assert "training images        30" in run("data", "check", "hf:saved")
    words = ["partition", "--dataset", "hf:saved", "--hf-columns", "label=label", *size[4:]]
    assert run(*words).startswith("hf:saved,label=label")
