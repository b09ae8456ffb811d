"""Test ``fczoo predict``, ``evaluate``, ``export`` and ``cite``."""

import csv
import io
import json
import logging
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from sklearn.datasets import load_digits

import fczoo
from fczoo.cli.app import main
from fczoo.core.registry import METHODS
from fczoo.federation import data_setup
from fczoo.models.card import bibtex, method_entries
from helpers_cli import TINY, run


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run two methods on digits, one with logits and one without."""
    folder = tmp_path_factory.mktemp("run") / "run"
    run("bench", "--methods", "fedavg,fedncm", *TINY, "--out", str(folder))
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three images of each of four classes as files."""
    folder, digits = tmp_path_factory.mktemp("images"), load_digits()
    for label in range(4):
        (folder / str(label)).mkdir()
        for number in np.flatnonzero(digits.target == label)[:3].tolist():
            pixels = np.round(digits.images[number] * (255 / 16)).astype(np.uint8)
            image = Image.fromarray(pixels).resize((32, 32), Image.Resampling.BICUBIC)
            image.save(folder / str(label) / f"{number}.png")
    return folder


def error_of(*words: str, code: int = 1) -> str:
    """Run a command that must fail with one line; return the line."""
    outcome = CliRunner().invoke(main, list(words))
    assert outcome.exit_code == code, outcome.output
    assert outcome.stderr.count("\n") == 1 and not outcome.stdout
    return outcome.stderr


def test_predict_lists_best_classes_of_files_folders_and_patterns(out, images):
    model = str(out / "fedavg" / "seed0")
    words = [str(images / "0" / "0.png"), str(images / "1"), str(images / "2" / "*.png")]
    text = run("predict", model, *words, "--format", "csv", "--top", "3")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["rank"] for row in rows] == ["1", "2", "3"] * 7
    assert list(rows[0]) == ["file", "rank", "class", "probability"]
    loaded = fczoo.load_model(model)
    image = loaded.transform(Image.open(words[0]))
    expected = loaded(image[None]).double().softmax(1)[0]
    assert float(rows[0]["probability"]) == pytest.approx(float(expected.max()), rel=1e-5)
    assert rows[0]["class"] == loaded.classes[expected.argmax()]


def test_pattern_of_folders_lists_each_image_once(out, images):
    model = str(out / "fedncm" / "seed0")
    tables = [
        run("predict", model, str(images / pattern), "--format", "csv", "--top", "1")
        for pattern in ("*", "*/*.png", "**")
    ]
    assert len(tables[0].splitlines()) == 1 + 4 * 3 and tables[0] == tables[1] == tables[2]


def test_predict_prints_table_and_json(out, images):
    model, image = str(out / "fedavg" / "seed0"), str(images / "0" / "0.png")
    table = run("predict", model, image)
    assert table.splitlines()[0].split() == ["file", "rank", "class", "probability"]
    assert len(table.splitlines()) == 7 and table.count(image) == 1
    (entry,) = json.loads(run("predict", model, image, "--format", "json", "--top", "99"))
    assert entry["file"] == image and len(entry["classes"]) == 10
    assert sum(c["probability"] for c in entry["classes"]) == pytest.approx(1)


def test_method_without_logits_reports_scores(out, images):
    model = str(out / "fedncm" / "seed0")
    (entry,) = json.loads(run("predict", model, str(images / "0" / "0.png"), "--format", "json"))
    assert list(entry["classes"][0]) == ["class", "score"]
    text = run("evaluate", model, "--data-root", str(images))
    assert "ECE not defined for scores" in text


def test_evaluate_matches_last_evaluation_exactly(out):
    for method in ("fedavg", "fedncm"):
        folder = out / method / "seed0"
        metrics = json.loads((folder / "result.json").read_text())["metrics"]
        text = run("evaluate", str(folder))
        assert text.startswith(f"A_N {metrics['A_N']} (as in the run)\n")
        values = json.loads(run("evaluate", str(folder), "--format", "json"))
        assert values["A_N"] == metrics["A_N"]
        assert "task,accuracy,images" in run("evaluate", str(folder), "--format", "csv")


def test_evaluate_matches_run_on_image_folder(images, tmp_path, monkeypatch):
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))
    words = ["--dataset", "imagefolder", "--data-root", str(images), "--backbone", "vit_nano_32"]
    small = ["--tasks", "2", "--clients", "2", "--rounds", "1", "--epochs", "1"]
    sizes = ["--stored-size", "40", "--partition", "iid", "--protocol", "none"]
    run("bench", "--methods", "fedncm", *words, *small, *sizes, "--out", str(tmp_path / "run"))
    assert str(images) not in (tmp_path / "run/fedncm/seed0/model.json").read_text()
    assert "(as in the run)" in run("evaluate", str(tmp_path / "run"))


def test_evaluate_reports_class_accuracy_and_confusion(out, images):
    model = str(out / "fedavg" / "seed0")
    values = json.loads(run("evaluate", model, "--data-root", str(images), "--format", "json"))
    confusion = np.array(values["confusion"])
    assert values["images"] == 12 and confusion.sum(1).tolist() == [3, 3, 3, 3] + [0] * 6
    assert values["accuracy"] == pytest.approx(100 * np.trace(confusion) / 12)
    assert values["per_class"]["2"] == pytest.approx(100 * confusion[2, 2] / 3)
    assert 0 <= values["ece"] <= 100
    table = run("evaluate", model, "--data-root", str(images))
    assert table.startswith(f"accuracy {values['accuracy']:.1f} on 12 images; ECE ")
    text = run("evaluate", model, "--data-root", str(images), "--format", "csv")
    assert text.splitlines()[0].startswith("class,accuracy,images,as 0,as 1")
    assert len(text.splitlines()) == 5


def test_evaluate_on_named_data_set_uses_test_split(out):
    values = json.loads(
        run("evaluate", str(out / "fedavg/seed0"), "--dataset", "digits", "--format", "json")
    )
    assert values["images"] == 360


def test_predict_skips_unreadable_file(out, images, tmp_path):
    shutil.copy(images / "0" / "0.png", tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no image")
    shutil.copy(images / "0" / "0.png", tmp_path / "c.png")
    words = ["predict", str(out / "fedncm" / "seed0"), str(tmp_path), "--format", "csv"]
    outcome = CliRunner().invoke(main, [*words, "--top", "1"])
    assert outcome.exit_code == 1
    files = [row["file"] for row in csv.DictReader(io.StringIO(outcome.stdout))]
    assert files == [str(tmp_path / "a.png"), str(tmp_path / "c.png")]
    assert outcome.stderr.count("\n") == 1
    assert f"cannot read image {tmp_path / 'b.png'}: cannot identify image file" in outcome.stderr


def test_evaluate_prints_no_warning_of_run(out, monkeypatch):
    calls, make = [], data_setup.make_partition

    def make_and_warn(*arguments):
        calls.append(arguments)
        logging.getLogger("fczoo").warning("images of the largest clients were moved")
        return make(*arguments)

    monkeypatch.setattr(data_setup, "make_partition", make_and_warn)
    outcome = CliRunner().invoke(main, ["evaluate", str(out / "fedncm" / "seed0")])
    assert outcome.exit_code == 0
    assert calls
    assert not outcome.stderr


def test_invalid_arguments_report_one_line(out, images, tmp_path):
    model, image = str(out / "fedavg" / "seed0"), str(images / "0" / "0.png")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "empty").mkdir()
    assert "cannot read image" in error_of("predict", model, str(tmp_path / "text.png"))
    assert "cannot read image" in error_of("predict", model, str(tmp_path / "none.png"))
    assert "matches no files" in error_of("predict", model, str(tmp_path / "*.gif"))
    assert "contains no images" in error_of("predict", model, str(tmp_path / "empty"))
    assert "IMAGES is empty; give it a value" in error_of("predict", model, "", code=2)
    assert "--top is 0" in error_of("predict", model, image, "--top", "0")
    assert "has 2 models: fedavg/seed0, fedncm/seed0" in error_of("predict", str(out), image)
    assert "no model in" in error_of("predict", str(tmp_path), image)
    assert "no folder" in error_of("evaluate", str(tmp_path / "nowhere"))
    assert "no folder" in error_of("evaluate", model, "--data-root", str(tmp_path / "nowhere"))
    assert "no data set is called" in error_of("evaluate", model, "--dataset", "wonder")
    words = ["--dataset", "digits", "--data-root", str(tmp_path)]
    assert "digits needs no data folder, so --data-root" in error_of("evaluate", model, *words)
    assert "Missing argument" in error_of("predict", model, code=2)
    assert "--format" in error_of("predict", model, image, "--format", "xml", code=2)
    assert "no weight file" in error_of("predict", model, image, "--backbone", "none.safetensors")


def test_export_writes_file_once_and_prints_load_call(out, tmp_path):
    folder = out / "fedavg" / "seed0"
    text = run("export", str(folder), "--format", "timm", "--out", str(tmp_path / "a.safetensors"))
    assert "fedavg on digits, 10 classes" in text and "timm.create_model(" in text
    assert f"checkpoint_path={str(tmp_path / 'a.safetensors')!r}" in text
    assert str(folder / "timm.safetensors") in run("export", str(folder), "--format", "timm")
    line = error_of("export", str(folder), "--format", "timm")
    assert "timm.safetensors exists; remove it, or give another --out" in line
    line = error_of("export", str(out / "fedncm" / "seed0"), "--format", "timm")
    assert "fedncm cannot be exported to timm: it predicts by scores" in line
    line = error_of("export", str(folder), "--format", "peft")
    assert "fedavg cannot be exported to peft: it trains weights of the backbone" in line
    assert "Missing option '--format'" in error_of("export", str(folder), code=2)
    assert "no folder" in error_of("export", str(tmp_path / "nowhere"), "--format", "timm")


def test_evaluate_rejects_unknown_classes(out, images, tmp_path):
    shutil.copytree(images, tmp_path / "images")
    (tmp_path / "images" / "3").rename(tmp_path / "images" / "three")
    line = error_of("evaluate", str(out / "fedavg/seed0"), "--data-root", str(tmp_path / "images"))
    assert "does not know the class three; rename or remove it (known: 0, 1, 2, 3, 4, ...)" in line


def test_damaged_model_is_rejected(out, images, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(out / "fedncm" / "seed0", folder)
    (folder / "model.safetensors").write_bytes(b"")
    line = error_of("predict", str(folder), str(images / "0"))
    assert "does not match the SHA-256 in model.json" in line


def test_cite_prints_one_line_per_work():
    lines = run("cite", "fedncm,afcl", "--format", "text").splitlines()
    assert lines[0] == (
        'Legate et al., "Guiding The Last Layer in Federated Learning with Pre-Trained Models", '
        "NeurIPS 2023."
    )
    assert len(lines) == 3
    assert lines[2].startswith('fczoo developers, "fczoo", version ')


def test_show_ends_with_cite_entry():
    (entry,) = method_entries(METHODS.get("fedncm"))
    assert run("show", "fedncm").rstrip().endswith(entry)
    assert run("cite", "fedncm").startswith(entry)


def test_cite_prints_one_entry_per_source_and_fczoo():
    text = run("cite", "HGP,pilora", "fedncm")
    assert text.count("@inproceedings{") == 2 and text.count("@software{fczoo,") == 1
    assert (
        "@inproceedings{fedncm,\n  author = {Legate and others},\n  title = {{Guiding The Last "
        "Layer in Federated Learning with Pre-Trained Models}},\n  booktitle = {NeurIPS},\n"
        "  year = {2023}\n}" in text
    )
    assert "@article{ewc,\n" in run("cite", "ewc") and "journal = {PNAS}" in run("cite", "ewc")
    assert "eprint = {2406.02447}" in text and "year = {2024}" in text
    assert "author = {Guo and others}" in text
    assert "did you mean hgp" in error_of("cite", "hgpp")
    assert "METHODS has an empty entry" in error_of("cite", "hgp,,pilora")


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_has_complete_bibtex_entries(name):
    for entry in method_entries(METHODS.get(name)):
        assert re.match(rf"@(misc|article|inproceedings)\{{{name}", entry) and entry.endswith("\n}")
        assert entry.count("{") == entry.count("}")
        fields = re.findall(r"^  (\w+) = ", entry, re.M)
        if name in ("joint", "local"):  # references that no paper introduced
            assert fields == ["note"]
        else:
            assert fields[:2] == ["author", "title"] and "year" in fields
            assert {"booktitle", "journal", "eprint"} & set(fields)


def test_bibtex_entry_ignores_venue_and_year_in_title():
    paper = 'form of X: Fisher, "On CVPR 1935", Annals of Eugenics 1936; Li and Wu, FL, ICML 2023'
    fisher, li = method_entries(type("Toy", (), {"paper": paper, "name": "toy"}))
    assert fisher == (
        "@article{toy,\n  author = {Fisher},\n  title = {{On CVPR 1935}},\n"
        "  journal = {Annals of Eugenics},\n  year = {1936}\n}"
    )
    assert li == (
        "@misc{toy-2,\n  author = {Li and Wu},\n  howpublished = {ICML},\n  year = {2023},\n"
        "  note = {Li and Wu, FL, ICML 2023}\n}"
    )


def test_fczoo_entry_matches_citation_file():
    lines = (Path(__file__).parents[2] / "CITATION.cff").read_text().splitlines()
    values = dict(line.split(": ", 1) for line in lines if line[:1].isalpha() and ": " in line)
    entry = bibtex([])
    assert f"title = {{{values['title']}}}" in entry
    assert f"version = {{{values['version']}}}" in entry
    assert f"license = {{{values['license']}}}" in entry
    assert values["abstract"].rstrip(".") in entry


def test_model_card_reports_training_and_usage(out):
    text = (out / "fedncm" / "seed0" / "README.md").read_text()
    result = json.loads((out / "fedncm" / "seed0" / "result.json").read_text())
    assert text.startswith("# fedncm on digits\n")
    assert f"| A_N | {result['metrics']['A_N']:.1f} |" in text
    for part in (
        "task 1: 0, 1, 2, 3",
        "fczoo.load_model",
        "not logits",
        "@inproceedings{fedncm",
        "Limits",
    ):
        assert part in text
    assert "frozen, not in this folder" in text
    fedavg = (out / "fedavg" / "seed0" / "README.md").read_text()  # trains all weights
    assert "| rounds | " in fedavg
    assert "| rounds | " not in text
    assert "| batch size |" not in text
    assert "not logits" not in fedavg
    assert "frozen, not in this folder" not in fedavg
