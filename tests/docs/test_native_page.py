"""The page on the native backend: every figure of its table of speeds is one of the record."""

from __future__ import annotations

import importlib.util
import json
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
    record = json.loads((ROOT / "results" / "cpu" / "native.json").read_text(encoding="utf-8"))
    said = [
        line
        for line in (ROOT / "docs" / "08_native.md").read_text(encoding="utf-8").splitlines()
        if line.startswith(("| float", "| bfloat"))
    ]
    found = bench.bars(record["results"])
    assert [f"| {case} | {bar:.2f} | {ratio:.2f} |" for case, bar, ratio, _ in found] == said
    assert all(green for *_, green in found), "a time without a green verdict"
    assert not record["environment"]["dirty"]
