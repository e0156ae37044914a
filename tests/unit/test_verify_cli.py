"""The commands that judge kernels, as a user types them: exit codes, files, sentences instead of tracebacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from attnproof.cli._app import build
from attnproof.verify import findings, records

KERNEL = """
from attnproof.api import attention_with_lse

def attention(q, k, v, *, causal, scale, mask=None):
    out, lse = attention_with_lse(q, k, v, causal=causal, scale=scale, mask=mask, backend="streaming")
    return out{change}, lse

attention.attnproof = {{"arrays": "numpy", "numerics": "precise", "dtypes": ["float16"]}}
"""

POISON = "raise RuntimeError('CUDA error: misaligned address')"

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command in an empty folder; the folder has a kernel that is right and one that is not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    Path("good.py").write_text(KERNEL.format(change=""))
    Path("bad.py").write_text(KERNEL.format(change=" * 1.001"))
    return lambda *words: CliRunner().invoke(build(), list(words))


def test_a_right_kernel_leaves_with_zero_and_writes_record_and_report(run: Run) -> None:
    result = run("verify", "-c", "good.py:attention", "--tier", "smoke", "--junit", "junit.xml")
    assert 0 == result.exit_code, result.output
    document = records.load(Path("reports/verify.json"))
    assert "smoke" == document["protocol"]["tier"]
    assert "5 of 5 broken kernels found" in document["protocol"]["sharpness"]
    assert "checked" in result.output and "no backward" in result.output
    assert Path("reports/verify.html").read_text().startswith("<!doctype html>")
    assert Path("junit.xml").read_text().startswith("<?xml")


def test_a_wrong_kernel_leaves_with_one_and_says_what_to_replay(run: Run) -> None:
    result = run("verify", "-c", "bad.py:attention", "--tier", "smoke", "--case", "longer")
    assert 1 == result.exit_code
    assert (
        "attnproof explain-case longer-queries-causal/float16 --candidate bad.py:attention --seed 0"
        in result.output
    )


def test_nothing_to_judge_is_no_success(run: Run) -> None:
    """Skipped is not passed: a kernel that takes no case must not turn a build green."""
    result = run("verify", "-c", "good.py:attention", "--tier", "standard", "--case", "window-both")
    assert 77 == result.exit_code, result.output


def test_the_step_summary_of_a_ci_page_is_appended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("summary.md").write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    run("verify", "-c", "good.py:attention", "--tier", "smoke", "--case", "longer", "--json", "mine.json")
    assert Path("summary.md").read_text().startswith("before\n## attnproof verify")
    assert Path("mine.json").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("verify", "-c", "good.py:other"), "has no attribute 'other'"),
        (("verify", "--tier", "huge"), "tier: expected one of smoke, quick, standard, full, got 'huge'"),
        (("verify", "--case", "no such case"), "--case: expected a part of a case id"),
        (
            ("verify", "-c", "sdpa:cudnn", "--device", "cpu"),
            "sdpa:cudnn: torch has this backend on GPUs only",
        ),
        (("explain-case", "no-such-case/float16"), "case: expected a known id"),
        (("explain-case", "normal-128/float16", "--mutant", "no-such"), "mutant: expected one of"),
        (("findings", "no-such-finding"), "findings: expected a part of a name"),
        (("selftest", "--mutant", "no-such"), "mutant: expected one of"),
    ],
)
def test_a_bad_request_is_one_sentence_and_code_two(run: Run, words: tuple[str, ...], message: str) -> None:
    if "sdpa:cudnn" in words:
        pytest.importorskip("torch")
    result = run(*words)
    assert 2 == result.exit_code, result.output
    assert message in " ".join((result.output + result.stderr).split())
    assert "Traceback" not in result.output


def test_explain_case_shows_the_worst_row_and_the_keys_that_decide_it(run: Run) -> None:
    result = run(
        "explain-case", "gqa-257x1000-causal/bfloat16", "--mutant", "row-shift", "--json", "replay.json"
    )
    assert 1 == result.exit_code
    for words in ("rows 63 of each 64", "worst row of out", "the keys that decide this row", "hard bound"):
        assert words in result.output
    assert "FAIL" == records.load(Path("replay.json"))["results"][0]["status"]


def test_explain_case_of_a_passing_kernel_leaves_with_zero(run: Run) -> None:
    result = run("explain-case", "everything/float32")
    assert 0 == result.exit_code, result.output
    assert 77 == run("explain-case", "window-both/float16", "-c", "good.py:attention").exit_code


def test_selftest_of_chosen_mutants_is_a_record(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Correct kernels are judged too; here one of them stands for all."""
    from attnproof.verify import selftest
    from attnproof.verify.mutants import kernel

    monkeypatch.setattr(selftest, "correct_kernels", lambda: iter([kernel.correct()]))
    result = run(
        "selftest", "--mutant", "no-rescale-acc", "--mutant", "masked-is-zero", "--json", "self.json"
    )
    assert 0 == result.exit_code, result.output
    document = records.load(Path("self.json"))
    statuses = [entry["status"] for entry in document["results"] if "status" in entry]
    assert statuses == ["KILLED", "KILLED", "GREEN"]
    assert (document["protocol"]["dead"], document["protocol"]["alarms"]) == (2, 0)


def test_a_self_test_that_misses_a_mutant_is_not_to_be_trusted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnproof.verify import selftest
    from attnproof.verify.mutants import catalogue
    from attnproof.verify.mutants.operator import Operator

    harmless = Operator("harmless", "changes nothing", (("streaming", "BLOCK_M = 128", "BLOCK_M = 96"),))
    monkeypatch.setattr(selftest, "correct_kernels", lambda: iter(()))
    monkeypatch.setattr(catalogue, "find", lambda name: harmless)
    result = run("selftest", "--mutant", "harmless")
    assert 5 == result.exit_code
    assert "survived" in result.output


def test_findings_are_run_and_recorded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    base: dict[str, Any] = {
        "kernel": "mine",
        "kind": findings.BUG,
        "title": "one",
        "seen": "here",
        "note": "",
        "needs": (),
    }
    made = (
        findings.Finding(name="there", code="got, right = [2.0], [1.0]", **base),
        findings.Finding(name="gone", code="got, right = [1.0], [1.0]", **base),
        findings.Finding(name="raises", code="raise RuntimeError('no more')", **base),
        findings.Finding(name="absent", code="", **(base | {"needs": ("no_such_package",)})),
        findings.Finding(name="gpu", code="", device="cuda", **base),
        findings.Finding(name="dies", code="import os; os.abort()", crashes=True, **base),
        findings.Finding(name="poisons", code=POISON, crashes=True, **base),
        findings.Finding(name="survives", code="", crashes=True, **base),
    )
    monkeypatch.setattr(findings, "all_findings", lambda: made)
    result = run("findings", "--json", "found.json")
    assert 0 == result.exit_code, result.output
    statuses = {
        entry["case"]: entry["status"] for entry in json.loads(Path("found.json").read_text())["results"]
    }
    assert statuses["there"] == statuses["dies"] == statuses["poisons"] == "FINDING"
    assert statuses["gone"] == statuses["raises"] == statuses["survives"] == "PASS"
    assert statuses["absent"] == "SKIP"
    page = run("findings", "--markdown")
    assert "## there" in page.output


def test_deviations_of_peers_are_findings_and_do_not_fail_our_run(run: Run) -> None:
    """torch's CPU kernels deviate on these cases; that is news about them."""
    pytest.importorskip("torch")
    result = run("verify", "--quick", "--backend", "streaming", "--case", "scale-negative-causal")
    assert 0 == result.exit_code, result.output
    document = records.load(Path("reports/verify.json"))
    statuses = {(entry["candidate"], entry["group"]): entry["status"] for entry in document["results"]}
    assert statuses["attnproof:streaming", "scores"] == "PASS"
    assert statuses["sdpa:flash", "scores"] in ("FINDING", "PASS")
