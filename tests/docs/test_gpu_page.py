"""The page on NVIDIA GPUs: its tables are what the records say, and the records are of clean trees."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
H200 = ROOT / "results" / "h200"


def tables() -> list[str]:
    specification = importlib.util.spec_from_file_location("gpu_table", ROOT / "tools" / "gpu_table.py")
    assert specification is not None and specification.loader is not None
    made = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(made)
    found: list[str] = made.tables(H200)
    return found


def test_the_tables_are_what_the_records_say() -> None:
    """A number that is typed twice is soon two numbers."""
    page = (ROOT / "docs" / "09_gpu.md").read_text(encoding="utf-8")
    between = page.split("<!-- tables -->\n")[1].split("<!-- end of tables -->")[0]
    assert "\n".join(tables()).strip() == between.strip()


@pytest.mark.parametrize("name", ["attention", "decode", "host"])
def test_the_records_are_of_a_commit_whose_stages_passed(name: str) -> None:
    """No time without a verdict for the same code."""
    record, stages = (
        json.loads((H200 / f"{at}.json").read_text(encoding="utf-8")) for at in (name, "stages")
    )
    environment: dict[str, Any] = record["environment"]
    assert not environment["dirty"]
    passed = {
        row["stage"]
        for row in stages["results"]
        if row["passed"] and not row["dirty"] and row["commit"] == environment["commit"]
    }
    assert {"parity", "cases"} <= passed
