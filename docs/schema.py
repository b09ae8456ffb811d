"""JSON schemas of the files of a run, from the types that read them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fczoo.federation import result
from fczoo.reports import run_folder
from fczoo.reports.result_fields import describe_result_fields

DIALECT = "https://json-schema.org/draft/2020-12/schema"
FILES = {
    "result": (result.Result, result.FORMAT, result.METRIC_FIELDS),
    "bench": (run_folder.BenchFile, run_folder.FORMAT, ()),
}
"""Name of a file without its suffix -> its type, its format, and fields in which null is NaN."""
RECORD = {
    "format": {"description": "Version of the format.", "type": "string"},
    "sha256": {
        "description": "SHA-256 of the other fields, as JSON with sorted keys.",
        "type": "string",
        "pattern": "^[0-9a-f]{64}$",
    },
}
"""Fields that every file has next to those of its type."""
IS_FINISHED = {"description": "Whether every task is learned and evaluated.", "type": "boolean"}
BENCH_FIELDS = {
    "methods": "Options of each method by its name.",
    "seeds": "Seeds; each method has a run per seed.",
    "settings": "Fields of Settings by name, paths without their folders.",
    "backbone": "Shape, input and SHA-256 of the backbone.",
    "partition": "Partitioner and SHA-256 of the partition.",
    "versions": "Versions of Python and of the libraries.",
    "device": "Device of the runs.",
    "split": "How training and test images were separated.",
    "data": "SHA-256 of the images, and remarks.",
    "hardware": "Processor, cores, threads and GPUs.",
    "tuned": "Search of `fczoo tune` behind the options, where --tuned names one.",
    "started": "Time at which the runs began.",
    "command": "Words of the command that began or resumed the runs last.",
    "earlier_commands": "Words of the commands before it.",
    "code": "SHA-256 of every module that the runs use.",
    "keep": "Whether runs keep their models, and the server's state.",
    "changed_code": "Changes of the code that --accept-changed-code accepted, with times.",
    "warnings": "Warnings of the command and its runs, equal ones merged.",
}
"""Field of ``bench.json`` -> its meaning."""


def meanings_of(name: str) -> dict[str, str]:
    """Return the meaning of each field of a file.

    Args:
        name: Name of the file without its suffix.
    """
    if name == "bench":
        return BENCH_FIELDS
    return {
        entry.name: f"{entry.meaning}{f' ({entry.unit})' if entry.unit else ''}."
        for entry in describe_result_fields()
    }


def write_schemas(folder: Path) -> None:
    """Write the schema of each file.

    Args:
        folder: Folder of the schemas.
    """
    folder.mkdir(exist_ok=True)
    for name in FILES:
        (folder / f"{name}.schema.json").write_text(schema_text(name), encoding="utf-8")


def schema_text(name: str) -> str:
    """Return the schema of a file as text.

    Args:
        name: Name of the file without its suffix.
    """
    return json.dumps(make_schema(name), indent=1, ensure_ascii=False) + "\n"


def make_schema(name: str) -> dict[str, Any]:
    """Return the schema of a file.

    Args:
        name: Name of the file without its suffix.
    """
    kind, version, nullable_fields = FILES[name]
    (types,) = msgspec.json.schema_components([kind])[1].values()
    meanings = meanings_of(name)
    fields = {
        key: {"description": meanings[key], **(with_null(s) if key in nullable_fields else s)}
        for key, s in types["properties"].items()
    }
    for field in msgspec.inspect.type_info(kind).fields:
        if field.default_factory is not msgspec.NODEFAULT:  # msgspec before 0.23 omits them
            fields[field.encode_name].setdefault("default", field.default_factory())
    first = {"format": {**RECORD["format"], "const": version}}
    if name == "result":
        first["finished"] = IS_FINISHED
    return {
        "$schema": DIALECT,
        "title": f"{name}.json",
        "type": "object",
        "properties": {**first, **fields, "sha256": RECORD["sha256"]},
        "required": ["format", *types["required"], "sha256"],
    }


def with_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema in which null may take the place of each number.

    Args:
        schema: Schema of a field.
    """
    if schema.get("type") == "number":
        return {**schema, "type": ["number", "null"]}
    inner = ("items", "additionalProperties")
    nullable = {key: with_null(schema[key]) for key in inner if isinstance(schema.get(key), dict)}
    return {**schema, **nullable}
