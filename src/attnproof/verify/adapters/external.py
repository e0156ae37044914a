"""Other people's kernels, when they are installed: flash-attn 2, 3 and 4, xFormers, FlashInfer.

Each adapter passes what the library documents and refuses the rest; nothing here is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from attnproof.cases import UNBOUNDED, Case
from attnproof.verify.candidate import Candidate, Skip, Traits, wrap

HALF = ("float16", "bfloat16")


def build(library: str, version: str, device: str | None = None) -> Candidate:
    """`flash_attn` (`:3` for the Hopper package, `:4` for the CuTe one), `xformers`, `flashinfer`."""
    word = f"{library}:{version}" if version else library
    if word not in ADAPTERS:
        raise ValueError(f"candidate: expected one of {', '.join(ADAPTERS)}, got {word!r}")
    module, function, traits = ADAPTERS[word]
    if find_spec(module.split(".")[0]) is None:
        raise Skip(f"{module.split('.')[0]} is not installed")
    return wrap(word, function, traits, device=device or "cuda")


def _no_zero_sizes(case: Case) -> str | None:
    return "no zero sizes" if 0 in (case.B, case.H, case.M, case.N, case.D) else None


def _flash_limits(case: Case) -> str | None:
    if case.D % 8 or case.D > 256:
        return "head dims are multiples of 8 up to 256"
    if case.Dv != case.D:
        return "q and v have one head dim"
    return _no_zero_sizes(case)


def _flash2(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    scale: float,
    window: tuple[int, int] | None = None,
    alibi_slopes: Any = None,
    softcap: float | None = None,
) -> Any:
    from flash_attn import flash_attn_func

    out, lse, _ = flash_attn_func(
        q,
        k,
        v,
        softmax_scale=scale,
        causal=causal,
        window_size=window or (UNBOUNDED, UNBOUNDED),
        alibi_slopes=alibi_slopes,
        softcap=softcap or 0.0,
        return_attn_probs=True,
    )
    return out, lse


def _flash3(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    scale: float,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
) -> Any:
    from flash_attn_interface import flash_attn_func

    return _first_two(
        flash_attn_func(
            q,
            k,
            v,
            softmax_scale=scale,
            causal=causal,
            window_size=window or (UNBOUNDED, UNBOUNDED),
            softcap=softcap or 0.0,
        )
    )


def _flash4(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    scale: float,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
) -> Any:
    from flash_attn.cute import flash_attn_func

    sides = (None, None) if window is None else tuple(None if side == UNBOUNDED else side for side in window)
    return _first_two(
        flash_attn_func(
            q, k, v, softmax_scale=scale, causal=causal, window_size=sides, softcap=softcap or 0.0
        )
    )


def _first_two(result: Any) -> Any:
    """`out`, or `(out, lse)` of a longer tuple."""
    return (result[0], result[1]) if isinstance(result, tuple) and len(result) > 1 else result


def _xformers(q: Any, k: Any, v: Any, *, causal: bool, scale: float, bias: Any = None) -> Any:
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    group = q.shape[2] // k.shape[2]
    k, v = (part.repeat_interleave(group, 2) if group > 1 else part for part in (k, v))
    mask = LowerTriangularMask() if causal else None
    if bias is not None:
        mask = bias.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    return memory_efficient_attention(q, k, v, attn_bias=mask, scale=scale)


def _flashinfer(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    scale: float,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
) -> Any:
    import torch
    from flashinfer import single_prefill_with_kv_cache

    left = UNBOUNDED if window is None else window[0]
    parts = [
        single_prefill_with_kv_cache(
            q[b],
            k[b],
            v[b],
            causal=causal,
            sm_scale=scale,
            window_left=left,
            logits_soft_cap=softcap or 0.0,
            return_lse=True,
        )
        for b in range(q.shape[0])
    ]
    # its lse is a base-2 logarithm, [T, H]
    lse = torch.stack([lse.transpose(0, 1) for _, lse in parts]) * 0.6931471805599453
    return torch.stack([out for out, _ in parts]), lse


def _xformers_limits(case: Case) -> str | None:
    if case.causal and case.bias:
        return "takes one attn_bias, causal or a tensor"
    return _no_zero_sizes(case)


def _flashinfer_limits(case: Case) -> str | None:
    if case.window[1] not in (UNBOUNDED, 0) or (
        (case.window[1] == 0) != case.causal and case.window != (UNBOUNDED, UNBOUNDED)
    ):
        return "windows go with causal and have a left side only"
    return _flash_limits(case)


ADAPTERS: dict[str, tuple[str, Callable[..., Any], Traits]] = {
    "flash_attn": ("flash_attn", _flash2, Traits(layout="bmhd", dtypes=HALF, limits=_flash_limits)),
    "flash_attn:3": (
        "flash_attn_interface",
        _flash3,
        Traits(layout="bmhd", dtypes=HALF, limits=_flash_limits),
    ),
    "flash_attn:4": ("flash_attn.cute", _flash4, Traits(layout="bmhd", dtypes=HALF, limits=_no_zero_sizes)),
    "xformers": (
        "xformers",
        _xformers,
        Traits(layout="bmhd", align="top_left", dtypes=(*HALF, "float32"), limits=_xformers_limits),
    ),
    "flashinfer": (
        "flashinfer",
        _flashinfer,
        Traits(layout="bmhd", dtypes=HALF, limits=_flashinfer_limits, backward="inference only"),
    ),
}
