"""What released code does, all at once: ``--as-released``, its pages and its place in the list of quirks."""

import pytest
from click.testing import CliRunner

from fczoo import FczooError, Settings, create_method
from fczoo.cli.app import main
from fczoo.core.options import quirks
from fczoo.core.registry import METHODS, RELEASES
from fczoo.runner.grid import create_methods
from fczoo.testing.world import small_method, toy_bench

NAMES = ["coda", "fed-mammoth", "fppl", "glfc", "pilora"]


def printed(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(main, arguments, terminal_width=400)
    assert done.exit_code == code, done.output
    return done.output


def row(page: str, name: str) -> list[str]:
    (found,) = [line.split() for line in page.splitlines() if line.split()[:1] == [name]]
    return found


def test_five_releases_each_with_a_repository() -> None:
    assert RELEASES.names() == NAMES
    assert [line.split()[0] for line in printed("list", "releases").splitlines()] == NAMES
    for name in NAMES:
        assert "/" in RELEASES.get(name).repository and RELEASES.get(name).repository in printed(
            "show", "release", name
        )
    assert "did you mean fed-mammoth" in printed("show", "release", "mammoth", code=1)
    assert "no release is called 'glcf'; did you mean glfc" in printed(
        "bench", "--as-released", "glcf", code=1
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_value_fits_and_has_a_source(name: str) -> None:
    """On each of its data sets, for each method that is there; what it proposes is there."""
    release = RELEASES.get(name)
    assert set(release.proposes) <= set(METHODS.names()) and all(s.source for s in release.settings.values())
    for dataset in release.datasets:
        settings = Settings.for_dataset(dataset, as_released=name)
        stated = release.stated(dataset)
        assert {k: getattr(settings, k) for k in stated} == {
            k: v.given(settings.task_count) for k, v in stated.items()
        }
        for method in {*release.methods, *release.tuned.get(dataset, {})} & set(METHODS.names()):
            options = settings.method_options(method)
            built = create_method(method, dataset, **options)
            assert {k: getattr(built, k) for k in options} == options


def test_fed_mammoth_has_every_quirk_that_is_seen_in_it() -> None:
    """Of its own methods; pip only inherits another's, and one of CCVR's is of full covariances."""
    release, others = RELEASES.get("fed-mammoth"), {"pip", "triple_pass"}
    for method in METHODS.names("fczoo.baselines"):
        for quirk in quirks(METHODS.options(method)):
            if "fed-mammoth" in quirk.place and not others & {method, quirk.field}:
                stated = release.methods.get(method, {}).get(quirk.field)
                assert stated is not None and stated.value == quirk.value, (method, quirk.field)


@pytest.mark.parametrize(
    ("name", "dataset", "method", "options"),
    [
        ("fed-mammoth", "cifar100", "hgp", {"init": "zeros", "clip": 1.0, "keep_single": False, "lr": 3e-3}),
        ("fed-mammoth", "cub200", "hgp", {"server_lr": 0.1, "server_cosine": False, "head_init": "default"}),
        ("fed-mammoth", "cifar100", "ewc", {"amp_vanish": True, "skip_last_round": True, "lr": 1e-5}),
        ("fed-mammoth", "cifar100", "l2p", {"pooled": "cls+prompt", "no_key_loss": True, "lr": 3e-2}),
        ("fed-mammoth", "cifar100", "pilora", {"unheld": "server", "lr_lora": 1e-4, "means": "running"}),
        ("fed-mammoth", "cub200", "regmean", {"view": "train", "weight_decay": 0.1, "head_init": "default"}),
        ("fed-mammoth", "cub200", "lorm", {"view": "train", "weight_decay": 0.0, "optimizer": "adamw"}),
        ("fed-mammoth", "cars196", "target", {"exclude_last_label": True, "tune": "full", "lr": 1e-4}),
        ("pilora", "cifar100", "pilora", {"merge": "first", "local": "current", "lr_prototype": 2e-3}),
        ("pilora", "tinyimagenet", "pilora", {"schedule": "cosine_late", "lr_lora": 5e-6, "sparse": 0.01}),
        ("fppl", "cub200", "fppl", {"view": "train", "server_batch": 128, "lr": 1e-3}),
        ("coda", "cifar100", "codap", {"classical_gs": True, "ortho": 0.0, "lr": 1e-3}),
        ("glfc", "cifar100", "glfc", {"repeated_exemplars": True, "memory": 2000, "perturb_lr": 0.2}),
    ],
)
def test_options_are_the_released_ones(name: str, dataset: str, method: str, options: dict) -> None:
    found = Settings.for_dataset(dataset, as_released=name).method_options(method)
    assert {k: found.get(k) for k in options} == options


@pytest.mark.parametrize(
    ("name", "dataset", "settings"),
    [
        ("fed-mammoth", "cars196", {"norm_by_dataset": True, "client_draw": "task", "rounds": 5}),
        ("pilora", "cifar100", {"epochs": 10, "rounds": 30, "partition": "shards:6", "train_per_class": 400}),
        ("fppl", "imagenet_r", {"rounds": 10, "batch_size": 128, "mean": (0.0, 0.0, 0.0)}),
        ("coda", "imagenet_r", {"epochs": 50, "clients": 1, "rounds": 1}),
        ("glfc", "cifar100", {"epochs": 20, "participation": 10.0, "aggregator": "uniform"}),
    ],
)
def test_schedules_are_the_released_ones(name: str, dataset: str, settings: dict) -> None:
    found = Settings.for_dataset(dataset, as_released=name)
    assert {k: getattr(found, k) for k in settings} == settings


def test_a_release_beats_the_protocol_and_gives_way_to_what_is_given() -> None:
    both = {"protocol": "pilora", "as_released": "pilora"}
    assert Settings.for_dataset("cifar100", protocol="pilora").epochs == 5
    assert Settings.for_dataset("cifar100", **both).epochs == 10
    settings = Settings.for_dataset("cifar100", **both, epochs=3)
    assert settings.epochs == 3
    (made,) = create_methods(["pilora"], settings, {"pilora": {"lr_prototype": 0.5}})
    assert (made.lr_prototype, made.merge) == (0.5, "first")
    assert (
        create_methods(["pilora"], Settings.for_dataset("cifar100", protocol="pilora"), {})[0].merge == "sum"
    )
    with pytest.raises(FczooError, match="no release"):
        Settings.for_dataset("cifar100", as_released="nobody")


def test_a_dry_run_says_what_came_from_the_release() -> None:
    words = ["--as-released", "fed-mammoth", "--dataset", "cifar100", "--backbone", "vit_nano_32"]
    page = printed("bench", *words, "--rounds", "2", "--set", "hgp.clip=3", "--dry-run")
    assert "seed 42:" in page and "\nhgp:\n" in page
    assert row(page, "epochs")[:5] == ["epochs", "5", "as", "released:", "fed-mammoth"]
    assert row(page, "rounds")[:3] == ["rounds", "2", "given"] and row(page, "clip")[:3] == [
        "clip",
        "3",
        "--set",
    ]
    assert row(page, "init") == ["init", "zeros", "as", "released:", "fed-mammoth"]


def test_the_list_of_quirks_has_all_that_releases_change() -> None:
    """Each value of a release that is not fczoo's own default stands beside its name."""
    page = " ".join(printed("list", "quirks").split())
    for name in NAMES:
        for (owner, field), stated in RELEASES.get(name).everything().items():
            if owner not in METHODS.names():
                continue
            usual = METHODS.get(owner).__dataclass_fields__[field].default
            if any(s.value != usual for s in stated):
                assert f"{field}=" in page[page.index(f"{name} ") :], (name, owner, field)
    assert "prefix_len=" not in page  # the released value is fczoo's own
    for words in ("init=zeros", "amp_vanish=true", "perturb_lr=0.2", "epochs=10"):
        assert words in page


READINGS = [
    (name, method) for name in NAMES for method in RELEASES.get(name).methods if method in METHODS.names()
]


@pytest.mark.parametrize(("name", "method"), READINGS)
def test_what_a_release_does_runs_for_two_rounds_of_two_epochs(name: str, method: str) -> None:
    """All its readings together, at the toy world's sizes; nothing that clients send is turned away."""
    dataset = next(iter(RELEASES.get(name).datasets))
    options = Settings.for_dataset(dataset, as_released=name).method_options(method)
    readings = {k: v for k, v in options.items() if isinstance(v, str | bool)}
    result = toy_bench(rounds=2, epochs=2, batch_size=8).run(small_method(method, **readings))
    assert [len(row) for row in result.accuracy] == [1, 2, 3] and not result.rejected
