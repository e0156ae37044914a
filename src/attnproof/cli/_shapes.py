"""A call described by its sizes: arrays of stride 0, so that a cache of terabytes can be asked about on a laptop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnproof.arrays import bfloat16
from attnproof.problem import Options, Problem, bind, bind_decode, bind_varlen

PAGE = 16


def fake(dtype: Any, *shape: int) -> Any:
    """Zeros of any size in one element of memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


@dataclass(frozen=True)
class Call:
    """Sizes (B, H, Hkv, M, N, D, Dv) and options of one call."""

    sizes: tuple[int, int, int, int, int, int, int]
    dtype: str
    rows: str
    options: dict[str, Any]
    extras: dict[str, bool]

    def problem(self) -> Problem:
        """What ``bind`` makes of it; raises what the real call would raise."""
        b, h, hkv, m, n, d, dv = self.sizes
        dtype = bfloat16() if self.dtype == "bfloat16" else np.dtype(self.dtype)
        width = -(-n // PAGE)
        capacity = width * PAGE if self.rows == "paged" else n
        arrays = {
            "mask": fake(bool, 1, 1, m, capacity),
            "bias": fake(dtype, 1, 1, m, capacity),
            "alibi_slopes": fake(np.float32, h),
            "sink": fake(np.float32, h),
        }
        options = Options(**self.options, **{name: arrays[name] for name, on in self.extras.items() if on})
        if self.rows == "packed":
            q, k, v = fake(dtype, b * m, h, d), fake(dtype, b * n, hkv, d), fake(dtype, b * n, hkv, dv)
            cu_q, cu_k = (np.arange(b + 1, dtype=np.int32) * length for length in (m, n))
            return bind_varlen(q, k, v, cu_q, cu_k, None, None, options).problem
        q = fake(dtype, b, h, m, d)
        if self.rows == "dense":
            return bind(q, fake(dtype, b, hkv, n, d), fake(dtype, b, hkv, n, dv), options).problem
        lengths = np.full(b, n, dtype=np.int32)
        if self.rows == "cached":
            return bind_decode(
                q, fake(dtype, b, hkv, n, d), fake(dtype, b, hkv, n, dv), lengths, None, options
            ).problem
        table = np.arange(b * width, dtype=np.int32).reshape(b, width)
        k, v = (fake(dtype, max(b * width, 1), hkv, PAGE, size) for size in (d, dv))
        return bind_decode(q, k, v, lengths, table, options).problem
