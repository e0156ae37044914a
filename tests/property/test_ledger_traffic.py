"""Model bytes against the count of a tile loop that is really walked, on random problems."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attnproof.backends import streaming
from attnproof.ledger import accounts
from attnproof.ledger.cache import replay
from attnproof.ledger.hardware import DTYPE_BYTES
from attnproof.ledger.traffic import Call
from attnproof.masks import Mask, causal, prefix, segments, window
from attnproof.problem import Options, bind

MANY = settings(max_examples=500, deadline=None)
SOME = settings(max_examples=100, deadline=None)


@dataclass(frozen=True)
class Draw:
    """A random problem, and for each sequence the [M, N] array of allowed pairs, from the definition."""

    call: Call
    allowed: tuple[np.ndarray, ...]
    block_q: int
    block_k: int


def by_definition(kind, m: int, n: int, left: int, right: int, length: int) -> np.ndarray:
    """Allowed pairs straight from the written semantics, without an interval in sight."""
    i, j = np.arange(m)[:, None], np.arange(n)[None, :]
    diagonal = i + n - m
    return {
        "none": np.ones((m, n), bool),
        "causal": j <= diagonal,
        "top_left": j <= i,
        "window": (diagonal - left <= j) & (j <= diagonal + right),
        "prefix": (j <= diagonal) | (j < length),
        "causal window": (j <= diagonal) & (diagonal - left <= j),
    }[kind]


@st.composite
def problems(draw) -> Draw:
    kind = draw(st.sampled_from(["none", "causal", "top_left", "window", "prefix", "causal window"]))
    left, right, length = (draw(st.integers(0, 40)) for _ in range(3))
    mask = {
        "none": Mask(),
        "causal": causal(),
        "top_left": causal(align="top_left"),
        "window": window(left, right),
        "prefix": prefix(length),
        "causal window": window(left, -1) & causal(),
    }[kind]
    size = st.integers(0, 90)
    lengths = tuple(draw(st.lists(st.tuples(size, size), min_size=1, max_size=3)))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    call = Call(
        lengths,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 24])),
        value_dim=draw(st.sampled_from([8, 16, 40])),
        dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
        mask=mask,
    )
    allowed = tuple(by_definition(kind, m, n, left, right, length) for m, n in lengths)
    return Draw(call, allowed, draw(st.integers(1, 33)), draw(st.integers(1, 33)))


def tiles(extent: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, extent)) for start in range(0, extent, block)]


def size(rows: slice) -> int:
    return rows.stop - rows.start


def walked_forward(draw: Draw) -> Counter:
    """Queries outer: every query head walks its tiles and counts what it loads and stores."""
    call, bytes_ = draw.call, Counter()
    for seen, _ in product(draw.allowed, range(call.heads)):
        for rows in tiles(seen.shape[0], draw.block_q):
            loaded = False
            for cols in tiles(seen.shape[1], draw.block_k):
                if not seen[rows, cols].any():
                    continue
                if not loaded:
                    bytes_["q", "read"] += size(rows) * call.head_dim * call.size
                    loaded = True
                bytes_["k", "read"] += size(cols) * call.head_dim * call.size
                bytes_["v", "read"] += size(cols) * call.value_dim * call.size
            bytes_["out", "written"] += size(rows) * call.value_dim * call.size
            bytes_["lse", "written"] += size(rows) * call.stat
    return bytes_


def walked_dkdv(draw: Draw) -> Counter:
    """Keys outer of the backward pass: a key head walks the query tiles of every head of its group."""
    call, bytes_ = draw.call, Counter()
    for seen, _ in product(draw.allowed, range(call.kv_heads)):
        for cols in tiles(seen.shape[1], draw.block_k):
            visited = [rows for rows in tiles(seen.shape[0], draw.block_q) if seen[rows, cols].any()]
            for tensor, dim in (("k", call.head_dim), ("v", call.value_dim)):
                bytes_[tensor, "read"] += size(cols) * dim * call.size * bool(visited)
                bytes_["d" + tensor, "written"] += size(cols) * dim * call.size
            for rows, _ in product(visited, range(call.group)):
                bytes_["q", "read"] += size(rows) * call.head_dim * call.size
                bytes_["dout", "read"] += size(rows) * call.value_dim * call.size
                bytes_["lse", "read"] += size(rows) * call.stat
                bytes_["delta", "read"] += size(rows) * call.stat
    return bytes_


def counted(account, kernel: str) -> Counter:
    out: Counter = Counter()
    for entry in account.entries:
        if entry.kernel == kernel:
            out[entry.tensor, "read"] += entry.read
            out[entry.tensor, "written"] += entry.written
    return out


@MANY
@given(problems())
def test_queries_outer_moves_the_bytes_that_a_walked_loop_moves(draw: Draw) -> None:
    model = accounts.forward(draw.call, draw.block_q, draw.block_k)
    walked = walked_forward(draw)
    assert +walked == +counted(model, "forward")
    assert sum(walked.values()) == model.total


@SOME
@given(problems())
def test_the_dk_dv_sweep_moves_the_bytes_that_a_walked_loop_moves(draw: Draw) -> None:
    model = accounts.backward(draw.call, draw.block_q, draw.block_k)
    assert +walked_dkdv(draw) == +counted(model, "dk, dv")


@SOME
@given(problems())
def test_pairs_and_flop_are_counted_from_the_definition(draw: Draw) -> None:
    pairs = draw.call.heads * sum(int(seen.sum()) for seen in draw.allowed)
    assert draw.call.pairs == pairs
    dims = draw.call.head_dim + draw.call.value_dim
    assert accounts.forward(draw.call).flops == 2 * dims * pairs
    square = draw.call.heads * sum(m * n for m, n in draw.call.lengths)
    assert accounts.eager(draw.call).executed_flops == 2 * dims * square


@SOME
@given(problems())
def test_the_cache_sees_each_byte_of_an_endless_cache_once(draw: Draw) -> None:
    """Compulsory traffic: with room for everything, memory gives every operand once and gets nothing back."""
    model = accounts.forward(draw.call, draw.block_q, draw.block_k)
    memory = replay(model, 1 << 40, wave=7)
    requested = counted(model, "forward")
    assert memory.read <= sum(requested[t, "read"] for t in "qkv")
    assert memory.written == 0
    assert memory.resident == sum(requested[t, "written"] for t in ("out", "lse"))
    once = sum(
        draw.call.rows(side) * heads * dim * draw.call.size
        for side, heads, dim in (
            ("q", draw.call.heads, draw.call.head_dim),
            ("k", draw.call.kv_heads, draw.call.head_dim + draw.call.value_dim),
        )
    )
    assert memory.read <= once


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_streaming_backend_visits_the_tiles_that_the_model_counts(data) -> None:
    """The model and the loop that computes must not drift apart: the backend's own trace is counted."""
    m, n, d = (data.draw(st.integers(1, size)) for size in (50, 50, 8))
    ids = np.sort(np.asarray(data.draw(st.lists(st.integers(0, 3), min_size=m, max_size=m))))
    keys = np.sort(np.asarray(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))))
    mask = data.draw(st.sampled_from([Mask(), causal(), window(9, 3), segments(ids, keys)]))
    block_q, block_k = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    zeros = [np.zeros((1, 2, rows, d)) for rows in (m, n, n)]
    problem, tensors = bind(*zeros, Options(mask=mask))
    steps: list = []
    streaming.forward(problem, tensors, block_m=block_q, block_n=block_k, trace=steps.append)
    model = counted(accounts.forward(Call.of(problem, tensors), block_q, block_k), "forward")
    assert model["k", "read"] == sum(step.cols[1] - step.cols[0] for step in steps) * d * 8
    live = {(step.head, step.rows) for step in steps}
    assert model["q", "read"] == sum(rows[1] - rows[0] for _, rows in live) * d * 8
