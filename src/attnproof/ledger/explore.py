"""The live account of the interactive page, in Python: the page's own formulas must give the same numbers.

Self attention without grouped heads: `accounts` knows more, and where both apply they agree to the byte.
Mirror: report/templates/explorer_account.js, function for function; a test compares both on random settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .documents import naive_elements
from .hardware import DTYPE_BYTES, KIB, MIB, Hardware, get, names

# figures of a device that the page's numbers rest on
SHOWN = (
    "matrix_float16",
    "matrix_bfloat16",
    "packed_float16",
    "vector_float32",
    "exp_per_clock",
    "memory_bandwidth",
    "l2_size",
    "l3_size",
    "onchip_per_unit",
)
LIMITS = ("memory bandwidth", "matrix products", "exponentials")


@dataclass(frozen=True)
class Settings:
    """What the page's controls hold.

    Attributes:
        size: bytes of one element.
        sram: KiB of on-chip memory of a unit.
        bandwidth: GB/s of memory.
        products: TFLOP/s of the two matrix products.
        exps: 1e12 exponentials per second.
        l2: MiB of the last cache.
    """

    n: int
    d: int
    heads: int
    size: int
    causal: bool
    sram: float
    bandwidth: float
    products: float
    exps: float
    l2: float


def tile(s: Settings) -> tuple[int, int]:
    """(B_r, B_c) by the tutorial's rule, cut to the sequence."""
    elements = int(s.sram * KIB // s.size)
    block_k = max(1, -(-elements // (4 * s.d)))
    return min(block_k, s.d, s.n), min(block_k, s.n)


def visits(n: int, block_q: int, block_k: int, causal: bool) -> dict[str, int]:
    """Tiles and streamed rows of both loop orders; under causality a tile below the diagonal is full."""
    tiles_q, tiles_k = -(-n // block_q), -(-n // block_k)
    visited, edge, keys = 0, 0, 0
    for row in range(tiles_q):
        first, last = row * block_q, min((row + 1) * block_q, n)  # queries first to last - 1
        stop = -(-last // block_k) if causal else tiles_k
        whole = whole_tiles(first, n, block_k) if causal else tiles_k
        visited += stop
        edge += stop - min(whole, stop)
        keys += min(stop * block_k, n)
    queries = 0
    for column in range(tiles_k):
        first_row = column * block_k // block_q if causal else 0
        queries += n - min(first_row * block_q, n)
    return {
        "tiles_q": tiles_q,
        "tiles_k": tiles_k,
        "visited": visited,
        "edge": edge,
        "key_rows": keys,
        "query_rows": queries,
    }


def whole_tiles(first: int, n: int, block_k: int) -> int:
    """Key tiles that the query `first` sees whole; a ragged last tile counts when its real keys are seen."""
    return -(-n // block_k) if first + 1 >= n else (first + 1) // block_k


def account(s: Settings) -> dict[str, float]:
    """Every number that the page shows, by name."""
    block_q, block_k = tile(s)
    seen = visits(s.n, block_q, block_k, s.causal)
    square, row = s.n * s.n, s.n * s.d
    pairs = s.heads * (s.n * (s.n + 1) // 2 if s.causal else square)
    flops = 4 * s.d * pairs
    naive = s.heads * s.size * naive_elements(s.n, s.d)
    keys_outer = s.heads * s.size * (2 * row + (3 * s.d + 4) * seen["query_rows"])
    queries_outer = s.heads * (s.size * (2 * row + 2 * s.d * seen["key_rows"]) + 4 * s.n)
    once = s.heads * (4 * row * s.size + 4 * s.n)
    executed = s.heads * seen["visited"] * block_q * block_k
    memory = s.bandwidth * 1e9
    times = (once / memory, 4 * s.d * executed / (s.products * 1e12), executed / (s.exps * 1e12))
    working_set = s.heads * s.size * (4 * row + 2 * square)
    linear = 6 * s.heads * row * s.size
    return {
        "block_q": block_q,
        "block_k": block_k,
        **{key: float(value) for key, value in seen.items()},
        "skipped_share": 1 - seen["visited"] / (seen["tiles_q"] * seen["tiles_k"]),
        "pairs": pairs,
        "flops": flops,
        "naive_bytes": naive,
        "keys_outer_bytes": keys_outer,
        "queries_outer_bytes": queries_outer,
        "once_bytes": once,
        "naive_over_keys_outer": naive / keys_outer,
        "naive_intensity": flops / naive,
        "keys_outer_intensity": flops / keys_outer,
        "once_intensity": flops / once,
        "balance": s.products * 1e12 / memory,
        "seconds_naive": max(naive / memory, 4 * s.d * s.heads * square / (s.products * 1e12)),
        "seconds_memory": times[0],
        "seconds_products": times[1],
        "seconds_exps": times[2],
        "seconds_tiled": max(times),
        "limit": float(times.index(max(times))),
        "kept_linear": linear,
        "kept_eager": linear + 3 * s.heads * square * s.size,
        "kept_ours": 5 * s.heads * row * s.size + 4 * s.heads * s.n,
        "working_set": working_set,
        "fits_l2": float(working_set <= s.l2 * MIB),
    }


def device_settings(row: Hardware, dtype: str = "float16") -> dict[str, float]:
    """What choosing a device sets in the page."""
    return {
        "sram": row.onchip_per_unit.value,
        "bandwidth": row.memory_bandwidth.value,
        "products": row.product_rate(dtype) / 1e12,
        "exps": row.exp_rate / 1e12,
        "l2": row.l2_bytes / MIB,
    }


def page_data() -> dict[str, Any]:
    """The devices and dtypes that the page offers, each device with its rates by dtype."""
    dtypes = {name: size for name, size in DTYPE_BYTES.items() if name != "float64"}
    devices = [
        {
            "name": name,
            "title": get(name).title,
            "uncertain": [key for key in SHOWN if key in figures and figures[key].uncertain],
            "by_dtype": {dtype: device_settings(get(name), dtype) for dtype in dtypes},
        }
        for name in names()
        for figures in [get(name).figures()]
    ]
    return {"dtypes": dtypes, "limits": list(LIMITS), "devices": devices}
