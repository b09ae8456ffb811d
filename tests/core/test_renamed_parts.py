"""Test that old names report the new name."""

import inspect

import pytest

import fczoo
from fczoo.core import types
from fczoo.core.method import OLD_MEMBER_NAMES
from fczoo.core.training import OLD_TRAINING_OPTIONS as OPTIONS
from fczoo.core.training import Training


@pytest.mark.parametrize("old", OLD_MEMBER_NAMES)
def test_old_method_member_is_rejected(old: str) -> None:
    with pytest.raises(
        TypeError, match=f"Old uses old names of fczoo: {old} is now {OLD_MEMBER_NAMES[old]}$"
    ):
        type("Old", (fczoo.Method,), {old: None})


def test_new_member_names_exist() -> None:
    classes = [fczoo.Method, *(getattr(types, name) for name in types.OPTIONAL)]
    members = {name for cls in classes for name in vars(cls)}
    fields = {f"Training.{name}" for name in Training.__dataclass_fields__}
    assert set(OLD_MEMBER_NAMES.values()) <= members | fields


def test_method_has_fifteen_overridable_functions() -> None:
    members = [n for n, f in vars(fczoo.Method).items() if n[0] != "_" and inspect.isfunction(f)]
    optional = [name for names in types.OPTIONAL.values() for name in names]
    assert len({*members, *optional}) == len(members) + len(optional) == 15


@pytest.mark.parametrize("old", OPTIONS)
def test_old_training_option_is_rejected(old: str) -> None:
    with pytest.raises(TypeError, match=f"old options: {old} is now {OPTIONS[old]}$"):
        Training(**{old: None})


def test_new_training_options_exist() -> None:
    assert set(OPTIONS.values()) <= set(Training.__dataclass_fields__)


@pytest.mark.parametrize(
    ("old", "new"), [("Bench", "Benchmark"), ("Silent", "Callback"), ("whole", "whole_tensors")]
)
def test_old_class_names_work_and_warn(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"fczoo.{old} is now fczoo.{new}"):
        assert getattr(fczoo, old) is getattr(fczoo, new)
