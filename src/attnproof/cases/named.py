"""The named cases, group by group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from attnproof.cases.case import UNBOUNDED, Case

LOW = ("float16", "bfloat16")
HALF_AND_SINGLE = ("float16", "bfloat16", "float32")
EVERY = ("float16", "bfloat16", "float32", "float64")


def _grow(case: Case, dtypes: Iterable[str]) -> list[Case]:
    return [replace(case, dtype=dtype) for dtype in dtypes]


def _dense(
    name: str, group: str, M: int, N: int, dtypes: tuple[str, ...] = LOW, **options: Any
) -> list[Case]:
    options.setdefault("Dv", options.get("D", 64))
    options.setdefault("Hkv", options.get("H", 4))
    return _grow(Case(name=name, group=group, M=M, N=N, **options), dtypes)


def _normal() -> list[Case]:
    pool: list[Case] = []
    for length in (128, 512):
        for causal in (False, True):
            name = f"normal-{length}" + ("-causal" if causal else "")
            pool += _dense(name, "normal", length, length, EVERY, causal=causal, H=2, backward=True)
    pool += _dense("normal-1024-d128", "normal", 1024, 1024, LOW, D=128, H=1, backward=True)
    pool += _dense("normal-batch", "normal", 96, 96, HALF_AND_SINGLE, B=3, H=2, backward=True)
    pool += _dense("uniform-512", "normal", 512, 512, LOW, generator="uniform", H=2)
    return pool


def _boundary() -> list[Case]:
    pool: list[Case] = []
    sizes = ((1, 1), (1, 300), (15, 17), (63, 65), (64, 64), (65, 63), (127, 129), (193, 192), (200, 333))
    for M, N in sizes:
        for causal in (False, True):
            name = f"edge-{M}x{N}" + ("-causal" if causal else "")
            # one key: every average is the right answer
            easy = N == 1
            pool += _dense(
                name, "boundary", M, N, HALF_AND_SINGLE, causal=causal, backward=True, H=2, diagnostic=easy
            )
    pool += _dense("gqa-257x1000-causal", "boundary", 257, 1000, HALF_AND_SINGLE, causal=True, Hkv=2)
    pool += _dense("gqa-129x191-causal-grad", "boundary", 129, 191, EVERY, causal=True, Hkv=2, backward=True)
    pool += _dense("prime-211x307", "boundary", 211, 307, EVERY, H=2, D=37, backward=True)
    pool += _dense("longer-queries-causal", "dead rows", 200, 120, EVERY, causal=True, H=2, backward=True)
    return pool


def _alignment() -> list[Case]:
    pool = _dense(
        "top-left-100x160",
        "alignment",
        100,
        160,
        HALF_AND_SINGLE,
        causal=True,
        align="top_left",
        backward=True,
    )
    pool += _dense(
        "top-left-160x100", "alignment", 160, 100, LOW, causal=True, align="top_left", backward=True
    )
    pool += _dense("bottom-right-100x160", "alignment", 100, 160, HALF_AND_SINGLE, causal=True, backward=True)
    return pool


def _documents() -> list[Case]:
    """The inputs that the source documents name: all equal, large mixed signs, random mask."""
    pool = _dense(
        "equal-300", "equal", 300, 300, HALF_AND_SINGLE, generator="equal", diagnostic=True, backward=True
    )
    pool += _dense(
        "large-v-200x330", "large mixed", 200, 330, HALF_AND_SINGLE, generator="large_v", H=2, backward=True
    )
    pool += _dense(
        "large-all-130x200", "large mixed", 130, 200, HALF_AND_SINGLE, generator="large_all", diagnostic=True
    )
    pool += _dense("random-mask-130x200", "mask", 130, 200, EVERY, keep="random", backward=True)
    return pool


def _masks() -> list[Case]:
    pool = _dense(
        "mask-dead-rows",
        "dead rows",
        130,
        200,
        HALF_AND_SINGLE,
        keep="dead_rows",
        keep_axes="BHMN",
        backward=True,
    )
    pool += _dense("mask-single-key", "mask", 100, 170, LOW, keep="single", keep_axes="1HMN")
    pool += _dense("mask-block-sparse", "mask", 260, 330, LOW, keep="blocks", backward=True, H=2)
    pool += _dense("mask-late-keys", "mask", 130, 300, HALF_AND_SINGLE, keep="late", H=2)
    pool += _dense(
        "mask-padding", "mask", 96, 140, LOW, B=3, H=2, keep="padding", keep_axes="B11N", backward=True
    )
    pool += _dense(
        "mask-and-causal", "mask", 120, 160, HALF_AND_SINGLE, keep="random", causal=True, backward=True
    )
    pool += _dense(
        "mask-none-kept", "dead rows", 70, 90, HALF_AND_SINGLE, keep="none", diagnostic=True, backward=True
    )
    pool += _dense(
        "abyss-late", "adversarial", 100, 300, HALF_AND_SINGLE, generator="abyss", keep="late", H=2
    )
    return pool


def _not_finite() -> list[Case]:
    """NaN and infinities reach their own rows, and only those."""
    pool = _dense(
        "nan-query", "not finite", 80, 120, HALF_AND_SINGLE, generator="nan_query", H=2, tags=("not finite",)
    )
    pool += _dense(
        "inf-bias", "not finite", 80, 120, HALF_AND_SINGLE, bias="plus_inf", H=2, tags=("not finite",)
    )
    return pool


def _windows() -> list[Case]:
    pool = _dense(
        "window-causal-40",
        "window",
        300,
        300,
        HALF_AND_SINGLE,
        causal=True,
        window=(39, 0),
        H=2,
        backward=True,
    )
    pool += _dense("window-both", "window", 200, 260, LOW, window=(30, 17), H=2, backward=True)
    pool += _dense("window-left-only", "window", 150, 210, LOW, window=(25, UNBOUNDED), H=2)
    pool += _dense("window-wide-causal", "window", 150, 150, LOW, causal=True, window=(500, 500), H=2)
    pool += _dense("window-dead-rows", "dead rows", 220, 100, LOW, window=(8, 4), H=2, backward=True)
    pool += _dense("window-right-is-causal", "window", 100, 140, LOW, window=(UNBOUNDED, 0), H=2)
    return pool


def _scores() -> list[Case]:
    pool = _dense(
        "softcap", "scores", 140, 190, HALF_AND_SINGLE, softcap=3.0, generator="peaked4", H=2, backward=True
    )
    pool += _dense("alibi", "scores", 150, 220, HALF_AND_SINGLE, alibi=True, backward=True)
    pool += _dense("alibi-causal", "scores", 180, 180, LOW, alibi=True, causal=True, backward=True)
    pool += _dense("sink", "scores", 120, 170, HALF_AND_SINGLE, sink=True, backward=True)
    pool += _dense(
        "sink-causal-dead", "scores", 150, 90, LOW, sink=True, causal=True, backward=True, dlse=True
    )
    pool += _dense("scale-one", "scores", 100, 130, LOW, scale=1.0, D=16, H=2, backward=True)
    pool += _dense("scale-negative", "scores", 100, 130, LOW, scale=-0.2, H=2, backward=True)
    pool += _dense(
        "scale-negative-causal",
        "scores",
        130,
        130,
        HALF_AND_SINGLE,
        scale=-0.2,
        causal=True,
        H=2,
        backward=True,
    )
    pool += _dense("scale-zero", "scores", 100, 130, LOW, scale=0.0, H=2, diagnostic=True)
    pool += _dense(
        "everything",
        "scores",
        130,
        200,
        EVERY,
        softcap=5.0,
        alibi=True,
        bias="normal",
        keep="random",
        causal=True,
        window=(90, UNBOUNDED),
        sink=True,
        Hkv=2,
        Dv=48,
        backward=True,
        dlse=True,
    )
    pool += _dense(
        "lse-gradient", "scores", 120, 150, HALF_AND_SINGLE, dlse=True, causal=True, Hkv=2, backward=True
    )
    return pool


def _biases() -> list[Case]:
    pool = _dense("bias", "bias", 130, 200, HALF_AND_SINGLE, bias="normal", backward=True)
    pool += _dense(
        "bias-fp32",
        "bias",
        100,
        140,
        LOW,
        bias="normal",
        bias_axes="11MN",
        bias_dtype="float32",
        backward=True,
    )
    pool += _dense(
        "bias-per-key", "bias", 100, 143, LOW, bias="normal", bias_axes="B11N", B=2, H=2, backward=True
    )
    pool += _dense(
        "bias-heads", "bias", 90, 77, LOW, bias="normal", bias_axes="1HMN", B=2, H=2, backward=True
    )
    pool += _dense("bias-inf-mix", "bias", 130, 200, HALF_AND_SINGLE, bias="inf_mix", H=2, backward=True)
    pool += _dense("bias-minimum-row", "bias", 40, 70, ("float32",), bias="minimum_row", H=2, diagnostic=True)
    pool += _dense(
        "bias-causal", "bias", 140, 140, LOW, bias="normal", bias_axes="11MN", causal=True, H=2, backward=True
    )
    return pool


def _heads() -> list[Case]:
    pool: list[Case] = []
    for width in (8, 16, 32, 40, 72, 80, 96, 112, 128, 160, 192, 256):
        pool += _dense(f"head-dim-{width}", "heads", 90, 130, LOW, D=width, H=2, backward=True)
    for width in (1, 5, 59):
        pool += _dense(f"head-dim-{width}", "heads", 90, 130, HALF_AND_SINGLE, D=width, H=2, backward=True)
    pool += _dense("last-channels-128", "heads", 90, 130, LOW, D=128, H=2, generator="last_channels")
    pool += _dense("uneven-192-128", "heads", 90, 130, LOW, D=192, Dv=128, H=2, backward=True)
    pool += _dense("uneven-32-80", "heads", 90, 130, HALF_AND_SINGLE, D=32, Dv=80, H=2, backward=True)
    pool += _dense("gqa-8-2", "heads", 90, 130, HALF_AND_SINGLE, H=8, Hkv=2, backward=True)
    pool += _dense("gqa-8-4", "heads", 90, 130, LOW, H=8, Hkv=4, backward=True)
    pool += _dense("gqa-6-2-batch", "heads", 70, 90, LOW, B=2, H=6, Hkv=2, backward=True)
    pool += _dense("mqa-7-1", "heads", 66, 130, LOW, H=7, Hkv=1, backward=True)
    pool += _dense("many-heads", "heads", 4, 4, ("float16",), B=260, H=260, Hkv=260, D=16, tags=("big grid",))
    return pool


def _adversarial() -> list[Case]:
    pool: list[Case] = []
    generators = (
        "peaked4",
        "peaked30",
        "rising",
        "falling",
        "negative",
        "deep_negative",
        "common_k",
        "needle",
        "offset_v",
        "heavy_tail",
        "sink_token",
        "minus_zero",
        "count",
    )
    for generator in generators:
        weak = generator in ("count", "minus_zero")
        name = generator.replace("_", "-")
        pool += _dense(
            f"{name}-150x330",
            "adversarial",
            150,
            330,
            HALF_AND_SINGLE,
            generator=generator,
            Hkv=2,
            diagnostic=weak,
        )
        pool += _dense(
            f"{name}-70x1100", "adversarial", 70, 1100, LOW, generator=generator, H=2, Hkv=1, diagnostic=weak
        )
    pool += _dense(
        "rising-causal", "adversarial", 300, 300, LOW, generator="rising", causal=True, H=2, backward=True
    )
    pool += _dense(
        "peaked4-causal",
        "adversarial",
        200,
        200,
        HALF_AND_SINGLE,
        generator="peaked4",
        causal=True,
        H=2,
        backward=True,
    )
    pool += _dense(
        "subnormal", "adversarial", 100, 150, ("float16",), generator="subnormal", H=2, diagnostic=True
    )
    # logits past what fp32 resolves: only finiteness and the hull can be asked for
    pool += _dense("fp16-range", "adversarial", 60, 90, LOW, generator="fp16_range", H=2, diagnostic=True)
    pool += _dense("huge-equal", "equal", 8, 8, ("bfloat16",), generator="huge_equal", H=1, diagnostic=True)
    return pool


def _layouts() -> list[Case]:
    pool: list[Case] = []
    dense: dict[str, Any] = {"B": 2, "H": 3, "backward": True}
    for layout in ("bmhd", "offset", "strided", "transposed", "qkv", "expanded"):
        # the heads of an expanded tensor are one, so that another head's answer is right
        dense |= {"layout": layout, "diagnostic": layout == "expanded"}
        pool += _dense(f"layout-{layout}", "layout", 70, 70, HALF_AND_SINGLE, **dense)
    pool += _dense("layout-offset-causal-d40", "layout", 77, 77, LOW, layout="offset", D=40, causal=True, H=2)
    pool += _dense(
        "layout-far-strides", "layout", 20, 40, ("float16",), layout="far", H=2, tags=("far strides",)
    )
    return pool


def _empty() -> list[Case]:
    sizes = {"no-batch": {"B": 0}, "no-queries": {"M": 0}, "no-keys": {"N": 0}, "no-head-dim": {"D": 0}}
    plain: dict[str, Any] = {"M": 5, "N": 7, "D": 16, "Dv": 8, "H": 2}
    return [case for name, size in sizes.items() for case in _zero(name, plain | size)]


def _zero(name: str, options: dict[str, Any]) -> list[Case]:
    case = Case(
        name=f"zero-{name}",
        group="zero sizes",
        Hkv=2,
        backward=True,
        diagnostic=True,
        **options,
    )
    return _grow(case, ("float32", "float16"))


def _rows() -> list[Case]:
    packed: dict[str, Any] = {"rows": "packed", "group": "packed", "B": 4, "backward": True}
    cached: dict[str, Any] = {"rows": "cached", "group": "decode", "B": 3}
    uneven: dict[str, Any] = {"lens_q": (0, 12, 8, 45), "lens_k": (25, 17, 9, 77)}
    pool = [
        Case(name="packed", H=4, Hkv=2, M=45, N=77, **uneven, **packed),
        Case(
            name="packed-causal",
            H=4,
            Hkv=1,
            M=130,
            N=130,
            causal=True,
            lens_q=(1, 65, 0, 130),
            lens_k=(1, 65, 3, 130),
            **packed,
        ),
        Case(
            name="packed-window-sink",
            H=2,
            Hkv=2,
            M=70,
            N=90,
            sink=True,
            window=(20, 0),
            lens_q=(7, 70, 33, 1),
            lens_k=(9, 70, 90, 40),
            **packed,
        ),
        Case(
            name="packed-more-queries",
            H=2,
            Hkv=2,
            M=146,
            N=3,
            D=32,
            Dv=32,
            causal=True,
            lens_q=(76, 34, 146, 2),
            lens_k=(1, 1, 3, 2),
            **packed,
        ),
        Case(name="decode-one-token", H=8, Hkv=2, M=1, N=200, lens_k=(0, 64, 200), causal=True, **cached),
        Case(
            name="decode-append", H=4, Hkv=2, M=5, N=160, lens_k=(5, 68, 135), append=5, causal=True, **cached
        ),
        Case(
            name="decode-window",
            H=4,
            Hkv=4,
            M=1,
            N=90,
            lens_k=(3, 40, 90),
            causal=True,
            window=(7, 0),
            **cached,
        ),
        Case(
            name="decode-sink-softcap",
            H=4,
            Hkv=2,
            M=3,
            N=70,
            lens_k=(3, 33, 70),
            causal=True,
            sink=True,
            softcap=4.0,
            **cached,
        ),
    ]
    paged: dict[str, Any] = {"rows": "paged", "group": "decode", "B": 3, "page": 16}
    pool += [
        Case(name="paged", H=4, Hkv=2, M=1, N=96, lens_k=(5, 33, 96), causal=True, **paged),
        Case(name="paged-append", H=4, Hkv=1, M=4, N=96, lens_k=(4, 36, 80), append=4, causal=True, **paged),
    ]
    return [grown for case in pool for grown in _grow(case, HALF_AND_SINGLE)]


def _dropout() -> list[Case]:
    pool = _dense("dropout-half", "dropout", 100, 150, HALF_AND_SINGLE, dropout_p=0.5, Hkv=2, backward=True)
    pool += _dense("dropout-causal", "dropout", 130, 130, LOW, dropout_p=0.1, causal=True, H=2, backward=True)
    pool += _dense(
        "dropout-all", "dropout", 20, 30, ("float32",), dropout_p=1.0, H=2, backward=True, diagnostic=True
    )
    return pool


def _long() -> list[Case]:
    pool = _dense("long-2048-grad", "length", 2048, 2048, LOW, H=1, backward=True)
    pool += _dense("long-keys-16384", "length", 16, 16384, LOW, H=1)
    pool += _dense("long-square-16384", "length", 16384, 16384, ("bfloat16",), H=1, causal=True, sample=256)
    pool += _dense("long-far-tail", "length", 64, 4100, HALF_AND_SINGLE, H=2)
    return pool


def pool() -> tuple[Case, ...]:
    """Every named case, in a fixed order."""
    makers = (
        _normal,
        _boundary,
        _alignment,
        _documents,
        _masks,
        _not_finite,
        _windows,
        _scores,
        _biases,
        _heads,
        _adversarial,
        _layouts,
        _empty,
        _rows,
        _dropout,
        _long,
    )
    return tuple(case for maker in makers for case in maker())
