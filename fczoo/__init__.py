"""fczoo: a benchmark zoo for Federated Class-Incremental Learning on pre-trained vision transformers."""

from pathlib import Path

__version__ = "0.1.0"

if not (Path(__file__).parent / "methods").is_dir():
    # A checkout keeps methods/, baselines/ and datasets/ beside this folder; an installation has them inside it.
    __path__.append(str(Path(__file__).parent.parent))

from .core import Batch, Context, Method, Optim, Task, Tree
from .errors import FczooError
from .options import option
from .record import Result
from .registry import register_aggregator, register_dataset, register_method, register_partitioner
from .runner import Bench, create_method, run
from .settings import Settings
from .weights import load_backbone

__all__ = [
    "Batch", "Bench", "Context", "FczooError", "Method", "Optim", "Result", "Settings", "Task", "Tree", "create_method", "load_backbone",
    "option", "register_aggregator", "register_dataset", "register_method", "register_partitioner", "run",
]  # fmt: skip
