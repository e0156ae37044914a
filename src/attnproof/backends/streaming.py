r"""Attention without the N x N matrix, in NumPy: the file to read first.

Forward, per tile of queries and keys (online_softmax.py has the recurrence and its proof):

    s = q k^T, score modifiers, mask;  m' = max(m, max s);  alpha = exp(m - m')
    p = exp(s - m');  l = alpha l + sum p;  acc = alpha acc + dropout(p) v;  at the end out = acc / l, lse = m + ln l

Backward rebuilds p = exp(s - lse) tile by tile and keeps nothing N^2 (arXiv:2205.14135, appendix B.4):

    dv += dropout(p)^T do;  ds = p (dropout(do v^T) - delta);  dq += scale ds k;  dk += scale ds^T q
    delta = rowsum(do out) - dlse

Both loop orders exist. *Queries outer* (FlashAttention 2, arXiv:2307.08691, section 3.1) keeps one query tile's state
and streams keys past it; *keys outer* (FlashAttention 1, algorithm 1) loads each key tile once and keeps the state of
all rows. They give the same result. Compiled kernels mirror the queries-outer loop line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import online_softmax, philox, scores
from ..dtypes import compute_dtype, narrow, storage_dtype, widen
from ..errors import Unsupported
from ..masks import FULL, SKIP, classify
from ..online_softmax import State
from ..problem import Grads, Problem, Tensors
from ..products import product
from ..rows import Sequence, empty_like_rows, sequences

Array = npt.NDArray[Any]
Order = Literal["queries", "keys"]

name = "streaming"
kind = "numpy"

# large enough that the cost of a NumPy call stays small beside the arithmetic, small enough that the tiles stay in L2
BLOCK_M = 128
BLOCK_N = 128


def why_not(problem: Problem) -> str | None:
    """Everything on the host is served."""
    if problem.device != "cpu":
        return f"reads host memory, and the tensors are on {problem.device}; use .cpu() or another backend"
    return None


class Step(NamedTuple):
    """What a trace hook sees after each tile: the state of its rows, and the factor that was applied to it."""

    b: int
    head: int
    rows: tuple[int, int]
    cols: tuple[int, int]
    m: Array
    l: Array  # noqa: E741
    alpha: Array


Trace = Callable[[Step], None]


@dataclass(frozen=True)
class Head:
    """One head of one sequence: loads tiles and turns them into logits."""

    seq: Sequence
    h: int
    lo: Array
    hi: Array

    @property
    def problem(self) -> Problem:
        """The call this head belongs to."""
        return self.seq.problem

    @property
    def sink(self) -> float:
        """The sink's logit, -inf if there is none."""
        return scores.sink_logit(self.seq.tensors.sink, self.h)

    def load_rows(self, x: Array, rows: tuple[int, int]) -> Array:
        """A query-side tile [rows, width], widened."""
        return self._load(self.seq.queries(x)[self.h, slice(*rows)])

    def load_keys(self, x: Array, cols: tuple[int, int]) -> Array:
        """A key-side tile [cols, width], widened."""
        return self._load(self.seq.keys(x, self.h // self.problem.G, *cols))

    def _load(self, tile: Array) -> Array:
        """Contiguous, because BLAS sums in another order for other strides: a view must not change a bit."""
        return np.ascontiguousarray(widen(tile, self.problem.dtype, compute_dtype(self.problem.dtype)))

    def logits(
        self, scaled_q: Array, k: Array, rows: tuple[int, int], cols: tuple[int, int], edge: bool
    ) -> tuple[Array, Array]:
        """Final logits of a tile, -inf where masked, and the capped scores the backward needs."""
        problem, tensors, b = self.problem, self.seq.tensors, self.seq.b
        s = capped = product(scaled_q, k.T)
        if problem.softcap:
            s = capped = scores.softcap(s, problem.softcap)
        if problem.has_alibi:
            s = scores.alibi(s, tensors.alibi_slopes[b, self.h], self.distance(rows, cols))
        if problem.has_bias:
            bias = tensors.bias[b, self.h, slice(*rows), slice(*cols)]
            s = s + widen(bias, problem.bias_dtype, s.dtype)
        if edge:
            j = np.arange(*cols)
            allowed = (j >= self.lo[slice(*rows), None]) & (j < self.hi[slice(*rows), None])
            s = np.where(allowed, s, -np.inf)
        if problem.has_keep:
            s = np.where(tensors.keep[b, self.h, slice(*rows), slice(*cols)], s, -np.inf)
        return s, capped

    def distance(self, rows: tuple[int, int], cols: tuple[int, int]) -> Array:
        """|i + N - M - j| of a tile."""
        return scores.distance(np.arange(*rows), np.arange(*cols), self.seq.m, self.seq.n)

    def drop(self, x: Array, rows: tuple[int, int], cols: tuple[int, int]) -> Array:
        """Dropout of a tile: kept entries times 1 / (1 - p), the others 0."""
        problem = self.problem
        if problem.dropout_p == 0:
            return x
        seed, offset = (int(word) for word in self.seq.tensors.rng)
        kept = philox.keep(
            problem.dropout_p,
            seed=seed,
            offset=offset,
            plane=self.seq.b * problem.H + self.h,
            i=np.arange(*rows),
            start=cols[0],
            stop=cols[1],
        )
        scale = x.dtype.type(1 / (1 - problem.dropout_p)) if problem.dropout_p < 1 else x.dtype.type(0)
        return np.where(kept, x * scale, x.dtype.type(0))


class Visit(NamedTuple):
    """One tile to compute; ``edge`` tiles need their interval compared per element."""

    rows: tuple[int, int]
    cols: tuple[int, int]
    edge: bool


def visits(head: Head, order: Order, block_m: int, block_n: int) -> Iterator[Visit]:
    """The tiles that hold an allowed pair, in loop order; skipped tiles cost nothing."""
    m, n = head.seq.m, head.seq.n
    kinds = classify(head.lo, head.hi, n, block_m, block_n)
    # one line of tiles at a time: a list of all of them would grow with M N
    for outer, line in enumerate(kinds if order == "queries" else kinds.T):
        for inner in np.flatnonzero(line != SKIP).tolist():
            row, col = (outer, inner) if order == "queries" else (inner, outer)
            rows = (row * block_m, min((row + 1) * block_m, m))
            cols = (col * block_n, min((col + 1) * block_n, n))
            yield Visit(rows, cols, bool(kinds[row, col] != FULL))


def forward(
    problem: Problem,
    tensors: Tensors,
    *,
    order: Order = "queries",
    block_m: int = BLOCK_M,
    block_n: int = BLOCK_N,
    trace: Trace | None = None,
) -> tuple[Array, Array]:
    """See ``backends.Backend``; any block size and either order give the same result."""
    out = empty_like_rows(problem, problem.out_shape[-2], problem.H, problem.Dv, storage_dtype(problem.dtype))
    lse = np.empty(problem.out_shape[:-1], dtype=problem.lse_dtype)
    if problem.rows == "packed":  # tokens past the last sequence
        out[...], lse[...] = 0, -np.inf
    run = _queries_outer if order == "queries" else _keys_outer
    with np.errstate(all="ignore"):
        for head in _heads(problem, tensors):
            run(head, head.seq.queries(out)[head.h], head.seq.queries(lse)[head.h], block_m, block_n, trace)
    return out, lse


def _heads(problem: Problem, tensors: Tensors) -> Iterator[Head]:
    for seq in sequences(problem, tensors.expand(problem)):
        lo, hi = seq.bounds()
        for h in range(problem.H):
            yield Head(seq, h, lo, hi)


def _queries_outer(
    head: Head, out: Array, lse: Array, block_m: int, block_n: int, trace: Trace | None
) -> None:
    """One query tile's state at a time: what the compiled kernels do."""
    state, current = None, (0, 0)
    q: Any = None
    for rows, cols, edge in visits(head, "queries", block_m, block_n):
        if state is None or rows != current:
            if state is not None:
                _store(head, state, current, out, lse)
            _store_unseen(head, current[1], rows[0], out, lse)
            state, current = _start(head, rows), rows
            q = head.load_rows(head.seq.tensors.q, rows) * state.m.dtype.type(head.problem.scale)
        _absorb(head, state, q, Visit(rows, cols, edge), trace)
    if state is not None:
        _store(head, state, current, out, lse)
    _store_unseen(head, current[1], head.seq.m, out, lse)


def _keys_outer(head: Head, out: Array, lse: Array, block_m: int, block_n: int, trace: Trace | None) -> None:
    """Each key tile is loaded once; the state of all rows is kept."""
    whole = _start(head, (0, head.seq.m))
    for visit in visits(head, "keys", block_m, block_n):
        part = State(*(x[slice(*visit.rows)] for x in whole))
        q = head.load_rows(head.seq.tensors.q, visit.rows) * part.m.dtype.type(head.problem.scale)
        _absorb(head, part, q, visit, trace)
    # a block of rows at a time: finalize makes a copy, and one of every row would be half as much again
    for first in range(0, head.seq.m, block_m):
        rows = (first, min(first + block_m, head.seq.m))
        _store(head, State(*(x[slice(*rows)] for x in whole)), rows, out, lse)


def _start(head: Head, rows: tuple[int, int]) -> State:
    return online_softmax.start(
        rows[1] - rows[0], head.problem.Dv, compute_dtype(head.problem.dtype), head.sink
    )


def _absorb(head: Head, state: State, scaled_q: Array, visit: Visit, trace: Trace | None) -> None:
    """The inner step: update ``state``, a set of views, in place with one key tile."""
    rows, cols, edge = visit
    k = head.load_keys(head.seq.tensors.k, cols)
    s, _ = head.logits(scaled_q, k, rows, cols, edge)
    state.m[:], point, alpha = online_softmax.rescale(state.m, s.max(axis=1))
    p = s  # the logits are not needed again: their memory holds p
    np.subtract(s, point[:, None], out=p)
    np.exp(p, out=p)
    state.l[:] = alpha * state.l + p.sum(axis=1)
    state.acc[:] *= alpha[:, None]
    state.acc[:] += product(head.drop(p, rows, cols), head.load_keys(head.seq.tensors.v, cols))
    if trace is not None:
        trace(Step(head.seq.b, head.h, rows, cols, state.m.copy(), state.l.copy(), alpha))


def _store(head: Head, state: State, rows: tuple[int, int], out: Array, lse: Array) -> None:
    result, log_sum = online_softmax.finalize(state)
    out[slice(*rows)] = narrow(result, head.problem.dtype)
    lse[slice(*rows)] = log_sum


def _store_unseen(head: Head, start: int, stop: int, out: Array, lse: Array) -> None:
    """Rows whose every tile was skipped: no key, only the sink if there is one."""
    if start < stop:
        _store(head, _start(head, (start, stop)), (start, stop), out, lse)


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array | None,
    needs: frozenset[str],
    *,
    block_m: int = BLOCK_M,
    block_n: int = BLOCK_N,
) -> Grads:
    """See ``backends.Backend``. Gradients that were not asked for are neither computed nor allocated."""
    if problem.rows == "paged":
        raise Unsupported(
            name, "no gradient through pages, which sequences may share; use dense or packed keys"
        )
    sums = _Sums.zeros(problem, tensors, needs)
    with np.errstate(all="ignore"):
        for head in _heads(problem, tensors):
            delta = _delta(head, out, lse, dout, dlse)
            log_sum = head.seq.queries(lse)[head.h]
            if sums.dsink is not None:
                sums.dsink[head.h] += scores.sink_gradient(head.sink, log_sum, delta)
            for visit in visits(head, "keys", block_m, block_n):
                _backward_tile(head, visit, sums, dout, delta, log_sum)
    return sums.narrowed(problem)


class _Sums(NamedTuple):
    """Gradient accumulators in compute precision, None where not needed."""

    dq: Array | None
    dk: Array | None
    dv: Array | None
    dbias: Array | None
    dalibi: Array | None
    dsink: Array | None

    @classmethod
    def zeros(cls, problem: Problem, tensors: Tensors, needs: frozenset[str]) -> _Sums:
        shapes: dict[str, Any] = {
            "q": tensors.q.shape,
            "k": tensors.k.shape,
            "v": tensors.v.shape,
            "bias": problem.bias_shape,
            "alibi_slopes": (problem.B, problem.H),
            "sink": (problem.H,),
        }
        wide = compute_dtype(problem.dtype)
        return cls(*(np.zeros(shape, wide) if at in needs else None for at, shape in shapes.items()))

    def narrowed(self, problem: Problem) -> Grads:
        dtypes = (*(problem.dtype,) * 3, problem.bias_dtype, *(problem.lse_dtype,) * 2)
        return Grads(*(None if x is None else narrow(x, to) for x, to in zip(self, dtypes, strict=True)))


def _delta(head: Head, out: Array, lse: Array, dout: Array, dlse: Array | None) -> Array:
    """rowsum(dout * out) - dlse; a dead row's lse does not depend on anything, so its dlse is dropped."""
    rows = (0, head.seq.m)
    delta = np.einsum("md,md->m", head.load_rows(dout, rows), head.load_rows(out, rows))
    if dlse is None:
        return delta
    dead = np.isneginf(head.seq.queries(lse)[head.h])
    return delta - np.where(dead, 0, head.seq.queries(dlse)[head.h])


def _backward_tile(head: Head, visit: Visit, sums: _Sums, dout: Array, delta: Array, log_sum: Array) -> None:
    """Rebuild p of one tile from lse and add what it contributes to every gradient that is needed."""
    rows, cols, edge = visit
    problem, tensors, g = head.problem, head.seq.tensors, head.h // head.problem.G
    scale = delta.dtype.type(problem.scale)
    q, k = head.load_rows(tensors.q, rows), head.load_keys(tensors.k, cols)
    s, capped = head.logits(q * scale, k, rows, cols, edge)
    p = np.exp(s - online_softmax.reference_point(log_sum[slice(*rows)])[:, None])
    do = head.load_rows(dout, rows)
    if sums.dv is not None:
        head.seq.keys(sums.dv, g, *cols)[...] += product(head.drop(p, rows, cols).T, do)
    if all(x is None for x in (sums.dq, sums.dk, sums.dbias, sums.dalibi)):
        return
    dp = head.drop(product(do, head.load_keys(tensors.v, cols).T), rows, cols)
    ds = p * (dp - delta[slice(*rows), None])
    if sums.dbias is not None:
        scores.add_bias_gradient(sums.dbias, ds, head.seq.b, head.h, rows, cols)
    if sums.dalibi is not None:
        sums.dalibi[head.seq.b, head.h] += scores.alibi_gradient(ds, head.distance(rows, cols))
    if problem.softcap:
        ds = ds * scores.softcap_derivative(capped, problem.softcap)
    if sums.dq is not None:
        head.seq.queries(sums.dq)[head.h, slice(*rows)] += scale * product(ds, k)
    if sums.dk is not None:
        head.seq.keys(sums.dk, g, *cols)[...] += scale * product(ds.T, q)
