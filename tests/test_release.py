"""Test the release tool: version, address, links of README and packages."""

import importlib.util
import shutil
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import click
import pytest

pytest.importorskip("packaging")
ROOT = Path(__file__).parents[1]
URL = "https://example.org/group/fczoo"


def load_tool() -> ModuleType:
    """Return ``tools/release.py`` as a module."""
    spec = importlib.util.spec_from_file_location("release_tool", ROOT / "tools/release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = load_tool()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of the files that name the version."""
    (tmp_path / "fczoo").mkdir()
    for name in ("fczoo/__init__.py", "pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_release_writes_version_date_and_address_once(tree: Path) -> None:
    for _ in range(2):  # the second time changes nothing
        release.write_release(tree, "1.2.3", URL, "2027-01-31")
    assert release.version_of(tree) == "1.2.3"
    assert release.repository_of(tree) == URL
    citation = (tree / "CITATION.cff").read_text()
    assert citation.count("\nversion: 1.2.3\ndate-released: 2027-01-31\n") == 1
    assert citation.count(f'\nrepository-code: "{URL}"\n') == 1
    assert citation.count("\n  year: 2027\n") == 1
    changes = (tree / "CHANGELOG.md").read_text()
    assert changes.count("## [Unreleased]\n\n## [1.2.3] - 2027-01-31\n") == 1
    project = (tree / "pyproject.toml").read_text()
    assert project.count("[project.urls]") == 1
    assert project.count("[project.scripts]\nfczoo = ") == 1
    release.check_texts(tree, "1.2.3", "v1.2.3")


def test_release_without_address_writes_none(tree: Path) -> None:
    release.write_release(tree, "1.2.3", None, "2027-01-31")
    assert release.repository_of(tree) is None
    assert "repository-code" not in (tree / "CITATION.cff").read_text()


@pytest.mark.parametrize(
    ("version", "repository", "date"),
    [("one", URL, "2027-01-31"), ("1.2.3", "example.org", "2027-01-31"), ("1.2.3", URL, "soon")],
)
def test_invalid_argument_writes_nothing(
    tree: Path, version: str, repository: str, date: str
) -> None:
    before = {file: file.read_text() for file in tree.rglob("*") if file.is_file()}
    with pytest.raises(click.ClickException):
        release.write_release(tree, version, repository, date)
    assert before == {file: file.read_text() for file in before}


def test_tag_of_other_version_is_rejected(tree: Path) -> None:
    release.write_release(tree, "1.2.3", None, "2027-01-31")
    with pytest.raises(click.ClickException, match=r"the tag is v1\.2\.4"):
        release.check_texts(tree, "1.2.3", "v1.2.4")


def test_release_texts_match_version() -> None:
    release.check_texts(ROOT, release.version_of(ROOT), None)


def test_readme_links_are_absolute() -> None:
    text = "[a](docs/a.md) ![b](c/d.png) [e](https://e.org) [f](#f)"
    assert release.absolute_links(text, URL, "1.2.3") == (
        f"[a]({URL}/blob/v1.2.3/docs/a.md) ![b]({URL}/raw/v1.2.3/c/d.png) "
        "[e](https://e.org) [f](#f)"
    )
    assert release.absolute_links(text, None, "1.2.3") == "a  [e](https://e.org) [f](#f)"


def write_packages(folder: Path, left_out: str = "") -> list[Path]:
    """Write a wheel and a source distribution with the files that a release needs, but one."""
    wheel, archive = folder / "fczoo-1-py3-none-any.whl", folder / "fczoo-1.tar.gz"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in (*release.WHEEL_FILES, "fczoo-1.dist-info/licenses/LICENSE"):
            if name != left_out:
                file.writestr(name, "")
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("LICENSE", "CHANGELOG.md", "SECURITY.md", "methods/pilora.py"):
            tar.addfile(tarfile.TarInfo(f"fczoo-1/{name}"))
    return [wheel, archive]


def test_complete_packages_are_accepted(tmp_path: Path) -> None:
    packages = write_packages(tmp_path)
    assert release.check_packages(packages) == packages[0]


@pytest.mark.parametrize("name", ["fczoo/py.typed", "fczoo-1.dist-info/licenses/LICENSE"])
def test_wheel_with_missing_file_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(click.ClickException, match=name.rpartition("/")[2]):
        release.check_packages(write_packages(tmp_path, name))
