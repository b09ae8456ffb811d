"""Output of ``fczoo doctor``."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from tabulate import tabulate

from fczoo.backbones.load import load_backbone
from fczoo.backbones.names import BUNDLED_NAME
from fczoo.backbones.pretraining_overlap import describe_pretraining
from fczoo.core.discovery import load_plugins, plugin_entries
from fczoo.core.errors import FczooError
from fczoo.core.files import home
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import IN_PACKAGE
from fczoo.federation.device import bf16_slowdown
from fczoo.federation.environment import versions


def doctor(data_root: Path | None) -> str:
    """Describe versions, devices, plug-ins, extras, and the paths of data and weights.

    Args:
        data_root: Folder of the data. None: the default folder.

    Returns:
        The text to print.
    """
    devices = [
        "cpu",
        *(f"cuda ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())),
    ]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    root = data_root or home() / "data"
    plugins, names = _plugins(), DATASETS.names()
    lines = [
        *versions().items(),
        ("platform", platform.platform()),
        ("devices", ", ".join(devices)),
        ("threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores"),
        (
            "bf16",
            f"a matrix product takes {bf16_slowdown():.2g} times as long as in fp32 on this "
            "processor",
        ),
        *plugins,
        *_extras(),
        ("FCZOO_HOME", f"{home()} ({'set' if os.environ.get('FCZOO_HOME') else 'default'})"),
        (
            "bundled backbone",
            f"{BUNDLED_NAME}, sha256 {load_backbone(BUNDLED_NAME).sha256[:16]}, "
            f"trained on {describe_pretraining(BUNDLED_NAME)}",
        ),
        (
            "other backbones",
            "a weight file, or a timm name; HF_HUB_OFFLINE=1 forbids downloads",
        ),
        ("hub's cache", f"{HF_HUB_CACHE}: {', '.join(_cached_models()) or 'no ViT'}"),
        ("data root", str(root)),
        *((f"data {n}", _describe_data(n, root)) for n in names),
    ]
    return tabulate(lines, tablefmt="plain", disable_numparse=True)


def _plugins() -> list[tuple[str, str]]:
    """List plug-ins with package and version, and the error of those that cannot be loaded."""
    broken = load_plugins()
    rows = []
    for entry in plugin_entries():
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.module
        reason = broken.get(entry.module)
        rows.append(
            (f"plug-in {entry.name}", f"{package}, not loaded: {reason}" if reason else package)
        )
    return rows or [("plug-ins", "none")]


def _extras() -> list[tuple[str, str]]:
    """List fczoo's optional packages by extra, with their versions."""
    packages_by_extra: dict[str, list[str]] = {}
    for line in requires("fczoo") or ():
        extra, package = re.search(r"extra == ['\"]([\w-]+)['\"]", line), re.match(r"[\w.-]+", line)
        if extra and package and package[0] != "fczoo":
            packages_by_extra.setdefault(extra[1], []).append(package[0])
    return [
        (f"extra {extra}", _describe_extra(extra, packages))
        for extra, packages in packages_by_extra.items()
    ]


def _describe_extra(extra: str, packages: list[str]) -> str:
    available_packages, missing_packages = [], []
    for package in packages:
        try:
            available_packages.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing_packages.append(package)
    advice = (
        f"{', '.join(missing_packages)} missing: pip install 'fczoo[{extra}]'"
        if missing_packages
        else ""
    )
    return "; ".join(filter(None, (", ".join(available_packages), advice)))


def _cached_models() -> list[str]:
    """Return the names of timm's ViTs whose weights are in the cache of huggingface_hub."""
    folders = Path(HF_HUB_CACHE).glob("models--timm--vit_*/snapshots/*/model.safetensors")
    return sorted({f.parents[2].name.removeprefix("models--timm--") for f in folders})


def _describe_data(name: str, root: Path) -> str:
    dataset = DATASETS.get(name)()
    if not dataset.folder:
        return dataset.source or IN_PACKAGE
    try:
        return f"found: {dataset.locate(root)}"
    except FczooError:
        return f"no folder {dataset.folder}; see `fczoo show {name}`"
