"""Test the JSON schemas of the handbook against the types and files of a run."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import fczoo
from fczoo.federation.result import Result
from fczoo.reports.run_folder import BenchFile

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
Import = Callable[[str], ModuleType]


def read_schema(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8"))
    return schema


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a short run."""
    out = tmp_path_factory.mktemp("schemas") / "run"
    fczoo.bench(
        "fedncm", dataset="digits", train_per_class=4, test_per_class=2, tasks=2, out=str(out)
    )
    return out


@pytest.mark.parametrize("name", ["result", "bench"])
def test_schema_is_current(name: str, docs_module: Import) -> None:
    text = (SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8")
    assert text == docs_module("schema").schema_text(name), "run python docs/reference.py"


@pytest.mark.parametrize(("name", "kind"), [("result", Result), ("bench", BenchFile)])
def test_schema_describes_every_field(name: str, kind: type) -> None:
    properties = read_schema(name)["properties"]
    names = {field.encode_name for field in msgspec.inspect.type_info(kind).fields}
    assert properties.keys() - names == {"format", "sha256"} | {"finished"} & properties.keys()
    assert names <= properties.keys()
    assert all(entry["description"].endswith(".") for entry in properties.values())


def test_run_files_match_schemas(folder: Path) -> None:
    for name, path in (("result", "fedncm/seed0/result.json"), ("bench", "bench.json")):
        content = json.loads((folder / path).read_text(encoding="utf-8"))
        schema = read_schema(name)
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(content, schema)
        assert content.keys() <= schema["properties"].keys()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", -1),
        ("format", "fczoo-result-0"),
        ("accuracy", [["good"]]),
        ("sha256", "abc"),
        ("task_sizes", None),
    ],
)
def test_schema_rejects_invalid_value(folder: Path, field: str, value: Any) -> None:
    content = json.loads((folder / "fedncm/seed0/result.json").read_text(encoding="utf-8"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**content, field: value}, read_schema("result"))


def test_schema_accepts_null_for_missing_accuracy(folder: Path) -> None:
    content = json.loads((folder / "fedncm/seed0/result.json").read_text(encoding="utf-8"))
    jsonschema.validate({**content, "accuracy": [[None]]}, read_schema("result"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**content, "seconds": None}, read_schema("result"))
