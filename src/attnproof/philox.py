"""The dropout decision: Philox4x32-10, a pure function of seed, offset and logical position.

One call of the generator serves four neighbouring keys:

    key     = (seed mod 2^32, seed div 2^32)
    counter = (j div 4, i, b * H + h, offset mod 2^32)
    word    = output[j mod 4]

and key ``j`` is kept for query ``i`` iff ``word >= threshold(p)``. ``i`` and ``j`` are positions inside sequence
``b``, so the decision does not depend on tile sizes, packing or the backend.

Reference: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), section 3.3.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

UInt = npt.NDArray[Any]

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[UInt, UInt, UInt, UInt], key: tuple[int, int]) -> tuple[UInt, UInt, UInt, UInt]:
    """Ten rounds of Philox4x32 on counters given as four broadcastable uint64 arrays holding 32-bit words.

    >>> words = philox4x32(tuple(np.zeros(1, np.uint64) for _ in range(4)), (0, 0))
    >>> [f"{int(w[0]):08x}" for w in words]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key
    mask, shift = np.uint64(WORD), np.uint64(32)
    for _ in range(ROUNDS):
        low = c0 * np.uint64(MULTIPLIER_0)
        high = c2 * np.uint64(MULTIPLIER_1)
        c0, c1, c2, c3 = (
            (high >> shift) ^ c1 ^ np.uint64(k0),
            high & mask,
            (low >> shift) ^ c3 ^ np.uint64(k1),
            low & mask,
        )
        k0, k1 = (k0 + WEYL_0) & WORD, (k1 + WEYL_1) & WORD
    return c0, c1, c2, c3


def threshold(p: float) -> int:
    """Words below this drop their key: round(p * 2^32), at most 2^32 - 1."""
    return min(round(p * 2.0**32), WORD)


def keep(
    p: float, *, seed: int, offset: int, plane: int, i: UInt, start: int, stop: int
) -> npt.NDArray[np.bool_]:
    """Which pairs survive dropout.

    Args:
        p: drop probability in [0, 1].
        seed: 64-bit seed.
        offset: stream offset, taken modulo 2^32.
        plane: ``b * H + h``.
        i: query positions, shape [m].
        start: first key position.
        stop: one past the last key position.

    Returns:
        bool [m, stop - start], True where the pair is kept.
    """
    if p >= 1.0:
        return np.zeros((len(i), stop - start), dtype=np.bool_)
    quads = np.arange(start // 4, -(-stop // 4), dtype=np.uint64)
    words = philox4x32(
        (
            quads[None, :],
            i.astype(np.uint64)[:, None],
            np.array([[plane & WORD]], dtype=np.uint64),
            np.array([[offset & WORD]], dtype=np.uint64),
        ),
        (seed & WORD, (seed >> 32) & WORD),
    )
    flat = np.stack(words, axis=-1).reshape(len(i), 4 * len(quads))
    first = start - 4 * (start // 4)
    return flat[:, first : first + stop - start] >= np.uint64(threshold(p))
