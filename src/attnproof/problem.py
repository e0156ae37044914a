"""One attention call, described once: ``bind_*`` validates the caller's arguments and nothing validates them again.

``Problem`` is the structure (sizes, options; hashable, no arrays), ``Tensors`` the arrays as views in canonical axis
order. A backend gets both and may trust them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from . import checks
from .arrays import broadcast, device_type, dtype_name, is_torch, transpose
from .errors import ShapeError, expected
from .masks import BIG, Mask, as_mask, causal, explicit_bounds, window

Rows = Literal["dense", "packed", "cached", "paged"]
GRADIENTS = ("q", "k", "v", "bias", "alibi_slopes", "sink")


@dataclass(frozen=True)
class Problem:
    """The structure of one call. Axis letters as in SEMANTICS; key ``j`` of sequence ``b`` is in the band of query
    ``i`` iff ``-left <= j - (i + N_b - M_b) <= right`` (and ``j <= i`` if ``top_left``).

    Attributes:
        rows: where rows live, see ``rows``.
        M: query length; packed: an upper bound of it.
        N: key length; packed: an upper bound; cached and paged: the capacity.
        tokens: packed only, (Tq, Tk), the sizes of the token axes.
        page: keys per page, paged only.
        bias_shape: the caller's bias with leading ones, 4 axes; dbias has this shape.
        num_splits: cached and paged only, parts a backend shall split the keys into; 0 lets it choose.
    """

    dtype: str
    device: str
    B: int
    H: int
    Hkv: int
    M: int
    N: int
    D: int
    Dv: int
    rows: Rows = "dense"
    layout: str = "bhmd"
    tokens: tuple[int, int] = (0, 0)
    page: int = 0
    scale: float = 1.0
    softcap: float = 0.0
    left: int = BIG
    right: int = BIG
    top_left: bool = False
    has_keep: bool = False
    has_bounds: bool = False
    bias_shape: tuple[int, int, int, int] | None = None
    bias_dtype: str = ""
    has_alibi: bool = False
    has_sink: bool = False
    dropout_p: float = 0.0
    deterministic: bool = True
    num_splits: int = 0

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field) for field in self.__dataclass_fields__))

    def __hash__(self) -> int:
        """Remembered: every call looks plans up by its problem, several times."""
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """Without the remembered hash: strings hash otherwise in another process."""
        return {name: x for name, x in self.__dict__.items() if name != "_hash"}

    @property
    def has_bias(self) -> bool:
        """Whether there is an additive bias."""
        return self.bias_shape is not None

    @property
    def G(self) -> int:
        """Query heads per key/value head."""
        return self.H // self.Hkv if self.Hkv else 1

    @property
    def lse_dtype(self) -> str:
        """float64 for float64 inputs, else float32."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of out in the canonical view."""
        if self.rows == "packed":
            return (self.H, self.tokens[0], self.Dv)
        return (self.B, self.H, self.M, self.Dv)


class Tensors(NamedTuple):
    """The arrays of one call, views in canonical axis order; NumPy or torch, all of one kind.

    Shapes: q [B, H, M, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv]; packed q [H, Tq, D], k and v [Hkv, Tk, .]; paged k and
    v [P, Hkv, page, .]. ``bias`` and ``keep`` are 4-D with ones where they broadcast (``expand`` stretches them),
    ``alibi_slopes`` [1 or B, H], ``sink`` [H], ``cu_q`` and ``cu_k`` int32 [B + 1], ``lengths`` int32 [B] valid keys,
    ``block_table`` int32 [B, width], ``bounds`` int32 [1 or B, M, 2] or [Tq, 2], ``rng`` int64 [2] (seed, offset).
    """

    q: Any
    k: Any
    v: Any
    bias: Any = None
    keep: Any = None
    alibi_slopes: Any = None
    sink: Any = None
    cu_q: Any = None
    cu_k: Any = None
    lengths: Any = None
    block_table: Any = None
    bounds: Any = None
    rng: Any = None

    def expand(self, problem: Problem) -> Tensors:
        """bias and keep stretched to [B, H, M, N] and slopes to [B, H], by stride 0."""
        full = (problem.B, problem.H, problem.M, problem.N)
        return self._replace(
            bias=None if self.bias is None else broadcast(self.bias, full),
            keep=None if self.keep is None else broadcast(self.keep, full),
            alibi_slopes=None if self.alibi_slopes is None else broadcast(self.alibi_slopes, full[:2]),
        )


class Grads(NamedTuple):
    """Gradients by input, None where not asked for. dq, dk, dv like q, k, v; dbias of ``Problem.bias_shape`` in the
    bias dtype; dalibi [B, H] and dsink [H] in the lse dtype.
    """

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dalibi: Any = None
    dsink: Any = None


class Options(NamedTuple):
    """The keyword arguments that every public function shares; see ``api.attention``."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    mask: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    softcap: float | None = None
    sink: Any = None
    scale: float | None = None
    dropout_p: float = 0.0
    seed: Any = None
    deterministic: bool = True
    align: str = "bottom_right"
    layout: str = "bhmd"
    backend: str = "auto"


class Bound(NamedTuple):
    """A validated call."""

    problem: Problem
    tensors: Tensors


@dataclass(frozen=True)
class _Sizes:
    B: int
    H: int
    Hkv: int
    M: int
    N: int
    D: int
    Dv: int
    rows: Rows
    tokens: tuple[int, int] = (0, 0)
    page: int = 0


def bind(q: Any, k: Any, v: Any, options: Options) -> Bound:
    """Validate a dense call: q [B, H, M, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv] (or ``layout="bmhd"``)."""
    checks.data(q=q, k=k, v=v)
    checks.axes(4, q=q, k=k, v=v)
    q, k, v = (_canonical(x, options.layout) for x in (q, k, v))
    B, H, M, D = q.shape
    _, Hkv, N, Dv = v.shape
    checks.same(f"batch {B} to match q", B, k=k.shape[0], v=v.shape[0])
    checks.heads(H, k.shape[1], v.shape[1])
    checks.same(f"head dim {D} to match q", D, k=k.shape[3])
    checks.same(f"length {k.shape[2]} to match k", k.shape[2], v=v.shape[2])
    sizes = _Sizes(B, H, Hkv, M, N, D, Dv, "dense")
    return _finish(Tensors(q, k, v), sizes, options)


def bind_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int | None,
    max_k: int | None,
    options: Options,
) -> Bound:
    """Validate a packed call: q [Tq, H, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], cu_seqlens [B + 1]."""
    checks.data(q=q, k=k, v=v)
    checks.axes(3, q=q, k=k, v=v)
    (Tq, H, D), (Tk, Hkv, Dv) = q.shape, v.shape
    checks.heads(H, k.shape[1], Hkv)
    checks.same(f"head dim {D} to match q", D, k=k.shape[2])
    checks.same(f"{k.shape[0]} tokens to match k", k.shape[0], v=Tk)
    cu_q, longest_q = checks.cumulative("cu_seqlens_q", cu_q, Tq, q, given=max_q, limit="max_seqlen_q")
    cu_k, longest_k = checks.cumulative("cu_seqlens_k", cu_k, Tk, q, given=max_k, limit="max_seqlen_k")
    B = cu_q.shape[0] - 1
    checks.same(f"{B + 1} entries to match cu_seqlens_q", B + 1, cu_seqlens_k=cu_k.shape[0])
    # a bias or mask made for longer sequences than these is fine: a larger bound changes nothing
    M = max(longest_q, checks.longest(-2, options.bias, options.mask))
    N = max(longest_k, checks.longest(-1, options.bias, options.mask))
    tensors = Tensors(*(transpose(x, 0, 1) for x in (q, k, v)), cu_q=cu_q, cu_k=cu_k)
    return _finish(tensors, _Sizes(B, H, Hkv, M, N, D, Dv, "packed", (Tq, Tk)), options)


def bind_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    lengths: Any,
    block_table: Any,
    options: Options,
    num_splits: int | None = None,
) -> Bound:
    """Validate a call against a cache: ``lengths`` [B] are the valid keys, everything beyond is never read."""
    checks.data(q=q, k_cache=k_cache, v_cache=v_cache)
    checks.axes(4, q=q, k_cache=k_cache, v_cache=v_cache)
    q, k, v = (_canonical(x, options.layout) for x in (q, k_cache, v_cache))
    B, H, M, D = q.shape
    P, Hkv, rows, Dv = v.shape
    checks.heads(H, k.shape[1], Hkv)
    checks.same(f"head dim {D} to match q", D, k_cache=k.shape[3])
    checks.same(
        f"shape {tuple(k.shape[:3])} to match k_cache", tuple(k.shape[:3]), v_cache=tuple(v.shape[:3])
    )
    if block_table is None:
        checks.same(f"batch {B} to match q", B, k_cache=P)
        sizes = _Sizes(B, H, Hkv, M, rows, D, Dv, "cached")
    else:
        block_table = checks.table(block_table, B, q)
        sizes = _Sizes(B, H, Hkv, M, rows * block_table.shape[1], D, Dv, "paged", page=rows)
    lengths = checks.lengths("cache_seqlens", lengths, B, sizes.N, q)
    if block_table is not None:
        checks.pages(block_table, lengths, rows, P)
    problem, tensors = _finish(Tensors(q, k, v, lengths=lengths, block_table=block_table), sizes, options)
    return Bound(replace(problem, num_splits=checks.splits(num_splits)), tensors)


def bind_call(kind: str, arrays: tuple[Any, ...], options: Options) -> Bound:
    """``bind``, ``bind_varlen`` or ``bind_decode`` by the kind of call: "dense", "packed" or "decode"."""
    if kind == "dense":
        q, k, v = arrays
        return bind(q, k, v, options)
    if kind == "packed":
        q, k, v, cu_q, cu_k, max_q, max_k = arrays
        return bind_varlen(q, k, v, cu_q, cu_k, max_q, max_k, options)
    q, k, v, lengths, block_table, num_splits = arrays
    return bind_decode(q, k, v, lengths, block_table, options, num_splits)


def _canonical(x: Any, layout: str) -> Any:
    if layout == "bhmd":
        return x
    if layout == "bmhd":
        return transpose(x, 1, 2)
    raise ShapeError(expected("layout", "'bhmd' or 'bmhd'", repr(layout)))


def _finish(tensors: Tensors, sizes: _Sizes, options: Options) -> Bound:
    """Everything that does not depend on where rows live."""
    q = tensors.q
    name = dtype_name(q)
    mask = as_mask(options.mask) & window(*checks.pair("window", options.window))
    if checks.flag("causal", options.causal):
        mask = mask & causal(align=options.align)
    elif options.align not in ("bottom_right", "top_left"):
        raise ShapeError(expected("align", "'bottom_right' or 'top_left'", repr(options.align)))
    dropout_p = checks.probability("dropout_p", options.dropout_p)
    bias = checks.bias(options.bias, name, _full(sizes), q)
    tensors = tensors._replace(
        bias=bias,
        keep=checks.keep(mask.keep, _full(sizes), q),
        alibi_slopes=checks.slopes(options.alibi_slopes, name, sizes.B, sizes.H, q),
        sink=checks.sink(options.sink, name, sizes.H, q),
        bounds=_bounds(mask, tensors, sizes) if mask.terms else None,
        rng=checks.rng(options.seed, q) if dropout_p > 0 else None,
    )
    problem = Problem(
        **{field: getattr(sizes, field) for field in _Sizes.__dataclass_fields__},
        dtype=name,
        device=device_type(q),
        layout=options.layout,
        scale=_scale(options.scale, sizes.D),
        softcap=checks.softcap(options.softcap),
        left=mask.left,
        right=mask.right,
        top_left=mask.top_left,
        has_keep=tensors.keep is not None,
        has_bounds=tensors.bounds is not None,
        bias_shape=None if bias is None else tuple(bias.shape),
        bias_dtype="" if bias is None else dtype_name(bias),
        has_alibi=tensors.alibi_slopes is not None,
        has_sink=tensors.sink is not None,
        dropout_p=dropout_p,
        deterministic=checks.flag("deterministic", options.deterministic),
    )
    return Bound(problem, tensors)


def _full(sizes: _Sizes) -> tuple[int, int, int, int]:
    return sizes.B, sizes.H, sizes.M, sizes.N


def _scale(scale: float | None, d: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(d) if d else 1.0
    value = checks.number("scale", scale)
    if not math.isfinite(value):
        raise ShapeError(expected("scale", "a finite number", scale))
    return value


def _bounds(mask: Mask, tensors: Tensors, sizes: _Sizes) -> Any:
    """Explicit terms as one int32 array; the band stays in the Problem and is intersected by the backend."""
    fixed = sizes.rows == "dense"
    for term in mask.terms:
        term.check(sizes.B, sizes.M if fixed else None, sizes.N if fixed else None)
    lengths = [x for x in (tensors.cu_q, tensors.cu_k, tensors.lengths) if x is not None]
    known = all(checks.host_known(x) for x in (tensors.q, *lengths))
    if is_torch(tensors.q) and not (known and all(term.on_host for term in mask.terms)):
        return explicit_bounds(mask.terms, *_rows_of_device(tensors, sizes))
    return _bounds_on_host(Mask(terms=mask.terms), tensors, sizes)


def _rows_of_device(tensors: Tensors, sizes: _Sizes) -> tuple[Any, Any, Any, Any]:
    """Sequence, position, query length and key length of every query row, without waiting for a device."""
    import torch

    device = tensors.q.device
    if sizes.rows != "packed":
        b = torch.arange(sizes.B, device=device)[:, None].expand(sizes.B, sizes.M)
        i = torch.arange(sizes.M, device=device).expand(sizes.B, sizes.M)
        return b, i, sizes.M, sizes.N if tensors.lengths is None else tensors.lengths.long()[:, None]
    cu_q, cu_k = tensors.cu_q.long(), tensors.cu_k.long()
    token = torch.arange(sizes.tokens[0], device=device)
    # tokens of no sequence get some row's interval: no backend looks at it
    b = (torch.searchsorted(cu_q, token, right=True) - 1).clamp(max=sizes.B - 1)
    return b, (token - cu_q[b]).clamp(max=sizes.M - 1), (cu_q[1:] - cu_q[:-1])[b], (cu_k[1:] - cu_k[:-1])[b]


def _bounds_on_host(given: Mask, tensors: Tensors, sizes: _Sizes) -> Any:
    import numpy as np

    host = [None if x is None else x.tolist() for x in (tensors.cu_q, tensors.cu_k, tensors.lengths)]
    rows = []
    for b in range(sizes.B):
        m, n = checks.sequence_lengths(b, sizes.M, sizes.N, *host)
        rows.append(np.stack(given.bounds(m, n, b), axis=-1))
    if sizes.rows == "packed":
        used = np.concatenate(rows) if rows else np.zeros((0, 2))
        table = np.zeros((sizes.tokens[0], 2), dtype=np.int32)
        table[: len(used)] = used
    else:
        table = np.stack(rows).astype(np.int32) if rows else np.zeros((0, sizes.M, 2), np.int32)
    if not is_torch(tensors.q):
        return table
    import torch

    return torch.from_numpy(table).to(tensors.q.device)
