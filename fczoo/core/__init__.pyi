from .errors import FczooError as FczooError
from .method import Method as Method
from .method import overrides as overrides
from .options import option as option
from .payload import Content as Content
from .payload import content_of as content_of
from .payload import keep_rows as keep_rows
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
    LocalData as LocalData,
)
from .types import (
    Moment as Moment,
)
from .types import (
    Optim as Optim,
)
from .types import (
    Partitioner as Partitioner,
)
from .types import (
    Scope as Scope,
)
from .types import (
    ServerAggregator as ServerAggregator,
)
from .types import (
    Task as Task,
)
