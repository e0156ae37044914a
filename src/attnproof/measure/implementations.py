"""The attention functions that can be timed side by side: ours by backend, torch's by kernel, and eager.

Each takes ``(q, k, v, shape)`` as torch tensors [B, H, N, D] and returns out. One that cannot run a shape says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import dispatch
from ..api import attention
from ..arrays import device_type
from ..problem import Options, bind
from .shapes import Shape

Run = Callable[[Any, Any, Any, Shape], Any]
SDPA = ("flash", "efficient", "cudnn", "math")


class Unable(Exception):
    """An implementation cannot run a shape; the message says why."""


def names(device: str) -> tuple[str, ...]:
    """Implementations worth timing on a device, ours first."""
    own = tuple(name for name in dispatch.backends() if name not in ("reference", "math"))
    peers = (
        ("sdpa:flash", "sdpa:efficient", "sdpa:cudnn", "flex")
        if device == "cuda"
        else ("sdpa:flash", "sdpa:math")
    )
    return (*own, *peers, "eager")


def load(name: str) -> Run:
    """The implementation of this name.

    Raises:
        KeyError: no such implementation.
    """
    family, _, kernel = name.partition(":")
    if family == "sdpa" and kernel in SDPA:
        return _sdpa(kernel)
    if name in ("eager", "flex"):
        return {"eager": _eager, "flex": _flex()}[name]
    if name in dispatch.backends():
        return _own(name)
    raise KeyError(f"implementation: expected a backend, eager, flex or sdpa:{'|'.join(SDPA)}, got {name!r}")


def _own(backend: str) -> Run:
    def run(q: Any, k: Any, v: Any, shape: Shape) -> Any:
        return attention(q, k, v, causal=shape.causal, window=(shape.left, -1), backend=backend)

    def checked(q: Any, k: Any, v: Any, shape: Shape) -> Any:
        reason = dispatch.load(backend).why_not(bind(q, k, v, Options(causal=shape.causal)).problem)
        if reason is not None:
            raise Unable(reason)
        return run(q, k, v, shape)

    checked.direct = run  # type: ignore[attr-defined]
    return checked


def _sdpa(kernel: str) -> Run:
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kinds = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }

    def run(q: Any, k: Any, v: Any, shape: Shape) -> Any:
        if shape.causal and shape.queries not in (1, shape.N):
            raise Unable("its causal mask is aligned top left")
        causal = shape.causal and shape.queries == shape.N
        mask = _dense_mask(shape, q) if shape.left >= 0 else None
        try:
            with sdpa_kernel(kinds[kernel]):
                return F.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=mask,
                    is_causal=causal and mask is None,
                    enable_gqa=shape.kv_heads != shape.H,
                )
        except RuntimeError as error:
            raise Unable(str(error).splitlines()[0]) from error

    return run


def _dense_mask(shape: Shape, q: Any) -> Any:
    import torch

    lo, hi = (torch.as_tensor(x, device=q.device) for x in shape.mask.bounds(shape.queries, shape.N))
    j = torch.arange(shape.N, device=q.device)
    return (j >= lo[:, None]) & (j < hi[:, None])


def _eager(q: Any, k: Any, v: Any, shape: Shape) -> Any:
    import torch

    if shape.kv_heads != shape.H:
        k, v = (x.repeat_interleave(shape.H // shape.kv_heads, dim=1) for x in (k, v))
    s = (q @ k.transpose(-1, -2)) * shape.D**-0.5
    if shape.causal or shape.left >= 0:
        s = s.masked_fill(~_dense_mask(shape, q), -torch.inf)
    return torch.softmax(s, dim=-1) @ v


def _flex() -> Run:
    """FlexAttention compiled freshly for each shape: past 8 shapes torch.compile drops to eager without a word."""
    compiled: dict[str, Any] = {}

    def run(q: Any, k: Any, v: Any, shape: Shape) -> Any:
        if device_type(q) != "cuda":
            raise Unable("compiled FlexAttention is timed on GPUs only")
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if shape.name not in compiled:
            torch._dynamo.reset()
            block = None
            if shape.causal or shape.left >= 0:
                lo, hi = (
                    torch.as_tensor(x, device=q.device) for x in shape.mask.bounds(shape.queries, shape.N)
                )
                block = create_block_mask(
                    lambda b, h, i, j: (j >= lo[i]) & (j < hi[i]),
                    None,
                    None,
                    shape.queries,
                    shape.N,
                    q.device,
                )
            compiled.clear()
            compiled[shape.name] = (torch.compile(flex_attention, dynamic=False), block)
        call, block = compiled[shape.name]
        return call(q, k, v, block_mask=block, enable_gqa=shape.kv_heads != shape.H)

    return run
