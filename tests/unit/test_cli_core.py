"""The commands as a person meets them: what they print, what they write, how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from attnproof import dispatch, online_softmax
from attnproof.cli import _common, _lessons, _machine
from attnproof.cli._app import build


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(build(), [str(arg) for arg in args])


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_trace_prints_the_known_table_and_writes_the_same_numbers(tmp_path: Path) -> None:
    result = run("trace", "--json", tmp_path / "trace.json")
    assert 0 == result.exit_code
    for cell in ("+0.2968", "1.7748", "0.7333", "3.9732", "5.3007", "equal"):
        assert cell in result.output
    written = read(tmp_path / "trace.json")
    assert written["holds"] is True
    assert [0, 2, 4, 6] == [row["j"] for row in written["rows"]]
    assert pytest.approx(0.7333, abs=5e-5) == written["rows"][1]["corr"]


@pytest.mark.parametrize("order", ["keys", "queries"])
def test_trace_takes_any_size_order_and_row(order: str) -> None:
    result = run(
        "trace", "--n", "333", "--d", "16", "--block", "7", "--order", order, "--row", "332", "--causal"
    )
    assert 0 == result.exit_code
    assert "48 tiles, the first and last 20 shown" in result.output


def test_compare_shows_every_candidate_and_judges_only_ours(tmp_path: Path) -> None:
    result = run(
        "compare", "--n", "128", "--n", "65", "--d", "16", "--rounds", "2", "--json", tmp_path / "c.json"
    )
    assert 0 == result.exit_code
    written = read(tmp_path / "c.json")
    rows = {(row["n"], row["candidate"]): row for row in written["rows"]}
    for name in ("naive NumPy", "streaming", "torch eager", "torch SDPA"):
        assert name in result.output
        assert {(128, name), (65, name)} <= set(rows)
    for (n, _), row in rows.items():
        assert pytest.approx(row["seconds"] / rows[n, "naive NumPy"]["seconds"]) == row["ratio"]
        assert row["seconds"] > 0
    assert np.__version__ == written["machine"]["packages"]["numpy"]


def test_compare_ends_with_1_when_a_backend_of_ours_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The planted mistake, through the command that a user would run; the numbers are still written."""
    sound = online_softmax.rescale
    monkeypatch.setattr(online_softmax, "rescale", lambda m, t: (*sound(m, t)[:2], np.ones_like(m)))
    result = run("compare", "--n", "512", "--rounds", "1", "--json", tmp_path / "c.json")
    assert 1 == result.exit_code
    assert "NOT exact" in result.output
    assert read(tmp_path / "c.json")["holds"] is False


def test_compare_works_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run("compare", "--n", "32", "--rounds", "1")
    assert (0, False) == (result.exit_code, "torch" in result.output)


def test_memory_prints_both_laws(tmp_path: Path) -> None:
    result = run("memory", "--numpy", "--n", "2048", "--n", "1024", "--json", tmp_path / "m.json")
    assert 0 == result.exit_code
    assert "N 1024 to 2048" in result.output
    written = read(tmp_path / "m.json")
    assert [1024, 2048] == [row["n"] for row in written["rows"]]
    assert [True] == [law["holds"] for law in written["doublings"]]


def test_memory_ends_with_1_when_streaming_keeps_something_quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lessons, "stream", lambda inputs, **_: _lessons.naive(inputs))
    result = run("memory", "--numpy", "--n", "1024", "--n", "2048", "--d", "8")
    assert 1 == result.exit_code
    assert "DOES NOT HOLD" in result.output


def test_memory_is_measured_the_same_inside_another_trace() -> None:
    """tracemalloc is global: a caller that uses it must keep its trace."""
    import tracemalloc

    inputs = _lessons.Inputs.draw(512, 8, 0)
    alone = _lessons._peak(lambda: _lessons.naive(inputs))
    tracemalloc.start()
    try:
        inside = _lessons._peak(lambda: _lessons.naive(inputs))
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()
    assert pytest.approx(alone, rel=0.01) == inside


def test_blocks_counts_the_known_tiles(tmp_path: Path) -> None:
    result = run("blocks", "--json", tmp_path / "b.json")
    assert 0 == result.exit_code
    assert "4096 tiles, 2080 kept" in result.output
    assert "49.2%" in result.output
    written = read(tmp_path / "b.json")
    assert (2080, 2016, 64) == (written["kept"], written["skipped"], written["edge"])


def test_blocks_draws_small_masks_and_takes_windows() -> None:
    result = run("blocks", "--n", "8", "--block", "2", "--window", "1", "0", "--no-causal")
    assert 0 == result.exit_code
    assert "/ . . .\n/ / . .\n. / / .\n. . / /\n" in result.output
    rectangular = run("blocks", "--m", "2", "--n", "6", "--block", "2", "--align", "top_left")
    assert "/ . .\n" in rectangular.output


def test_explain_says_who_serves_and_why_not(tmp_path: Path) -> None:
    result = run(
        "explain", "--n", "1000000000", "--dtype", "float64", "--causal", "--json", tmp_path / "e.json"
    )
    assert 0 == result.exit_code
    written = read(tmp_path / "e.json")
    assert written["chosen"] in dispatch.backends()
    assert list(dispatch.backends()) == list(written["reasons"])
    refused = run("explain", "--device", "cuda", "--backend", "streaming")
    assert 1 == refused.exit_code
    assert "streaming refuses" in refused.output
    assert "reads host memory" in refused.output


@pytest.mark.parametrize("rows", ["dense", "packed", "cached", "paged"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_explain_takes_every_kind_of_call(rows: str, dtype: str) -> None:
    sizes = ("--b", "3", "--h", "4", "--hkv", "2", "--m", "5", "--n", "50", "--d", "24", "--dv", "8")
    extras = (
        "--mask",
        "--bias",
        "--alibi",
        "--sink",
        "--softcap",
        "30",
        "--dropout",
        "0.1",
        "--window",
        "7",
        "0",
    )
    result = run("explain", "--rows", rows, "--dtype", dtype, *sizes, *extras, "--backend", "reference")
    assert 0 == result.exit_code, result.output
    assert "-> reference" in result.output


def test_doctor_tests_every_backend(tmp_path: Path) -> None:
    result = run("doctor", "--json", tmp_path / "d.json")
    assert 0 == result.exit_code
    written = read(tmp_path / "d.json")
    assert list(dispatch.backends()) == [t["backend"] for t in written["backends"] if t["device"] == "cpu"]
    assert {"streaming": True, "reference": True}.items() <= {
        t["backend"]: t["ok"] for t in written["backends"]
    }.items()


def test_doctor_finds_a_backend_that_is_wrong_or_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sick backend must be named, and must not hide the others."""
    from attnproof.backends import reference, streaming

    monkeypatch.setattr(reference, "forward", lambda *_: 1 / 0)
    monkeypatch.setattr(streaming, "forward", _zeros)
    result = run("doctor")
    assert 1 == result.exit_code
    assert "BROKEN: ZeroDivisionError" in result.output
    assert "WRONG" in result.output
    assert "Traceback" not in result.output


def _zeros(problem: Any, tensors: Any) -> tuple[Any, Any]:
    return np.zeros(problem.out_shape, problem.dtype), np.zeros(problem.out_shape[:-1], problem.lse_dtype)


def test_doctor_shows_gpus_and_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "A Card", "memory": "16.0 GiB", "arch": "sm_90"}
    monkeypatch.setattr(_machine, "gpus", lambda: [gpu])
    monkeypatch.setattr(
        _machine,
        "_self_test",
        lambda *about: {
            **dict(zip(("backend", "device", "dtype"), about, strict=True)),
            "ok": None,
            "verdict": "no",
        },
    )
    result = run("doctor")
    assert 0 == result.exit_code
    assert "A Card" in result.output


BAD = {
    ("trace", "--row", "8"): "--row: expected a row below --n 8, got 8",
    ("trace", "--n", "0"): "greater than or equal to 1",
    ("trace", "--order", "diagonal"): "diagonal",
    ("trace", "--json", "no/such/folder/x.json"): "expected a path in a folder that exists",
    ("trace", "--json", "."): "expected a file name, got the folder",
    ("blocks", "--window", "-2", "0"): "window: expected sides of -1 (unbounded) or more",
    ("blocks", "--align", "middle"): "align: expected 'bottom_right' or 'top_left', got 'middle'",
    ("explain", "--h", "3", "--hkv", "2"): "expected a head count that divides the 3 query heads",
    ("explain", "--softcap", "-1"): "softcap: expected",
    ("explain", "--dropout", "1.5"): "dropout_p: expected",
    ("explain", "--backend", "cudnn"): "backend: expected 'auto' or one of",
    ("explain", "--device", "tpu"): "--device: expected cpu or cuda, got tpu",
    ("nonsense",): "No such command",
}


@pytest.mark.parametrize(("args", "sentence"), BAD.items(), ids=" ".join)
def test_bad_input_gets_a_sentence_and_no_traceback(args: tuple[str, ...], sentence: str) -> None:
    result = run(*args)
    assert 2 == result.exit_code
    assert sentence in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_help_version_and_the_bare_command_work() -> None:
    assert "trace" in run("--help").output
    assert 0 == run("--version").exit_code
    assert "Usage" in run().output
    for command in ("trace", "compare", "memory", "blocks", "explain", "doctor"):
        assert 0 == run(command, "-h").exit_code
        assert "--json" in run(command, "-h").output


def test_an_unexpected_error_is_one_line_and_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the [disk] is on fire")

    monkeypatch.setattr(_lessons, "trace", broken)
    result = run("trace")
    assert 2 == result.exit_code
    assert "error: RuntimeError: the [disk] is on fire\n" == result.output
    monkeypatch.setenv("ATTNPROOF_TRACEBACK", "1")
    assert "Traceback" in run("trace").output


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "out of memory: a smaller --n needs less"),
        (OSError(28, "No space left on device", "x.json"), "x.json: No space left on device"),
        (KeyError("q"), "KeyError: 'q'"),
    ],
)
def test_errors_of_the_system_are_described(error: Exception, line: str) -> None:
    assert line == _common.describe(error)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.json"
    _common.write_json(target, {"a": 1})
    assert 0o666 & ~_common._umask() == target.stat().st_mode & 0o777
    with pytest.raises(ValueError, match="JSON"):
        _common.write_json(target, {"a": float("nan")})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        _common.write_json(target, {"a": 2})
    assert {"a": 1} == read(target)
    assert [target] == list(tmp_path.iterdir())


def test_ctrl_c_ends_with_130_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        yield _lessons.Comparison(1, "naive NumPy", False, 0.0, 0.0, 1.0, 1.0, 1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(_lessons, "compare", interrupted)
    result = run("compare", "--json", tmp_path / "c.json")
    assert (130, "interrupted\n") == (result.exit_code, result.output)
    assert [] == list(tmp_path.iterdir())


def test_a_real_interrupt_of_a_real_process_leaves_nothing_behind(tmp_path: Path) -> None:
    """The signal arrives inside NumPy, in the middle of the work."""
    args = ["compare", "--n", "256", "--rounds", "1000000", "--json", str(tmp_path / "c.json")]
    process = subprocess.Popen(
        [sys.executable, "-m", "attnproof.cli", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert first.startswith("compare: ")
    assert (130, "", "interrupted") == (process.returncode, out, err.splitlines()[-1])
    assert "Traceback" not in err
    assert [] == list(tmp_path.iterdir())


def test_a_reader_that_leaves_is_no_error() -> None:
    pipe = f"{sys.executable} -m attnproof.cli trace | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, check=True)
    assert ("0", "") == (done.stdout.strip(), done.stderr)


def test_progress_lines_appear_only_after_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 0.2, 0.4, 1.5, 1.6])
    monkeypatch.setattr(_common.time, "monotonic", lambda: next(now))
    with _common.progress("work", 4) as tick:
        for label in "abcd":
            tick(label)
    assert "work: 3/4 c (2 s)\n" == capsys.readouterr().err


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    from io import StringIO

    from rich.console import Console

    screen = StringIO()
    monkeypatch.setattr(_common, "err_console", lambda: Console(file=screen, force_terminal=True, width=80))
    with _common.progress("work", 2) as tick:
        tick("first")
        tick()
    assert "work" in screen.getvalue()
