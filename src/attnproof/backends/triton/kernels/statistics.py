"""Row statistics of the backward: delta = rowsum(out * dout) - dlse, and the shift that turns scores into P again.

The pass over queries makes them on its way (``dq_kernel``); ``stats_kernel`` makes them alone where that pass does not run,
and the sink's gradient with them. Mirror: ``backends/streaming.py``, first step of backward.
"""

import triton
import triton.language as tl

from .pieces import (
    INF,
    LOG2E,
    load_rows,
    plane_base,
    pointers,
)


@triton.jit
def load_stat(stat, rows, n_rows, other, CHECK: tl.constexpr):
    """One number per row, ``other`` past the end."""
    if CHECK:
        value = tl.load(stat + rows, mask=rows < n_rows, other=other)
    else:
        value = tl.load(stat + rows)
    return value


@triton.jit
def row_stats(
    o_tile, do_tile, lse, dlse, rows, n_rows, stride_dlse, HAS_DLSE: tl.constexpr, FOLD: tl.constexpr
):
    """(shift, delta, lse) of some rows: delta = rowsum(out * dout) - dlse, shift = lse (in octaves if ``FOLD``), +inf for
    rows that are dead or past the end, which makes their p 0; their delta is 0 whatever was handed back for them.
    """
    delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse + rows.to(tl.int64) * stride_dlse, mask=rows < n_rows, other=0.0)
    lse_rows = tl.load(lse + rows, mask=rows < n_rows, other=-INF)
    shift = lse_rows
    if FOLD:
        shift = lse_rows * LOG2E
    dead = lse_rows == -INF
    return tl.where(dead, INF, shift), tl.where(dead, 0.0, delta), lse_rows


@triton.jit(do_not_specialize=["n_rows", "H", "n_slots", "stride_lseb", "stride_lseh"])
def stats_kernel(
    out, dout, lse, dlse, shift, delta, sink, sink_parts,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dlseb, stride_dlseh, stride_dlsem,
    stride_lseb, stride_lseh, stride_statb, stride_stath, stride_sink,
    n_rows, H, n_slots,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_SINK: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Computes: per row delta = rowsum(out * dout) - dlse and the shift of p, and each tile's part of dsink.

    Grid: one program per (tile of BLOCK_M rows, plane); packed rows are one plane per head, all tokens.
    Shapes: out, dout [rows, DV]; lse, dlse, shift, delta [rows]; sink_parts [planes, slots].
    Invariants: shift = lse (in octaves if FOLD), +inf for dead rows; sink_parts = -sum exp(sink - lse) * delta.
    Mirror: streaming.backward, first step.
    """
    pid = tl.program_id(0)
    slot = pid % n_slots
    plane = pid // n_slots
    b = plane // H
    h = plane % H
    rows = slot * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_DV)
    o_ptrs = pointers(
        plane_base(out, b, h, 0, stride_ob, stride_oh, 0), rows, cols, stride_om, stride_od, True
    )
    do_ptrs = pointers(
        plane_base(dout, b, h, 0, stride_dob, stride_doh, 0), rows, cols, stride_dom, stride_dod, True
    )
    o_tile = load_rows(o_ptrs, rows, n_rows, cols, DV, BLOCK_DV, True)
    do_tile = load_rows(do_ptrs, rows, n_rows, cols, DV, BLOCK_DV, True)
    lse = plane_base(lse, b, h, 0, stride_lseb, stride_lseh, 0)
    if HAS_DLSE:
        dlse = plane_base(dlse, b, h, 0, stride_dlseb, stride_dlseh, 0)
    shift_rows, delta_rows, lse_rows = row_stats(
        o_tile, do_tile, lse, dlse, rows, n_rows, stride_dlsem, HAS_DLSE, FOLD
    )
    stat = b.to(tl.int64) * stride_statb + h.to(tl.int64) * stride_stath + rows
    tl.store(shift + stat, shift_rows, mask=rows < n_rows)
    tl.store(delta + stat, delta_rows, mask=rows < n_rows)
    if HAS_SINK:
        logit = tl.load(sink + h * stride_sink).to(tl.float32)
        dead = lse_rows == -INF
        weight = tl.exp2((logit - tl.where(dead, 0.0, lse_rows)) * LOG2E)
        tl.store(sink_parts + pid, -tl.sum(tl.where(dead, 0.0, weight * delta_rows), 0))
