"""The planner against tiles that were timed on an H200: `results/h200/tune.json`, written by `tools/gpu_tune.py`."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import NamedTuple

import pytest

from attnproof.ledger import tiles
from attnproof.ledger.hardware import get
from attnproof.ledger.resources import STYLES, Job, Tile
from attnproof.ledger.tiles import Candidate, candidate, plan

ROOT = Path(__file__).parents[2]
BAR = 1.1


class Cell(NamedTuple):
    """What the record timed tiles for."""

    kernel: str
    d: int
    causal: bool
    length: int

    @property
    def job(self) -> Job:
        """B * N = 16384 tokens and H * D = 2048, as the record's protocol says."""
        heads = 2048 // self.d * (16384 // self.length)
        return Job("bfloat16", self.d, self.d, self.kernel, self.length, heads, self.causal)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.kernel} D={self.d} {'causal' if self.causal else 'full'} N={self.length}"


def read() -> dict[Cell, dict[Tile, float]]:
    """Milliseconds of every tile that ran."""
    cells: dict[Cell, dict[Tile, float]] = {}
    record = json.loads((ROOT / "results" / "h200" / "tune.json").read_text(encoding="utf-8"))
    for row in record["results"]:
        c = row["config"]
        at = Tile(c["block_m"], c["block_n"], c["num_warps"], c["num_stages"], c["maxnreg"])
        if row["ms"] is not None:
            cells.setdefault(Cell(row["pass"], row["D"], row["causal"], row["N"]), {})[at] = row["ms"]
    return cells


TIMES = read()
# first choices that the record did not time, each named in docs/06_numbers: misses until it does
UNTIMED = {Cell("dq", 256, True, 8192): Tile(128, 32, 8, 3)}


def first(cell: Cell) -> Tile:
    """The planner's choice for the Triton kernels."""
    best = plan(get("h200"), cell.job, STYLES["wgmma"]).best
    assert best is not None
    return best.tile


def test_the_record_holds_every_cell_of_the_bar() -> None:
    wanted = {
        Cell(k, d, c, 8192) for k in ("forward", "dkdv", "dq") for d in (64, 128, 256) for c in (False, True)
    }
    assert wanted <= set(TIMES)


@pytest.mark.parametrize("share", [0.8, 1.2])
@pytest.mark.parametrize("name", ["ARRIVAL", "FILL", "SPILLED", "ONLINE"])
def test_no_first_choice_hangs_on_one_constant(monkeypatch, name, share) -> None:
    """Constants that fit one record to the last digit would be worth nothing on the next."""
    monkeypatch.setattr(tiles, name, getattr(tiles, name) * share)
    for cell, times in TIMES.items():
        chosen = first(cell)
        if chosen != UNTIMED.get(cell):
            assert times[chosen] <= BAR * min(times.values())


@pytest.mark.parametrize("cell", TIMES, ids=str)
def test_the_first_choice_is_within_a_tenth_of_the_best_timed_tile(cell) -> None:
    """A choice that was not timed is a miss, and a miss has to be known; one that was timed has no excuse."""
    chosen, times = first(cell), TIMES[cell]
    if chosen in times:
        assert times[chosen] <= BAR * min(times.values())
    else:
        assert chosen == UNTIMED.get(cell)


def test_the_numbers_page_names_every_choice_that_was_not_timed() -> None:
    page = " ".join((ROOT / "docs" / "06_numbers.md").read_text(encoding="utf-8").split())
    for cell, at in UNTIMED.items():
        if at not in TIMES[cell]:
            assert f"{cell.kernel}, D = {cell.d}, {'causal' if cell.causal else 'full'}: {at}" in page


@pytest.mark.parametrize("cell", [cell for cell in TIMES if cell.length == 8192], ids=str)
def test_the_table_of_the_numbers_page_is_what_planner_and_record_say(cell) -> None:
    name = {"dkdv": "dk, dv"}.get(cell.kernel, cell.kernel)
    page = (ROOT / "docs" / "06_numbers.md").read_text(encoding="utf-8")
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {name} | {cell.d} |"))
    parts = [part.strip() for part in line.split("|")]
    at, ratio = parts[5:7] if cell.causal else parts[3:5]
    chosen, times = first(cell), TIMES[cell]
    assert at == str(chosen)
    if chosen in times:
        assert float(ratio) == pytest.approx(times[chosen] / min(times.values()), abs=0.02)
    else:
        assert ratio == "not timed"


def scored(cell: Cell) -> list[tuple[Candidate, float]]:
    """(candidate, measured milliseconds) of the timed tiles that the planner takes for possible."""
    rows = ((candidate(get("h200"), cell.job, STYLES["wgmma"], at), ms) for at, ms in TIMES[cell].items())
    return [(found, ms) for found, ms in rows if not found.refused]


# four or five tiles say little about a ranking; the first choice is what counts there
MANY = [cell for cell in TIMES if len(scored(cell)) > 9]


def test_there_are_cells_to_rank() -> None:
    assert len(MANY) >= 6


@pytest.mark.parametrize("cell", MANY, ids=str)
def test_tiles_are_ranked_much_as_they_measured(cell) -> None:
    """Spearman's coefficient; a model that has the wrong reasons ranks by chance below the first few."""
    rows = scored(cell)
    ranks = [
        {value: at for at, value in enumerate(sorted(column))}
        for column in ([found.seconds for found, _ in rows], [ms for _, ms in rows])
    ]
    pairs = [(ranks[0][found.seconds], ranks[1][ms]) for found, ms in rows]
    assert statistics.correlation(*map(list, zip(*pairs, strict=True))) > 0.6


def test_what_is_refused_was_not_fast() -> None:
    """A tile that the planner calls impossible may run all the same, but never within the bar."""
    fast = [
        (str(cell), str(at))
        for cell, times in TIMES.items()
        for at, ms in times.items()
        if ms <= BAR * min(times.values()) and candidate(get("h200"), cell.job, STYLES["wgmma"], at).refused
    ]
    assert fast == []


def test_predicted_times_are_close_to_the_measured_ones() -> None:
    """Half of all tiles within a tenth, at lengths where starting a block does not count."""
    errors = [
        abs(math.log(found.seconds * 1e3 / ms))
        for cell in TIMES
        if cell.length > 4096
        for found, ms in scored(cell)
    ]
    assert statistics.median(errors) < math.log(BAR)
