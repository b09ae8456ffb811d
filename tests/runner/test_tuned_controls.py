"""A control is searched and run with the same words."""

from click.testing import CliRunner

from fczoo.cli.app import main
from fczoo.runner.tuning import TUNED

TINY = ["--train-per-class", "20", "--rounds", "1", "--epochs", "1", "--clients", "3"]


def run(*arguments: str) -> str:
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_what_was_found_stays_tuned_when_it_is_given_by_hand_too(tmp_path, caplog):
    """Controls are searched and run with the same words: ``--set fedridge.score=cosine`` for both."""
    control = ["--set", "fedridge.score=cosine", "--set", "fedridge.bias=none"]
    run("tune", "--methods", "fedridge", "--trials", "1", *control, *TINY, "--out", str(tmp_path / "search"))
    tuned = ["--tuned", str(tmp_path / "search" / TUNED), "--out", str(tmp_path / "runs")]
    text = run("bench", "--methods", "fedridge", *control, *TINY, *tuned)
    assert "scored on 24 images: fedridge\n" in text and "not tuned" not in caplog.text
