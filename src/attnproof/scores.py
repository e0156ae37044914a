r"""How a logit changes between the dot product and the softmax, once per modifier.

Fixed order (SEMANTICS section 2): ``scale * q.k -> softcap -> + alibi -> + bias``. Each modifier is a value and a
derivative; the derivative is written from the modifier's *output*, so backward needs nothing that forward did not
already rebuild.

    softcap   y = c tanh(s / c)                 dy/ds = 1 - (y / c)^2
    alibi     y = s - slope |i + N - M - j|     dy/ds = 1,  dy/dslope = -|i + N - M - j|
    bias      y = s + bias                      dy/ds = 1,  dy/dbias = 1

The sink is no modifier: it is one more logit, without a value, that joins the softmax.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .dtypes import widen

Array = npt.NDArray[Any]


def softcap(s: Array, cap: float) -> Array:
    """``cap * tanh(s / cap)``."""
    return cap * np.tanh(s / cap)


def softcap_derivative(y: Array, cap: float) -> Array:
    """d softcap / ds, from the capped value ``y``."""
    return 1 - (y / cap) ** 2


def distance(i: Array, j: Array, m: int, n: int) -> Array:
    """``|i + N - M - j|``, [len(i), len(j)]."""
    return np.abs((i[:, None] + (n - m)) - j[None, :])


def alibi(s: Array, slope: float, dist: Array) -> Array:
    """``s - slope * dist``."""
    return s - s.dtype.type(slope) * dist.astype(s.dtype)


def alibi_gradient(ds: Array, dist: Array) -> float:
    """d loss / d slope of one head."""
    return -float((ds * dist).sum())


def add_bias_gradient(
    dbias: Array, ds: Array, b: int, h: int, rows: tuple[int, int], cols: tuple[int, int]
) -> None:
    """Add one tile of dS of sequence ``b``, head ``h`` to dbias, summed over the axes where dbias has length 1."""
    b_axis, h_axis, m_axis, n_axis = dbias.shape
    if m_axis == 1:
        ds, rows = ds.sum(axis=0, keepdims=True), (0, 1)
    if n_axis == 1:
        ds, cols = ds.sum(axis=1, keepdims=True), (0, 1)
    dbias[b if b_axis > 1 else 0, h if h_axis > 1 else 0, slice(*rows), slice(*cols)] += ds


def sink_logit(sink: Array | None, head: int) -> float:
    """The sink of one head as a float, -inf where there is none; uint16 storage is bfloat16 bits."""
    if sink is None:
        return -np.inf
    stored = "bfloat16" if sink.dtype == np.uint16 else str(sink.dtype)
    return float(widen(sink[head : head + 1], stored, np.float64)[0])


def sink_gradient(logit: float, lse: Array, row: Array) -> float:
    """d loss / d sink of one head: the sink's dS summed over rows, its dP being 0.

    ``row`` is ``rowsum(dO O) - dlse``.
    """
    dead = np.isneginf(lse)
    weight = np.where(dead, 0, np.exp(logit - np.where(dead, 0, lse)))
    return -float((weight * row).sum())
