"""Random calls in worker processes: each ends as something, whatever it does, and a record adds up over runs."""

from __future__ import annotations

import argparse
import importlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

WRONG, CRASHES, HANGS, REFUSED = 3, 5, 7, 9


class Some:
    """Calls that do what their seed says."""

    def kind(self, seed: int) -> str:
        return "refused" if seed == REFUSED else f"kind {seed % 2}"

    def check(self, seed: int) -> None:
        assert seed != WRONG, "off by one"
        if seed == CRASHES:
            os._exit(11)
        if seed == HANGS:
            time.sleep(1000)
        time.sleep(0.05)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    found = importlib.import_module("random_calls")
    here = found.records.environment("cpu") | {"device": "card"}
    monkeypatch.setattr(found.records, "environment", lambda device: here)
    return found


@pytest.mark.slow
def test_every_call_is_counted_and_one_that_does_not_come_back_is_a_failure(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "PATIENCE", 3.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    whole, *failed = tool.run(Some, 0.4, 0, 2, lambda seed: f"again {seed}")
    reasons = {row["seed"]: row["reason"] for row in failed}
    assert {WRONG, CRASHES, HANGS} == set(reasons)
    assert "off by one" in reasons[WRONG]
    assert "the process ended with 11" == reasons[CRASHES]
    assert "the process did not come back within 3 s" == reasons[HANGS]
    assert (3, 1, 0, "by the clock") == tuple(
        whole[name] for name in ("failed", "refused", "first_seed", "ended")
    )
    # the two that ended their process gave no kind
    assert whole["last_seed"] + 1 - 1 - 2 == whole["calls"] == sum(whole["calls_by_kind"].values())
    assert f"seed {HANGS} FAILED" in capsys.readouterr().out


def test_more_calls_join_a_record_of_the_same_code_without_a_failure(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty minutes of a lent device come in parts, and no part may count for other code or hide a failure."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "card")
    failed, code = 0, "one"

    def run(make: Any, minutes: float, seed: int, workers: int, replay: Any) -> list[dict[str, Any]]:
        return [
            {"calls": 10, "failed": failed, "minutes": minutes, "first_seed": seed, "last_seed": seed + 9}
        ]

    def seeds(*, more: bool = True) -> list[int]:
        asked = argparse.Namespace(minutes=5.0, seed=0, workers=1, into=tmp_path, more=more)
        kept = tool.Record("fuzz", "some", code, {}, tmp_path)
        assert tool.fuzz(asked, Some, lambda into: kept, str) == int(failed > 0)
        return [row["first_seed"] for row in tool.records.load(kept.path)["results"]]

    monkeypatch.setattr(tool, "run", run)
    assert [0] == seeds()
    assert [0, 10] == seeds()
    assert [0] == seeds(more=False)
    failed = 1
    assert [0, 10] == seeds()
    failed = 0
    assert [0] == seeds()
    code = "another"
    assert [0] == seeds()


def test_without_a_gpu_nothing_is_run(tool: Any, tmp_path: Path, capsys: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    asked = argparse.Namespace(minutes=0.1, seed=0, workers=1, into=tmp_path, more=False)
    assert 1 == tool.fuzz(asked, Some, lambda into: None, str)
    assert "torch sees no GPU: nothing was run\n" == capsys.readouterr().out
    assert [] == list(tmp_path.iterdir())


def test_the_calls_of_a_backend_are_judged(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With streaming in the place of a GPU backend: right ones pass, and other bits the second time do not."""
    found = importlib.import_module("gpu_fuzz")
    from tests.parity import checking

    calls = found.BackendCalls("streaming", "cpu")
    seed = next(at for at in range(100) if calls.call(at).case.differentiable)
    assert calls.kind(seed).partition(",")[0] in ("dense", "packed")
    calls.check(seed)
    right = checking.check_gradients

    def drifting(call: Any, allowed: Any) -> Any:
        result = right(call, allowed)
        result.out = result.out + torch.rand_like(result.out)
        return result

    monkeypatch.setattr(checking, "check_gradients", drifting)
    seed = next(
        at
        for at in range(100)
        if calls.call(at).case.differentiable and calls.call(at).case.option("deterministic", True)
    )
    with pytest.raises(AssertionError, match="other bits the second time"):
        calls.check(seed)
