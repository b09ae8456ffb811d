"""Documentation of result fields and settings: meaning, unit and default."""

import dataclasses

from click.testing import CliRunner

import fczoo
from fczoo.cli.app import main
from fczoo.reports.result_fields import RESULT_FIELDS, describe_result_fields


def test_every_result_field_has_meaning():
    assert list(RESULT_FIELDS) == [field.name for field in dataclasses.fields(fczoo.Result)]
    descriptions = {entry.name: entry for entry in describe_result_fields()}
    assert all(entry.meaning for entry in descriptions.values())
    for name, field in fczoo.Result.__dataclass_fields__.items():
        has_default = field.default is not dataclasses.MISSING
        has_default |= field.default_factory is not dataclasses.MISSING
        assert bool(descriptions[name].default) == has_default, name
    assert descriptions["accuracy"][1:4] == ("list[list[float]]", "%", "[]")
    assert descriptions["server_storage"][1:4] == ("int | None", "bytes", "None")
    assert descriptions["virtual_seconds"][1:4] == ("float", "s", "0.0")
    assert descriptions["options"][1:4] == ("dict[str, Any]", "", "")


def test_units_match_values_of_run():
    """Compare with a run of two tasks of five classes, four test images each."""
    result = fczoo.run(
        "fedncm", dataset="digits", tasks=2, rounds=1, train_per_class=5, test_per_class=4
    )
    assert result.task_sizes == [5, 5] and result.test_counts == [20, 20]
    assert sum(count for _, _, count in result.confusion) == 40
    assert result.curve[1][3] == result.bytes_up + result.bytes_down
    assert sum(result.uploaded.values()) <= result.bytes_up
    assert max(map(max, result.accuracy)) > 1  # percentages, not shares
    assert {*result.phases} <= {"surveys", "training", "server", "evaluation", "personal"}


def test_show_result_prints_fields():
    outcome = CliRunner().invoke(main, ["show", "result"])
    assert outcome.exit_code == 0, outcome.output
    for name in RESULT_FIELDS:
        assert f"\n{name} " in outcome.stdout
    assert "fczoo show result" in fczoo.Result.__doc__
    assert "fczoo show settings" in fczoo.Settings.__doc__


def test_every_setting_has_meaning():
    for field in dataclasses.fields(fczoo.Settings):
        assert len(field.metadata["meaning"]) > 10, field.name
    listing = CliRunner().invoke(main, ["show", "settings"]).stdout
    assert all(f"\n{field.name} " in listing for field in dataclasses.fields(fczoo.Settings))


def test_attributes_of_results_are_documented():
    documented = fczoo.Results.__doc__.partition("Attributes:")[2]
    for field in dataclasses.fields(fczoo.Results):
        assert f"{field.name}: " in documented
