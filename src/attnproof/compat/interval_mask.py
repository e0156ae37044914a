"""A boolean attention mask [B, 1, M, N] that is not written down: two integers per query, not N booleans.

Model code hands masks around as tensors, slices them and compares their shapes, so this is a tensor too. It
keeps one interval of keys per query; the moment anything but its shape is looked at it becomes the ordinary
boolean tensor, and stays one, so that no write into it or into a view of it can be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils import _pytree as pytree

from ..masks import BIG, Explicit, Mask, band

Int = npt.NDArray[np.int64]

# booleans of one block of query rows while intervals are looked for
BLOCK_ELEMENTS = 1 << 22


class IntervalMask(torch.Tensor):
    """True = may attend; query i of sequence b sees keys ``lo[b, i] <= j < hi[b, i]``."""

    lo: Int
    hi: Int
    plain: torch.Tensor | None

    @staticmethod
    def __new__(cls: type[IntervalMask], lo: Int, hi: Int, keys: int, device: Any) -> IntervalMask:
        """``lo`` and ``hi`` int64 [B, M], for ``keys`` keys."""
        shape = (lo.shape[0], 1, lo.shape[1], keys)
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        made.lo, made.hi, made.plain = lo, hi, None
        return made

    def materialise(self) -> torch.Tensor:
        """The ordinary tensor; the same one at every call."""
        if self.plain is None:
            lo, hi = (torch.from_numpy(x).to(self.device)[:, None, :, None] for x in (self.lo, self.hi))
            j = torch.arange(self.shape[-1], device=self.device)
            self.plain = (j >= lo) & (j < hi)
        return self.plain

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation sees the ordinary tensor."""
        args, kwargs = pytree.tree_map_only(cls, cls.materialise, (args, kwargs or {}))
        return func(*args, **kwargs)


def as_mask(x: torch.Tensor) -> Any:
    """What ``attention(mask=...)`` takes: intervals while they are all there is, else the boolean tensor.

    The narrowest description wins: no mask, a band around the diagonal (causal, window), explicit intervals.
    """
    if not isinstance(x, IntervalMask):
        return x
    if x.plain is not None:
        return x.plain
    m, n = x.shape[-2:]
    lo, hi = x.lo, x.hi
    found = _band(lo, hi, m, n)
    if found is not None:
        return found
    if (lo == lo[0]).all() and (hi == hi[0]).all():
        lo, hi = lo[0], hi[0]
    return Mask(terms=(Explicit(lo, hi, n),))


def _band(lo: Int, hi: Int, m: int, n: int) -> Mask | None:
    """The band that has these intervals, if there is one."""
    i = np.arange(m, dtype=np.int64)
    diagonal = np.broadcast_to(i + (n - m), lo.shape)
    lefts, rights = np.unique((diagonal - lo)[lo > 0]), np.unique((hi - 1 - diagonal)[hi < n])
    if len(lefts) > 1 or len(rights) > 1:
        return None
    left, right = (int(x[0]) if len(x) else BIG for x in (lefts, rights))
    same_lo, same_hi = band(i, m, n, left=left, right=right, top_left=False)
    return Mask(left=left, right=right) if (lo == same_lo).all() and (hi == same_hi).all() else None


def intervals(
    rows: Callable[[int, int], torch.Tensor], batch: int, m: int, n: int, device: Any
) -> IntervalMask | None:
    """Look at a mask a block of query rows at a time; None if some row is not one run of keys.

    Args:
        rows: ``rows(start, stop)`` is the boolean mask [batch, 1, stop - start, n] of those queries.
        batch: number of sequences.
        m: number of queries.
        n: number of keys, at least 1.
        device: where the mask says it lies.
    """
    lo, hi = np.zeros((2, batch, m), dtype=np.int64)
    step = max(1, BLOCK_ELEMENTS // max(1, batch * n))
    for start in range(0, m, step):
        stop = min(start + step, m)
        seen = rows(start, stop)
        if seen.shape[1] != 1:
            return None
        seen = seen[:, 0].expand(batch, -1, -1)
        bits = seen.to(torch.uint8)
        count = seen.sum(-1)
        # argmax finds the first of equal values
        first, last = bits.argmax(-1), n - bits.flip(-1).argmax(-1)
        first, last = first * (count > 0), last * (count > 0)
        if not bool((last - first == count).all()):
            return None
        lo[:, start:stop], hi[:, start:stop] = first.cpu().numpy(), last.cpu().numpy()
    return IntervalMask(lo, hi, n, device)
