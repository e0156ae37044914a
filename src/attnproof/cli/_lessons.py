"""The computations behind `trace`, `compare`, `memory` and `blocks`: plain NumPy, results as data, nothing printed.

`naive` is written here a second time on purpose: a few lines that a reader can check against a textbook, with nothing
in common with the backends that are measured against it.
"""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attnproof import dispatch, masks
from attnproof.backends import streaming
from attnproof.backends.streaming import Order, Step
from attnproof.problem import Options, bind

Array = npt.NDArray[np.float64]

# largest error of a float64 result on standard normal inputs that still counts as exact
EXACT = 2e-15
MIB = 2**20


class Inputs(NamedTuple):
    """One head: q [N, D], k [N, D], v [N, D], standard normal, drawn in this order."""

    q: Array
    k: Array
    v: Array

    @classmethod
    def draw(cls, n: int, d: int, seed: int) -> Inputs:
        """Inputs of one size; the seed alone decides them."""
        rng = np.random.default_rng(seed)
        return cls(rng.normal(size=(n, d)), rng.normal(size=(n, d)), rng.normal(size=(n, d)))

    @property
    def dense(self) -> tuple[Array, Array, Array]:
        """As views [1, 1, N, D], for functions that take batch and heads."""
        return self.q[None, None], self.k[None, None], self.v[None, None]


def naive(inputs: Inputs, causal: bool = False) -> tuple[Array, Array]:
    """Attention with its whole matrix: (out [N, D], lse [N]). S and P are both alive, as in most first versions."""
    s = inputs.q @ inputs.k.T
    s *= 1 / math.sqrt(inputs.q.shape[1])
    if causal:
        s[np.triu_indices(len(s), 1)] = -np.inf
    m = s.max(axis=1, keepdims=True)
    p = s - m
    np.exp(p, out=p)
    total = p.sum(axis=1, keepdims=True)
    p /= total
    return p @ inputs.v, (m + np.log(total))[:, 0]


def stream(
    inputs: Inputs,
    *,
    causal: bool = False,
    block: int | None = None,
    order: Order = "queries",
    trace: Callable[[Step], None] | None = None,
) -> tuple[Array, Array]:
    """The streaming backend on one head: (out [N, D], lse [N]). Without a block size, the backend's own."""
    problem, tensors = bind(*inputs.dense, Options(causal=causal))
    block_m, block_n = (block, block) if block else (streaming.BLOCK_M, streaming.BLOCK_N)
    out, lse = streaming.forward(problem, tensors, order=order, block_m=block_m, block_n=block_n, trace=trace)
    return out[0, 0], lse[0, 0]


@dataclass(frozen=True)
class TraceRow:
    """State of one query row after a key tile that starts at key `j`."""

    j: int
    m: float
    l: float  # noqa: E741
    corr: float


@dataclass(frozen=True)
class Trace:
    """Every step of one row, and how far the result is from the materialised one."""

    rows: tuple[TraceRow, ...]
    lse: float
    error_out: float
    error_lse: float

    @property
    def holds(self) -> bool:
        """The factor never grows, and the result is the materialised one."""
        return all(r.corr <= 1 for r in self.rows) and max(self.error_out, self.error_lse) <= EXACT


def trace(n: int, d: int, block: int, order: Order, row: int, seed: int, causal: bool = False) -> Trace:
    """The recurrence of one query row, tile by tile."""
    inputs = Inputs.draw(n, d, seed)
    steps: list[TraceRow] = []

    def watch(step: Step) -> None:
        first, stop = step.rows
        if first <= row < stop:
            at = row - first
            steps.append(TraceRow(step.cols[0], float(step.m[at]), float(step.l[at]), float(step.alpha[at])))

    out, lse = stream(inputs, causal=causal, block=block, order=order, trace=watch)
    want_out, want_lse = naive(inputs, causal)
    # relative to the size of the lse, which grows with ln N
    error_lse = abs(lse[row] - want_lse[row]) / max(1.0, abs(want_lse[row]))
    return Trace(
        tuple(steps), float(lse[row]), float(np.abs(out[row] - want_out[row]).max()), float(error_lse)
    )


@dataclass(frozen=True)
class Comparison:
    """One candidate at one size: errors against `naive`, and the median of interleaved runs."""

    n: int
    candidate: str
    ours: bool
    error_full: float
    error_causal: float
    seconds: float
    slowest: float
    ratio: float  # time divided by that of naive NumPy in the same rounds

    @property
    def exact(self) -> bool:
        """Below the float64 bar on both masks."""
        return max(self.error_full, self.error_causal) <= EXACT


Candidate = Callable[[Inputs, bool], Array]


def candidates() -> dict[str, tuple[bool, Candidate]]:
    """Name -> (is it ours, function) of everything on this host that takes float64; torch's forms if torch is there."""
    found: dict[str, tuple[bool, Candidate]] = {"naive NumPy": (False, lambda x, causal: naive(x, causal)[0])}
    probe, _ = bind(*Inputs.draw(2, 2, 0).dense, Options())
    # the reference is materialised float64, which is what `naive` is
    able = [
        name
        for name, reason in dispatch.explain(probe).reasons.items()
        if reason is None and name != "reference"
    ]
    found.update({name: (True, _through_api(name)) for name in able})
    try:
        import torch
    except ImportError:
        return found

    def eager(x: Inputs, causal: bool) -> Array:
        q, k, v = (torch.from_numpy(part) for part in x)
        s = q @ k.T / math.sqrt(q.shape[1])
        if causal:
            s = s.masked_fill(torch.ones(s.shape, dtype=torch.bool).triu(1), -torch.inf)
        return (torch.softmax(s, dim=-1) @ v).numpy()

    def sdpa(x: Inputs, causal: bool) -> Array:
        q, k, v = (torch.from_numpy(part) for part in x.dense)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)[0, 0].numpy()

    found["torch eager"], found["torch SDPA"] = (False, eager), (False, sdpa)
    return found


def _through_api(backend: str) -> Candidate:
    import attnproof

    def run(x: Inputs, causal: bool) -> Array:
        return attnproof.attention(*x.dense, causal=causal, backend=backend)[0, 0]

    return run


def compare(sizes: Sequence[int], d: int, rounds: int, step: Callable[[str], None]) -> Iterator[Comparison]:
    """Errors and times of every candidate at every size; inputs of size N come from seed N.

    Rounds are interleaved (each candidate once, then again), so that a slow second hits all of them.
    """
    found = candidates()
    for n in sizes:
        inputs = Inputs.draw(n, d, n)
        want = {causal: naive(inputs, causal)[0] for causal in (False, True)}
        errors = {
            (name, causal): float(np.abs(run(inputs, causal) - want[causal]).max())
            for name, (_, run) in found.items()
            for causal in want
        }
        step(f"N={n} exactness")
        times: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(rounds):
            for name, (_, run) in found.items():
                start = time.perf_counter()
                run(inputs, False)
                times[name].append(time.perf_counter() - start)
            step(f"N={n} time")
        base = float(np.median(times["naive NumPy"]))
        for name, (ours, _) in found.items():
            median = float(np.median(times[name]))
            full, causal = errors[name, False], errors[name, True]
            yield Comparison(n, name, ours, full, causal, median, max(times[name]), median / base)


@dataclass(frozen=True)
class MemoryRow:
    """Peak bytes of one size, by tracemalloc, inputs not counted."""

    n: int
    naive: int
    theory: int
    keys_outer: int
    queries_outer: int

    @property
    def ratio(self) -> float:
        """How many times less the keys-outer loop needs."""
        return self.naive / self.keys_outer


def memory(sizes: Sequence[int], d: int, block: int, step: Callable[[str], None]) -> list[MemoryRow]:
    """Peak memory of the materialised form and of both loop orders."""
    rows: list[MemoryRow] = []
    for n in sizes:
        inputs = Inputs.draw(n, d, n)
        runs: dict[str, Callable[[Inputs], Any]] = {
            "naive": naive,
            "keys outer": lambda x: stream(x, block=block, order="keys"),
            "queries outer": lambda x: stream(x, block=block, order="queries"),
        }
        peaks: dict[str, int] = {}
        for name, run in runs.items():
            peaks[name] = _peak(partial(run, inputs))
            step(f"N={n} {name}")
        rows.append(MemoryRow(n, peaks["naive"], 2 * n * n * 8, peaks["keys outer"], peaks["queries outer"]))
    return rows


def _peak(run: Callable[[], Any]) -> int:
    # a caller that traces already keeps its own trace
    outer = tracemalloc.is_tracing()
    if not outer:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not outer:
            tracemalloc.stop()


@dataclass(frozen=True)
class Blocks:
    """Tiles of one mask, by class."""

    m: int
    n: int
    block_m: int
    block_n: int
    total: int
    kept: int
    full: int
    edge: int
    skipped: int
    skipped_share: float
    pairs: int
    picture: str

    def as_dict(self) -> dict[str, Any]:
        """Without the picture."""
        return {key: value for key, value in asdict(self).items() if key != "picture"}


def blocks(mask: masks.Mask, m: int, n: int, block_m: int, block_n: int) -> Blocks:
    """Count the tiles that a kernel computes, and draw them when there are few."""
    tiles = mask.tiles(m, n, block_m, block_n)
    kinds = tiles.kinds
    small = kinds.shape[0] <= 32 and kinds.shape[1] <= 64
    marks = {masks.SKIP: ".", masks.EDGE: "/", masks.FULL: "#"}
    picture = "\n".join(" ".join(marks[int(kind)] for kind in row) for row in kinds) if small else ""
    return Blocks(
        m=m,
        n=n,
        block_m=block_m,
        block_n=block_n,
        total=int(kinds.size),
        kept=tiles.kept,
        full=tiles.count(masks.FULL),
        edge=tiles.count(masks.EDGE),
        skipped=tiles.count(masks.SKIP),
        skipped_share=tiles.skipped_share,
        pairs=mask.pairs(m, n),
        picture=picture,
    )
