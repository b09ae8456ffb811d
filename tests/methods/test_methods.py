"""All methods at once: every named option runs, quirks are off by default, uploads are as the papers say."""

import types
import typing
from dataclasses import fields

import pytest
import torch

from fczoo import FczooError, create_method
from fczoo.cli.listing import listing
from fczoo.core.options import quirks
from fczoo.core.registry import METHODS
from fczoo.core.tree import drop, select
from fczoo.federation.downlink import broadcast

# --- options


def named_values(cls: type) -> list[tuple[str, object]]:
    """(field, value) for each choice that the type of a field lists: literals, true and false, none."""
    found = []
    for field, hint in typing.get_type_hints(cls).items():
        if field not in {f.name for f in fields(cls)}:
            continue
        for part in (
            typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
        ):
            if typing.get_origin(part) is typing.Literal:
                found += [(field, value) for value in typing.get_args(part)]
            elif part is bool:
                found += [(field, True), (field, False)]
            elif part is types.NoneType:
                found.append((field, None))
    return found


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [(name, *pair) for name in METHODS.names() for pair in named_values(METHODS.get(name))],
)
def test_every_named_option_runs(make_bench, small_method, name, option, value):
    result = make_bench(torch.float32, rounds=1, epochs=1, batch_size=8).run(
        small_method(name, **{option: value})
    )
    assert result.options[option] == value
    assert [len(row) for row in result.accuracy] == [1, 2, 3]


def test_named_options_are_found():
    """So that the test above cannot become empty unnoticed."""
    found = named_values(METHODS.get("hgp"))
    assert {("init", "zeros"), ("clip", None), ("server_cosine", False), ("logit_norm", None)} <= set(found)
    assert not any(option in ("lr", "blocks", "name", "paper") for option, _ in found)


# --- what crosses the wire


@pytest.mark.parametrize(
    ("name", "down", "up"),
    [
        ("pilora", "past. lora. frozen. prototype", "lora. prototype class.count class.mean"),
        ("hgp", "prefix. head.", "prefix. head. gauss.label gauss.count gauss.mean gauss.var"),
        ("fcilpt", "pool. common head.", "pool. common head. usage"),
        ("fppl", "past. prompt. fusion. head. prototype.", "prompt. fusion. head. local.label local.mean"),
    ],
)
def test_the_methods_send_what_their_papers_say(record, name, down, up):
    run = record(name)
    for sent, names in (
        (broadcast(run.method, run.states[2]), down),
        (run.rounds[-1].payloads[0].tensors, up),
    ):
        assert all(select(sent, prefix) for prefix in names.split())
        assert not drop(sent, *names.split())


# --- quirks


def test_quirks_are_off_by_default():
    known = [(name, *quirk) for name in METHODS.names() for quirk in quirks(METHODS.get(name))]
    assert len(known) >= 15
    for name, option, value, place in known:
        assert getattr(create_method(name), option) != value and place
        assert f"{option}={value}" in create_method(name, **{option: value}).remark()
    listed = listing("quirks")
    for option in (
        "ewc.amp_vanish=True",
        "lwf.distill_current=True",
        "dualprompt.reshape_bug=True",
        "hgp.init=zeros",
    ):
        assert option in listed


def test_normalisation_by_data_set_is_the_released_one():
    from fczoo import Settings

    assert Settings.for_dataset("cifar100").normalisation == (None, None)
    assert Settings.for_dataset("cifar100", norm_by_dataset=True).normalisation == (
        (0.5, 0.5, 0.5),
        (0.5, 0.5, 0.5),
    )
    assert Settings.for_dataset("cars196", norm_by_dataset=True, std=(2.0, 2.0, 2.0)).normalisation == (
        (0.0, 0.0, 0.0),
        (2.0, 2.0, 2.0),
    )
    mean, std = Settings.for_dataset("cub200", norm_by_dataset=True).normalisation
    assert mean == (0.485, 0.456, 0.406) and std == (0.229, 0.224, 0.225)
    with pytest.raises(FczooError, match="knows no values for digits"):
        _ = Settings.for_dataset("digits", norm_by_dataset=True).normalisation
