"""Correct kernels of each numerics class, written apart from every backend.

They exist to be judged: the self-test requires that the judge accepts them, on many seeds, while it rejects every
mutant. `tiled` is the online recurrence with P and dS rounded to the input dtype, as a tensor-core kernel does it
(class flash), written as a sum of two numbers of it (class split), or kept in fp32 (class precise); `eager` is the
materialised form with every intermediate stored in the input dtype (class eager). NumPy only, fp32 inside, fp64 for fp64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnproof.cases import Case
from attnproof.verify.dtypes import Array, rounded
from attnproof.verify.expected import band
from attnproof.verify.inputs import Inputs


@dataclass(frozen=True)
class Control:
    """A correct kernel: tile sizes and what it rounds."""

    name: str
    kind: str  # flash, split, precise or eager
    rows: int = 64
    keys: int = 64


CONTROLS = (
    Control("flash 64x64", "flash"),
    Control("flash 128x32", "flash", 128, 32),
    Control("precise 32x128", "precise", 32, 128),
    Control("split 48x64", "split", 48, 64),
    Control("eager", "eager"),
)


def run(control: Control, inputs: Inputs) -> dict[str, Array]:
    """Outputs of a control on a dense case, decoded to float64."""
    kernel = _Kernel(control, inputs)
    outputs = kernel.forward()
    if inputs.case.backward:
        outputs |= kernel.backward(outputs["out"], outputs["lse"])
    return outputs


class _Kernel:
    """One head at a time; s, m, l and acc as in the glossary."""

    def __init__(self, control: Control, inputs: Inputs) -> None:
        self.control, self.inputs, self.case = control, inputs, inputs.case
        self.work: Any = np.float64 if inputs.case.dtype == "float64" else np.float32
        self.q, self.k, self.v, self.dout = (
            part.values().astype(self.work) for part in (inputs.q, inputs.k, inputs.v, inputs.dout)
        )
        self.group = max(self.case.H // max(self.case.Hkv, 1), 1)

    def low(self, values: Array) -> Array:
        """Round to the input dtype unless the class keeps fp32."""
        if self.control.kind == "precise" or self.case.dtype in ("float32", "float64"):
            return values
        low = rounded(values, self.case.dtype).astype(self.work)
        if self.control.kind == "split":
            low = low + rounded(values - low, self.case.dtype).astype(self.work)
        return low

    def logit(self, values: Array) -> Array:
        return self.low(values) if self.control.kind == "eager" else values

    def scores(self, b: int, h: int, rows: slice, keys: slice) -> tuple[Array, Array | None]:
        case, ins = self.case, self.inputs
        s = self.logit(self.q[b, h, rows] @ self.k[b, h // self.group, keys].T)
        s = self.logit(s * self.work(case.softmax_scale))
        slope = None
        if case.softcap:
            bounded = np.tanh(s / self.work(case.softcap))
            s, slope = self.logit(self.work(case.softcap) * bounded), 1 - bounded * bounded
        i = np.arange(case.M)[rows, None]
        j = np.arange(case.N)[None, keys]
        centre = i + case.N - case.M
        if ins.slopes is not None:
            s = self.logit(s - ins.slopes[b, h].astype(self.work) * np.abs(centre - j).astype(self.work))
        if ins.bias is not None:
            full = np.broadcast_to(ins.bias.values(), (case.B, case.H, case.M, case.N))
            s = self.logit(s + full[b, h, rows, keys].astype(self.work))
        return np.where(self.seen(b, h, i, j, centre, rows, keys), s, self.work(-np.inf)), slope

    def seen(self, b: int, h: int, i: Array, j: Array, centre: Array, rows: slice, keys: slice) -> Array:
        left, right = band(self.case)
        seen = (j - centre >= -left) & (j - centre <= right)
        if self.case.causal and self.case.align == "top_left":
            seen = seen & (j <= i)
        if self.inputs.keep is not None:
            full = np.broadcast_to(self.inputs.keep, (self.case.B, self.case.H, self.case.M, self.case.N))
            seen = seen & full[b, h, rows, keys]
        return seen

    def dropped(self, b: int, h: int, rows: slice, keys: slice) -> Any:
        case = self.case
        if not case.dropout_p:
            return self.work(1)
        if case.dropout_p >= 1:
            return self.work(0)
        from attnproof.verify.philox_oracle import keep_factor

        plane = np.array([b * case.H + h])
        factor = keep_factor(case.dropout_p, self.inputs.rng, plane, np.arange(case.M)[rows], case.N)
        return factor[0][:, keys].astype(self.work)

    def tiles(self, total: int, size: int) -> list[slice]:
        if self.control.kind == "eager":
            return [slice(0, total)] if total else []
        return [slice(start, min(start + size, total)) for start in range(0, total, size)]

    def forward(self) -> dict[str, Array]:
        case = self.case
        out = np.zeros((case.B, case.H, case.M, case.Dv), self.work)
        lse = np.full((case.B, case.H, case.M), -np.inf, self.work)
        for b in range(case.B):
            for h in range(case.H):
                for rows in self.tiles(case.M, self.control.rows):
                    out[b, h, rows], lse[b, h, rows] = self.row_tile(b, h, rows)
        return {"out": rounded(out, case.dtype), "lse": lse.astype(np.float64)}

    def row_tile(self, b: int, h: int, rows: slice) -> tuple[Array, Array]:
        size = rows.stop - rows.start
        m = np.full((size, 1), -np.inf, self.work)
        total, acc = np.zeros((size, 1), self.work), np.zeros((size, self.case.Dv), self.work)
        if self.inputs.sink is not None:
            m = np.full((size, 1), self.inputs.sink[h], self.work)
            total = np.ones((size, 1), self.work)
        for keys in self.tiles(self.case.N, self.control.keys):
            s, _ = self.scores(b, h, rows, keys)
            m_new = np.maximum(m, s.max(-1, keepdims=True))
            shift = np.where(np.isneginf(m_new), 0, m_new)
            alpha, p = np.exp(m - shift), np.exp(s - shift)
            total = total * alpha + p.sum(-1, keepdims=True)
            kept = p * self.dropped(b, h, rows, keys)
            if self.control.kind == "eager":
                kept = kept / np.where(total == 0, 1, total)
            acc = acc * alpha + self.low(kept) @ self.v[b, h // self.group, keys]
            m = m_new
        scale = 1 if self.control.kind == "eager" else np.where(total == 0, 1, total)
        with np.errstate(divide="ignore"):
            return acc / scale, (m + np.log(total))[:, 0]

    def backward(self, out: Array, lse: Array) -> dict[str, Array]:
        case, ins = self.case, self.inputs
        grads = {
            "dq": np.zeros(self.q.shape, self.work),
            "dk": np.zeros(self.k.shape, self.work),
            "dv": np.zeros(self.v.shape, self.work),
        }
        extra: dict[str, Array] = {}
        if ins.sink is not None:
            extra["dsink"] = np.zeros(case.H, self.work)
        if ins.slopes is not None:
            extra["dslopes"] = np.zeros((case.B, case.H), self.work)
        if ins.bias is not None:
            extra["dbias"] = np.zeros((case.B, case.H, case.M, case.N), self.work)
        for b in range(case.B):
            for h in range(case.H):
                self.head_backward(b, h, out.astype(self.work), lse.astype(self.work), grads, extra)
        result = {name: rounded(value, case.dtype) for name, value in grads.items()}
        if ins.bias is not None:
            shape = ins.bias.shape
            axes = tuple(axis for axis in range(4) if shape[axis] == 1)
            extra["dbias"] = rounded(extra["dbias"].sum(axes, keepdims=True), ins.bias.dtype)
        return result | {name: value.astype(np.float64) for name, value in extra.items()}

    def head_backward(
        self, b: int, h: int, out: Array, lse: Array, grads: dict[str, Array], extra: dict[str, Array]
    ) -> None:
        case, ins, g = self.case, self.inputs, h // self.group
        delta = (out[b, h] * self.dout[b, h]).sum(-1)
        if ins.dlse is not None:
            delta = delta - ins.dlse[b, h].astype(self.work)
        if "dsink" in extra and ins.sink is not None:
            extra["dsink"][h] -= (np.exp(self.work(ins.sink[h]) - lse[b, h]) * delta).sum()
        for rows in self.tiles(case.M, self.control.rows):
            shift = np.where(np.isneginf(lse[b, h, rows]), 0, lse[b, h, rows])[:, None]
            dout = self.dout[b, h, rows]
            for keys in self.tiles(case.N, self.control.keys):
                s, slope = self.scores(b, h, rows, keys)
                drop = self.dropped(b, h, rows, keys)
                p = self.logit(np.exp(s - shift))
                grads["dv"][b, g, keys] += self.low(p * drop).T @ dout
                dp = self.logit(dout @ self.v[b, g, keys].T) * drop
                ds = p * (dp - delta[rows, None])
                if "dbias" in extra:
                    extra["dbias"][b, h, rows, keys] = ds
                if "dslopes" in extra:
                    i, j = np.arange(case.M)[rows, None], np.arange(case.N)[None, keys]
                    extra["dslopes"][b, h] -= (ds * np.abs(i + case.N - case.M - j)).sum()
                if slope is not None:
                    ds = ds * slope
                ds = self.low(ds)
                scale = self.work(case.softmax_scale)
                grads["dq"][b, h, rows] += scale * (ds @ self.k[b, g, keys])
                grads["dk"][b, g, keys] += scale * (ds.T @ self.q[b, h, rows])


def serves(control: Control, case: Case) -> str | None:
    """Why a control does not take a case, or None."""
    if case.rows != "dense":
        return "controls take dense rows only"
    if (
        control.kind == "eager"
        and case.dtype == "float16"
        and case.generator in ("large_v", "large_all", "abyss", "fp16_range")
    ):
        return "float16 logits or gradients overflow, as they do in any eager kernel"
    return None
