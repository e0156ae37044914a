"""Where the rows of a chunk come from and go to: the torch counterpart of ``attnproof.rows``.

A ``Group`` is some sequences computed together as [b, heads, length, width] blocks. Dense sequences are slices.
Packed, cached and paged ones differ in length: if lengths are on the host a group is cut to them, and if they are on
a device nobody waits for them; rows are then gathered at the longest length that is possible, and what is not a row
of its sequence is replaced by zeros when it is loaded (it may hold NaN) and goes nowhere when it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...masks import BIG
from ...problem import Problem, Tensors

Span = tuple[int, int]

# scores of one chunk: 64 MiB in float32; a chunk needs about four such blocks at its peak
BUDGET = 2**24


@dataclass(frozen=True)
class Group:
    """Sequences ``start:stop``, with at most ``m`` queries and ``n`` keys each.

    ``m_each`` and ``n_each`` are the lengths: an int for all, or int64 [b, 1, 1, 1]. ``q_start`` and ``k_start`` are
    where packed rows begin: an int for one sequence, or int64 [b].
    """

    problem: Problem
    tensors: Tensors
    start: int
    stop: int
    m: int
    n: int
    m_each: Any
    n_each: Any
    q_start: Any = 0
    k_start: Any = 0

    @property
    def size(self) -> int:
        """How many sequences."""
        return self.stop - self.start

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.tensors.q.device

    def chunks(self) -> Iterator[Span]:
        """Query rows, in pieces whose scores fit the budget."""
        step = max(1, BUDGET // max(1, self.size * self.problem.H * self.n))
        for row in range(0, self.m, step):
            yield row, min(row + step, self.m)

    def columns(self, rows: Span) -> Span:
        """The keys that the band allows to any of these rows; all keys where lengths are not known here."""
        p = self.problem
        if isinstance(self.m_each, Tensor) or isinstance(self.n_each, Tensor):
            return 0, self.n
        shift = self.n - self.m
        first = max(0, rows[0] + shift - p.left)
        last = min(self.n, rows[1] + shift + p.right)
        if p.top_left:
            last = min(last, rows[1])
        return (first, last) if first < last else (0, 0)

    def queries(self, x: Tensor, rows: Span) -> Tensor:
        """Rows of a query-side array, [b, heads, rows, width]."""
        if self.problem.rows != "packed":
            return x[self.start : self.stop, :, slice(*rows)]
        return self._packed(x, self.q_start, self.m_each, rows)

    def keys(self, x: Tensor) -> Tensor:
        """All keys of a key-side array, [b, Hkv, n, width]; what lies past a sequence's end reads as zero."""
        span = (0, self.n)
        if self.problem.rows == "packed":
            return self._packed(x, self.k_start, self.n_each, span)
        if self.problem.rows == "paged":
            found = x[self._pages(x), :, self._slots()].transpose(1, 2) if x.shape[0] and self.n else None
            x = x.new_zeros(self.size, x.shape[1], self.n, x.shape[3]) if found is None else found
        else:
            x = x[self.start : self.stop, :, : self.n]
        if isinstance(self.n_each, int):
            return x
        return torch.where(self._valid(self.n_each, span)[:, None, :, None], x, 0)

    def store_queries(self, into: Tensor, rows: Span, value: Tensor) -> None:
        """The inverse of ``queries``; a packed ``into`` with gathered rows has one spare row at its end."""
        if self.problem.rows != "packed":
            into[self.start : self.stop, :, slice(*rows)] = value
        else:
            self._store_packed(into, self.q_start, self.m_each, rows, value)

    def store_keys(self, into: Tensor, value: Tensor) -> None:
        """The inverse of ``keys``; pages that two sequences share receive the sum."""
        span = (0, self.n)
        if self.problem.rows == "packed":
            self._store_packed(into, self.k_start, self.n_each, span, value)
        elif self.problem.rows == "paged":
            if into.shape[0]:
                inside = self._valid(self.n_each, span)[:, None, :, None]
                share = torch.where(inside, value, 0).transpose(1, 2).to(into.dtype)
                heads = torch.arange(into.shape[1], device=self.device)
                at = (self._pages(into)[..., None], heads, self._slots()[..., None])
                into.index_put_(at, share, accumulate=True)
        else:
            into[self.start : self.stop, :, : self.n] = value

    def pairs(self, x: Tensor, rows: Span, cols: Span) -> Tensor:
        """A bias or mask over these pairs; axes of length 1 stay."""
        spans = ((self.start, self.stop), (0, self.problem.H), rows, cols)
        sizes = zip(x.shape, spans, strict=True)
        return x[tuple(slice(None) if size == 1 else slice(*span) for size, span in sizes)]

    def distance(self, rows: Span, cols: Span) -> Tensor:
        """``i + n - m - j`` of these pairs, int64 [1 or b, 1, rows, cols]."""
        i = torch.arange(*rows, device=self.device)[:, None]
        j = torch.arange(*cols, device=self.device)
        return (i - j)[None, None] + (self.n_each - self.m_each)

    def allowed(self, rows: Span, cols: Span) -> Tensor | None:
        """Which pairs may attend, broadcastable to [b, H, rows, cols]; None if all may."""
        p, tensors = self.problem, self.tensors
        i = torch.arange(*rows, device=self.device)[:, None]
        j = torch.arange(*cols, device=self.device)
        terms: list[Tensor] = []
        if p.left < BIG or p.right < BIG:
            distance = self.distance(rows, cols)
            terms += [distance <= p.left] if p.left < BIG else []
            terms += [distance >= -p.right] if p.right < BIG else []
        if p.top_left:
            terms.append((j <= i)[None, None])
        if isinstance(self.m_each, Tensor):  # a row of padding attends to nothing
            terms.append(i < self.m_each)
        if isinstance(self.n_each, Tensor):
            terms.append(j < self.n_each)
        if tensors.bounds is not None:
            lo, hi = self._bounds(rows).unbind(-1)
            terms.append((j >= lo[..., None]) & (j < hi[..., None]))
        if tensors.keep is not None:
            terms.append(self.pairs(tensors.keep, rows, cols))
        joined = None
        for term in terms:
            joined = term if joined is None else joined & term
        return joined

    def planes(self) -> Tensor:
        """``b * H + h``, int64 [b, H]: what the dropout decision is keyed by."""
        h = torch.arange(self.problem.H, device=self.device)
        return torch.arange(self.start, self.stop, device=self.device)[:, None] * self.problem.H + h

    def _bounds(self, rows: Span) -> Tensor:
        """Explicit intervals, [1 or b, 1, rows, 2]."""
        given = self.tensors.bounds
        if self.problem.rows == "packed":
            return self._packed(given[None], self.q_start, self.m_each, rows)
        mine = given if given.shape[0] == 1 else given[self.start : self.stop]
        return mine[:, None, slice(*rows)]

    def _valid(self, each: Any, span: Span) -> Tensor:
        return torch.arange(*span, device=self.device) < torch.as_tensor(each, device=self.device).view(-1, 1)

    def _packed(self, x: Tensor, start: Any, each: Any, span: Span) -> Tensor:
        if isinstance(start, int):
            return x[None, :, start + span[0] : start + span[1]]
        if not x.shape[1]:
            return x.new_zeros(self.size, x.shape[0], span[1] - span[0], x.shape[2])
        at = (start[:, None] + torch.arange(*span, device=self.device)).clamp(max=x.shape[1] - 1)
        inside = self._valid(each, span)[..., None]
        return torch.where(inside, x[:, at], 0).transpose(0, 1)

    def _store_packed(self, into: Tensor, start: Any, each: Any, span: Span, value: Tensor) -> None:
        if isinstance(start, int):
            into[:, start + span[0] : start + span[1]] = value[0]
            return
        at = start[:, None] + torch.arange(*span, device=self.device)
        at = torch.where(self._valid(each, span), at, into.shape[1] - 1)
        into[:, at] = value.transpose(0, 1).to(into.dtype)

    def _pages(self, pool: Tensor) -> Tensor:
        """The page of every key, int64 [b, n]; unused entries may hold anything and are clamped."""
        table = self.tensors.block_table[self.start : self.stop].long().clamp(0, pool.shape[0] - 1)
        return table[:, torch.arange(self.n, device=self.device) // self.problem.page]

    def _slots(self) -> Tensor:
        """The row of every key inside its page, int64 [b, n]."""
        rows = torch.arange(self.n, device=self.device) % self.problem.page
        return rows.expand(self.size, self.n)


def groups(problem: Problem, tensors: Tensors) -> Iterator[Group]:
    """All sequences in order; as many at a time as keep one chunk within the budget."""
    if not (problem.B and problem.H):
        return
    if problem.rows == "packed" and tensors.cu_q.device.type == "cpu":
        yield from _host_packed(problem, tensors)
        return
    whole = BUDGET // max(1, problem.H * problem.M * problem.N)
    step = max(1, min(problem.B, whole))
    for start in range(0, problem.B, step):
        one = group(problem, tensors, start, min(start + step, problem.B))
        if tensors.lengths is not None and tensors.lengths.device.type == "cpu":
            one = replace(one, n=int(one.n_each.max()))
        yield one


def group(problem: Problem, tensors: Tensors, start: int, stop: int) -> Group:
    """Sequences ``start:stop`` together, without a look at any length."""
    M, N = problem.M, problem.N
    if problem.rows == "dense":
        return Group(problem, tensors, start, stop, M, N, M, N)
    if problem.rows == "packed":
        cu_q, cu_k = (x[start : stop + 1].long() for x in (tensors.cu_q, tensors.cu_k))
        m_each, n_each = ((cu[1:] - cu[:-1]).view(-1, 1, 1, 1) for cu in (cu_q, cu_k))
        return Group(problem, tensors, start, stop, M, N, m_each, n_each, cu_q[:-1], cu_k[:-1])
    lengths = tensors.lengths[start:stop].long()
    return Group(problem, tensors, start, stop, M, N, M, lengths.view(-1, 1, 1, 1))


def _host_packed(problem: Problem, tensors: Tensors) -> Iterator[Group]:
    """One sequence at a time, at its own length."""
    cu_q, cu_k = tensors.cu_q.tolist(), tensors.cu_k.tolist()
    for b in range(problem.B):
        m, n = cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]
        yield Group(problem, tensors, b, b + 1, m, n, m, n, cu_q[b], cu_k[b])
