"""Reports of run folders with unusual names, text or missing fields."""

import json

import pytest
from click.testing import CliRunner

from fczoo.board.pages import write_page, write_site
from fczoo.cli.app import main
from fczoo.core.files import write_json
from fczoo.reports.captions import notes
from fczoo.reports.runs import read_experiments


def run_report(*words: str):
    return CliRunner().invoke(main, ["report", *words])


def test_method_name_may_have_special_characters(make_run, tmp_path):
    make_run(tmp_path / "run", {"x_{^}$$": {0: 70.0}})
    result = run_report(str(tmp_path / "run"), "--html", str(tmp_path / "page.html"))
    assert result.exit_code == 0 and "x_{^}$$" in (tmp_path / "page.html").read_text()


def test_formula_like_name_is_drawn_literally(make_run, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib (extra plot) is not installed")
    make_run(tmp_path / "run", {"$x_{^}$": {0: 70.0}})
    words = ["--html", str(tmp_path / "page.html"), "--figures", str(tmp_path / "figures")]
    assert run_report(str(tmp_path / "run"), *words).exit_code == 0
    assert (tmp_path / "figures" / "time.pdf").is_file()


def test_missing_dataset_in_description_is_reported(make_run, tmp_path):
    make_run(tmp_path / "run", {"one": {0: 70.0}})
    path = tmp_path / "run" / "bench.json"
    about = json.loads(path.read_text())
    del about["settings"]["dataset"]
    write_json(path, {k: v for k, v in about.items() if k not in ("sha256", "format")})
    result = run_report(str(tmp_path / "run"), "--format", "csv")
    assert result.exit_code and type(result.exception) is not KeyError
    assert "settings: the dataset is missing" in f"{result.output}{result.exception}"


def test_unprintable_text_is_removed(make_run, tmp_path):
    folder = make_run(tmp_path / "run", {"one": {0: 70.0}})
    path = folder / "one" / "seed0" / "result.json"
    content = json.loads(path.read_text())
    content["remark"] = "odd\ud800 \x1b[31m\u202e<b>" + " long" * 100_000
    content = {key: value for key, value in content.items() if key not in ("sha256", "format")}
    path.write_text(json.dumps(content))
    note = next(note for note in notes(read_experiments([folder])[0]) if "odd" in note)
    assert "odd\ufffd [31m<b> long long" in note and len(note) < 3000
    write_page([folder], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "odd\ufffd [31m&lt;b&gt; long" in page
    write_site([folder], tmp_path / "site")
