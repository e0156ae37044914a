"""Forward: out = softmax(scores) @ v and its lse, one tile of queries per program, keys streamed past it.

FlashAttention-2 (arXiv 2307.08691, section 3.1): the running row maximum ``m``, row sum ``l`` and accumulator are kept
for a tile of queries; out is divided by ``l`` once. Mirror: ``backends/streaming.py``, queries outer.
"""

import triton
import triton.language as tl

from .pieces import (
    INF,
    LN2,
    LOG2E,
    band_right,
    cut_tiles,
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
    page_pointers,
    plane_base,
    pointers,
    schedule,
    scores,
    store_rows,
    tile_number,
    visible,
)


@triton.jit
def online_softmax(s, m, unit, EXACT: tl.constexpr):
    """p, rescale factor and new maximum for one tile of scores in units of ``unit`` octaves.

    ``(s - m) * unit`` is exact where s equals m, however large both are; the fused ``s * unit - m * unit`` saves one
    operation per pair but is off by the rounding of ``m * unit``.
    """
    m_new = tl.maximum(m, tl.max(s, 1))
    # a row that has seen no key yet must not meet -inf - -inf
    point = tl.where(m_new == -INF, 0.0, m_new)
    if EXACT:
        p = tl.exp2((s - point[:, None]) * unit)
    else:
        p = tl.exp2(s * unit - (point * unit)[:, None])
    alpha = tl.exp2((m - point) * unit)
    return p, alpha, m_new


@triton.jit
def finish(acc, m, l, lift, sink, HAS_SINK: tl.constexpr):  # noqa: E741
    """(normalised rows, natural lse) from the running state; ``lift`` turns m into natural units.

    A dead row has l = 0: its output is 0 and its lse -inf, or the sink's logit.
    """
    m = m * lift
    if HAS_SINK:
        top = tl.maximum(m, sink)
        point = tl.where(top == -INF, 0.0, top)
        shrink = tl.exp2((m - point) * LOG2E)
        l = l * shrink + tl.exp2((sink - point) * LOG2E)  # noqa: E741
        acc = acc * shrink[:, None]
        m = top
    dead = l == 0.0
    total = tl.where(dead, 1.0, l)
    out = acc / total[:, None]
    lse = tl.where(dead, -INF, m + tl.log2(total) * LN2)
    return out, lse


@triton.jit
def load_keys(
    x, base, table, b, h, row, first, rows, n_keys, cols, stride_page, stride_row, stride_col,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, CHECK: tl.constexpr, WIDE: tl.constexpr,
    TMA: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """[BLOCK, PADDED] keys or values from ``first`` on; ``base`` is a plane, or the head of a page pool."""
    if ROWS == "paged" and PAGE % BLOCK == 0:
        # the tile lies in one page
        page = tl.load(table + first // PAGE).to(tl.int64)
        start = base + page * stride_page + (first % PAGE).to(tl.int64) * stride_row
        ptrs = pointers(start, rows, cols, stride_row, stride_col, WIDE)
        tile = load_rows(ptrs, first + rows, n_keys, cols, WIDTH, PADDED, CHECK)
    elif ROWS == "paged" and BLOCK % PAGE == 0 and BLOCK // PAGE <= 8:
        # a few pages: numbers read one by one keep out of the software pipeline, which would spend a stage on them
        page_of = tl.zeros([BLOCK], tl.int64)
        for at in tl.static_range(BLOCK // PAGE):
            here = first + at * PAGE
            page = tl.load(table + here // PAGE, mask=here < n_keys, other=0).to(tl.int64)
            page_of = tl.where(rows // PAGE == at, page, page_of)
        start = base + page_of * stride_page + (rows % PAGE).to(tl.int64) * stride_row
        ptrs = start[:, None] + cols.to(tl.int64)[None, :] * stride_col
        tile = load_rows(ptrs, first + rows, n_keys, cols, WIDTH, PADDED, CHECK)
    elif ROWS == "paged":
        ptrs = page_pointers(
            base, table, first + rows, n_keys, cols, stride_page, stride_row, stride_col, PAGE
        )
        tile = load_rows(ptrs, first + rows, n_keys, cols, WIDTH, PADDED, CHECK)
    else:
        tile = load_streamed(
            x, base, b, h, row, first, rows, n_keys, cols, stride_row, stride_col,
            BLOCK, WIDTH, PADDED, CHECK, WIDE, TMA, ROWS,
        )  # fmt: skip
    return tile


@triton.jit(
    do_not_specialize=[
        *("M", "N", "B", "H", "group", "left", "right", "threshold", "n_slots", "n_planes", "swizzle"),
        *("stride_listb", "stride_listh", "list_width", "stride_lseb", "stride_lseh"),
    ]
)
def forward_kernel(
    q, k, v, out, lse,
    bias, keep, slopes, sink, bounds, rng, lists,
    cu_q, cu_k, lengths, table,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_lseb, stride_lseh,
    stride_biasb, stride_biash, stride_biasm, stride_biasn,
    stride_keepb, stride_keeph, stride_keepm, stride_keepn,
    stride_slopeb, stride_slopeh, stride_sink,
    stride_boundb, stride_boundm,
    stride_listb, stride_listh, list_width,
    stride_table,
    M, N, B, H, group,
    left, right, n_slots, n_planes, swizzle, threshold,
    scale, cap, inverse_keep,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr, PAGE: tl.constexpr, BANDED: tl.constexpr, TOP_LEFT: tl.constexpr,
    HAS_KEEP: tl.constexpr, HAS_BOUNDS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINK: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    FOLD: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    HEAVY_LAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Computes: out [M, DV] and lse [M] of one (sequence, head).

    Grid: one program per (slot of BLOCK_M queries, head), see ``schedule`` and ``locate``.
    Shapes: as ``problem.Tensors``, M and N token counts if packed; with TMA, k and v are 4-D tensor descriptors.
    Invariants: after each tile acc = sum p v and l = sum p over the keys seen, both relative to m; m = -inf before any.
    Mirror: streaming.forward.
    """
    slot, plane = schedule(tl.program_id(0), n_slots, n_planes, swizzle, HEAVY_LAST)
    b, h, tile, n_rows, q_row, n_keys, k_row = locate(
        slot, plane, cu_q, cu_k, lengths, M, N, B, H, BLOCK_M, ROWS
    )
    kv_head = h // group
    offset = n_keys - n_rows
    right = band_right(right, offset, TOP_LEFT)
    first = tile * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_D)
    v_cols = tl.arange(0, BLOCK_DV)
    k_base, v_base = k, v
    q_base = plane_base(q, b, h, q_row, stride_qb, stride_qh, stride_qm)
    q_ptrs = pointers(q_base, rows, cols, stride_qm, stride_qd, True)
    q_tile = load_rows(q_ptrs, rows, n_rows, cols, D, BLOCK_D, True)  # [BLOCK_M, BLOCK_D]
    if ROWS == "paged":
        # the leading axis of a pool is the page, found through the table
        k_base = plane_base(k, b, kv_head, 0, 0, stride_kh, 0)
        v_base = plane_base(v, b, kv_head, 0, 0, stride_vh, 0)
        table += b.to(tl.int64) * stride_table
    elif not TMA:
        k_base = plane_base(k, b, kv_head, k_row, stride_kb, stride_kh, stride_kn)
        v_base = plane_base(v, b, kv_head, k_row, stride_vb, stride_vh, stride_vn)
    # which keys this tile may see
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
    if FOLD:
        # scores stay raw products and the scale enters the exponent
        unit = scale * LOG2E
        lift = scale
    else:
        unit = LOG2E
        lift = 1.0
    m = tl.full([BLOCK_M], -INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # full tiles first, untested, then the edges
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
            i = rows[:, None]
            j = (first_key + keys)[None, :]
            k_tile = load_keys(
                k, k_base, table, b, kv_head, k_row, first_key, keys, n_keys, cols, stride_kb, stride_kn, stride_kd,
                BLOCK_N, D, BLOCK_D, EDGE, WIDE, TMA, ROWS, PAGE,
            )  # [BLOCK_N, BLOCK_D]  # fmt: skip
            s, _ = scores(
                dot(q_tile, tl.trans(k_tile), PRECISION), i, j, n_rows, n_keys, offset, scale, cap, slope,
                bias, stride_biasm, stride_biasn, FOLD, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS,
            )  # [BLOCK_M, BLOCK_N]  # fmt: skip
            if EDGE:
                allowed = visible(
                    i, j, n_rows, n_keys, offset, left, right, row_lo[:, None], row_hi[:, None],
                    keep, stride_keepm, stride_keepn, BANDED, HAS_BOUNDS, HAS_KEEP,
                )  # fmt: skip
                s = tl.where(allowed, s, -INF)
            p, alpha, m = online_softmax(s, m, unit, EXACT)
            l = l * alpha + tl.sum(p, 1)  # noqa: E741
            acc = acc * alpha[:, None]
            if HAS_DROPOUT:
                p = tl.where(
                    kept(rng, b * H + h, rows, first_key, threshold, BLOCK_M, BLOCK_N, False), p, 0.0
                )
            v_tile = load_keys(
                v, v_base, table, b, kv_head, k_row, first_key, keys, n_keys, v_cols, stride_vb, stride_vn, stride_vd,
                BLOCK_N, DV, BLOCK_DV, EDGE, WIDE, TMA, ROWS, PAGE,
            )  # [BLOCK_N, BLOCK_DV]  # fmt: skip
            acc = dot_add(p.to(v_tile.dtype), v_tile, acc, PRECISION)  # p in the dtype of v
    sink_logit = 0.0
    if HAS_SINK:
        # tokens past the last packed sequence have no sink either
        sink_logit = tl.load(sink + h * stride_sink, mask=b < B, other=-INF).to(tl.float32)
    out_tile, lse_tile = finish(acc, m, l, lift, sink_logit, HAS_SINK)
    if HAS_DROPOUT:
        out_tile = out_tile * inverse_keep
    out = plane_base(out, b, h, q_row, stride_ob, stride_oh, stride_om)
    store_rows(out, out_tile, rows, n_rows, v_cols, stride_om, stride_od, DV)
    lse = plane_base(lse, b, h, q_row, stride_lseb, stride_lseh, 1)
    tl.store(lse + rows, lse_tile, mask=rows < n_rows)
