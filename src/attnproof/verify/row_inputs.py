"""Inputs of packed, cached and paged cases: the dense sequences, and the storage that hides them.

Everything outside the sequences is NaN: tokens past the last sequence, cache slots past the valid length, pages that
no table names. Page tables are shuffled and their unused entries hold numbers that no pool has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from attnproof.cases import Case
from attnproof.verify.dtypes import Array, rounded
from attnproof.verify.inputs import GENERATORS, Inputs, place, score_inputs

LOOSE_TOKENS = 3  # packed tokens past the last sequence
SLACK = 24  # cache slots past the longest sequence
NOWHERE = (-1, 10**6)  # what unused page-table entries hold


def build_rows(case: Case, seed: int, rng: np.random.Generator) -> Inputs:
    """Draw each sequence, then store it the way the case says."""
    sequences = [_sequence(case, rng, index) for index in range(case.B)]
    shared = score_inputs(replace(case, dlse=False), rng, ())
    store = _packed if case.rows == "packed" else _cached
    return store(case, seed, rng, sequences, shared)


def _sequence(case: Case, rng: np.random.Generator, index: int) -> tuple[Any, ...]:
    """q `[H,m,D]`, k `[Hkv,n,D]`, v, dout, dlse of one sequence in float64, already rounded to the case's dtype."""
    m = case.lens_q[index] if case.lens_q else case.M
    n = case.lens_k[index]
    q = rng.standard_normal((1, case.H, m, case.D))
    k = rng.standard_normal((1, case.Hkv, n, case.D))
    v = rng.standard_normal((1, case.Hkv, n, case.Dv))
    q, k, v = GENERATORS[case.generator](case, rng, q, k, v)
    dout = rng.standard_normal((case.H, m, case.Dv))
    dlse = rng.standard_normal((case.H, m)).astype(np.float32).astype(np.float64) if case.dlse else None
    parts = [rounded(part, case.dtype) for part in (q[0], k[0], v[0], dout)]
    return (*parts, dlse)


def _packed(
    case: Case, seed: int, rng: np.random.Generator, sequences: list[Any], shared: dict[str, Any]
) -> Inputs:
    def pack(column: int) -> Array:
        tokens = np.concatenate([parts[column].swapaxes(0, 1) for parts in sequences])
        loose = np.full((LOOSE_TOKENS, *tokens.shape[1:]), np.nan)
        return np.concatenate([tokens, loose])

    def cumulative(lengths: tuple[int, ...]) -> Array:
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)

    dlse = None
    if case.dlse:
        columns = [parts[4] for parts in sequences]
        dlse = np.concatenate([*columns, np.zeros((case.H, LOOSE_TOKENS))], axis=1)
    q, k, v, dout = (place(pack(column), case.dtype) for column in range(4))
    return Inputs(
        case,
        seed,
        q,
        k,
        v,
        dout,
        dlse=dlse,
        cu_q=cumulative(case.lens_q),
        cu_k=cumulative(case.lens_k),
        extra={"sequences": sequences, "loose": LOOSE_TOKENS},
        **shared,
    )


def _cached(
    case: Case, seed: int, rng: np.random.Generator, sequences: list[Any], shared: dict[str, Any]
) -> Inputs:
    q = np.stack([parts[0] for parts in sequences])
    dout = np.stack([parts[3] for parts in sequences])
    before = [length - case.append for length in case.lens_k]
    new: dict[str, Any] = {}
    if case.append:
        for name, column in (("k_new", 1), ("v_new", 2)):
            values = np.stack(
                [parts[column][:, start:] for parts, start in zip(sequences, before, strict=True)]
            )
            new[name] = place(values, case.dtype)
    table = None
    if case.rows == "paged":
        k, v, table = _pages(case, rng, sequences, before)
    else:
        k, v = (_cache(case, sequences, column, before) for column in (1, 2))
    return Inputs(
        case,
        seed,
        place(q, case.dtype),
        place(k, case.dtype),
        place(v, case.dtype),
        place(dout, case.dtype),
        lengths=np.asarray(before, np.int32),
        block_table=table,
        extra={"sequences": sequences},
        **new,
        **shared,
    )


def _cache(case: Case, sequences: list[Any], column: int, before: list[int]) -> Array:
    width = sequences[0][column].shape[-1]
    cache = np.full((case.B, case.Hkv, case.N + SLACK, width), np.nan)
    for index, (parts, length) in enumerate(zip(sequences, before, strict=True)):
        cache[index, :, :length] = parts[column][:, :length]
    return cache


def _pages(
    case: Case, rng: np.random.Generator, sequences: list[Any], before: list[int]
) -> tuple[Array, Array, Array]:
    width = -(-case.N // case.page) + 2
    needed = [-(-length // case.page) for length in case.lens_k]
    pool = rng.permutation(sum(needed) + 3)
    table = np.array(
        [[NOWHERE[(row + slot) % 2] for slot in range(width)] for row in range(case.B)], np.int32
    )
    pools = [
        np.full((len(pool), case.Hkv, case.page, parts.shape[-1]), np.nan) for parts in sequences[0][1:3]
    ]
    taken = 0
    for index, count in enumerate(needed):
        table[index, :count] = pool[taken : taken + count]
        taken += count
        for column, store in enumerate(pools, start=1):
            for position in range(before[index]):
                page = table[index, position // case.page]
                store[page, :, position % case.page] = sequences[index][column][:, position]
    return pools[0], pools[1], table
