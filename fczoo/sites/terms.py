"""What server and sites of a run must have alike, and what no run between them can have."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from fczoo.core.backbone import Backbone
from fczoo.core.errors import FczooError
from fczoo.core.files import through_json
from fczoo.core.method import Method
from fczoo.data.stream import Stream
from fczoo.federation.code import code_of, digest, digest_of
from fczoo.federation.environment import versions
from fczoo.federation.settings import Settings
from fczoo.federation.uplink import Uplink

OWN = ("data_root", "backbone", "device", "together")  # settings that each may have as it likes
# settings that only a simulation can have
SIMULATED = ("attack", "drop_rate", "train_per_class", "joining", "moving", "task_order")


def terms_of(s: Settings, stream: Stream, backbone: Backbone, method: Method, seed: int) -> dict[str, Any]:
    """All on which numbers depend besides the images, as plain values."""
    terms = {
        "class list": _class_list(stream),
        "schedule": [list(stream.classes[task.start : task.stop]) for task in stream.tasks],
        "method": {"name": method.name, **asdict(method)},
        "seed": seed,
        "setting": {name: value for name, value in asdict(s).items() if name not in OWN},
        "backbone": backbone.sha256,
        "version": {
            **versions(),
            "source of fczoo": digest(code_of(s, method)),
            "source of its sites": digest_of("fczoo.sites.site"),
        },
    }
    plain: dict[str, Any] = through_json(terms)
    return plain


def check_terms(own: Mapping[str, Any], other: Mapping[str, Any], where: str) -> None:
    """Raise FczooError naming the first term that is another ``where`` the other ones are."""
    here, there = (dict(_leaves("", terms)) for terms in (own, other))
    for place in sorted(here.keys() | there.keys(), key=lambda place: (place not in here, place)):
        ours, theirs = here.get(place, "missing"), there.get(place, "missing")
        if ours != theirs:
            raise FczooError(f"{place} is {ours} here and {theirs} {where}; give both the same")


def check_sites(settings: Settings, method: Method) -> None:
    """Raise FczooError for what cannot be, or would protect nobody, where clients are institutions."""
    for name in SIMULATED:
        if getattr(settings, name) != getattr(Settings(), name):
            raise FczooError(f"{name} is of simulations alone, and these sites are real; leave it out")
    if settings.tasks == "domains":
        raise FczooError("sites have their tasks from a schedule of classes; leave out tasks = domains")
    if method.training().scope == "pooled":
        raise FczooError(f"{method.name} pools the images of all clients, which no site gives away")
    if settings.dp_noise and not settings.dp_secure:
        raise FczooError(
            "noise from the seed can be taken off again by a server that knows it; say dp_secure = true"
        )
    Uplink(method, settings, 0, settings.clients).check()


def _class_list(stream: Stream) -> list[str]:
    """Names of the classes by their original labels."""
    by_label = sorted(zip(stream.class_order, stream.classes, strict=True))
    return [name for _, name in by_label]


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every plain value within lists and dictionaries, with its place in words."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{place} {name}".strip(), inner)
    elif isinstance(value, list):
        yield f"length of {place}", len(value)
        for number, inner in enumerate(value):
            yield from _leaves(f"{place}, entry {number + 1}", inner)
    else:
        yield place, value
