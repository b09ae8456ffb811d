"""Test strict JSON: missing numbers are null and are read back as NaN."""

import ast
import json
import math
from pathlib import Path

import numpy as np
import pytest

import fczoo
from fczoo.core.files import content_sha256, encode_json, restore_nan, through_json, write_record
from fczoo.federation.result import Result, read_result, write_result

NON_FINITE = {
    "a": math.inf,
    "b": [1.5, -math.inf, (math.nan, 2)],
    "c": {"d": np.float64("nan")},
    "e": None,
}


def parse_strict_json(text: str) -> object:
    """Parse JSON without NaN and Infinity, as other tools do."""

    def reject(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=reject)


def test_non_finite_numbers_become_null() -> None:
    target = {"a": None, "b": [1.5, None, [None, 2]], "c": {"d": None}, "e": None}
    assert parse_strict_json(encode_json(NON_FINITE)) == target == through_json(NON_FINITE)
    assert encode_json({"a": [1, 0.1]}, separators=(",", ":")) == '{"a":[1,0.1]}'


def test_null_becomes_nan_in_measurement_fields() -> None:
    content = restore_nan({"a": [[1.0, None]], "b": {"c": None}, "d": None}, ("a", "b"))
    assert content["a"][0][0] == 1
    assert math.isnan(content["a"][0][1])
    assert math.isnan(content["b"]["c"])
    assert content["d"] is None


def result_without_tests() -> Result:
    """Return a result whose second task has no test images."""
    result = Result("hgp", {}, {}, 0, {}, {}, [0, 1], [1, 1], [5, 0])
    result.accuracy = [[90.0], [80.0, math.nan]]
    return result


def test_result_with_nan_is_valid_json_and_readable(tmp_path: Path) -> None:
    write_result(tmp_path / "result.json", result_without_tests())
    assert parse_strict_json((tmp_path / "result.json").read_text())["accuracy"] == [
        [90.0],
        [80.0, None],
    ]
    rows = read_result(tmp_path / "result.json").accuracy
    assert rows[0] == [90.0]
    assert rows[1][0] == 80.0
    assert math.isnan(rows[1][1])


def test_old_result_with_nan_is_readable(tmp_path: Path) -> None:
    record = {"format": "fczoo-result-1", "finished": True, **vars(result_without_tests())}
    text = json.dumps({**record, "sha256": content_sha256(record)})
    assert "NaN" in text
    (tmp_path / "result.json").write_text(text)
    assert math.isnan(read_result(tmp_path / "result.json").accuracy[1][1])


def test_record_hash_matches_content_with_null(tmp_path: Path) -> None:
    write_record(tmp_path / "a.json", "form-1", {"x": math.nan})
    content = parse_strict_json((tmp_path / "a.json").read_text())
    assert content["x"] is None
    assert content["sha256"] == content_sha256(content)


@pytest.mark.parametrize("folder", ["", "methods", "baselines", "datasets"])
def test_sources_write_no_nan_to_json(folder: str) -> None:
    """Write JSON only in core/files.py, or with NaN forbidden."""
    root = Path(fczoo.__file__).parent
    sources = root.rglob("*.py") if not folder else (root.parent / folder).rglob("*.py")
    for file in sources:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in (
                "json.dump",
                "json.dumps",
            ):
                continue
            strict_call = any(ast.unparse(k) == "allow_nan=False" for k in node.keywords)
            assert strict_call or file == root / "core" / "files.py", f"{file}:{node.lineno}"
