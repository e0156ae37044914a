"""The tool that runs tests that may hang: one verdict each, whatever the others do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "gpu_trial.py"
TESTS = """
import os, time, pytest

@pytest.mark.parametrize("does", ["a pass", "a failure", "a hang", "a death", "a skip", "one more pass"])
def test_it(does):
    assert "1" == os.environ["ATTNPROOF_TEST_TRIAL"]
    assert "1" == os.environ["OMP_NUM_THREADS"]
    if does == "a hang":
        time.sleep(1000)
    if does == "a death":
        os._exit(3)
    if does == "a skip":
        pytest.skip("no reason")
    assert does != "a failure"
"""
WORDS = {
    "a pass": "passed",
    "a failure": "failed",
    "a hang": "hung",
    "a death": "died",
    "a skip": "skipped",
    "one more pass": "passed",
}


@pytest.mark.slow
def test_every_test_gets_its_verdict(tmp_path: Path) -> None:
    """A hang that takes the others' verdicts with it costs a whole run on a device."""
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    run = subprocess.run(
        [sys.executable, str(TOOL), str(file), "--jobs", "1", "--limit", "8", "--minutes", "4"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 1 == run.returncode, run.stderr
    said, _, summary = run.stdout.partition("---\n")
    for does, word in WORDS.items():
        assert f"{word} test_it[{does}]" in said
    # a hang of the device and a slow host look the same until one knows where it waits
    assert f'hung test_it[a hang] 8 s, in File "{file}", line 9 in test_it' in said
    assert "2 passed" in summary
    assert all(f"1 {word}" in summary for word in ("failed", "hung", "died", "skipped"))
