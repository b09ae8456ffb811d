"""CPU time of commands that only look something up: ``python benchmarks/startup.py [COMMAND ...]``.

Each command runs in processes of its own; the least of the tries counts, as the others waited for
something else. A command given as one argument, such as "show hgp", is measured in place of the
usual ones.
"""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

TRIES = 3
TORCH = "import torch"  # what the commands below the line may take anyway
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


def cpu_seconds(words: list[str]) -> float:
    """User and system time of a child process, threads included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    command = shutil.which("fczoo", path=str(Path(sys.executable).parent))
    if command is None:
        sys.exit("fczoo is not installed next to this Python; run pip install -e .")
    words = {f"fczoo {c}": [command, *c.split()] for c in sys.argv[1:] or COMMANDS}
    for name, call in {TORCH: [sys.executable, "-c", TORCH], **words}.items():
        print(f"{min(cpu_seconds(call) for _ in range(TRIES)):6.2f} s  {name}", flush=True)


if __name__ == "__main__":
    main()
