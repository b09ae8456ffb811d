"""Differences of runs from a paper's print and from its released code, and open settings."""

import pytest

from fczoo.core.files import through_json
from fczoo.papers.compare import comparisons, describe_deviations
from fczoo.papers.printed_numbers import get_paper
from fczoo.papers.reproduce import cards, get_card
from fczoo.papers.variants import differences, open_differences
from fczoo.reports.runs import read_experiments
from helpers_papers import B16, CARD, output_of, paper_options, paper_settings

ONES, HALVES = "1,1,1", "0.5,0.5,0.5"


@pytest.fixture
def run(make_run, tmp_path):
    """Return a function that writes a run of a card's reading with changes and reads it."""

    def make_experiment(card, which=0, seeds=0, backbone="", options=None, **changes):
        card = get_card(card) if isinstance(card, str) else card
        chosen = card.readings[which]
        settings = {**through_json(chosen.config.settings.portable()), **changes}
        default_backbone = settings.pop("backbone")
        count = seeds or len(card.paper.protocol.seeds.value)
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        runs = {chosen.config.method: dict.fromkeys(range(count), 90.0)}
        make_run(
            folder,
            runs,
            {**chosen.options, **(options or {})},
            backbone or default_backbone,
            **settings,
        )
        (experiment,) = read_experiments([folder])
        return experiment

    return make_experiment


def find_differences(experiment, card, which=0):
    chosen = get_card(card) if isinstance(card, str) else card
    seeds = len(chosen.paper.protocol.seeds.value)
    return differences(experiment, experiment.lines[0], chosen.readings[which], seeds)


def test_run_as_printed_equals_print_and_differs_from_code(run):
    experiment = run(CARD)
    assert find_differences(experiment, CARD) == []
    code = find_differences(experiment, CARD, 1)
    assert "client_draw round (code: task)" in code
    assert "hgp.clip none (code: 1)" in code
    assert f"normalisation 0,0,0 and {ONES} (code: {HALVES} and {HALVES})" in code


def test_protocol_defaults_differ_from_print(run):
    """Name each difference between released code and print.

    These are views of the images, the loss's classes, normalised logits, clipping and 100 rows.
    """
    card = get_card(CARD)
    settings = card.paper.settings(card.numbers[0])
    options = through_json(settings.method_options("hgp"))
    differences = find_differences(
        run(CARD, options=options, mean=None, std=None, augment="hgp", test_crop=0.875), CARD
    )
    assert set(differences) == {
        f"normalisation {HALVES} and {HALVES} (paper: 0,0,0 and {ONES})",
        "augment hgp (paper: randomcrop)",
        "test_crop 0.875 (paper: 1)",
        "hgp.support task (paper: all)",
        "hgp.prefix_len 100 (paper: 200)",
        "hgp.clip 1 (paper: none)",
        "hgp.logit_norm 0.1 (paper: none)",
        "hgp.class_weights uniform (paper: counts)",
        "hgp.draw epoch (paper: round)",
    }


def test_pilora_merge_and_distance_differ_from_print(run):
    card = "pilora/cifar100/quantity:6"
    differences = find_differences(
        run(card, options={"merge": "sum", "distance": "rms", "sparse": 0.01}), card
    )
    assert differences == [
        "pilora.distance rms (paper: squared)",
        "pilora.sparse 0.01 (paper: 0)",
        "pilora.merge sum (paper: factor_sum)",
    ]


@pytest.mark.parametrize("card", ["imagenet_a", "cub200", "eurosat", "cars196"])
def test_dataset_normalisation_differs_from_print(run, card):
    beta = "dirichlet:1"
    experiment = run(f"hgp/{card}/{beta}", mean=None, std=None)
    (difference,) = find_differences(experiment, f"hgp/{card}/{beta}")
    assert difference.startswith("normalisation ")
    code = run(f"hgp/{card}/{beta}", which=1)
    assert find_differences(code, f"hgp/{card}/{beta}", 1) == []
    assert any(
        d.startswith("normalisation ") for d in find_differences(code, f"hgp/{card}/{beta}")
    ) is (card != "cars196")


def test_every_single_change_is_reported(run):
    """Find and name each single change of a run as printed."""
    assert (
        find_differences(run(CARD, partition="dirichlet:beta=0.050,max_tries=9,draw=split"), CARD)
        == []
    )
    changes = {
        "rounds": 4,
        "epochs": 1,
        "batch_size": 8,
        "augment": "none",
        "clients": 5,
        "participation": 0.5,
        "tasks": 5,
        "train_per_class": 9,
        "test_per_class": 9,
        "partition": "dirichlet:0.1",
        "aggregator": "uniform",
        "test_crop": 0.875,
        "joining": 1,
        "attack": "sign-flip",
    }
    for name, value in changes.items():
        (only,) = find_differences(run(CARD, **{name: value}), CARD)
        assert only.startswith(f"{name} ") and "(paper: " in only
    assert find_differences(run(CARD, backbone="vit_tiny_patch16_224"), CARD)[0] == (
        f"backbone vit_tiny_patch16_224 (paper: {B16})"
    )
    assert find_differences(run(CARD, seeds=1), CARD) == ["seeds 1 (paper: 3)"]
    assert find_differences(run(CARD, options={"spread": 1.0}), CARD) == ["hgp.spread 1 (paper: 3)"]


def test_unspecified_settings_are_reported_as_open(run):
    card = "fcilpt/cifar100/overlap:0.6"
    changes = {
        "backbone": "vit_base_patch16_224.dino",
        "options": {"strength": 3.0, "head_init": "zeros"},
    }
    experiment = run(card, precision="bf16", **changes)
    assert find_differences(experiment, card) == []
    open_settings = open_differences(experiment, experiment.lines[0], get_card(card).readings[0])
    assert set(open_settings) == {
        "backbone vit_base_patch16_224.dino",
        "precision bf16",
        "fcilpt.strength 3",
        "fcilpt.head_init zeros",
    }
    assert find_differences(run(card, backbone="vit_tiny_patch16_224.dino"), card)[0].startswith(
        "backbone vit_tiny"
    )


def test_fewer_training_images_are_reported(
    run,
):
    card = "pilora/cifar100/quantity:6"
    assert [find_differences(run(card, train_per_class=n), card) for n in (None, 400)] == [[], []]
    assert find_differences(run(card, train_per_class=10), card) == [
        "train_per_class 10 (paper: 400)"
    ]


def test_baseline_may_differ_only_in_unspecified_options(run):
    card = "hgp/cifar100/dirichlet:0.05/ewc"
    assert (
        find_differences(run(card, options={"strength": 100.0, "head_init": "zeros"}), card) == []
    )
    assert find_differences(run(card, options={"lr": 1e-3}), card) == [
        "ewc.lr 0.001 (paper: 1e-05)"
    ]
    assert find_differences(run(card, options={"amp_vanish": True}), card) == [
        "ewc.amp_vanish true (paper: false)"
    ]


@pytest.mark.parametrize("paper", ["pilora", "hgp", "fcilpt", "fppl"])
def test_run_of_each_card_reading_has_no_differences(run, paper):
    """Check one card per row, in each of its readings."""
    rows = {(c.row.method, c.row.card): c for c in cards().values() if c.paper.key == paper}
    for card in rows.values():
        for which in range(len(card.readings)):
            assert find_differences(run(card, which), card, which) == [], card.name


def test_spread_note_explains_standard_deviation(run):
    fppl = "fppl/cub200/dirichlet:0.5"
    note = describe_deviations(run(fppl), get_paper("fppl"))
    assert "population standard deviation (squares divided by 3)" in note
    assert (
        "Ours: ± is the sample standard deviation over seeds, which vary training and partition and "
        "class order" in note
    )
    assert find_differences(run(fppl, vary=["training"]), fppl) == [
        "vary training (paper: training,partition,class-order)"
    ]
    (number,) = [n for n in get_card(fppl).numbers if n.std is not None][:1]
    assert get_paper("fppl").sample_std(number) == pytest.approx(number.std * (3 / 2) ** 0.5)
    hgp = get_card(CARD).numbers[0]
    assert get_paper("hgp").sample_std(hgp) == hgp.std == 0.24


def test_compare_names_reading_and_differences(make_run, tmp_path):
    runs = {"hgp": dict.fromkeys(range(3), 90.0)}
    make_run(tmp_path / "print", runs, paper_options(), B16, **paper_settings())
    make_run(tmp_path / "code", runs, paper_options(1), B16, **paper_settings(1))
    page = output_of("compare", str(tmp_path / "print"), "--paper", "hgp")
    assert "yes, with the paper's settings" in page
    assert "No row differs from" not in page
    (experiment,) = read_experiments([tmp_path / "print"])
    (comparison,) = [
        c
        for c in comparisons(experiment, experiment.lines[0], get_paper("hgp"))
        if c.number.table == "T1"
    ]
    assert (
        comparison.matching_reading == "the paper's settings" and comparison.print_differences == ()
    )
    page = output_of("compare", str(tmp_path / "code"), "--paper", "hgp")
    assert "yes, with the released code (fed-mammoth)" in page
    assert "hgp.prefix_len 100 (paper: 200)" in page
    assert "does not state what a seed changes" in page
