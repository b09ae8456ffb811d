"""What a result depends on besides its settings and its code: library versions, hardware, memory."""

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fczoo import __version__
from fczoo.core.files import shorten

RESET_PEAK = Path("/proc/self/clear_refs")  # 5, written there, resets VmHWM; see proc(5)


def hardware() -> dict[str, Any]:
    """What the times were measured on: processor, cores that this process may use, graphics processors."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpus": gpus}


def reset_peak_memory(device: torch.device) -> None:
    """Begin to measure ``peak_memory`` anew, as every run does."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if os.access(RESET_PEAK, os.W_OK):
        RESET_PEAK.write_text("5", encoding="utf-8")


def peak_memory(device: torch.device) -> dict[str, int]:
    """Largest memory since ``reset_peak_memory``, bytes.

    ``run``: of the process, on Linux alone; ``cuda``: of CUDA's allocator.
    """
    peak = {}
    if os.access(RESET_PEAK, os.W_OK):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        peak["run"] = 1024 * int(status.partition("VmHWM:")[2].split()[0])
    if device.type == "cuda":
        peak["cuda"] = torch.cuda.max_memory_allocated()
    return peak


def command() -> list[str]:
    """The words of the command that runs, without the folders of its files."""
    return [shorten(word) or "" for word in sys.argv]


def versions() -> dict[str, str]:
    """Versions that can change a number."""
    others = ("torchvision", "timm", "numpy")  # not imported for it: that takes two seconds
    return {
        "fczoo": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # its own class is no string to a writer of JSON
        **{name: version(name) for name in others},
    }
