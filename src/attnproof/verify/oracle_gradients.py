"""The oracle's backward pass, by the formulas on paper: nothing is rebuilt from a rounded lse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnproof.verify.oracle_forward import Block, Forward


@dataclass(frozen=True)
class Parts:
    """What the gradients share: dS, P, and how far dS may be off."""

    ds: Any
    p: Any
    eager: Any
    slop: Any
    delta: Any  # [G,R] variance of delta in units of the unit roundoff squared
    reach: Any  # [G,R] worst case of delta in units of the unit roundoff


class Solver(Forward):
    """Forward and all gradients."""

    def backward(
        self,
        block: Block,
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
        parts = Parts(ds, p, eager, slop, delta_noise, delta_reach)
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
        parts: Parts,
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

    def score_gradients(self, block: Block, parts: Parts) -> None:
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

    def bias_gradient(self, block: Block, parts: Parts) -> None:
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

    def sink_gradient(self, block: Block, lse: Any, delta: Any, noise: Any, reach: Any) -> None:
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
