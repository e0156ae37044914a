"""Where rows live: the map from (sequence, head, position) to storage, for dense, packed, cached and paged inputs.

A backend written in NumPy asks ``sequences`` and gets one ``Sequence`` per batch entry, whose views have the same
shape whatever the storage is. Kernels do the same arithmetic with pointers:

    rows     queries of sequence b                     keys of sequence b, head g
    dense    q[b, h, i]                                k[b, g, j],  N keys
    packed   q[h, cu_q[b] + i]                         k[g, cu_k[b] + j],  cu_k[b + 1] - cu_k[b] keys
    cached   q[b, h, i]                                k[b, g, j],  lengths[b] keys
    paged    q[b, h, i]                                k[block_table[b, j // page], g, j % page],  lengths[b] keys

Query head ``h`` reads key/value head ``h // G``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .masks import band

if TYPE_CHECKING:
    from .problem import Problem, Tensors

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Sequence:
    """One batch entry: ``m`` queries against ``n`` keys."""

    problem: Problem
    tensors: Tensors
    b: int
    m: int
    n: int
    q_start: int = 0
    k_start: int = 0

    def queries(self, x: Array) -> Array:
        """The [H, m, ...] view of a query-side array (q, out, dout, lse, dq)."""
        if self.problem.rows == "packed":
            return x[:, self.q_start : self.q_start + self.m]
        return x[self.b]

    def keys(self, x: Array, head: int, start: int, stop: int) -> Array:
        """Rows ``start:stop`` of k, v, dk or dv of one key/value head: [stop - start, D]."""
        if self.problem.rows == "packed":
            return x[head, self.k_start + start : self.k_start + stop]
        if self.problem.rows != "paged":
            return x[self.b, head, start:stop]
        if start == stop:
            return np.zeros((0, x.shape[-1]), x.dtype)
        page = self.problem.page
        first, last = start // page, -(-stop // page)
        pages = x[self.tensors.block_table[self.b, first:last], head]  # [pages, page, D], a copy
        return pages.reshape(len(pages) * page, x.shape[-1])[start - first * page : stop - first * page]

    def bounds(self) -> tuple[Array, Array]:
        """Key interval [lo, hi) of every query row, clipped to the keys."""
        p = self.problem
        i = np.arange(self.m, dtype=np.int64)
        lo, hi = band(i, self.m, self.n, left=p.left, right=p.right, top_left=p.top_left)
        if self.tensors.bounds is not None:
            given = self.tensors.bounds
            if p.rows == "packed":
                rows = given[self.q_start : self.q_start + self.m]
            else:
                rows = given[self.b if len(given) > 1 else 0]
            lo, hi = np.maximum(lo, rows[:, 0]), np.minimum(hi, rows[:, 1])
        return lo, np.maximum(hi, lo)


def sequences(problem: Problem, tensors: Tensors) -> Iterator[Sequence]:
    """Every batch entry in order; arrays must be NumPy."""
    for b in range(problem.B):
        if problem.rows == "packed":
            q0, q1 = int(tensors.cu_q[b]), int(tensors.cu_q[b + 1])
            k0, k1 = int(tensors.cu_k[b]), int(tensors.cu_k[b + 1])
            yield Sequence(problem, tensors, b, q1 - q0, k1 - k0, q0, k0)
        elif problem.rows == "dense":
            yield Sequence(problem, tensors, b, problem.M, problem.N)
        else:
            yield Sequence(problem, tensors, b, problem.M, int(tensors.lengths[b]))


def empty_like_rows(problem: Problem, rows: int, heads: int, width: int, dtype: npt.DTypeLike) -> Array:
    """An unwritten result in the canonical view, stored in the caller's layout.

    Dense: [B, heads, rows, width]; packed: [heads, rows, width] stored as [rows, heads, width].
    """
    if problem.rows == "packed":
        return np.swapaxes(np.empty((rows, heads, width), dtype), 0, 1)
    if problem.layout == "bmhd":
        return np.swapaxes(np.empty((problem.B, rows, heads, width), dtype), 1, 2)
    return np.empty((problem.B, heads, rows, width), dtype)
