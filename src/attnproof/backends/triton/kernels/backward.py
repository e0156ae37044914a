"""Backward in two passes and no atomics, so that equal inputs give equal bits.

    P = exp(scores - lse)      dP = dropout(dout v^T)      dS = P * (dP - delta)      delta = rowsum(out * dout) - dlse
    dv = dropout(P)^T dout     dk = scale * dS^T q         dq = scale * dS k

``dkdv_kernel`` owns a tile of keys and streams queries, with every tile transposed; ``dq_kernel`` owns a tile of
queries and streams keys; it runs first and leaves delta and the shift of P for the other. Both rebuild P from lse
(FlashAttention-2, arXiv 2307.08691, section 3.1.2). ``stats_kernel`` makes the statistics alone, where dq is not asked for.

Mirror: ``backends/streaming.py``, backward.
"""

import triton
import triton.language as tl

from .pieces import (
    INF,
    LOG2E,
    band_right,
    cut_tiles,
    distance,
    dot,
    dot_add,
    kept,
    key_interval,
    listed_tile,
    load_bounds,
    load_rows,
    load_streamed,
    locate,
    narrow_interval,
    plane_base,
    pointers,
    query_interval,
    schedule,
    scores,
    softcap_derivative,
    store_rows,
    tile_number,
    visible,
)
from .statistics import load_stat, row_stats


@triton.jit
def probabilities(s, shift, scale, FOLD: tl.constexpr):
    """p from logits and lse, or from folded raw products and lse in octaves; a shift of +inf makes p 0."""
    if FOLD:
        p = tl.exp2(s * (scale * LOG2E) - shift)
    else:
        p = tl.exp2((s - shift) * LOG2E)
    return p


@triton.jit
def score_gradient(
    p, dp, delta, capped, cap, kept_pairs, inverse_keep, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr
):
    """(gradient of the logits, gradient of the scaled products): the second is the first through softcap."""
    if HAS_DROPOUT:
        dp = tl.where(kept_pairs, dp * inverse_keep, 0.0)
    d_logits = p * (dp - delta)
    ds = d_logits
    if HAS_SOFTCAP:
        ds = ds * softcap_derivative(capped, cap)
    return d_logits, ds


@triton.jit(
    do_not_specialize=[
        *("M", "N", "B", "H", "Hkv", "group", "left", "right", "threshold", "n_slots", "n_planes", "swizzle"),
        *("stride_listb", "stride_listh", "list_width"),
    ]
)
def dkdv_kernel(
    q, k, v, dout, shift, delta, dk, dv,
    bias, keep, slopes, bounds, rng, lists,
    cu_q, cu_k,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd,
    stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    stride_statb, stride_stath,
    stride_biasb, stride_biash, stride_biasm, stride_biasn,
    stride_keepb, stride_keeph, stride_keepm, stride_keepn,
    stride_slopeb, stride_slopeh,
    stride_boundb, stride_boundm,
    stride_listb, stride_listh, list_width,
    M, N, B, H, Hkv, group,
    left, right, n_slots, n_planes, swizzle, threshold,
    scale, cap, inverse_keep,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr, BANDED: tl.constexpr, TOP_LEFT: tl.constexpr,
    HAS_KEEP: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    FOLD: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Computes: dk [N, D] and dv [N, DV] of one (sequence, key/value head), summed over the head's query heads.

    Grid: one program per (slot of BLOCK_N keys, key/value head).
    Shapes: every score tile is transposed, [BLOCK_N, BLOCK_M].
    Invariants: after each tile dv = sum dropout(p)^T dout and dk = sum ds^T q over the queries seen.
    Mirror: streaming.backward, keys outer.
    """
    slot, plane = schedule(tl.program_id(0), n_slots, n_planes, swizzle, False)
    b, kv_head, tile, n_keys, k_row, n_rows, q_row = locate(
        slot, plane, cu_k, cu_q, None, N, M, B, Hkv, BLOCK_N, ROWS
    )
    offset = n_keys - n_rows
    right = band_right(right, offset, TOP_LEFT)
    first = tile * BLOCK_N
    keys = first + tl.arange(0, BLOCK_N)
    block_rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    v_cols = tl.arange(0, BLOCK_DV)
    k_base = plane_base(k, b, kv_head, k_row, stride_kb, stride_kh, stride_kn)
    v_base = plane_base(v, b, kv_head, k_row, stride_vb, stride_vh, stride_vn)
    k_ptrs = pointers(k_base, keys, cols, stride_kn, stride_kd, True)
    v_ptrs = pointers(v_base, keys, v_cols, stride_vn, stride_vd, True)
    k_tile = load_rows(k_ptrs, keys, n_keys, cols, D, BLOCK_D, True)  # [BLOCK_N, BLOCK_D]
    v_tile = load_rows(v_ptrs, keys, n_keys, v_cols, DV, BLOCK_DV, True)  # [BLOCK_N, BLOCK_DV]
    if BANDED:
        last = tl.minimum(first + BLOCK_N, n_keys) - 1
        lo, full_lo, full_hi, hi = query_interval(first, last, offset, left, right, n_rows)
    else:
        lo, full_lo, full_hi, hi = 0, 0, n_rows, n_rows
    start, full_start, full_stop, stop = cut_tiles(lo, full_lo, full_hi, hi, n_rows, BLOCK_M, True)
    if HAS_BOUNDS:
        bounds = plane_base(bounds, b, kv_head, q_row, stride_boundb, 0, stride_boundm)
    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in tl.range(0, group):
        h = kv_head * group + member
        q_base, do_base = q, dout
        if not TMA:
            q_base = plane_base(q, b, h, q_row, stride_qb, stride_qh, stride_qm)
            do_base = plane_base(dout, b, h, q_row, stride_dob, stride_doh, stride_dom)
        shift_base = plane_base(shift, b, h, q_row, stride_statb, stride_stath, 1)
        delta_base = plane_base(delta, b, h, q_row, stride_statb, stride_stath, 1)
        bias_base, keep_base, list_row = bias, keep, lists
        if HAS_BIAS:
            bias_base = plane_base(bias, b, h, 0, stride_biasb, stride_biash, 0)
        if HAS_KEEP:
            keep_base = plane_base(keep, b, h, 0, stride_keepb, stride_keeph, 0)
        if HAS_KEEP or HAS_BOUNDS:
            list_row = plane_base(lists, b, h, slot, stride_listb, stride_listh, list_width)
        slope = 0.0
        if HAS_ALIBI:
            slope = tl.load(slopes + b * stride_slopeb + h * stride_slopeh, mask=b < B, other=0.0)
        for EDGE in tl.static_range(2):
            if HAS_KEEP or HAS_BOUNDS:
                steps = tl.load(list_row + EDGE)
            elif EDGE:
                steps = (stop - start) - (full_stop - full_start)
            else:
                steps = full_stop - full_start
            for step in tl.range(0, steps):
                if HAS_KEEP or HAS_BOUNDS:
                    first_row = listed_tile(step, list_row, list_width, EDGE) * BLOCK_M
                else:
                    first_row = tile_number(step, start, full_start, full_stop, EDGE) * BLOCK_M
                rows = first_row + block_rows
                i = rows[None, :]
                j = keys[:, None]
                q_tile = load_streamed(
                    q, q_base, b, h, q_row, first_row, block_rows, n_rows, cols, stride_qm, stride_qd,
                    BLOCK_M, D, BLOCK_D, EDGE, WIDE, TMA, ROWS,
                )  # [BLOCK_M, BLOCK_D]  # fmt: skip
                shift_rows = load_stat(shift_base, rows, n_rows, INF, EDGE)
                s, capped = scores(
                    dot(k_tile, tl.trans(q_tile), PRECISION), i, j, n_rows, n_keys, offset, scale, cap, slope,
                    bias_base, stride_biasm, stride_biasn, FOLD, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS,
                )  # [BLOCK_N, BLOCK_M]  # fmt: skip
                if EDGE:
                    row_lo, row_hi = rows, rows
                    if HAS_BOUNDS:
                        row_lo, row_hi = load_bounds(bounds, rows, n_rows, stride_boundm)
                    allowed = visible(
                        i, j, n_rows, n_keys, offset, left, right, row_lo[None, :], row_hi[None, :],
                        keep_base, stride_keepm, stride_keepn, BANDED, HAS_BOUNDS, HAS_KEEP,
                    )  # fmt: skip
                    s = tl.where(allowed, s, -INF)
                p = probabilities(s, shift_rows[None, :], scale, FOLD)
                do_tile = load_streamed(
                    dout, do_base, b, h, q_row, first_row, block_rows, n_rows, v_cols, stride_dom, stride_dod,
                    BLOCK_M, DV, BLOCK_DV, EDGE, WIDE, TMA, ROWS,
                )  # [BLOCK_M, BLOCK_DV]  # fmt: skip
                kept_pairs = p  # unused without dropout
                p_kept = p
                if HAS_DROPOUT:
                    kept_pairs = kept(rng, b * H + h, rows, first, threshold, BLOCK_M, BLOCK_N, True)
                    p_kept = tl.where(kept_pairs, p, 0.0)
                dv_tile = dot_add(p_kept.to(do_tile.dtype), do_tile, dv_tile, PRECISION)
                dp = dot(v_tile, tl.trans(do_tile), PRECISION)
                delta_rows = load_stat(delta_base, rows, n_rows, 0.0, EDGE)
                _, ds = score_gradient(
                    p,
                    dp,
                    delta_rows[None, :],
                    capped,
                    cap,
                    kept_pairs,
                    inverse_keep,
                    HAS_SOFTCAP,
                    HAS_DROPOUT,
                )
                dk_tile = dot_add(ds.to(q_tile.dtype), q_tile, dk_tile, PRECISION)  # ds in the dtype of q
    if HAS_DROPOUT:
        dv_tile = dv_tile * inverse_keep
    dk = plane_base(dk, b, kv_head, k_row, stride_dkb, stride_dkh, stride_dkn)
    dv = plane_base(dv, b, kv_head, k_row, stride_dvb, stride_dvh, stride_dvn)
    store_rows(dk, dk_tile * scale, keys, n_keys, cols, stride_dkn, stride_dkd, D)
    store_rows(dv, dv_tile, keys, n_keys, v_cols, stride_dvn, stride_dvd, DV)


@triton.jit(
    do_not_specialize=[
        *("M", "N", "B", "H", "group", "left", "right", "threshold", "n_slots", "n_planes", "swizzle"),
        *("stride_listb", "stride_listh", "list_width", "stride_lseb", "stride_lseh"),
    ]
)
def dq_kernel(
    q, k, v, dout, shift, delta, dq, slope_parts,
    out, lse, dlse,
    bias, keep, slopes, bounds, rng, lists,
    cu_q, cu_k,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dqb, stride_dqh, stride_dqm, stride_dqd,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_lseb, stride_lseh, stride_dlseb, stride_dlseh, stride_dlsem,
    stride_statb, stride_stath,
    stride_biasb, stride_biash, stride_biasm, stride_biasn,
    stride_keepb, stride_keeph, stride_keepm, stride_keepn,
    stride_slopeb, stride_slopeh,
    stride_boundb, stride_boundm,
    stride_listb, stride_listh, list_width,
    M, N, B, H, group,
    left, right, n_slots, n_planes, swizzle, threshold,
    scale, cap, inverse_keep,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr, BANDED: tl.constexpr, TOP_LEFT: tl.constexpr,
    HAS_KEEP: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, NEED_SLOPES: tl.constexpr,
    MAKE_STATS: tl.constexpr, HAS_DLSE: tl.constexpr,
    FOLD: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, HEAVY_LAST: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Computes: dq [M, D] of one (sequence, head), and each tile's part of the ALiBi slope gradient.

    Grid: one program per (slot of BLOCK_M queries, head).
    Shapes: slope_parts [slots, planes], the sum of d_logits * -distance over the tile.
    Invariants: after each tile dq = sum ds k over the keys seen.
    Mirror: streaming.backward, queries outer.
    """
    slot, plane = schedule(tl.program_id(0), n_slots, n_planes, swizzle, HEAVY_LAST)
    b, h, tile, n_rows, q_row, n_keys, k_row = locate(
        slot, plane, cu_q, cu_k, None, M, N, B, H, BLOCK_M, ROWS
    )
    kv_head = h // group
    offset = n_keys - n_rows
    right = band_right(right, offset, TOP_LEFT)
    first = tile * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    block_keys = tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_D)
    v_cols = tl.arange(0, BLOCK_DV)
    q_base = plane_base(q, b, h, q_row, stride_qb, stride_qh, stride_qm)
    do_base = plane_base(dout, b, h, q_row, stride_dob, stride_doh, stride_dom)
    k_base, v_base = k, v
    if not TMA:
        k_base = plane_base(k, b, kv_head, k_row, stride_kb, stride_kh, stride_kn)
        v_base = plane_base(v, b, kv_head, k_row, stride_vb, stride_vh, stride_vn)
    q_ptrs = pointers(q_base, rows, cols, stride_qm, stride_qd, True)
    do_ptrs = pointers(do_base, rows, v_cols, stride_dom, stride_dod, True)
    q_tile = load_rows(q_ptrs, rows, n_rows, cols, D, BLOCK_D, True)  # [BLOCK_M, BLOCK_D]
    do_tile = load_rows(do_ptrs, rows, n_rows, v_cols, DV, BLOCK_DV, True)  # [BLOCK_M, BLOCK_DV]
    shift_base = plane_base(shift, b, h, q_row, stride_statb, stride_stath, 1)
    delta_base = plane_base(delta, b, h, q_row, stride_statb, stride_stath, 1)
    if MAKE_STATS:
        # dout is here already: the pass over keys, which runs next, finds its statistics made
        o_ptrs = pointers(
            plane_base(out, b, h, q_row, stride_ob, stride_oh, stride_om),
            rows,
            v_cols,
            stride_om,
            stride_od,
            True,
        )
        o_tile = load_rows(o_ptrs, rows, n_rows, v_cols, DV, BLOCK_DV, True)  # [BLOCK_M, BLOCK_DV]
        lse = plane_base(lse, b, h, q_row, stride_lseb, stride_lseh, 1)
        if HAS_DLSE:
            dlse = plane_base(dlse, b, h, q_row, stride_dlseb, stride_dlseh, stride_dlsem)
        shift_rows, delta_rows, _ = row_stats(
            o_tile, do_tile, lse, dlse, rows, n_rows, stride_dlsem, HAS_DLSE, FOLD
        )
        tl.store(shift_base + rows, shift_rows, mask=rows < n_rows)
        tl.store(delta_base + rows, delta_rows, mask=rows < n_rows)
    else:
        shift_rows = load_stat(shift_base, rows, n_rows, INF, True)
        delta_rows = load_stat(delta_base, rows, n_rows, 0.0, True)
    if BANDED:
        last = tl.minimum(first + BLOCK_M, n_rows) - 1
        lo, full_lo, full_hi, hi = key_interval(first, last, offset, left, right, n_keys)
    else:
        lo, full_lo, full_hi, hi = 0, 0, n_keys, n_keys
    row_lo, row_hi = rows, rows
    if HAS_BOUNDS:
        bounds = plane_base(bounds, b, h, q_row, stride_boundb, 0, stride_boundm)
        row_lo, row_hi = load_bounds(bounds, rows, n_rows, stride_boundm)
        lo, full_lo, full_hi, hi = narrow_interval(lo, full_lo, full_hi, hi, row_lo, row_hi, rows < n_rows)
    start, full_start, full_stop, stop = cut_tiles(lo, full_lo, full_hi, hi, n_keys, BLOCK_N, True)
    if HAS_KEEP:
        keep = plane_base(keep, b, h, 0, stride_keepb, stride_keeph, 0)
        lists = plane_base(lists, b, h, slot, stride_listb, stride_listh, list_width)
    if HAS_BIAS:
        bias = plane_base(bias, b, h, 0, stride_biasb, stride_biash, 0)
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(slopes + b * stride_slopeb + h * stride_slopeh, mask=b < B, other=0.0)
    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    d_slope = tl.zeros([BLOCK_M], tl.float32)
    for EDGE in tl.static_range(2):
        if HAS_KEEP:
            steps = tl.load(lists + EDGE)
        elif EDGE:
            steps = (stop - start) - (full_stop - full_start)
        else:
            steps = full_stop - full_start
        for step in tl.range(0, steps):
            if HAS_KEEP:
                first_key = listed_tile(step, lists, list_width, EDGE) * BLOCK_N
            else:
                first_key = tile_number(step, start, full_start, full_stop, EDGE) * BLOCK_N
            keys = first_key + block_keys
            i = rows[:, None]
            j = keys[None, :]
            k_tile = load_streamed(
                k, k_base, b, kv_head, k_row, first_key, block_keys, n_keys, cols, stride_kn, stride_kd,
                BLOCK_N, D, BLOCK_D, EDGE, WIDE, TMA, ROWS,
            )  # [BLOCK_N, BLOCK_D]  # fmt: skip
            v_tile = load_streamed(
                v, v_base, b, kv_head, k_row, first_key, block_keys, n_keys, v_cols, stride_vn, stride_vd,
                BLOCK_N, DV, BLOCK_DV, EDGE, WIDE, TMA, ROWS,
            )  # [BLOCK_N, BLOCK_DV]  # fmt: skip
            s, capped = scores(
                dot(q_tile, tl.trans(k_tile), PRECISION), i, j, n_rows, n_keys, offset, scale, cap, slope,
                bias, stride_biasm, stride_biasn, FOLD, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS,
            )  # [BLOCK_M, BLOCK_N]  # fmt: skip
            if EDGE:
                allowed = visible(
                    i, j, n_rows, n_keys, offset, left, right, row_lo[:, None], row_hi[:, None],
                    keep, stride_keepm, stride_keepn, BANDED, HAS_BOUNDS, HAS_KEEP,
                )  # fmt: skip
                s = tl.where(allowed, s, -INF)
            p = probabilities(s, shift_rows[:, None], scale, FOLD)
            kept_pairs = p  # unused without dropout
            if HAS_DROPOUT:
                kept_pairs = kept(rng, b * H + h, rows, first_key, threshold, BLOCK_M, BLOCK_N, False)
            dp = dot(do_tile, tl.trans(v_tile), PRECISION)
            d_logits, ds = score_gradient(
                p, dp, delta_rows[:, None], capped, cap, kept_pairs, inverse_keep, HAS_SOFTCAP, HAS_DROPOUT
            )
            if NEED_SLOPES:
                d_slope -= tl.sum(d_logits * distance(i, j, offset), 1)
            dq_tile = dot_add(ds.to(k_tile.dtype), k_tile, dq_tile, PRECISION)  # ds in the dtype of k
    dq = plane_base(dq, b, h, q_row, stride_dqb, stride_dqh, stride_dqm)
    store_rows(dq, dq_tile * scale, rows, n_rows, cols, stride_dqm, stride_dqd, D)
    if NEED_SLOPES:
        tl.store(slope_parts + slot.to(tl.int64) * n_planes + plane, tl.sum(d_slope, 0))
