"""The page on the native backend: every figure of its tables of speeds is one of a record."""

from __future__ import annotations

import importlib.util
import json
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_speeds_is_what_the_record_says() -> None:
    """A number that is typed twice is soon two numbers."""
    pytest.importorskip("torch")
    specification = importlib.util.spec_from_file_location("bench_native", ROOT / "tools" / "bench_native.py")
    assert specification is not None and specification.loader is not None
    bench = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(bench)
    said = [
        line
        for line in (ROOT / "docs" / "08_native.md").read_text(encoding="utf-8").splitlines()
        if line.startswith(("| float", "| bfloat"))
    ]
    wanted = []
    for name in ("native", "native-avx512"):
        record = json.loads((ROOT / "results" / "cpu" / f"{name}.json").read_text(encoding="utf-8"))
        found = bench.bars(record["results"])
        assert all(green for *_, green in found), "a time without a green verdict"
        assert not record["environment"]["dirty"]
        wanted += [f"| {case} | {bar:.2f} | {ratio:.2f} |" for case, bar, ratio, _ in found]
    assert wanted == said


def ratios(name: str) -> dict[str, float]:
    """SDPA's median over ours for each case of a record of `attnproof measure`."""
    record = json.loads((ROOT / "results" / "cpu" / f"{name}.json").read_text(encoding="utf-8"))
    assert not record["environment"]["dirty"]
    medians: dict[str, dict[str, float]] = {}
    for row in record["results"]:
        assert "PASS" == row["verdict"]["status"]
        medians.setdefault(row["case"], {})[row["candidate"]] = statistics.median(row["samples"])
    return {case: of["sdpa:flash"] / of["native"] for case, of in medians.items()}


def test_the_table_of_short_calls_is_what_the_records_say() -> None:
    own, now = ratios("measure-short-own"), ratios("measure-short")
    page = (ROOT / "docs" / "08_native.md").read_text(encoding="utf-8").splitlines()
    for n in (128, 256, 512):
        for mask, suffix in (("full", ""), ("causal", " causal")):
            forward, backward = (f"{run} B1 H4 N{n} D64 float32{suffix}" for run in ("forward", "backward"))
            cells = (own[forward], now[forward], own[backward], now[backward])
            assert f"| {n}, {mask} | {' | '.join(f'{x:.2f}' for x in cells)} |" in page
