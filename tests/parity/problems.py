"""One list of attention calls: every row of the semantics, at sizes that an interpreter can run.

A `Case` says what to call; `draw` makes its arrays in float64, holding only values that the case's dtype
can hold, so that every dtype and backend is given the same numbers.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
SEED, OFFSET = 0x1234_5678_9ABC, 77


@dataclass(frozen=True)
class Case:
    """One call. Shape strings name axes by letter ("B1MN"); a 1 or a left-out leading letter broadcasts."""

    name: str
    dtype: str = "float32"
    B: int = 2
    H: int = 4
    Hkv: int = 2
    M: int = 21
    N: int = 37
    D: int = 16
    Dv: int = 16
    rows: str = "dense"
    q_lengths: tuple[int, ...] = ()  # packed
    k_lengths: tuple[int, ...] = ()  # packed; cached and paged: valid after the append
    tail: tuple[int, int] = (0, 0)  # packed: tokens past the last sequence, of q and k
    page: int = 0
    append: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    keep: str = ""
    dead: tuple[int, ...] = ()  # query rows that `keep` leaves without a key
    first_key: int = 0  # `keep` hides every key before this one
    bias: str = ""
    bias_dtype: str = ""
    alibi: str = ""
    alibi_dtype: str = "float32"
    sink: bool = False
    sink_dtype: str = ""
    mask: str = ""  # prefix, prefixes, segments, documents
    spread: float = 1.0  # standard deviation of q and k

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def option(self, name: str, default: Any) -> Any:
        return self.options.get(name, default)

    def dtype_of(self, at: str) -> str:
        """Dtype of an array by argument name."""
        dtypes = {
            "keep": "bool",
            "bias": self.bias_dtype or self.dtype,
            "alibi_slopes": self.alibi_dtype,
            "sink": self.sink_dtype or self.dtype,
            "lse": "float64" if self.dtype == "float64" else "float32",
        }
        return dtypes.get("lse" if at == "dlse" else at, self.dtype)

    @property
    def differentiable(self) -> bool:
        """A cache that is written in place has no gradients."""
        return self.rows in ("dense", "packed")


def shape_of(case: Case, letters: str) -> tuple[int, ...]:
    """Sizes by letter: "1HMN" is (1, 4, 21, 37)."""
    return tuple(1 if at == "1" else int(getattr(case, at)) for at in letters)


def representable(x: Array, dtype: str) -> Array:
    """The nearest values that `dtype` can hold, in float64."""
    if dtype == "bfloat16":
        import ml_dtypes

        return x.astype(ml_dtypes.bfloat16).astype(np.float64)
    return x.astype(dtype).astype(np.float64)


def draw(case: Case) -> dict[str, Array]:
    """The arrays of a case by argument name, in canonical order: dense [B, H, M, D], packed [T, H, D]."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    if case.rows == "packed":
        tokens = (sum(case.q_lengths) + case.tail[0], sum(case.k_lengths) + case.tail[1])
        shapes = {
            "q": (tokens[0], case.H, case.D),
            "k": (tokens[1], case.Hkv, case.D),
            "v": (tokens[1], case.Hkv, case.Dv),
        }
        out, lse = (tokens[0], case.H, case.Dv), (case.H, tokens[0])
    else:
        shapes = {
            "q": (case.B, case.H, case.M, case.D),
            "k": (case.B, case.Hkv, case.N, case.D),
            "v": (case.B, case.Hkv, case.N, case.Dv),
        }
        out, lse = (case.B, case.H, case.M, case.Dv), (case.B, case.H, case.M)
    made = {
        at: rng.standard_normal(shape) * (1 if at == "v" else case.spread) for at, shape in shapes.items()
    }
    made["dout"] = rng.standard_normal(out)
    made["dlse"] = rng.standard_normal(lse)
    if case.keep:
        made["keep"] = _keep(case, rng)
    if case.bias:
        made["bias"] = rng.standard_normal(shape_of(case, case.bias))
    if case.alibi:
        made["alibi_slopes"] = rng.uniform(0.01, 0.5, shape_of(case, case.alibi))
    if case.sink:
        made["sink"] = rng.standard_normal(case.H)
    return {at: x if at == "keep" else representable(x, case.dtype_of(at)) for at, x in made.items()}


def _keep(case: Case, rng: np.random.Generator) -> Array:
    keep = rng.random(shape_of(case, case.keep)) < 0.6
    for row in case.dead:
        keep[..., row, :] = False
    keep[..., : case.first_key] = False
    return keep


def _basics() -> list[Case]:
    made = []
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        base = Case(dtype, dtype=dtype)
        made += [
            replace(base, name=f"{dtype}"),
            replace(base, name=f"{dtype}, causal", options={"causal": True}),
            replace(base, name=f"{dtype}, causal with dead rows", M=30, N=19, options={"causal": True}),
            replace(base, name=f"{dtype}, bmhd", options={"layout": "bmhd", "causal": True}),
            replace(base, name=f"{dtype}, bias", bias="BHMN"),
            replace(base, name=f"{dtype}, bias in float32", bias="1HMN", bias_dtype="float32"),
            replace(base, name=f"{dtype}, dropout", options={"dropout_p": 0.3}),
            everything(replace(base, name=f"{dtype}, everything")),
        ]
    return made


def everything(case: Case) -> Case:
    """All options together: what no single feature's test can show."""
    options = {
        "causal": True,
        "window": (25, 3),
        "softcap": 2.0,
        "dropout_p": 0.3,
        "scale": 0.4,
        "layout": "bmhd",
    }
    if case.rows == "packed":
        del options["layout"]
    return replace(case, options=options, keep="B1MN", dead=(2,), bias="1HMN", alibi="BH", sink=True)


def _head_dims() -> list[Case]:
    pairs = [(1, 1), (5, 5), (59, 59), (80, 80), (128, 128), (256, 256), (16, 40), (64, 8), (3, 130)]
    made = [Case(f"D {d}, Dv {dv}", D=d, Dv=dv, options={"causal": True}) for d, dv in pairs]
    return [*made, *(Case(f"D {d} in float16", dtype="float16", D=d, Dv=d) for d in (1, 5, 59, 80, 256))]


def _heads() -> list[Case]:
    pairs = [(1, 1), (3, 3), (3, 1), (5, 1), (6, 2), (9, 3), (12, 4)]
    return [Case(f"{h} heads on {g}", H=h, Hkv=g, options={"causal": True}) for h, g in pairs]


def _lengths() -> list[Case]:
    """Tile edges: one short, exact, one past."""
    sizes = (1, 15, 16, 17, 31, 63, 64, 65, 127, 129, 193)
    made = []
    for index, m in enumerate(sizes):
        n = sizes[(3 * index + 5) % len(sizes)]
        for causal in (False, True):
            name = f"{m} queries, {n} keys" + (", causal" if causal else "")
            made.append(Case(name, B=1, H=2, Hkv=1, M=m, N=n, D=8, Dv=8, options={"causal": causal}))
    return made


def _windows() -> list[Case]:
    made = []
    for window in [(3, 0), (0, 0), (-1, 2), (5, -1), (4, 4), (200, 0), (-1, 200), (-1, -1)]:
        for causal in (False, True):
            name = f"window {window[0]}, {window[1]}" + (", causal" if causal else "")
            made.append(Case(name, options={"window": window, "causal": causal}))
    top_left = {"causal": True, "align": "top_left"}
    return [
        *made,
        Case("window past every key of the first rows", M=40, N=23, options={"window": (2, 0)}),
        Case("top left", options=top_left),
        Case("top left, more queries", M=37, N=21, options=top_left),
        Case("top left and window", options={**top_left, "window": (7, 9)}),
        Case("prefix", mask="prefix"),
        Case("prefix of every sequence", mask="prefixes"),
        Case("segments", M=37, mask="segments"),
        Case("segments and causal", M=37, mask="segments", options={"causal": True}),
        Case("segments and a boolean mask", M=37, mask="segments", keep="BHMN"),
    ]


BROADCASTS = (
    "MN",
    "HMN",
    "11MN",
    "B1MN",
    "1HMN",
    "BHMN",
    "B11N",
    "111N",
    "1H1N",
    "11M1",
    "BHM1",
    "BH11",
    "1111",
)


def _masks_and_biases() -> list[Case]:
    return [
        *(Case(f"mask {at}", keep=at, dead=(3,) if "M" in at and "N" in at else ()) for at in BROADCASTS),
        *(Case(f"bias {at}", bias=at) for at in BROADCASTS),
        *(Case(f"bias {at}, bfloat16", bias=at, dtype="bfloat16") for at in ("B11N", "1HMN", "MN")),
        Case("bias in float32 beside bfloat16", bias="11MN", dtype="bfloat16", bias_dtype="float32"),
        Case("mask and causal", keep="MN", options={"causal": True}),
        Case("mask and bias", keep="B11N", bias="BHMN"),
        Case("first tiles hidden", M=40, N=300, keep="11MN", first_key=270),
        Case("first tiles hidden, float16", M=40, N=300, keep="11MN", first_key=270, dtype="float16"),
        Case("first tiles hidden by a window", M=20, N=300, options={"window": (10, 0)}),
        Case("every row dead", keep="11MN", dead=tuple(range(21))),
    ]


def _scores() -> list[Case]:
    return [
        Case("alibi", alibi="H"),
        Case("alibi of every sequence", alibi="BH"),
        Case("alibi, causal, more queries", M=40, N=23, alibi="H", options={"causal": True}),
        Case("alibi in bfloat16", dtype="bfloat16", alibi="BH"),
        Case("alibi in float32 beside float64", dtype="float64", alibi="H"),
        Case("alibi in float64", dtype="float64", alibi="H", alibi_dtype="float64"),
        Case("alibi of every sequence in float64", dtype="float64", alibi="BH", alibi_dtype="float64"),
        Case("softcap", options={"softcap": 1.5}, spread=2),
        Case("softcap and bias", options={"softcap": 1.5}, bias="11MN"),
        Case("softcap in float16", dtype="float16", options={"softcap": 5.0}, spread=2),
        Case("sink", sink=True),
        Case("sink in bfloat16", dtype="bfloat16", sink=True),
        Case("sink in float32 beside bfloat16", dtype="bfloat16", sink=True, sink_dtype="float32"),
        Case("sink in float32 beside float64", dtype="float64", sink=True, sink_dtype="float32"),
        Case("sink and dead rows", sink=True, keep="11MN", dead=(0, 7), M=40, N=23, options={"causal": True}),
        Case("scale 0", options={"scale": 0.0, "causal": True}),
        Case("scale 0 under a mask", options={"scale": 0.0}, keep="11MN", dead=(1,)),
        Case("negative scale", options={"scale": -0.3, "causal": True}),
        Case(
            "negative scale with everything else",
            keep="11MN",
            bias="MN",
            alibi="H",
            sink=True,
            options={"scale": -0.3, "softcap": 2.0},
        ),
        Case("scale 1", options={"scale": 1.0}),
        Case("sharp rows", spread=4),
        Case("dropout 1", options={"dropout_p": 1.0}),
        Case("dropout 1 with a sink", options={"dropout_p": 1.0}, sink=True),
        Case("dropout, causal", options={"dropout_p": 0.5, "causal": True}),
        Case("dropout past one tile", M=70, N=150, H=2, Hkv=1, B=1, options={"dropout_p": 0.3}),
    ]


def _zero_sizes() -> list[Case]:
    made = [Case(f"{at} 0", **{at: 0}) for at in ("B", "M", "N", "D", "Dv")]
    return [
        *made,
        Case("H 0", H=0, Hkv=0),
        Case("no query heads on some key heads", H=0, Hkv=2),
        Case("N 0 with a sink", N=0, sink=True),
        Case("N 0, causal", N=0, options={"causal": True}),
        Case("N 0 with bias and mask", N=0, bias="11MN", keep="11MN"),
        Case("M 0 with bias", M=0, bias="11M1", alibi="H", sink=True),
        Case("B 0 with bias", B=0, bias="1HMN", alibi="H", sink=True),
        Case("D 0 under a bias", D=0, bias="11MN"),
    ]


def packed(name: str, q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], **more: Any) -> Case:
    """A packed case; M and N are the longest lengths, which masks and biases span."""
    sizes = {"B": len(q_lengths), "M": max(q_lengths, default=0), "N": max(k_lengths, default=0)}
    return Case(
        f"packed, {name}", rows="packed", q_lengths=q_lengths, k_lengths=k_lengths, **{**sizes, **more}
    )


def _packed() -> list[Case]:
    uneven = ((5, 0, 33, 1, 17), (9, 12, 33, 40, 0))
    causal = {"causal": True}
    return [
        *(
            packed(dtype, *uneven, dtype=dtype, options=causal)
            for dtype in ("float16", "bfloat16", "float64")
        ),
        packed("plain", *uneven),
        packed("causal", *uneven, options=causal),
        packed("more queries than keys", (30, 20), (7, 11), options=causal),
        packed("rows past the end", (5, 9), (8, 3), tail=(6, 4)),
        packed("no sequence", (), (), tail=(3, 2)),
        packed("no token", (0, 0), (0, 0)),
        packed("tile edges", (1, 65, 129), (1, 65, 129), H=2, Hkv=1, options=causal),
        packed("no queries but keys", (0, 12, 8, 0), (25, 17, 9, 30), Hkv=1),
        packed("window", *uneven, options={"window": (4, 2)}),
        packed("top left", *uneven, options={**causal, "align": "top_left"}),
        packed("mask", *uneven, keep="B1MN", dead=(2,)),
        packed("bias", *uneven, bias="1HMN"),
        packed("bias of every sequence", *uneven, bias="B1MN"),
        packed("bias of keys", *uneven, bias="111N"),
        packed("alibi", *uneven, alibi="H"),
        packed("alibi of every sequence", *uneven, alibi="BH"),
        packed("sink", *uneven, sink=True),
        packed("softcap", *uneven, options={"softcap": 1.5}),
        packed("dropout", *uneven, options={"dropout_p": 0.3}),
        packed("prefix", *uneven, mask="prefix"),
        packed("D 59", *uneven, D=59, Dv=24, options=causal),
        everything(packed("everything", *uneven)),
        everything(packed("everything in bfloat16", *uneven, dtype="bfloat16")),
    ]


def _decode() -> list[Case]:
    made = []
    for rows, page in (("cached", 0), ("paged", 8)):
        base = Case(rows, rows=rows, page=page, B=4, M=1, N=48, k_lengths=(33, 1, 48, 17))
        few = {"M": 5, "append": 5, "k_lengths": (33, 5, 48, 21)}
        made += [
            replace(base, name=f"{rows}"),
            replace(base, name=f"{rows}, bfloat16", dtype="bfloat16"),
            replace(base, name=f"{rows}, float64", dtype="float64"),
            replace(base, name=f"{rows}, bmhd", options={"layout": "bmhd"}, **few),
            replace(base, name=f"{rows}, append of one", append=1, options={"causal": True}),
            replace(base, name=f"{rows}, append of a chunk", options={"causal": True}, **few),
            replace(base, name=f"{rows}, an empty sequence", k_lengths=(33, 0, 48, 17), sink=True),
            replace(base, name=f"{rows}, window", options={"causal": True, "window": (7, 0)}, **few),
            replace(base, name=f"{rows}, mask", keep="B1MN"),
            replace(base, name=f"{rows}, mask object", mask="prefix", **few),
            replace(base, name=f"{rows}, splits", options={"num_splits": 3, "causal": True}, **few),
            replace(base, name=f"{rows}, more splits than keys", options={"num_splits": 64}),
            replace(base, name=f"{rows}, one key head", H=8, Hkv=1, options={"num_splits": 2}),
            replace(everything(replace(base, **few)), name=f"{rows}, everything"),
        ]
    return made


CASES: tuple[Case, ...] = (
    *_basics(),
    *_head_dims(),
    *_heads(),
    *_lengths(),
    *_windows(),
    *_masks_and_biases(),
    *_scores(),
    *_zero_sizes(),
    *_packed(),
    *_decode(),
)
DIFFERENTIABLE = tuple(case for case in CASES if case.differentiable)
# enough to show that arrays of the other kind are converted on the way in and out
SHARED = (
    *_basics(),
    *_zero_sizes(),
    *_packed()[:6],
    *(case for case in _decode() if case.name.count(",") < 2),
)
