"""Gradient of a broadcast bias: d_logits rebuilt tile by tile and summed in fp32 over the axes the bias lacks.

Each program owns one tile of the *caller's* bias and walks every (sequence, head, tile) that was added to it, so the
sum has a fixed order, needs no atomics and no expanded tensor. Mirror: ``reference._add_bias_gradient``.
"""

import triton
import triton.language as tl

from .backward import probabilities, score_gradient
from .pieces import (
    INF,
    band_right,
    dot,
    kept,
    load_bounds,
    load_rows,
    locate_sequence,
    plane_base,
    pointers,
    scores,
    visible,
)
from .statistics import load_stat


@triton.jit(
    do_not_specialize=[
        *("M", "N", "B", "H", "group", "left", "right", "threshold"),
        *("heads", "tiles_m", "tiles_n", "walk_b", "walk_h", "walk_m", "walk_n"),
    ]
)
def dbias_kernel(
    q, k, v, dout, shift, delta, dbias,
    bias, keep, slopes, bounds, rng,
    cu_q, cu_k,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_statb, stride_stath,
    stride_dbiasb, stride_dbiash, stride_dbiasm, stride_dbiasn,
    stride_biasb, stride_biash, stride_biasm, stride_biasn,
    stride_keepb, stride_keeph, stride_keepm, stride_keepn,
    stride_slopeb, stride_slopeh,
    stride_boundb, stride_boundm,
    M, N, B, H, group, left, right, threshold,
    heads, tiles_m, tiles_n, walk_b, walk_h, walk_m, walk_n,
    scale, cap, inverse_keep,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUM_M: tl.constexpr, SUM_N: tl.constexpr,
    ROWS: tl.constexpr, BANDED: tl.constexpr, TOP_LEFT: tl.constexpr,
    HAS_KEEP: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes: one tile of dbias.

    Grid: one program per (sequence, head, row tile, key tile) of the bias; an axis of length 1 has one tile.
    Shapes: M and N are the bias's own lengths where it has them, else the problem's; ``walk_*`` count what is summed.
    Invariants: acc = sum of d_logits over the steps done, [BLOCK_M, BLOCK_N].
    Mirror: reference._add_bias_gradient.
    """
    pid = tl.program_id(0)
    tile_n = pid % tiles_n
    tile_m = pid // tiles_n % tiles_m
    bias_h = pid // (tiles_n * tiles_m) % heads
    bias_b = pid // (tiles_n * tiles_m) // heads
    block_rows = tl.arange(0, BLOCK_M)
    block_keys = tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_D)
    v_cols = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(0, walk_b * walk_h * walk_m * walk_n):
        n_at = tile_n + step % walk_n
        m_at = tile_m + step // walk_n % walk_m
        h = bias_h + step // (walk_n * walk_m) % walk_h
        b = bias_b + step // (walk_n * walk_m) // walk_h
        n_rows, q_row, n_keys, k_row = locate_sequence(b, cu_q, cu_k, M, N, B, ROWS)
        kv_head = h // group
        offset = n_keys - n_rows
        rows = m_at * BLOCK_M + block_rows
        keys = n_at * BLOCK_N + block_keys
        i = rows[:, None]
        j = keys[None, :]
        q_ptrs = pointers(
            plane_base(q, b, h, q_row, stride_qb, stride_qh, stride_qm),
            rows,
            cols,
            stride_qm,
            stride_qd,
            True,
        )
        k_ptrs = pointers(
            plane_base(k, b, kv_head, k_row, stride_kb, stride_kh, stride_kn),
            keys,
            cols,
            stride_kn,
            stride_kd,
            True,
        )
        v_ptrs = pointers(
            plane_base(v, b, kv_head, k_row, stride_vb, stride_vh, stride_vn),
            keys,
            v_cols,
            stride_vn,
            stride_vd,
            True,
        )
        do_ptrs = pointers(
            plane_base(dout, b, h, q_row, stride_dob, stride_doh, stride_dom),
            rows,
            v_cols,
            stride_dom,
            stride_dod,
            True,
        )
        q_tile = load_rows(q_ptrs, rows, n_rows, cols, D, BLOCK_D, True)  # [BLOCK_M, BLOCK_D]
        k_tile = load_rows(k_ptrs, keys, n_keys, cols, D, BLOCK_D, True)  # [BLOCK_N, BLOCK_D]
        v_tile = load_rows(v_ptrs, keys, n_keys, v_cols, DV, BLOCK_DV, True)  # [BLOCK_N, BLOCK_DV]
        do_tile = load_rows(do_ptrs, rows, n_rows, v_cols, DV, BLOCK_DV, True)  # [BLOCK_M, BLOCK_DV]
        shift_base = plane_base(shift, b, h, q_row, stride_statb, stride_stath, 1)
        delta_base = plane_base(delta, b, h, q_row, stride_statb, stride_stath, 1)
        shift_rows = load_stat(shift_base, rows, n_rows, INF, True)
        delta_rows = load_stat(delta_base, rows, n_rows, 0.0, True)
        slope = 0.0
        if HAS_ALIBI:
            slope = tl.load(slopes + b * stride_slopeb + h * stride_slopeh)
        s, capped = scores(
            dot(q_tile, tl.trans(k_tile), PRECISION), i, j, n_rows, n_keys, offset, scale, cap, slope,
            plane_base(bias, b, h, 0, stride_biasb, stride_biash, 0), stride_biasm, stride_biasn,
            False, HAS_SOFTCAP, HAS_ALIBI, True,
        )  # [BLOCK_M, BLOCK_N]  # fmt: skip
        row_lo, row_hi = rows, rows
        if HAS_BOUNDS:
            at = plane_base(bounds, b, h, q_row, stride_boundb, 0, stride_boundm)
            row_lo, row_hi = load_bounds(at, rows, n_rows, stride_boundm)
        keep_base = keep
        if HAS_KEEP:
            keep_base = plane_base(keep, b, h, 0, stride_keepb, stride_keeph, 0)
        allowed = visible(
            i, j, n_rows, n_keys, offset, left, band_right(right, offset, TOP_LEFT),
            row_lo[:, None], row_hi[:, None], keep_base, stride_keepm, stride_keepn,
            BANDED, HAS_BOUNDS, HAS_KEEP,
        )  # fmt: skip
        p = probabilities(tl.where(allowed, s, -INF), shift_rows[:, None], scale, False)
        kept_pairs = p  # unused without dropout
        if HAS_DROPOUT:
            kept_pairs = kept(rng, b * H + h, rows, n_at * BLOCK_N, threshold, BLOCK_M, BLOCK_N, False)
        d_logits, _ = score_gradient(
            p, dot(do_tile, tl.trans(v_tile), PRECISION), delta_rows[:, None], capped, cap, kept_pairs, inverse_keep,
            HAS_SOFTCAP, HAS_DROPOUT,
        )  # fmt: skip
        acc += d_logits
    # store the tile, summed along the axes that the bias does not have
    dbias = plane_base(dbias, bias_b, bias_h, 0, stride_dbiasb, stride_dbiash, 0)
    m_index = tile_m * BLOCK_M + block_rows
    n_index = tile_n * BLOCK_N + block_keys
    if SUM_M:
        acc = tl.where((block_rows == 0)[:, None], tl.sum(acc, 0)[None, :], 0.0)
        m_index = tl.where(block_rows == 0, 0, M)
    if SUM_N:
        acc = tl.where((block_keys == 0)[None, :], tl.sum(acc, 1)[:, None], 0.0)
        n_index = tl.where(block_keys == 0, 0, N)
    inside = (m_index < M)[:, None] & (n_index < N)[None, :]
    ptrs = (
        dbias + m_index.to(tl.int64)[:, None] * stride_dbiasm + n_index.to(tl.int64)[None, :] * stride_dbiasn
    )
    tl.store(ptrs, acc.to(dbias.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["H"])
def slot_sum_kernel(parts, sums, cu_q, H, BLOCK: tl.constexpr):
    """Computes: sums[b, h] = the parts of the slots that sequence b owns, in slot order.

    Grid: one program per (sequence, head).
    Shapes: parts [slots, H], sums [B, H].
    Invariants: slots as ``find_sequence`` numbers them.
    Mirror: none; packed rows only.
    """
    pid = tl.program_id(0)
    b = pid // H
    h = pid % H
    first = tl.load(cu_q + b)
    length = tl.load(cu_q + b + 1) - first
    slot = (first // BLOCK + b).to(tl.int64)
    total = 0.0
    for step in tl.range(0, (length + BLOCK - 1) // BLOCK):
        total += tl.load(parts + (slot + step) * H + h)
    tl.store(sums + pid, total)
