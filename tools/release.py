"""Release tool: write a version into the tree, and rehearse its publication.

``python tools/release.py set 0.3.0 --repository URL`` writes the version, its date and the
address of the repository; ``python tools/release.py check`` builds, checks and tries the packages.
"""

import datetime
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
LIMIT_MB = 6
"""Largest wheel. The bundled weights are about half of it."""

WHEEL_FILES = (
    "fczoo/py.typed",
    "fczoo/__init__.pyi",
    "fczoo/assets/vit_nano_32.safetensors",
    "fczoo/assets/paper_tables.csv",
    "fczoo/assets/protocols/hgp.toml",
    "fczoo/assets/releases/fppl.toml",
    "fczoo/assets/new/method.py.jinja",
    "fczoo/methods/pilora.py",
    "fczoo/baselines/ewc.py",
    "fczoo/datasets/cifar.py",
)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


@click.group()
def main() -> None:
    """Prepare and rehearse a release."""


@main.command("set")
@click.argument("version")
@click.option("--repository", help="Address of the repository, such as https://HOST/GROUP/fczoo.")
@click.option("--date", default=lambda: datetime.date.today().isoformat(), help="Date of release.")
def set_release(version: str, repository: str | None, date: str) -> None:
    """Write VERSION, its date and the repository's address wherever the tree names them."""
    write_release(ROOT, version, repository, date)
    click.echo(f"version {version} is written; commit it, then: python tools/release.py check")


def write_release(root: Path, version: str, repository: str | None, date: str) -> None:
    """Write a version, its date and an address into a tree.

    ``[project.urls]`` in ``pyproject.toml`` is the one place of the address: ``CITATION.cff``
    repeats it, and ``check`` makes the links of README absolute with it.

    Args:
        root: Root of the tree.
        version: Version of the release (PEP 440), without ``v``.
        repository: Address of the repository; None: the tree keeps the address that it has.
        date: Date of the release, ``YYYY-MM-DD``.

    Raises:
        ClickException: The version, the address or the date is none, or a file lacks its line.
    """
    try:
        Version(version)
        datetime.date.fromisoformat(date)
    except (InvalidVersion, ValueError) as error:
        raise click.ClickException(
            f"{error}; write a version like 0.3.0, a date like 2026-12-31"
        ) from None
    if repository and not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", repository):
        raise click.ClickException(f"--repository {repository}: write https://HOST/GROUP/NAME")
    if repository:
        urls = f'[project.urls]\nRepository = "{repository}"\nIssues = "{repository}/issues"\n'
        _replace(
            root / "pyproject.toml", r"(\[project\.urls\]\n(?:\w.*\n)*\n)?\[project\.scripts\]",
            f"{urls}\n[project.scripts]",
        )  # fmt: skip
    _replace(root / "fczoo/__init__.py", r'__version__ = ".*"', f'__version__ = "{version}"')
    citation = root / "CITATION.cff"
    _replace(citation, r"(?m)^version: .*\n(?:date-released: .*\n)?", _citation(version, date))
    _replace(citation, r"(?m)^  year: \d+$", f"  year: {date[:4]}")
    address = repository_of(root)
    if address:
        _replace(
            citation, r"(?m)^(repository-code: .*\n)?license:",
            f'repository-code: "{address}"\nlicense:',
        )  # fmt: skip
    if f"## [{version}]" not in (root / "CHANGELOG.md").read_text(encoding="utf-8"):
        heading = f"## [Unreleased]\n\n## [{version}] - {date}"
        _replace(root / "CHANGELOG.md", r"## \[Unreleased\]", heading)


def _citation(version: str, date: str) -> str:
    return f"version: {version}\ndate-released: {date}\n"


def _replace(file: Path, pattern: str, text: str) -> None:
    """Replace the one place of a pattern in a file."""
    old = file.read_text(encoding="utf-8")
    new, count = re.subn(pattern, lambda _: text, old, count=1)
    if not count:
        raise click.ClickException(f"{file.name}: nothing matches {pattern}; write it by hand")
    file.write_text(new, encoding="utf-8")


def repository_of(root: Path) -> str | None:
    """Return the address of the repository in ``pyproject.toml``; None if it has none."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address: str | None = project.get("urls", {}).get("Repository")
    return address


def version_of(root: Path) -> str:
    """Return the version of a tree."""
    text = (root / "fczoo/__init__.py").read_text(encoding="utf-8")
    return text.partition('__version__ = "')[2].partition('"')[0]


@main.command()
@click.option("--out", type=Path, default=Path("dist"), help="Folder of the packages.")
@click.option("--tag", help="Tag to publish: it must be v and the version of the tree.")
@click.option("--quick", is_flag=True, help="Build and look at the packages; install nothing.")
def check(out: Path, tag: str | None, quick: bool) -> None:
    """Build the packages in OUT, check them, install them and run the first command of README."""
    version = version_of(ROOT)
    check_texts(ROOT, version, tag)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        copy_tree(source, repository_of(ROOT), version)
        shutil.rmtree(out, ignore_errors=True)
        _run(sys.executable, "-m", "build", "--quiet", "--outdir", out.resolve(), source)
        packages = sorted(out.glob("fczoo-*"))
        _run(sys.executable, "-m", "twine", "check", "--strict", *packages)
        wheel = check_packages(packages)
        if not quick:
            try_wheel(wheel, Path(folder))
            for python in other_pythons():
                compile_wheel(wheel, python, Path(folder))
    click.echo(f"fczoo {version} is ready; its tag is v{version}")


def check_texts(root: Path, version: str, tag: str | None) -> None:
    """Check that citation, changelog and tag name the version of the tree.

    Args:
        root: Root of the tree.
        version: Version of the tree.
        tag: Tag to publish; None: none is pushed yet.

    Raises:
        ClickException: One of them differs.
    """
    if f"\nversion: {version}\n" not in (root / "CITATION.cff").read_text(encoding="utf-8"):
        raise click.ClickException(f"CITATION.cff does not name version {version}; use set")
    if tag is not None and tag != f"v{version}":
        raise click.ClickException(f"the tag is {tag}, the version of the tree {version}")
    is_final = not Version(version).is_devrelease
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if is_final and f"## [{version}] - " not in changes:
        raise click.ClickException(f"CHANGELOG.md has no section [{version}]; use set")


def copy_tree(target: Path, repository: str | None, version: str) -> None:
    """Copy all files that git does not ignore, with absolute links in README.

    Args:
        target: Folder of the copy.
        repository: Address of the repository; None: links become plain text.
        version: Version whose tag the links point to.
    """
    names = _run("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    readme = target / "README.md"
    text = absolute_links(readme.read_text(encoding="utf-8"), repository, version)
    readme.write_text(text, encoding="utf-8")


def absolute_links(text: str, repository: str | None, version: str) -> str:
    """Return Markdown whose relative links work on a package index.

    Args:
        text: Markdown with links relative to the root of the repository.
        repository: Address of the repository; None: links become plain text.
        version: Version whose tag the links point to.
    """
    if repository is None:
        return LINK.sub(lambda link: "" if link[1] else link[2], text)
    kinds = {"": "blob", "!": "raw"}
    return LINK.sub(
        lambda link: f"{link[1]}[{link[2]}]({repository}/{kinds[link[1]]}/v{version}/{link[3]})",
        text,
    )


def check_packages(packages: Sequence[Path]) -> Path:
    """Check the files and the size of the packages.

    Args:
        packages: One wheel and one source distribution.

    Returns:
        The wheel.

    Raises:
        ClickException: One of them lacks a file, has one too many, or is too large.
    """
    wheel, archive = (
        [p for p in packages if p.name.endswith(end)] for end in ("-none-any.whl", ".tar.gz")
    )
    if len(wheel) != 1 or len(archive) != 1 or len(packages) != 2:
        raise click.ClickException(f"expected a wheel and a .tar.gz: {[p.name for p in packages]}")
    with zipfile.ZipFile(wheel[0]) as file:
        names = file.namelist()
    missing = [name for name in WHEEL_FILES if name not in names]
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        missing.append("LICENSE")
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    if missing or tops != {"fczoo"}:
        raise click.ClickException(f"{wheel[0].name}: missing {missing}, top level {sorted(tops)}")
    megabytes = wheel[0].stat().st_size / 1e6
    if megabytes >= LIMIT_MB:
        raise click.ClickException(f"{wheel[0].name}: {megabytes:.1f} MB, limit {LIMIT_MB} MB")
    with tarfile.open(archive[0]) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
    if not {"LICENSE", "CHANGELOG.md", "SECURITY.md", "methods/pilora.py"} <= inside:
        raise click.ClickException(f"{archive[0].name} lacks LICENSE, CHANGELOG.md or sources")
    click.echo(f"{wheel[0].name}: {megabytes:.1f} MB, {len(names)} files")
    return wheel[0]


def try_wheel(wheel: Path, folder: Path) -> None:
    """Install a wheel in a fresh environment and run the first command of README without network.

    Args:
        wheel: The wheel.
        folder: Temporary folder for the environment and the run.

    Raises:
        ClickException: The installation or the command fails.
    """
    programs = _environment(folder / "full", [wheel])
    block = (ROOT / "README.md").read_text(encoding="utf-8").partition("```bash\n")[2]
    command = block.partition("\n")[0].partition("pip install . && ")[2]
    closed = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    offline = {**os.environ, **closed, "HF_HUB_OFFLINE": "1"}
    words = shlex.split(command)
    table = _run(programs / words[0], *words[1:], cwd=folder, env=offline)
    methods = words[words.index("--methods") + 1].split(",")
    rows = [line.split()[0] for line in table.splitlines() if line.strip()]
    if not set(methods) <= set(rows):
        raise click.ClickException(f"{command}: no row of each method in\n{table}")
    click.echo(f"{command}\n{table}")


def compile_wheel(wheel: Path, python: Path, folder: Path) -> None:
    """Install a wheel without its dependencies for another Python, and compile its sources.

    Args:
        wheel: The wheel.
        python: Interpreter.
        folder: Temporary folder for the environment.

    Raises:
        ClickException: pip refuses the wheel, or a source is no Python of this version.
    """
    name = python.name if python.name != "python" else python.parents[1].name
    programs = _environment(folder / name, ["--no-deps", wheel], python)
    code = (
        "import compileall, importlib.metadata as m, importlib.util as u, sys;"
        "folder = u.find_spec('fczoo').submodule_search_locations[0];"
        "sys.exit(not (compileall.compile_dir(folder, quiet=1, force=True) and m.version('fczoo')))"
    )
    _run(programs / "python", "-c", code)
    click.echo(f"{name}: installed without dependencies, all sources compile")


def other_pythons() -> list[Path]:
    """Find interpreters of the other supported Python versions on this machine.

    Those on PATH, and those of pyenv.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    pythons = []
    for version in filter(lambda v: v != here, versions):
        paths = [*pyenv.glob(f"{version}.*/bin/python"), shutil.which(f"python{version}")]
        works = (Path(path) for path in paths if path and _answers(path))
        pythons += list(works)[:1]
    return pythons


def _answers(python: str | Path) -> bool:
    return not subprocess.run([python, "--version"], capture_output=True).returncode


def _environment(folder: Path, packages: Sequence[str | Path], python: Path | None = None) -> Path:
    """Create a virtual environment with packages; return the folder of its programs."""
    if python is None:
        venv.create(folder, with_pip=True)
    else:
        _run(python, "-m", "venv", folder)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    _run(programs / "python", "-m", "pip", "install", "--quiet", *packages)
    return programs


def _run(*command: str | Path, **options: Any) -> str:
    """Run a program and return its output; its failure ends the command."""
    result: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", **options
    )
    if result.returncode:
        words = " ".join(map(str, command))
        raise click.ClickException(f"{words}\n{result.stdout}{result.stderr}")
    return result.stdout


if __name__ == "__main__":
    main()
