"""Decode: few queries against a long cache, split along the keys so that every multiprocessor reads some of them.

``decode_kernel`` stacks the queries of all heads that share a key/value head into one tile, so keys are read once per
group; ``combine_kernel`` merges the parts by their lse (``online_softmax.merge``); ``append_kernel`` writes new tokens
behind the valid ones before. Lengths are read on the device, so a captured graph follows them at replay.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .forward import finish, load_keys, online_softmax
from .pieces import (
    INF,
    LN2,
    LOG2E,
    band_right,
    cut_tiles,
    dot,
    dot_add,
    key_interval,
    plane_base,
    scores,
    tile_number,
    visible,
)


@triton.jit(do_not_specialize=["M", "B", "H", "Hkv", "left", "right", "stride_lseb", "stride_lseh"])
def decode_kernel(
    q, k, v, out, lse, parts,
    slopes, sink, lengths, table,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_lseb, stride_lseh,
    stride_slopeb, stride_slopeh, stride_sink, stride_table,
    M, B, H, Hkv, left, right,
    scale, cap,
    GROUP: tl.constexpr, SPLITS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr, PAGE: tl.constexpr, BANDED: tl.constexpr, TOP_LEFT: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINK: tl.constexpr,
    FOLD: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr,
    LEADS: tl.constexpr,
):  # fmt: skip
    """Computes: out and lse of one part of the keys for all queries of one key/value head.

    Grid: one program per (sequence, key/value head, part); with one part the result is final.
    Shapes: a tile row is (member of the group, query), member-major; parts fp32 [B, H, M, SPLITS, DV], then their lse
    [B, H, M, SPLITS].
    Invariants: as forward_kernel; a part without keys has out 0 and lse -inf.
    Mirror: streaming.forward and online_softmax.merge.
    """
    if LEADS:
        gdc_launch_dependents()  # combine_kernel may take its place already; it waits for all of this
    pid = tl.program_id(0)
    part = pid % SPLITS
    b = pid // SPLITS // Hkv
    kv_head = pid // SPLITS % Hkv
    n_keys = tl.load(lengths + b)
    offset = n_keys - M
    right = band_right(right, offset, TOP_LEFT)
    stacked = tl.arange(0, BLOCK_M)
    real = stacked < GROUP * M
    heads = kv_head * GROUP + stacked // M
    rows = stacked % M
    keys = tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_D)
    v_cols = tl.arange(0, BLOCK_DV)
    q_rows = heads.to(tl.int64) * stride_qh + rows.to(tl.int64) * stride_qm
    q_ptrs = q + b.to(tl.int64) * stride_qb + q_rows[:, None] + cols.to(tl.int64)[None, :] * stride_qd
    q_tile = tl.load(q_ptrs, mask=real[:, None] & (cols < D)[None, :], other=0.0)  # [BLOCK_M, BLOCK_D]
    k_base, v_base = k, v
    if ROWS == "paged":
        k_base = plane_base(k, b, kv_head, 0, 0, stride_kh, 0)
        v_base = plane_base(v, b, kv_head, 0, 0, stride_vh, 0)
        table += b.to(tl.int64) * stride_table
    elif not TMA:
        k_base = plane_base(k, b, kv_head, 0, stride_kb, stride_kh, 0)
        v_base = plane_base(v, b, kv_head, 0, stride_vb, stride_vh, 0)
    if BANDED:
        lo, full_lo, full_hi, hi = key_interval(0, M - 1, offset, left, right, n_keys)
    else:
        lo, full_lo, full_hi, hi = 0, 0, n_keys, n_keys
    start, full_start, full_stop, stop = cut_tiles(lo, full_lo, full_hi, hi, n_keys, BLOCK_N, True)
    share = (stop - start + SPLITS - 1) // SPLITS
    start = tl.minimum(start + part * share, stop)
    stop = tl.minimum(start + share, stop)
    full_start = tl.minimum(tl.maximum(full_start, start), stop)
    full_stop = tl.minimum(tl.maximum(full_stop, full_start), stop)
    slope = 0.0
    if HAS_ALIBI:
        at = slopes + b * stride_slopeb + heads * stride_slopeh
        slope = tl.load(at, mask=real, other=0.0)[:, None]
    if FOLD:
        unit = scale * LOG2E
        lift = scale
    else:
        unit = LOG2E
        lift = 1.0
    m = tl.full([BLOCK_M], -INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for EDGE in tl.static_range(2):
        if EDGE:
            steps = (stop - start) - (full_stop - full_start)
        else:
            steps = full_stop - full_start
        for step in tl.range(0, steps):
            first_key = tile_number(step, start, full_start, full_stop, EDGE) * BLOCK_N
            i = rows[:, None]
            j = (first_key + keys)[None, :]
            k_tile = load_keys(
                k, k_base, table, b, kv_head, 0, first_key, keys, n_keys, cols, stride_kb, stride_kn, stride_kd,
                BLOCK_N, D, BLOCK_D, EDGE, WIDE, TMA, ROWS, PAGE,
            )  # [BLOCK_N, BLOCK_D]  # fmt: skip
            v_tile = load_keys(
                v, v_base, table, b, kv_head, 0, first_key, keys, n_keys, v_cols, stride_vb, stride_vn, stride_vd,
                BLOCK_N, DV, BLOCK_DV, EDGE, WIDE, TMA, ROWS, PAGE,
            )  # [BLOCK_N, BLOCK_DV]  # fmt: skip
            s, _ = scores(
                dot(q_tile, tl.trans(k_tile), PRECISION), i, j, M, n_keys, offset, scale, cap, slope,
                None, 0, 0, FOLD, HAS_SOFTCAP, HAS_ALIBI, False,
            )  # [BLOCK_M, BLOCK_N]  # fmt: skip
            if EDGE:
                allowed = visible(
                    i, j, M, n_keys, offset, left, right, 0, 0, None, 0, 0, BANDED, False, False
                )
                s = tl.where(allowed, s, -INF)
            p, alpha, m = online_softmax(s, m, unit, EXACT)
            l = l * alpha + tl.sum(p, 1)  # noqa: E741
            acc = dot_add(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], PRECISION)  # p in the dtype of v
    inside = real[:, None] & (v_cols < DV)[None, :]
    if SPLITS == 1:
        sink_logits = m
        if HAS_SINK:
            sink_logits = tl.load(sink + heads * stride_sink, mask=real, other=-INF).to(tl.float32)
        out_tile, lse_rows = finish(acc, m, l, lift, sink_logits, HAS_SINK)
        o_rows = heads.to(tl.int64) * stride_oh + rows.to(tl.int64) * stride_om
        o_ptrs = out + b.to(tl.int64) * stride_ob + o_rows[:, None] + v_cols.to(tl.int64)[None, :] * stride_od
        tl.store(o_ptrs, out_tile.to(out.dtype.element_ty), mask=inside)
        tl.store(lse + b * stride_lseb + heads * stride_lseh + rows, lse_rows, mask=real)
    else:
        out_tile, lse_rows = finish(acc, m, l, lift, m, False)
        at = ((b.to(tl.int64) * H + heads) * M + rows) * SPLITS + part
        tl.store(parts + at[:, None] * DV + v_cols[None, :], out_tile, mask=inside)
        part_lse = parts + B.to(tl.int64) * H * M * SPLITS * DV
        tl.store(part_lse + at, lse_rows, mask=real)


@triton.jit(do_not_specialize=["M", "B", "H", "stride_lseb", "stride_lseh"])
def combine_kernel(
    parts, out, lse, sink,
    stride_ob, stride_oh, stride_om, stride_od, stride_lseb, stride_lseh, stride_sink,
    M, B, H,
    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_SINK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Computes: out and lse of one query from its parts, out = sum w_s out_s with w_s = exp(lse_s - lse).

    Grid: one program per query and head.
    Shapes: parts as decode_kernel leaves them.
    Invariants: an empty part has weight 0; if all are empty the row is dead.
    Mirror: online_softmax.merge.
    """
    pid = tl.program_id(0)
    i = pid % M
    h = pid // M % H
    b = pid // M // H
    all_splits = tl.arange(0, BLOCK_S)
    v_cols = tl.arange(0, BLOCK_DV)
    if EARLY:
        gdc_wait()
    row = parts + B.to(tl.int64) * H * M * SPLITS * DV + pid.to(tl.int64) * SPLITS
    parts += pid.to(tl.int64) * SPLITS * DV
    lse_parts = tl.load(row + all_splits, mask=all_splits < SPLITS, other=-INF)
    top = tl.max(lse_parts, 0)
    if HAS_SINK:
        logit = tl.load(sink + h * stride_sink).to(tl.float32)
        top = tl.maximum(top, logit)
    point = tl.where(top == -INF, 0.0, top)
    weights = tl.exp2((lse_parts - point) * LOG2E)
    total = tl.sum(weights, 0)
    if HAS_SINK:
        total += tl.exp2((logit - point) * LOG2E)
    mask = (all_splits < SPLITS)[:, None] & (v_cols < DV)[None, :]
    tiles = tl.load(parts + all_splits[:, None] * DV + v_cols[None, :], mask=mask, other=0.0)
    dead = total == 0.0
    total = tl.where(dead, 1.0, total)
    acc = tl.sum(tiles * weights[:, None], 0) / total
    ptrs = plane_base(out, b, h, i, stride_ob, stride_oh, stride_om) + v_cols.to(tl.int64) * stride_od
    tl.store(ptrs, acc.to(out.dtype.element_ty), mask=v_cols < DV)
    tl.store(lse + b * stride_lseb + h * stride_lseh + i, tl.where(dead, -INF, point + tl.log2(total) * LN2))


@triton.jit(do_not_specialize=["L", "Hkv", "capacity", "n_pages"])
def append_kernel(
    cache, new, lengths, table,
    stride_cb, stride_ch, stride_cn, stride_cd,
    stride_nb, stride_nh, stride_nl, stride_nd, stride_table,
    L, Hkv, capacity, n_pages,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Computes: cache[b, h, lengths[b] + t] = new[b, h, t]; tokens past the capacity are not written.

    Grid: one program per (sequence, key/value head, new token).
    Shapes: cache [B, Hkv, capacity, WIDTH], or pages [P, Hkv, PAGE, WIDTH] with PAGE > 0.
    Invariants: no other row of the cache is touched.
    Mirror: cache.append.
    """
    pid = tl.program_id(0)
    t = pid % L
    h = pid // L % Hkv
    b = (pid // L // Hkv).to(tl.int64)
    row = tl.load(lengths + b) + t
    fits = (row >= 0) & (row < capacity)
    lead = b
    if PAGE > 0:
        lead = tl.load(table + b * stride_table + row // PAGE, mask=fits, other=-1).to(tl.int64)
        fits = fits & (lead >= 0) & (lead < n_pages)
        row = row % PAGE
    cols = tl.arange(0, BLOCK)
    values = tl.load(
        new + b * stride_nb + h.to(tl.int64) * stride_nh + t.to(tl.int64) * stride_nl + cols * stride_nd,
        mask=cols < WIDTH,
        other=0.0,
    )
    at = lead * stride_cb + h.to(tl.int64) * stride_ch + row.to(tl.int64) * stride_cn
    tl.store(cache + at + cols * stride_cd, values, mask=(cols < WIDTH) & fits)
