r"""The oracle: attention materialised, in float64, in the order SEMANTICS section 2 writes it down.

Computes per sequence and head

    S = mask(bias(alibi(softcap(scale * Q K^T)))),  P = softmax([S, sink]),  O = dropout(P) V
    lse = logsumexp([S, sink])

and backward

    dP = dropout(dO V^T),  dS = P (dP - rowsum(dO O) + dlse),  dV = dropout(P)^T dO,

then the derivatives of bias, alibi, softcap and scale in reverse order. Nothing is tiled and nothing is clever: memory
is O(M N) per head. ``materialise`` hands out S, P and O themselves, which no fused kernel can.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import philox, scores
from ..dtypes import narrow, storage_dtype, widen
from ..errors import Unsupported
from ..problem import GRADIENTS, Grads, Problem, Tensors
from ..products import product
from ..rows import Sequence, empty_like_rows, sequences

Array = npt.NDArray[Any]

name = "reference"
kind = "numpy"


def why_not(problem: Problem) -> str | None:
    """The reference refuses nothing; device tensors are copied to the host."""
    return None


class Materialised(NamedTuple):
    """What one head of one sequence computes on the way, in ``compute`` precision."""

    seq: Sequence
    head: int
    capped: Array  # [m, n] scaled and capped scores, before alibi and bias
    s: Array  # [m, n] final logits, -inf where masked
    p: Array  # [m, n] softmax, before dropout
    factor: Array | float  # [m, n] dropout: 0 or 1 / (1 - p)
    out: Array  # [m, Dv]
    lse: Array  # [m]


def materialise(
    problem: Problem, tensors: Tensors, compute: npt.DTypeLike = np.float64
) -> Iterator[Materialised]:
    """S, P and O of every head of every sequence, in order; ``tensors`` are NumPy."""
    tensors = tensors.expand(problem)
    for seq in sequences(problem, tensors):
        allowed = _allowed(seq)
        for head in range(problem.H):
            with np.errstate(all="ignore"):
                one = _head(seq, head, allowed, compute)
            yield one  # outside of it, or the caller would run under this error state until the next head


def forward(
    problem: Problem, tensors: Tensors, *, compute: npt.DTypeLike = np.float64
) -> tuple[Array, Array]:
    """See ``backends.Backend``; ``compute`` may be float32 to see what plain single precision gives."""
    out = empty_like_rows(problem, problem.out_shape[-2], problem.H, problem.Dv, storage_dtype(problem.dtype))
    lse = np.full(problem.out_shape[:-1], -np.inf, dtype=problem.lse_dtype)
    if problem.rows == "packed":
        out[...] = 0  # tokens past the last sequence
    for one in materialise(problem, tensors, compute):
        with np.errstate(all="ignore"):
            one.seq.queries(out)[one.head] = narrow(one.out, problem.dtype)
            one.seq.queries(lse)[one.head] = one.lse
    return out, lse


def backward(
    problem: Problem,
    tensors: Tensors,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array | None,
    needs: frozenset[str],
) -> Grads:
    """See ``backends.Backend``; P is materialised again, ``out`` and ``lse`` are not used."""
    if problem.rows == "paged":
        raise Unsupported(
            name, "no gradient through pages, which sequences may share; use dense or packed keys"
        )
    full = tensors.expand(problem)
    shapes = (
        (*problem.out_shape[:-1], problem.D),
        tensors.k.shape,
        tensors.v.shape,
        problem.bias_shape or (0, 0, 0, 0),
        (problem.B, problem.H),
        (problem.H,),
    )
    sums = Grads(*(np.zeros(shape) for shape in shapes))
    for one in materialise(problem, tensors):
        with np.errstate(all="ignore"):
            _add_gradients(one, full, dout, dlse, sums)
    return _pick(problem, needs, sums)


def _add_gradients(one: Materialised, tensors: Tensors, dout: Array, dlse: Array | None, sums: Grads) -> None:
    """Add what one head contributes to every gradient."""
    seq, h, problem = one.seq, one.head, one.seq.problem
    g, wide = h // problem.G, np.float64
    q, do = (widen(seq.queries(x)[h], problem.dtype, wide) for x in (tensors.q, dout))
    k, v = (widen(seq.keys(x, g, 0, seq.n), problem.dtype, wide) for x in (tensors.k, tensors.v))
    row = (do * one.out).sum(axis=1)
    if dlse is not None:
        row = row - np.where(np.isneginf(one.lse), 0, seq.queries(dlse)[h])
    ds = one.p * (one.factor * product(do, v.T) - row[:, None])
    seq.keys(sums.dv, g, 0, seq.n)[...] += product((one.p * one.factor).T, do)
    if problem.bias_shape is not None:
        scores.add_bias_gradient(sums.dbias, ds, seq.b, h, (0, seq.m), (0, seq.n))
    if problem.has_alibi:
        sums.dalibi[seq.b, h] = scores.alibi_gradient(ds, _distance(seq))
    if problem.has_sink:
        sums.dsink[h] += scores.sink_gradient(scores.sink_logit(tensors.sink, h), one.lse, row)
    if problem.softcap:
        ds = ds * scores.softcap_derivative(one.capped, problem.softcap)
    seq.queries(sums.dq)[h] = problem.scale * product(ds, k)
    seq.keys(sums.dk, g, 0, seq.n)[...] += problem.scale * product(ds.T, q)


def _pick(problem: Problem, needs: frozenset[str], grads: Grads) -> Grads:
    dtypes = (*(problem.dtype,) * 3, problem.bias_dtype or problem.dtype, *(problem.lse_dtype,) * 2)
    parts = zip(GRADIENTS, grads, dtypes, strict=True)
    return Grads(*(narrow(x, to) if at in needs else None for at, x, to in parts))


def _head(seq: Sequence, head: int, allowed: Array, compute: npt.DTypeLike) -> Materialised:
    problem, tensors = seq.problem, seq.tensors
    q = widen(seq.queries(tensors.q)[head], problem.dtype, compute)
    k, v = (
        widen(seq.keys(x, head // problem.G, 0, seq.n), problem.dtype, compute)
        for x in (tensors.k, tensors.v)
    )
    capped = problem.scale * product(q, k.T)
    if problem.softcap:
        capped = scores.softcap(capped, problem.softcap)
    s = capped
    if problem.has_alibi:
        s = scores.alibi(s, tensors.alibi_slopes[seq.b, head], _distance(seq))
    if problem.has_bias:
        s = s + widen(tensors.bias[seq.b, head, : seq.m, : seq.n], problem.bias_dtype, compute)
    if problem.has_keep:
        allowed = allowed & tensors.keep[seq.b, head, : seq.m, : seq.n]
    s = np.where(allowed, s, -np.inf)
    p, lse = _softmax(s, scores.sink_logit(tensors.sink, head))
    factor = _dropout_factor(seq, head)
    return Materialised(seq, head, capped, s, p, factor, product(p * factor, v), lse)


def _softmax(s: Array, sink: float) -> tuple[Array, Array]:
    top = np.maximum(s.max(axis=1, initial=-np.inf), sink)
    point = np.where(np.isneginf(top), 0, top)
    e = np.exp(s - point[:, None])
    total = e.sum(axis=1) + np.exp(sink - point)
    return e / np.where(total == 0, 1, total)[:, None], point + np.log(total)


def _allowed(seq: Sequence) -> Array:
    lo, hi = seq.bounds()
    j = np.arange(seq.n)
    return (j >= lo[:, None]) & (j < hi[:, None])


def _distance(seq: Sequence) -> Array:
    return scores.distance(np.arange(seq.m), np.arange(seq.n), seq.m, seq.n)


def _dropout_factor(seq: Sequence, head: int) -> Array | float:
    problem = seq.problem
    if problem.dropout_p == 0:
        return 1.0
    seed, offset = (int(x) for x in seq.tensors.rng)
    plane = seq.b * problem.H + head
    kept = philox.keep(
        problem.dropout_p, seed=seed, offset=offset, plane=plane, i=np.arange(seq.m), start=0, stop=seq.n
    )
    return kept / (1 - problem.dropout_p) if problem.dropout_p < 1 else kept.astype(float)
