"""The record of `make gpu` says at which commit each stage passed, however many runs that took."""

from __future__ import annotations

import importlib
import json
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


def test_the_first_run_has_nothing_to_keep(gpu: Any, tmp_path: Path) -> None:
    assert [] == gpu.earlier(tmp_path, [])
