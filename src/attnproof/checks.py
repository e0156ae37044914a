"""The checks behind ``problem.bind_*``, one function per argument. Each returns the argument in canonical form."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import as_int32, device_type, dtype_name, is_torch, reshape_leading
from .dtypes import NAMES
from .errors import DtypeError, ShapeError, expected

if TYPE_CHECKING:
    from .problem import Problem

Full = tuple[int, int, int, int]
GRADIENTS = frozenset({"q", "k", "v", "bias", "alibi_slopes", "sink"})


def data(**named: Any) -> None:
    """q, k and v: one kind, one floating dtype, one device."""
    (first_name, first), *_ = named.items()
    for name, x in named.items():
        if not (is_torch(x) or isinstance(x, np.ndarray)):
            raise DtypeError(expected(name, "a NumPy array or torch tensor", type(x).__name__))
        if is_torch(x) != is_torch(first):
            raise DtypeError(expected(name, f"the kind of {first_name}", type(x).__name__))
        if dtype_name(x) not in NAMES:
            raise DtypeError(expected(name, f"one of {', '.join(NAMES)}", dtype_name(x)))
        if x.dtype != first.dtype:
            raise DtypeError(
                expected(name, f"dtype {dtype_name(first)} to match {first_name}", dtype_name(x))
            )
        if is_torch(x) and x.device != first.device:
            raise DtypeError(expected(name, f"device {first.device} to match {first_name}", x.device))


def axes(count: int, **named: Any) -> None:
    """Each array has this many axes."""
    for name, x in named.items():
        if x.ndim != count:
            raise ShapeError(expected(name, f"{count} axes", f"shape {tuple(x.shape)}"))


def same(wanted: str, value: Any, **named: Any) -> None:
    """Each named value equals the one it has to match."""
    for name, got in named.items():
        if got != value:
            raise ShapeError(expected(name, wanted, got))


def heads(H: int, k_heads: int, v_heads: int) -> None:
    """Key and value heads agree and divide the query heads."""
    if k_heads != v_heads:
        raise ShapeError(expected("v", f"{k_heads} heads to match k", v_heads))
    if H and (k_heads == 0 or H % k_heads):
        raise ShapeError(expected("k", f"a head count that divides the {H} query heads", k_heads))


def number(name: str, x: Any) -> float:
    """A real number, not a bool and not an array."""
    if isinstance(x, bool) or not isinstance(x, (int, float, np.floating, np.integer)):
        raise DtypeError(expected(name, "a number", type(x).__name__))
    return float(x)


def pair(name: str, x: Any) -> tuple[int, int]:
    """A pair of integers such as ``window``."""
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        raise ShapeError(expected(name, "a pair (left, right)", repr(x)))
    return x[0], x[1]


def probability(name: str, x: Any) -> float:
    """A number in [0, 1]; NaN is refused."""
    p = number(name, x)
    if not 0.0 <= p <= 1.0:
        raise ShapeError(expected(name, "a probability in [0, 1]", x))
    return p


def softcap(x: Any) -> float:
    """0.0 stands for none."""
    if x is None:
        return 0.0
    cap = number("softcap", x)
    if not (cap > 0 and math.isfinite(cap)):
        raise ShapeError(expected("softcap", "a finite number above 0, or None for no cap", x))
    return cap


def splits(x: Any) -> int:
    """0 stands for the backend's own choice."""
    if x is None:
        return 0
    if isinstance(x, bool) or not isinstance(x, (int, np.integer)) or x < 1:
        raise ShapeError(expected("num_splits", "an integer of 1 or more, or None", repr(x)))
    return int(x)


def backward(problem: Problem, needs: Any, seed: Any, q: Any, **arrays: Any) -> frozenset[str]:
    """What a backward call is given beside q, k and v fits the forward; the names of the gradients asked for."""
    if problem.dropout_p and seed is None:
        raise ShapeError(expected("seed", "the (seed, offset) of the forward call, which drew its own", None))
    wanted = frozenset((needs,) if isinstance(needs, str) else needs)
    if not wanted <= GRADIENTS:
        raise ShapeError(
            expected("needs", f"names out of {', '.join(sorted(GRADIENTS))}", sorted(wanted - GRADIENTS))
        )
    B, H, M, Dv = problem.out_shape
    out = ((B, M, H, Dv) if problem.layout == "bmhd" else (B, H, M, Dv)), problem.dtype
    wanted_of = {
        "out": out,
        "dout": out,
        "lse": ((B, H, M), problem.lse_dtype),
        "dlse": ((B, H, M), problem.lse_dtype),
    }
    given = {name: x for name, x in arrays.items() if name != "dlse" or x is not None}
    for name, x in given.items():
        shape, dtype = wanted_of[name]
        _beside(name, x, q)
        if dtype_name(x) != dtype:
            raise DtypeError(expected(name, f"dtype {dtype}", dtype_name(x)))
        same(f"shape {shape}", shape, **{name: tuple(x.shape)})
    return wanted


def _beside(name: str, x: Any, q: Any) -> None:
    """An optional array is of q's kind and on q's device."""
    if is_torch(q):
        if not is_torch(x):
            raise DtypeError(expected(name, "a torch tensor to match q", type(x).__name__))
        if x.device != q.device:
            raise DtypeError(expected(name, f"device {q.device} to match q", x.device))
    elif not isinstance(x, np.ndarray):
        raise DtypeError(expected(name, "a NumPy array to match q", type(x).__name__))


def _pair_shape(name: str, x: Any, full: Full) -> Any:
    """Right-aligned broadcast to [B, H, M, N], as a 4-D view that keeps its ones."""
    if not 2 <= x.ndim <= 4:
        wanted = f"2 to 4 axes that broadcast to [B, H, M, N] = {full}"
        raise ShapeError(expected(name, wanted, f"shape {tuple(x.shape)}"))
    view = reshape_leading(x, 4)
    if any(have not in (1, want) for have, want in zip(view.shape, full, strict=True)):
        raise ShapeError(expected(name, f"a shape that broadcasts to {full}", tuple(x.shape)))
    return view


def bias(x: Any, dtype: str, full: Full, q: Any) -> Any:
    """Additive bias: dtype of q or float32, 2 to 4 axes."""
    if x is None:
        return None
    _beside("bias", x, q)
    allowed = tuple(dict.fromkeys((dtype, "float32")))
    if dtype_name(x) not in allowed:
        hint = " (use mask= for a boolean mask)" if dtype_name(x) == "bool" else ""
        raise DtypeError(expected("bias", f"dtype {' or '.join(allowed)}{hint}", dtype_name(x)))
    return _pair_shape("bias", x, full)


def keep(predicates: tuple[Any, ...], full: Full, q: Any) -> Any:
    """Boolean masks joined by 'and', at their smallest common shape."""
    joined = None
    for x in predicates:
        _beside("mask", x, q)
        view = _pair_shape("mask", x, full)
        joined = view if joined is None else joined & view
    return joined


def slopes(x: Any, dtype: str, B: int, H: int, q: Any) -> Any:
    """ALiBi slopes [H] or [B, H], float32 (or float64 beside float64), as [1 or B, H]."""
    if x is None:
        return None
    _beside("alibi_slopes", x, q)
    allowed = ("float32", "float64") if dtype == "float64" else ("float32",)
    if dtype_name(x) not in allowed:
        raise DtypeError(expected("alibi_slopes", f"dtype {' or '.join(allowed)}", dtype_name(x)))
    if tuple(x.shape) not in ((H,), (B, H)):
        raise ShapeError(expected("alibi_slopes", f"shape [{H}] or [{B}, {H}]", tuple(x.shape)))
    return reshape_leading(x, 2)


def sink(x: Any, dtype: str, H: int, q: Any) -> Any:
    """One extra logit per query head [H], in the dtype of q or float32."""
    if x is None:
        return None
    _beside("sink", x, q)
    allowed = tuple(dict.fromkeys((dtype, "float32")))
    if dtype_name(x) not in allowed:
        raise DtypeError(expected("sink", f"dtype {' or '.join(allowed)}", dtype_name(x)))
    if tuple(x.shape) != (H,):
        raise ShapeError(expected("sink", f"shape [{H}]", tuple(x.shape)))
    return x


def rng(seed: Any, q: Any) -> Any:
    """(seed, offset) as int64 [2] beside q; drawn from the device's generator when not given."""
    if seed is not None and not isinstance(seed, (int, np.integer)):
        return _rng_array(seed, q)
    if seed is not None and not 0 <= seed < 2**63:
        raise ShapeError(expected("seed", "an integer in [0, 2^63)", seed))
    if not is_torch(q):
        drawn = np.random.randint(0, 2**62, size=2, dtype=np.int64)  # np.random.seed decides
        return drawn if seed is None else np.array([seed, 0], dtype=np.int64)
    import torch

    if seed is None:
        return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=q.device)
    pair = torch.zeros(2, dtype=torch.int64, device=q.device)
    pair[0] = int(seed)  # a fill, so that no host copy stands in the way of graph capture
    return pair


def flag(name: str, x: Any) -> bool:
    """True or False, and nothing that merely counts as one."""
    if not isinstance(x, (bool, np.bool_)):
        raise DtypeError(expected(name, "True or False", type(x).__name__))
    return bool(x)


def _is_word(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and -(2**63) <= int(x) < 2**63


def _rng_array(seed: Any, q: Any) -> Any:
    """A caller's own (seed, offset): a pair of integers, or int64 [2] on the device of q."""
    if isinstance(seed, (tuple, list)):
        if len(seed) != 2 or not all(_is_word(x) for x in seed):
            raise ShapeError(expected("seed", "two integers (seed, offset) of int64", repr(seed)))
        seed = np.asarray(seed, dtype=np.int64)
        if is_torch(q):
            import torch

            seed = torch.from_numpy(seed).to(q.device)
    _beside("seed", seed, q)
    if dtype_name(seed) != "int64" or tuple(seed.shape) != (2,):
        got = f"{dtype_name(seed)} {tuple(seed.shape)}"
        raise ShapeError(expected("seed", "an integer or int64 [2] (seed, offset)", got))
    return seed


def host_known(x: Any) -> bool:
    """Whether values can be read without waiting for a device, and now (not while a graph is traced or mapped)."""
    if device_type(x) != "cpu":
        return False
    if not is_torch(x):
        return True
    import torch

    if torch.compiler.is_compiling():
        return False
    from torch._C._functorch import is_functorch_wrapped_tensor

    ordinary = type(x) in (torch.Tensor, torch.nn.Parameter) and not torch._C._len_torch_dispatch_stack()
    return ordinary and not is_functorch_wrapped_tensor(x)


def torch_is_tracing(x: Any) -> bool:
    """Whether a tensor stands for values that do not exist yet."""
    import torch

    return torch.compiler.is_compiling() or x.is_meta or type(x) not in (torch.Tensor, torch.nn.Parameter)


def cumulative(name: str, cu: Any, tokens: int, q: Any, *, given: int | None, limit: str) -> tuple[Any, int]:
    """``cu_seqlens``: int32 [B + 1], 0 first, never decreasing, at most ``tokens``; and the longest length."""
    cu = as_int32(name, cu, q)
    if cu.ndim != 1 or cu.shape[0] < 1:
        raise ShapeError(expected(name, "shape [B + 1]", tuple(cu.shape)))
    if given is not None:
        given = _length(limit, given)
    if not host_known(cu):
        if given is None and is_torch(cu) and torch_is_tracing(cu):
            raise ShapeError(expected(limit, "an int, because lengths are not known in a traced call", None))
        if given is None:
            given = int((cu[1:] - cu[:-1]).max()) if cu.shape[0] > 1 else 0
        return cu, given
    values = cu.tolist()
    if values[0] != 0:
        raise ShapeError(expected(name, "0 as its first entry", values[0]))
    lengths = [b - a for a, b in pairwise(values)]
    if min(lengths, default=0) < 0:
        raise ShapeError(expected(name, "entries that never decrease", values))
    if values[-1] > tokens:
        raise ShapeError(expected(name, f"at most {tokens} tokens", values[-1]))
    longest = max(lengths, default=0)
    if given is not None and given < longest:
        raise ShapeError(expected(limit, f"at least the longest sequence, {longest}", given))
    # the longest length itself, so that a larger bound changes nothing: not even which biases fit
    return cu, longest


def _length(name: str, x: Any) -> int:
    # a symbolic length of a traced call is no int: what is refused is named, not what is taken
    if is_torch(x) or isinstance(x, (bool, float, str, np.ndarray)):
        raise DtypeError(
            expected(name, "a Python int (reading a tensor would wait for the device)", type(x).__name__)
        )
    if x < 0:
        raise ShapeError(expected(name, "0 or more", x))
    return int(x)


def longest(axis: int, *arrays: Any) -> int:
    """The largest size along ``axis`` of a bias, mask tensor or mask object's tensors."""
    found = [0]
    for x in arrays:
        for array in getattr(x, "keep", (x,)):
            if hasattr(array, "shape") and len(array.shape) >= 2:
                found.append(array.shape[axis])
    return max(size if size != 1 else 0 for size in found)


def lengths(name: str, x: Any, B: int, capacity: int, q: Any) -> Any:
    """Valid keys per sequence, int32 [B], each within the capacity."""
    x = as_int32(name, x, q)
    if tuple(x.shape) != (B,):
        raise ShapeError(expected(name, f"shape [{B}]", tuple(x.shape)))
    if host_known(x):
        values = x.tolist()
        if min(values, default=0) < 0:
            raise ShapeError(expected(name, "0 or more", min(values)))
        if max(values, default=0) > capacity:
            raise ShapeError(expected(name, f"at most the cache capacity {capacity}", max(values)))
    return x


def table(x: Any, B: int, q: Any) -> Any:
    """``block_table``: int32 [B, width]."""
    x = as_int32("block_table", x, q)
    if x.ndim != 2 or x.shape[0] != B:
        raise ShapeError(expected("block_table", f"shape [{B}, width]", tuple(x.shape)))
    return x


def pages(block_table: Any, valid: Any, page: int, pool: int) -> None:
    """Every page-table entry that is used names a page of the pool; unused ones may hold anything."""
    if not (host_known(block_table) and host_known(valid)):
        return
    for b, (row, length) in enumerate(zip(block_table.tolist(), valid.tolist(), strict=True)):
        used = row[: -(-length // page)] if page else []
        bad = [entry for entry in used if not 0 <= entry < pool]
        if bad:
            raise ShapeError(expected(f"block_table[{b}]", f"used pages in [0, {pool})", bad[0]))


def sequence_lengths(
    b: int, M: int, N: int, cu_q: list[int] | None, cu_k: list[int] | None, valid: list[int] | None
) -> tuple[int, int]:
    """Query and key length of sequence ``b`` from host lists."""
    m = M if cu_q is None else cu_q[b + 1] - cu_q[b]
    if valid is not None:
        return m, valid[b]
    return m, N if cu_k is None else cu_k[b + 1] - cu_k[b]
