"""Random calls: every option, odd sizes, odd strides and alignments; a seed says all of a call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .problems import BROADCASTS, Array, Case
from .targets import Target

WIDTHS = (8, 16, 24, 32, 40, 48, 64, 64, 72, 80, 96, 112, 128, 128, 160, 192, 256)
EDGES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257)
MOST_PAIRS = 600_000  # scores of a call; the right answer is computed on the host
# The suite's tolerances know nothing of subnormal numbers of float32. A key whose every weight is one, because it is far
# from every query or their scores are spread widely, is therefore not drawn.
MOST_DISTANCE = 150  # at the largest slope a weight of e^-75


@dataclass(frozen=True)
class Loose(Target):
    """A target whose arrays lie anywhere: odd offsets, padded and permuted axes, NaN or True around them."""

    rng: Any = field(default=None, compare=False)

    def array(self, x: Array | None, dtype: str) -> Any:
        """Values as a tensor, most often as a view of something larger."""
        made = super().array(x, dtype)
        if made is None or dtype in ("int32", "int64") or made.dim() == 0:
            return made
        return loosened(made, self.rng)


def loosened(x: Any, rng: np.random.Generator) -> Any:
    """A tensor as it is, or the same values as a view with other strides and another alignment."""
    import torch

    way = rng.integers(4)
    if way == 0:
        return x
    order = list(range(x.dim()))
    if way == 3:
        # columns stay neighbours most of the time: other kernels serve them
        part = order[:-1] if rng.random() < 0.7 else order
        order[: len(part)] = [int(at) for at in rng.permutation(part)]
    pads = rng.integers(0, 5, x.dim()) * (way > 1)
    if rng.random() < 0.5:
        pads = pads * 8  # rows keep their alignment
    sizes = [x.shape[at] + int(pads[at]) for at in order]
    offset = int(rng.choice([0, 1, 2, 3, 4, 8, 16]))
    around = True if x.dtype == torch.bool else torch.nan
    flat = torch.full((offset + int(np.prod(sizes)),), around, dtype=x.dtype, device=x.device)
    view = flat[offset:].view(sizes).permute([order.index(at) for at in range(x.dim())])
    for axis, size in enumerate(x.shape):
        view = view.narrow(axis, 0, size)
    return view.copy_(x)


def _length(rng: np.random.Generator) -> int:
    if rng.random() < 0.4:
        return int(rng.choice(EDGES))
    return int(np.exp(rng.uniform(0, np.log(600))))


def _widths(rng: np.random.Generator, dtype: str) -> tuple[int, int]:
    """D and Dv, often the same."""

    def one() -> int:
        kind = rng.random()
        if kind < 0.03 and dtype != "float32":
            return int(rng.choice([320, 384, 500, 512]))
        return int(rng.integers(1, 140)) if kind < 0.3 else int(rng.choice(WIDTHS))

    first = one()
    return first, first if rng.random() < 0.75 else one()


def _options(rng: np.random.Generator, n: int, rows: str) -> dict[str, Any]:
    def some(share: float) -> bool:
        return bool(rng.random() < share)

    made: dict[str, Any] = {}
    if some(0.5):
        made["causal"] = True
        if some(0.2):
            made["align"] = "top_left"
    if some(0.3):
        made["window"] = tuple(int(side) for side in rng.integers(-1, max(2, n), 2))
    if some(0.2):
        made["softcap"] = float(rng.choice([0.7, 2.0, 15.0, 50.0]))
    if some(0.25):
        made["dropout_p"] = float(rng.choice([0.1, 0.3, 0.5, 0.9, 1.0], p=[0.3, 0.3, 0.2, 0.15, 0.05]))
    if some(0.2):
        made["scale"] = float(rng.choice([0.0, -0.3, 0.05, 0.2, 0.5]))
    if rows != "packed" and some(0.35):
        made["layout"] = "bmhd"
    if rows in ("cached", "paged") and some(0.6):
        made["num_splits"] = int(rng.integers(1, 12))
    return made


def _masks(rng: np.random.Generator, case: Case) -> Case:
    """A boolean mask, a bias, slopes, a sink, a mask object: each sometimes."""
    more: dict[str, Any] = {}
    if rng.random() < 0.25 and min(case.M, case.N) > 0:
        more["keep"] = str(rng.choice(BROADCASTS))
        if "M" in more["keep"] and "N" in more["keep"]:
            more["dead"] = tuple(sorted({int(row) for row in rng.integers(0, case.M, rng.integers(0, 4))}))
            more["first_key"] = int(rng.integers(0, case.N)) if rng.random() < 0.2 else 0
    if rng.random() < 0.3:
        more["bias"] = str(rng.choice(BROADCASTS))
        more["bias_dtype"] = str(rng.choice(["", "float32"]))
    if rng.random() < 0.3 and max(case.M, case.N) <= MOST_DISTANCE:
        more["alibi"] = str(rng.choice(["H", "BH"]))
    if rng.random() < 0.25:
        more["sink"] = True
        more["sink_dtype"] = str(rng.choice(["", "float32"]))
    if rng.random() < 0.15:
        more["mask"] = str(
            rng.choice(["prefix", "prefixes", "segments"] if case.rows == "dense" else ["prefix"])
        )
    return replace(case, **more)


def _stored(rng: np.random.Generator, case: Case) -> Case:
    """The lengths of packed sequences, or those of a cache with its page and append."""
    if case.rows == "packed":
        q, k = (tuple(int(n) for n in rng.integers(0, side + 1, case.B)) for side in (case.M, case.N))
        tail = tuple(int(n) for n in rng.integers(0, 9, 2)) if rng.random() < 0.3 else (0, 0)
        return replace(case, q_lengths=q, k_lengths=k, M=max(q), N=max(k), tail=tail)
    if case.rows == "dense":
        return case
    page = int(rng.choice([8, 16, 64, 128])) if case.rows == "paged" else 0
    capacity = -(-case.N // page) * page if page else case.N
    append = min(int(rng.choice([0, 1, case.M])), capacity)
    lengths = tuple(int(n) for n in rng.integers(append, capacity + 1, case.B))
    return replace(case, N=capacity, page=page, append=append, k_lengths=lengths)


def random_case(seed: int) -> Case:
    """The call that a seed stands for."""
    rng = np.random.default_rng([0xD072, seed])
    dtype = str(rng.choice(["float16", "bfloat16", "float32"], p=[0.6, 0.25, 0.15]))
    rows = str(rng.choice(["dense", "packed", "cached", "paged"], p=[0.55, 0.2, 0.13, 0.12]))
    batch, heads_kv, group = (
        int(n) for n in (rng.integers(1, 4), rng.integers(1, 4), rng.choice([1, 2, 3, 8]))
    )
    m, n = _length(rng), _length(rng)
    if rows in ("cached", "paged"):
        m = int(rng.choice([1, 1, 2, 5, 17, 40]))
        n = max(n, m)
    if rows == "dense" and rng.random() < 0.02:
        m, n = (0, n) if rng.random() < 0.5 else (m, 0)
    while batch * heads_kv * group * m * n > MOST_PAIRS:
        if batch > 1:
            batch -= 1
        elif group > 2:
            group //= 2
        else:
            heads_kv = 1
            m, n = (m, n // 2) if n > m else (m // 2, n)
    d, dv = _widths(rng, dtype)
    case = Case(
        f"fuzz {seed}",
        dtype=dtype,
        rows=rows,
        B=batch,
        H=heads_kv * group,
        Hkv=heads_kv,
        M=m,
        N=n,
        D=d,
        Dv=dv,
    )
    case = _stored(rng, case)
    case = _masks(rng, replace(case, options=_options(rng, case.N, rows)))
    spread = float(rng.choice([1.0, 1.0, 0.1, 3.0]))
    return replace(case, spread=1.0 if "scale" in case.options or case.alibi else spread)


def described(case: Case) -> str:
    """A case in one line, without what is as by default."""
    plain = Case(case.name)
    parts = {at: getattr(case, at) for at in Case.__dataclass_fields__ if at != "name"}
    return ", ".join(f"{at}={x}" for at, x in parts.items() if x != getattr(plain, at))
