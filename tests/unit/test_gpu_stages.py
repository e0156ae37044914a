"""The record of `make gpu` says what passed at one commit, however many runs that took."""

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


def kept(gpu: Any, folder: Path, **other: Any) -> list[str]:
    """Stages of an earlier run, which differs by ``other``, that a run of "measure" keeps."""
    stages = [{"stage": stage, "passed": True} for stage in ("parity", "measure")]
    (folder / "stages.json").write_text(json.dumps({"environment": HERE | other, "results": stages}))
    return [row["stage"] for row in gpu.earlier(folder, ["measure"])]


def test_stages_of_the_same_commit_are_kept_unless_they_run_again(gpu: Any, tmp_path: Path) -> None:
    assert ["parity"] == kept(gpu, tmp_path)


@pytest.mark.parametrize(
    "other", [{"commit": "b" * 40}, {"dirty": True}, {"device": "another"}, {"versions": {}}], ids=str
)
def test_what_ran_elsewhere_or_on_other_code_is_not_kept(
    gpu: Any, tmp_path: Path, other: dict[str, Any]
) -> None:
    """A green row of other code beside new times would be a verdict that nobody gave."""
    assert [] == kept(gpu, tmp_path, **other)


def test_the_first_run_has_nothing_to_keep(gpu: Any, tmp_path: Path) -> None:
    assert [] == gpu.earlier(tmp_path, [])
