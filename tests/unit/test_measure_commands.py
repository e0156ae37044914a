"""The measuring commands as a user meets them: exit codes, records, resumption, ctrl-c, sentences instead of tracebacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

torch = pytest.importorskip("torch")

from attnproof.cli import _growth, _measuring  # noqa: E402
from attnproof.cli._app import build  # noqa: E402
from attnproof.measure import gate, implementations, memory, roofs, sweep  # noqa: E402
from attnproof.verify import records  # noqa: E402

FAST = ("--warmup", "1", "--timed", "4", "--slots", "1")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder as the current one, and roofs that take no time."""
    monkeypatch.chdir(tmp_path)
    quick = roofs.Roofs(1e10, {"float32": 1e11, "bfloat16": 1e10}, 1e9, one_unit=True)
    monkeypatch.setattr(roofs, "probe", lambda *_: quick)
    # small calls on several threads wait for each other, for long on a busy machine
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(*args: Any) -> Result:
    return CliRunner().invoke(build(), [str(arg) for arg in args])


def alone(*args: str) -> subprocess.Popen[str]:
    """The command in a process of its own, as its user starts it."""
    source = Path(implementations.__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-m", "attnproof.cli", *args],
        env=os.environ | {"PYTHONPATH": str(source)},
        stderr=subprocess.PIPE,
        text=True,
    )


def flat(result: Result) -> str:
    return " ".join(result.output.split())


def measured(*more: Any) -> Result:
    return run("measure", "--device", "cpu", "--case", "N32 H2 D16 causal", *FAST, "-c", "eager", *more)


def test_measure_writes_a_record_and_a_page_and_leaves_nothing_else(tmp_path: Path) -> None:
    result = measured("-c", "sdpa:flash")
    assert 0 == result.exit_code, result.output
    record = records.load(tmp_path / "reports" / "measure.json")
    assert ["eager", "sdpa:flash"] == [row["candidate"] for row in record["results"]]
    assert all(4 == len(row["samples"]) for row in record["results"])
    assert ("warm", "ABBA", 4) == tuple(record["protocol"][key] for key in ("cache", "order", "timed"))
    assert 0 <= record["protocol"]["overhead"]
    assert {"compiling", "inputs and oracle", "verdicts", "samples", "the rest"} == set(
        record["protocol"]["seconds"]
    )
    assert ["measure.html", "measure.json"] == sorted(path.name for path in (tmp_path / "reports").iterdir())


def test_a_wrong_kernel_is_shown_with_its_reason_and_exit_code_1(tmp_path: Path) -> None:
    Path("mine.py").write_text("def off(q, k, v, *, causal, scale):\n    return 1.01 * v\n")
    result = measured("-c", "mine.py:off", "--json", "m.json")
    assert 1 == result.exit_code
    assert "hard bound" in flat(result)
    row = json.loads(Path("m.json").read_text())["results"][1]
    assert "FAIL" == row["status"]
    assert "samples" not in row and "summary" not in row


def test_nothing_served_is_exit_code_77() -> None:
    result = run("measure", "--device", "cpu", "--case", "N32 D16", *FAST, "-c", "triton")
    assert 77 == result.exit_code
    assert "SKIP" in result.output


def test_a_refused_and_a_served_case_together_hold() -> None:
    result = measured("-c", "flex")
    assert 0 == result.exit_code, result.output


BAD = {
    ("measure", "--case", "N"): "case: expected",
    ("measure", "--case", "N16 D8", "-c", "warp"): "candidate: expected",
    ("measure", "--case", "N16 D8", "--device", "cuda"): "expected a device that torch sees",
    ("measure", "--case", "N16 D8", "-c", "gone.py:f"): "gone.py does not exist",
    ("measure", "--timed", "1"): "greater than or equal to 2",
    ("drift", "--dtype", "int8"): "--dtype: expected some of",
    ("train", "--dtype", "float16"): "--dtype: expected float32 or bfloat16",
    ("why-slow", "D8"): "at least N and D",
    ("report", "none.json"): "No such file",
    ("baseline", "save", "none.json"): "No such file",
    ("baseline", "gate", "eager", "warp"): "candidate: expected",
    ("baseline", "gate", "eager", "triton"): "does not serve",
    ("regress", "HEAD"): "expected BASE..HEAD",
    ("regress", "no-such..HEAD"): "git worktree",
}


@pytest.mark.parametrize(("args", "sentence"), BAD.items(), ids=" ".join)
def test_bad_input_gets_a_sentence_and_no_traceback(args: tuple[str, ...], sentence: str) -> None:
    result = run(*args)
    assert 2 == result.exit_code
    assert sentence in flat(result)
    assert "Traceback" not in result.output


def test_every_command_has_help_and_json() -> None:
    for words in (
        *(("measure",), ("memory",), ("drift",), ("train",), ("why-slow",), ("regress",)),
        *(("baseline", name) for name in ("compare", "gate", "trials")),
    ):
        shown = run(*words, "-h")
        assert 0 == shown.exit_code
        assert "--json" in shown.output


def test_a_stopped_measure_keeps_what_is_done_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-c after two of three cases: no record, no half file, and the same command measures one case only."""
    cases = [word for n in (16, 24, 32) for word in ("--case", f"N{n} D8")]
    command = ("measure", "--device", "cpu", *cases, *FAST, "-c", "eager", "--json", "m.json")
    real, seen = sweep.measure_shape, []

    def stopping(shape: Any, *rest: Any) -> Any:
        seen.append(shape.N)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(shape, *rest)

    monkeypatch.setattr(sweep, "measure_shape", stopping)
    stopped = run(*command)
    assert 130 == stopped.exit_code
    assert "the same command goes on from there" in flat(stopped)
    assert ["m.partial"] == sorted(path.name for path in Path().iterdir())
    again = run(*command)
    assert 0 == again.exit_code, again.output
    assert [16, 24, 32, 32] == seen
    assert "going on after 4 steps" in flat(again)
    assert [16, 24, 32] == [row["shape"]["N"] for row in records.load(Path("m.json"))["results"]]
    assert not Path("m.partial").exists()


@pytest.mark.slow
def test_a_real_ctrl_c_leaves_130_and_a_journal() -> None:
    """The signal itself, in a process of its own."""
    cases = [word for n in range(16, 400, 8) for word in ("--case", f"N{n} D8")]
    child = alone("measure", "--device", "cpu", *cases, "-c", "eager", "--json", "m.json")
    while child.poll() is None and not (
        Path("m.partial").exists() and Path("m.partial").stat().st_size > 3000
    ):
        pass
    child.send_signal(signal.SIGINT)
    _, said = child.communicate()
    assert 130 == child.returncode
    assert "Traceback" not in said
    assert "are kept in m.partial" in " ".join(said.split())
    assert ["m.partial"] == sorted(path.name for path in Path().iterdir())


def test_a_record_that_cannot_be_written_is_refused_before_the_work() -> None:
    result = measured("--json", "no/folder/m.json")
    assert 2 == result.exit_code
    assert "folder that exists" in flat(result)


def memory_of(lengths: tuple[int, ...], *more: str) -> tuple[str, ...]:
    """Words of the command `memory` for one head on the CPU, with a record."""
    words = [word for n in lengths for word in ("--n", str(n))]
    return ("memory", "--device", "cpu", *words, "--heads", "1", *more, "--json", "m.json")


def test_memory_of_calls_tells_linear_from_quadratic() -> None:
    """E5: eager grows with the square, ours with the length. The resident peak is that of a process, so it gets one."""
    lengths = (1024, 2048, 4096, 8192)
    child = alone(*memory_of(lengths, "--d", "16", "-c", "streaming", "-c", "eager"))
    _, said = child.communicate()
    assert 0 == child.returncode, said
    ours, eager = records.load(Path("m.json"))["results"]
    assert 1.7 < eager["exponent"]["value"] < 2.2
    assert ours["exponent"]["value"] < eager["exponent"]["value"] - 0.5
    assert list(lengths) == ours["n"]
    assert Path("m.html").exists()


def test_memory_stops_before_the_limit_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A length that would exhaust the machine is not tried: 4 N^2 bytes pass 0.05 GiB before N = 4096."""
    lengths = (512, 1024, 2048, 4096)
    scores = iter([memory.Peak(None, 4 * n * n) for n in lengths])
    monkeypatch.setattr(memory, "peak", lambda *_: next(scores))
    result = run(*memory_of(lengths, "-c", "eager", "--limit", "0.05"))
    row = records.load(Path("m.json"))["results"][0]
    assert [512, 1024, 2048] == row["n"]
    assert "would pass" in row["reason"]
    assert 0 == result.exit_code, result.output


def test_a_fused_kernel_that_grows_quadratically_fails_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _growth.MemoryPlan(("streaming",), (1, 2, 4), 1, 8, "float32", "cpu", 1)
    found = {"name": "streaming", "n": [1, 2, 4], "bytes": [1, 4, 16], "system_bytes": [], "reason": ""}
    row = _growth._memory_row(found | {"exponent": {"value": 2.0, "low": 2.0, "high": 2.0}}, plan)
    assert ("FAIL", "grows like N^2.00, the bar is 1.1") == (row["status"], row["reason"])
    peer = _growth._memory_row(
        found | {"name": "eager", "exponent": {"value": 2.0, "low": 2.0, "high": 2.0}}, plan
    )
    assert "PASS" == peer["status"]


def test_drift_is_flat_for_ours_and_rises_for_a_half_accumulator() -> None:
    result = run(
        *(
            "drift",
            "--device",
            "cpu",
            "--longest",
            "8192",
            "--seeds",
            "1",
            "--dtype",
            "bfloat16",
            "-c",
            "streaming",
        ),
        *("--json", "d.json"),
    )
    assert 0 == result.exit_code, result.output
    ours, mutant = records.load(Path("d.json"))["results"]
    assert abs(ours["slope"]["value"]) < 0.1
    assert ("FINDING", True) == (mutant["status"], mutant["slope"]["value"] > 0.1)
    assert [1024, 2048, 4096, 8192] == [point["n"] for point in ours["points"]]


def test_drift_shows_what_does_not_serve_a_dtype_as_a_skip() -> None:
    """The fastest kernel of a GPU takes halves alone; that must not end the run for the others."""
    words = ("drift", "--device", "cpu", "--longest", "4096", "--seeds", "1", "--dtype", "float32")
    result = run(*words, "-c", "flex", "-c", "streaming", "--json", "d.json")
    assert 0 == result.exit_code, result.output
    flex, ours = records.load(Path("d.json"))["results"]
    assert ("SKIP", [], "PASS") == (flex["status"], flex["points"], ours["status"])
    nothing = run(*words, "-c", "flex", "--json", "e.json")
    assert 2 == nothing.exit_code
    assert "expected one that serves float32" in flat(nothing)


def test_curves_of_three_attentions_coincide_within_the_spread_of_seeds() -> None:
    """E5: the same data and weights, another attention: the same curve."""
    result = run("train", "--model", "tiny", "--steps", "12", "--device", "cpu", "--json", "t.json")
    assert 0 == result.exit_code, result.output
    rows = records.load(Path("t.json"))["results"]
    assert [("eager", 0), ("sdpa", 0), ("attnproof", 0), ("eager", 1), ("eager", 2)] == [
        (row["candidate"], row["seed"]) for row in rows
    ]
    for row in rows[1:3]:
        assert row["difference"] < 0.01 * row["spread"]
        assert row["losses"] == pytest.approx(rows[0]["losses"], abs=1e-3)
    assert all(row["losses"][-1] < row["losses"][0] for row in rows)
    assert all(row["tokens_per_second"] > 0 and row["peak_bytes"] >= 0 for row in rows)


def test_training_prints_and_records_the_published_gains() -> None:
    words = ("train", "--model", "lra", "--steps", "4", "--seeds", "2", "--length", "32", "--device", "cpu")
    result = run(*words, "--attention", "eager", "--attention", "attnproof", "--json", "t.json")
    gains = records.load(Path("t.json"))["protocol"]["gains"]
    assert "arXiv 2205.14135" in gains["source"] and "arXiv 2205.14135" in flat(result)
    by_name = {one["model"]: one for one in gains["models"]}
    assert by_name["lra"]["ours"] > 0 and by_name["lra"]["length"] == 32
    assert by_name["gpt2-small"]["ours"] is None


def test_why_slow_asks_for_the_verdict_first() -> None:
    Path("mine.py").write_text("def off(q, k, v, *, causal, scale):\n    return v * 1.01\n")
    wrong = run("why-slow", "N32 D16", "-c", "mine.py:off", "--device", "cpu")
    assert 1 == wrong.exit_code
    assert "wrong before it is slow" in flat(wrong)
    assert "time and roof" not in wrong.output
    right = run("why-slow", "N32 H2 D16 causal", "-c", "eager", "--device", "cpu", "--json", "w.json")
    assert 0 == right.exit_code, right.output
    steps = [row["group"] for row in records.load(Path("w.json"))["results"]]
    assert [
        "verdict",
        "time and roof",
        "where the time goes",
        "registers and spills",
        "bank conflicts",
        "alignment",
    ] == steps


def test_several_records_share_a_page() -> None:
    measured("--json", "a.json")
    run("train", "--model", "tiny", "--steps", "4", "--seeds", "2", "--device", "cpu", "--json", "b.json")
    result = run("report", "a.json", "b.json", "--html", "both.html")
    assert 0 == result.exit_code, result.output
    page = Path("both.html").read_text()
    assert 'id="speed"' in page and 'id="training"' in page
    Path("c.json").write_text(json.dumps(records.record("findings", {}, [])))
    assert 2 == run("report", "c.json").exit_code


def test_a_baseline_is_kept_by_machine_and_compared() -> None:
    measured("--json", "m.json")
    saved = run("baseline", "save", "m.json", "--folder", "base")
    assert 0 == saved.exit_code, saved.output
    kept = list(Path("base").rglob("*.json"))
    assert 1 == len(kept) and 12 == len(kept[0].parent.name)
    same = run("baseline", "compare", "m.json", "--folder", "base", "--json", "c.json")
    assert 0 == same.exit_code, same.output
    assert {"SAME"} == {row["verdict"] for row in records.load(Path("c.json"))["results"]}


def test_a_slower_median_is_suspect_and_a_larger_error_regresses() -> None:
    """Gate B is advisory: a shared machine must not turn a build red; gate C is hard."""
    measured("--json", "m.json")
    run("baseline", "save", "m.json", "--folder", "base")
    record = json.loads(Path("m.json").read_text())
    row = record["results"][0]
    row["samples"] = [3 * sample for sample in row["samples"]]
    Path("slow.json").write_text(json.dumps(record))
    slow = run("baseline", "compare", "slow.json", "--folder", "base")
    assert 0 == slow.exit_code
    assert "SUSPECT is no verdict" in flat(slow)
    row["deterministic"]["rms"] *= 1.5
    Path("worse.json").write_text(json.dumps(record))
    worse = run("baseline", "compare", "worse.json", "--folder", "base")
    assert 1 == worse.exit_code
    assert "REGRESSED" in worse.output
    record["environment"]["cpu"] = "another"
    Path("other.json").write_text(json.dumps(record))
    other = run("baseline", "compare", "other.json", "--folder", "base")
    assert 2 == other.exit_code
    assert "make one with attnproof baseline save" in flat(other)


VERDICTS = {"SAME": 0, "IMPROVED": 0, "REGRESSED": 1, "AMBIGUOUS": 3}


@pytest.mark.parametrize(("verdict", "code"), VERDICTS.items())
def test_the_gates_exit_code_is_its_verdict(verdict: Any, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = gate.Comparison(verdict, gate.Interval(1.0, 0.99, 1.01), 0.01, 0.001, 200, 1.0)
    monkeypatch.setattr(gate, "compare", lambda *_, **__: found)
    result = run(
        "baseline", "gate", "eager", "sdpa:flash", "--case", "N16 D8", "--device", "cpu", "--json", "g.json"
    )
    assert code == result.exit_code, result.output
    assert flat(result).index("A against A") < flat(result).index(verdict)
    assert verdict == records.load(Path("g.json"))["results"][0]["verdict"]


@pytest.mark.parametrize(("launches", "code"), [(2.0, 0), (3.0, 1)])
def test_with_counts_the_gate_is_hard_about_what_a_call_is_made_of(
    launches: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that takes one more launch is worse even where the clock cannot see it; without the option it passes."""
    same = gate.Comparison("SAME", gate.Interval(1.0, 0.99, 1.01), 0.01, 0.001, 200, 1.0)
    monkeypatch.setattr(gate, "compare", lambda *_, **__: same)
    made = {"eager": {"launches": 2.0, "spills": 0.0}, "sdpa:flash": {"launches": launches, "spills": 0.0}}
    monkeypatch.setattr(sweep, "without_a_clock", lambda name, judged, counted: made[name])
    words = ("baseline", "gate", "eager", "sdpa:flash", "--case", "N16 D8", "--device", "cpu")
    result = run(*words, "--counts", "--json", "g.json")
    assert code == result.exit_code, result.output
    found = {row["quantity"]: row["verdict"] for row in records.load(Path("g.json"))["results"][1:]}
    assert {"launches": "REGRESSED" if code else "SAME", "spills": "SAME"} == found
    assert 0 == run(*words).exit_code


def test_the_gate_takes_no_time_of_a_wrong_kernel() -> None:
    Path("mine.py").write_text("def off(q, k, v, *, causal, scale):\n    return v * 1.01\n")
    result = run("baseline", "gate", "eager", "mine.py:off", "--case", "N16 D8", "--device", "cpu")
    assert 1 == result.exit_code
    assert "no time is taken" in flat(result)


def test_trials_go_on_where_they_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirteen minutes of trials must survive a ctrl-c."""
    done: list[int] = []

    def found(a: Any, b: Any, *_: Any, **__: Any) -> gate.Comparison:
        if len(done) == 3:
            done.append(0)
            raise KeyboardInterrupt
        done.append(1)
        verdict: Any = "SAME" if len(done) % 2 else "REGRESSED"
        return gate.Comparison(verdict, gate.Interval(1.0, 1.0, 1.0), 0.01, 0.001, 200, 1.0)

    from attnproof.measure import trials

    monkeypatch.setattr(trials, "compare", found)
    command = ("baseline", "trials", "--trials", "3", "--json", "g.json")
    stopped = run(*command)
    assert 130 == stopped.exit_code
    assert "3 steps are kept in g.partial" in flat(stopped)
    assert not Path("g.json").exists()
    run(*command)
    record = records.load(Path("g.json"))
    assert 6 == len(record["results"]) and 7 == len(done)
    assert not Path("g.partial").exists()


def test_trials_fail_when_the_bar_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnproof.measure import trials

    found = gate.Comparison("REGRESSED", gate.Interval(1.0, 1.0, 1.0), 0.01, 0.001, 200, 1.0)
    monkeypatch.setattr(trials, "compare", lambda *_, **__: found)
    result = run("baseline", "trials", "--trials", "2")
    assert 1 == result.exit_code
    assert "identical code called different: 100.0%" in flat(result)


def test_a_journal_line_says_what_it_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), _measuring.kept(Path("x.partial"), "plan", "cpu") as journal:
        journal.put("a", 1)
        raise KeyboardInterrupt
    assert "1 steps are kept" in " ".join(capsys.readouterr().err.split())
