"""Which keys may a query see? As intervals, so that loops can be cut instead of scores thrown away.

A mask is one half-open interval ``[lo, hi)`` of keys per query row, plus any number of boolean tensors
(*predicates*, True = may attend). The interval is the intersection of a *band* around the diagonal, which is what
causal and window are, and of *terms*, which give explicit intervals (prefix, segments). Rows of the first three
masks for 4 queries and 6 keys (bottom-right: the last query sees the last key):

    causal()        window(1, 0)    prefix(4)
    x x x . . .     . x x . . .     x x x x . .
    x x x x . .     . . x x . .     x x x x . .
    x x x x x .     . . . x x .     x x x x x .
    x x x x x x     . . . . x x     x x x x x x

Masks combine with ``&`` (intersection). Every backend asks ``bounds`` for intervals and ``tiles`` for the class of
each tile: *skip* (no pair is allowed), *full* (every pair is) or *edge*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .arrays import dtype_name, is_torch, to_numpy
from .errors import DtypeError, ShapeError, expected

Int = npt.NDArray[np.int64]

BIG = 2**30  # a band side that is unbounded; above every length, and a sum of two of them fits int32
SKIP, EDGE, FULL = 0, 1, 2


class Term(Protocol):
    """An explicit interval per query row of sequence ``b``."""

    @property
    def batch(self) -> int:
        """For how many sequences it was built; 1 fits any number."""
        ...

    @property
    def on_host(self) -> bool:
        """Whether its numbers are NumPy's; those of a compiled call are tensors."""
        ...

    def bounds(self, i: Int, m: int, n: int, b: int) -> tuple[Int, Int]:
        """``(lo, hi)``, int64 [len(i)], for query rows ``i`` of ``m`` and ``n`` keys."""
        ...

    def check(self, batch: int, m: int | None, n: int | None) -> None:
        """Raise ShapeError if this term was built for other sizes; None is a size that varies."""
        ...


@dataclass(frozen=True)
class Prefix:
    """Causal, except that the first ``lengths[b]`` keys are seen by every query."""

    lengths: tuple[int, ...]
    on_host = True

    @property
    def batch(self) -> int:
        """See ``Term.batch``."""
        return len(self.lengths)

    def bounds(self, i: Int, m: int, n: int, b: int) -> tuple[Int, Int]:
        """See ``Term.bounds``."""
        length = self.lengths[b if len(self.lengths) > 1 else 0]
        return np.zeros_like(i), np.maximum(i + (n - m + 1), length)

    def check(self, batch: int, m: int | None, n: int | None) -> None:
        """See ``Term.check``."""
        if len(self.lengths) not in (1, batch):
            raise ShapeError(expected("mask", f"1 or {batch} prefix lengths", len(self.lengths)))


@dataclass(frozen=True, eq=False)
class Explicit:
    """Given intervals, int64 [M] or [B, M], for ``keys`` keys."""

    lo: Int
    hi: Int
    keys: int

    @property
    def batch(self) -> int:
        """See ``Term.batch``."""
        return 1 if self.lo.ndim == 1 else len(self.lo)

    @property
    def on_host(self) -> bool:
        """See ``Term.on_host``."""
        return not is_torch(self.lo)

    def bounds(self, i: Int, m: int, n: int, b: int) -> tuple[Int, Int]:
        """See ``Term.bounds``."""
        lo, hi = (x if x.ndim == 1 else x[b if len(x) > 1 else 0] for x in (self.lo, self.hi))
        if m > len(lo) or n > self.keys:
            made = (len(lo), self.keys)
            raise ShapeError(
                expected("mask", f"a mask made for lengths of {(m, n)} or more", f"one for {made}")
            )
        return lo[i], hi[i]

    def check(self, batch: int, m: int | None, n: int | None) -> None:
        """See ``Term.check``."""
        if self.lo.ndim == 2 and len(self.lo) not in (1, batch):
            raise ShapeError(expected("mask", f"intervals for 1 or {batch} sequences", len(self.lo)))
        made, got = (self.lo.shape[-1], self.keys), (m, n)
        if any(size is not None and size != have for size, have in zip(got, made, strict=True)):
            # a size may be a symbol of a compiled call: its number is what the reader needs
            wanted = tuple(None if size is None else int(size) for size in got)
            raise ShapeError(expected("mask", f"a mask made for lengths {wanted}", f"one for {made}"))


@dataclass(frozen=True, eq=False)
class Mask:
    """Intervals and predicates; build it with ``causal``, ``window``, ``prefix``, ``segments`` and ``&``.

    Attributes:
        left: keys seen to the left of the bottom-right diagonal, ``BIG`` for all.
        right: keys seen to its right, ``BIG`` for all; may be negative.
        top_left: additionally ``j <= i``.
        terms: explicit intervals, intersected with the band.
        keep: boolean tensors, each broadcastable to [B, H, M, N].
    """

    left: int = BIG
    right: int = BIG
    top_left: bool = False
    terms: tuple[Term, ...] = ()
    keep: tuple[Any, ...] = field(default=())

    # an array on the left of & would otherwise take the mask apart, element by element
    __array_ufunc__ = None

    def __and__(self, other: Any) -> Mask:
        """Both restrictions apply; the other side may be a boolean tensor."""
        other = as_mask(other)
        return Mask(
            min(self.left, other.left),
            min(self.right, other.right),
            self.top_left or other.top_left,
            self.terms + other.terms,
            self.keep + other.keep,
        )

    __rand__ = __and__

    def bounds(self, m: int, n: int, b: int = 0) -> tuple[Int, Int]:
        """Intervals of sequence ``b`` with ``m`` queries and ``n`` keys, clipped: ``0 <= lo <= hi <= n``."""
        i = np.arange(m, dtype=np.int64)
        lo, hi = band(i, m, n, left=self.left, right=self.right, top_left=self.top_left)
        for term in self.terms:
            term_lo, term_hi = term.bounds(i, m, n, b)
            lo, hi = np.maximum(lo, term_lo), np.minimum(hi, term_hi)
        lo = np.minimum(lo, n)
        return lo, np.maximum(np.minimum(hi, n), lo)

    @property
    def batch(self) -> int:
        """For how many sequences the terms differ; 1 if all sequences share them."""
        return max((term.batch for term in self.terms), default=1)

    def rows(self, start: int, stop: int, m: int, n: int) -> Mask:
        """The mask of query rows ``start:stop`` alone, for calls that are split along queries."""
        if not 0 <= start <= stop <= m:
            raise ShapeError(expected("rows", f"a range within the {m} queries", f"{start}:{stop}"))
        pairs = [self.bounds(m, n, b) for b in range(self.batch)]
        lo, hi = (np.stack(side)[:, start:stop] for side in zip(*pairs, strict=True))
        keep = tuple(x if x.shape[-2] == 1 else x[..., start:stop, :] for x in self.keep)
        return Mask(terms=(Explicit(lo, hi, n),), keep=keep)

    def pairs(self, m: int, n: int, b: int = 0) -> int:
        """How many (query, key) pairs the intervals allow; predicates are not counted."""
        lo, hi = self.bounds(m, n, b)
        return int((hi - lo).sum())

    def tiles(self, m: int, n: int, block_m: int, block_n: int, b: int = 0) -> Tiles:
        """The class of every tile of a ``block_m`` x ``block_n`` grid; predicates turn full tiles into edges."""
        lo, hi = self.bounds(m, n, b)
        kinds = classify(lo, hi, n, block_m, block_n)
        if self.keep:
            kinds = np.where(kinds == FULL, EDGE, kinds)
        return Tiles(kinds, block_m, block_n)


@dataclass(frozen=True)
class Tiles:
    """Tile classes, int8 [ceil(M / block_m), ceil(N / block_n)] of SKIP, EDGE, FULL."""

    kinds: npt.NDArray[Any]
    block_m: int
    block_n: int

    def count(self, kind: int) -> int:
        """How many tiles are of this class."""
        return int((self.kinds == kind).sum())

    @property
    def kept(self) -> int:
        """Tiles that are computed."""
        return self.kinds.size - self.count(SKIP)

    @property
    def skipped_share(self) -> float:
        """Share of tiles that cost nothing."""
        return self.count(SKIP) / max(self.kinds.size, 1)


def band(i: Int, m: int, n: int, *, left: int, right: int, top_left: bool) -> tuple[Int, Int]:
    """Intervals of a band around the bottom-right diagonal, clipped to the keys: ``0 <= lo <= hi <= n``."""
    diagonal = i + (n - m)
    lo = np.clip(diagonal - left, 0, n)
    hi = np.clip(diagonal + right + 1, 0, n)
    if top_left:
        hi = np.minimum(hi, i + 1)
    return lo, np.maximum(hi, lo)


def explicit_bounds(terms: tuple[Any, ...], b: Any, i: Any, m: Any, n: Any) -> Any:
    """Intervals of explicit terms for query rows that torch counts: nothing is read on the host.

    Args:
        terms: ``Prefix`` and ``Explicit``; the intervals of the latter may be tensors.
        b: sequence of each row, int64 [...].
        i: position of each row in its sequence, int64 [...].
        m: queries of its sequence, int or int64 [...].
        n: keys of its sequence, int or int64 [...].

    Returns:
        int32 [..., 2] on the device of ``i``.
    """
    import torch

    lo, hi = torch.zeros_like(i), torch.full_like(i, BIG)
    for term in terms:
        if isinstance(term, Prefix):
            lengths = torch.tensor(term.lengths, device=i.device)
            hi = torch.minimum(
                hi, torch.maximum(i + (n - m + 1), lengths[b if len(term.lengths) > 1 else b * 0])
            )
            continue
        given = (torch.as_tensor(x, device=i.device) for x in (term.lo, term.hi))
        term_lo, term_hi = (x[i] if x.ndim == 1 else x[b if x.shape[0] > 1 else b * 0, i] for x in given)
        lo, hi = torch.maximum(lo, term_lo), torch.minimum(hi, term_hi)
    return torch.stack((lo, hi), dim=-1).to(torch.int32)


def classify(lo: Int, hi: Int, n: int, block_m: int, block_n: int) -> npt.NDArray[np.int8]:
    """Tile classes from intervals; rows and keys past the end do not make a tile an edge."""
    starts = np.arange(0, n, block_n)
    stops = np.minimum(starts + block_n, n)
    kinds = np.zeros((-(-len(lo) // block_m), len(starts)), dtype=np.int8)
    for tile in range(len(kinds)):
        rows = slice(tile * block_m, (tile + 1) * block_m)
        row_lo, row_hi = lo[rows, None], hi[rows, None]
        touched = (np.minimum(row_hi, stops) > np.maximum(row_lo, starts)).any(axis=0)
        whole = (row_lo.max() <= starts) & (row_hi.min() >= stops)
        kinds[tile] = np.where(whole, FULL, np.where(touched, EDGE, SKIP))
    return kinds


def causal(*, align: str = "bottom_right") -> Mask:
    """Query i sees keys up to ``i + N - M`` (``align="top_left"``: up to ``i``)."""
    if align == "bottom_right":
        return Mask(right=0)
    if align == "top_left":
        return Mask(top_left=True)
    raise ShapeError(expected("align", "'bottom_right' or 'top_left'", repr(align)))


def window(left: int, right: int) -> Mask:
    """Inclusive on both sides of ``i + N - M``; -1 is unbounded. "W tokens" of a model config is ``(W - 1, 0)``."""
    if any(isinstance(side, bool) or not hasattr(type(side), "__index__") for side in (left, right)):
        raise DtypeError(expected("window", "two integers", repr((left, right))))
    left, right = index(left), index(right)
    if min(left, right) < -1:
        raise ShapeError(expected("window", "sides of -1 (unbounded) or more", (left, right)))
    return Mask(left=BIG if left == -1 else min(left, BIG), right=BIG if right == -1 else min(right, BIG))


def prefix(length: int | Sequence[int]) -> Mask:
    """Causal, but the first ``length`` keys (one number, or one per sequence) are seen by every query."""
    given: Any = length
    one = hasattr(type(given), "__index__") and not getattr(given, "ndim", 0)  # arrays have __index__ too
    try:
        lengths = tuple(index(x) for x in ((given,) if one else given))
    except TypeError:
        raise DtypeError(expected("prefix", "an integer, or one per sequence", repr(length))) from None
    if not lengths or min(lengths) < 0:
        raise ShapeError(expected("prefix", "lengths of 0 or more", lengths))
    return Mask(terms=(Prefix(lengths),))


def segments(query_ids: Any, key_ids: Any = None) -> Mask:
    """A query sees the keys of its own segment.

    Args:
        query_ids: integers [M] or [B, M], non-decreasing along the row.
        key_ids: integers [N] or [B, N], non-decreasing; ``query_ids`` if left out.

    Raises:
        ShapeError: ids decrease, or batch sizes differ.
    """
    q_ids, k_ids = (_ids(x) for x in (query_ids, query_ids if key_ids is None else key_ids))
    if len(q_ids) != len(k_ids):
        raise ShapeError(expected("key_ids", f"{len(q_ids)} rows to match query_ids", len(k_ids)))
    pairs = list(zip(q_ids, k_ids, strict=True))
    lo = np.stack([np.searchsorted(k, q, side="left") for q, k in pairs]).astype(np.int64)
    hi = np.stack([np.searchsorted(k, q, side="right") for q, k in pairs]).astype(np.int64)
    return Mask(terms=(Explicit(lo, hi, k_ids.shape[1]),))


def _ids(x: Any) -> Int:
    ids = np.atleast_2d(np.asarray(to_numpy(x) if is_torch(x) else x))
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise ShapeError(expected("segments", "integer ids [L] or [B, L]", f"{ids.dtype} {ids.shape}"))
    if (np.diff(ids, axis=1) < 0).any():
        raise ShapeError("segments: expected ids that never decrease, got a decreasing row")
    return ids.astype(np.int64)


def as_mask(x: Any) -> Mask:
    """A mask object from None, a mask or a boolean tensor of two to four axes."""
    if x is None:
        return Mask()
    if isinstance(x, Mask):
        return x
    if not hasattr(x, "dtype"):
        raise DtypeError(expected("mask", "a Mask or a boolean tensor", type(x).__name__))
    if dtype_name(x) != "bool":
        raise DtypeError(expected("mask", "dtype bool (True = attend)", dtype_name(x)))
    return Mask(keep=(x,))


def without_keep(mask: Mask) -> Mask:
    """The interval part alone."""
    return replace(mask, keep=())
