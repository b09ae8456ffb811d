"""JSON that every reader accepts: null for a missing number, read back as NaN where it belongs."""

import ast
import json
import math
from pathlib import Path

import numpy as np
import pytest

import fczoo
from fczoo.core.files import content_sha256, encode_json, restore_nan, through_json, write_record
from fczoo.federation.result import Result, read_result, write_result

ODD = {
    "a": math.inf,
    "b": [1.5, -math.inf, (math.nan, 2)],
    "c": {"d": np.float64("nan")},
    "e": None,
}


def strict(text: str) -> object:
    """Parse JSON as other tools do, which know no NaN and no Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_json_does_not_have_become_null() -> None:
    target = {"a": None, "b": [1.5, None, [None, 2]], "c": {"d": None}, "e": None}
    assert strict(encode_json(ODD)) == target == through_json(ODD)
    assert encode_json({"a": [1, 0.1]}, separators=(",", ":")) == '{"a":[1,0.1]}'


def test_null_is_read_as_nan_in_the_fields_that_hold_measurements() -> None:
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


def test_a_result_with_nan_is_json_and_comes_back(tmp_path: Path) -> None:
    write_result(tmp_path / "result.json", result_without_tests())
    assert strict((tmp_path / "result.json").read_text())["accuracy"] == [[90.0], [80.0, None]]
    rows = read_result(tmp_path / "result.json").accuracy
    assert rows[0] == [90.0]
    assert rows[1][0] == 80.0
    assert math.isnan(rows[1][1])


def test_an_older_result_with_nan_is_still_read(tmp_path: Path) -> None:
    record = {"format": "fczoo-result-1", "finished": True, **vars(result_without_tests())}
    text = json.dumps({**record, "sha256": content_sha256(record)})
    assert "NaN" in text
    (tmp_path / "result.json").write_text(text)
    assert math.isnan(read_result(tmp_path / "result.json").accuracy[1][1])


def test_a_record_matches_its_hash_after_nan_became_null(tmp_path: Path) -> None:
    write_record(tmp_path / "a.json", "form-1", {"x": math.nan})
    content = strict((tmp_path / "a.json").read_text())
    assert content["x"] is None
    assert content["sha256"] == content_sha256(content)


@pytest.mark.parametrize("folder", ["", "methods", "baselines", "datasets"])
def test_json_is_written_in_one_place(folder: str) -> None:
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
