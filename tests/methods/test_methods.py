"""All methods at once: quirks are off by default, and uploads agree with the papers."""

import pytest

from fczoo import FczooError, create_method
from fczoo.cli.listing import listing
from fczoo.core.method import table_note
from fczoo.core.options import dataclass_options, quirks
from fczoo.core.registry import METHODS
from fczoo.core.tree import drop, select
from fczoo.federation.server import broadcast
from fczoo.federation.settings_checks import normalisation_of

# --- messages


@pytest.mark.parametrize(
    ("name", "down", "up"),
    [
        ("pilora", "past. lora. frozen. prototype", "lora. prototype class.count class.mean"),
        ("hgp", "prefix. head.", "prefix. head. gauss.label gauss.count gauss.mean gauss.var"),
        ("fcilpt", "pool. common head.", "pool. common head. usage"),
        (
            "fppl",
            "past. prompt. fusion. head. prototype.",
            "prompt. fusion. head. local.label local.mean",
        ),
    ],
)
def test_messages_match_papers(record, name, down, up):
    run = record(name)
    for message, names in (
        (broadcast(run.method, run.states[2]), down),
        (run.rounds[-1].payloads[0].tensors, up),
    ):
        assert all(select(message, prefix) for prefix in names.split())
        assert not drop(message, *names.split())


# --- quirks


@pytest.mark.parametrize("name", METHODS.names())
def test_options_from_source_match_class(name):
    options = METHODS.options(name)
    assert options == dataclass_options(METHODS.get(name))
    assert list(options) == list(dataclass_options(METHODS.get(name)))


def test_quirks_are_off_by_default():
    all_quirks = [
        (name, *quirk) for name in METHODS.names() for quirk in quirks(METHODS.options(name))
    ]
    assert len(all_quirks) >= 15
    for name, option, value, source, _ in all_quirks:
        assert getattr(create_method(name), option) != value and source
        assert f"{option}={value}" in table_note(create_method(name, **{option: value}))
    page = listing("quirks")
    for option in (
        "ewc.amp_vanish=True",
        "lwf.distill_current=True",
        "dualprompt.reshape_bug=True",
        "hgp.init=zeros",
    ):
        assert option in page


def test_normalisation_by_dataset_matches_released_code():
    from fczoo import Settings

    assert normalisation_of(Settings.for_dataset("cifar100")) == (None, None)
    assert normalisation_of(Settings.for_dataset("cifar100", norm_by_dataset=True)) == (
        (0.5, 0.5, 0.5),
        (0.5, 0.5, 0.5),
    )
    settings = Settings.for_dataset("cars196", norm_by_dataset=True, std=(2.0, 2.0, 2.0))
    assert normalisation_of(settings) == ((0.0, 0.0, 0.0), (2.0, 2.0, 2.0))
    mean, std = normalisation_of(Settings.for_dataset("cub200", norm_by_dataset=True))
    assert mean == (0.485, 0.456, 0.406) and std == (0.229, 0.224, 0.225)
    with pytest.raises(FczooError, match="has no values for digits"):
        _ = normalisation_of(Settings.for_dataset("digits", norm_by_dataset=True))
