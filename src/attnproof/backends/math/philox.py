"""The dropout decision of ``attnproof.philox``, bit for bit, in torch's int64 arithmetic on any device.

torch has no unsigned 64-bit product. A 32 x 32 bit product is built from two 32 x 16 bit ones, which stay below 2^49,
so nothing here relies on what an overflow does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...philox import MULTIPLIER_0, MULTIPLIER_1, ROUNDS, WEYL_0, WEYL_1, WORD, threshold


def _product(x: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32-bit words of ``x * constant``."""
    low = x * (constant & 0xFFFF)
    high = x * (constant >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32 on broadcastable int64 tensors that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high_0, low_0 = _product(c0, MULTIPLIER_0)
        high_2, low_2 = _product(c2, MULTIPLIER_1)
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + WEYL_0) & WORD, (k1 + WEYL_1) & WORD
    return c0, c1, c2, c3


def keep(p: float, rng: Tensor, planes: Tensor, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
    """Which pairs survive dropout.

    Args:
        p: drop probability in (0, 1).
        rng: int64 [2], (seed, offset); read on its device.
        planes: int64 [...], ``b * H + h``.
        rows: query positions, half-open.
        cols: key positions, half-open.

    Returns:
        bool [..., rows, cols], True where the pair is kept.
    """
    first, last = cols[0] // 4, -(-cols[1] // 4)
    quads = torch.arange(first, last, device=rng.device)
    i = torch.arange(*rows, device=rng.device)[:, None]
    seed, offset = rng[0], rng[1]
    words = philox4x32(
        (quads, i, (planes & WORD)[..., None, None], offset & WORD), (seed & WORD, (seed >> 32) & WORD)
    )
    full = words[0].shape  # the first word has met every part of the counter
    flat = torch.stack([word.expand(full) for word in words], dim=-1).flatten(-2)
    start = cols[0] - 4 * first
    return flat[..., start : start + cols[1] - cols[0]] >= threshold(p)
