"""A control is searched and run with the same words."""

from fczoo.runner.tuned_file import TUNED_FILE
from helpers_cli import TINY, run


def test_what_was_found_stays_tuned_when_it_is_given_by_hand_too(tmp_path, caplog):
    """Tuned options stay tuned when given by hand, too.

    Controls are searched and run with the same words: ``--set fedridge.score=cosine`` for both.
    """
    control = ["--set", "fedridge.score=cosine", "--set", "fedridge.bias=none"]
    run(
        "tune",
        "--methods",
        "fedridge",
        "--trials",
        "1",
        *control,
        *TINY,
        "--out",
        str(tmp_path / "search"),
    )
    folders = ["--tuned", str(tmp_path / "search" / TUNED_FILE), "--out", str(tmp_path / "runs")]
    text = run("bench", "--methods", "fedridge", *control, *TINY, *folders)
    assert "images: fedridge\n" in text and "not tuned" not in caplog.text
