"""Runs spread over processes: the same verdicts, and a kernel that takes its process with it loses one case only."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnproof.cases import find
from attnproof.verify import calibration, findings, findings_gpu, records, session, workers

# `{fault}` runs where M is 1
KERNEL = """
import os, threading
from pathlib import Path
from attnproof.api import attention_with_lse

lost = False

def attention(q, k, v, *, causal, scale, mask=None):
    global lost
    if lost or q.shape[2] == 1:
        {fault}
    return attention_with_lse(q, k, v, causal=causal, scale=scale, mask=mask, backend="streaming")

attention.attnproof = {{"arrays": "numpy", "numerics": "precise"}}
"""
FAULTS = {
    "none": "pass",
    "scaled": "v = v * v.dtype.type(1.5)",
    "aborts": "os.abort()",
    "poisons": "lost = True; raise RuntimeError('CUDA error: an illegal memory access was encountered')",
    "once": "if not Path('seen').exists(): Path('seen').touch(); os.abort()",
    "silent": "threading.Event().wait()",
}
CASES = ("normal-128/float32", "edge-1x300/float32", "normal-128-causal/float16", "mask-dead-rows/float32")
Judge = Callable[..., dict[str, Any]]


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """A run over kernels with the named faults."""
    monkeypatch.chdir(tmp_path)

    def run(*faults: str, names: tuple[str, ...] = CASES, peer: bool = False, **plan: Any) -> dict[str, Any]:
        words: list[str] = []
        for fault in faults:
            Path(f"{fault}.py").write_text(KERNEL.format(fault=FAULTS[fault]))
            words.append(f"{fault}.py:attention")
        chosen = session.choose(words, [], None)
        for candidate in chosen.candidates:
            candidate.peer = peer
        cases = tuple(find(name) for name in names)
        asked = session.Plan(tier="test", cases=cases, sharpness="")
        return session.run(chosen, replace(asked, **plan))

    return run


def statuses(document: dict[str, Any]) -> dict[str, str]:
    return {one["case"]: one["status"] for one in document["results"]}


def without_times(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Results with what differs from run to run left out."""
    results = json.loads(json.dumps(document["results"]))
    for one in results:
        del one["seconds"]
        one["guards"].pop("G9 possible speed", None)
    return results


def test_workers_give_the_results_of_one_process_in_the_same_order(judge: Judge) -> None:
    """The number of processes must not decide a verdict; two kernels, one of them wrong on one case."""
    alone, spread = judge("none", "scaled"), judge("none", "scaled", jobs=2)
    assert without_times(alone) == without_times(spread)
    assert "FAIL" in statuses(alone).values()
    assert (2, 0) == (spread["protocol"]["jobs"], spread["protocol"]["processes_lost"])
    assert alone["protocol"]["candidates"] == spread["protocol"]["candidates"]


@pytest.mark.parametrize(
    ("fault", "sentence"), [("aborts", "the process died (signal 6)"), ("poisons", "illegal memory access")]
)
def test_a_kernel_that_takes_its_process_loses_that_case_and_no_other(
    judge: Judge, fault: str, sentence: str
) -> None:
    """After an illegal access every later call of a process fails: without a fresh one the run would be lost."""
    document = judge(fault, jobs=1)
    found = statuses(document)
    assert "FAIL" == found.pop("edge-1x300/float32")
    assert {"PASS"} == set(found.values())
    assert {*CASES, "guards"} - {"edge-1x300/float32"} == set(found)
    (bad,) = [one for one in document["results"] if one["status"] == "FAIL"]
    first, _, second = bad["reason"].partition("; alone in a fresh one: ")
    assert sentence in first and sentence in second
    assert 2 == document["protocol"]["processes_lost"]


def test_one_crash_is_remembered_even_when_the_second_try_is_right(judge: Judge) -> None:
    """Otherwise a kernel that crashes now and then would pass."""
    document = judge("once", jobs=1)
    assert "FAIL" == statuses(document)["edge-1x300/float32"]
    (bad,) = [one for one in document["results"] if one["status"] == "FAIL"]
    assert bad["reason"].endswith("alone in a fresh one: PASS")
    assert bad["tensors"]


def test_a_crash_of_a_kernel_that_we_only_look_at_is_a_finding(judge: Judge) -> None:
    document = judge("aborts", "none", jobs=2, peer=True)
    found = [(one["candidate"], one["status"]) for one in document["results"] if one["status"] != "PASS"]
    assert [("aborts.py:attention", "FINDING")] == found


def test_a_kernel_that_never_returns_is_stopped(judge: Judge) -> None:
    document = judge("silent", names=("edge-1x300/float32",), jobs=1, patience=0.0)
    found = {one["case"]: one for one in document["results"]}
    assert "FAIL" == found["edge-1x300/float32"]["status"]
    assert "no answer in 0 s" == found["edge-1x300/float32"]["reason"]


def test_what_the_budget_did_not_reach_is_skipped_and_says_so(judge: Judge) -> None:
    """A pass that was never run is the worst thing that a verifier can print."""
    document = judge("none", jobs=1, budget=-1.0)
    assert {"SKIP"} == set(statuses(document).values())
    assert {"not begun within -1 s"} == {one["reason"] for one in document["results"]}


def test_a_case_without_power_and_the_self_test_are_found_by_workers_too(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = judge("none", names=CASES[:1], jobs=1, sharpness="classics")
    assert (5, []) == (document["protocol"]["mutants_found"], document["protocol"]["mutants_missed"])
    blunt = replace(find("edge-1x1/float16"), diagnostic=False)
    monkeypatch.setattr(sys.modules[__name__], "find", lambda name: blunt)
    assert "POWERLESS" in [one["status"] for one in judge("none", names=("blunt",), jobs=1)["results"]]


def test_a_worker_that_cannot_load_its_kernel_ends_the_run_with_the_reason(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = session.choose

    def renamed(*words: Any) -> session.Chosen:
        chosen = choose(*words)
        chosen.candidates[0].word = "gone.py:attention"
        return chosen

    monkeypatch.setattr(session, "choose", renamed)
    with pytest.raises(RuntimeError, match=r"cannot load its kernels: ValueError: .*gone.py does not exist"):
        judge("none", jobs=1)


def test_workers_and_an_adversarial_run_exclude_each_other(judge: Judge) -> None:
    with pytest.raises(ValueError, match="jobs: expected 0 in an adversarial run, got 2"):
        judge("none", jobs=2, adversarial=True)


def test_a_gpu_gets_workers_by_default_and_a_cpu_none(judge: Judge) -> None:
    """On a GPU the first illegal access would otherwise end the run."""
    Path("none.py").write_text(KERNEL.format(fault="pass"))
    chosen = session.choose(["none.py:attention"], [], None)
    assert 0 == session.default_jobs(chosen, adversarial=False)
    chosen.candidates[0].device = "cuda"
    assert 1 <= session.default_jobs(chosen, adversarial=False) <= 4
    assert 0 == session.default_jobs(chosen, adversarial=True)


def test_the_cores_are_shared_out_where_nobody_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.delenv("ATTNPROOF_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = workers.variables(4)
    assert "4" == found["ATTNPROOF_NUM_THREADS"]
    assert "OMP_NUM_THREADS" not in found


def test_the_calibration_says_how_close_each_tensor_came(judge: Judge) -> None:
    document = judge("scaled", names=("normal-128-causal/float16", "edge-1x300/float16"))
    rows = {(row["dtype"], row["tensor"]): row for row in calibration.calibration(document["results"])}
    out = rows["float16", "out"]
    assert (2, 1) == (out["results"], out["bad"])
    assert out["closest"] > 1 and out["check"].endswith("of edge-1x300/float16")
    (kind,) = [row for row in calibration.kinds(document["results"]) if row["tensor"] == "out"]
    assert (["edge-1x300/float16"], "FAIL") == (kind["cases"], kind["status"])


def test_the_device_tool_writes_its_records_with_a_kernel_that_crashes_and_one_that_is_not_here(
    judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the device there is one try: what one kernel does must not cost the others their record."""
    path = Path(__file__).parents[2] / "tools" / "gpu_verify.py"
    spec = importlib.util.spec_from_file_location("gpu_verify", path)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    Path("aborts.py").write_text(KERNEL.format(fault=FAULTS["aborts"]))
    words = [
        "out",
        "aborts.py:attention",
        "sdpa:none",
        "--device",
        "cpu",
        "--case",
        "edge-1x1/",
        "--jobs",
        "1",
    ]
    rows = {row["candidate"]: row for row in tool.run(tool.arguments(words))}
    crashed = rows["aborts.py:attention"]
    assert (0, 2, 4) == (crashed["failed"], crashed["findings"], crashed["processes_lost"])
    assert "absent" in rows["sdpa:none"]
    found = records.load(Path("out/findings-gpu.json"))["results"]
    assert {"aborts.py:attention"} == {row["candidate"] for row in found}
    assert "verify-device" == records.load(Path("out/verify.json"))["kind"]
    assert "aborts.py:attention: 1 passed, 0 failed, 2 findings" in capsys.readouterr().out


def test_suspects_are_programs_that_end_in_a_comparison_or_a_crash() -> None:
    """They run once, on a device that is lent: a misspelt one would be found there."""
    found = findings_gpu.suspects()
    assert len(found) == len({one.name for one in found})
    for one in found:
        names = compile(one.code, one.name, "exec").co_names
        assert {"got", "right"} <= set(names), one.name
        assert findings.observe(one).status in ("not here", "reproduced", "gone")
