"""The attention functions that can be timed side by side: ours by backend, torch's by kernel, and eager.

Each takes ``(q, k, v, shape)`` as torch tensors [B, H, N, D] and returns out. One that cannot run a shape says why.
Anyone's function joins by ``file.py:function`` or ``module:function``, in the form that ``attnproof verify`` asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import dispatch
from ..api import attention
from ..arrays import device_type
from ..problem import Options, Problem, bind
from ..verify.numerics import of_backend
from .shapes import Shape

Run = Callable[[Any, Any, Any, Shape], Any]
SDPA = ("flash", "efficient", "cudnn", "math")


class Unable(Exception):
    """An implementation cannot run a shape; the message says why."""


@dataclass(frozen=True)
class Implementation:
    """Something to time.

    Attributes:
        name: as on the command line.
        numerics: class of the error model that its verdict is judged by.
        run: the call; raises `Unable` for a shape that it does not serve.
        quick: given one set of inputs that `run` has served, the shortest way to the same kernel: no question is asked
            inside the clock that was answered outside of it.
    """

    name: str
    numerics: str
    run: Run
    quick: Callable[[Any, Any, Any, Shape], Run] | None = None

    def timed(self, q: Any, k: Any, v: Any, shape: Shape) -> Run:
        """What the clock sees."""
        return self.run if self.quick is None else self.quick(q, k, v, shape)


def names(device: str) -> tuple[str, ...]:
    """Implementations worth timing on a device, ours first: those that refuse every call there are left out."""
    own = tuple(
        name for name in dispatch.backends() if name not in ("reference", "math") and _here(name, device)
    )
    if device == "cuda":
        # the eager form is a matter of memory there: its scores alone take longer than a fused call
        return (*own, "sdpa:flash", "sdpa:cudnn", "sdpa:efficient", "flex")
    return (*own, "sdpa:flash", "sdpa:math", "eager")


def _here(backend: str, device: str) -> bool:
    plain = Problem(
        "float32" if device == "cpu" else "bfloat16", device, 1, 1, 1, 64, 64, 64, 64, scale=0.125
    )
    return dispatch.load(backend).why_not(plain) is None


def load(word: str) -> Implementation:
    """The implementation that a word names: a backend (or attnproof:BACKEND), eager, flex, sdpa:KERNEL, file.py:function.

    Raises:
        ValueError: there is none.
    """
    family, _, tail = word.rpartition(":")
    if family == "sdpa" and tail in SDPA:
        return Implementation(word, "precise" if tail == "math" else "flash", *_sdpa(tail))
    if word in ("eager", "flex"):
        return Implementation(word, *(("eager", _eager) if word == "eager" else ("flash", _flex())))
    if family in ("", "attnproof") and tail in dispatch.backends():
        return Implementation(tail, of_backend(dispatch.load(tail)), *_own(tail))
    if family in ("", "sdpa", "attnproof"):
        known = ", ".join((*dispatch.backends(), "eager", "flex"))
        raise ValueError(
            f"candidate: expected {known}, sdpa:{'|'.join(SDPA)}, FILE.py:FUNCTION or MODULE:FUNCTION, got {word!r}"
        )
    return _foreign(word)


def _own(backend: str) -> tuple[Run, Callable[..., Run]]:
    def plain(q: Any, k: Any, v: Any, shape: Shape) -> Any:
        return attention(q, k, v, causal=shape.causal, window=(shape.left, -1), backend=backend)

    def checked(q: Any, k: Any, v: Any, shape: Shape) -> Any:
        options = Options(causal=shape.causal, window=(shape.left, -1))
        reason = dispatch.load(backend).why_not(bind(q, k, v, options).problem)
        if reason is not None:
            raise Unable(reason)
        return plain(q, k, v, shape)

    return checked, lambda q, k, v, shape: plain


def _foreign(word: str) -> Implementation:
    """A function of the documented form; its own words say what it rounds and how its causal mask is aligned."""
    from ..verify.candidate import keywords
    from ..verify.loaders import declared_traits, function_of

    fn = function_of(word)
    declared, accepted = declared_traits(fn), keywords(fn)

    def run(q: Any, k: Any, v: Any, shape: Shape) -> Any:
        if shape.causal and shape.queries != shape.N and declared.get("align") == "top_left":
            raise Unable("its causal mask is aligned top left")
        options: dict[str, Any] = {"causal": shape.causal, "scale": shape.D**-0.5}
        if shape.left >= 0:
            options["window"] = (shape.left, -1)
        if accepted is not None and (missing := [name for name in options if name not in accepted]):
            if missing != ["causal"] or shape.causal:
                raise Unable(f"does not take {', '.join(missing)}")
            del options["causal"]
        result = fn(q, k, v, **options)
        return result[0] if isinstance(result, tuple) else result

    return Implementation(word, declared.get("numerics", "flash"), run)


def _sdpa(kernel: str) -> tuple[Run, Callable[..., Run]]:
    import warnings

    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kinds = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }

    def plain(q: Any, k: Any, v: Any, shape: Shape) -> Any:
        causal = shape.causal and shape.queries == shape.N
        mask = _dense_mask(shape, q) if shape.left >= 0 else None
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal and mask is None,
            enable_gqa=shape.kv_heads != shape.H,
        )

    def forced(q: Any, k: Any, v: Any, shape: Shape) -> Any:
        with sdpa_kernel(kinds[kernel]):
            return plain(q, k, v, shape)

    def checked(q: Any, k: Any, v: Any, shape: Shape) -> Any:
        if shape.causal and shape.queries not in (1, shape.N):
            raise Unable("its causal mask is aligned top left")
        try:
            # a forced kernel that refuses warns why before it raises; the error is what is reported
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return forced(q, k, v, shape)
        except RuntimeError as error:
            if "memory" in str(error):
                raise
            raise Unable(str(error).splitlines()[0]) from error

    def quick(q: Any, k: Any, v: Any, shape: Shape) -> Run:
        # forcing a kernel costs microseconds of host time: not where it is torch's own choice anyway
        if shape.left >= 0:
            return forced
        choose: Any = torch._fused_sdp_choice  # pyright: ignore[reportPrivateImportUsage]
        choice = choose(
            q, k, v, is_causal=shape.causal and shape.queries == shape.N, enable_gqa=shape.kv_heads != shape.H
        )
        return plain if choice == kinds[kernel].value else forced

    return checked, quick


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


def _rule(shape: Shape) -> Callable[..., Any]:
    """The mask as FlexAttention's users write it: arithmetic on positions, no table that a kernel has to read."""
    offset, left = shape.N - shape.queries, shape.left

    def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = None
        if shape.causal:
            seen = i + offset >= j if offset else i >= j
        if left >= 0:
            near = i + offset - j <= left
            seen = near if seen is None else seen & near
        return seen

    return rule


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
                block = create_block_mask(_rule(shape), None, None, shape.queries, shape.N, q.device)
            compiled.clear()
            compiled[shape.name] = (torch.compile(flex_attention, dynamic=False), block)
        call, block = compiled[shape.name]
        return call(q, k, v, block_mask=block, enable_gqa=shape.kv_heads != shape.H)

    return run
