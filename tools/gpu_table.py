"""Tables of docs/09_gpu.md from the records of a device: ``python tools/gpu_table.py [results/h200]``.

A test holds the page to what this prints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HEAD_DIMS, MASKS = (64, 128, 256), ("full", "causal")
VARIANTS = ("window", "softcap", "alibi", "document")
Rows = list[dict[str, Any]]


def read(into: Path, name: str) -> Rows:
    """Results of one record."""
    found: Rows = json.loads((into / f"{name}.json").read_text(encoding="utf-8"))["results"]
    return found


def value(rows: Rows, what: str, **wanted: Any) -> float | None:
    """One figure of the one row that fits, if there is one."""
    found = [row[what] for row in rows if wanted.items() <= row.items()]
    return found[0] if found else None


def table(head: list[str], lines: Iterator[list[str]]) -> list[str]:
    """Markdown."""
    made = [line for line in lines if any(cell != "-" for cell in line[1:])]
    return [_line(head), _line(["---"] * len(head)), *map(_line, made), ""]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def ratios(rows: Rows, own: str, peer: str) -> list[str]:
    """Ours over a peer's, by pass, head dim and mask, against N."""
    lengths = sorted({row["N"] for row in rows if row["variant"] in MASKS})

    def cell(which: str, d: int, mask: str, n: int) -> str:
        at = {"pass": which, "D": d, "variant": mask, "N": n}
        ours, theirs = (value(rows, "tflops", candidate=name, **at) for name in (own, peer))
        return "-" if ours is None or theirs is None else f"{ours / theirs:.2f}"

    lines = (
        [f"{which}, D={d}, {mask}", *(cell(which, d, mask, n) for n in lengths)]
        for which in ("forward", "backward")
        for d in HEAD_DIMS
        for mask in MASKS
    )
    return table([f"`{own}` / {peer}", *(f"N={n}" for n in lengths)], lines)


def rates(rows: Rows, n: int = 8192) -> list[str]:
    """TFLOP/s of everyone at one length."""
    names = list(dict.fromkeys(row["candidate"] for row in rows))

    def cells(which: str, d: int, mask: str) -> list[str]:
        at = {"pass": which, "D": d, "variant": mask, "N": n}
        found = [value(rows, "tflops", candidate=name, **at) for name in names]
        return ["-" if x is None else f"{x:.0f}" for x in found]

    lines = (
        [f"{which}, D={d}, {mask}", *cells(which, d, mask)]
        for which in ("forward", "backward")
        for d in HEAD_DIMS
        for mask in (*MASKS, *VARIANTS)
    )
    return table([f"TFLOP/s, N={n}", *(name.replace("_", " ") for name in names)], lines)


def decode(rows: Rows) -> list[str]:
    """GB/s of keys and values."""
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    cells = sorted({(row["B"], row["N"]) for row in rows}, reverse=True)
    lines = (
        [f"B={b}, N={n}", *(f"{value(rows, 'GB/s', candidate=name, B=b, N=n):.0f}" for name in names)]
        for b, n in cells
    )
    return table(["decode, GB/s", *(name.replace("_", " ") for name in names)], lines)


def host(rows: Rows) -> list[str]:
    """Microseconds a call."""
    lines = (
        [
            row["candidate"],
            f"{row['us']:.1f}",
            "-"
            if row["us_in_graph"] == "nan"
            else f"{row['us_in_graph']:.1f}",  # records write NaN as a word
        ]
        for row in rows
    )
    return table(["N=128", "host, us", "in a graph, us"], lines)


def tables(into: Path) -> list[str]:
    """Every line of every table."""
    rows = read(into, "attention")
    pairs = (
        ("triton", "sdpa_flash"),
        ("triton", "flex"),
        ("hopper", "sdpa_cudnn"),
        ("hopper", "sdpa_flash_deterministic"),
    )
    return [
        *rates(rows),
        *(line for own, peer in pairs for line in ratios(rows, own, peer)),
        *decode(read(into, "decode")),
        *host(read(into, "host")),
    ]


if __name__ == "__main__":
    print("\n".join(tables(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results" / "h200")))
