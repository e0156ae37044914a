"""Calls of the Hopper backend: every configuration, option and kind of edge, at sizes around its tiles."""

from __future__ import annotations

from itertools import product
from typing import Any

from tests.parity.problems import Case, packed

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


# lengths of queries and keys: around tiles, nothing, more of either, and sequences that begin inside of a tile
PACKED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one": ((300,), (300,)),
    "even": ((128, 256, 128), (128, 256, 128)),
    "uneven": ((1, 200, 64, 333, 7), (1, 200, 64, 333, 7)),
    "keys alone": ((5, 0, 129, 0, 70), (9, 120, 129, 64, 300)),
    "queries alone": ((65, 190, 0, 33), (0, 190, 12, 0)),
    "more queries": ((300, 150), (70, 11)),
    "short": (tuple(range(1, 40)), tuple(range(40, 1, -1))),
}


def rows(name: str, lengths: str, d: int, dv: int = 0, dtype: str = "bfloat16", **more: Any) -> Case:
    """A packed case with four heads on two, unless said otherwise."""
    sizes = {"D": d, "Dv": dv or d, "dtype": dtype}
    width = f"D {d}" + (f" and {dv}" if dv else "")
    heads = {at: HEADS[at] for at in ("H", "Hkv")}
    return packed(f"{name}, {lengths}, {width}, {dtype}", *PACKED[lengths], **heads | sizes | more)


def listed(name: str, m: int, n: int, d: int, **more: Any) -> Case:
    """A dense case whose mask is given by bounds."""
    return dense(f"bounds, {name}", m, n, d, **more)


OTHER_MASKS = tuple(mask for mask in MASKS if mask not in ("full", "causal"))
SOME_SCORES = ("sink", "all")
PACKED_CASES: tuple[Case, ...] = (
    *(rows(mask, of, d, options=MASKS[mask]) for d in WIDTHS for of in PACKED for mask in ("full", "causal")),
    *(
        rows(mask, of, 128, options=MASKS[mask])
        for of in ("uneven", "keys alone", "queries alone")
        for mask in OTHER_MASKS
    ),
    *(rows(mask, "uneven", d, options=MASKS[mask]) for d in (64, 256) for mask in ("window", "dead rows")),
    *(rows(name, "uneven", 128, **SCORES[name]) for name in SCORES),
    *(rows(name, "uneven", d, **SCORES[name]) for d in (64, 256) for name in SOME_SCORES),
    *(rows("tail", "uneven", d, tail=(70, 9), sink=True, options={"causal": True}) for d in WIDTHS),
    *(rows("tail without keys", "keys alone", d, tail=(200, 0)) for d in WIDTHS),
    *(rows("float16", "uneven", d, dtype="float16", options={"causal": True}) for d in WIDTHS),
    *(rows("mixed", "uneven", d, dv, options={"causal": True}) for d, dv in MIXED),
    *(rows("seven heads", "uneven", d, H=7, Hkv=1, options={"causal": True}) for d in WIDTHS),
    *(
        rows(f"many tiles, {mask}", "uneven", d, H=48, Hkv=12, options=MASKS[mask])
        for d in WIDTHS
        for mask in ("full", "causal")
    ),
    *(rows("prefix", "even", d, mask="prefix", options={"window": (150, -1)}) for d in WIDTHS),
)
BOUNDS_CASES: tuple[Case, ...] = (
    *(
        listed(mask, m, n, d, mask=mask)
        for d in WIDTHS
        for mask in ("prefix", "prefixes", "documents")
        for m, n in ((1, 1), (64, 64), (200, 333), (333, 200), (700, 700))
    ),
    *(
        listed(f"documents, {mask}", m, n, 128, mask="documents", options=MASKS[mask])
        for mask in MASKS
        if mask != "full"
        for m, n in ((700, 700), (200, 333))
    ),
    *(listed("causal", 700, 700, d, mask="documents", options={"causal": True}) for d in (64, 256)),
    *(listed(name, 300, 333, 128, mask="documents", **SCORES[name]) for name in SCORES),
    *(listed(name, 300, 333, d, mask="documents", **SCORES[name]) for d in (64, 256) for name in SOME_SCORES),
    *(
        listed("many tiles", 700, 700, d, mask="documents", B=3, H=24, Hkv=6, options={"causal": True})
        for d in WIDTHS
    ),
    *(listed("more queries", 900, 200, d, mask="documents") for d in WIDTHS),
    *(listed("float16", 700, 700, d, mask="documents", dtype="float16") for d in WIDTHS),
)
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
