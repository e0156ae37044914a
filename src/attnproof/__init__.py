"""attnproof: exact attention in O(N) memory under one written semantics, and the chain that proves it."""

from __future__ import annotations

from .api import (
    attention,
    attention_backward,
    attention_decode,
    attention_varlen,
    attention_varlen_with_lse,
    attention_with_lse,
    explain,
)
from .dispatch import Explanation, backends
from .errors import AttentionError, BackendMissing, DtypeError, ShapeError, Unsupported
from .masks import Mask, causal, prefix, segments, window
from .online_softmax import merge

__version__ = "0.1.0"

__all__ = [
    "AttentionError",
    "BackendMissing",
    "DtypeError",
    "Explanation",
    "Mask",
    "ShapeError",
    "Unsupported",
    "__version__",
    "attention",
    "attention_backward",
    "attention_decode",
    "attention_varlen",
    "attention_varlen_with_lse",
    "attention_with_lse",
    "backends",
    "causal",
    "explain",
    "merge",
    "prefix",
    "segments",
    "window",
]
