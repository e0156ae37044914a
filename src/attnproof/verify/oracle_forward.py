"""The oracle's walk over blocks of heads and rows, and its forward pass.

Shape letters: G heads of one block, R rows of it, N keys, D and E the head dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnproof.verify.dtypes import DTYPES, F32_TINY
from attnproof.verify.oracle import Answer, Question, Terms

CHUNK = 1 << 20  # elements of one score block; about a dozen of them are alive at a time


@dataclass(frozen=True)
class Block:
    """Heads and rows of one block."""

    batch: Any  # [G] batch index of each head of the block
    head: Any  # [G]
    rows: slice
    ids: Any  # [R] positions of the rows


class Forward:
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
        shapes: dict[str, tuple[int, ...]] = {"out": (heads, self.M, self.E)}
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
                yield Block(part // self.H, part % self.H, rows_slice, ids[rows_slice])

    def take(self, array: Any, block: Block, *, rows: bool, keys: bool) -> Any:
        """The block of an array that broadcasts over [B,H,M,N]."""
        batch = block.batch if array.shape[0] > 1 else block.batch * 0
        head = block.head if array.shape[1] > 1 else block.head * 0
        part = array[batch, head]
        if rows and array.shape[2] > 1:
            part = part[:, block.rows]
        return part

    def scores(self, block: Block, q: Any, k: Any) -> tuple[Any, Any, Any]:
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

    def alibi(self, block: Block, i: Any, j: Any) -> Any:
        per_head = self.ask.slopes[block.batch, block.head]
        return -per_head[:, None, None] * self.xp.abs(i + self.offset - j)[None]

    def visit(self, block: Block) -> None:
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
            self.condition = max(self.condition, float(xp.amax(xp.where(xp.isfinite(size), size, 0.0))))
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

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Gradients of one block; ``oracle_gradients`` fills this in."""
        raise NotImplementedError

    def softmax(self, block: Block, s: Any) -> tuple[Any, Any, Any]:
        """Normalised weights, lse, and the largest weight that a running max may divide by."""
        xp = self.xp
        top = xp.amax(s, -1) if self.N else self.zeros(*s.shape[:2]) - np.inf
        sink = None if self.ask.sink is None else self.ask.sink[block.head][:, None]
        if sink is not None:
            top = xp.maximum(top, sink)
        shift = xp.where(xp.isneginf(top), 0.0, top)
        p = xp.exp(s - shift[..., None])
        total = p.sum(-1)
        if sink is not None:
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

    def dropout(self, block: Block) -> Any:
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
