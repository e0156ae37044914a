"""attnproof as an attention implementation of Hugging Face transformers.

    from attnproof.compat.transformers import register
    register()
    model = AutoModel.from_pretrained(path, attn_implementation="attnproof")

(or ``model.set_attn_implementation("attnproof")``). Two functions are registered under one name. The *mask*
function turns whatever the model asks for (padding, causal, sliding window, chunks, packed sequences, any of
them over a cache) into the interval of keys that each query sees, or into a boolean tensor where intervals do
not suffice. The *attention* function reads that mask and every option that models pass. As with transformers'
own ``sdpa``, a mask is the whole truth: ``is_causal`` and ``sliding_window`` only speak where there is none.

A query without any visible key (left padding) gives zeros here, and an average of all values in ``eager`` and
``sdpa``; a model that respects its own padding reads neither.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from .. import dispatch
from ..api import attention, attention_varlen
from ..errors import BackendMissing, DtypeError, ShapeError, Unsupported, expected
from ..masks import as_mask as core_mask
from ..masks import segments
from .interval_mask import as_mask, intervals

# the first and last release that the tests of this file were run with
OLDEST, TESTED = "4.57.6", "5.24.0"

# keyword arguments that models hand down to every attention function and that do not change its result
INFORMATION = frozenset(
    {
        "cache",  # keys and values arrive already joined with it
        "cache_position",
        "kernel_options",  # tile sizes for flex attention
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",  # rotary embedding is applied before, packing is in the mask
        "return_dict",
        "seq_idx",  # for state-space layers; attention has cu_seq_lens or the mask
        "use_cache",
    }
)


@dataclass(frozen=True)
class Request:
    """The options of one call, in transformers' words.

    Attributes:
        dropout: probability, 0 outside training.
        scaling: factor of q k^T, None is 1 / sqrt(D).
        is_causal: what to assume where there is no mask; None asks the module.
        sliding_window: W tokens including the query's own, where there is no mask.
        softcap: bound of the scores.
        s_aux: sink logits [H].
        position_bias: added to the scores, broadcastable to [B, H, M, N].
        cu_seq_lens_q: cumulative query lengths of sequences packed into a batch of one.
        cu_seq_lens_k: likewise for keys.
        deterministic: whether the backward must be repeatable; None is yes.
        output_attentions: the weights are asked for, which no O(N) method has.
    """

    dropout: float = 0.0
    scaling: float | None = None
    is_causal: bool | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    s_aux: Any = None
    position_bias: Any = None
    cu_seq_lens_q: Any = None
    cu_seq_lens_k: Any = None
    deterministic: bool | None = None
    output_attentions: bool | None = None

    @property
    def is_packed(self) -> bool:
        """Whether several sequences lie behind one another."""
        return self.cu_seq_lens_q is not None or self.cu_seq_lens_k is not None

    @classmethod
    def read(cls, given: dict[str, Any], name: str, ignore: frozenset[str]) -> Request:
        """Take what is known; an argument that may change the result and is not known is an error."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(
            key
            for key, value in given.items()
            if value is not None and key not in known | INFORMATION | ignore
        )
        if unknown:
            raise Unsupported(
                name,
                f"the model passes {', '.join(unknown)}, which may change the result and is not implemented; "
                f"use another attn_implementation, or register(ignore=...) if it is known not to matter",
            )
        request = cls(**{key: value for key, value in given.items() if key in known})
        if request.output_attentions:
            raise Unsupported(name, "attention weights are never formed; use attn_implementation='eager'")
        return request


def register(name: str = "attnproof", *, backend: str = "auto", ignore: tuple[str, ...] = ()) -> str:
    """Make ``attn_implementation=name`` available to every model of transformers in this process.

    Args:
        name: how models will ask for it. Registering a name again replaces it.
        backend: "auto", or one of ``attnproof.backends()``; a named backend never falls back.
        ignore: more keyword arguments of your own model's code that this function may disregard.

    Returns:
        The name.

    Raises:
        BackendMissing: transformers is not installed, or too old to have a mask interface.
        ShapeError: there is no such backend.
    """
    if backend != "auto":
        dispatch.load(backend)
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise BackendMissing(
            f"transformers: expected {OLDEST} or newer, got {error}; pip install 'attnproof[real]'"
        ) from error
    forward = partial(_forward, _Served(name, backend, frozenset(ignore)))
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, make_mask)
    return name


@dataclass(frozen=True)
class _Served:
    """What one registered name stands for."""

    name: str
    backend: str
    ignore: frozenset[str]


def make_mask(**arguments: Any) -> Any:
    """The mask of one forward pass, as intervals if every row is one run of keys.

    This is transformers' mask interface and takes what the installed release passes, by keyword: the queries
    are ``q_length`` rows from ``q_offset`` on, or in 4.x the positions ``cache_position``.
    """
    import transformers.masking_utils

    sdpa_mask: Any = vars(transformers.masking_utils)["sdpa_mask"]
    # the two skips would return None, which cannot say which rows see what when there is a cache
    arguments = {**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    positions = arguments.get("cache_position")
    m = arguments["q_length"] if positions is None else len(positions)
    n = arguments["kv_length"]
    if torch.compiler.is_compiling() or torch._C._is_tracing() or not (m and n):
        return sdpa_mask(**arguments)

    def rows(start: int, stop: int) -> torch.Tensor:
        if positions is None:
            part = {"q_length": stop - start, "q_offset": arguments.get("q_offset", 0) + start}
        else:
            part = {"cache_position": positions[start:stop]}
        return sdpa_mask(**{**arguments, **part})

    device = arguments.get("device", "cpu") if positions is None else positions.device
    found = intervals(rows, arguments["batch_size"], m, n, device)
    return sdpa_mask(**arguments) if found is None else found


def _forward(
    served: _Served, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any
) -> tuple[Any, None]:
    """The attention interface: q [B, H, M, D], k and v [B, Hkv, N, .]; returns ([B, M, H, Dv], None)."""
    request = Request.read(given, served.name, served.ignore)
    query, key, value = _one_dtype(query, key, value)
    if query.shape[0] == 1 != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)  # learned queries, shared by the batch
    options: dict[str, Any] = {
        "bias": _exact(request.position_bias, query),
        "softcap": request.softcap,
        "sink": _exact(request.s_aux, query),
        "scale": request.scaling,
        "dropout_p": request.dropout,
        "deterministic": request.deterministic is not False,
        "backend": served.backend,
    }
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if attention_mask is None:
        options |= _unmasked(request, module, q.shape[1], k.shape[1])
        if request.is_packed:
            return _packed(request, q, k, v, options), None
    else:
        options |= _masked(request, attention_mask, options["bias"], query, k.shape[1])
    return attention(q, k, v, layout="bmhd", **options).contiguous(), None


def _one_dtype(*arrays: Any) -> tuple[Any, ...]:
    """Under autocast all are cast as torch casts them for its own attention; else they are left alone."""
    kind = arrays[0].device.type
    if not torch.is_autocast_enabled(kind):
        return arrays
    to = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(to) for x in arrays)


def _exact(x: Any, query: Any) -> Any:
    """An additive term, widened where that is what it takes for the core to add it as it is."""
    if x is None or x.dtype == query.dtype:
        return x
    if query.dtype == torch.float64:
        return x.double()
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _sum(a: Any, b: Any) -> Any:
    """Two additive terms as one, without the rounding of a half type."""
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    return a.to(wide) + b.to(wide)


def _unmasked(request: Request, module: Any, m: int, n: int) -> dict[str, Any]:
    """Where the model made no mask, the flags say what is seen."""
    given = request.is_causal
    causal = bool(getattr(module, "is_causal", True) if given is None else given)
    width, packed = request.sliding_window, request.is_packed
    if m != n and m > 1 and not packed and (causal or width is not None):
        wanted = f"a mask, since {m} queries and {n} keys leave open which see which"
        raise ShapeError(expected("attention_mask", wanted, "None"))
    if width is None:
        return {"causal": causal}
    return {"causal": causal, "window": (width - 1, 0 if causal else width - 1)}


def _masked(request: Request, mask: Any, bias: Any, query: Any, n: int) -> dict[str, Any]:
    """A given mask: intervals, booleans, or floats that are added."""
    if not isinstance(mask, torch.Tensor):
        raise DtypeError(expected("attention_mask", "a tensor", type(mask).__name__))
    if mask.ndim != 4:
        raise ShapeError(expected("attention_mask", "4 axes [B, H, M, N]", f"shape {tuple(mask.shape)}"))
    if mask.shape[-1] > n:
        mask = mask[..., :n]  # a mask made for the capacity of a cache; keys past n do not exist
    found: dict[str, Any] = {}
    if mask.dtype == torch.bool:
        found["mask"] = as_mask(mask)
    elif mask.is_floating_point():
        found["bias"] = _exact(mask, query) if bias is None else _sum(bias, mask)
    else:
        raise DtypeError(expected("attention_mask", "bool or floating point", mask.dtype))
    if request.is_packed:
        cu_q, cu_k = _cumulative(request)
        if not torch.equal(cu_q, cu_k):
            wanted = "None beside cu_seq_lens_q and cu_seq_lens_k that differ"
            raise ShapeError(expected("attention_mask", wanted, "a mask"))
        found["mask"] = core_mask(found.get("mask")) & _segments(cu_q, query.shape[2], n)
    return found


def _cumulative(request: Request) -> tuple[Any, Any]:
    cu_q, cu_k = request.cu_seq_lens_q, request.cu_seq_lens_k
    if not (isinstance(cu_q, torch.Tensor) and isinstance(cu_k, torch.Tensor)):
        got = f"{type(cu_q).__name__} and {type(cu_k).__name__}"
        raise DtypeError(expected("cu_seq_lens_q, cu_seq_lens_k", "two tensors", got))
    return cu_q.to(torch.int32), cu_k.to(torch.int32)


def _segments(cu: Any, m: int, n: int) -> Any:
    """Packed sequences as segments of one dense sequence; what lies past the last is a segment of its own."""
    if m != n:
        raise ShapeError(expected("cu_seq_lens_q", f"as many queries as keys beside a mask, {n}", m))
    positions = torch.arange(m, dtype=torch.int32, device=cu.device)
    return segments(torch.searchsorted(cu[1:].contiguous(), positions, right=True))


def _packed(request: Request, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """Sequences packed into a batch of one, without a mask."""
    cu_q, cu_k = _cumulative(request)
    if q.shape[0] != 1:
        raise ShapeError(expected("cu_seq_lens_q", "sequences packed into a batch of 1", q.shape[0]))
    if options.pop("bias") is not None:
        raise Unsupported("cu_seq_lens_q", "position_bias has no place in packed sequences without a mask")
    return attention_varlen(q[0], k[0], v[0], cu_q, cu_k, **options)[None].contiguous()
