"""NumPy arrays and torch tensors behind one set of verbs, without importing torch.

A torch tensor can only reach attnproof if torch is already loaded, so every question asks ``sys.modules`` first.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .errors import BackendMissing, DtypeError, expected

INT32 = (-(2**31), 2**31 - 1)


def is_torch(x: object) -> bool:
    """True for a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def dtype_name(x: Any) -> str:
    """``float16``, ``bfloat16``, ``int64`` ... of an array or tensor."""
    return str(x.dtype).removeprefix("torch.")


def device_type(x: Any) -> str:
    """``cpu`` or ``cuda`` (ROCm devices call themselves cuda as well)."""
    return x.device.type if is_torch(x) else "cpu"


def transpose(x: Any, a: int, b: int) -> Any:
    """Swap two axes, as a view."""
    return x.transpose(a, b) if is_torch(x) else np.swapaxes(x, a, b)


def broadcast(x: Any, shape: tuple[int, ...]) -> Any:
    """Expand to ``shape`` with stride 0, as a view."""
    return x.expand(shape) if is_torch(x) else np.broadcast_to(x, shape)


def reshape_leading(x: Any, ndim: int) -> Any:
    """Add axes of length 1 in front until there are ``ndim``."""
    return x[(None,) * (ndim - x.ndim)] if x.ndim < ndim else x


def to_numpy(x: Any) -> Any:
    """Zero-copy NumPy view of a host tensor (bfloat16 as raw uint16 bits); a copy of a device tensor."""
    if x is None:
        return None
    if not is_torch(x):
        return x.view(np.uint16) if dtype_name(x) == "bfloat16" else x
    torch = sys.modules["torch"]
    # force: detached, copied from a device, and negated where torch only noted that it should be
    return (x.detach().view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy(force=True)


def from_numpy(x: Any, like: Any, name: str | None = None) -> Any:
    """A NumPy result as the kind and device of ``like``; ``name`` is its dtype where the bits do not tell."""
    if x is None:
        return None
    if is_torch(like):
        torch = sys.modules["torch"]
        tensor = torch.from_numpy(x)
        if name == "bfloat16":
            tensor = tensor.view(torch.bfloat16)
        return tensor.to(like.device)
    return x.view(bfloat16()) if name == "bfloat16" else x


def bfloat16() -> Any:
    """The NumPy bfloat16 dtype of ml_dtypes."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise BackendMissing("ml_dtypes: needed for bfloat16 NumPy arrays; pip install ml_dtypes") from error
    return np.dtype(ml_dtypes.bfloat16)


def as_torch(x: Any) -> Any:
    """A tensor sharing the memory of a NumPy array; tensors pass through."""
    if x is None or is_torch(x):
        return x
    try:
        import torch
    except ImportError as error:
        raise BackendMissing("torch: needed by this backend; pip install 'attnproof[torch]'") from error
    name = dtype_name(x)
    if name == "bfloat16":
        x = x.view(np.uint16)
    # torch counts strides in elements, has no negative ones, wants aligned data and warns on read-only memory
    strides_fit = all(s >= 0 and s % x.itemsize == 0 for s in x.strides)
    tensor = torch.from_numpy(x if x.flags.writeable and x.flags.aligned and strides_fit else x.copy())
    return tensor.view(torch.bfloat16) if name == "bfloat16" else tensor


def as_int32(name: str, x: Any, like: Any) -> Any:
    """Lengths and tables as int32 of the kind and device of ``like``; other dtypes than int64 are refused.

    What int32 cannot hold becomes its largest or smallest value, which no later check takes for a valid number.
    """
    if is_torch(like):
        torch = sys.modules["torch"]
        tensor = x if is_torch(x) else torch.as_tensor(np.asarray(x), device=like.device)
        if tensor.dtype not in (torch.int32, torch.int64):
            raise DtypeError(expected(name, "int32 or int64", dtype_name(tensor)))
        if tensor.device != like.device:
            raise DtypeError(expected(name, f"device {like.device} to match q", tensor.device))
        return tensor if tensor.dtype == torch.int32 else tensor.clamp(*INT32).to(torch.int32)
    array = to_numpy(x) if is_torch(x) else np.asarray(x)
    if array.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        raise DtypeError(expected(name, "int32 or int64", array.dtype))
    return array if array.dtype == np.int32 else array.clip(*INT32).astype(np.int32)
