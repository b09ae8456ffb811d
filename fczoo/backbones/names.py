"""Names of backbones, read from timm's source: importing timm takes three seconds."""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

from fczoo.core.names import match

BUNDLED_NAME = "vit_nano_32"
_PLAIN = re.compile(
    r"vit_(tiny|small|base|large)_patch(8|16|32)_(224|384)\.(augreg|augreg_.*|dino|mae|orig_.*|sam_.*)"
)
_TABLE = re.compile(r"^default_cfgs = (\{$.*?^\})$", re.MULTILINE | re.DOTALL)
_PUBLISHED = {"url", "file", "hf_hub_id"}  # any of them says where weights are


def backbone_names() -> list[str]:
    """The bundled backbone and timm's plain ViTs with published weights."""
    return [BUNDLED_NAME, *sorted(n for n in _written() or _imported() if _PLAIN.fullmatch(n))]


@cache
def full_name(name: str) -> str:
    """Return a timm name with the tag of its default weights; a name with a tag stays as it is."""
    if "." in name:
        return name
    tagged = (n for n in _written() if n.startswith(f"{name}.") and not n.endswith(".untrained"))
    return next(tagged, name)


def canonical_backbone(spec: str) -> str:
    """Return a backbone, with or without ``:FILE``, by the spelling of its name that is in the list.

    An unknown name and a file stay as they are.
    """
    name, colon, file = spec.partition(":")
    if name in ("", BUNDLED_NAME):
        return spec
    return f"{match(name, _spellings()) or name}{colon}{file}"


@cache
def _spellings() -> tuple[str, ...]:
    """Return the names of backbones, with and without the tag of their weights."""
    names = backbone_names()
    return (*names, *dict.fromkeys(name.partition(".")[0] for name in names))


def _written() -> list[str]:
    """Names in the table of timm's module of vision transformers; none where it keeps no such table."""
    timm = importlib.util.find_spec("timm")
    assert timm and timm.origin, "timm is installed with fczoo"
    table = _TABLE.search((Path(timm.origin).parent / "models" / "vision_transformer.py").read_text("utf-8"))
    names: list[str] = []
    for key, value in _entries(table[1]) if table else ():
        match key, value:
            case ast.Constant(value=str(name)), ast.Call(keywords=said):
                if _PUBLISHED & {word.arg for word in said}:
                    names.append(name)
    return names


def _entries(table: str) -> list[tuple[ast.expr | None, ast.expr]]:
    parsed = ast.parse(table, mode="eval").body
    return list(zip(parsed.keys, parsed.values, strict=True)) if isinstance(parsed, ast.Dict) else []


def _imported() -> list[str]:
    import timm

    names: list[str] = timm.list_pretrained("vit_*")
    return names
