"""What is timed: named shapes, the sweeps people quote, and the arithmetic each one holds.

A ``Shape`` is a dense call; FLOPs and bytes come from the ledger with exact pair counts, never from "causal is half".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..dtypes import NAMES
from ..ledger.traffic import Call
from ..masks import Mask, window

Pass = Literal["forward", "backward", "both"]

# matrix products per pass, each 2 D FLOP a pair: QK and PV; S again, dP, dV, dQ, dK
PRODUCTS = {"forward": 2, "backward": 5, "both": 7}


@dataclass(frozen=True)
class Shape:
    """One dense call to time; sizes as in the glossary, ``left`` the causal window or -1."""

    B: int
    H: int
    N: int
    D: int
    M: int = -1
    Hkv: int = -1
    dtype: str = "bfloat16"
    causal: bool = False
    left: int = -1
    run: Pass = "forward"

    @property
    def queries(self) -> int:
        """M, which is N unless given."""
        return self.N if self.M < 0 else self.M

    @property
    def kv_heads(self) -> int:
        """Hkv, which is H unless given."""
        return self.H if self.Hkv < 0 else self.Hkv

    @property
    def name(self) -> str:
        """Stable, readable, unique within a sweep."""
        heads = f"H{self.H}" if self.kv_heads == self.H else f"H{self.H}/{self.kv_heads}"
        length = f"N{self.N}" if self.queries == self.N else f"M{self.queries} N{self.N}"
        mask = " causal" if self.causal else ""
        band = f" window{self.left}" if self.left >= 0 else ""
        return f"{self.run} B{self.B} {heads} {length} D{self.D} {self.dtype}{mask}{band}"

    @property
    def mask(self) -> Mask:
        """The interval mask of the call."""
        return window(self.left, 0 if self.causal else -1)

    @property
    def call(self) -> Call:
        """The same call for the ledger."""
        return Call.dense(
            self.queries,
            keys=self.N,
            batch=self.B,
            heads=self.H,
            kv_heads=self.kv_heads,
            head_dim=self.D,
            dtype=self.dtype,
            mask=self.mask,
        )

    @property
    def flop(self) -> int:
        """2 D FLOP a pair and matrix product, pairs counted from the mask's intervals."""
        return 2 * self.D * PRODUCTS[self.run] * self.call.pairs

    @property
    def bytes(self) -> int:
        """q, k, v read and out written once (and as much again with gradients): the documents' formula."""
        size = self.call.size
        queries = 2 * self.B * self.H * self.queries * self.D * size
        keys = 2 * self.B * self.kv_heads * self.N * self.D * size
        return (queries + keys) * (1 if self.run == "forward" else 2)


def figure(*, tokens: int = 16384, width: int = 2048, dtype: str = "bfloat16") -> Iterator[Shape]:
    """The sweep of the FlashAttention figure: B N and H D constant, N from 512 to 16k, D 64, 128, 256."""
    for run in ("forward", "backward"):
        for d in (64, 128, 256):
            for causal in (False, True):
                n = 512
                while n <= tokens:
                    yield Shape(tokens // n, width // d, n, d, dtype=dtype, causal=causal, run=run)
                    n *= 2


def decode(*, dtype: str = "bfloat16") -> Iterator[Shape]:
    """One query against long caches, grouped heads."""
    for batch in (1, 16):
        for n in (8192, 65536):
            yield Shape(batch, 32, n, 128, M=1, Hkv=8, dtype=dtype)


def small(*, dtype: str = "float32") -> Iterator[Shape]:
    """What a laptop measures in a minute: the figure's axes at small sizes."""
    for run in ("forward", "backward"):
        for n in (128, 256, 512):
            for causal in (False, True):
                yield Shape(1, 4, n, 64, dtype=dtype, causal=causal, run=run)


def small_decode(*, dtype: str = "float32") -> Iterator[Shape]:
    """The decode sweep at small sizes."""
    for n in (512, 2048, 8192):
        yield Shape(1, 8, n, 64, M=1, Hkv=2, dtype=dtype)


PRESETS = {"figure": figure, "decode": decode, "small": small, "small-decode": small_decode}

_SIZE = re.compile(r"(Hkv|[BHMND])=?(\d+)(?:/(\d+))?|window=?(\d+)")


def parse(text: str) -> Shape:
    """A shape from its name: ``forward B1 H4 N1024 D64 float32 causal`` in any order; B, H and the pass have defaults.

    >>> parse("N1024 D64 causal").name
    'forward B1 H1 N1024 D64 float32 causal'
    """
    found: dict[str, Any] = {"B": 1, "H": 1, "dtype": "float32"}
    for word in text.replace(",", " ").split():
        size = _SIZE.fullmatch(word)
        if word in PRODUCTS:
            found["run"] = word
        elif word in NAMES:
            found["dtype"] = word
        elif word == "causal":
            found["causal"] = True
        elif size and size[4]:
            found["left"] = int(size[4])
        elif size and (size[3] is None or size[1] == "H"):
            found[size[1]] = int(size[2])
            if size[3]:
                found["Hkv"] = int(size[3])
        else:
            raise ValueError(f"case: expected words like {EXAMPLE!r}, got {word!r}")
    if "N" not in found or "D" not in found:
        raise ValueError(f"case: expected at least N and D, as in {EXAMPLE!r}, got {text!r}")
    shape = Shape(**found)
    small = min(shape.B, shape.H, shape.N, shape.D, shape.queries, shape.kv_heads)
    if small < 1 or shape.H % shape.kv_heads:
        raise ValueError(f"case: expected sizes of at least 1 and H a multiple of Hkv, got {text!r}")
    return shape


EXAMPLE = "forward B1 H8/2 M1 N4096 D64 float32 causal window256"
