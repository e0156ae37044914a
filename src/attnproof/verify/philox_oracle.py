"""Philox4x32-10 once more, for the oracle alone.

The keep decision of dropout is part of what is judged, so the judge does not share its code with the judged.
Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np

from attnproof.verify.dtypes import Array

_MULTIPLIER = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)


def words(counter: tuple[Array, Array, Array, Array], key: tuple[int, int]) -> tuple[Array, ...]:
    """Four 32-bit words per counter after ten rounds; everything is kept in uint64 below 2^32."""
    c0, c1, c2, c3 = (np.asarray(part, np.uint64) for part in counter)
    k0, k1 = key
    for _ in range(10):
        a, b = _MULTIPLIER[0] * c0, _MULTIPLIER[1] * c2
        c0, c1, c2, c3 = (
            (b >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            b & _LOW,
            (a >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            a & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def keep_factor(p: float, rng: tuple[int, int], planes: Array, rows: Array, keys: int) -> Array:
    """0 for a dropped weight, 1/(1-p) for a kept one, `[plane, row, key]`; a plane is batch * H + head."""
    seed, offset = rng
    threshold = np.uint64(min(round(p * 2**32), 2**32 - 1))
    quads = np.arange(-(-keys // 4))
    shape = (len(planes), len(rows), len(quads))
    counter = (
        np.broadcast_to(quads[None, None, :], shape),
        np.broadcast_to(np.asarray(rows)[None, :, None], shape),
        np.broadcast_to(np.asarray(planes)[:, None, None], shape),
        np.full(shape, offset & 0xFFFFFFFF),
    )
    drawn = np.stack(words(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)), axis=-1)
    kept = drawn.reshape(*shape[:2], -1)[..., :keys] >= threshold
    return np.where(kept, 1.0 / (1.0 - p), 0.0)
