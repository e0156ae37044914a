"""float32 means IEEE float32, and a chunk is computed in the dtype it was given in, whatever is switched on outside."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch

EXACT = ("ieee", "none")


@contextlib.contextmanager
def exact(device: torch.device) -> Generator[None]:
    """Products without TF32 or bfloat16 shortcuts, and without autocast; the caller's settings come back afterwards.

    torch keeps the precision of products per process: another thread that multiplies meanwhile gets exact products too.
    """
    matmul = _matmul(device.type)
    before = "ieee" if matmul is None else matmul.fp32_precision
    with torch.autocast(device.type, enabled=False) if _autocast(device.type) else contextlib.nullcontext():
        if matmul is None or before in EXACT:
            yield
            return
        matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            _restore(matmul, before)


def _autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _matmul(device: str) -> Any:
    backend = {"cuda": torch.backends.cuda, "cpu": torch.backends.mkldnn}.get(device)
    return getattr(backend, "matmul", None)


def _restore(matmul: Any, before: Any) -> None:
    # a setting inherited from torch.backends.fp32_precision must stay inherited: set it only if it does not come back
    matmul.fp32_precision = "none"
    if matmul.fp32_precision != before:
        matmul.fp32_precision = before
