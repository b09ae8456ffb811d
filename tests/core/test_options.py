"""Test parsing, types and limits of hyper-parameters."""

from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fczoo import FczooError, option
from fczoo.core.options import build, check_options, describe_type, nearest


@dataclass(frozen=True)
class Knobs:
    """One field of every kind."""

    rate: float = option(0.5, "a number", low=0, high=2)
    rank: int = option(4, "a whole number", low=1)
    most: int = option(0, "limited above only", high=9)
    sort: bool = option(True, "a switch")
    kind: Literal["soft", "hard"] = option("soft", "a choice")
    blocks: tuple[int, ...] = option((0,), "whole numbers", low=0)
    clip: float | None = option(1.0, "a number or none", low=0)
    together: Literal["auto"] | int = option("auto", "a word or a whole number", low=1)
    label: str = option("x", "a word")

    def __post_init__(self) -> None:
        check_options(self)


def make_knobs(**words: object) -> Knobs:
    """Build ``Knobs`` from text."""
    return build(Knobs, "knobs", words)


# ---------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("field", "word", "value"),
    [
        ("rate", "0.25", 0.25),
        ("rate", "1e-3", 1e-3),
        ("rate", "2", 2.0),
        ("rate", 1, 1.0),
        ("rate", " 1.5 ", 1.5),
        ("rank", "8", 8),
        ("rank", 8, 8),
        ("sort", "true", True),
        ("sort", "False", False),
        ("sort", "TRUE", True),
        ("sort", False, False),
        ("kind", "hard", "hard"),
        ("blocks", "0,1,5", (0, 1, 5)),
        ("blocks", "(0, 1)", (0, 1)),
        ("blocks", "[2]", (2,)),
        ("blocks", "3", (3,)),
        ("blocks", "3,", (3,)),
        ("blocks", "", ()),
        ("blocks", [1, 2], (1, 2)),
        ("blocks", (1, 2), (1, 2)),
        ("clip", "none", None),
        ("clip", "None", None),
        ("clip", None, None),
        ("clip", "0.5", 0.5),
        ("clip", 3, 3.0),
        ("together", "auto", "auto"),
        ("together", "4", 4),
        ("label", "12", "12"),
        ("label", "none", "none"),
    ],
)
def test_text_is_converted_to_values(field: str, word: object, value: object) -> None:
    result = getattr(make_knobs(**{field: word}), field)
    assert result == value and type(result) is type(value)
    if isinstance(value, tuple):
        assert [type(v) for v in result] == [type(v) for v in value]


@pytest.mark.parametrize(
    ("field", "word", "complaint"),
    [
        ("rate", "fast", "knobs.rate is 'fast'; it must be a finite number"),
        ("rate", "", "knobs.rate is ''; it must be a finite number"),
        ("rate", "nan", "it must be a finite number"),
        ("rate", float("nan"), "it must be a finite number"),
        ("rate", "inf", "it must be a finite number"),
        ("rate", float("inf"), "it must be a finite number"),
        ("rate", "1e999", "it must be a finite number"),
        ("rate", "true", "it must be a finite number"),
        ("rate", True, "it must be a finite number"),
        ("rate", None, "it must be a finite number"),
        ("rate", "none", "it must be a finite number"),
        ("rate", "-0.1", "is -0.1; it must be between 0 and 2"),
        ("rate", 2.5, "it must be between 0 and 2"),
        ("rank", "2.5", "it must be a whole number"),
        ("rank", "4.0", "it must be a whole number"),
        ("rank", True, "it must be a whole number"),
        ("rank", "0", "is 0; it must be at least 1"),
        ("most", 10, "is 10; it must be at most 9"),
        ("sort", "1", "it must be bool"),
        ("sort", 1, "it must be bool"),
        ("sort", "yes", "it must be bool"),
        ("kind", "firm", "knobs.kind is 'firm'; it must be soft | hard"),
        ("kind", "Soft", "it must be soft | hard"),
        ("kind", 1, "it must be soft | hard"),
        ("blocks", "0,x", "knobs.blocks is 'x'; it must be a whole number"),
        ("blocks", "0,1.5", "it must be a whole number"),
        ("blocks", 3, "knobs.blocks is 3; it must be a list of whole numbers"),
        ("blocks", "0,-1", "is -1; it must be at least 0"),
        ("clip", "maybe", "it must be a finite number | none"),
        ("clip", -1.0, "it must be at least 0"),
        ("together", "all", "it must be auto | a whole number"),
        ("together", 0, "it must be at least 1"),
        ("label", 3, "it must be str"),
    ],
)
def test_invalid_values_are_rejected(field: str, word: object, complaint: str) -> None:
    with pytest.raises(FczooError) as caught:
        make_knobs(**{field: word})
    assert complaint in str(caught.value)
    assert f".{field} is" in str(caught.value)


def test_unknown_option_suggests_nearest() -> None:
    with pytest.raises(FczooError, match="knobs has no option 'rnk'; did you mean rank"):
        make_knobs(rnk=3)
    with pytest.raises(
        FczooError,
        match=(
            "knobs has no option 'zzz'; known: blocks, clip, kind, label, most, rank, rate, "
            "sort, together"
        ),
    ):
        make_knobs(zzz=3)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["rate", "rank", "sort", "kind", "blocks", "clip", "together", "label"]),
    st.text(max_size=8),
)
def test_any_text_is_parsed_or_rejected(field: str, word: str) -> None:
    try:
        knobs = make_knobs(**{field: word})
    except FczooError:
        return
    assert build(Knobs, "knobs", {field: getattr(knobs, field)}) == knobs


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 2), st.integers(1, 10**9), st.lists(st.integers(0, 99), max_size=5))
def test_written_values_are_parsed_back(rate: float, rank: int, blocks: list[int]) -> None:
    knobs = make_knobs(rate=repr(rate), rank=str(rank), blocks=",".join(map(str, blocks)))
    assert (knobs.rate, knobs.rank, knobs.blocks) == (rate, rank, tuple(blocks))


# ---------------------------------------------------------------- values given in Python


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"rate": -1.0}, "Knobs.rate is -1.0; it must be between 0 and 2"),
        ({"rank": 0}, "Knobs.rank is 0"),
        ({"rank": 2.0}, "Knobs.rank is 2.0; it must be a whole number"),
        ({"blocks": (0, -2)}, "Knobs.blocks is -2"),
        ({"kind": "firm"}, "Knobs.kind is 'firm'"),
        ({"sort": 0}, "Knobs.sort is 0; it must be bool"),
        ({"rate": float("nan")}, "Knobs.rate is nan"),
        ({"rank": "8"}, "Knobs.rank is '8'; it must be a whole number"),
        ({"rate": "0.5"}, "Knobs.rate is '0.5'; it must be a finite number"),
        ({"blocks": [0, 1]}, r"Knobs.blocks is \[0, 1\]; it must be a list of whole numbers"),
        ({"blocks": "0,1"}, "Knobs.blocks is '0,1'; it must be a list of whole numbers"),
        ({"clip": "none"}, "Knobs.clip is 'none'; it must be a finite number | none"),
    ],
    ids=str,
)
def test_constructor_rejects_invalid_values(values: dict, complaint: str) -> None:
    """Reject text that ``build`` would parse: a field accepts only its type."""
    with pytest.raises(FczooError, match=complaint.replace("|", r"\|")):
        Knobs(**values)


def test_valid_values_are_kept() -> None:
    knobs = Knobs(rate=1, blocks=(), clip=None, together=3)
    assert (knobs.rate, knobs.blocks, knobs.clip, knobs.together) == (1, (), None, 3)


def test_describe_type_of_every_field() -> None:
    hints = Knobs.__annotations__
    read = {name: describe_type(hint) for name, hint in hints.items()}
    assert read == {
        "rate": "float",
        "rank": "int",
        "most": "int",
        "sort": "bool",
        "kind": "soft | hard",
        "blocks": "int, ...",
        "clip": "float | none",
        "together": "auto | int",
        "label": "str",
    }


def test_nearest_suggests_or_lists_names() -> None:
    assert nearest("dirchlet", ["dirichlet", "iid"]) == "did you mean dirichlet?"
    assert nearest("zzz", ["iid", "dirichlet"]) == "known: dirichlet, iid"
    assert nearest("zzz", []) == "known: none"
