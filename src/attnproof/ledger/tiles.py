"""The tile planner: every tile that fits a device, scored by a model; every other with the reason why not.

A tile is `block_q` x `block_k` pairs. What must fit depends on where a kind of kernel keeps its operands:

    style        devices               q          k, v                 p          who shares the rows
    mma          sm_70 to sm_89        both       shared, one behind   registers  warps of 16 rows
    specialised  sm_90 (Gluon)         shared     shared, stages deep  registers  warpgroups of 64, a producer
    split        sm_90, dk dv, D > 128 shared     shared, stages deep  both       two warpgroups share 64 rows
    wgmma        sm_100, plain Triton  shared     shared, stages deep  registers  warpgroups of 64
    mfma, wmma   AMD, matrix units     registers  shared, one stage    registers  waves of 16 rows
    dot2         AMD without           shared     one shared buffer    shared     all threads of the block

Registers of a thread are accumulators, scores, half-size probabilities, the resident operand, and what
compilers add (`Style`, fitted to their reports; tests hold the fit). Up to 64 of them may spill, at a price: the
tiles that measured fastest on an H200 do. Clocks of a tile are

    max(products, softmax, shared) + min(products, softmax) * 0.6 / groups + 120      softmax = exp + vector

because a group's softmax hides behind another group's products: with one group little overlaps, with three
most does. Groups are warpgroups where a kernel lets them run apart, and whole blocks where the compiler waits for
each product. The factor is calibrated on forward kernels measured on one H200 (D = 64, 128, 256); elsewhere it is
extrapolated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from ..errors import ShapeError, expected
from ..masks import causal
from . import accounts, lds
from .documents import onchip_elements, tile
from .hardware import KIB, Hardware, dtype_size
from .traffic import Call, Sweep

Pass = Literal["forward", "dkdv", "dq"]
PASSES: tuple[Pass, ...] = ("forward", "dkdv", "dq")
PAD = 16  # bytes added to each row in shared memory by the dot2 kernels, so that columns do not conflict
BARRIERS = 1 * KIB  # mbarriers and tile counters of a specialised kernel, rounded up
PRODUCER_REGISTERS = 24  # of each thread of the producer warpgroup, after it gave the others away
UNOVERLAPPED = 0.6  # share of the smaller of products and softmax that one group alone cannot hide
SPILLS = 64  # registers of a thread that may spill before a tile is refused
TILE = 120  # clocks of barriers, row reductions and loop control that every tile costs
LATENCY = 700  # clocks from asking memory for a tile until it is there, where nothing hides it


@dataclass(frozen=True)
class Style:
    """How a kind of kernel spends registers and shared memory; see the table above.

    Attributes:
        overhead: registers of a thread besides what the tile needs; `backward_overhead` if it differs there.
        factor: registers used per register that the tile needs.
        rows: query (or key) rows that one warp works on at least.
        persistent: one block stays on each unit and takes tile after tile.
        staged: more registers of a forward kernel with several stages; `tall`: of one with several row tiles a warp.
        half: share of the half-size probabilities that is not put in the place of the scores.
        waits: the compiler waits for each product, so only other blocks overlap.
    """

    name: str
    overhead: int
    factor: float
    rows: int
    outer_in_registers: bool
    persistent: bool
    stages: tuple[int, ...]
    warps: tuple[int, ...]
    backward_overhead: int = 0
    staged: int = 0
    tall: int = 0
    half: float = 1.0
    waits: bool = False
    outer: tuple[int, ...] = (16, 32, 64, 128, 256)
    inner: tuple[int, ...] = (16, 32, 64, 128, 256)


STYLES: Mapping[str, Style] = {
    "mma": Style("mma", 60, 1.0, 16, True, False, (1, 2, 3), (4, 8)),
    "wgmma": Style(
        "wgmma",
        24,
        1.0,
        16,
        False,
        False,
        (1, 2, 3),
        (4, 8),
        backward_overhead=36,
        staged=24,
        tall=32,
        half=0.5,
        waits=True,
    ),
    "specialised": Style("specialised", 32, 1.0, 16, False, True, (1, 2, 3), (8, 12), outer=(128, 192)),
    "split": Style("split", 32, 1.0, 8, False, True, (1, 2), (8,), outer=(64,)),
    "mfma": Style("mfma", 160, 1.0, 16, True, False, (1,), (4, 8)),
    "wmma": Style("wmma", 80, 1.0, 16, True, False, (1,), (4, 8)),
    "dot2": Style(
        "dot2", 50, 2.0, 1, False, False, (1,), (2, 4), outer=(16, 32, 64, 128), inner=(16, 32, 64, 128)
    ),
}


def style_of(hardware: Hardware, job: Job) -> Style:
    """The style of this project's kernels on a device."""
    arch = hardware.arch
    if arch.startswith("sm_"):
        number = int(arch.removeprefix("sm_"))
        if number == 90 and job.kernel == "dkdv" and job.head_dim + job.value_dim > 256:
            return STYLES["split"]
        return STYLES["specialised" if number == 90 else "wgmma" if number in (100, 103) else "mma"]
    if not arch.startswith("gfx"):
        raise ShapeError(expected("hardware", "a GPU to plan tiles for", hardware.name))
    if hardware.matrix_float16 is None:
        return STYLES["dot2"]
    return STYLES["mfma" if arch.startswith("gfx9") else "wmma"]


@dataclass(frozen=True, order=True)
class Tile:
    """Block sizes, warps (without a producer) and pipeline stages of one configuration."""

    block_q: int
    block_k: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return (
            f"{self.block_q}x{self.block_k}, {self.warps} warps, {self.stages} stage{'s' * (self.stages > 1)}"
        )


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


@dataclass(frozen=True)
class Candidate:
    """One tile on one device: what it needs, whether it fits, how long it should take.

    Attributes:
        shared: bytes of shared memory by buffer.
        registers: of one thread, estimated; `spills` of them have no place.
        resident: blocks that a unit holds at once, 0 if none.
        refused: why it does not fit, empty if it does.
        terms: clocks of one tile on one unit by resource.
        seconds: for the job, 0 if refused.
    """

    tile: Tile
    shared: Mapping[str, int]
    registers: int
    spills: int
    resident: int
    refused: str
    terms: Mapping[str, float]
    seconds: float

    @property
    def shared_bytes(self) -> int:
        """All buffers together."""
        return sum(self.shared.values())


@dataclass(frozen=True)
class Plan:
    """All tiles for a job, the fitting ones first and fastest first."""

    hardware: Hardware
    job: Job
    style: Style
    candidates: tuple[Candidate, ...]

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        """Tiles that fit, fastest first."""
        return tuple(c for c in self.candidates if not c.refused)

    @property
    def refused(self) -> tuple[Candidate, ...]:
        """Tiles that do not fit."""
        return tuple(c for c in self.candidates if c.refused)

    @property
    def best(self) -> Candidate | None:
        """The planner's choice."""
        return next(iter(self.fitting), None)

    @property
    def closest(self) -> Candidate | None:
        """Where nothing fits: the tile that spills least; if none has the shared memory, the smallest."""
        near = [c for c in self.refused if c.refused.startswith("registers")]
        if near:
            return min(near, key=lambda c: c.spills)
        large = [c for c in self.refused if c.refused.startswith("shared memory")]
        return min(large, key=lambda c: c.shared_bytes, default=None)

    @property
    def tutorial(self) -> tuple[int, int]:
        """(B_r, B_c) by the tutorial's rule of a quarter of the on-chip memory for each of q, k, v, out."""
        return tile(onchip_elements(self.hardware, self.job.dtype), self.job.head_dim)


def plan(hardware: Hardware, job: Job, style: Style | None = None) -> Plan:
    """Score every tile of `style` (default: the style of this project's kernels on the device)."""
    style = style_of(hardware, job) if style is None else style
    found = [candidate(hardware, job, style, each) for each in _tiles(job, style)]
    found.sort(key=lambda c: (bool(c.refused), c.seconds, c.tile))
    return Plan(hardware, job, style, tuple(found))


def _tiles(job: Job, style: Style) -> Iterator[Tile]:
    """Every combination of the style's sizes; a block owns keys in the dk, dv pass and queries elsewhere."""
    for outer in style.outer:
        for inner in style.inner:
            for warps in style.warps:
                for stages in style.stages:
                    q, k = (inner, outer) if job.kernel == "dkdv" else (outer, inner)
                    yield Tile(q, k, warps, stages)


def candidate(hardware: Hardware, job: Job, style: Style, at: Tile) -> Candidate:
    """Needs, verdict and score of one tile."""
    shared = shared_memory(job, style, at)
    registers = register_estimate(hardware, job, style, at)
    held = min(registers, _register_limit(hardware, style, at))
    resident = _resident(hardware, style, at, sum(shared.values()), held)
    spills = spilled(hardware, style, at, registers)
    refused = _refusal(hardware, job, style, at, shared, registers)
    if not refused and resident == 0:
        refused = f"threads: {_threads(hardware, style, at)} of a block with {registers} registers each"
    if refused:
        return Candidate(at, shared, registers, spills, 0, refused, {}, 0.0)
    terms = _terms(hardware, job, style, at)
    # most of what spills is the same for every tile: stored once, loaded once a tile
    terms["spills"] = 4 * spills * at.warps * hardware.warp / hardware.shared_bytes_per_clock.value
    return Candidate(
        at,
        shared,
        registers,
        spills,
        resident,
        "",
        terms,
        _seconds(hardware, job, at, terms, resident, style),
    )


def _outer_inner(job: Job, at: Tile) -> tuple[int, int]:
    return (at.block_k, at.block_q) if job.kernel == "dkdv" else (at.block_q, at.block_k)


def shared_memory(job: Job, style: Style, at: Tile) -> dict[str, int]:
    """Bytes of shared memory by buffer."""
    size, d, dv = dtype_size(job.dtype), job.head_dim, job.value_dim
    outer, inner = _outer_inner(job, at)
    both = (d + dv) * size
    if style.name == "dot2":
        # q keeps its rows, k and v take turns in one buffer, p goes through shared memory to become an
        # operand
        row = max(d, dv) * size + PAD
        return {"q": outer * (d * size + PAD), "k or v": inner * row, "p": outer * (inner * size + PAD)}
    owned = outer * (d * size if job.kernel == "forward" else both)
    # the software pipeline of mma kernels keeps one tile in flight less than it has stages
    deep = max(1, at.stages - 1) if style.name == "mma" else at.stages
    streamed = deep * inner * both
    if style.name == "wgmma" and at.stages == 1:
        streamed = inner * max(d, dv) * size if job.kernel == "forward" else streamed  # k and v take turns
    out = {
        "owned rows": owned if style.name != "mfma" and style.name != "wmma" else 0,
        "streamed tiles": streamed,
    }
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
    outer, inner = _outer_inner(job, at)
    d, dv = job.head_dim, job.value_dim
    halves = dtype_size(job.dtype) / 4
    squares = 1 if job.kernel == "forward" else 2  # s, and dp beside it
    accumulators = {"forward": dv, "dkdv": d + dv, "dq": d}[job.kernel]
    resident = 0.0
    if style.outer_in_registers and job.kernel != "dkdv":  # k and v are read again from shared memory
        resident = outer * (d if job.kernel == "forward" else d + dv) * halves
    if style.name == "split":  # each warpgroup has one of dk, dv, and one of s, dp
        return round(style.overhead + (outer * max(d, dv) + outer * inner) / (threads / 2))
    need = outer * accumulators + squares * outer * inner
    overhead = style.overhead
    if job.kernel == "forward" and style.name != "dot2":  # dot2 passes p through shared memory
        need += outer * inner * halves * style.half
        overhead += style.staged * (at.stages > 1) + style.tall * (outer > style.rows * at.warps)
    elif job.kernel != "forward" and style.backward_overhead:
        overhead = style.backward_overhead
        # dk and dv read p and ds as first operands, of which registers hold a half-size copy
        need += 2 * outer * inner * halves * (job.kernel == "dkdv")
        overhead += 100 * (
            outer < style.rows * at.warps
        )  # two warpgroups on the same 64 rows hold much of it twice
    return round(overhead + style.factor * (need + resident) / threads)


def _threads(hardware: Hardware, style: Style, at: Tile) -> int:
    """Threads of a block, the producer warpgroup included."""
    return (at.warps + (4 if style.persistent else 0)) * hardware.warp


def _register_limit(hardware: Hardware, style: Style, at: Tile) -> int:
    """Registers that one thread may have: the architecture's limit, or its share of the file."""
    share = int(hardware.registers_per_unit.value * KIB) // (4 * at.warps * hardware.warp)
    if style.persistent:
        # the producer gives its registers away; what is left is handed out in steps of eight
        spare = int(hardware.registers_per_unit.value * KIB) // 4 - PRODUCER_REGISTERS * 4 * hardware.warp
        share = min(spare // (at.warps * hardware.warp) // 8 * 8, 240)
    return min(hardware.registers_per_thread, share)


def _resident(hardware: Hardware, style: Style, at: Tile, shared: int, registers: int) -> int:
    """Blocks that one unit holds at once."""
    threads = _threads(hardware, style, at)
    consumers = at.warps * hardware.warp
    by_shared = int(hardware.shared_per_unit.value * KIB) // max(shared, 1)
    taken = 4 * (consumers * max(registers, 1) + (threads - consumers) * PRODUCER_REGISTERS)
    by_registers = int(hardware.registers_per_unit.value * KIB) // taken
    most = 1 if style.persistent else 32
    return min(by_shared, by_registers, hardware.threads_per_unit // threads, most)


def _refusal(
    hardware: Hardware, job: Job, style: Style, at: Tile, shared: Mapping[str, int], registers: int
) -> str:
    """Why a tile does not fit, or an empty string."""
    outer, _ = _outer_inner(job, at)
    side = "keys" if job.kernel == "dkdv" else "queries"
    # two accumulators, dk and dv, give warps a second way to share the work
    rows = style.rows * at.warps // (2 if job.kernel == "dkdv" and not style.persistent else 1)
    if outer < rows:
        return f"{outer} {side} leave warps idle: {at.warps} warps want {rows}"
    if style.name == "specialised" and outer != 16 * at.warps:
        return f"a warpgroup owns 64 {side}: {outer} want {outer // 16} warps, got {at.warps}"
    limit = int(hardware.shared_per_block.value * KIB)
    total = sum(shared.values())
    if total > limit:
        parts = " + ".join(f"{name} {count / KIB:.0f}" for name, count in shared.items())
        return f"shared memory: {total / KIB:.0f} KiB of {limit / KIB:.0f} ({parts})"
    most = _register_limit(hardware, style, at)
    if registers - most > SPILLS:
        return f"registers: about {registers} a thread, {most} at most; it would spill {registers - most}"
    return ""


def spilled(hardware: Hardware, style: Style, at: Tile, registers: int) -> int:
    """Registers of one thread that have no place; 0 if they all fit."""
    return max(0, registers - _register_limit(hardware, style, at))


def _terms(hardware: Hardware, job: Job, style: Style, at: Tile) -> dict[str, float]:
    """Clocks of one tile on one unit, by resource."""
    pairs, d, dv = at.block_q * at.block_k, job.head_dim, job.value_dim
    outer, inner = _outer_inner(job, at)
    clock = hardware.clock.value * 1e9 * hardware.units.value
    lanes = hardware.vector_float32.value * 1e12 / 2 / clock
    flop = {"forward": d + dv, "dkdv": 2 * (d + dv), "dq": 2 * d + dv}[job.kernel] * 2
    vector = accounts.FORWARD_VECTOR + dv / inner if job.kernel == "forward" else accounts.BACKWARD_VECTOR
    size = dtype_size(job.dtype)
    # every group of 64 rows fetches the streamed tiles for itself, once for each product that needs them
    uses = {"forward": d + dv, "dkdv": 2 * (d + dv), "dq": 2 * d + dv}[job.kernel]
    fetched = max(1, outer / 64) * inner * uses * size
    if not style.outer_in_registers:
        fetched += outer * (d if job.kernel == "forward" else d + dv) * size
    shared = fetched / hardware.shared_bytes_per_clock.value
    if style.name == "dot2":
        shared = _dot2_clocks(at, hardware, d, dv, size)
    return {
        "products": flop * pairs / (hardware.product_rate(job.dtype) / clock),
        "exponentials": pairs / hardware.exp_per_clock.value,
        "vector": vector * pairs / lanes,
        "shared": shared,
    }


def _dot2_clocks(at: Tile, hardware: Hardware, d: int, dv: int, size: int) -> float:
    """Clocks of shared memory for the register-tiled products of a tile, bank conflicts included.

    16 threads lie across the columns, interleaved; a thread owns neighbouring rows, so rows of q and p are
    fetched from addresses `rows * row_bytes` apart, which conflicts when that is a multiple of all banks.
    """
    wave = hardware.warp
    rows = max(1, at.block_q * 16 // (at.warps * wave))
    columns, outputs = max(1, at.block_k // 16), max(1, dv // 16)
    lane = np.arange(wave, dtype=np.int64)

    def clocks(row_bytes: int, own_rows: bool) -> int:
        where = (lane // 16) * rows if own_rows else lane % 16
        return lds.conflicts(where * row_bytes, 16).clocks

    q, k, p = d * size + PAD, d * size + PAD, at.block_k * size + PAD
    steps_s, steps_out = d * size / 16, at.block_k * size / 16
    s = steps_s * (rows * clocks(q, True) + columns * clocks(k, False))
    # v is interleaved by pairs of keys, its rows are read side by side
    out = steps_out * (rows * clocks(p, True) + outputs * lds.conflicts(lds.contiguous(16, wave), 16).clocks)
    return at.warps * (s + out)


def _seconds(
    hardware: Hardware, job: Job, at: Tile, terms: Mapping[str, float], resident: int, style: Style
) -> float:
    """Time of the job: the tiles visited, handed out in rounds, and what starts and ends a block."""
    tiles, blocks, requests = _counted(job, at.block_q, at.block_k)
    softmax = terms["exponentials"] + terms["vector"]
    if hardware.matrix_unit(job.dtype) is None:
        # one vector unit does all of it, and shared memory is what can hide behind it
        busy, hidden = terms["products"] + softmax, terms["shared"]
        per_tile = max(busy, hidden) + 0.45 * min(busy, hidden)
    else:
        together = resident if style.waits else resident * at.warps / 4
        groups = min(max(together, 1.0), 3.0)
        longest = max(terms["products"], softmax)
        per_tile = max(longest, terms["shared"]) + min(terms["products"], softmax) * UNOVERLAPPED / groups
    per_tile += TILE + terms["spills"]
    if at.stages * resident < 2:
        per_tile += LATENCY  # nothing else is in flight while a tile comes in
    slots = int(hardware.units.value) * resident
    rounds = -(-blocks // slots)
    # rounds matter only while they are few: with many, early finishers take what is left
    spread = rounds * slots / blocks if rounds < 8 else 1.0
    clocks = (
        (tiles * per_tile + blocks * 2 * LATENCY / min(resident * at.stages, 3))
        / hardware.units.value
        * spread
    )
    return max(clocks / (hardware.clock.value * 1e9), requests / hardware.port_bandwidth)


@lru_cache(maxsize=4096)
def _counted(job: Job, block_q: int, block_k: int) -> tuple[int, int, int]:
    """(tiles, blocks, requested bytes) of the job's kernel."""
    call = Call.dense(
        job.length,
        heads=job.heads,
        head_dim=job.head_dim,
        value_dim=job.value_dim,
        dtype=job.dtype,
        mask=causal() if job.causal else None,
    )
    sweep = _sweep(job, call, block_q, block_k)
    requests = sum(entry.read + entry.written for entry in sweep.entries())
    return sweep.executed_pairs // (block_q * block_k), sweep.blocks, requests


def _sweep(job: Job, call: Call, block_q: int, block_k: int) -> Sweep:
    if job.kernel == "forward":
        account = accounts.forward(call, block_q, block_k)
    elif job.kernel == "dkdv":
        account = accounts.backward(call, block_q, block_k)
    else:
        account = accounts.backward(call, block_k, block_q)
    name = {"forward": "forward", "dkdv": "dk, dv", "dq": "dq"}[job.kernel]
    return next(kernel for kernel in account.kernels if isinstance(kernel, Sweep) and kernel.name == name)
