"""What an aggregator returns, looked at: a fault of its own is not laid to a method's learning rates."""

from collections.abc import Sequence

from fczoo.core.errors import FczooError
from fczoo.core.payload import Payload
from fczoo.core.tree import Tree
from fczoo.core.types import ServerAggregator


def sound(aggregator: ServerAggregator) -> ServerAggregator:
    """The aggregator; it raises FczooError where it leaves out a tensor or makes one that is not finite."""
    name = getattr(aggregator, "name", type(aggregator).__name__)

    def merge(payloads: Sequence[Payload]) -> Tree:
        merged = aggregator(payloads)
        fault = ""
        for tensor in payloads[0] if payloads else ():
            if tensor not in merged:
                fault = f"no {tensor}"
            elif not merged[tensor].isfinite().all() and all(p[tensor].isfinite().all() for p in payloads):
                fault = f"a {tensor} that is not finite"
        if fault:
            raise FczooError(f"aggregator {name} returned {fault} from sound uploads; mend its code")
        return merged

    return merge
