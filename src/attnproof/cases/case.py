"""What a named case is: sizes, dtype, how the numbers are made, mask and score options; no array."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

UNBOUNDED = -1

# generators whose roundings are independent enough for the statistical gates; the others get the hard bound only
RANDOM = frozenset(
    {
        "normal",
        "uniform",
        "peaked4",
        "large_v",
        "common_k",
        "heavy_tail",
        "last_channels",
        "sink_token",
        "nan_query",
    }
)
GAUSSIAN = frozenset({"normal"})


@dataclass(frozen=True, kw_only=True)
class Case:
    """One named input.

    Attributes:
        name: stable name, unique in the pool.
        group: the row of the summary table that it belongs to.
        dtype: dtype of q, k and v by name.
        B, H, Hkv, M, N, D, Dv: sizes as in the glossary; M and N are the largest lengths when rows are packed.
        generator: how q, k, v and dout are drawn.
        keep, keep_axes: boolean mask generator and the axes on which it is stored ("BHMN" with 1 for broadcast).
        bias, bias_axes, bias_dtype: additive bias likewise; dtype "q" means that of q.
        layout: how the arrays lie in memory: bhmd, bmhd, offset, strided, transposed, expanded, qkv, far.
        rows: dense, packed, cached or paged; lens_q and lens_k are the lengths per sequence then.
        append: how many of lens_k are handed over as new keys (cached and paged rows only).
        sample: how many query rows are judged (all of their keys), 0 for all; forward and dense rows only.
        diagnostic: true where a decoy may pass by construction; such a case never counts as proof of power.
    """

    name: str
    group: str
    dtype: str = "float32"
    B: int = 1
    H: int = 4
    Hkv: int = 4
    M: int = 64
    N: int = 64
    D: int = 64
    Dv: int = 64
    generator: str = "normal"
    causal: bool = False
    align: str = "bottom_right"
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    keep: str = ""
    keep_axes: str = "11MN"
    bias: str = ""
    bias_axes: str = "BHMN"
    bias_dtype: str = "q"
    alibi: bool = False
    softcap: float = 0.0
    sink: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    layout: str = "bhmd"
    rows: str = "dense"
    lens_q: tuple[int, ...] = ()
    lens_k: tuple[int, ...] = ()
    append: int = 0
    page: int = 0
    sample: int = 0
    backward: bool = False
    dlse: bool = False
    diagnostic: bool = False
    tags: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Name and dtype: what a person types to replay it."""
        return f"{self.name}/{self.dtype}"

    @property
    def softmax_scale(self) -> float:
        """The scale that the case asks for: 1/sqrt(D) of the true D when it names none."""
        if self.scale is not None:
            return self.scale
        return 1.0 / sqrt(self.D) if self.D else 1.0

    @property
    def statistical(self) -> bool:
        """Whether the roundings are independent enough for the z statistics."""
        return self.generator in RANDOM and min(self.M, self.N) > 0

    @property
    def features(self) -> tuple[str, ...]:
        """Options beyond plain attention that a candidate must take for this case."""
        named = {
            "gqa": self.Hkv != self.H,
            "uneven head dims": self.Dv != self.D,
            "mask": bool(self.keep),
            "window": self.window != (UNBOUNDED, UNBOUNDED),
            "bias": bool(self.bias),
            "alibi_slopes": self.alibi,
            "softcap": self.softcap > 0,
            "sink": self.sink,
            "dropout_p": self.dropout_p > 0,
            "align": self.causal and self.align == "top_left" and self.M != self.N,
            "lse gradient": self.dlse,
            self.rows: self.rows != "dense",
        }
        return tuple(name for name, needed in named.items() if needed)

    def describe(self) -> str:
        """One line for a reader: sizes, then everything that is not the default."""
        size = f"B{self.B} H{self.H}" + (f"/{self.Hkv}" if self.Hkv != self.H else "")
        size += f" M{self.M} N{self.N} D{self.D}" + (f"/{self.Dv}" if self.Dv != self.D else "")
        extra = [self.generator] if self.generator != "normal" else []
        extra += ["causal" if self.align == "bottom_right" else "causal top-left"] if self.causal else []
        extra += [self.layout] if self.layout != "bhmd" else []
        extra += [name for name in self.features if name not in ("gqa", "align", "uneven head dims")]
        extra += [f"scale {self.scale:g}"] if self.scale is not None else []
        extra += ["backward"] if self.backward else []
        return ", ".join([size, *extra])
