"""The commands ledger, plan and figures, from the outside."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from attnproof.cli import _app
from attnproof.ledger import profilers, workload
from attnproof.verify import records

RUN = CliRunner()


def call(*arguments: str):
    return RUN.invoke(_app.build(), list(arguments), env={"COLUMNS": "200"})


def test_ledger_shows_the_forms_of_a_call_and_writes_them_as_json(tmp_path) -> None:
    path = tmp_path / "out.json"
    result = call("ledger", "--hardware", "h200", "--n", "4096", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "queries outer" in result.output
    (entry,) = json.loads(path.read_text())["calls"]
    assert [form["form"] for form in entry["forms"]] == ["eager", "keys outer", "queries outer"]
    assert entry["forms"][0]["limits"] == ["memory"]
    assert entry["forms"][2]["sentence"] == "matrix products and exponentials"


def test_ledger_backward_also_shows_what_is_kept(tmp_path) -> None:
    path = tmp_path / "out.json"
    arguments = (
        "--hardware",
        "a100-40gb",
        "--n",
        "1024",
        "--heads",
        "4",
        "--causal",
        "--direction",
        "backward",
    )
    result = call("ledger", *arguments, "--json", str(path))
    assert result.exit_code == 0, result.output
    (entry,) = json.loads(path.read_text())["calls"]
    assert [kept["implementation"] for kept in entry["kept"]] == ["eager", "sdpa", "ours", "checkpoint"]
    assert entry["pairs"] == 4 * 1024 * 1025 // 2


def test_a_few_queries_are_shown_as_a_decode_with_splits() -> None:
    result = call("ledger", "--hardware", "h200", "--n", "8192", "--m", "1", "--kv-heads", "8")
    assert result.exit_code == 0, result.output
    assert "decode, 8 splits" in result.output


def test_the_documents_reports_are_reproduced(tmp_path) -> None:
    path = tmp_path / "out.json"
    result = call("ledger", "--documents", "--json", str(path))
    assert result.exit_code == 0, result.output
    for said in (
        "130 MiB",
        "17.8 MiB",
        "7.3x",
        "31.5 FLOP/byte",
        "201 FLOP/byte",
        "2.39 GiB",
        "4.54 TiB",
        "40 KiB",
    ):
        assert said in result.output
    assert len(json.loads(path.read_text())["documents"]) == 3


def test_the_device_table_marks_what_is_in_doubt() -> None:
    result = call("ledger", "--devices")
    assert result.exit_code == 0, result.output
    assert "157.3?" in result.output


def test_the_explorer_is_written(tmp_path) -> None:
    path = tmp_path / "page.html"
    result = call("ledger", "--explore", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_plan_lists_tiles_and_reasons(tmp_path) -> None:
    path = tmp_path / "out.json"
    result = call("plan", "--hardware", "a100-40gb", "--top", "3", "--refused", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "B_r=64, B_c=384" in result.output
    assert "it would spill" in result.output
    data = json.loads(path.read_text())
    assert data["tutorial"] == {"block_q": 64, "block_k": 384}
    assert all(each["refused"] for each in data["refused"])


def test_plan_for_an_mi50_names_the_engineers_budget() -> None:
    result = call("plan", "--hardware", "mi50")
    assert result.exit_code == 0, result.output
    assert "takes 40.0 KiB (q 16.0 KiB + k 8.0 KiB + v 8.0 KiB + next 8.0 KiB)" in " ".join(
        result.output.split()
    )


def test_plan_without_a_fitting_tile_says_so_and_fails() -> None:
    result = call("plan", "--hardware", "t4", "--d", "512")
    assert result.exit_code == 1
    assert "nothing fits; nearest is" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ledger", "--hardware", "mi51"), "hardware: expected one of"),
        (("plan", "--hardware", "mi50", "--style", "x"), "--style: expected one of"),
        (
            ("ledger", "--hardware", "h200", "--heads", "3", "--kv-heads", "2"),
            "heads: expected a multiple of 2",
        ),
    ],
)
def test_requests_that_make_no_sense_are_one_line(arguments, message) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_figures_are_drawn_into_a_folder(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    result = call("figures", "--out", str(tmp_path / "f"), "--only", "tiling")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "f").iterdir()) == ["tiling.png", "tiling.svg"]


NCU = (
    '"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"\n'
    '"","","byte","byte"\n"0","spin_kernel","0","0"\n"1","k","{read}","0"\n"2","spin_kernel","0","0"\n'
)


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """A stand-in for ncu that lets the first case of the plan run and counts what the test says."""

    def install(read: int) -> None:
        path = tmp_path / "ncu"
        path.write_text(
            f"#!{sys.executable}\nimport json, pathlib, sys\na = sys.argv\n"
            f"pathlib.Path(a[a.index('--log-file') + 1]).write_text({NCU.format(read=read)!r})\n"
            "plan = json.loads(pathlib.Path(a[-2]).read_text())\n"
            "done = [dict(c, skipped='no room' if n else None) for n, c in enumerate(plan)]\n"
            "pathlib.Path(a[-1]).write_text(json.dumps(done))\n"
        )
        path.chmod(0o755)
        monkeypatch.setattr(profilers, "find_tool", lambda: str(path))
        monkeypatch.setattr(workload, "implementations", lambda: ["sdpa"])
        monkeypatch.setattr(records, "_device_name", lambda device: f"a {device} device")

    return install


def test_a_record_is_held_against_the_model_again(ncu, tmp_path) -> None:
    """The counters and where they come from stay; the prediction is made anew."""
    ncu(3 * 1024 * 64 * 2)
    path, again = tmp_path / "record.json", tmp_path / "again.json"
    call("ledger", "--measure", "--hardware", "h200", "--n", "1024", "--json", str(path))
    record = json.loads(path.read_text())
    record["results"][0]["predicted"]["read"] = 1
    path.write_text(json.dumps(record))
    result = call("ledger", "--against", str(path), "--json", str(again))
    assert result.exit_code == 0, result.output
    written = json.loads(again.read_text())
    assert (record["created"], record["environment"]) == (written["created"], written["environment"])
    assert 3 * 1024 * 64 * 2 == written["results"][0]["predicted"]["read"]
    assert record["results"][-1] == written["results"][-1]  # what was skipped stays skipped


def test_other_records_have_no_counters(tmp_path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"kind": "verify", "results": []}))
    result = call("ledger", "--hardware", "h200", "--against", str(path))
    assert (2, True) == (
        result.exit_code,
        "expected one of `ledger --measure`, got kind 'verify'" in result.output,
    )


def test_measure_writes_a_record_with_counters_beside_predictions(ncu, tmp_path) -> None:
    ncu(3 * 1024 * 64 * 2)  # q, k and v of one head once
    path = tmp_path / "record.json"
    result = call("ledger", "--measure", "--hardware", "h200", "--n", "1024", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "skipped sdpa backward float16 N=1024 H=1 D=64: no room" in result.output
    record = json.loads(path.read_text())
    assert (record["schema"], record["kind"]) == ("attnproof/record/1", "ledger")
    assert record["environment"]["device"] == "a cuda device"
    assert record["results"][0]["ratio"] == 1.0
    assert record["results"][0]["status"] == "PASS"
    assert (record["results"][-1]["status"], record["results"][-1]["reason"]) == ("SKIP", "no room")
    assert record["protocol"]["tool"] == "ncu"


def test_measure_fails_when_a_count_is_far_from_its_prediction(ncu) -> None:
    ncu(10**9)
    result = call("ledger", "--measure", "--hardware", "h200", "--n", "1024")
    assert result.exit_code == 1
    assert "NO (limit 2)" in result.output
