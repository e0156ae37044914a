"""The numbers behind the ledger's figures, as plain data: what is drawn is computed here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ShapeError, expected
from ..masks import EDGE, FULL, SKIP, causal
from . import documents, lds, tiles
from .documents import TUTORIAL_DEVICE
from .hardware import GIB, get
from .resources import STYLES, Job

CLASSES = {SKIP: "skip", EDGE: "edge", FULL: "full"}
LAYERS = 32


def data(record: dict[str, Any] | None = None) -> dict[str, Any]:
    """Data of every figure by name; the comparison with counters needs a record of `ledger --measure`."""
    out = {
        "tiling": tiling(),
        "growth": growth(),
        "intensity": intensity(),
        "planner": planner("h200"),
        "banks": banks(),
    }
    if record is not None:
        out["measured"] = measured(record)
    return out


def tiling(length: int = 1024, head_dim: int = 64, block: int = 128) -> dict[str, Any]:
    """How tiling cuts the square, what a causal mask skips, what lives where while a tile is computed."""
    found = causal().tiles(length, length, block, block)
    size, tile = 2, block * head_dim * 2
    row = length * head_dim * size
    return {
        "length": length,
        "block": block,
        "classes": [[CLASSES[int(kind)] for kind in line] for line in found.kinds],
        "kept": found.kept,
        "total": int(found.kinds.size),
        "memory": {"q": row, "k": row, "v": row, "out": row, "lse": 4 * length},
        "chip": {
            "q tile": tile,
            "k tile": tile,
            "v tile": tile,
            "s, p tile": 4 * block * block,
            "acc": 4 * block * head_dim,
            "m, l": 8 * block,
        },
        "never": 2 * length * length * size,
    }


def growth() -> dict[str, Any]:
    """Bytes moved by one head and bytes kept by 32 layers, against N."""
    lengths = [1 << power for power in range(9, 18)]
    moved = [documents.io_row(n) for n in lengths]
    kept = [documents.activation_row(n, layers=LAYERS) for n in lengths]
    return {
        "lengths": lengths,
        "naive": [row.naive_bytes for row in moved],
        "tiled": [row.flash_bytes for row in moved],
        "kept_naive": [LAYERS * row.eager_bytes for row in kept],
        "kept_linear": [LAYERS * row.linear_bytes for row in kept],
        "limit": 80 * GIB,
        "layers": LAYERS,
    }


def intensity() -> dict[str, Any]:
    """FLOP per byte of one head against N and the balance point; fine steps, as the tile loop is a saw."""
    _, block_k = documents.tile(documents.onchip_elements(get(TUTORIAL_DEVICE), "float16"), 64)
    teeth = {n + step for n in range(block_k, 1 << 15, block_k) for step in (0, 1)}
    lengths = sorted(teeth | {round(2 ** (power / 8)) for power in range(7 * 8, 15 * 8 + 1)})
    rows = [documents.io_row(n) for n in lengths]
    return {
        "lengths": lengths,
        "naive": [row.naive_intensity for row in rows],
        "tiled": [row.flash_intensity for row in rows],
        "balance": documents.balance(get(TUTORIAL_DEVICE), "float16"),
        "crossing": documents.first_compute_bound(),
    }


def planner(device: str, head_dim: int = 128) -> dict[str, Any]:
    """The planner's map: for each block size the best time over warps and stages, or why nothing fits."""
    found = tiles.plan(get(device), Job(head_dim=head_dim, value_dim=head_dim), STYLES["wgmma"])
    sides_q = sorted({c.tile.block_q for c in found.candidates})
    sides_k = sorted({c.tile.block_k for c in found.candidates})
    best = found.fitting[0].seconds
    cells: list[list[dict[str, Any]]] = []
    for block_q in sides_q:
        line: list[dict[str, Any]] = []
        for block_k in sides_k:
            here = [c for c in found.candidates if (c.tile.block_q, c.tile.block_k) == (block_q, block_k)]
            line.append(_cell(here, best))
        cells.append(line)
    return {
        "device": get(device).title,
        "head_dim": head_dim,
        "style": found.style.name,
        "block_q": sides_q,
        "block_k": sides_k,
        "cells": cells,
    }


def _cell(here: Sequence[tiles.Candidate], best: float) -> dict[str, Any]:
    """One block size: its best time relative to the best of all, or why no variant of it fits."""
    fitting = [c for c in here if not c.refused]
    if fitting:
        first = min(fitting, key=lambda c: c.seconds)
        return {
            "ratio": first.seconds / best,
            "warps": first.tile.warps,
            "stages": first.tile.stages,
            "why": "",
        }
    # idle warps can be cured by fewer warps; what remains is the reason that counts
    reasons = [c.refused.split(":")[0] for c in here if "idle" not in c.refused]
    return {"ratio": None, "warps": 0, "stages": 0, "why": reasons[0] if reasons else "idle warps"}


def banks() -> dict[str, Any]:
    """Dwords that each bank must give, by phase, for a column of 64-half rows: plain, padded, swizzled."""
    row, wave, width = 128, 64, 16
    advice = lds.padding_advice(row, width, wave)
    panels = {
        "plain": lds.column(row, wave),
        "padded": lds.column(row + advice.padding, wave),
        "swizzled": lds.swizzled_column(row, wave, width),
    }
    return {
        "row": row,
        "width": width,
        "wave": wave,
        "padding": advice.padding,
        "price": advice.price,
        "panels": {
            name: {"loads": found.loads.tolist(), "clocks": found.clocks}
            for name, found in ((name, lds.conflicts(at, width)) for name, at in panels.items())
        },
        "padding_clocks": {str(size): padding_clocks(row, size, wave) for size in lds.WIDTHS},
    }


def padding_clocks(row: int, width: int, wave: int) -> dict[str, list[float]]:
    """Clocks per access against padding, relative to the least possible, for one width."""
    advice = lds.padding_advice(row, width, wave, limit=64)
    least = min(advice.clocks.values())
    return {"padding": list(advice.clocks), "ratio": [count / least for count in advice.clocks.values()]}


def measured(record: dict[str, Any]) -> dict[str, Any]:
    """Counted and predicted memory bytes of every call of a record, with the size of the cache."""
    results = [result for result in record.get("results", []) if "counted" in result]
    if not results:
        raise ShapeError(expected("record", "results of `ledger --measure`", f"kind {record.get('kind')!r}"))
    points = [
        {
            "implementation": result["candidate"],
            "direction": result["direction"],
            "counted": result["counted"]["read"] + result["counted"]["written"],
            "predicted": result["predicted"]["read"] + result["predicted"]["written"],
            "working_set": result["working_set"],
            "holds": result["status"] == "PASS",
        }
        for result in results
    ]
    device = record.get("environment", {}).get("device", "")
    return {"points": points, "l2": results[0]["l2_size"], "device": device}
