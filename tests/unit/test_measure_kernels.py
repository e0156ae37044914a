"""Gate C on a GPU: launches, registers, shared memory, spills and code of a call, read from traces written by hand."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attnproof.ledger.counters import CounterError  # noqa: E402
from attnproof.measure import baseline, bench, implementations, kernels, sweep  # noqa: E402
from attnproof.measure.kernels import Compiled, Ran  # noqa: E402
from attnproof.measure.shapes import Shape  # noqa: E402


def event(name: str, at: float, duration: float = 2.0, cat: str = "kernel", **args: Any) -> dict[str, Any]:
    """One activity as torch.profiler writes it; the form is torch's, the numbers are made up."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": at, "dur": duration, "args": args}


def kernel(name: str, at: float, registers: int, shared: int) -> dict[str, Any]:
    more = {"grid": [132, 1, 1], "block": [128, 1, 1], "stream": 7, "shared memory": shared}
    return event(name, at, **{"registers per thread": registers, **more})


TRACE = json.dumps(
    {
        "schemaVersion": 1,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
            event("aten::empty", 0.5, cat="cpu_op"),
            event("cudaLaunchKernel", 0.9, cat="cuda_runtime"),
            kernel("joint_kernel", 12.0, 240, 200_000),
            kernel("spin_kernel(long)", 1.0, 16, 0),
            kernel("rows_kernel", 11.0, 32, 1024),
            event("Memset (Device)", 10.5, cat="gpu_memset"),
            kernel("spin_kernel(long)", 20.0, 16, 0),
        ],
    }
)
KNOWN = [
    Compiled("joint_kernel", 240, 16, 200_000, 9000),
    Compiled("joint_kernel", 168, 0, 150_000, 99_000),
    Compiled("rows_kernel", 32, 0, 1024, 500),
]


def test_a_trace_becomes_the_activities_of_each_call_in_the_order_they_ran() -> None:
    """Host events and the markers themselves are no launches."""
    (ran,) = kernels.cut(kernels.read(TRACE), 1)
    assert [
        Ran("Memset (Device)", 2e-6),
        Ran("rows_kernel", 2e-6, 32, 1024),
        Ran("joint_kernel", 2e-6, 240, 200_000),
    ] == [Ran(one.name, pytest.approx(one.seconds), one.registers, one.shared) for one in ran]


def test_a_marker_that_the_profiler_lost_is_an_error_and_not_a_wrong_count() -> None:
    with pytest.raises(CounterError, match="expected 3 markers for 2 calls, got 2"):
        kernels.cut(kernels.read(TRACE), 2)


def test_the_facts_of_a_call_are_those_of_the_variant_that_ran() -> None:
    """Several shapes compile one kernel several times; registers and shared memory tell which one it was."""
    (ran,) = kernels.cut(kernels.read(TRACE), 1)
    assert {"launches": 3, "registers": 240, "shared_bytes": 200_000, "spills": 16, "code_bytes": 9500} == (
        kernels.facts(ran, KNOWN)
    )


def test_foreign_kernels_have_no_spills_rather_than_none() -> None:
    """Zero would say that somebody looked."""
    (ran,) = kernels.cut(kernels.read(TRACE), 1)
    assert {"launches", "registers", "shared_bytes"} == set(kernels.facts(ran))
    assert {} == kernels.facts([])


def elf(sections: dict[str, bytes]) -> bytes:
    """A 64-bit ELF file with these sections."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in sections) + b".shstrtab\0"
    parts, headers, at = [], [bytes(64)], 64
    for name, body in {**sections, ".shstrtab": names}.items():
        where = names.index(name.encode() + b"\0")
        headers.append(struct.pack("<IIQQQQIIQQ", where, 1, 0, 0, at, len(body), 0, 0, 1, 0))
        parts.append(body)
        at += len(body)
    start = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, at, 0, 64, 0, 0, 64, len(headers), len(headers) - 1)
    )
    return start + b"".join(parts) + b"".join(headers)


def test_code_is_the_instructions_and_not_the_paths_in_debug_information() -> None:
    short = elf({".text.kernel": bytes(640), ".debug_line": b"/a.py"})
    long = elf(
        {".text.kernel": bytes(640), ".debug_line": b"/a/much/longer/path/a.py", ".nv.info": bytes(99)}
    )
    assert 640 == kernels.text_bytes(short) == kernels.text_bytes(long)
    assert 0 == kernels.text_bytes(b"; amdgcn text") == kernels.text_bytes(b"")


def test_code_of_a_real_file_is_most_of_it_and_not_all() -> None:
    binary = Path(sys.executable).read_bytes()
    if not binary.startswith(b"\x7fELF\x02"):
        pytest.skip("this Python is no 64-bit ELF file")
    assert 0 < kernels.text_bytes(binary) < len(binary)


def fake(name: str, **more: Any) -> SimpleNamespace:
    """What Triton returns from a launch, as far as it is asked."""
    facts = SimpleNamespace(name=name, shared=4096, num_warps=4)
    return SimpleNamespace(metadata=facts, asm={"cubin": elf({".text." + name: bytes(128)})}, **more)


def test_kernels_that_triton_keeps_are_found_in_our_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded one tells registers and spills; one that was only compiled must not pass for one without."""
    ours, theirs = ModuleType("attnproof.backends.made.kernels"), ModuleType("elsewhere.kernels")
    for module in (ours, theirs):
        caches = {
            0: ({"key": fake("a", n_regs=96, n_spills=8), "other": fake("b", n_regs=None, n_spills=None)}, {})
        }
        vars(module)["a_kernel"] = SimpleNamespace(device_caches=caches)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    found = [one for one in kernels.compiled() if one.name in "ab"]
    assert [Compiled("a", 96, 32, 4096, 128), Compiled("b", -1, -1, 4096, 128)] == found


def test_only_ours_is_counted_and_a_missing_profiler_costs_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(1, 1, 16, 8, dtype="float32")
    made = bench.Bench(shape, "cpu", 1)
    green = [implementations.load(name) for name in ("streaming", "eager")]
    seen: list[str] = []

    def look(calls: dict[str, Any]) -> dict[str, list[Ran]]:
        seen.extend(calls)
        return {name: [Ran("k", 1.0, 64, 0)] for name in calls}

    monkeypatch.setattr(kernels, "look", look)
    assert {"streaming": {"launches": 1.0, "registers": 64.0, "shared_bytes": 0.0}} == sweep.count(
        made, green
    )
    assert ["streaming"] == seen

    def blind(calls: dict[str, Any]) -> Any:
        raise CounterError("profiler: expected 2 markers for 1 calls, got 0")

    monkeypatch.setattr(kernels, "look", blind)
    assert {} == sweep.count(made, green)


@pytest.mark.parametrize(
    ("quantity", "before", "now", "verdict"),
    [
        ("launches", 2, 3, "REGRESSED"),
        ("launches", 3, 2, "IMPROVED"),
        ("spills", 0, 8, "REGRESSED"),
        ("registers", 240, 240, "SAME"),
        ("registers", 168, 240, "REGRESSED"),
        ("shared_bytes", 1024, 1025, "REGRESSED"),
        ("code_bytes", 10_000, 10_100, "SAME"),
        ("code_bytes", 10_000, 10_400, "REGRESSED"),
    ],
)
def test_gate_c_is_hard_about_what_a_call_is_made_of(
    quantity: str, before: int, now: int, verdict: str
) -> None:
    def record(value: int) -> dict[str, Any]:
        row = {"case": "c", "candidate": "triton", "deterministic": {quantity: float(value)}}
        return {"environment": {}, "results": [row]}

    (found,) = baseline.compare(record(before), record(now))
    assert (verdict, True) == (found.verdict, found.hard)
    assert baseline.holds([found]) == (verdict != "REGRESSED")


def test_a_row_carries_what_was_counted_into_the_record() -> None:
    row = sweep.Row(Shape(1, 1, 16, 8), "triton", "PASS", counted={"launches": 2.0, "spills": 0.0})
    assert {"launches": 2.0, "spills": 0.0} == row.deterministic()


def test_a_kernel_that_no_driver_loaded_has_no_spills_to_tell() -> None:
    """Minus one byte beside a baseline of zero would be an improvement."""
    ran = [Ran("a", 1.0, 32, 0)]
    assert {"launches": 1.0, "registers": 32.0, "shared_bytes": 0.0, "code_bytes": 128.0} == kernels.facts(
        ran, [Compiled("a", kernels.UNLOADED, kernels.UNLOADED, 0, 128)]
    )


@pytest.mark.slow
def test_a_kernel_compiled_for_a_card_that_is_not_here_tells_its_code() -> None:
    """The real compiler's output: the size of the code is read from its ELF file and not from a file made here."""
    pytest.importorskip("triton")
    from attnproof.backends.triton import offline

    _, plan, arrays = offline.Sample(64, "causal").plans("sm90")[0]
    compiled = offline.compile_plan(plan, tuple(plan.described(arrays)), "sm90")
    found = kernels.about(compiled)
    assert (found.registers, found.spills) == (kernels.UNLOADED, kernels.UNLOADED)
    assert compiled.metadata.shared == found.shared > 0
    assert 1000 < found.code < len(compiled.asm["cubin"])
    assert 0 == found.code % 128  # whole lines of instructions


COMPILED_ROW = {"target": "sm90", "kernel": "forward", "D": 64, "variant": "causal", "dtype": "bfloat16"}


def compile_record(**more: int) -> dict[str, Any]:
    row = COMPILED_ROW | {"registers": 168, "spills": 0, "shared": 65536, "fits": True} | more
    environment = {"versions": {"torch": "2.13.0", "triton": "3.9.0"}}
    return {
        "kind": "compile",
        "created": "then",
        "environment": environment,
        "protocol": {},
        "results": [row],
    }


@pytest.mark.parametrize(
    ("more", "quantity", "code"),
    [
        ({}, "", 0),
        ({"spills": 8}, "spills", 1),
        ({"registers": 240}, "registers", 1),
        ({"shared": 65552}, "shared_bytes", 1),
        ({"shared": 32768}, "", 0),
    ],
)
def test_a_record_of_compiled_kernels_is_a_baseline_without_a_gpu(
    more: dict[str, int], quantity: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from attnproof.cli._app import build

    monkeypatch.chdir(tmp_path)
    for name, document in (("before.json", compile_record()), ("now.json", compile_record(**more))):
        Path(name).write_text(json.dumps(document), encoding="utf-8")
    assert 0 == CliRunner().invoke(build(), ["baseline", "save", "before.json"]).exit_code
    result = CliRunner().invoke(build(), ["baseline", "compare", "now.json", "--json", "found.json"])
    assert code == result.exit_code, result.output
    found = json.loads(Path("found.json").read_text())["results"]
    assert [quantity] * code == [row["quantity"] for row in found if row["verdict"] == "REGRESSED"]
    assert {"registers", "shared_bytes", "spills"} == {row["quantity"] for row in found}
    assert all(row["hard"] for row in found)


def test_the_committed_record_of_compiled_kernels_is_the_same_as_itself() -> None:
    path = Path(__file__).parents[2] / "results" / "compile" / "triton-3.9.json"
    record = baseline.read(path)
    found = baseline.compare(record, record)
    assert 3 * len(record["results"]) == len(found)
    assert {"SAME"} == {one.verdict for one in found}
