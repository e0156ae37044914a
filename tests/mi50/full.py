"""Calls of full size for the twin: lengths of real work, every head dim bucket, every option at least once.

Few heads, because the right answer takes every score in float64 on the host.
"""

from __future__ import annotations

from typing import Any

from tests.parity.problems import Case, everything, packed

ONE: dict[str, Any] = {"B": 1, "H": 1, "Hkv": 1, "dtype": "float16"}
PAIR: dict[str, Any] = {**ONE, "H": 2}
SQUARE = {"M": 4096, "N": 4096}
LONG = {"M": 1024, "N": 4096}
HALF = {"M": 1500, "N": 1500}


def width(d: int, dv: int = 0) -> dict[str, int]:
    return {"D": d, "Dv": dv or d}


CAUSAL: dict[str, Any] = {"options": {"causal": True}}
LENGTHS = ((700, 0, 1201, 1, 333), (900, 12, 1100, 1500, 0))
FULL: tuple[Case, ...] = (
    Case("4096, D 128, causal", **ONE, **SQUARE, **width(128), **CAUSAL),
    Case("1024 by 4096, D 64", **PAIR, **LONG, **width(64)),
    Case("1024 by 4096, D 256, window", **ONE, **LONG, **width(256), options={"causal": True, "window": (512, 0)}),
    Case("1500, D 512, causal", **ONE, **HALF, **width(512), **CAUSAL),
    Case("1000, eight heads on two, D 64, causal", **{**ONE, "H": 8, "Hkv": 2}, M=1000, N=1000, **width(64), **CAUSAL),
    Case("1024 by 4096, dropout, D 64", **ONE, **LONG, **width(64), options={"dropout_p": 0.2}),
    Case("1500, bias, D 128", **PAIR, **HALF, **width(128), bias="1HMN"),
    Case("1500, bias of keys in float32, D 64", **PAIR, **HALF, **width(64), bias="B11N", bias_dtype="float32"),
    Case("1024 by 4096, mask, D 64", **ONE, **LONG, **width(64), keep="11MN", dead=(0, 511, 1023), first_key=700),
    Case("1024 by 4096, softcap, D 128", **ONE, **LONG, **width(128), spread=2, options={"softcap": 15.0}),
    Case("1024 by 4096, sink and window, D 128", **ONE, **LONG, **width(128), sink=True, options={"window": (300, 40)}),
    Case("1500, alibi, causal, D 128", **PAIR, **HALF, **width(128), alibi="H", **CAUSAL),
    Case("1500, segments, D 64", **PAIR, **HALF, **width(64), mask="segments"),
    Case("1023 by 4001, D 80 and 72, causal", **ONE, M=1023, N=4001, **width(80, 72), **CAUSAL),
    Case("4096 by 1000, top left, D 128", **ONE, M=4096, N=1000, **width(128),
         options={"causal": True, "align": "top_left"}),
    Case("1024 by 4096, bfloat16, D 128, causal", **{**ONE, "dtype": "bfloat16"}, **LONG, **width(128), **CAUSAL),
    Case("1500, float32, D 64, causal", **{**ONE, "dtype": "float32"}, **HALF, **width(64), **CAUSAL),
    Case("1 query, 4096 keys", **{**ONE, "H": 4, "Hkv": 2}, M=1, N=4096, **width(128)),
    everything(Case("1500, everything", **PAIR, **HALF, **width(64))),
    everything(packed("everything, long", *LENGTHS, **{**PAIR, "B": 5}, **width(128))),
)  # fmt: skip
CACHE: dict[str, Any] = {
    "B": 3,
    "H": 4,
    "Hkv": 2,
    "dtype": "float16",
    "N": 4096,
    "k_lengths": (4096, 1, 3333),
}
CHUNK: dict[str, Any] = {**CACHE, "M": 5, "append": 5, "k_lengths": (4096, 5, 3333)}
FULL_DECODE: tuple[Case, ...] = (
    Case("cached, 4096, D 128", rows="cached", **CACHE, M=1, **width(128)),
    Case("cached, 4096, D 64, one part", rows="cached", **CACHE, M=1, **width(64), options={"num_splits": 1}),
    Case("cached, 4096, D 256, append", rows="cached", **CHUNK, **width(256), **CAUSAL),
    Case("paged, 4096, D 128", rows="paged", page=64, **CACHE, M=1, **width(128), sink=True),
    Case("paged, 4096, bfloat16, append, window", rows="paged", page=16, **{**CHUNK, "dtype": "bfloat16"}, **width(128),
         options={"causal": True, "window": (1000, 0)}),
    Case("paged, 4096, 100 queries", rows="paged", page=128, **{**CACHE, "k_lengths": (4096, 100, 3333)}, M=100,
         **width(64), **CAUSAL),
)  # fmt: skip
