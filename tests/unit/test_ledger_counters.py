"""Profiler output read, cut into calls and compared; the fixtures follow the documented formats, by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from attnproof.ledger import counters, profilers, workload
from attnproof.ledger.counters import Counted, CounterError
from attnproof.ledger.hardware import get
from attnproof.ledger.traffic import Call
from attnproof.ledger.workload import Case

H200 = get("h200")

NCU_HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
    '"Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def ncu_lines(
    identity: int, name: str, read: str, written: str, sectors: str, unit: str = "byte"
) -> list[str]:
    """One kernel of `ncu --csv --metrics ...`: one line per metric."""
    head = f'"{identity}","77","python","127.0.0.1","{name}","1","7","(128, 1, 1)","(32, 1, 1)","0","9.0"'
    section = '"Command line profiler metrics"'
    return [
        f'{head},{section},"dram__bytes_read.sum","{unit}","{read}"',
        f'{head},{section},"dram__bytes_write.sum","{unit}","{written}"',
        f'{head},{section},"gpu__time_duration.sum","nsecond","1,500"',
        f'{head},{section},"lts__t_sectors_srcunit_tex.sum","sector","{sectors}"',
    ]


def ncu(*kernels: tuple[str, str, str, str]) -> str:
    lines = ["==PROF== Connected to process 77 (/usr/bin/python3)", "eager forward N=64: ok", NCU_HEADER]
    for number, kernel in enumerate(kernels):
        lines += ncu_lines(number, *kernel)
    return "\n".join([*lines, "==PROF== Disconnected from process 77"])


MARK = ("spin_kernel(long)", "0", "0", "0")


def test_ncu_lines_become_kernels_in_launch_order() -> None:
    text = ncu(("void gemm<float, 128>(T1, T2)", "1,048,576", "2,048", "65,536"), ("softmax", "3", "4", "1"))
    assert counters.parse_ncu(text) == [
        Counted("void gemm<float, 128>(T1, T2)", 1048576.0, 2048.0, 65536 * 32.0, pytest.approx(1.5e-6)),
        Counted("softmax", 3.0, 4.0, 32.0, pytest.approx(1.5e-6)),
    ]


def test_ncu_units_are_honoured_when_base_units_were_not_asked_for() -> None:
    text = "\n".join([NCU_HEADER, *ncu_lines(0, "k", "1.5", "2", "1", unit="Mbyte")])
    (kernel,) = counters.parse_ncu(text)
    assert (kernel.read, kernel.written) == (1.5e6, 2e6)


def test_the_raw_page_of_ncu_is_read_too() -> None:
    """One line per kernel, a column per metric, and a second header line with the units."""
    text = (
        '"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","lts__t_sectors_srcunit_tex.sum"\n'
        '"","","Kbyte","byte","sector"\n'
        '"0","k","2","100","10"\n'
    )
    assert counters.parse_ncu(text) == [Counted("k", 2000.0, 100.0, 320.0, None)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", "keeps counters for administrators"),
        ("==WARNING== No kernels were profiled.", "did not reach a call"),
        ("", "expected a table of counters, got nothing"),
        (
            NCU_HEADER
            + '\n"0","1","p","h","k","1","7","","","0","9.0","s","dram__bytes_read.sum","byte","n/a"',
            "n/a",
        ),
        (
            NCU_HEADER
            + '\n"0","1","p","h","k","1","7","","","0","9.0","s","dram__bytes_read.sum","byte","1"',
            "write",
        ),
        (
            NCU_HEADER + '\n"0","1","p","h","k","1","7","","","0","9.0","s","x","furlong","1"',
            "unit 'furlong'",
        ),
    ],
)
def test_ncu_output_without_usable_counters_says_why(text, message) -> None:
    with pytest.raises(CounterError, match=message):
        counters.parse_ncu(text)


ROCPROF3 = (
    '"Correlation_Id","Dispatch_Id","Agent_Id","Queue_Id","Process_Id","Thread_Id","Grid_Size","Kernel_Id",'
    '"Kernel_Name","Workgroup_Size","LDS_Block_Size","Scratch_Size","VGPR_Count","Accum_VGPR_Count","SGPR_Count",'
    '"Counter_Name","Counter_Value","Start_Timestamp","End_Timestamp"\n'
    '1,2,"Agent 1",1,9,9,64,3,"second",64,0,0,8,0,16,"FETCH_SIZE",4.0,1,2\n'
    '1,2,"Agent 1",1,9,9,64,3,"second",64,0,0,8,0,16,"WRITE_SIZE",1.0,1,2\n'
    '1,1,"Agent 1",1,9,9,64,3,"first(float*, int)",64,0,0,8,0,16,"FETCH_SIZE",10.5,1,2\n'
    '1,1,"Agent 1",1,9,9,64,3,"first(float*, int)",64,0,0,8,0,16,"WRITE_SIZE",2,1,2\n'
    '1,1,"Agent 1",1,9,9,64,3,"first(float*, int)",64,0,0,8,0,16,"WRITE_SIZE",3,1,2\n'
)
ROCPROF1 = (
    "Index,KernelName,gpu-id,queue-id,queue-index,pid,tid,grd,wgr,lds,scr,arch_vgpr,accum_vgpr,sgpr,wave_size,"
    "sig,obj,FETCH_SIZE,WRITE_SIZE\n"
    '0,"first(float*, int) [clone .kd]",0,0,0,9,9,64,64,0,0,8,0,16,64,0x0,0x7f,10.5,5\n'
)


def test_rocprofv3_lines_become_kernels_and_instances_of_a_counter_add_up() -> None:
    assert counters.parse_rocprof(ROCPROF3) == [
        Counted("first(float*, int)", 10.5 * 1024, 5 * 1024),
        Counted("second", 4 * 1024, 1024),
    ]


def test_the_older_rocprof_is_read_too() -> None:
    assert counters.parse_rocprof(ROCPROF1) == [Counted("first(float*, int) [clone .kd]", 10752.0, 5120.0)]


def test_rocprof_without_its_counters_says_so() -> None:
    with pytest.raises(CounterError, match="expected the counters WRITE_SIZE"):
        counters.parse_rocprof(ROCPROF1.replace(",WRITE_SIZE", ",OTHER"))


def test_kernels_are_cut_at_the_markers_and_what_lies_outside_is_dropped() -> None:
    names = ["warm", "spin_kernel", "a", "b", "spin_kernel", "between", "spin_kernel", "c", "spin_kernel"]
    parts = counters.segments([Counted(name, 0, 0) for name in names], 2)
    assert [[kernel.name for kernel in part] for part in parts] == [["a", "b"], ["c"]]


def test_a_lost_marker_is_an_error_and_not_a_shifted_table() -> None:
    """One call attributed to the next would look like a finding."""
    with pytest.raises(CounterError, match="expected 4 markers for 2 calls, got 3"):
        counters.segments([Counted("spin_kernel", 0, 0)] * 3, 2)


CASE = Case("eager", "forward", 4096, 32, 64)
CALL = Call.dense(4096, heads=32)


def test_counters_that_match_the_first_look_hold_within_ten_percent() -> None:
    """The known counts: 1047 MB of s written, 1091 MB of p and v read; the rest as the model has it."""
    kernels = [
        Counted("scale", 16.8e6, 0.0),
        Counted("gemm", 16.8e6, 1047e6),
        Counted("softmax", 1074e6, 1090e6),
        Counted("gemm", 1091e6, 47e6),
    ]
    compared = counters.compare("eager", "forward", CALL, kernels, H200)
    assert compared.limit(H200) == 1.1
    assert compared.holds(H200)
    assert compared.working_set == 2 * 32 * 4096 * 4096 * 2 + 5 * 32 * 4096 * 64 * 2


@pytest.mark.parametrize("ratio", [0.5, 1.3])
def test_a_miss_far_above_the_l2_does_not_hold(ratio) -> None:
    predicted = counters.compare("eager", "forward", CALL, [], H200).predicted.total
    compared = counters.compare("eager", "forward", CALL, [Counted("k", ratio * predicted, 0)], H200)
    assert not compared.holds(H200)
    assert compared.ratio == pytest.approx(ratio)


@pytest.mark.parametrize(("ratio", "holds"), [(0.55, True), (1.9, True), (0.45, False), (2.1, False)])
def test_near_the_l2_a_factor_of_two_is_promised(ratio, holds) -> None:
    call = Call.dense(4096)
    predicted = counters.compare("eager", "forward", call, [], H200).predicted.total
    compared = counters.compare("eager", "forward", call, [Counted("k", ratio * predicted, 0)], H200)
    assert compared.limit(H200) == 2.0
    assert compared.holds(H200) == holds


def test_a_result_of_a_record_is_plain_json_with_both_sides() -> None:
    compared = counters.compare("triton", "backward", CALL, [Counted("k", 1e8, 2e8, 3e9, 1e-3)], H200)
    result = json.loads(json.dumps(compared.as_result(H200, str(CASE), vars(CASE))))
    assert result["counted"] == {"read": 1e8, "written": 2e8, "l2": 3e9}
    assert result["predicted"]["requests"] == compared.requests
    assert (result["candidate"], result["case"]) == ("triton", "forward float16 N=4096 H=32 D=64")
    assert [k["kernel"] for k in result["predicted_kernels"]] == ["delta", "dk, dv", "dq"]


def test_the_library_backward_is_predicted_with_atomics_and_ours_with_two_sweeps() -> None:
    names = [counters.account_of(who, "backward", CALL).name for who in ("eager", "sdpa", "triton")]
    assert names == ["eager backward", "one sweep, atomic", "two sweeps"]


# the runner


def test_ncu_leaves_clocks_and_caches_alone_and_replays_the_whole_process() -> None:
    line = profilers.command("/opt/ncu", Path("plan.json"), Path("manifest.json"), Path("out.csv"))
    assert line[:2] == ["/opt/ncu", "--csv"]
    for option, value in (
        ("--clock-control", "none"),
        ("--cache-control", "none"),
        ("--replay-mode", "application"),
    ):
        assert line[line.index(option) + 1] == value
    assert "dram__bytes_read.sum" in line[line.index("--metrics") + 1]
    assert line[-4:] == ["-m", "attnproof.ledger.workload", "plan.json", "manifest.json"]


def test_rocprofv3_asks_for_its_counters_and_csv(tmp_path) -> None:
    line = profilers.command("rocprofv3", Path("plan.json"), Path("manifest.json"), tmp_path / "out.csv")
    assert line[1:4] == ["--pmc", "FETCH_SIZE", "WRITE_SIZE"]
    assert line[line.index("--") + 1] == sys.executable


def test_the_older_rocprof_gets_its_counters_in_a_file(tmp_path) -> None:
    line = profilers.command("rocprof", Path("plan.json"), Path("manifest.json"), tmp_path / "out.csv")
    assert (tmp_path / "counters.txt").read_text() == "pmc: FETCH_SIZE WRITE_SIZE\n"
    assert line[1:3] == ["-i", str(tmp_path / "counters.txt")]


def fake_ncu(tmp_path, table: str, skipped: str | None = None) -> str:
    """A stand-in for ncu that writes what the real one would, and lets the workload's manifest stand."""
    path = tmp_path / "ncu"
    body = (
        f"#!{sys.executable}\nimport json, pathlib, sys\n"
        "args = sys.argv\n"
        f"pathlib.Path(args[args.index('--log-file') + 1]).write_text({table!r})\n"
        "plan = json.loads(pathlib.Path(args[-2]).read_text())\n"
        f"done = [dict(case, skipped={skipped!r} if n == 1 else None) for n, case in enumerate(plan)]\n"
        "pathlib.Path(args[-1]).write_text(json.dumps(done))\n"
    )
    path.write_text(body)
    path.chmod(0o755)
    return str(path)


def test_a_run_joins_manifest_table_and_prediction(tmp_path) -> None:
    tool = fake_ncu(tmp_path, ncu(MARK, ("gemm", "10", "20", "1"), MARK), skipped="out of memory")
    measured = profilers.measure([CASE, Case("sdpa", "forward", 64, 1, 64)], H200, tool=tool)
    ((case, compared),) = measured.compared
    assert case == CASE
    assert (compared.read, compared.written, compared.l2) == (10, 20, 32)
    assert measured.skipped == ((Case("sdpa", "forward", 64, 1, 64), "out of memory"),)
    assert measured.tool == "ncu"
    assert not any("/" in part for part in measured.command)


def test_a_profiler_that_fails_is_explained_and_not_a_traceback(tmp_path) -> None:
    tool = tmp_path / "ncu"
    tool.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM'\nexit 1\n")
    tool.chmod(0o755)
    with pytest.raises(CounterError, match="run as root"):
        profilers.measure([CASE], H200, tool=str(tool))


def test_without_a_profiler_the_run_says_what_it_needs(monkeypatch) -> None:
    monkeypatch.setattr(profilers.shutil, "which", lambda _: None)
    monkeypatch.setattr(profilers.Path, "glob", lambda *_: iter(()))
    with pytest.raises(CounterError, match="expected ncu"):
        profilers.find_tool()


def test_the_grid_covers_what_the_ledger_promises() -> None:
    grid = profilers.cases(["eager", "sdpa"])
    assert {case.length for case in grid} == {1024, 2048, 4096, 8192, 16384}
    assert {case.heads for case in grid} == {1, 32}
    assert {case.head_dim for case in grid} == {64, 128}
    assert {case.direction for case in grid} == {"forward", "backward"}
    assert len(grid) == 5 * 2 * 2 * 2 * 2


@pytest.mark.parametrize("causal", [False, True])
def test_the_profiled_eager_form_is_attention(causal) -> None:
    """Counting the kernels of something else would prove nothing about attention."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 2, 33, 16, dtype=torch.float64) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(workload.eager(q, k, v, causal), expected)
    torch.testing.assert_close(workload.implementation("sdpa")(q, k, v, causal), expected)
    torch.testing.assert_close(workload.implementation("streaming")(q, k, v, causal), expected)


def test_the_model_holds_against_the_counters_of_an_h200() -> None:
    """Every eager call of the record and every one of ours up to where the replay takes long: all of those near the L2."""
    record = json.loads((Path(__file__).parents[2] / "results" / "h200" / "ledger.json").read_text())
    small = [
        row
        for row in record["results"]
        if row["candidate"] != "sdpa" and row["shape"]["heads"] * row["shape"]["length"] ** 2 <= 2**27
    ]
    assert len(small) > 40
    found = profilers.again(record | {"results": small}, H200).compared
    assert [] == [str(case) for case, beside in found if not beside.holds(H200)]
