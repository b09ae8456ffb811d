"""Sites with folders of images, and the three files of their agreement."""

import json
import shutil
import sys
import unicodedata

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from fczoo import FczooError, create_method
from fczoo.cli.app import main
from fczoo.sites.federation_config import read_agreement, write_agreement
from fczoo.sites.folders import open_server, open_site
from fczoo.sites.messages import CALL, REFUSAL, Call, Refusal, deserialize, serialize
from helpers_site_folders import CLASSES, SETTINGS, TASKS, simulated_folders
from helpers_sites import NAMES, LocalConnection


def connection_of(agreement_folder, data, folder):
    agreement = read_agreement(agreement_folder)
    return LocalConnection(
        {k: open_site(agreement, n, data / n, folder / n) for k, n in enumerate(agreement.sites)}
    )


@pytest.mark.parametrize("method", ["hgp", "icarl"])
def test_site_folders_match_simulation(agreement_folder, data, tmp_path, method):
    run = agreement_folder / "run.toml"
    run.write_text(run.read_text().replace('"hgp"', f'"{method}"'))
    result = open_server(
        read_agreement(agreement_folder),
        data / "test",
        connection_of(agreement_folder, data, tmp_path),
    ).run()
    simulation = simulated_folders(agreement_folder, data).run(create_method(method))
    assert result.metrics["A_N"] == pytest.approx(simulation.metrics["A_N"], abs=1e-5)
    np.testing.assert_allclose(
        np.concatenate(result.accuracy), np.concatenate(simulation.accuracy), atol=1e-5
    )
    assert result.bytes_up == simulation.bytes_up > 0


def test_caches_are_private_and_in_site_folder(agreement_folder, data, tmp_path, monkeypatch):
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))
    run = agreement_folder / "run.toml"
    run.write_text(run.read_text().replace('"hgp"', '"fedncm"'))
    server = tmp_path / "server"
    open_server(
        read_agreement(agreement_folder),
        data / "test",
        connection_of(agreement_folder, data, tmp_path),
        server,
    ).run()
    for folder in (server / "cache", *(tmp_path / name for name in NAMES)):
        assert folder.stat().st_mode & 0o077 == 0
        assert list(folder.rglob("images/*.u8"))
        assert list(folder.rglob("features/*.safetensors"))
    assert not (tmp_path / "home").exists()


def test_class_list_order_changes_only_labels(agreement_folder, data, tmp_path):
    """Change only the original labels if the class list has another order."""
    first = open_server(
        read_agreement(agreement_folder),
        data / "test",
        connection_of(agreement_folder, data, tmp_path / "a"),
    ).run()
    (agreement_folder / "classes.txt").write_text("\n".join(reversed(CLASSES)))
    second = open_server(
        read_agreement(agreement_folder),
        data / "test",
        connection_of(agreement_folder, data, tmp_path / "b"),
    ).run()
    assert first.class_order == [5, 1, 0, 4, 3, 2]
    assert second.class_order == [0, 4, 5, 1, 2, 3]
    assert first.accuracy == second.accuracy


def test_site_rejects_other_schedule(agreement_folder, data, tmp_path):
    site = open_site(read_agreement(agreement_folder), "lyon", data / "lyon", tmp_path / "lyon")
    terms = {**site.terms, "schedule": [["bee", "fox"], *site.terms["schedule"][1:]]}
    answer = site.answer(serialize(CALL, Call("a run", terms)))
    reason = deserialize(REFUSAL, answer, Refusal)[0].reason
    assert reason == "schedule, entry 1, entry 1 is fox here and bee at the server; make them equal"


def test_unknown_class_folder_is_rejected(agreement_folder, data, tmp_path):
    shutil.copytree(data / "lyon", tmp_path / "images")
    (tmp_path / "images" / "bee").rename(tmp_path / "images" / "Bee")
    with pytest.raises(FczooError, match=r"images/Bee is not a class in classes\.txt"):
        open_site(read_agreement(agreement_folder), "lyon", tmp_path / "images", tmp_path / "lyon")


def test_site_warns_about_unread_files(agreement_folder, data, tmp_path, caplog):
    shutil.copytree(data / "lyon", tmp_path / "images")
    image = next((tmp_path / "images" / "bee").iterdir())
    Image.open(image).save(tmp_path / "images" / "bee" / "x.tga")
    site = open_site(
        read_agreement(agreement_folder), "lyon", tmp_path / "images", tmp_path / "lyon"
    )
    line = "1 image file is not read (1 .tga); convert to PNG or JPEG"
    assert caplog.messages == [f"{tmp_path / 'images'}: {line}"]
    assert len(site.scenario.stream.train.labels) == len(list((data / "lyon").rglob("*.*")))


def test_class_names_are_unicode_normalised(agreement_folder, data, tmp_path):
    """Match a folder name from macOS (NFD) with the class list (NFC)."""
    for name in ("classes.txt", "schedule.json"):
        text = (
            (agreement_folder / name)
            .read_text()
            .replace("bee", unicodedata.normalize("NFC", "béé"))
        )
        (agreement_folder / name).write_text(text)
    shutil.copytree(data / "lyon", tmp_path / "images")
    folder = tmp_path / "images" / unicodedata.normalize("NFD", "béé")
    (tmp_path / "images" / "bee").rename(folder)
    site = open_site(
        read_agreement(agreement_folder), "lyon", tmp_path / "images", tmp_path / "lyon"
    )
    classes = [site.scenario.stream.classes[label] for label in site.scenario.stream.train.labels]
    assert classes.count(unicodedata.normalize("NFC", "béé")) == len(list(folder.iterdir()))


def test_server_needs_test_images_of_every_class(agreement_folder, data, tmp_path):
    shutil.copytree(data / "test", tmp_path / "test")
    shutil.rmtree(tmp_path / "test" / "eel")
    with pytest.raises(FczooError, match=r"no test image of class eel in .*test"):
        open_server(read_agreement(agreement_folder), tmp_path / "test", LocalConnection({}))


def test_task_without_images_is_rejected(agreement_folder, data, tmp_path):
    (agreement_folder / "classes.txt").write_text("\n".join([*CLASSES, "gnu"]))
    tasks = {"tasks": [*map(list, TASKS), ["gnu"]]}
    (agreement_folder / "schedule.json").write_text(json.dumps(tasks))
    shutil.copytree(data / "test", tmp_path / "test")
    shutil.copytree(data / "test" / "ant", tmp_path / "test" / "gnu")
    with pytest.raises(FczooError, match="no site has an image of task 4"):
        open_server(
            read_agreement(agreement_folder),
            tmp_path / "test",
            connection_of(agreement_folder, data, tmp_path),
        )


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("classes.txt", "ant\nbee\nant\n", "names class ant twice"),
        ("classes.txt", "", "is empty"),
        ("classes.txt", "../etc\n", "cannot name a folder"),
        ("classes.txt", "\n".join(CLASSES[:-1]), "names class fox, which is not in classes.txt"),
        ("classes.txt", "\n".join([*CLASSES, "gnu"]), "has no task for class gnu"),
        ("schedule.json", "[]", "is not a valid schedule: expected a JSON object"),
        ("schedule.json", '{"tasks": [["ant", 1]]}', "is not a valid schedule: tasks"),
        ("schedule.json", json.dumps({"tasks": [*TASKS, ["ant"]]}), "names class ant twice"),
        ("schedule.json", json.dumps({"tasks": [*TASKS, []]}), "has a task without classes"),
        ("run.toml", "method = 1", "is not a valid run.toml: method"),
        ("run.toml", "nonsense", "is not a valid run.toml"),
        (
            "run.toml",
            'method = "hgp"\nsites = ["a", "a"]',
            "sites must be a list of different names",
        ),
        ("run.toml", 'method = "hpg"\nsites = ["a"]', "no method is called 'hpg'"),
        (
            "run.toml",
            'method = "hgp"\nsites = ["a"]\n[settings]\nclients = 4',
            "the clients are the sites; remove clients",
        ),
        ("run.toml", 'method = "hgp"\nsites = ["a"]\n[settings]\nround = 4', "no option 'round'"),
        (
            "run.toml",
            'method = "hgp"\nsites = ["a"]\n[settings]\ndp_clip = 1.0',
            "--dp-clip protects only trained parameters",
        ),
        ("run.toml", 'method = "joint"\nsites = ["a"]', "images of all clients in one place"),
    ],
)
def test_invalid_agreement_file_is_rejected(agreement_folder, file, content, words):
    (agreement_folder / file).write_text(content)
    with pytest.raises(FczooError, match=words) as caught:
        read_agreement(agreement_folder)
    assert "\n" not in str(caught.value)


def test_agreement_is_not_overwritten(agreement_folder):
    with pytest.raises(FczooError, match="exists already"):
        write_agreement(agreement_folder, "hgp", NAMES, TASKS, SETTINGS)


def test_unknown_site_name_is_rejected(agreement_folder, data, tmp_path):
    with pytest.raises(FczooError, match="no site is called 'london'"):
        open_site(read_agreement(agreement_folder), "london", data / "lyon", tmp_path)


def test_init_needs_cryptography(agreement_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    words = [
        "site",
        "init",
        str(tmp_path / "out"),
        "--agreed",
        str(agreement_folder),
        "--address",
        "localhost:1",
    ]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1 and "pip install 'fczoo[sites]'" in result.output


def test_job_needs_nvflare(agreement_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvflare.apis.controller_spec", None)
    monkeypatch.delitem(sys.modules, "fczoo.sites.flare", raising=False)
    result = CliRunner().invoke(
        main, ["site", "job", str(tmp_path / "out"), "--agreed", str(agreement_folder)]
    )
    assert result.exit_code == 1 and "pip install 'fczoo[flare]'" in result.output
    assert not (tmp_path / "out").exists()
