"""Test that invalid values end in one line that explains the fix."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.cli.tune import HELD_OUT_FRACTION
from fczoo.cli.values import Number, WholeNumber
from helpers_cli import run
from helpers_runs import write_run

SEED_LIMIT = 2**63 - 1 - 1_000_000  # the class order's seed is a million larger


def error_of(*words: str) -> str:
    """Run a command that must fail with one line; return the line."""
    outcome = CliRunner().invoke(main, list(words))
    assert outcome.exit_code in (1, 2), outcome.output
    assert outcome.stdout == ""
    assert outcome.stderr.startswith("Error: ") and outcome.stderr.count("\n") == 1
    return outcome.stderr.removeprefix("Error: ").strip()


@pytest.fixture
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder that holds the run folder ``run``."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", {"fedavg": {0: 50.0}})
    return tmp_path


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("report run --html", "--html"),
        ("report run --figures", "--figures"),
        ("plot run --kind curves --out", "--out"),
        ("partition --save", "--save"),
        ("partition --table", "--table"),
        ("bench --methods hgp --out", "--out"),
        ("bench --methods hgp --protocol", "--protocol"),
        ("bench --methods hgp --vary", "--vary"),
        ("bench --methods hgp --log", "--log"),
        ("bench --methods hgp --partition", "--partition"),
        ("bench --methods hgp --backbone", "--backbone"),
        ("bench --methods hgp --set", "--set"),
        ("tune --methods hgp --out", "--out"),
        ("show hgp --dataset", "--dataset"),
        ("doctor --data-root", "--data-root"),
        ("data fetch cifar100 --mirror", "--mirror"),
        ("predict run image.png --backbone", "--backbone"),
        ("suite run digits --rows", "--rows"),
        ("leaderboard --out", "--out"),
        ("new method mine --out", "--out"),
        ("papers", "PAPER"),
        ("papers hgp", "TABLE"),
        ("claims", "NAME"),
        ("reproduce", "CARD"),
        ("report", "FOLDERS"),
    ],
)
@pytest.mark.parametrize("empty", ["", "  "])
def test_empty_value_is_rejected(command: str, name: str, empty: str, work_folder: Path) -> None:
    files_before = sorted(work_folder.rglob("*"))
    assert error_of(*command.split(), empty).startswith(f"{name} is empty; give it a value")
    assert sorted(work_folder.rglob("*")) == files_before


def test_missing_value_reports_command() -> None:
    assert error_of("bench", "--set") == (
        "Option '--set' requires an argument; see fczoo bench --help"
    )


@pytest.mark.parametrize("word", ["nan", "NaN", "inf", "-inf", "many", ""])
def test_non_finite_numbers_are_rejected(word: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is not a (finite|valid) number\.$"):
        Number(min=0 if word != "-inf" else None).convert(word, None, None)
    with pytest.raises(click.BadParameter, match=r"is not a valid whole number\.$"):
        WholeNumber(0).convert(word, None, None)


def test_numbers_are_checked_against_limits() -> None:
    assert Number(1.5, 20).convert("3.3", None, None) == 3.3
    assert WholeNumber(1, 10_000).convert("16", None, None) == 16
    with pytest.raises(click.BadParameter, match="not in the range"):
        Number(1.5, 20).convert("21", None, None)


@pytest.mark.parametrize(
    "words",
    [
        "plot run --kind curves --out x.png --width nan",
        "tune --methods hgp --out t --held-out nan",
        "site start run --images run --patience nan",
        "site start run --images run --patience inf",
        "site start run --images run --epsilon-budget inf",
        "site job out --agreed run --patience nan",
    ],
)
def test_commands_reject_non_finite_numbers(words: str, work_folder: Path) -> None:
    assert "is not a finite number; see fczoo " in error_of(*words.split())
    assert {path.name for path in work_folder.iterdir()} == {"run"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("plot run --kind curves --method fedavg --out x.png", "leave out --method"),
        ("report run --html page.txt", "--html page.txt must end with .html or .htm"),
        ("report run --html run/bench.json", "--html run/bench.json must end with .html or .htm"),
        ("report run --archive runs.json", "--archive runs.json must end with .csv"),
        ("submit run --into runs.json", "--into runs.json must end with .csv"),
        ("report run --html page.html --format csv", "--format is for printed tables only"),
        ("report run --archive runs.csv --format text", "--format is for printed tables only"),
        ("report run/fedavg/seed0", "run/fedavg/seed0 is inside the run folder "),
        ("partition --save p --export ./p", "--save and --export both name p; give each its own"),
        ("partition --table p.csv --plot p.csv", "--table and --plot both name p.csv"),
        ("evaluate run --hf-columns image=a", "--hf-columns needs --dataset hf:PLACE; add it"),
        ("reproduce --cells x", "--cells needs PAPER/TABLE or PAPER/FIGURE; give one"),
        ("reproduce hgp/T99", "no card is called 'hgp/T99'; see fczoo reproduce hgp"),
        ("reproduce zzz", "no card is called 'zzz'; see fczoo reproduce"),
        ("data fetch cifar100 --mirror place", "--mirror 'place' is not an address"),
        ("doctor --data-root nowhere", "--data-root nowhere is not a folder"),
        ("submit run --suite ../one", "no suite at results/suites/../one.toml"),
        ("list papers", "'papers' is not a KIND; see `fczoo papers`"),
        ("list Claims", "'Claims' is not a KIND; see `fczoo claims`"),
        ("new method all", "'all' is not a valid name of a method: fczoo reserves this word"),
        ("show zzzzzz", "unknown name 'zzzzzz'; see `fczoo list` and `fczoo show settings`"),
        ("show hgp.lrr", "hgp has no option 'lrr'; did you mean lr?"),
        ("show lr --dataset digits", "--dataset is for methods, protocols and releases, not lr"),
        ("show settings --dataset digits", "protocols and releases, not settings; leave it out"),
        ("show backbone vit_nano_32 --dataset digits", "releases, not vit_nano_32; leave it out"),
        ("bench --methods fedncm --backbone vit_nano_32:none", "none must end with .safetensors"),
        ("tune --methods fedncm --out t --backbone vit_nano_32:none", "names no weight file"),
        ("tune --methods hgp --out t --held-out 0.5 --score-per-class 5", "are both given"),
        ("tune --methods hgp --out run", "--out run is a run folder of `fczoo bench`"),
        ("tune --methods hgp --out run/bench.json", "--out run/bench.json is a file"),
        (f"tune --methods hgp --out t --seed {SEED_LIMIT + 1}", f"at most {SEED_LIMIT}"),
    ],
)
def test_useless_or_harmful_options_are_rejected(words: str, says: str, work_folder: Path) -> None:
    files_before = sorted(work_folder.rglob("*"))
    assert says in error_of(*words.split())
    assert sorted(work_folder.rglob("*")) == files_before


@pytest.mark.parametrize(
    "words", [("suite", "run", "digits", "--rows"), ("bench", "--log"), ("bench", "--methods")]
)
def test_list_of_only_commas_is_rejected(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reject ``--rows ,``: without any row, all rows would look current."""
    monkeypatch.chdir(Path(__file__).parents[2])
    line = error_of(*words, ",")
    assert line == f"{words[-1]} is empty; give one or more entries, separated by commas"


def test_seed_of_non_ascii_digits_is_rejected() -> None:
    assert error_of("bench", "--methods", "hgp", "--seeds", "٣").startswith("--seeds has '٣'")


@pytest.mark.parametrize("spelling", ["hgp.lr", "HGP.LR"])
def test_show_option_prints_set_syntax(spelling: str) -> None:
    page = run("show", spelling)
    assert "hgp.lr  0.003: learning rate of prefixes and head" in page
    assert "--set hgp.lr=VALUE" in page


def test_tune_help_shows_default_of_held_out() -> None:
    assert f"[default: {HELD_OUT_FRACTION:g}]" in run("tune", "--help-all")
    assert HELD_OUT_FRACTION == 0.2


def test_archive_is_written_and_read(work_folder: Path) -> None:
    assert run("report", "run", "--archive", "runs.csv").endswith("written to runs.csv\n")
    assert run("report", "runs.csv")
