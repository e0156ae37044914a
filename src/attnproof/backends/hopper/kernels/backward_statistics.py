"""Row statistics that the dq kernel loads, or makes for the pass over keys from tiles that it has anyway."""

from ..compat import aggregate, gl, gluon
from .pieces import INF, LOG2E


@aggregate
class RowStatistics:
    """Where the shift of P and delta are, and what they are made of where this pass makes them.

    out [rows, DV] has unit last stride; lse is contiguous. With ``PLACED`` all pointers are those of the first row already.
    """

    shift: gl.tensor
    delta: gl.tensor
    stride_stat: gl.tensor
    out: gl.tensor
    lse: gl.tensor
    dlse: gl.tensor
    stride_ob: gl.tensor
    stride_oh: gl.tensor
    stride_om: gl.tensor
    stride_dlseb: gl.tensor
    stride_dlseh: gl.tensor
    stride_dlsem: gl.tensor
    n_rows: gl.tensor
    H: gl.tensor
    DV: gl.constexpr
    HAS_DLSE: gl.constexpr
    MAKE: gl.constexpr
    PLACED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, shift, delta, stride_stat, out, lse, dlse, stride_ob, stride_oh, stride_om,
        stride_dlseb, stride_dlseh, stride_dlsem, n_rows, H, DV, HAS_DLSE, MAKE, PLACED,
    ):  # fmt: skip
        self.shift = shift
        self.delta = delta
        self.stride_stat = stride_stat
        self.out = out
        self.lse = lse
        self.dlse = dlse
        self.stride_ob = stride_ob
        self.stride_oh = stride_oh
        self.stride_om = stride_om
        self.stride_dlseb = stride_dlseb
        self.stride_dlseh = stride_dlseh
        self.stride_dlsem = stride_dlsem
        self.n_rows = n_rows
        self.H = H
        self.DV = gl.constexpr(DV)
        self.HAS_DLSE = gl.constexpr(HAS_DLSE)
        self.MAKE = gl.constexpr(MAKE)
        self.PLACED = gl.constexpr(PLACED)

    @gluon.jit
    def start(self, b, h, stride_b, stride_h):
        """Offset of a plane."""
        offset = gl.to_tensor(0).to(gl.int64)
        if not self.PLACED:
            offset = b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h
        return offset

    @gluon.jit
    def load(self, b, h, rows):
        """(shift, delta) of rows; planes are padded, so that no row of a tile is past the end."""
        plane = b * self.H + h
        if self.PLACED:
            plane = plane * 0
        plane = plane.to(gl.int64) * self.stride_stat
        return gl.load(self.shift + plane + rows), gl.load(self.delta + plane + rows)

    @gluon.jit
    def load_out(self, b, h, rows, columns):
        """[rows, columns] of out, zeros past its ends."""
        wide = self.start(b, h, self.stride_ob, self.stride_oh)
        at = self.out + wide + rows.to(gl.int64)[:, None] * self.stride_om + columns[None, :]
        return gl.load(at, mask=(rows < self.n_rows)[:, None] & (columns < self.DV)[None, :], other=0.0)

    @gluon.jit
    def make(self, b, h, rows, out, dout):
        """(shift, delta) of rows from [rows, columns] of out and dout, stored for the pass over keys.

        As ``rows_kernel``: dead rows and rows past the end have shift +inf and delta 0.
        """
        exists = rows < self.n_rows
        delta = gl.sum(out.to(gl.float32) * dout.to(gl.float32), 1)
        if self.HAS_DLSE:
            wide = self.start(b, h, self.stride_dlseb, self.stride_dlseh)
            at = self.dlse + wide + rows.to(gl.int64) * self.stride_dlsem
            delta -= gl.load(at, mask=exists, other=0.0)
        plane = b * self.H + h
        if self.PLACED:
            plane = plane * 0
        lse = gl.load(self.lse + plane.to(gl.int64) * self.n_rows + rows, mask=exists, other=-INF)
        dead = lse == -INF
        shift = gl.where(dead, INF, lse * LOG2E)
        delta = gl.where(dead, 0.0, delta)
        stat = plane.to(gl.int64) * self.stride_stat
        gl.store(self.shift + stat + rows, shift)
        gl.store(self.delta + stat + rows, delta)
        return shift, delta


@gluon.jit
def placed_statistics(
    program, shift, delta, stride_stat, out, lse, dlse, stride_oh, stride_om, stride_dlseh, stride_dlsem, M,
    DV: gl.constexpr, HAS_DLSE: gl.constexpr, MAKE: gl.constexpr,
):  # fmt: skip
    """``RowStatistics`` of packed rows, whose pointers are those of the first row of the program's sequence and head."""
    listed = program.listed
    h = program.h.to(gl.int64)
    row = (listed.q_place - listed.n_rows).to(gl.int64)
    stat = listed.stat + h * stride_stat
    return RowStatistics(
        shift + stat, delta + stat, stride_stat,
        out + (h * stride_oh + row * stride_om), lse + (h * M + row), dlse + (h * stride_dlseh + row * stride_dlsem),
        stride_oh, stride_oh, stride_om, stride_dlseh, stride_dlseh, stride_dlsem,
        listed.n_rows, program.h, DV, HAS_DLSE, MAKE, True,
    )  # fmt: skip
