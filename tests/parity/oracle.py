"""Attention written down plainly from the semantics; shares no code with the package.

`attend` computes every output and gradient of a case with a `Policy` of precision. With the exact policy
it is what a backend must agree with; with a dtype's own policy it is the eager computation whose error
sets the tolerance. Beside each result goes its `size`: the sum of the magnitudes that were added up, the
unit in which rounding is measured, and its `band`: how far one rounding per step can move it (see
tolerance.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from .problems import OFFSET, SEED, Array, Case

# roundings between a dot product and its exponential: scale, cap, alibi, bias, base 2, maximum, exp, and
# the sum's own
STEPS = 8


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10 after the paper's figure of one round, on Python integers or arrays of uint64."""
    c, k = list(counter), list(key)
    for _ in range(10):
        (hi0, lo0), (hi1, lo1) = divmod(0xD2511F53 * c[0], 2**32), divmod(0xCD9E8D57 * c[2], 2**32)
        c = [hi1 ^ c[1] ^ k[0], lo1, hi0 ^ c[3] ^ k[1], lo0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[0], c[1], c[2], c[3]


def kept(p: float, seed: int, offset: int, plane: int, m: int, n: int) -> Array:
    """Bool [m, n]: whether dropout with 0 < p < 1 keeps key j of query i; plane is b * H + h."""
    quads = -(-n // 4)
    i, fours = np.arange(m, dtype=np.uint64)[:, None], np.arange(quads, dtype=np.uint64)[None, :]
    words = philox((fours, i, plane, offset % 2**32), (seed % 2**32, seed // 2**32))
    word = np.stack(np.broadcast_arrays(*words), axis=-1).reshape(m, 4 * quads)[:, :n]
    return word >= min(round(p * 2**32), 2**32 - 1)


def visible(case: Case, b: int, m: int, n: int) -> Array:
    """Bool [m, n]: which pairs are allowed, by everything but the boolean mask."""
    i, j = np.arange(m)[:, None], np.arange(n)[None, :]
    left, right = case.option("window", (-1, -1))
    at = j - (i + n - m)
    seen = np.full((m, n), True)
    if left != -1:
        seen &= at >= -left
    if right != -1:
        seen &= at <= right
    if case.option("causal", False):
        seen &= j <= i if case.option("align", "bottom_right") == "top_left" else at <= 0
    if case.mask == "prefix":
        seen &= (at <= 0) | (j < 9)
    if case.mask == "prefixes":
        seen &= (at <= 0) | (j < 3 + 5 * b)
    if case.mask == "segments":
        seen &= np.vectorize(segment)(i) == np.vectorize(segment)(j)
    if case.mask == "documents":
        seen &= np.vectorize(document)(i) == np.vectorize(document)(j)
    return seen


def segment(position: int) -> int:
    """Uneven segments: 0..9, 10..13, 14..."""
    return int(position >= 10) + int(position >= 14)


def document(position: int) -> int:
    """Segments around tiles of 64 and 128: up to 99, 127, 349, 350, 650, and the rest."""
    return sum(int(position >= start) for start in (100, 128, 350, 351, 651))


class Policy(NamedTuple):
    """Precision of a computation: its arithmetic, what it multiplies by v and k, and what it stores."""

    compute: Any
    operand: Callable[[Array], Array]
    store: Callable[[Array], Array]


class Sums(NamedTuple):
    """One result: its value, the magnitude of what was summed, and the reach of single roundings."""

    value: Array
    size: Array
    band: Array

    def add(self, at: Any, value: Array, size: Array, band: Array) -> None:
        self.value[at] += value
        self.size[at] += size
        self.band[at] += band


@dataclass
class Head:
    """One head of one sequence, everything already sliced."""

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array
    allowed: Array
    bias: Array
    distance: Array
    slope: float
    sink: float
    factor: Array
    scale: float
    cap: float
    at: dict[str, Any] = field(default_factory=dict)


def heads(case: Case, x: dict[str, Array], compute: Any) -> Iterator[Head]:
    """Every head of every sequence, cut out of a case's arrays."""
    full = (case.B, case.H, case.M, case.N)
    keep = np.broadcast_to(x.get("keep", np.bool_(True)), full)
    bias = np.broadcast_to(x.get("bias", np.float64(0)), full)
    slopes = np.broadcast_to(x.get("alibi_slopes", np.float64(0)), full[:2])
    p, scale = case.option("dropout_p", 0.0), case.option("scale", None)
    if scale is None:
        scale = 1 / sqrt(case.D) if case.D else 1.0
    for b in range(case.B):
        rows, keys = _places(case, b)
        m, n = rows[1].stop - rows[1].start, keys[1].stop - keys[1].start
        i, j = np.arange(m)[:, None], np.arange(n)[None, :]
        seen = visible(case, b, m, n)
        for h in range(case.H):
            g = h // (case.H // case.Hkv)
            q_at, k_at = _index(case, rows, h), _index(case, keys, g)
            lse_at = (h, rows[1]) if case.rows == "packed" else (b, h)
            yield Head(
                *(x[name][at].astype(compute) for name, at in zip("qkv", (q_at, k_at, k_at), strict=True)),
                x["dout"][q_at].astype(compute),
                x["dlse"][lse_at].astype(compute),
                seen & keep[b, h, :m, :n],
                bias[b, h, :m, :n].astype(compute),
                np.abs(i + n - m - j).astype(compute),
                float(slopes[b, h]),
                float(x["sink"][h]) if "sink" in x else -np.inf,
                kept(p, SEED, OFFSET, b * case.H + h, m, n).astype(compute) / (1 - p)
                if 0 < p < 1
                else np.full((m, n), 1.0 - p, compute),
                scale,
                case.option("softcap", None) or 0.0,
                {"q": q_at, "k": k_at, "lse": lse_at, "b": b, "h": h, "m": m, "n": n},
            )


def _places(case: Case, b: int) -> tuple[tuple[int, slice], tuple[int, slice]]:
    """(batch entry, positions) of the queries and of the keys of sequence b."""
    if case.rows == "packed":
        q0, k0 = sum(case.q_lengths[:b]), sum(case.k_lengths[:b])
        return (0, slice(q0, q0 + case.q_lengths[b])), (0, slice(k0, k0 + case.k_lengths[b]))
    return (b, slice(0, case.M)), (b, slice(0, case.k_lengths[b] if case.k_lengths else case.N))


def _index(case: Case, place: tuple[int, slice], head: int) -> tuple[Any, ...]:
    return (place[1], head) if case.rows == "packed" else (place[0], head, place[1])


def attend(
    case: Case, x: dict[str, Array], policy: Policy, roundoff: float = 0, store_roundoff: float = 0
) -> dict[str, Sums]:
    """out, lse and the gradients q, k, v, bias, alibi_slopes, sink of a case.

    `roundoff` and `store_roundoff` are the unit roundoffs of the dtype's arithmetic and storage, for the
    bands.
    """
    c = policy.compute
    shapes = {"out": x["dout"].shape, "lse": x["dlse"].shape, **{at: x[at].shape for at in "qkv"}}
    shapes |= {"bias": (case.B, case.H, case.M, case.N), "alibi_slopes": (case.B, case.H), "sink": (case.H,)}
    sums = {at: Sums(*(np.zeros(shape, c) for _ in range(3))) for at, shape in shapes.items()}
    sums["lse"].value[...] = -np.inf
    for head in heads(case, x, c):
        with np.errstate(all="ignore"):
            _head(head, policy, sums, roundoff, store_roundoff)
    full = {"bias": x.get("bias"), "alibi_slopes": x.get("alibi_slopes")}
    for at, given in full.items():
        if given is not None:
            sums[at] = Sums(*(_sum_to(part, given.shape) for part in sums[at]))
    return sums


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which `shape` was broadcast."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    return x.sum(axis=tuple(a for a, size in enumerate(shape) if size == 1), keepdims=True)


def _head(a: Head, policy: Policy, sums: dict[str, Sums], u: float, u_store: float) -> None:
    """Section 2 of the semantics line by line, then its derivative in reverse."""
    capped = a.scale * (a.q @ a.k.T)
    if a.cap:
        capped = a.cap * np.tanh(capped / a.cap)
    s = np.where(a.allowed, capped - a.slope * a.distance + a.bias, -np.inf).astype(policy.compute)
    top = np.maximum(s.max(axis=1, initial=-np.inf), a.sink)
    point = np.where(np.isneginf(top), 0, top)[:, None]
    e, sink = np.exp(s - point), np.exp(a.sink - point)
    total = e.sum(axis=1, keepdims=True) + sink
    dead = total == 0
    p = (e / np.where(dead, 1, total)).astype(policy.compute)
    out = policy.operand(p * a.factor) @ a.v
    lse = (point + np.log(total))[:, 0]

    # how far one rounding of every step moves a weight, relative to itself
    logit = abs(a.scale) * (np.abs(a.q) @ np.abs(a.k.T)) + np.abs(a.slope * a.distance) + np.abs(a.bias)
    tallest = np.where(p > 0, logit, 0).max(axis=1, initial=0) + (abs(a.sink) if a.sink > -np.inf else 0)
    m, n = p.shape
    lengths = sqrt(m) + sqrt(n) + sqrt(a.v.shape[1])
    delta_p = u * ((STEPS + sqrt(a.q.shape[1])) * (1 + tallest) + lengths)[:, None]

    size = np.abs(p * a.factor) @ np.abs(a.v)
    sums["out"].add(a.at["q"], out, size, delta_p * size)
    sums["lse"].value[a.at["lse"]] = np.where(dead[:, 0], -np.inf, lse)
    reach = np.where(dead[:, 0], 0, 1 + tallest + np.abs(lse))
    sums["lse"].add(a.at["lse"], 0, reach, delta_p[:, 0] * np.where(dead[:, 0], 0, 1) + u * reach)
    _head_backward(a, policy, sums, p, policy.store(out), lse, capped, delta_p, u_store)


def _head_backward(
    a: Head,
    policy: Policy,
    sums: dict[str, Sums],
    p: Array,
    out: Array,
    lse: Array,
    capped: Array,
    delta_p: Array,
    u_store: float,
) -> None:
    dead = np.isneginf(lse)[:, None]
    dlse = np.where(dead, 0, a.dlse[:, None])
    row = (a.dout * out).sum(axis=1, keepdims=True) - dlse
    ds = p * (a.factor * (a.dout @ a.v.T) - row)
    slope = 1 - (capped / a.cap) ** 2 if a.cap else 1
    dz = policy.operand(ds * slope)

    # the same sums over magnitudes; `out` reaches the backward as it was stored
    row_size = (np.abs(a.dout) * np.abs(out)).sum(axis=1, keepdims=True)
    w = p * (a.factor * (np.abs(a.dout) @ np.abs(a.v.T)) + row_size + np.abs(dlse))
    w_band = delta_p * w + u_store * p * row_size
    pd, scale = p * a.factor, abs(a.scale)
    q, k, dout = np.abs(a.q), np.abs(a.k), np.abs(a.dout)
    sums["q"].add(a.at["q"], a.scale * (dz @ a.k), scale * (w @ k), scale * (w_band @ k))
    sums["k"].add(a.at["k"], a.scale * (dz.T @ a.q), scale * (w.T @ q), scale * (w_band.T @ q))
    sums["v"].add(a.at["k"], policy.operand(pd).T @ a.dout, pd.T @ dout, (delta_p * pd).T @ dout)
    pair = (a.at["b"], a.at["h"], slice(a.at["m"]), slice(a.at["n"]))
    sums["bias"].add(pair, ds, w, w_band)
    reach = [(part * a.distance).sum() for part in (-ds, w, w_band)]
    sums["alibi_slopes"].add((a.at["b"], a.at["h"]), *reach)
    weight = np.where(dead, 0, np.exp(a.sink - np.where(dead, 0, lse[:, None])))
    parts = (
        -weight * row,
        weight * (row_size + np.abs(dlse)),
        weight * ((delta_p + u_store) * row_size + delta_p * np.abs(dlse)),
    )
    sums["sink"].add((a.at["h"],), *(part.sum() for part in parts))
