"""`make gpu`: the record says at which commit each stage passed; parts of the bars run alone and within a budget."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

HERE = {"commit": "a" * 40, "dirty": False, "device": "card", "versions": {"torch": "2.11.0"}}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    found = importlib.import_module("gpu")
    monkeypatch.setattr(found.records, "environment", lambda device: HERE)
    return found


def kept(gpu: Any, folder: Path, *, dirty: bool = False, **other: Any) -> list[tuple[str, str]]:
    """Stages of an earlier run, which differs by ``other``, that a run of "measure" keeps, and their commits."""
    code = {"commit": other.get("commit", HERE["commit"]), "dirty": dirty}
    stages = [{"stage": stage, "passed": True, **code} for stage in ("parity", "measure")]
    (folder / "stages.json").write_text(json.dumps({"environment": HERE | other, "results": stages}))
    return [(row["stage"], row["commit"]) for row in gpu.earlier(folder, ["measure"])]


def test_stages_are_kept_with_their_commit_unless_they_run_again(gpu: Any, tmp_path: Path) -> None:
    """A green row of other code beside new times would be a verdict that nobody gave: so it says whose it is."""
    assert [("parity", "a" * 40)] == kept(gpu, tmp_path)
    assert [("parity", "b" * 40)] == kept(gpu, tmp_path, commit="b" * 40)


@pytest.mark.parametrize("other", [{"device": "another"}, {"versions": {}}, {"dirty": True}], ids=str)
def test_what_ran_elsewhere_or_on_code_that_no_commit_has_is_not_kept(
    gpu: Any, tmp_path: Path, other: dict[str, Any]
) -> None:
    assert [] == kept(gpu, tmp_path, **other)


def test_a_run_of_uncommitted_code_keeps_nothing(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record is not to be committed, and none of its rows may look as if it were."""
    monkeypatch.setitem(HERE, "dirty", True)
    assert [] == kept(gpu, tmp_path)


def test_processes_of_tests_do_not_fight_for_the_cores(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve of them with a thread per core each took several times as long, and looked like calls that hang."""
    given: list[dict[str, str]] = []
    monkeypatch.setattr(gpu, "run", lambda *command, **environment: given.append(environment) or 0)
    gpu.pytest("tests/gpu")
    gpu.pytest("tests/gpu", OMP_NUM_THREADS="2", KEPT="yes")
    assert [{"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2", "KEPT": "yes"}] == given


def test_the_first_run_has_nothing_to_keep(gpu: Any, tmp_path: Path) -> None:
    assert [] == gpu.earlier(tmp_path, [])


def test_every_part_of_the_bars_is_a_command_that_attnproof_has_within_a_budget(gpu: Any) -> None:
    """A part must fit into a short loan of a machine; a mistyped option would be found there only."""
    from attnproof.cli._app import build

    typer = pytest.importorskip("typer")
    known = typer.main.get_command(build()).commands
    for one in gpu.BARS.values():
        name, *options = one.command
        known[name].make_context(name, [*options, "--device", "cuda", "--json", "r.json"])
    assert all(one.minutes <= 9 for one in gpu.BARS.values())
    assert sum(one.minutes for one in gpu.BARS.values()) <= 45


def test_parts_are_asked_for_by_name_with_a_folder_and_a_budget(gpu: Any) -> None:
    asked = gpu.arguments(["bars:figure", "bars:lra", "--into", "out", "--minutes", "2.5"])
    assert (["bars:figure", "bars:lra"], Path("out"), 2.5) == (asked.stages, asked.into, asked.minutes)
    assert [] == gpu.arguments([]).stages


@pytest.mark.parametrize("word", ["bars:figures", "bar", "bars:"])
def test_a_part_that_does_not_exist_is_refused_with_those_that_do(
    gpu: Any, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu.arguments(["bars:decode", word])
    said = capsys.readouterr().err
    assert f"got {word}" in " ".join(said.split()) and "bars:decode" in said


def test_a_part_is_one_command_of_attnproof_with_its_record(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, tuple[str, ...]]] = []
    monkeypatch.setattr(gpu, "within", lambda seconds, *command: seen.append((seconds, command)) or 0)
    into = tmp_path / "new"
    assert 0 == gpu.bar("decode", into) == gpu.bar("decode", into, 0.5)
    assert [180, 30] == [seconds for seconds, _ in seen]
    command = seen[0][1]
    assert ("-m", "attnproof.cli", "measure", "--preset", "decode", "--device", "cuda") == command[1:8]
    assert ("--json", str(into / "measure-decode.json")) == command[8:]
    assert into.is_dir()


def test_parts_alone_write_no_record_of_stages_and_one_that_fails_stops_no_other(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = {"decode": 1, "memory": 130, "drift": 0}
    monkeypatch.setattr(gpu, "bar", lambda name, into, minutes: codes[name])
    monkeypatch.setattr(sys, "argv", ["gpu.py", "bars:decode", "bars:memory", "bars:drift"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    said = capsys.readouterr().out.splitlines()
    assert 1 == ended.value.code
    assert ["bars:decode: FAILED with 1", "bars:drift: passed"] == [said[0], said[2]]
    assert "the same command goes on" in said[1]


CHILD = """
import pathlib, signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(str(worker.pid))
try:
    time.sleep(60)
except KeyboardInterrupt:
    worker.wait()
    sys.exit(130)
"""


def test_a_command_past_its_budget_is_interrupted_with_all_that_it_started(gpu: Any, tmp_path: Path) -> None:
    """A process that compiles for it would hold the machine and the pipe on."""
    began = time.monotonic()
    assert 130 == gpu.within(2.0, sys.executable, "-c", CHILD, str(tmp_path / "worker"))
    assert time.monotonic() - began < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "worker").read_text()), 0)


def test_a_command_that_does_not_hear_is_ended(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    assert -9 == gpu.within(1.5, sys.executable, "-c", deaf)


def test_a_command_within_its_budget_keeps_its_code(gpu: Any) -> None:
    assert 7 == gpu.within(60, sys.executable, "-c", "raise SystemExit(7)")
