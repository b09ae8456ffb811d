"""Options of methods on data sets, read from the protocol that states them."""

from collections.abc import Callable, Collection
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fczoo.protocols.registry import PROTOCOLS
from fczoo.protocols.statements import Statement

if TYPE_CHECKING:
    from fczoo.core.method import Method

MethodClass = TypeVar("MethodClass", bound="type[Method]")


def use_protocol_options(
    protocol: str, method: str, *, datasets: Collection[str] = (), column: int = 0
) -> Callable[[MethodClass], MethodClass]:
    """Decorate a method's dataclass: its ``dataset_options`` have the protocol's values, too.

    These are the values that a protocol states for single data sets, as in a table of the paper's
    appendix. Values that equal the method's defaults are left out. The class's own
    ``dataset_options`` are of other data sets.

    Args:
        protocol: Name of the protocol.
        method: Row of the method in the protocol.
        datasets: Data sets; empty: all of the protocol.
        column: Position of the split whose value is taken where the paper has one for each.
    """

    def add(cls: MethodClass) -> MethodClass:
        defaults = {field.name: field.default for field in fields(cast(Any, cls))}
        options: dict[str, Any] = dict(vars(cls).get("dataset_options", {}))
        for dataset, methods in PROTOCOLS.get(protocol).dataset_options.items():
            values = {
                name: _value(statement, column)
                for name, statement in methods.get(method, {}).items()
            }
            changes = {k: v for k, v in values.items() if k in defaults and v != defaults[k]}
            if changes and (not datasets or dataset in datasets):
                options[dataset] = changes
        cls.dataset_options = options
        return cls

    return add


def _value(statement: Statement, column: int) -> Any:
    columns = statement.columns
    return columns[column] if len(columns) > 1 else columns[0]
