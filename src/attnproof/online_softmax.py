r"""The online softmax: attention one key tile at a time, exactly.

For one query row let :math:`s_j` be its logits and :math:`v_j` the values. Keep three numbers per row, all relative
to a running maximum :math:`m`:

.. math::

    l = \sum_{j \text{ seen}} e^{s_j - m}, \qquad acc = \sum_{j \text{ seen}} e^{s_j - m} v_j .

A new tile with logits :math:`t` and maximum :math:`\hat m` updates

.. math::

    m' = \max(m, \hat m), \quad \alpha = e^{m - m'}, \quad
    l' = \alpha l + \sum_t e^{t - m'}, \quad acc' = \alpha\, acc + \sum_t e^{t - m'} v_t .

*Proof of exactness.* Multiplying the old sums by :math:`\alpha` turns each old term :math:`e^{s_j - m}` into
:math:`e^{s_j - m'}`, so after the update both sums run over old and new keys, relative to :math:`m'`: the invariant
holds again. At the end :math:`acc / l` has the common factor :math:`e^{-m}` in numerator and denominator, which
cancels; it is the softmax average whatever :math:`m` is. :math:`m` only keeps every exponent at or below zero, and
:math:`\alpha \le 1` always. The natural log-sum-exp is :math:`m + \ln l`.

*Rows without a key.* :math:`m = -\infty` until a key is seen. Exponents are taken relative to 0 instead of
:math:`m'` while :math:`m' = -\infty`: every term is then :math:`e^{-\infty} = 0` and nothing becomes NaN. No finite
stand-in for :math:`-\infty` is used, so logits may be as low as the dtype allows.

*Sink.* One logit without a value is the state :math:`(m, l, acc) = (sink, 1, 0)` to start from.

Every kernel of attnproof computes this recurrence and names this file.

References: Milakov and Gimelshein, arXiv:1805.02867, algorithm 3; Rabe and Staats, arXiv:2112.05682, section 2;
Dao et al., arXiv:2205.14135, section 3.1 and algorithm 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import DtypeError, ShapeError, expected

Array = npt.NDArray[Any]


class State(NamedTuple):
    """Running sums of some query rows; ``l`` and ``acc`` are relative to ``m``."""

    m: Array  # [M] running maximum of the logits
    l: Array  # noqa: E741  [M] running sum, the field's own name for it
    acc: Array  # [M, Dv] unnormalised output


def start(rows: int, dv: int, dtype: npt.DTypeLike, sink: float | None = None) -> State:
    """The state before the first key: empty, or holding the sink's logit."""
    has_sink = sink is not None and sink != -np.inf
    return State(
        m=np.full(rows, sink if has_sink else -np.inf, dtype=dtype),
        l=np.full(rows, 1.0 if has_sink else 0.0, dtype=dtype),
        acc=np.zeros((rows, dv), dtype=dtype),
    )


def reference_point(m: Array) -> Array:
    """What exponents are taken relative to: the maximum, or 0 where nothing was seen yet."""
    return np.where(np.isneginf(m), m.dtype.type(0), m)


def rescale(m: Array, tile_max: Array) -> tuple[Array, Array, Array]:
    """New maximum, the point to subtract, and alpha for the sums so far."""
    m_new = np.maximum(m, tile_max)
    point = reference_point(m_new)
    return m_new, point, np.exp(m - point)


def finalize(state: State) -> tuple[Array, Array]:
    """``(out [M, Dv], lse [M])``; a row that saw no key gives 0 and -inf (or the sink's logit)."""
    seen = state.l != 0  # NaN counts as seen: it must reach the output
    out = state.acc / np.where(seen, state.l, 1)[:, None]
    with np.errstate(divide="ignore"):
        lse = state.m + np.log(state.l)
    return out, lse


def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    r"""Join attention over two disjoint key sets.

    With :math:`m = \max(lse_a, lse_b)` and weights :math:`w_x = e^{lse_x - m}`,
    ``out = (w_a out_a + w_b out_b) / (w_a + w_b)`` and ``lse = m + ln(w_a + w_b)``.
    Two empty parts (lse -inf and -inf) give out 0 and lse -inf.

    Args:
        out_a: [..., Dv], NumPy or torch.
        lse_a: [...], natural log, float32 or float64; its axes are in the order of out's, which for ``layout="bmhd"``
            and for packed results means transposing one of them first.
        out_b: like ``out_a``.
        lse_b: like ``lse_a``.

    Returns:
        ``(out, lse)`` in the dtypes of ``out_a`` and ``lse_a``; differentiable when torch.

    References: Dao et al., arXiv:2205.14135, section 3.1; the same rule joins split-KV and ring partials.

    >>> out, lse = merge(np.ones((1, 2)), np.zeros(1), np.zeros((1, 2)), np.array([-np.inf]))
    >>> out.tolist(), lse.tolist()
    ([[1.0, 1.0]], [0.0])
    """
    from .arrays import is_torch

    _check_parts(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    if is_torch(out_a):
        return _merge_torch(out_a, lse_a, out_b, lse_b)
    with np.errstate(all="ignore"):
        m = np.maximum(lse_a, lse_b)
        point = reference_point(m)
        w_a, w_b = np.exp(lse_a - point), np.exp(lse_b - point)
        total = w_a + w_b
        seen = np.where(total != 0, total, 1)
        wide_a, wide_b = (x.astype(lse_a.dtype) for x in (out_a, out_b))
        out = wide_a * (w_a / seen)[..., None] + wide_b * (w_b / seen)[..., None]
        return out.astype(out_a.dtype), m + np.log(total)


def _check_parts(**parts: Any) -> None:
    """One kind of array, lse one axis shorter than out, both pairs alike."""
    from .arrays import dtype_name, is_torch

    out, lse = parts["out_a"], parts["lse_a"]
    for name, x in parts.items():
        if not (is_torch(x) or isinstance(x, np.ndarray)) or is_torch(x) != is_torch(out):
            raise DtypeError(
                expected(name, "a NumPy array or torch tensor, all of one kind", type(x).__name__)
            )
        if name.startswith("lse") and dtype_name(x) not in ("float32", "float64"):
            raise DtypeError(expected(name, "dtype float32 or float64", dtype_name(x)))
        like, first = (lse, "lse_a") if name.startswith("lse") else (out, "out_a")
        if x.dtype != like.dtype:
            raise DtypeError(expected(name, f"dtype {dtype_name(like)} to match {first}", dtype_name(x)))
        if tuple(x.shape) != tuple(like.shape):
            raise ShapeError(expected(name, f"shape {tuple(like.shape)} to match {first}", tuple(x.shape)))
    if tuple(lse.shape) != tuple(out.shape[:-1]):
        wanted = f"shape {tuple(out.shape[:-1])}, that of out_a without its last axis (transpose out to lse's order)"
        raise ShapeError(expected("lse_a", wanted, tuple(lse.shape)))


def _merge_torch(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    import torch

    m = torch.maximum(lse_a, lse_b).detach()
    point = torch.where(torch.isneginf(m), torch.zeros_like(m), m)
    w_a, w_b = torch.exp(lse_a - point), torch.exp(lse_b - point)
    total = w_a + w_b
    empty = total == 0
    seen = torch.where(empty, torch.ones_like(total), total)
    wide = lse_a.dtype
    out = out_a.to(wide) * (w_a / seen)[..., None] + out_b.to(wide) * (w_b / seen)[..., None]
    # log(1) stands in for empty rows, so that no gradient passes through log(0)
    lse = torch.where(empty, torch.full_like(total, -torch.inf), point + torch.log(seen))
    return out.to(out_a.dtype), lse
