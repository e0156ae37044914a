"""Row statistics for the backward: delta, and the shift that turns scores into P again, on planes padded to whole tiles.

Padding spares the kernels that stream rows every test: past the end the shift is +inf, so P is 0, and delta is 0.
Mirror: ``backends/triton/kernels/statistics.stats_kernel``.
"""

import triton
import triton.language as tl

from ...triton.kernels.pieces import INF, load_rows, plane_base, pointers
from ...triton.kernels.statistics import row_stats


@triton.jit(do_not_specialize=["n_rows", "H", "n_slots"])
def rows_kernel(
    out, dout, lse, dlse, shift, delta,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dlseb, stride_dlseh, stride_dlsem,
    stride_stat, n_rows, H, n_slots,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """Computes: per row delta = rowsum(out * dout) - dlse, and shift = lse in octaves.

    Grid: one program per (tile of BLOCK_M rows, plane), the padding included.
    Shapes: out, dout [rows, DV]; lse, dlse [rows]; shift, delta [planes, stride_stat].
    Invariants: dead rows and rows past the end have shift +inf and delta 0, whatever dlse holds there.
    Mirror: streaming.backward, first step.
    """
    pid = tl.program_id(0)
    plane = pid // n_slots
    b = plane // H
    h = plane % H
    rows = (pid % n_slots) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_DV)
    o_base = plane_base(out, b, h, 0, stride_ob, stride_oh, 0)
    do_base = plane_base(dout, b, h, 0, stride_dob, stride_doh, 0)
    o_ptrs = pointers(o_base, rows, cols, stride_om, stride_od, True)
    do_ptrs = pointers(do_base, rows, cols, stride_dom, stride_dod, True)
    o_tile = load_rows(o_ptrs, rows, n_rows, cols, DV, BLOCK_DV, True)  # [BLOCK_M, BLOCK_DV]
    do_tile = load_rows(do_ptrs, rows, n_rows, cols, DV, BLOCK_DV, True)  # [BLOCK_M, BLOCK_DV]
    lse += plane.to(tl.int64) * n_rows
    if HAS_DLSE:
        dlse = plane_base(dlse, b, h, 0, stride_dlseb, stride_dlseh, 0)
    shift_rows, delta_rows, lse_rows = row_stats(
        o_tile, do_tile, lse, dlse, rows, n_rows, stride_dlsem, HAS_DLSE, True
    )
    stat = plane.to(tl.int64) * stride_stat + rows
    tl.store(shift + stat, shift_rows)
    tl.store(delta + stat, tl.where(lse_rows == -INF, 0.0, delta_rows))
