"""The context of the server, for calls of server functions by hand."""

from typing import Any

from fczoo.core.types import ServerContext, Task


def server_context(
    task: Task, backbone: Any = None, rng: Any = None, num_samples: int = 1
) -> ServerContext:
    """Return the context of the first of two rounds of a task with three clients."""
    return ServerContext(task, 0, 2, 3, 3, num_samples, backbone, rng)
