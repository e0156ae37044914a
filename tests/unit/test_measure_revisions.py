"""Two git revisions side by side: in a throw-away repository that holds this package, with changes planted in it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("torch")

from attnproof.cli._app import build
from attnproof.measure import revisions
from attnproof.verify import records

pytestmark = pytest.mark.slow
PACKAGE = Path(revisions.__file__).parents[1]
PLANT = """

_planted = forward


def forward(problem, tensors):
    {}
"""
SLOWER = PLANT.format("import time\n    time.sleep(0.003)\n    return _planted(problem, tensors)")
WRONG = PLANT.format("out, lse = _planted(problem, tensors)\n    return out * 1.01, lse")


def git(*words: str) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    return subprocess.run(["git", *who, *words], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package committed as it is; tests commit what they plant."""
    monkeypatch.chdir(tmp_path)
    skipped = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(PACKAGE, tmp_path / "src" / "attnproof", ignore=skipped)
    git("init", "-q", "-b", "main")
    git("add", "-A")
    git("commit", "-q", "-m", "as it is")
    return tmp_path


def plant(text: str) -> None:
    path = Path("src/attnproof/backends/streaming.py")
    path.write_text(path.read_text() + text)
    git("commit", "-q", "-a", "-m", "planted")


def regress(*more: str) -> Result:
    command = [
        "regress",
        "main~1..main",
        "--case",
        "N32 D16",
        "-c",
        "streaming",
        "--device",
        "cpu",
        "--processes",
        "1",
    ]
    return CliRunner().invoke(build(), [*command, *more])


def clean() -> bool:
    """No work tree is left behind."""
    return 1 == len(git("worktree", "list").splitlines())


def test_a_slower_revision_is_found_and_nothing_is_left_behind(repository: Path) -> None:
    plant(SLOWER)
    result = regress("--json", "r.json")
    assert 1 == result.exit_code, result.output
    assert "REGRESSED" in result.output
    row = records.load(repository / "r.json")["results"][0]
    assert row["ratio"]["low"] > 1.5
    assert clean()


COUNTED = """

_planted = without_a_clock


def without_a_clock(name, judged, counted):
    return _planted(name, judged, {{**counted, "launches": {}}})
"""


def test_a_revision_that_takes_more_launches_regresses_whatever_the_clock_says(repository: Path) -> None:
    path = Path("src/attnproof/measure/sweep.py")
    plain = path.read_text()
    for launches in (2.0, 3.0):
        path.write_text(plain + COUNTED.format(launches))
        git("commit", "-q", "-a", "-m", f"{launches} launches")
    result = regress("--seconds", "0.5", "--json", "r.json")
    assert 1 == result.exit_code, result.output
    record = records.load(repository / "r.json")
    (found,) = [row for row in record["results"] if row.get("quantity") == "launches"]
    assert (2.0, 3.0, "REGRESSED", True) == (found["before"], found["now"], found["verdict"], found["hard"])
    assert "REGRESSED" == record["protocol"]["verdict"]
    rms = next(row for row in record["results"] if row.get("quantity") == "rms")
    assert "SAME" == rms["verdict"]
    assert clean()


def test_a_wrong_revision_gets_no_time(repository: Path) -> None:
    plant(WRONG)
    result = regress()
    assert 2 == result.exit_code
    assert "head: no green verdict for streaming" in " ".join(result.output.split())
    assert clean()


def test_a_revision_from_before_this_chain_is_named(repository: Path) -> None:
    git("rm", "-q", "src/attnproof/measure/child.py")
    git("commit", "-q", "-m", "without")
    result = regress()
    assert 2 == result.exit_code
    assert "head: cannot measure streaming: this revision cannot measure yet" in " ".join(
        result.output.split()
    )
    assert clean()


@pytest.mark.parametrize(("text", "parts"), [("a..b", ("a", "b")), ("a..", ("a", "HEAD"))])
def test_a_range_may_leave_out_its_head(text: str, parts: Any) -> None:
    assert parts == revisions.split(text)


def test_the_extension_is_shared_only_between_equal_sources(repository: Path) -> None:
    """A build of other C++ sources would be measured under a wrong name."""
    (repository / "csrc").mkdir()
    for name in ("csrc/a.cpp", "CMakeLists.txt"):
        (repository / name).write_text("1")
    git("add", "-A")
    git("commit", "-q", "-m", "sources")
    built = repository / "src/attnproof/backends/native/_kernels.test.so"
    built.write_bytes(b"built")
    with revisions.work_tree(repository, "HEAD") as tree:
        assert revisions.share_extension(repository, tree)
        assert b"built" == (tree / built.relative_to(repository)).read_bytes()
    (repository / "csrc/a.cpp").write_text("2")
    with revisions.work_tree(repository, "HEAD") as tree:
        assert not revisions.share_extension(repository, tree), "the build may be of the local change"
    git("commit", "-q", "-a", "-m", "other sources")
    with revisions.work_tree(repository, "HEAD~1") as tree:
        assert not revisions.share_extension(repository, tree)
