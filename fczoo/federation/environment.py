"""Environment of a run: versions, hardware, and hashes of the code that its numbers depend on."""

import ast
import atexit
import contextlib
import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch

from fczoo import __version__
from fczoo.backbones.names import registered_backbone
from fczoo.backbones.weights import split_stored_spec
from fczoo.core.files import home, shorten, write_safely
from fczoo.core.method import Method
from fczoo.core.registry import DATASETS, SPECS, make_aggregator
from fczoo.federation.settings import Settings

RESET_PEAK = Path("/proc/self/clear_refs")  # 5, written there, resets VmHWM; see proc(5)


def hardware() -> dict[str, Any]:
    """Describe the hardware on which times are measured: processor, cores, threads and GPUs."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpus": gpus}


def reset_peak_memory(device: torch.device) -> None:
    """Reset the measurement of ``peak_memory`` at the start of a run."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if os.access(RESET_PEAK, os.W_OK):
        RESET_PEAK.write_text("5", encoding="utf-8")


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the peak memory since ``reset_peak_memory`` in bytes.

    ``run``: of the process, on Linux only; ``cuda``: of CUDA's allocator.
    """
    peak = {}
    if os.access(RESET_PEAK, os.W_OK):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        peak["run"] = 1024 * int(status.partition("VmHWM:")[2].split()[0])
    if device.type == "cuda":
        peak["cuda"] = torch.cuda.max_memory_allocated()
    return peak


def command() -> list[str]:
    """Return the arguments of the current command, files without their folders."""
    return [shorten(argument) or "" for argument in sys.argv]


def versions() -> dict[str, str]:
    """Return versions of packages that can change a number."""
    others = ("torchvision", "timm", "numpy")  # not imported for it: that takes two seconds
    return {
        "fczoo": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # its own class is not a string to a writer of JSON
        **{name: version(name) for name in others},
    }


@cache
def commit() -> str:
    """Return the commit of fczoo's checkout, followed by ``+`` if tracked files differ.

    It is empty if fczoo is installed without its checkout, or git is missing.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""

    def git(*words: str) -> str:
        answer = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=60, check=True
        )
        return answer.stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        changes = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "*.toml")
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{head}+" if changes else head


PARSED_FORMAT = "fczoo-parsed-1"  # name of the file of parsed modules
MAX_PARSED_MODULES = 3000  # entries of that file
# module whose imports cover the engine, core, data, security and backbones
ENGINE = "fczoo.federation.benchmark"


def code_of(settings: Settings, method: Method) -> dict[str, str]:
    """Return the SHA-256 of every module that a run uses, by name.

    Comments, docstrings and blank lines do not count: see ``statements``.
    These are the engine, method, data set, the objects that settings name, and the backbone of a
    plug-in, with their imports from fczoo.
    """
    used: list[Any] = [
        type(method),
        make_aggregator(settings.aggregator or method.training().averaging),
    ]
    if settings.dataset in DATASETS:  # else the images were handed over
        used.append(DATASETS.get(settings.dataset))
    for setting, registry in SPECS.items():
        name = (getattr(settings, setting) or "").partition(":")[0]
        if name and name != "file":
            used.append(registry.get(name))
    if backbone := registered_backbone(split_stored_spec(settings.backbone)[0]):
        used.append(backbone)
    hashes: dict[str, str] = {}
    for module in (ENGINE, *(entry.__module__ for entry in used)):
        _collect(module, {"fczoo", module.partition(".")[0]}, hashes)
    return dict(sorted(hashes.items()))


def digest(code: Mapping[str, str]) -> str:
    """Combine the hashes of several modules into one."""
    return hashlib.sha256(
        "".join(f"{name} {code[name]}\n" for name in sorted(code)).encode()
    ).hexdigest()


def digest_of(*modules: str) -> str:
    """Return one hash of some modules and their imports from fczoo."""
    hashes: dict[str, str] = {}
    for module in modules:
        _collect(module, {"fczoo"}, hashes)
    return digest(hashes)


def file_of(module: str) -> Path | None:
    """Return the file of a module, or None."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # no package, or a notebook's own module
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def _collect(module: str, packages: set[str], hashes: dict[str, str]) -> None:
    """Add the hashes of a module and of its imports from some packages."""
    if module not in hashes and (source := _source(module)):
        hashes[module] = source[0]
        for name in source[1]:
            if name.partition(".")[0] in packages:
                _collect(name, packages, hashes)


@cache
def _source(module: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the hash of a module's file and its possible imports; None without a source."""
    file = file_of(module)
    if file is None:
        return None
    content = file.read_bytes()
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    key = f"{package} {hashlib.sha256(content).hexdigest()}"
    parsed_modules = _load_parsed_modules()
    if key not in parsed_modules:
        tree = ast.parse(content)
        modules = tuple(dict.fromkeys(_imports(tree, package)))
        text = statements(content.decode("utf-8"), tree)
        parsed_modules[key] = hashlib.sha256(text.encode()).hexdigest(), modules
    return parsed_modules[key]


@cache
def _load_parsed_modules() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return hashes and imports of modules that earlier processes parsed, by package and content.

    Parsing the whole engine takes nearly a second. A process adds what it parsed when it exits.
    """
    path = home() / "cache" / f"{PARSED_FORMAT}.json"
    try:
        parsed_modules = msgspec.json.decode(
            path.read_bytes(), type=dict[str, tuple[str, tuple[str, ...]]]
        )
    except (OSError, msgspec.DecodeError):  # none, or damaged: each module is parsed again
        parsed_modules = {}
    count = len(parsed_modules)

    def save() -> None:
        if len(parsed_modules) > count:
            with contextlib.suppress(OSError):  # a folder that cannot be written costs only time
                path.parent.mkdir(parents=True, exist_ok=True)
                write_safely(
                    path,
                    msgspec.json.encode(dict(list(parsed_modules.items())[-MAX_PARSED_MODULES:])),
                )

    atexit.register(save)
    return parsed_modules


def statements(source: str, tree: ast.Module) -> str:
    """Return the lines of a module that can change a number.

    Docstrings, lines that hold only a comment, and blank lines are left out; lines inside other
    strings are kept. A comment after a statement counts as part of its line.

    Args:
        source: Text of the module.
        tree: Its parsed form.
    """
    lines = source.splitlines()
    removed, inner = set[int](), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            removed |= _docstring_lines(node, lines)
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno:
            inner |= set(range(node.lineno, node.end_lineno + 1))
    code_lines = []
    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        if number not in removed and (number in inner or (stripped and stripped[0] != "#")):
            code_lines.append(line.rstrip())
    return "\n".join(code_lines)


def _docstring_lines(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str]
) -> set[int]:
    """Return the numbers of the lines that hold only the docstring of a node."""
    if ast.get_docstring(node, clean=False) is None:
        return set()
    first = node.body[0]
    start, stop = first.lineno, first.end_lineno or first.lineno
    before = lines[start - 1].encode()[: first.col_offset]
    after = lines[stop - 1].encode()[first.end_col_offset :]
    return set(range(start, stop + 1)) if not (before + after).strip() else set()


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield names that may be modules: ``from a import b`` may mean ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = f"{'.' * node.level}{node.module or ''}"
            base = importlib.util.resolve_name(origin, package) if node.level else origin
            yield base
            yield from (f"{base}.{name.name}" for name in node.names)
