from .backbones.load import load_backbone as load_backbone
from .core.errors import FczooError as FczooError
from .core.method import Method as Method
from .core.options import option as option
from .core.registry import (
    create_method as create_method,
)
from .core.registry import (
    register_aggregator as register_aggregator,
)
from .core.registry import (
    register_attack as register_attack,
)
from .core.registry import (
    register_dataset as register_dataset,
)
from .core.registry import (
    register_method as register_method,
)
from .core.registry import (
    register_partitioner as register_partitioner,
)
from .core.registry import (
    register_protocol as register_protocol,
)
from .core.tree import Tree as Tree
from .core.types import Batch as Batch
from .core.types import Context as Context
from .core.types import Optim as Optim
from .core.types import Task as Task
from .federation.benchmark import Bench as Bench
from .federation.benchmark import run as run
from .federation.result import Result as Result
from .federation.settings import Settings as Settings

__version__: str
