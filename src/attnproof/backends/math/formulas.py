r"""Softmax attention of one chunk of rows, its gradient, and the loops that run them.

Forward, for rows of a chunk against all keys (SEMANTICS section 2):

    s = mask(bias(alibi(softcap(scale q k^T)))),  e = exp(s - max s),  l = sum e + exp(sink - max s)
    out = dropout(e) v / l,  lse = max s + ln l

Backward, with p = e / l built again:

    dv += dropout(p)^T do,  dp = dropout(do v^T),  ds = p (dp - rowsum(p dp) + dlse)
    dsink -= p_sink (rowsum(p dp) - dlse),  then bias, alibi, softcap and scale in reverse order

Gradients are written out instead of recorded: a custom operator runs below autograd, where nothing is recorded.
Mirror: ``backends/streaming.py``, which does the same tile by tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...problem import Grads, Problem, Tensors
from . import philox
from .blocks import Group, Span, group, groups
from .precision import exact


def wide_dtype(problem: Problem) -> torch.dtype:
    """What a chunk is computed in."""
    return torch.float64 if problem.dtype == "float64" else torch.float32


class Weights(NamedTuple):
    """The softmax of a chunk, not divided by its sum yet."""

    capped: Tensor  # [b, H, rows, cols] scores after the cap, before alibi and bias
    e: Tensor  # [b, H, rows, cols]
    total: Tensor  # [b, H, rows, 1], 1 where nothing is visible
    e_sink: Tensor | None  # [b, H, rows, 1]
    lse: Tensor  # [b, H, rows, 1]


def _per_kv_head(x: Tensor, heads: int) -> Tensor:
    """[b, H, rows, c] as [b, Hkv, G * rows, c]: the queries that share a key head, stacked."""
    b, H, rows, width = x.shape
    return x.reshape(b, heads, H // heads * rows, width)


def _scores(at: Group, scaled_q: Tensor, k: Tensor) -> Tensor:
    stacked = _per_kv_head(scaled_q, k.shape[1]) @ k.transpose(-1, -2)
    return stacked.reshape(*scaled_q.shape[:3], k.shape[2])


def _weights(at: Group, rows: Span, cols: Span, scaled_q: Tensor, k: Tensor) -> Weights:
    """Logits and their softmax, in the fixed order of SEMANTICS section 2; differentiable."""
    p, tensors = at.problem, at.tensors
    s = _scores(at, scaled_q, k)
    if p.softcap:
        s = p.softcap * torch.tanh(s / p.softcap)
    capped = s
    if p.has_alibi:
        s = s - _slopes(at).to(s.dtype) * at.distance(rows, cols).abs().to(s.dtype)
    if p.has_bias:
        s = s + at.pairs(tensors.bias, rows, cols).to(s.dtype)
    allowed = at.allowed(rows, cols)
    if allowed is not None:
        s = torch.where(allowed, s, -torch.inf)
    sink = tensors.sink.to(s.dtype).view(1, -1, 1, 1) if p.has_sink else None
    # the softmax does not depend on the point it is taken relative to, so no gradient goes through it
    top = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    point = torch.where(torch.isneginf(top), 0, top)
    e = torch.exp(s - point)
    e_sink = None if sink is None else torch.exp(sink - point)
    total = e.sum(-1, keepdim=True) if e_sink is None else e.sum(-1, keepdim=True) + e_sink
    empty = total == 0  # NaN is not empty: it has to reach the output
    total = torch.where(empty, 1, total)
    lse = torch.where(empty, -torch.inf, point + torch.log(total))
    return Weights(capped, e, total, e_sink, lse)


def _slopes(at: Group) -> Tensor:
    slopes = at.tensors.alibi_slopes
    return (slopes if slopes.shape[0] == 1 else slopes[at.start : at.stop])[..., None, None]


class _Dropout:
    """Kept entries times 1 / (1 - p), the others 0; the identity for p = 0."""

    def __init__(self, at: Group, rows: Span, cols: Span) -> None:
        p = at.problem.dropout_p
        self.factor = 0.0 if p >= 1 else 1 / (1 - p)
        self.kept = philox.keep(p, at.tensors.rng, at.planes(), rows, cols) if 0 < p < 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.factor == 0:
            return torch.zeros_like(x)
        return x if self.kept is None else torch.where(self.kept, x * self.factor, 0)


def _rows(at: Group, rows: Span, cols: Span, scaled_q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output [b, H, rows, Dv] and lse [b, H, rows, 1] of one chunk."""
    w = _weights(at, rows, cols, scaled_q, k)
    dropped = _per_kv_head(_Dropout(at, rows, cols)(w.e), k.shape[1])
    out = (dropped @ v).reshape(*scaled_q.shape[:3], v.shape[3]) / w.total
    return out, w.lse


def _load_keys(at: Group, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    return at.keys(at.tensors.k).to(wide), at.keys(at.tensors.v).to(wide)


def _scaled_queries(at: Group, rows: Span, wide: torch.dtype) -> Tensor:
    return at.queries(at.tensors.q, rows).to(wide) * at.problem.scale


def forward(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Output in the caller's storage order and lse; see ``backends.Backend``."""
    wide, device = wide_dtype(problem), tensors.q.device
    out = _new_rows(problem, problem.out_shape[-2], problem.Dv, tensors.q.dtype, device, 0)
    lse = _new_lse(problem, wide, device)
    with torch.no_grad(), exact(device):
        for at in groups(problem, tensors):
            k, v = _load_keys(at, wide)
            for rows in at.chunks():
                first, last = cols = at.columns(rows)
                q = _scaled_queries(at, rows, wide)
                part, log_sum = _rows(at, rows, cols, q, k[:, :, first:last], v[:, :, first:last])
                at.store_queries(out, rows, part)
                at.store_queries(lse, rows, log_sum)
    if problem.rows == "packed":
        return out[:, : problem.tokens[0]], lse[:, : problem.tokens[0], 0].contiguous()
    return out, lse[..., 0]


def _spare(problem: Problem) -> int:
    """Packed results have one row more than tokens: what is gathered but belongs to no sequence is stored there."""
    return 1 if problem.rows == "packed" else 0


def _new_rows(
    problem: Problem,
    rows: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    value: float,
    heads: int = -1,
) -> Tensor:
    """[B, heads, rows, width], or packed [heads, rows + 1, width], in the storage order of the caller."""
    heads = problem.H if heads < 0 else heads
    if problem.rows == "packed":
        stored = torch.full((rows + 1, heads, width), value, dtype=dtype, device=device)
        return stored.transpose(0, 1)
    if problem.layout == "bmhd":
        return torch.full((problem.B, rows, heads, width), value, dtype=dtype, device=device).transpose(1, 2)
    return torch.full((problem.B, heads, rows, width), value, dtype=dtype, device=device)


def _new_lse(problem: Problem, wide: torch.dtype, device: torch.device) -> Tensor:
    *heads, rows = problem.out_shape[:-1]
    return torch.full((*heads, rows + _spare(problem), 1), -torch.inf, dtype=wide, device=device)


def backward(
    problem: Problem, tensors: Tensors, dout: Tensor, dlse: Tensor | None, needs: frozenset[str]
) -> Grads:
    """Gradients by name, summed in the wide dtype; see ``backends.Backend``."""
    wide = wide_dtype(problem)
    sums = _Sums(problem, tensors, needs, wide)
    with torch.no_grad(), exact(tensors.q.device):
        for at in groups(problem, tensors):
            k, v = _load_keys(at, wide)
            dk = torch.zeros_like(k) if "k" in needs else None
            dv = torch.zeros_like(v) if "v" in needs else None
            for rows in at.chunks():
                first, last = cols = at.columns(rows)
                part = slice(first, last)
                chunk = _Chunk(at, rows, cols, _scaled_queries(at, rows, wide), k[:, :, part], v[:, :, part])
                chunk.run(sums, dout, dlse, *(None if x is None else x[:, :, part] for x in (dk, dv)))
            for name, value in (("k", dk), ("v", dv)):
                if value is not None:
                    at.store_keys(sums.of[name], value)
    return sums.result()


class _Sums:
    """Gradient accumulators, only of what is needed."""

    def __init__(self, problem: Problem, tensors: Tensors, needs: frozenset[str], wide: torch.dtype) -> None:
        self.problem, self.tensors, self.wide = problem, tensors, wide
        shapes = {"bias": problem.bias_shape, "alibi_slopes": (problem.B, problem.H), "sink": (problem.H,)}
        device = tensors.q.device
        self.of: dict[str, Any] = {}
        for name in ("q", "k", "v"):
            if name in needs:
                self.of[name] = self._rows(getattr(tensors, name), device)
        for name, shape in shapes.items():
            if name in needs and shape is not None:
                self.of[name] = torch.zeros(shape, dtype=wide, device=device)

    def _rows(self, x: Tensor, device: torch.device) -> Tensor:
        # each row of q, k and v is stored once, after its sum is complete; pages may be shared, so they are summed wide
        if self.problem.rows == "paged" and x is not self.tensors.q:
            return torch.zeros(x.shape, dtype=self.wide, device=device)
        return _new_rows(self.problem, x.shape[-2], x.shape[-1], x.dtype, device, 0, heads=x.shape[-3])

    def add_bias(self, at: Group, rows: Span, cols: Span, ds: Tensor) -> None:
        into = at.pairs(self.of["bias"], rows, cols)
        into += (
            ds.sum([axis for axis in range(4) if into.shape[axis] == 1], keepdim=True)
            if 1 in into.shape
            else ds
        )

    def result(self) -> Grads:
        problem, of = self.problem, self.of
        if problem.rows == "packed":
            for name in ("q", "k", "v"):
                if name in of:
                    of[name] = of[name][:, :-1]
        dtypes = {name: getattr(self.tensors, name).dtype for name in ("q", "k", "v", "bias") if name in of}
        names = ("q", "k", "v", "bias", "alibi_slopes", "sink")
        return Grads(*(of[name].to(dtypes.get(name, self.wide)) if name in of else None for name in names))


class _Chunk(NamedTuple):
    """The gradient of one chunk."""

    at: Group
    rows: Span
    cols: Span
    scaled_q: Tensor
    k: Tensor
    v: Tensor

    def run(
        self, sums: _Sums, dout: Tensor, dlse: Tensor | None, dk: Tensor | None, dv: Tensor | None
    ) -> None:
        """Add this chunk's part to every gradient that is needed."""
        at, rows, cols, heads = self.at, self.rows, self.cols, self.k.shape[1]
        w = _weights(at, rows, cols, self.scaled_q, self.k)
        p, drop = w.e / w.total, _Dropout(at, rows, cols)
        do = at.queries(dout, rows).to(sums.wide)
        if dv is not None:
            dv += _per_kv_head(drop(p), heads).transpose(-1, -2) @ _per_kv_head(do, heads)
        if not sums.of.keys() - {"v"}:
            return
        dp = drop((_per_kv_head(do, heads) @ self.v.transpose(-1, -2)).reshape(p.shape))
        row = (p * dp).sum(-1, keepdim=True)
        if dlse is not None:
            given = at.queries(dlse[..., None], rows).to(sums.wide)
            row = row - torch.where(torch.isneginf(w.lse), 0, given)
        if w.e_sink is not None and "sink" in sums.of:
            sums.of["sink"] -= (w.e_sink / w.total * row).sum((0, 2, 3))
        ds = p * (dp - row)
        if "bias" in sums.of:
            sums.add_bias(at, rows, cols, ds)
        if "alibi_slopes" in sums.of:
            distance = at.distance(rows, cols).abs().to(ds.dtype)
            sums.of["alibi_slopes"][at.start : at.stop] -= (ds * distance).sum((2, 3))
        self._inputs(sums, w, ds, dk)

    def _inputs(self, sums: _Sums, w: Weights, ds: Tensor, dk: Tensor | None) -> None:
        """dq and dk from dS, back through the cap and the scale."""
        p, heads = self.at.problem, self.k.shape[1]
        if p.softcap:
            ds = ds * (1 - (w.capped / p.softcap) ** 2)
        ds = _per_kv_head(ds, heads)
        if "q" in sums.of:
            dq = p.scale * (ds @ self.k)
            self.at.store_queries(sums.of["q"], self.rows, dq.reshape(self.scaled_q.shape))
        if dk is not None:
            dk += ds.transpose(-1, -2) @ _per_kv_head(self.scaled_q, heads)


def differentiable(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Output and lse as one expression of the inputs: nothing in place, no length read, O(M N) memory."""
    wide = wide_dtype(problem)
    at = group(problem, tensors, 0, problem.B)
    rows, cols = (0, at.m), (0, at.n)
    with exact(tensors.q.device):
        q = _scaled_queries(at, rows, wide)
        out, lse = _rows(at, rows, cols, q, *_load_keys(at, wide))
    out, lse = out.to(tensors.q.dtype), lse[..., 0]
    if problem.rows != "packed":
        return out, lse
    return _to_tokens(tensors, out, 0), _to_tokens(tensors, lse, -torch.inf)


def _to_tokens(tensors: Tensors, padded: Tensor, unused: float) -> Tensor:
    """[B, H, M, ...] to [H, Tq, ...]: every token looks its row up."""
    cu, count = tensors.cu_q.long(), tensors.q.shape[1]
    token = torch.arange(count, device=cu.device)
    B, H, M = padded.shape[:3]
    if not (B and M):
        # the sum of nothing, so that the result still hangs on its inputs
        return padded.new_full((H, count, *padded.shape[3:]), unused) + padded.sum()
    b = (torch.searchsorted(cu, token, right=True) - 1).clamp(max=B - 1)
    row = (token - cu[b]).clamp(0, M - 1)
    used = (token < cu[-1]).view(-1, *(1,) * (padded.ndim - 3))
    return torch.where(used, padded.transpose(0, 1)[:, b, row], unused)
