"""docs/05 as a new user would read it: five lines, one command; then one line more."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnproof.cli._app import build
from attnproof.verify import findings, tiers
from attnproof.verify.mutants import catalogue

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "05_verify_your_kernel.md").read_text(encoding="utf-8")


def block(language: str, title: str) -> str:
    found = re.search(
        rf'^```{language} title="{re.escape(title)}"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL
    )
    assert found is not None, title
    return found[1]


def test_five_lines_and_one_command_verify_a_foreign_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page promises that the first run fails with the reason, and that one more line makes it pass."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    code = block("python", "mine.py")
    assert 5 == len([line for line in code.splitlines() if line.strip()])
    command = re.search(r"^\$ attnproof (verify --candidate mine\.py.*)$", PAGE, re.MULTILINE)
    assert command is not None
    words = [*command[1].split(), "--device", "cpu"]
    Path("mine.py").write_text(code)
    first = CliRunner().invoke(build(), words)
    assert (1, True) == (
        first.exit_code,
        "it is the right answer with causal aligned top left" in first.output,
    ), first.output
    Path("mine.py").write_text(code + block("python", "mine.py, one more line"))
    second = CliRunner().invoke(build(), words)
    assert 0 == second.exit_code, second.output
    record = json.loads(Path("reports/verify.json").read_text())
    assert "mine.py:attention" == record["protocol"]["candidates"][0]["name"]
    assert Path("reports/verify.html").stat().st_size < 3_000_000


def test_the_page_of_findings_is_what_the_findings_say() -> None:
    """The page and the programs cannot differ: it is written from them."""
    assert findings.markdown() == (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("finding", findings.all_findings(), ids=lambda finding: finding.name)
def test_every_finding_runs_and_says_what_it_saw(finding: findings.Finding) -> None:
    """On the versions that it names the deviation is there; on others it may be gone, and then says so."""
    pytest.importorskip("torch")
    import torch

    seen = findings.observe(finding)
    if seen.status == "not here":
        pytest.skip(seen.why)
    expected = (
        {"reproduced"}
        if f"torch {torch.__version__.partition('+')[0]}," in finding.seen
        else {"reproduced", "gone"}
    )
    assert seen.status in expected, (seen.got, seen.right, seen.why)


def test_the_page_says_of_the_judge_what_the_records_say() -> None:
    """Every mutant of today's set dies in standard, and no correct kernel was flagged over 20 seeds."""
    folder = ROOT / "results" / "cpu"
    matrix = json.loads((folder / "kill-matrix.json").read_text())
    standard = {case.id for case in tiers.cases("standard")} | {"guards"}
    dead = {entry["candidate"] for entry in matrix["results"] if entry["case"] in standard}
    assert (catalogue.digest(), []) == (matrix["protocol"]["mutant_set"], matrix["protocol"]["survivors"])
    assert {operator.name for operator in catalogue.OPERATORS} == dead
    alarms = json.loads((folder / "false-alarms.json").read_text())["protocol"]
    assert ("standard", 0) == (alarms["tier"], alarms["alarms"])
    assert alarms["seeds"] >= 20
    sentence = f"All {len(dead)} broken kernels die in `standard`, and none of {alarms['judged']} results of correct kernels"
    assert sentence in PAGE.replace("\n", " ")
