from .errors import FczooError as FczooError
from .method import (
    Method as Method,
)
from .options import option as option
from .payload import (
    Content as Content,
)
from .payload import (
    Group as Group,
)
from .payload import (
    Payload as Payload,
)
from .payload import (
    per_class as per_class,
)
from .payload import (
    per_seen_class as per_seen_class,
)
from .payload import (
    rows as rows,
)
from .payload import (
    samples as samples,
)
from .payload import (
    whole_tensors as whole_tensors,
)
from .training import Optim as Optim
from .training import Scope as Scope
from .training import TaskPhase as TaskPhase
from .training import Training as Training
from .tree import Tree as Tree
from .tree import drop as drop
from .tree import nbytes as nbytes
from .tree import select as select
from .types import (
    Batch as Batch,
)
from .types import (
    Context as Context,
)
from .types import (
    Diagnoses as Diagnoses,
)
from .types import (
    EndsTasks as EndsTasks,
)
from .types import (
    Evidence as Evidence,
)
from .types import (
    Exchange as Exchange,
)
from .types import (
    HasClientMemory as HasClientMemory,
)
from .types import (
    HasTeacher as HasTeacher,
)
from .types import (
    LocalData as LocalData,
)
from .types import (
    Partitioner as Partitioner,
)
from .types import (
    ServerAggregator as ServerAggregator,
)
from .types import (
    ServerContext as ServerContext,
)
from .types import (
    Task as Task,
)
