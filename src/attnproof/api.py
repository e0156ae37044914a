"""The public functions. Each binds its arguments, chooses a backend and runs it; nothing else happens here.

Shapes and meaning of every option: SEMANTICS (docs). Arrays are NumPy or torch and the result is of the kind that
came in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from . import cache, checks, dispatch
from .arrays import is_torch, transpose
from .dispatch import Explanation
from .errors import DtypeError, Unsupported
from .problem import GRADIENTS, Grads, Options, bind, bind_call

Window = tuple[int, int]

_AUTOGRAD = f"{__package__}.autograd"


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Window = (-1, -1),
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    sink: Any = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    deterministic: bool = True,
    align: str = "bottom_right",
    layout: str = "bhmd",
    backend: str = "auto",
) -> Any:
    """Exact attention, ``dropout(softmax(mask(scores(scale * q k^T)))) v``, in O(N) memory.

    Args:
        q: [B, H, M, D]; float16, bfloat16, float32 or float64 (all three the same).
        k: [B, Hkv, N, D]; Hkv divides H, query head h reads key head h // (H // Hkv).
        v: [B, Hkv, N, Dv].
        causal: query i sees keys up to i + N - M (``align="top_left"``: up to i).
        window: (left, right) keys around i + N - M, inclusive; -1 is unbounded.
        mask: a ``Mask`` object, or bool broadcastable to [B, H, M, N], True = attend.
        bias: added to the scores, in the dtype of q or float32; broadcastable to [B, H, M, N].
        alibi_slopes: float32 [H] or [B, H]; adds -slope * |i + N - M - j|.
        softcap: c > 0 turns scaled scores s into c * tanh(s / c).
        sink: [H], one more logit per query head, without a value.
        scale: factor of q k^T; None is 1 / sqrt(D).
        dropout_p: probability in [0, 1] of dropping an entry of the softmax.
        seed: integer, or int64 [2] (seed, offset); None draws from the device's generator.
        deterministic: backward bitwise repeatable; False allows a faster one where a backend has it.
        align: "bottom_right" or "top_left", for ``causal``.
        layout: "bhmd", or "bmhd" for [B, M, H, D].
        backend: "auto" or a name from ``backends()``; a named backend never falls back.

    Returns:
        out [B, H, M, Dv] in the dtype and layout of q. A query that sees no key gives zeros.

    Raises:
        ShapeError: a size, range or head count does not fit (a ValueError).
        DtypeError: a dtype, kind or device does not fit (a TypeError).
        Unsupported: the named backend refuses, with its reason.

    References: Vaswani et al., arXiv:1706.03762, section 3.2.1; Dao et al., arXiv:2205.14135.

    >>> import numpy as np
    >>> q = k = np.zeros((1, 1, 2, 4)); v = np.arange(8.0).reshape(1, 1, 2, 4)
    >>> attention(q, k, v, causal=True)[0, 0].tolist()
    [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0]]
    """
    options = Options(
        causal, window, mask, bias, alibi_slopes, softcap, sink,
        scale, dropout_p, seed, deterministic, align, layout, backend,
    )  # fmt: skip
    return _call("dense", (q, k, v), options)[0]


def attention_with_lse(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Window = (-1, -1),
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    sink: Any = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    deterministic: bool = True,
    align: str = "bottom_right",
    layout: str = "bhmd",
    backend: str = "auto",
) -> tuple[Any, Any]:
    """``attention``, and the natural log-sum-exp of the final logits.

    Returns:
        ``(out, lse)``; lse float32 (float64 for float64 inputs) [B, H, M], whatever the layout; -inf for a query that
        sees no key. Both are differentiable.
    """
    options = Options(
        causal, window, mask, bias, alibi_slopes, softcap, sink,
        scale, dropout_p, seed, deterministic, align, layout, backend,
    )  # fmt: skip
    return _call("dense", (q, k, v), options)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: Window = (-1, -1),
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    sink: Any = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    deterministic: bool = True,
    align: str = "bottom_right",
    backend: str = "auto",
) -> Any:
    """Attention over packed sequences, which never see each other.

    Args:
        q: [Tq, H, D].
        k: [Tk, Hkv, D].
        v: [Tk, Hkv, Dv].
        cu_seqlens_q: int32 [B + 1], sequence b is rows cu[b]:cu[b + 1]; starts at 0, never decreases.
        cu_seqlens_k: int32 [B + 1], likewise for keys.
        max_seqlen_q: an upper bound of the query lengths; without it a device tensor must be waited for.
        max_seqlen_k: likewise for keys. A larger bound changes nothing.
        mask, bias: positions inside their sequence, broadcastable to [B, H, max_seqlen_q, max_seqlen_k].

    Returns:
        out [Tq, H, Dv]; rows past the last sequence are zeros. Other arguments as in ``attention``.
    """
    options = Options(
        causal, window, mask, bias, alibi_slopes, softcap, sink,
        scale, dropout_p, seed, deterministic, align, "bhmd", backend,
    )  # fmt: skip
    arrays = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _call("packed", arrays, options)[0]


def attention_varlen_with_lse(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: Window = (-1, -1),
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    sink: Any = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    deterministic: bool = True,
    align: str = "bottom_right",
    backend: str = "auto",
) -> tuple[Any, Any]:
    """``attention_varlen``, and lse [H, Tq]; rows past the last sequence have -inf."""
    options = Options(
        causal, window, mask, bias, alibi_slopes, softcap, sink,
        scale, dropout_p, seed, deterministic, align, "bhmd", backend,
    )  # fmt: skip
    arrays = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _call("packed", arrays, options)


def attention_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    cache_seqlens: Any,
    *,
    k_new: Any = None,
    v_new: Any = None,
    block_table: Any = None,
    num_splits: int | None = None,
    causal: bool = False,
    window: Window = (-1, -1),
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
    sink: Any = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    deterministic: bool = True,
    align: str = "bottom_right",
    layout: str = "bhmd",
    backend: str = "auto",
) -> Any:
    """Attention of new queries against a key/value cache, with an optional append in place.

    Args:
        q: [B, H, M, D].
        k_cache: [B, Hkv, capacity, D], or with a block table a pool of pages [P, Hkv, page, D].
        v_cache: like k_cache, with Dv.
        cache_seqlens: int32 [B], valid tokens *before* the append; N of sequence b is that plus the appended ones.
        k_new: [B, Hkv, L, D], written at cache_seqlens[b] before anything is read.
        v_new: [B, Hkv, L, Dv].
        block_table: int32 [B, width]; slots past the valid length may hold anything and are never used. Used ones are
            checked against the pool where the table lies in host memory; on a device that would mean waiting for it.
        num_splits: into how many parts the keys are split and merged; the result is the same within rounding. None
            lets the backend choose; a backend that walks the keys in one go has no use for it.

    Returns:
        out [B, H, M, Dv]. Not differentiable: gradients through a cache that is written in place are refused.

    Raises:
        ShapeError: an append past the capacity, naming it and the length needed, before any write.

    Other arguments as in ``attention``.
    """
    options = Options(
        causal, window, mask, bias, alibi_slopes, softcap, sink,
        scale, dropout_p, seed, deterministic, align, layout, backend,
    )  # fmt: skip
    if _wants_grad(q, k_cache, v_cache, k_new, v_new, bias, alibi_slopes, sink):
        raise Unsupported("attention_decode", "no gradient through a cache written in place; use attention()")
    append = cache.plan(k_cache, v_cache, cache_seqlens, k_new, v_new, block_table, layout)
    arrays = (q, k_cache, v_cache, append.after, block_table, num_splits)
    return _call("decode", arrays, options, before=append.write)[0]


def attention_backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    *,
    dlse: Any = None,
    needs: Any = GRADIENTS,
    **options: Any,
) -> Grads:
    """Gradients without torch: the backward of ``attention_with_lse`` for NumPy arrays.

    Args:
        q, k, v: as given to the forward call, with the same options in ``options``.
        out, lse: what the forward call returned.
        dout: gradient of out, same shape; any strides.
        dlse: gradient of lse, or None.
        needs: which gradients to compute, names out of ``problem.GRADIENTS``.
        options: those of the forward call; with dropout the seed must be among them.

    Returns:
        ``Grads``; those not asked for, or whose input was not given, are None. dalibi is [B, H].
    """
    if is_torch(q):
        raise DtypeError(
            "q: expected NumPy arrays, got torch tensors (their gradients come from .backward())"
        )
    given = Options(**options)
    problem, tensors = bind(q, k, v, given)
    wanted = checks.backward(problem, needs, given.seed, q, out=out, dout=dout, lse=lse, dlse=dlse)
    asked = frozenset(at for at in wanted if getattr(tensors, at) is not None)
    rows = [transpose(x, 1, 2) if problem.layout == "bmhd" else x for x in (out, dout)]
    chosen = dispatch.choose(problem, given.backend)
    grads = dispatch.backward(chosen, problem, tensors, rows[0], lse, rows[1], dlse, asked)
    if problem.layout == "bmhd":
        return Grads._make([*(None if x is None else transpose(x, 1, 2) for x in grads[:3]), *grads[3:]])
    return grads


def explain(q: Any, k: Any, v: Any, **options: Any) -> Explanation:
    """Which backend ``attention`` would use for this call, and the reason of every other one.

    Takes the arguments of ``attention``. ``str()`` of the result is a table; ``.chosen`` and ``.reasons`` hold it.
    """
    given = Options(**options)
    return dispatch.explain(bind(q, k, v, given).problem, given.backend)


def _call(
    kind: str, arrays: tuple[Any, ...], options: Options, before: Callable[[], None] | None = None
) -> tuple[Any, Any]:
    """Bind, choose, run; what torch adds (gradients, transforms, compilation) is in ``autograd``.

    ``before`` is called when nothing can refuse the call any more.
    """
    if is_torch(arrays[0]):
        # an import statement costs more than everything else here, so the loaded module is asked for first
        autograd = sys.modules.get(_AUTOGRAD)
        if autograd is None:
            from . import autograd
        return autograd.call(kind, arrays, options, before)
    problem, tensors = bind_call(kind, arrays, options)
    backend = dispatch.choose(problem, options.backend)
    if before is not None:
        before()
    out, lse = dispatch.forward(backend, problem, tensors)
    if kind == "packed":
        return transpose(out, 0, 1), lse
    return (transpose(out, 1, 2) if options.layout == "bmhd" else out), lse


def _wants_grad(*arrays: Any) -> bool:
    if not any(is_torch(x) and x.requires_grad for x in arrays):
        return False
    import torch

    return torch.is_grad_enabled()
