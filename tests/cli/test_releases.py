"""Test ``--as-released``: values of released code, its pages and the list of quirks."""

import pytest
from click.testing import CliRunner

from fczoo import FczooError, Settings, create_method
from fczoo.cli.app import main
from fczoo.core.options import quirks
from fczoo.core.registry import METHODS
from fczoo.protocols.registry import RELEASES
from fczoo.reports.run_config import configure_run
from fczoo.testing.toy_benchmark import small_method, toy_bench

NAMES = [
    *("af-fcl", "coda", "fed-mammoth", "fppl", "glfc", "lander", "mfcl", "pilora", "powder", "uopp")
]


def output_of(*arguments: str, code: int = 0) -> str:
    outcome = CliRunner().invoke(main, arguments, terminal_width=400)
    assert outcome.exit_code == code, outcome.output
    return outcome.output


def row(page: str, name: str) -> list[str]:
    """Return the words of the line of a page that starts with ``name``."""
    (fields,) = [line.split() for line in page.splitlines() if line.split()[:1] == [name]]
    return fields


def test_every_release_has_repository() -> None:
    assert RELEASES.names() == NAMES
    assert [line.split()[0] for line in output_of("list", "releases").splitlines()] == NAMES
    for name in NAMES:
        assert "/" in RELEASES.get(name).repository
        assert RELEASES.get(name).repository in output_of("show", "release", name)
    assert "did you mean fed-mammoth" in output_of("show", "release", "mammoth", code=1)
    assert "no release is called 'glcf'; did you mean glfc" in output_of(
        "bench", "--as-released", "glcf", code=1
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_release_value_is_valid_and_has_source(name: str) -> None:
    """Accept every value of a release on each of its data sets, for each registered method.

    Every method that a release proposes is registered, and every setting has a source.
    """
    release = RELEASES.get(name)
    assert set(release.proposes) <= set(METHODS.names())
    assert all(s.source for s in release.settings.values())
    for dataset in release.datasets:
        settings = Settings.for_dataset(dataset, as_released=name)
        values = release.settings_on(dataset)
        assert {k: getattr(settings, k) for k in values} == {
            k: v.value_for(settings.task_count) for k, v in values.items()
        }
        for method in {*release.methods, *release.dataset_options.get(dataset, {})} & set(
            METHODS.names()
        ):
            options = settings.method_options(method)
            built = create_method(method, dataset, **options)
            assert {k: getattr(built, k) for k in options} == options


def test_fed_mammoth_release_sets_all_its_quirks() -> None:
    """Set every quirk of fed-mammoth in its release.

    Except for pip and uopp, which inherit theirs, and triple_pass, for full covariances of CCVR.
    """
    release, others = RELEASES.get("fed-mammoth"), {"pip", "uopp", "triple_pass"}
    for method in METHODS.names("fczoo.baselines"):
        for quirk in quirks(METHODS.options(method)):
            if "fed-mammoth" in quirk.place and not others & {method, quirk.field}:
                setting = release.methods.get(method, {}).get(quirk.field)
                assert setting is not None, (method, quirk.field)
                assert setting.value == quirk.value, (method, quirk.field)


@pytest.mark.parametrize(
    ("name", "dataset", "method", "options"),
    [
        (
            "fed-mammoth",
            "cifar100",
            "hgp",
            {"init": "zeros", "clip": 1.0, "keep_single": False, "lr": 3e-3},
        ),
        (
            "fed-mammoth",
            "cub200",
            "hgp",
            {"server_lr": 0.1, "server_cosine": False, "head_init": "default"},
        ),
        (
            "fed-mammoth",
            "cifar100",
            "ewc",
            {"amp_vanish": True, "skip_last_round": True, "lr": 1e-5},
        ),
        (
            "fed-mammoth",
            "cifar100",
            "l2p",
            {"pooled": "cls+prompt", "no_key_loss": True, "lr": 3e-2, "clip": None},
        ),
        (
            "fed-mammoth",
            "cifar100",
            "pilora",
            {"unheld": "server", "lr_lora": 1e-4, "means": "running", "schedule": "constant"},
        ),
        (
            "fed-mammoth",
            "cub200",
            "regmean",
            {"view": "train", "weight_decay": 0.1, "head_init": "normal"},
        ),
        (
            "fed-mammoth",
            "cub200",
            "lorm",
            {"view": "train", "weight_decay": 0.0, "optimizer": "adamw"},
        ),
        (
            "fed-mammoth",
            "cars196",
            "target",
            {"exclude_last_label": True, "tune": "full", "lr": 1e-4},
        ),
        (
            "pilora",
            "cifar100",
            "pilora",
            {"merge": "first", "local": "current", "lr_prototype": 2e-3},
        ),
        (
            "pilora",
            "tinyimagenet",
            "pilora",
            {"schedule": "cosine_late", "lr_lora": 5e-6, "sparse": 0.01},
        ),
        ("fppl", "cub200", "fppl", {"view": "train", "server_batch": 128, "lr": 1e-3}),
        ("coda", "cifar100", "codap", {"classical_gs": True, "ortho": 0.0, "lr": 1e-3}),
        (
            "glfc",
            "cifar100",
            "glfc",
            {"repeated_exemplars": True, "memory": 2000, "perturb_lr": 0.2},
        ),
        (
            "lander",
            "cifar100",
            "lander",
            {"keep": "lowest_loss", "student_lr": 0.1, "student_clip": None, "momentum": 0.9},
        ),
        (
            "uopp",
            "cub200",
            "uopp",
            {"batch_vote": True, "reset_prompt": True, "code_variance": True, "lr_few": 0.2},
        ),
        ("mfcl", "tinyimagenet", "mfcl", {"side": 64, "ratio": 4, "lr": 0.1, "tune": "full"}),
        (
            "powder",
            "imagenet_r",
            "powder",
            {"task_rows": True, "tasks_10_14": True, "blocks": (4, 5, 6), "distil": 9.0},
        ),
        (
            "af-fcl",
            "cifar100",
            "affcl",
            {"space": "mixed", "standardise": False, "theta": 0.1, "lr_flow": 5e-3},
        ),
    ],
)
def test_method_options_match_release(name: str, dataset: str, method: str, options: dict) -> None:
    release_options = Settings.for_dataset(dataset, as_released=name).method_options(method)
    assert {k: release_options.get(k) for k in options} == options


@pytest.mark.parametrize(
    ("name", "dataset", "settings"),
    [
        ("fed-mammoth", "cars196", {"norm_by_dataset": True, "client_draw": "task", "rounds": 5}),
        (
            "pilora",
            "cifar100",
            {"epochs": 10, "rounds": 30, "partition": "shards:6", "train_per_class": 400},
        ),
        ("fppl", "imagenet_r", {"rounds": 10, "batch_size": 128, "mean": (0.0, 0.0, 0.0)}),
        ("coda", "imagenet_r", {"epochs": 50, "clients": 1, "rounds": 1}),
        ("lander", "cifar100", {"rounds": 100, "epochs": 2, "batch_size": 128, "clients": 5}),
        ("uopp", "cifar100", {"clients": 20, "participation": 6.0, "partition": "overlap:0.6"}),
        ("powder", "domainnet", {"moving": 2, "rounds": 3, "epochs": 4, "batch_size": 32}),
        ("af-fcl", "cifar100", {"clients": 10, "rounds": 10, "epochs": 3, "train_per_class": 400}),
        ("mfcl", "cifar100", {"clients": 50, "participation": 5.0, "epochs": 10, "rounds": 100}),
        ("glfc", "cifar100", {"epochs": 20, "participation": 10.0, "aggregator": "uniform"}),
    ],
)
def test_settings_match_release(name: str, dataset: str, settings: dict) -> None:
    release_settings = Settings.for_dataset(dataset, as_released=name)
    assert {k: getattr(release_settings, k) for k in settings} == settings


def test_release_overrides_protocol_but_not_given_values() -> None:
    choices = {"protocol": "pilora", "as_released": "pilora"}
    assert Settings.for_dataset("cifar100", protocol="pilora").epochs == 5
    assert Settings.for_dataset("cifar100", **choices).epochs == 10
    settings = Settings.for_dataset("cifar100", **choices, epochs=3)
    assert settings.epochs == 3
    method = configure_run("pilora", settings, {"lr_prototype": 0.5}).create_method()
    assert (method.lr_prototype, method.merge) == (0.5, "first")
    assert (
        configure_run("pilora", Settings.for_dataset("cifar100", protocol="pilora"), {}).options[
            "merge"
        ]
        == "sum"
    )
    with pytest.raises(FczooError, match="no release"):
        Settings.for_dataset("cifar100", as_released="no one")


def test_dry_run_marks_values_of_release() -> None:
    words = ["--as-released", "fed-mammoth", "--dataset", "cifar100", "--backbone", "vit_nano_32"]
    page = output_of("bench", *words, "--rounds", "2", "--set", "hgp.clip=3", "--dry-run")
    assert "seed 42:" in page and "\nhgp:\n" in page
    assert row(page, "epochs")[:5] == ["epochs", "5", "as", "released:", "fed-mammoth"]
    assert row(page, "rounds")[:3] == ["rounds", "2", "given"]
    assert row(page, "clip")[:3] == ["clip", "3", "--set"]
    assert row(page, "init") == ["init", "zeros", "as", "released:", "fed-mammoth"]


def test_quirk_list_contains_all_release_changes() -> None:
    """List each value of a release that differs from fczoo's default below its release."""
    page = " ".join(output_of("list", "quirks").split())
    for name in NAMES:
        for (owner, field), values in RELEASES.get(name).all_statements().items():
            if owner not in METHODS.names():
                continue
            usual = METHODS.get(owner).__dataclass_fields__[field].default
            if any(s.value != usual for s in values):
                assert f"{field}=" in page[page.index(f"{name} ") :], (name, owner, field)
    assert "prefix_len=" not in page  # the released value is fczoo's default
    for words in ("init=zeros", "amp_vanish=true", "perturb_lr=0.2", "epochs=10"):
        assert words in page
    assert "server_batch=bench.batch_size" in page


RELEASED_METHODS = [
    (name, method)
    for name in NAMES
    for method in RELEASES.get(name).methods
    if method in METHODS.names()
]


@pytest.mark.parametrize(("name", "method"), RELEASED_METHODS)
def test_released_options_run_two_rounds_of_two_epochs(name: str, method: str) -> None:
    """Run all options of a release together, at the sizes of the toy benchmark.

    The server rejects no upload.
    """
    dataset = next(iter(RELEASES.get(name).datasets))
    options = Settings.for_dataset(dataset, as_released=name).method_options(method)
    readings = {k: v for k, v in options.items() if isinstance(v, str | bool)}
    result = toy_bench(rounds=2, epochs=2, batch_size=8).run(small_method(method, **readings))
    assert [len(row) for row in result.accuracy] == [1, 2, 3]
    assert not result.rejected
