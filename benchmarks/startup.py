"""Measure CPU time of commands that only show names.

    python benchmarks/startup.py [COMMAND ...]

Each command runs in separate processes; the smallest time of all tries counts, as the others waited
for something else. A command given as one argument, such as "show hgp", is measured instead of the
usual ones.
"""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

TRIES = 3
TORCH = "import torch"  # for comparison: commands that compute import it
COMMANDS = (
    "--version",
    "--help",
    "bench --help",
    "list",
    "list methods",
    "list baselines",
    "list datasets",
    "list partitioners",
    "list aggregators",
    "list attacks",
    "list protocols",
    "list releases",
    "papers",
    "show protocol hgp",
    "show hgp",
    "show cifar100",
    "show dirichlet",
    "show settings",
    "partition",
    "list quirks",
    "list backbones",
)


def cpu_seconds(command: list[str]) -> float:
    """Return user and system time of a child process, including its threads."""
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def main() -> None:
    """Print the CPU time of every command."""
    command = shutil.which("fczoo", path=str(Path(sys.executable).parent))
    if command is None:
        sys.exit("fczoo is not installed next to this Python; run pip install -e .")
    commands = {f"fczoo {c}": [command, *c.split()] for c in sys.argv[1:] or COMMANDS}
    for name, call in {TORCH: [sys.executable, "-c", TORCH], **commands}.items():
        print(f"{min(cpu_seconds(call) for _ in range(TRIES)):6.2f} s  {name}", flush=True)


if __name__ == "__main__":
    main()
