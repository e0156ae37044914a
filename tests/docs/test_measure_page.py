"""The page on measuring: the script that it shows is the one that ships, and the workflow is one that GitHub would read."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "measure.md").read_text(encoding="utf-8")
SCRIPT = ROOT / "tools" / "ci_gate.sh"


def block(language: str, start: str) -> str:
    found = [
        text
        for text in re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)
        if text.startswith(start)
    ]
    assert 1 == len(found)
    return found[0]


def gate(tmp_path: Path, codes: dict[str, int], *, baselines: bool = False) -> tuple[int, list[str]]:
    """Run the script with a stand-in for attnproof that records its arguments; exit code and the commands asked for."""
    stand_in, log = tmp_path / "attnproof", tmp_path / "log"
    cases = "".join(f"{name}) exit {code};;\n" for name, code in codes.items())
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> "{log}"\ncase "$1" in\n{cases}esac\n')
    stand_in.chmod(0o755)
    if baselines:
        (tmp_path / ".attnproof" / "baselines").mkdir(parents=True)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", str(SCRIPT), "main"], cwd=tmp_path, env=os.environ | {"PATH": path}, check=False
    )
    return done.returncode, [line.split()[0] for line in log.read_text().splitlines()]


def test_the_script_on_the_page_is_the_one_that_ships() -> None:
    assert SCRIPT.read_text(encoding="utf-8") == block("sh", "#!/bin/sh")
    assert os.access(SCRIPT, os.X_OK)


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_script_leaves_with_the_code_of_the_paired_gate(tmp_path: Path, code: int) -> None:
    assert (code, ["verify", "measure", "regress"]) == gate(tmp_path, {"regress": code})


def test_a_wrong_kernel_ends_the_script_before_any_time_is_taken(tmp_path: Path) -> None:
    assert (1, ["verify"]) == gate(tmp_path, {"verify": 1})


def test_a_hard_regression_fails_whatever_the_clock_says(tmp_path: Path) -> None:
    assert (1, ["verify", "measure", "baseline"]) == gate(tmp_path, {"baseline": 1}, baselines=True)
    (tmp_path / "log").unlink()


def test_a_machine_without_a_baseline_goes_on(tmp_path: Path) -> None:
    """Exit code 2 of compare: baselines of other machines are there, none of this one."""
    found = gate(tmp_path, {"baseline": 2}, baselines=True)
    assert (0, ["verify", "measure", "baseline", "regress"]) == found


def test_the_commands_of_the_script_and_of_the_page_exist() -> None:
    from typer.testing import CliRunner

    from attnproof.cli._app import build

    shown = [SCRIPT.read_text(), *re.findall(r"^```sh\n(attnproof .*?)^```$", PAGE, re.M | re.S)]
    assert 4 == len(shown)
    for words in re.findall(r"^ *attnproof ((?:baseline )?[a-z-]+)", "\n".join(shown), re.M):
        assert 0 == CliRunner().invoke(build(), [*words.split(), "-h"]).exit_code


def test_the_workflow_is_one_that_github_reads_and_runs_the_script_over_the_whole_history() -> None:
    yaml = pytest.importorskip("yaml")
    steps = yaml.safe_load(block("yaml", "name: attention gate"))["jobs"]["gate"]["steps"]
    assert 0 == next(
        step["with"]["fetch-depth"] for step in steps if step.get("uses", "").startswith("actions/checkout")
    )
    script = next(step["run"] for step in steps if "ci_gate" in step.get("run", ""))
    # the words of GitHub are replaced before a shell sees them
    plain = re.sub(r"\$\{\{.*?\}\}", "main", script)
    subprocess.run(["sh", "-n"], input=plain, text=True, check=True)
    assert "${{ github.base_ref }}" in script


def test_what_the_page_says_of_the_gate_is_what_the_record_says() -> None:
    """The promise of the paired gate rests on these trials."""
    record = json.loads((ROOT / "results" / "cpu" / "gate.json").read_text(encoding="utf-8"))
    verdicts = record["protocol"]["score"]["verdicts"]
    assert {"same": {"SAME": 200}, "slower": {"REGRESSED": 200}} == verdicts
    assert 0.03 == record["protocol"]["plan"]["share"]
    assert "identical code SAME 200 times and found 200 of the 200 slowdowns" in PAGE
