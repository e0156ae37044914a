"""Calls of the Hopper backend: every configuration, option and kind of edge, at sizes around its tiles."""

from __future__ import annotations

from itertools import product
from typing import Any

from tests.parity.problems import Case

WIDTHS = (64, 128, 256)
# around 64 query rows of a warpgroup, 128 and 192 of a tile, 64 and 128 keys; more queries than keys and the reverse
SIZES = (
    (1, 1),
    (1, 128),
    (7, 130),
    (64, 64),
    (128, 128),
    (127, 129),
    (200, 333),
    (333, 200),
    (256, 1000),
    (1000, 1000),
)
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top left": {"causal": True, "align": "top_left"},
    "window": {"window": (70, 20)},
    "left": {"window": (200, -1)},
    "slide": {"causal": True, "window": (127, 0)},
    "dead rows": {"causal": True, "window": (50, 0)},
}
SCORES: dict[str, dict[str, Any]] = {
    "softcap": {"options": {"softcap": 2.0}},
    "alibi": {"alibi": "H"},
    "alibi of each sequence": {"alibi": "BH", "options": {"causal": True}},
    "sink": {"sink": True},
    "sink in float32": {"sink": True, "sink_dtype": "float32", "options": {"causal": True}},
    "negative scale": {"options": {"scale": -0.11}},
    "scale zero": {"options": {"scale": 0.0, "causal": True}},
    "all": {"alibi": "H", "sink": True, "options": {"causal": True, "window": (150, 0), "softcap": 2.0}},
}
MIXED = (
    (192, 128),
    (64, 128),
    (128, 64),
    (64, 256),
    (256, 64),
    (80, 72),
    (40, 8),
    (8, 16),
    (96, 96),
    (160, 200),
)
HEADS: dict[str, Any] = {"B": 2, "H": 4, "Hkv": 2}


def dense(name: str, m: int, n: int, d: int, dv: int = 0, dtype: str = "bfloat16", **more: Any) -> Case:
    """A case with two sequences, four heads on two, unless said otherwise."""
    sizes = {"M": m, "N": n, "D": d, "Dv": dv or d}
    width = f"D {d}" + (f" and {dv}" if dv else "")
    return Case(f"{name}, {m}x{n}, {width}, {dtype}", dtype=dtype, **HEADS | sizes | more)


def many_tiles(d: int, causal: bool) -> Case:
    """More tiles than multiprocessors: programs that stay draw several."""
    more = {"B": 3, "H": 24, "Hkv": 6, "options": {"causal": causal}}
    return dense("many tiles" + ", causal" * causal, 384, 400, d, **more)


CASES: tuple[Case, ...] = (
    *(
        dense(mask, m, n, d, options=MASKS[mask])
        for d, (m, n), mask in product(WIDTHS, SIZES, ("full", "causal"))
    ),
    *(
        dense(mask, 200, 333, d, options=MASKS[mask])
        for d in WIDTHS
        for mask in MASKS
        if mask not in ("full", "causal")
    ),
    *(dense(f"{mask}, more queries", 700, 200, d, options=MASKS[mask]) for d in WIDTHS for mask in MASKS),
    *(dense(name, 300, 333, d, **SCORES[name]) for d in WIDTHS for name in SCORES),
    *(
        dense(mask, 200, 333, d, dtype="float16", options=MASKS[mask])
        for d in WIDTHS
        for mask in ("full", "causal")
    ),
    *(dense(mask, 200, 333, d, dv, options=MASKS[mask]) for d, dv in MIXED for mask in ("full", "causal")),
    *(dense("bmhd", 200, 333, d, options={"causal": True, "layout": "bmhd"}) for d in WIDTHS),
    *(dense("seven heads", 333, 300, d, **{"H": 7, "Hkv": 1}, options={"causal": True}) for d in WIDTHS),
    *(many_tiles(d, causal) for d in WIDTHS for causal in (False, True)),
)
