"""The Gluon pieces of the Hopper kernels run as plain Python on NumPy arrays: the code that is compiled, not a copy of it."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from attnproof.backends.hopper.compat import gl
from attnproof.backends.hopper.kernels import pieces


def _where(test: Any, yes: Any, no: Any) -> Any:
    found = np.where(test, yes, no)
    return found[()] if found.ndim == 0 else found


GL = SimpleNamespace(
    minimum=np.minimum,
    maximum=np.fmax,  # like the device's, it passes over NaN
    max=lambda x, axis: np.fmax.reduce(x, axis=axis),
    sum=lambda x, axis: x.sum(axis=axis, dtype=x.dtype),
    where=_where,
    exp2=np.exp2,
    log2=np.log2,
    float32=np.float32,
    constexpr=gl.constexpr,
    cast=lambda x, dtype: x.astype(dtype),
    convert_layout=lambda x, *_, **__: x,
)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, gl.constexpr) else value


def load(module: Any = pieces) -> SimpleNamespace:
    """Functions and constants of a kernel module, callable on NumPy arrays."""
    names: dict[str, Any] = {at: _plain(x) for at, x in vars(module).items() if not at.startswith("__")}
    names |= {"gl": GL, "rows_layout": lambda _: None}
    for at, x in vars(module).items():
        raw = getattr(x, "fn", None)
        if isinstance(raw, FunctionType) and at != "rows_layout":
            names[at] = FunctionType(raw.__code__, names, at)
    # these are machine instructions
    names["reciprocal"] = lambda x: 1 / x
    names["raised"] = lambda columns: (columns.astype(np.int32) | 0x4B000000).view(np.float32)
    names["show_below"] = lambda s, j, limit: np.where(j[None, :] < limit[:, None], s, -np.inf)
    names["show_between"] = lambda s, j, floor, limit: np.where(
        (j[None, :] >= floor[:, None]) & (j[None, :] < limit[:, None]), s, -np.inf
    )
    return SimpleNamespace(**names)
