"""What a tile needs of a device: registers of a thread, shared memory, blocks that fit beside each other.

Where operands live depends on the kind of kernel:

    style        devices               q          k, v                 p          who shares the rows
    mma          sm_70 to sm_89        both       shared, one behind   registers  warps of 16 rows
    specialised  sm_90 (Gluon)         shared     shared, stages deep  registers  warpgroups of 64, a producer
    split        sm_90, dk dv, D > 128 shared     shared, stages deep  both       two warpgroups share 64 rows
    wgmma        sm_90 on, plain       shared     shared, stages deep  registers  warpgroups of 64
    mfma, wmma   AMD, matrix units     registers  shared, one stage    registers  waves of 16 rows
    dot2         AMD without           shared     one shared buffer    shared     all threads of the block

Registers of a thread are accumulators, scores, half-size probabilities, the resident operand, and what compilers
add (`Style` and `Held`, fitted to their reports; tests hold the fit). Up to 64 of them may spill: tiles that measured
fastest on an H200 do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ..dispatch import automatic
from ..errors import ShapeError, expected
from .hardware import KIB, Hardware, dtype_size

Pass = Literal["forward", "dkdv", "dq"]
PASSES: tuple[Pass, ...] = ("forward", "dkdv", "dq")
PAD = 16  # bytes added to each row in shared memory by the dot2 kernels, so that columns do not conflict
BARRIERS = 1 * KIB  # barriers, counters and row statistics in shared memory, rounded up
PRODUCER_REGISTERS = 24  # of each thread of the producer warpgroup, after it gave the others away
SPILLS = 64  # registers of a thread that may spill before a tile is refused
CAPPED = 8  # registers of a thread that a cap may take away so that one more block fits


@dataclass(frozen=True)
class Style:
    """How a kind of kernel spends registers and shared memory; see the table above.

    Attributes:
        overhead: registers of a thread besides what the tile needs.
        factor: registers used per register that the tile needs.
        rows: query (or key) rows that one warp works on at least.
        persistent: one block stays on each unit and takes tile after tile.
        waits: the compiler waits for each product, so only other blocks overlap; `HELD` has its registers.
    """

    name: str
    overhead: int
    factor: float
    rows: int
    outer_in_registers: bool
    persistent: bool
    stages: tuple[int, ...]
    warps: tuple[int, ...]
    waits: bool = False
    outer: tuple[int, ...] = (16, 32, 64, 128, 256)
    inner: tuple[int, ...] = (16, 32, 64, 128, 256)


STYLES: Mapping[str, Style] = {
    "mma": Style("mma", 60, 1.0, 16, True, False, (1, 2, 3), (4, 8)),
    "wgmma": Style("wgmma", 0, 1.0, 16, False, False, (1, 2, 3), (4, 8), waits=True),
    "specialised": Style("specialised", 32, 1.0, 16, False, True, (1, 2, 3), (8, 12), outer=(128, 192)),
    "split": Style("split", 32, 1.0, 8, False, True, (1, 2), (8,), outer=(64,)),
    "mfma": Style("mfma", 160, 1.0, 16, True, False, (1,), (4, 8)),
    "wmma": Style("wmma", 80, 1.0, 16, True, False, (1,), (4, 8)),
    "dot2": Style(
        "dot2", 50, 2.0, 1, False, False, (1,), (2, 4), outer=(16, 32, 64, 128), inner=(16, 32, 64, 128)
    ),
}


@dataclass(frozen=True)
class Held:
    """Registers of a thread of a `waits` kernel besides accumulators, fitted to what Triton's compiler reports.

    Attributes:
        copies: of the scores in the dtype of the operands, beside s (and dp) in fp32.
        columns: per column of the head dim, descriptors and addresses of operands in shared memory.
        fixed: whatever the tile.
        staged: more of a kernel with several stages.
        tall: more of one with several row tiles a warp.
        cut: more where a causal mask needs indices and limits.
    """

    copies: float
    columns: float
    fixed: int = 0
    staged: int = 0
    tall: int = 0
    cut: int = 0


HELD: Mapping[Pass, Held] = {
    "forward": Held(0.5, 0.0, fixed=16, staged=24, tall=32, cut=10),
    "dkdv": Held(1.0, 0.2, fixed=45),
    "dq": Held(1.0, 1 / 3, cut=10),
}


def style_of(hardware: Hardware, job: Job) -> Style:
    """The style of the kernels that a call gets on a device."""
    arch = hardware.arch
    if arch.startswith("sm_"):
        number = int(arch.removeprefix("sm_"))
        if number == 90 and "hopper" in automatic():
            wide = job.kernel == "dkdv" and job.head_dim + job.value_dim > 256
            return STYLES["split" if wide else "specialised"]
        return STYLES["wgmma" if number in (90, 100, 103) else "mma"]
    if not arch.startswith("gfx"):
        raise ShapeError(expected("hardware", "a GPU to plan tiles for", hardware.name))
    if hardware.matrix_float16 is None:
        return STYLES["dot2"]
    return STYLES["mfma" if arch.startswith("gfx9") else "wmma"]


@dataclass(frozen=True, order=True)
class Tile:
    """Block sizes, warps (without a producer) and pipeline stages of one configuration.

    `cap` is the most registers that the compiler may give a thread, 0 for its own choice.
    """

    block_q: int
    block_k: int
    warps: int
    stages: int
    cap: int = 0

    def __str__(self) -> str:
        cap = f", {self.cap} registers" * (self.cap > 0)
        return f"{self.block_q}x{self.block_k}, {self.warps} warps, {self.stages} stage{'s' * (self.stages > 1)}{cap}"


@dataclass(frozen=True)
class Job:
    """What is planned for: a pass of a kernel at a reference size that fills the device."""

    dtype: str = "float16"
    head_dim: int = 64
    value_dim: int = 64
    kernel: Pass = "forward"
    length: int = 4096
    heads: int = 64
    causal: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be planned."""
        if self.kernel not in PASSES:
            raise ShapeError(expected("pass", f"one of {', '.join(PASSES)}", repr(self.kernel)))
        if dtype_size(self.dtype) == 8:
            raise ShapeError(expected("dtype", "float16, bfloat16 or float32 to plan for", repr(self.dtype)))


def outer_inner(job: Job, at: Tile) -> tuple[int, int]:
    """(rows that a block owns, rows that it streams): keys and queries of the dk, dv pass, the other way elsewhere."""
    return (at.block_k, at.block_q) if job.kernel == "dkdv" else (at.block_q, at.block_k)


def shared_memory(job: Job, style: Style, at: Tile) -> dict[str, int]:
    """Bytes of shared memory by buffer."""
    size, d, dv = dtype_size(job.dtype), job.head_dim, job.value_dim
    outer, inner = outer_inner(job, at)
    both = (d + dv) * size
    if style.name == "dot2":
        # q keeps its rows, k and v take turns in one buffer, p becomes an operand by way of shared memory
        row = max(d, dv) * size + PAD
        return {"q": outer * (d * size + PAD), "k or v": inner * row, "p": outer * (inner * size + PAD)}
    owned = outer * (d * size if job.kernel == "forward" else both)
    # the software pipeline of mma kernels keeps one tile in flight less than it has stages
    deep = max(1, at.stages - 1) if style.name == "mma" else at.stages
    streamed = deep * inner * both
    if style.name == "wgmma" and at.stages == 1 and job.kernel == "forward":
        streamed = inner * max(d, dv) * size  # k and v take turns
    registers_only = style.name in ("mfma", "wmma")
    out = {"owned rows": 0 if registers_only else owned, "streamed tiles": streamed}
    if job.kernel != "forward" and (style.outer_in_registers or (style.persistent and job.kernel == "dq")):
        out["ds"] = outer * inner * size  # wgmma takes ds from registers where it is the first operand
    if style.persistent or style.name == "wgmma":
        out["barriers"] = BARRIERS
    if style.name == "split":
        out["p"] = 2 * outer * inner * 4  # from one warpgroup to the other, fp32, two slots
    return {name: count for name, count in out.items() if count}


def register_estimate(hardware: Hardware, job: Job, style: Style, at: Tile) -> int:
    """Registers of one thread: accumulators, scores, probabilities, resident operand, overhead."""
    threads = at.warps * hardware.warp
    outer, inner = outer_inner(job, at)
    d, dv = job.head_dim, job.value_dim
    halves = dtype_size(job.dtype) / 4
    squares = 1 if job.kernel == "forward" else 2  # s, and dp beside it
    accumulators = {"forward": dv, "dkdv": d + dv, "dq": d}[job.kernel]
    resident = 0.0
    if style.outer_in_registers and job.kernel != "dkdv":  # k and v are read again from shared memory
        resident = outer * (d if job.kernel == "forward" else d + dv) * halves
    if style.name == "split":  # each warpgroup has one of dk, dv, and one of s, dp
        return round(style.overhead + (outer * max(d, dv) + outer * inner) / (threads / 2))
    if style.waits:
        return round(_held(job, at, outer * accumulators / threads, outer * inner / threads))
    need = outer * accumulators + squares * outer * inner
    if job.kernel == "forward" and style.name != "dot2":  # dot2 passes p through shared memory
        need += outer * inner * halves
    return round(style.overhead + style.factor * (need + resident) / threads)


def _held(job: Job, at: Tile, accumulators: float, scores: float) -> float:
    """Registers of one thread of a `waits` kernel, of which accumulators and one fp32 score tile are given."""
    held = HELD[job.kernel]
    outer, _ = outer_inner(job, at)
    # two warpgroups on the same 64 rows hold the same scores
    twice = 2 if shares_rows(job, at) else 1
    tiles = (1 if job.kernel == "forward" else 2) + held.copies * dtype_size(job.dtype) / 4
    more = held.staged * (at.stages > 1) + held.tall * (outer > 16 * at.warps) + held.cut * job.causal
    columns = held.columns * max(job.head_dim, job.value_dim)
    return accumulators + twice * tiles * scores + columns + held.fixed + more


def shares_rows(job: Job, at: Tile) -> bool:
    """Whether warpgroups find fewer rows than they need for one each: they compute the same scores then."""
    return outer_inner(job, at)[0] < 16 * at.warps


def threads_of(hardware: Hardware, style: Style, at: Tile) -> int:
    """Threads of a block, the producer warpgroup included."""
    return (at.warps + (4 if style.persistent else 0)) * hardware.warp


def register_limit(hardware: Hardware, style: Style, at: Tile) -> int:
    """Registers that one thread may have: the architecture's limit, or its share of the file."""
    share = int(hardware.registers_per_unit.value * KIB) // (4 * at.warps * hardware.warp)
    if style.persistent:
        # the producer gives its registers away; what is left is handed out in steps of eight
        spare = int(hardware.registers_per_unit.value * KIB) // 4 - PRODUCER_REGISTERS * 4 * hardware.warp
        share = min(spare // (at.warps * hardware.warp) // 8 * 8, 240)
    return min(hardware.registers_per_thread, share, at.cap or share)


def capped(hardware: Hardware, at: Tile, registers: int, resident: int) -> Tile | None:
    """The same tile with just so few registers that one more block fits, if that takes away a few at most."""
    file = int(hardware.registers_per_unit.value * KIB) // 4
    most = file // ((resident + 1) * at.warps * hardware.warp) // 8 * 8
    return replace(at, cap=most) if 0 < registers - most <= CAPPED else None


def resident_blocks(hardware: Hardware, style: Style, at: Tile, shared: int, registers: int) -> int:
    """Blocks that one unit holds at once."""
    threads = threads_of(hardware, style, at)
    consumers = at.warps * hardware.warp
    # what one block cannot have of a unit is what the system keeps of each block
    kept = min(hardware.shared_per_unit.value - hardware.shared_per_block.value, 1)
    by_shared = int(hardware.shared_per_unit.value * KIB) // max(shared + int(kept * KIB), 1)
    step = 8 if hardware.arch.startswith("sm_") else 1  # registers of a thread are handed out in steps
    handed = -(-max(registers, 1) // step) * step
    taken = 4 * (consumers * handed + (threads - consumers) * PRODUCER_REGISTERS)
    by_registers = int(hardware.registers_per_unit.value * KIB) // taken
    most = 1 if style.persistent else 32
    return min(by_shared, by_registers, hardware.threads_per_unit // threads, most)


def refusal(
    hardware: Hardware, job: Job, style: Style, at: Tile, shared: Mapping[str, int], registers: int
) -> str:
    """Why a tile does not fit, or an empty string."""
    outer, _ = outer_inner(job, at)
    side = "keys" if job.kernel == "dkdv" else "queries"
    # two accumulators, dk and dv, give warps a second way to share the work
    rows = style.rows * at.warps // (2 if job.kernel == "dkdv" and not style.persistent else 1)
    if style.waits:
        rows = max(rows, 64)  # of a warpgroup product
    if outer < rows:
        return f"{outer} {side} leave warps idle: {at.warps} warps want {rows}"
    if style.name == "specialised" and outer != 16 * at.warps:
        return f"a warpgroup owns 64 {side}: {outer} want {outer // 16} warps, got {at.warps}"
    limit = int(hardware.shared_per_block.value * KIB)
    total = sum(shared.values())
    if total > limit:
        parts = " + ".join(f"{name} {count / KIB:.0f}" for name, count in shared.items())
        return f"shared memory: {total / KIB:.0f} KiB of {limit / KIB:.0f} ({parts})"
    most = register_limit(hardware, style, at)
    if registers - most > SPILLS:
        return f"registers: about {registers} a thread, {most} at most; it would spill {registers - most}"
    return ""
