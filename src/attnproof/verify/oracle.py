"""The right answer in float64, with the size of the error that a correct kernel may make.

Independent of every backend: it shares no code with what it judges, the dropout generator included. Memory is
O(chunk): rows are taken in blocks against all keys. The same code runs on NumPy arrays and on torch float64 tensors
(`xp` is the module), so a GPU can serve as the oracle of large cases.

Besides each value `x` the oracle returns `Terms`, the sensitivities that the error model in `numerics` combines:

    rounding   x^2                         the output is rounded once
    operand    sum_j p_j^2 v_j^2           the weights are rounded to the input dtype before the product
    scores     sum_j p_j^2 s_j^2 (v_j-o)^2 the logits are rounded too (eager kernels)
    slop       sum_j p_j (1+|s_j|) |v_j|   any error of relative size 2^-24 in the logits or the exponential
    linear     sum_j p_j |v_j|             worst case of the operand rounding
    delta      variance that reaches a gradient through rowsum(dout * out), whose out was rounded
    reach      worst case of the same
    floor      variance below the normal range of the dtype

Shape letters: G heads of one chunk, R rows of one block, N keys, D and E the head dims.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attnproof.verify.dtypes import DTYPES, F32_TINY

CHUNK = 1 << 20  # elements of one score block; about a dozen of them are alive at a time
BIG = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Question:
    """One dense attention problem in float64.

    q `[B,H,M,D]`, k `[B,Hkv,N,D]`, v `[B,Hkv,N,E]`; keep and bias broadcastable to `[B,H,M,N]`; slopes `[B,H]`;
    sink `[H]`; dout `[B,H,M,E]`; dlse `[B,H,M]`. `row_ids` are the positions of the given rows of q when only some
    of the M are asked for. `sequence` is the batch index that dropout sees for the first entry.
    """

    q: Any
    k: Any
    v: Any
    scale: float
    dtype: str = "float64"
    left: int = BIG
    right: int = BIG
    top_left: bool = False
    keep: Any = None
    bias: Any = None
    slopes: Any = None
    sink: Any = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    rng: tuple[int, int] = (0, 0)
    sequence: int = 0
    dout: Any = None
    dlse: Any = None
    row_ids: Any = None
    rows: int | None = None  # M of the whole problem when row_ids is given
    xp: Any = np


@dataclass(frozen=True)
class Terms:
    """A value and its sensitivities, all of one shape (see the module docstring)."""

    value: Any
    operand: Any
    scores: Any
    slop: Any
    linear: Any
    floor: Any
    delta: Any
    reach: Any


@dataclass
class Answer:
    """What the oracle returns: `tensors` by name (out, dq, dk, dv, dbias, dslopes, dsink) and the lse."""

    tensors: dict[str, Terms]
    lse: Any
    lse_slop: Any  # [B,H,M]: largest 1+|s| of the row, plus what the dot product may lose
    dead: Any  # [B,H,M] bool: rows without a key
    hull: tuple[Any, Any] | None = None  # smallest and largest value of the column, per output element
    condition: float = 0.0  # largest |q|.|k| * scale: what a logit may lose in units of 2^-24
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Block:
    """Heads and rows of one block."""

    batch: Any  # [G] batch index of each head of the block
    head: Any  # [G]
    rows: slice
    ids: Any  # [R] positions of the rows


def solve(question: Question) -> Answer:
    """Forward, lse and, when `question.dout` is given, all gradients."""
    return _Solver(question).run()


class _Solver:
    """Walks over blocks of heads and rows; every array is [G, rows, keys] or [G, rows, dim]."""

    def __init__(self, ask: Question) -> None:
        self.ask, self.xp = ask, ask.xp
        self.B, self.H, self.M, self.D = ask.q.shape
        self.Hkv, self.N, self.E = ask.k.shape[1], ask.k.shape[2], ask.v.shape[3]
        self.group = self.H // self.Hkv if self.Hkv else 1
        self.offset = self.N - (self.M if ask.rows is None else ask.rows)
        info = DTYPES[ask.dtype]
        self.floor = info.floor if ask.dtype == "float16" else F32_TINY
        self.grads = ask.dout is not None
        self.like = ask.q

    def zeros(self, *shape: int) -> Any:
        if self.xp is np:
            return np.zeros(shape)
        return self.xp.zeros(shape, dtype=self.xp.float64, device=self.like.device)

    def arange(self, stop: int) -> Any:
        return np.arange(stop) if self.xp is np else self.xp.arange(stop, device=self.like.device)

    def run(self) -> Answer:
        heads = self.B * self.H
        names = tuple(Terms.__dataclass_fields__)
        self.store: dict[str, dict[str, Any]] = {}
        shapes = {"out": (heads, self.M, self.E)}
        if self.grads:
            shapes |= {
                "dq": (heads, self.M, self.D),
                "dk": (self.B * self.Hkv, self.N, self.D),
                "dv": (self.B * self.Hkv, self.N, self.E),
            }
            if self.ask.sink is not None:
                shapes["dsink"] = (self.H,)
            if self.ask.slopes is not None:
                shapes["dslopes"] = (self.B, self.H)
            if self.ask.bias is not None:
                shapes["dbias"] = tuple(self.ask.bias.shape)
        for tensor, shape in shapes.items():
            self.store[tensor] = {name: self.zeros(*shape) for name in names}
        self.lse, self.lse_slop = self.zeros(heads, self.M) - np.inf, self.zeros(heads, self.M)
        self.low, self.high = self.zeros(heads, self.M, self.E), self.zeros(heads, self.M, self.E)
        self.condition = 0.0
        for block in self.blocks():
            self.visit(block)
        return self.answer()

    def blocks(self) -> Any:
        """Blocks of whole groups of query heads, so that shared keys are summed inside one block."""
        heads = self.B * self.H
        if heads == 0 or self.M == 0:
            return
        rows = max(1, min(self.M, CHUNK // max(1, self.group * self.N)))
        groups = max(1, CHUNK // max(1, self.group * rows * max(self.N, self.D, 1)))
        step = groups * self.group
        ids = self.arange(self.M) if self.ask.row_ids is None else self.ask.row_ids
        flat = self.arange(heads)
        for first in range(0, heads, step):
            part = flat[first : first + step]
            for row in range(0, self.M, rows):
                rows_slice = slice(row, min(row + rows, self.M))
                yield _Block(part // self.H, part % self.H, rows_slice, ids[rows_slice])

    def take(self, array: Any, block: _Block, *, rows: bool, keys: bool) -> Any:
        """The block of an array that broadcasts over [B,H,M,N]."""
        batch = block.batch if array.shape[0] > 1 else block.batch * 0
        head = block.head if array.shape[1] > 1 else block.head * 0
        part = array[batch, head]
        if rows and array.shape[2] > 1:
            part = part[:, block.rows]
        return part

    def scores(self, block: _Block, q: Any, k: Any) -> tuple[Any, Any, Any]:
        """Final logits [G,R,N], the derivative of the softcap, and the size of what was summed up in a logit."""
        ask, xp = self.ask, self.xp
        s = ask.scale * (q @ k.swapaxes(-1, -2))
        size = abs(ask.scale) * (xp.abs(q) @ xp.abs(k).swapaxes(-1, -2))
        slope = None
        if ask.softcap:
            bounded = xp.tanh(s / ask.softcap)
            s, slope = ask.softcap * bounded, 1.0 - bounded * bounded
        i, j = block.ids[:, None], self.arange(self.N)[None, :]
        if ask.slopes is not None:
            s = s + self.alibi(block, i, j)
            size = size + xp.abs(self.alibi(block, i, j))
        if ask.bias is not None:
            bias = self.take(ask.bias, block, rows=True, keys=True)
            s = s + bias
            size = size + xp.where(xp.isfinite(bias), xp.abs(bias), 0.0)
        distance = j - (i + self.offset)
        seen = (distance >= -ask.left) & (distance <= ask.right)
        if ask.top_left:
            seen = seen & (j <= i)
        seen = seen[None]
        if ask.keep is not None:
            seen = seen & self.take(ask.keep, block, rows=True, keys=True)
        s = xp.where(seen, s, -np.inf)
        return s, slope, xp.where(seen, size, 0.0)

    def alibi(self, block: _Block, i: Any, j: Any) -> Any:
        per_head = self.ask.slopes[block.batch, block.head]
        return -per_head[:, None, None] * self.xp.abs(i + self.offset - j)[None]

    def visit(self, block: _Block) -> None:
        ask, xp = self.ask, self.xp
        kv = block.batch * self.Hkv + block.head // self.group
        q = ask.q[block.batch, block.head][:, block.rows]
        k = ask.k.reshape(self.B * self.Hkv, self.N, self.D)[kv]
        v = ask.v.reshape(self.B * self.Hkv, self.N, self.E)[kv]
        s, slope, size = self.scores(block, q, k)
        weights, lse, peak = self.softmax(block, s)
        finite = xp.where(xp.isfinite(s), xp.abs(s), 0.0)
        sensitivity = 1.0 + finite + size / 8.0
        if self.N:
            row_worst = xp.amax(sensitivity, -1)
            self.condition = max(self.condition, float(xp.amax(size)))
        else:
            row_worst = lse * 0 + 1.0
        at = (block.batch * self.H + block.head, block.rows)
        self.lse[at], self.lse_slop[at] = lse, row_worst
        kept = weights
        if ask.dropout_p:
            kept = weights * self.dropout(block)
        out = self.forward(at, kept, v, finite, sensitivity, peak)
        if self.grads:
            self.backward(block, at, kv, q, k, v, weights, kept, lse, out, slope, finite, sensitivity)

    def softmax(self, block: _Block, s: Any) -> tuple[Any, Any, Any]:
        """Normalised weights, lse, and the largest weight that a running max may divide by."""
        xp = self.xp
        top = xp.amax(s, -1) if self.N else self.zeros(*s.shape[:2]) - np.inf
        if self.ask.sink is not None:
            sink = self.ask.sink[block.head][:, None]
            top = xp.maximum(top, sink)
        shift = xp.where(xp.isneginf(top), 0.0, top)
        p = xp.exp(s - shift[..., None])
        total = p.sum(-1)
        if self.ask.sink is not None:
            total = total + xp.exp(sink - shift)
        with np.errstate(divide="ignore"):
            lse = shift + xp.log(total)
        safe = xp.where(total == 0, 1.0, total)
        return p / safe[..., None], lse, 1.0 / safe

    def forward(self, at: Any, p: Any, v: Any, finite: Any, sensitivity: Any, peak: Any) -> Any:
        xp, keep = self.xp, self.store["out"]
        absolute, square = xp.abs(v), v * v
        out = p @ v
        p2 = p * p
        keep["value"][at] = out
        keep["operand"][at] = p2 @ square
        keep["linear"][at] = p @ absolute
        keep["slop"][at] = (p * sensitivity) @ absolute
        weighted = p2 * finite * finite
        keep["scores"][at] = (
            weighted @ square - 2 * out * (weighted @ v) + out * out * weighted.sum(-1)[..., None]
        )
        small = xp.minimum(p, self.floor * peak[..., None])
        keep["floor"][at] = self.floor**2 + (small * small) @ square
        if self.N:
            self.low[at] = xp.amin(v, -2)[:, None] + 0.0 * out
            self.high[at] = xp.amax(v, -2)[:, None] + 0.0 * out
        return out

    def backward(
        self,
        block: _Block,
        at: Any,
        kv: Any,
        q: Any,
        k: Any,
        v: Any,
        p: Any,
        kept: Any,
        lse: Any,
        out: Any,
        slope: Any,
        finite: Any,
        sensitivity: Any,
    ) -> None:
        ask, xp = self.ask, self.xp
        dout = ask.dout[block.batch, block.head][:, block.rows]
        dlse = (
            self.zeros(*lse.shape) if ask.dlse is None else ask.dlse[block.batch, block.head][:, block.rows]
        )
        factor = self.dropout(block) if ask.dropout_p else 1.0
        dp = (dout @ v.swapaxes(-1, -2)) * factor
        delta = (dout * out).sum(-1) - dlse
        ds = p * (dp - delta[..., None])
        square = dout * dout
        # what the rounded output does to delta, in units of the unit roundoff squared
        delta_noise = (square * (out * out + self.store["out"]["operand"][at])).sum(-1)
        reach = xp.abs(dout) @ xp.abs(v).swapaxes(-1, -2) * factor
        delta_reach = (xp.abs(dout) * self.store["out"]["linear"][at]).sum(-1) + xp.abs(dlse)
        slop = p * (sensitivity * (xp.abs(dp) + xp.abs(delta)[..., None]) + reach + delta_reach[..., None])
        # rounding of S, P and dP in an eager backward: relative errors of dS of that size
        eager = p * p * (dp * dp + 2 * (p * p * dp * dp).sum(-1)[..., None]) + ds * ds * (
            1 + 2 * finite * finite
        )
        parts = _Parts(ds, p, eager, slop, delta_noise, delta_reach)
        self.score_gradients(block, parts)
        self.sink_gradient(block, lse, delta, delta_noise, delta_reach)
        if slope is not None:
            parts = replace(
                parts,
                ds=ds * slope,
                p=p * slope,
                eager=eager * slope * slope,
                # the derivative itself is known to 2^-24 in absolute terms
                slop=slop * slope + xp.abs(ds),
            )
        self.key_value_gradients(at, kv, q, k, dout, kept, finite, sensitivity, parts)

    def key_value_gradients(
        self,
        at: Any,
        kv: Any,
        q: Any,
        k: Any,
        dout: Any,
        kept: Any,
        finite: Any,
        sensitivity: Any,
        parts: _Parts,
    ) -> None:
        xp, a, fl = self.xp, self.ask.scale, self.floor
        ds, p = parts.ds, parts.p
        small = xp.clip(xp.abs(ds), None, fl)
        self.put(
            "dq",
            at,
            value=a * ds @ k,
            operand=a * a * ((ds * ds) @ (k * k)),
            delta=a * a * parts.delta[..., None] * (p @ k) ** 2,
            reach=abs(a) * parts.reach[..., None] * (p @ xp.abs(k)),
            scores=a * a * parts.eager @ (k * k),
            slop=abs(a) * parts.slop @ xp.abs(k),
            linear=abs(a) * (xp.abs(ds) @ xp.abs(k)),
            floor=fl * fl + a * a * (small * small) @ (k * k),
        )
        dst, pt = ds.swapaxes(-1, -2), p.swapaxes(-1, -2)
        noisy = (pt * pt) * parts.delta[:, None, :]
        self.add(
            "dk",
            kv,
            value=a * dst @ q,
            operand=a * a * ((dst * dst) @ (q * q)),
            delta=a * a * (noisy @ (q * q)),
            reach=abs(a) * ((pt * parts.reach[:, None, :]) @ xp.abs(q)),
            scores=a * a * parts.eager.swapaxes(-1, -2) @ (q * q),
            slop=abs(a) * parts.slop.swapaxes(-1, -2) @ xp.abs(q),
            linear=abs(a) * (xp.abs(dst) @ xp.abs(q)),
            floor=fl * fl + a * a * (small * small).swapaxes(-1, -2) @ (q * q),
        )
        wt = kept.swapaxes(-1, -2)
        tiny = xp.clip(wt, None, fl)
        square = dout * dout
        self.add(
            "dv",
            kv,
            value=wt @ dout,
            operand=(wt * wt) @ square,
            scores=(wt * wt * (2 * finite * finite).swapaxes(-1, -2)) @ square,
            slop=(kept * sensitivity).swapaxes(-1, -2) @ xp.abs(dout),
            linear=wt @ xp.abs(dout),
            floor=fl * fl + (tiny * tiny) @ square,
        )

    def put(self, name: str, at: Any, **terms: Any) -> None:
        for term, value in terms.items():
            self.store[name][term][at] = value

    def add(self, name: str, kv: Any, **terms: Any) -> None:
        """Sum over the heads of a group; the per-head rounding of eager kernels joins the `scores` term."""
        first = kv[:: self.group]
        grouped = {
            term: value.reshape(len(first), self.group, *value.shape[1:]) for term, value in terms.items()
        }
        if self.group > 1:
            grouped["scores"] = grouped["scores"] + grouped["value"] ** 2
        for term, value in grouped.items():
            self.store[name][term][first] += value.sum(1)

    def score_gradients(self, block: _Block, parts: _Parts) -> None:
        """Gradients of what is added to the scores: bias and ALiBi slopes."""
        if self.ask.bias is not None:
            self.bias_gradient(block, parts)
        if self.ask.slopes is not None:
            xp = self.xp
            i, j = block.ids[:, None], self.arange(self.N)[None, :]
            distance = -xp.abs(i + self.offset - j)[None] + 0.0
            mean = (parts.p * distance).sum(-1)
            terms = {
                "value": (parts.ds * distance).sum((-1, -2)),
                "delta": (parts.delta * mean * mean).sum(-1),
                "scores": (parts.eager * distance**2).sum((-1, -2)),
                "slop": (parts.slop * xp.abs(distance)).sum((-1, -2)),
                "reach": (parts.reach * xp.abs(mean)).sum(-1),
            }
            for term, value in terms.items():
                self.store["dslopes"][term][block.batch, block.head] += value

    def bias_gradient(self, block: _Block, parts: _Parts) -> None:
        shape = self.ask.bias.shape
        target = self.store["dbias"]
        terms = {
            "value": parts.ds,
            "delta": parts.p**2 * parts.delta[..., None],
            "scores": parts.eager,
            "slop": parts.slop,
            "reach": parts.p * parts.reach[..., None],
        }
        rows = block.rows if shape[2] > 1 else slice(0, 1)
        target["floor"][...] = self.floor**2
        for term, value in terms.items():
            if shape[3] == 1:
                value = value.sum(-1)[..., None]
            if shape[2] == 1:
                value = value.sum(-2)[:, None]
            for index in range(value.shape[0]):  # heads of one block may share a place: add one by one
                b = int(block.batch[index]) if shape[0] > 1 else 0
                h = int(block.head[index]) if shape[1] > 1 else 0
                target[term][b, h, rows] += value[index]

    def sink_gradient(self, block: _Block, lse: Any, delta: Any, noise: Any, reach: Any) -> None:
        if self.ask.sink is None:
            return
        xp = self.xp
        sink = self.ask.sink[block.head][:, None]
        share = xp.exp(xp.where(xp.isneginf(lse), -np.inf, sink - lse))
        terms = {
            "value": -(share * delta).sum(-1),
            "delta": (share**2 * noise).sum(-1),
            "slop": (share * (1 + xp.abs(lse) + xp.abs(sink)) * (xp.abs(delta) + reach)).sum(-1),
            "reach": (share * reach).sum(-1),
        }
        for index in range(len(block.head)):
            h = int(block.head[index])
            for term, value in terms.items():
                self.store["dsink"][term][h] += value[index]

    def dropout(self, block: _Block) -> Any:
        """The factor of each weight: 0 or 1/(1-p)."""
        p = self.ask.dropout_p
        if p >= 1.0:
            return 0.0
        from attnproof.verify.philox_oracle import keep_factor

        to_numpy = (lambda x: x) if self.xp is np else (lambda x: x.cpu().numpy())
        sequence = to_numpy(block.batch) + self.ask.sequence
        factor = keep_factor(
            p, self.ask.rng, sequence * self.H + to_numpy(block.head), to_numpy(block.ids), self.N
        )
        return factor if self.xp is np else self.xp.as_tensor(factor, device=self.like.device)

    def answer(self) -> Answer:
        B, H, M = self.B, self.H, self.M
        shaped = {
            "out": (B, H, M, self.E),
            "dq": (B, H, M, self.D),
            "dk": (B, self.Hkv, self.N, self.D),
            "dv": (B, self.Hkv, self.N, self.E),
        }
        tensors = {
            name: Terms(
                **{term: array.reshape(shaped.get(name, tuple(array.shape))) for term, array in kept.items()}
            )
            for name, kept in self.store.items()
        }
        lse = self.lse.reshape(B, H, M)
        dead = self.xp.isneginf(lse) if self.ask.sink is None else (tensors["out"].linear == 0).all(-1)
        low, high = self.low.reshape(B, H, M, self.E), self.high.reshape(B, H, M, self.E)
        return Answer(tensors, lse, self.lse_slop.reshape(B, H, M), dead, (low, high), self.condition)


@dataclass(frozen=True)
class _Parts:
    """What the gradients share: dS, P, and how far dS may be off."""

    ds: Any
    p: Any
    eager: Any
    slop: Any
    delta: Any  # [G,R] variance of delta in units of the unit roundoff squared
    reach: Any  # [G,R] worst case of delta in units of the unit roundoff
