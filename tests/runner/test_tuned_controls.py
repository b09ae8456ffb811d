"""Test tuned options that ``--set`` fixes in the search and in the run."""

from fczoo.runner.tuned_file import TUNED_FILE
from helpers_cli import TINY, run


def test_tuned_options_stay_tuned_if_set_explicitly(tmp_path, caplog):
    """Count options as tuned if ``--set`` has the same values in the search and in the run."""
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
