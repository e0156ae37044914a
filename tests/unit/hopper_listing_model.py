"""The lists of tiles of the Hopper backend against the masks they come from; run as a script, in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from attnproof.backends.hopper import compile_matrix, listings
from attnproof.backends.hopper.kernels.listing import HEAD, WIDTH
from attnproof.masks import BIG
from attnproof.problem import Problem, Tensors

Array = np.ndarray[Any, Any]
BLOCK = 64  # queries of a block where tiles of keys are listed
QUERIES = 128
LENGTHS = (0, 1, 5, 63, 64, 65, 128, 129, 200, 300)
BANDS: tuple[dict[str, Any], ...] = (
    {},
    {"right": 0},
    {"left": 70, "right": 0},
    {"left": 70},
    {"right": 0, "top_left": True},
    {"left": 5, "right": 0, "top_left": True},
)


class Sequence(NamedTuple):
    """Rows that see each other: ``number`` -1 are packed tokens past the last sequence."""

    number: int
    row: int
    n_rows: int
    k_row: int
    n_keys: int


def sequences(p: Problem, t: Tensors, which: int) -> list[Sequence]:
    """What list ``which`` runs over."""
    if p.rows == "dense":
        return [Sequence(which, which * p.M, p.M, 0, p.N)]
    q, k = (x.tolist() for x in (t.cu_q, t.cu_k))
    found = [Sequence(b, q[b], q[b + 1] - q[b], k[b], k[b + 1] - k[b]) for b in range(p.B)]
    return [*found, Sequence(-1, q[-1], p.tokens[0] - q[-1], k[-1], p.tokens[1] - k[-1])]


def seen(p: Problem, t: Tensors, at: Sequence) -> Array:
    """[n_rows, n_keys], by definition."""
    i, j = np.arange(at.n_rows)[:, None], np.arange(at.n_keys)[None, :]
    away = j - i - (at.n_keys - at.n_rows)
    allowed = (away >= -p.left) & (away <= p.right)
    if p.top_left:
        allowed &= j <= i
    if t.bounds is not None:
        own = t.bounds.reshape(-1, 2).numpy()[at.row : at.row + at.n_rows]
        allowed &= (j >= own[:, :1]) & (j < own[:, 1:])
    return allowed & (at.number >= 0)


def entries(tiles: Any, n_slots: int) -> Iterator[tuple[int, Array]]:
    """(number, entries) of each list."""
    numbers = tiles.numpy()
    rows = numbers[HEAD:].reshape(-1, n_slots, WIDTH)
    assert numbers[1] == len(rows)
    yield from enumerate(rows)


def check_blocks(allowed: Array, entry: Array, block: int) -> None:
    """``allowed`` [own, streamed]: nothing outside of the blocks, everything inside of the full ones."""
    start, full_start, full_stop, stop = entry[7:11]
    assert start <= full_start <= full_stop <= stop
    assert not allowed[:, : start * block].any() and not allowed[:, stop * block :].any()
    assert allowed[:, full_start * block : full_stop * block].all()


def check_queries(p: Problem, t: Tensors, cut: listings.Cut) -> Array:
    """Tiles of queries; the entries of the last list."""
    tiles, left = listings.query_tiles(p, t, cut)
    rows = np.zeros(0)
    for which, rows in entries(tiles, cut.n_slots):
        used = 0
        for at in sequences(p, t, which):
            allowed = seen(p, t, at)
            if left is not None and at.number >= 0:
                lo, hi = left.numpy().reshape(-1, 2)[at.row : at.row + at.n_rows].T[:, :, None]
                j = np.arange(at.n_keys)[None, :]
                assert (allowed == ((j >= lo) & (j < hi))).all()
            for first in range(0, at.n_rows, cut.own):
                entry = rows[used]
                used += 1
                n_keys = at.n_keys if at.number >= 0 else 0
                number = at.number if at.number >= 0 else p.B - 1
                assert [number, at.number >= 0, first] == entry[:3].tolist()
                assert [at.n_rows, at.row, n_keys, at.k_row] == entry[3:7].tolist()
                check_blocks(allowed[first : first + cut.own, :n_keys], entry, cut.streamed)
                assert entry[10] > entry[7]
                assert entry[9] == entry[8] or entry[9] * cut.streamed <= n_keys
        assert used == tiles[0]
        # past the last tile: no row, no key, one block
        assert not rows[used:, 2:10].any() and (rows[used:, 10] == 1).all()
    return rows


def check_keys(p: Problem, t: Tensors, keys: int, queries: Array, cut: listings.Cut) -> None:
    """Tiles of keys; ``queries`` are the entries of the tiles that row statistics lie by."""
    packed = p.rows == "packed"
    n_slots = p.tokens[1] // keys + p.B + 1 if packed else -(-p.N // keys)
    tiles = listings.key_tiles(p, t, listings.Cut(keys, BLOCK, n_slots), cut)
    for which, rows in entries(tiles, n_slots):
        used = 0
        for at in sequences(p, t, which):
            allowed = seen(p, t, at).T
            for first in range(0, at.n_keys, keys):
                entry = rows[used]
                used += 1
                assert [first, at.n_keys, at.k_row] == entry[1:4].tolist()
                part = allowed[first : first + keys]
                if packed and not entry[4]:
                    assert not part.any() and [0, 0, 0, 1] == entry[7:11].tolist()
                    assert [0, 0, 0] == queries[entry[6]][2:5].tolist()  # statistics of nothing
                    continue
                assert [at.n_rows, at.row] == entry[4:6].tolist()
                check_blocks(part, entry, BLOCK)
                if packed:
                    assert entry[10] > entry[7]
                    assert [0, at.n_rows, at.row] == queries[entry[6]][2:5].tolist()
        assert used == tiles[0]
        assert not rows[used:, [1, 2, 3, 4, 7, 8, 9]].any() and (not packed or (rows[used:, 10] == 1).all())


def packed(rng: np.random.Generator, trial: int) -> tuple[Problem, Tensors]:
    """Uneven lengths, tokens past the last sequence, and every fourth time bounds in no order."""
    batch = int(rng.integers(1, 6))
    cu = [np.cumsum([0, *rng.choice(LENGTHS, batch)]) for _ in range(2)]
    tail = rng.choice([0, 7, 130], 2)
    tokens = (int(cu[0][-1] + tail[0]) or 1, int(cu[1][-1] + tail[1]) or 1)
    bounds = None
    if trial % 4 == 3:
        bounds = torch.tensor(np.sort(rng.integers(-3, 330, (tokens[0], 2)), 1).astype(np.int32))
        bounds[::7] = torch.tensor([50, 20], dtype=torch.int32)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in cu)
    p = replace(BASE, rows="packed", B=batch, tokens=tokens, has_bounds=bounds is not None)
    return p, Tensors(torch.zeros(1), None, None, cu_q=cu_q, cu_k=cu_k, bounds=bounds)


def dense(rng: np.random.Generator, trial: int) -> tuple[Problem, Tensors]:
    """Bounds of every sequence, sorted every second time as documents are."""
    batch, m, n = int(rng.integers(1, 4)), *rng.choice(LENGTHS[1:], 2).tolist()
    bounds = torch.tensor(np.sort(rng.integers(-3, n + 20, (batch, m, 2)), 2).astype(np.int32))
    if trial % 2:
        bounds = bounds.sort(1).values
    p = replace(BASE, B=batch, M=m, N=n, has_bounds=True)
    return p, Tensors(torch.zeros(1), None, None, bounds=bounds)


BASE = replace(compile_matrix.Job(128, 128, "full").problem(), device="cpu", left=BIG, right=BIG)


def main() -> None:
    """Every band, packed and dense, tiles of each size that kernels have."""
    rng = np.random.default_rng(0)
    for trial in range(36):
        for make in (packed, dense):
            p, t = make(rng, trial)
            p = replace(p, **BANDS[trial % len(BANDS)])
            more = p.B + 1 if p.rows == "packed" else 1
            rows = p.tokens[0] if p.rows == "packed" else p.M - 1
            for own, streamed in ((192, 128), (128, 64)):
                check_queries(p, t, listings.Cut(own, streamed, rows // own + more))
            cut = listings.Cut(QUERIES, 128, rows // QUERIES + more + (p.rows == "packed"))
            check_keys(p, t, (64, 128)[trial % 2], check_queries(p, t, cut), cut)
    print("every list is right")


if __name__ == "__main__":
    main()
