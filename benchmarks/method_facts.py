"""Write the table from which ``fczoo list methods`` prints: ``python benchmarks/method_facts.py``.

The list imports neither torch nor a method, so this script computes in advance which tensors a
method trains and sends. Run it after a method's declaration has changed; a test compares the table
with the methods.
"""

import csv
import re
from typing import get_args

import torch

from fczoo.board.benchmark_page import FAMILIES, tensor_kinds
from fczoo.cli.listing import TABLE, MethodFacts
from fczoo.core.method import Method
from fczoo.core.payload import Content, Payload, contents
from fczoo.core.registry import METHODS, create_method
from fczoo.core.tree import nbytes
from fczoo.federation.settings import Settings
from fczoo.runner.cost import measure

DATASET = "digits"  # on which uploads are measured
SHORT = {
    "whole network": "network",
    "parameters": "weights",
    "counts": "counts",
    "class means": "means",
    "class variances": "variances",
    "second moments": "moments",
    "gradients of single images": "gradients",
    "losses": "losses",
}
"""Short word for a narrow column, by trained or sent content."""


def facts_of(name: str) -> MethodFacts:
    """Return a method's row of the list, from its declaration and one measured upload."""
    method = create_method(name, DATASET)
    training = method.training()
    kinds = sorted(
        tensor_kinds(training.trained_prefixes),
        key=lambda kind: FAMILIES.index(kind) if kind in FAMILIES else len(FAMILIES),
    )
    trained_words = [SHORT.get(kind, kind) for kind in kinds]
    sent_kinds = contents(training.uploads)
    if kinds and not training.own_models:
        sent_kinds |= {"parameters"}
    return MethodFacts(
        name,
        group_of(method),
        year_of(type(method).paper),
        ", ".join(trained_words) or "nothing",
        ", ".join(SHORT[content] for content in get_args(Content) if content in sent_kinds)
        or "nothing",
        str(upload_bytes(method)),
    )


def group_of(method: Method) -> str:
    """Return the group of a method, from its declaration and its package."""
    training = method.training()
    if training.data_scope != "task":
        return "bounds"
    if training.exemplars:
        return "exemplars"
    if type(method).__module__.startswith("fczoo.baselines."):
        return "baselines" if training.trained_prefixes else "analytic"
    return "methods"


def year_of(citation: str) -> str:
    """Return the first year from 2000 on in a citation, or that of an arXiv number; empty for none.

    Earlier years are those of ideas that a later paper made federated.
    """
    if year := re.search(r"(?<![\d.])20\d\d(?![\d.]\d)", citation):
        return year[0]
    number = re.search(r"(?<!\d)(\d\d)\d\d\.\d{4,5}(?!\d)", citation)
    return f"20{number[1]}" if number else ""


def upload_bytes(method: Method) -> int:
    """Return the bytes that a client sends in a round of the first task.

    For a method without rounds these are the bytes of its first upload.
    """
    uploads = measure(method, Settings.for_dataset(DATASET)).first_task_uploads
    upload = uploads.get("round") or next(iter(uploads.values()), Payload({}))
    return nbytes(upload.tensors)


def main() -> None:
    """Write the table of all methods of this repository."""
    torch.set_num_threads(1)  # a step on few images is too small to share
    names = [*METHODS.names("fczoo.methods"), *METHODS.names("fczoo.baselines")]
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(MethodFacts._fields)
        writer.writerows(facts_of(name) for name in names)
    print(f"{len(names)} methods written to {TABLE}")


if __name__ == "__main__":
    main()
