"""The profiler's split of `why-slow`: tables in the formats that ncu and rocprof document, and a stand-in for ncu.

The numbers are made up; the whole path up to the profiler runs as it does on a GPU: the process, the options, the table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attnproof.ledger import profilers  # noqa: E402
from attnproof.ledger.counters import CounterError  # noqa: E402
from attnproof.measure import kernels, profiled, roofs, slow, split  # noqa: E402
from attnproof.measure.bench import Bench  # noqa: E402
from attnproof.measure.kernels import Compiled, Ran  # noqa: E402
from attnproof.measure.shapes import Shape  # noqa: E402
from attnproof.measure.split import Profiled  # noqa: E402
from attnproof.measure.timer import timer_for  # noqa: E402

SHAPE = Shape(1, 2, 32, 16, dtype="float32", causal=True)
MARK = "spin_kernel(long)"
MEMORY, L2, MATRIX, EXP, SM = split.BUSY
LONG, SHORT, GMMA = (split.STALL.format(reason) for reason in ("long_scoreboard", "short_scoreboard", "gmma"))
MAIN = {
    **{split.TIME: "1,500,000", MEMORY: "21.4", MATRIX: "63.6", EXP: "35.2", SM: "70"},
    **{split.LATENCY: "8", LONG: "1", SHORT: "0.4", GMMA: "4"},
    **dict(zip(split.REPEATS, ("100", "20"), strict=True)),
    **dict(zip(split.ACCESSES, ("1,000", "200"), strict=True)),
}
SMALL = {split.TIME: "500,000", MEMORY: "90", **dict.fromkeys((*split.REPEATS, *split.ACCESSES), "0")}
UNITS = {split.TIME: "nsecond", LONG: "inst", split.LATENCY: "cycle"}


def raw(*made: tuple[str, dict[str, str]]) -> str:
    """`ncu --csv --page raw`: a line per kernel, a column per metric, the units in a line without an ID."""
    head = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size"]
    head += ["Grid Size", "Device", "CC", *split.NCU_METRICS]
    units = [""] * 11 + [UNITS.get(metric, "%") for metric in split.NCU_METRICS]
    lines = [head, units]
    for number, (name, told) in enumerate(made):
        about = [
            str(number),
            "77",
            "python",
            "127.0.0.1",
            name,
            "1",
            "7",
            "(128, 1, 1)",
            "(132, 1, 1)",
            "0",
            "9.0",
        ]
        lines.append(about + [told.get(metric, "n/a") for metric in split.NCU_METRICS])
    table = [",".join(f'"{cell}"' for cell in line) for line in lines]
    return "\n".join(["==PROF== Connected to process 77 (/usr/bin/python3)", *table, "==PROF== Disconnected"])


CALL = (
    ("warm_up(int)", SMALL),
    (MARK, {}),
    ("void at::native::reduce<float, 4>(T1)", SMALL),
    ("attention_forward", MAIN),
    (MARK, {}),
)
SENTENCE = (
    "2 launches, 2 ms on the device: attention_forward 75%, reduce 25%; attention_forward: busy are memory 21%, "
    "matrix units 64%, special-function units (exp) 35%, busiest unit of a multiprocessor 70%; between two instructions "
    "of 8.0 cycles a warp waits for matrix products of the warp group 50%, loads from memory or L2 12%, "
    "shared memory or special functions 5%"
)


def test_the_raw_page_becomes_kernels_with_the_metrics_that_have_numbers() -> None:
    kernel = split.parse(raw(("k", MAIN)))[0]
    assert ("k", 1.5e-3, 21.4) == (kernel.name, pytest.approx(kernel.seconds), kernel.metrics[MEMORY])
    assert L2 not in kernel.metrics  # n/a is no zero


def test_the_details_page_is_read_too() -> None:
    head = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    lines = [
        f'"0","k","{MATRIX}","%","12.5"',
        f'"0","k","{split.TIME}","usecond","3"',
        f'"0","k","{EXP}","%","nan"',
    ]
    assert [Profiled("k", {MATRIX: 12.5, split.TIME: 3.0}, pytest.approx(3e-6))] == split.parse(
        "\n".join([head, *lines])
    )


def test_a_call_is_told_in_one_sentence() -> None:
    """Where the time goes by kernel, how busy each unit was, and what a warp waited for, the most first."""
    assert SENTENCE == split.sentence(split.parse(raw(*CALL[2:4])))


def test_without_the_latency_waits_are_cycles_and_without_any_metric_it_says_so() -> None:
    kernel = Profiled("k", {GMMA: 4.0, LONG: 0.0})
    assert "between two instructions a warp waits for matrix products of the warp group 4.0 cycles" == (
        split.waits(kernel)
    )
    assert "1 launch: k; of its units and waits nothing could be read" == split.sentence([Profiled("k", {})])


def test_bank_conflicts_are_a_share_of_the_passes_over_shared_memory() -> None:
    found = split.conflicts(split.parse(raw(*CALL[2:4])))
    assert split.Conflicts(pytest.approx(0.1), "the passes over shared memory") == found
    assert 0.0 == split.conflicts(split.parse(raw(("k", SMALL)))).share  # type: ignore[union-attr]
    assert split.conflicts([Profiled("k", {})]) is None


ROCPROF = (
    '"Correlation_Id","Dispatch_Id","Kernel_Name","Counter_Name","Counter_Value","Start_Timestamp","End_Timestamp"\n'
    '1,1,"small","VALUBusy",5,1000,2000\n'
    '1,2,"attention(float*)","VALUBusy",61.5,3000,6000\n'
    '1,2,"attention(float*)","MemUnitBusy",20,3000,6000\n'
    '1,2,"attention(float*)","MemUnitStalled",2,3000,6000\n'
    '1,2,"attention(float*)","LDSBankConflict",7,3000,6000\n'
)


def test_rocprof_is_told_in_its_own_words() -> None:
    found = split.parse(ROCPROF, "rocprofv3")
    assert split.sentence(found) == (
        "2 launches, 0.004 ms on the device: attention 75%, small 25%; attention: busy are memory unit 20%, "
        "vector units (exp among their work) 62%; stalled by the memory unit 2%"
    )
    assert split.Conflicts(pytest.approx(0.07), "the time of attention") == split.conflicts(found)


def test_the_older_rocprof_has_no_times_and_its_kernels_get_no_shares() -> None:
    text = 'Index,KernelName,VALUBusy,LDSBankConflict\n0,"a(int) [clone .kd]",10,1\n1,"b",20,2\n'
    assert "2 launches: a, b; a: busy are vector units (exp among their work) 10%" == split.sentence(
        split.parse(text, "rocprof")
    )


# -- a stand-in for ncu on the path ---------------------------------------------------------------


def stand_in(folder: Path, body: str) -> None:
    """An executable `ncu` that keeps its arguments, checks the plan and then does what ``body`` says."""
    path = folder / "ncu"
    start = (
        f"#!{sys.executable}\nimport json, pathlib, sys\nargs = sys.argv[1:]\n"
        f"kept = pathlib.Path({str(folder / 'calls')!r})\n"
        "kept.write_text((kept.read_text() if kept.exists() else '') + json.dumps(args) + '\\n')\n"
        "plan, manifest = map(pathlib.Path, args[-2:])\n"
        "log = pathlib.Path(args[args.index('--log-file') + 1])\n"
        "metrics = args[args.index('--metrics') + 1].split(',')\n"
        "assert set(json.loads(plan.read_text())) == {'shape', 'name', 'device'}\n"
    )
    path.write_text(start + body, encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole path of programs; no profiler elsewhere is found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(profilers.Path, "glob", lambda *_: iter(()))
    return tmp_path


def calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


WRITES = f"log.write_text({raw(*CALL)!r})\nmanifest.write_text(plan.read_text())\n"


def test_ncu_watches_one_call_in_a_process_of_its_own(path: Path) -> None:
    stand_in(path, WRITES)
    found = split.measure(SHAPE, "streaming")
    assert ("ncu", ["reduce", "attention_forward"]) == (
        found.tool,
        [split.short(k.name) for k in found.kernels],
    )
    (line,) = calls(path)
    assert "attnproof.measure.profiled" == line[line.index("-m") + 1]
    for option, value in (("--page", "raw"), ("--replay-mode", "kernel"), ("--profile-from-start", "off")):
        assert value == line[line.index(option) + 1]
    assert "--csv" in line and ",".join(split.NCU_METRICS) == line[line.index("--metrics") + 1]


def test_a_metric_that_this_ncu_does_not_know_is_left_out_and_the_rest_is_read(path: Path) -> None:
    """It refuses the whole run for one name, and names it as a pattern without what follows the dot."""
    base = GMMA.partition(".")[0]
    refuse = (
        f"if {GMMA!r} in metrics:\n"
        f"    log.write_text('==ERROR== Failed to find metric regex:^{base}(\\\\.|$)')\n    sys.exit(1)\n"
    )
    stand_in(path, refuse + WRITES)
    assert 2 == len(split.measure(SHAPE, "streaming").kernels)
    first, second = (line[line.index("--metrics") + 1].split(",") for line in calls(path))
    assert [GMMA] == [metric for metric in first if metric not in second]


def test_an_ncu_that_refuses_everything_is_not_asked_for_ever(path: Path) -> None:
    refuse = (
        "log.write_text('==ERROR== Failed to find metric ' + metrics[0].partition('.')[0])\nsys.exit(1)\n"
    )
    stand_in(path, refuse)
    with pytest.raises(CounterError, match=f"in each of {split.ATTEMPTS} runs"):
        split.measure(SHAPE, "streaming")


NO_PERMISSION = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters"


@pytest.mark.parametrize("where", ["log.write_text", "print"])
@pytest.mark.parametrize("ends", ["sys.exit(1)", "manifest.write_text('{}')"])
def test_without_permission_it_says_so_wherever_ncu_does(path: Path, where: str, ends: str) -> None:
    """The watched process may run to its end all the same: then there is a manifest and no table."""
    stand_in(path, f"{where}({NO_PERMISSION!r})\n{ends}\n")
    with pytest.raises(CounterError, match="ERR_NVGPUCTRPERM.*run as root"):
        split.measure(SHAPE, "streaming")


def test_without_a_profiler_it_says_what_it_looked_for(path: Path) -> None:
    with pytest.raises(CounterError, match=r"expected ncu .* or rocprof .*, found neither"):
        split.measure(SHAPE, "streaming")


def test_the_watched_process_makes_its_call_between_the_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compiles must have compiled before: twice outside, once inside."""
    seen: list[str] = []

    @contextmanager
    def markers(cuda: Any) -> Iterator[None]:
        seen.append("marker")
        yield
        seen.append("marker")

    (tmp_path / "mine.py").write_text(
        "import attnproof\n\ndef attend(q, k, v, *, causal, scale):\n"
        "    with open('seen', 'a') as kept:\n        kept.write('call ')\n"
        "    return attnproof.attention(q, k, v, causal=causal, scale=scale, backend='math')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiled, "profiled", markers)
    job = {"shape": asdict(SHAPE), "name": "mine.py:attend", "device": "cpu"}
    (tmp_path / "plan.json").write_text(json.dumps(job))
    profiled.main(tmp_path / "plan.json", tmp_path / "manifest.json")
    assert ["marker", "marker"] == seen
    assert 3 == len((tmp_path / "seen").read_text().split())
    assert job == json.loads((tmp_path / "manifest.json").read_text())


# -- the steps of why-slow, with a processor in the place of a GPU --------------------------------


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is called cuda and is the processor: what a GPU would add are the kernels that ran."""

    def bench(shape: Shape, device: str, slots: int) -> Bench:
        made = Bench(shape, "cpu", slots)
        made.device = device
        return made

    ran = [Ran("attention_forward", 1.5e-3, 240, 200_000), Ran("reduce", 0.5e-3, 32, 0)]
    monkeypatch.setattr(slow, "Bench", bench)
    monkeypatch.setattr(slow, "timer_for", lambda _: timer_for("cpu"))
    monkeypatch.setattr(roofs, "probe", lambda *_: roofs.Roofs(1e10, {"float32": 1e11}, 1e9, one_unit=True))
    monkeypatch.setattr(kernels, "look", lambda called: dict.fromkeys(called, ran))
    monkeypatch.setattr(kernels, "compiled", lambda: [Compiled("attention_forward", 240, 16, 200_000, 9000)])


def steps(name: str = "streaming") -> dict[str, slow.Step]:
    return {step.question: step for step in slow.explain(SHAPE, name, "cuda")}


@pytest.mark.usefixtures("on_a_gpu")
def test_the_steps_come_in_the_documents_order_with_what_the_counters_say(path: Path) -> None:
    stand_in(path, WRITES)
    found = steps()
    assert list(slow.STEPS) == list(found)
    assert ("PASS", f"by ncu, {SENTENCE}") == (
        found["where the time goes"].status,
        found["where the time goes"].sentence,
    )
    registers = found["registers and spills"]
    assert "FINDING" == registers.status
    assert "240 registers a thread and 200000 bytes of shared memory" in registers.sentence
    assert "16 bytes a thread spill" in registers.sentence
    banks = found["bank conflicts"]
    assert ("PASS", "bank conflicts take 10.0% of the passes over shared memory") == (
        banks.status,
        banks.sentence,
    )


@pytest.mark.usefixtures("on_a_gpu")
def test_without_counters_the_kernels_times_and_the_model_stand_in_and_it_says_why(path: Path) -> None:
    stand_in(path, f"print({NO_PERMISSION!r})\nsys.exit(1)\n")
    step = steps()["where the time goes"]
    assert "SKIP" == step.status
    assert step.sentence.startswith("no counters (ncu: the driver keeps counters for administrators")
    assert "by torch's profiler, 2 launches, 2 ms on the device: attention_forward 75%" in step.sentence


@pytest.mark.usefixtures("on_a_gpu")
def test_many_conflicts_and_no_spills_of_foreign_kernels_are_told_as_that(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worse = {**MAIN, split.REPEATS[0]: "700"}
    stand_in(
        path, WRITES.replace(repr(raw(*CALL)), repr(raw(*CALL[:3], ("attention_forward", worse), CALL[4])))
    )
    monkeypatch.setattr(kernels, "compiled", lambda: [])
    found = steps()
    assert "FINDING" == found["bank conflicts"].status
    assert found["bank conflicts"].sentence.startswith("bank conflicts take 60.0% of")
    assert found["registers and spills"].sentence.endswith("only a compiled kernel of ours tells")


@pytest.mark.usefixtures("on_a_gpu")
def test_a_wrong_call_is_not_profiled(path: Path) -> None:
    stand_in(path, WRITES)
    Path(path / "off.py").write_text("def off(q, k, v, *, causal, scale):\n    return v * 1.01\n")
    assert ["verdict"] == list(steps(f"{path / 'off.py'}:off"))
    assert not (path / "calls").exists()
