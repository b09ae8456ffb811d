"""Test import contracts, packages, lazy names and lengths of files.

CONTRIBUTING.md states these rules.
"""

import ast
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

import fczoo
import fczoo.core

ROOT = Path(__file__).parents[1]
SETUP = ConfigParser()
SETUP.read(ROOT / "setup.cfg")
PACKAGES = SETUP["options"]["packages"].split()
FOLDERS = dict(line.split(" = ") for line in SETUP["options"]["package_dir"].strip().splitlines())
LONGEST = 400  # lines of a file
LONGEST_METHOD = 250  # lines of a method file


def sources(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def contents(folder: Path, package: str = "") -> set[Path]:
    """List the files below a folder, by their place in an installation of ``package``."""
    paths = {
        Path(*package.split("."), file.relative_to(folder))
        for file in folder.rglob("*")
        if file.is_file()
    }
    return {file for file in paths if "__pycache__" not in file.parts}


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install a copy of this tree as users install it; return its folder."""
    root = tmp_path_factory.mktemp("installed")
    copy = root / "tree"
    for folder in set(FOLDERS.values()):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-compile"]
    process = python(
        "-m", "pip", "install", *options, "--target", str(root / "site"), str(copy), cwd=root
    )
    assert process.returncode == 0, process.stderr
    return root / "site"


def test_imports_follow_contracts(site):
    """Follow the import contracts of pyproject.toml; type-checking imports count."""
    words = ["--no-cache", "--no-logo", "--config", str(ROOT / "pyproject.toml")]
    process = python(
        "-c", "from importlinter.cli import lint_imports_command as run; run()", *words, cwd=site
    )
    assert process.returncode == 0, process.stdout + process.stderr


def test_modules_do_not_import_from_lazy_packages():
    """Import nothing from the lazy packages ``fczoo`` and ``fczoo.core``.

    The import contracts do not see these imports.
    """
    for file in sources(*set(FOLDERS.values())):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in ("fczoo", "fczoo.core"):
                assert [name.name for name in node.names] == ["__version__"], (
                    f"{file}:{node.lineno}"
                )
            assert not (isinstance(node, ast.ImportFrom) and node.level), (
                f"{file}:{node.lineno}: relative"
            )


def test_every_package_is_installed(site):
    tree = {
        file for package, folder in FOLDERS.items() for file in contents(ROOT / folder, package)
    }
    assert contents(site / "fczoo", "fczoo") == tree
    assert {".".join(file.parent.parts) for file in tree if file.suffix == ".py"} <= set(PACKAGES)


@pytest.mark.parametrize("name", ["tests", "benchmarks", "docs", "results"])
def test_only_library_is_importable(name, site, tmp_path):
    look = (
        f"from importlib.util import find_spec as f; print(f('fczoo.{name}'), "
        "f('fczoo.methods.pilora').name)"
    )
    process = python("-c", look, cwd=tmp_path)
    assert process.stdout == "None fczoo.methods.pilora\n", process.stderr
    assert not (site / name).exists() and not (site / "fczoo" / name).exists()


@pytest.mark.parametrize("package", [fczoo, fczoo.core])
def test_every_public_name_is_importable(package):
    stub = ast.parse((Path(package.__file__).with_suffix(".pyi")).read_text())
    names = {
        name.asname for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names
    }
    assert names == set(package.__all__)
    assert all(hasattr(package, name) for name in names)
    assert set(dir(package)) >= names


def test_import_of_fczoo_imports_no_torch(tmp_path):
    process = python("-c", "import fczoo, fczoo.core, sys; print(*sys.modules)", cwd=tmp_path)
    modules = process.stdout.split()
    assert "fczoo.core" in modules
    assert not {"torch", "numpy", "timm", "scipy"} & set(modules)


def longer_files(limit: int, *folders: str) -> list[str]:
    """List source files in some folders that have more lines than ``limit``."""
    files = [file for file in sources(*folders) if len(file.read_text().splitlines()) > limit]
    return [file.relative_to(ROOT).as_posix() for file in files]


def test_no_file_is_too_long():
    assert not longer_files(LONGEST, *set(FOLDERS.values()), "tests", "benchmarks")


def test_no_method_file_is_too_long():
    assert not longer_files(LONGEST_METHOD, FOLDERS["fczoo.methods"], FOLDERS["fczoo.baselines"])


def test_documents_name_existing_files():
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    ]
    paths = {
        path
        for page in pages
        for path in re.findall(r"\b((?:\w+/)+(?:\w+\.\w+)?)[`)| ]", page.read_text())
        if path.split("/")[0] in {*FOLDERS.values(), "tests", "docs", "benchmarks", "results"}
    }
    assert {"fczoo/core/", "fczoo/core/method.py", "docs/metrics.md"} <= paths
    paths -= {"results/results.csv"}  # which `fczoo submit` writes
    real = [path for path in sorted(paths) if "NAME" not in path]  # NAME is the reader's choice
    assert not [path for path in real if not (ROOT / path).exists()]
