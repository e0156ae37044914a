"""The tile planner: every tile that fits a device, scored by a model; every other with the reason why not.

A tile is `block_q` x `block_k` pairs. `resources` says what one needs. Where warpgroups run apart, clocks of a tile are

    max(products, softmax, shared) + min(products, softmax) * 0.6 / groups + 120      softmax = exp + vector

because a group's softmax hides behind another group's products: with one group little overlaps, with three most
does. The factor is calibrated on forward kernels measured on one H200 (D = 64, 128, 256); elsewhere it is
extrapolated. What spills is stored once and loaded once a tile.

Where the compiler waits for each product (plain Triton with warpgroup products), a program is always in one place:
it has products in the matrix unit, softmax in the vector unit, or waits. Programs that share a multiprocessor queue
for the first two and wait beside each other: a closed queueing network, solved by mean value analysis. One program
needs for one tile

    products    FLOP at the peak or operands from shared memory, whichever is longer, and FILL for each product
    softmax     exp + vector, as above; in the dq pass exp hides behind the product for dp
    memory      with one stage ARRIVAL and the transfer, for k and again for v; with two stages once, less the last
                product, because the next tile is asked for when that product has been issued; nothing with three
    spills      SPILLED passes through shared memory's path of what does not fit the registers
    reductions  ONLINE, in the forward pass

ARRIVAL, FILL, SPILLED and ONLINE are calibrated on the tiles of results/h200/tune.json with the registers that the
compiler reports for them. docs/06_numbers says how far that carries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..masks import causal
from . import accounts, lds
from .documents import onchip_elements, tile
from .hardware import Hardware, dtype_size
from .resources import (
    PAD,
    Job,
    Style,
    Tile,
    capped,
    outer_inner,
    refusal,
    register_estimate,
    register_limit,
    resident_blocks,
    shared_memory,
    shares_rows,
    style_of,
    threads_of,
)
from .traffic import Call, Sweep

UNOVERLAPPED = 0.6  # share of the smaller of products and softmax that one group alone cannot hide
TILE = 120  # clocks of barriers, row reductions and loop control that every tile costs
LATENCY = 700  # clocks from asking memory for a tile until it is there, where nothing hides it
ARRIVAL = 605  # the same until its first bytes are there
FILL = 115  # clocks that a product which is waited for keeps the matrix unit beyond its FLOP
SPILLED = 5  # times that a spilled register moves in one tile
ONLINE = 250  # clocks that the maximum and the sum of each row of a forward tile hold up what follows


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
    found = [each for at in _tiles(job, style) for each in _with_cap(hardware, job, style, at)]
    found.sort(key=lambda c: (bool(c.refused), c.seconds, c.tile))
    return Plan(hardware, job, style, tuple(found))


def _with_cap(hardware: Hardware, job: Job, style: Style, at: Tile) -> Iterator[Candidate]:
    """A tile, and the same one with its registers capped where that lets one more block in."""
    found = candidate(hardware, job, style, at)
    yield found
    if style.waits and not found.refused:
        less = capped(hardware, at, found.registers, found.resident)
        if less is not None:
            again = candidate(hardware, job, style, less)
            if again.resident > found.resident:
                yield again


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
    most = register_limit(hardware, style, at)
    spills = max(0, registers - most)
    resident = resident_blocks(hardware, style, at, sum(shared.values()), min(registers, most))
    refused = refusal(hardware, job, style, at, shared, registers)
    if not refused and resident == 0:
        refused = f"threads: {threads_of(hardware, style, at)} of a block with {registers} registers each"
    if refused:
        return Candidate(at, shared, registers, spills, 0, refused, {}, 0.0)
    terms = _terms(hardware, job, style, at)
    # most of what spills is the same for every tile: stored once, loaded once a tile
    moved = 4 * spills * at.warps * hardware.warp / hardware.shared_bytes_per_clock.value
    terms["spills"] = moved * (SPILLED if style.waits else 1)
    seconds = _seconds(hardware, job, at, terms, resident, style)
    return Candidate(at, shared, registers, spills, resident, "", terms, seconds)


def _terms(hardware: Hardware, job: Job, style: Style, at: Tile) -> dict[str, float]:
    """Clocks of one tile on one unit, by resource."""
    pairs, d, dv = at.block_q * at.block_k, job.head_dim, job.value_dim
    outer, inner = outer_inner(job, at)
    clock = hardware.clock.value * 1e9 * hardware.units.value
    lanes = hardware.vector_float32.value * 1e12 / 2 / clock
    flop = {"forward": d + dv, "dkdv": 2 * (d + dv), "dq": 2 * d + dv}[job.kernel] * 2
    vector = accounts.FORWARD_VECTOR + dv / inner if job.kernel == "forward" else accounts.BACKWARD_VECTOR
    size = dtype_size(job.dtype)
    # who multiplies alone (a warpgroup of 64 rows, or a warp) fetches the streamed tiles for itself, once a product
    uses = {"forward": d + dv, "dkdv": 2 * (d + dv), "dq": 2 * d + dv}[job.kernel]
    alone = at.warps if style.outer_in_registers else max(1, outer / 64)
    fetched = alone * inner * uses * size
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
    queued = style.waits and hardware.matrix_unit(job.dtype) is not None
    per_tile = (_queued if queued else _overlapped)(hardware, job, at, terms, resident)
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


def _overlapped(hardware: Hardware, job: Job, at: Tile, terms: Mapping[str, float], resident: int) -> float:
    """Clocks of one tile where products run beside the softmax of other warps of the same block."""
    softmax = terms["exponentials"] + terms["vector"]
    if hardware.matrix_unit(job.dtype) is None:
        # one vector unit does all of it, and shared memory is what can hide behind it
        busy, hidden = terms["products"] + softmax, terms["shared"]
        per_tile = max(busy, hidden) + 0.45 * min(busy, hidden)
    else:
        groups = min(max(resident * at.warps / 4, 1.0), 3.0)
        longest = max(terms["products"], softmax)
        per_tile = max(longest, terms["shared"]) + min(terms["products"], softmax) * UNOVERLAPPED / groups
    per_tile += TILE + terms["spills"]
    if at.stages * resident < 2:
        per_tile += LATENCY  # nothing else is in flight while a tile comes in
    return per_tile


def _queued(hardware: Hardware, job: Job, at: Tile, terms: Mapping[str, float], resident: int) -> float:
    """Clocks of one tile where `resident` programs queue for the units and wait for memory beside each other."""
    each = _product_clocks(hardware, job, at)
    twice = 2 if shares_rows(job, at) else 1  # s and dp, and what follows them, in both warpgroups
    scores = len(each) - {"forward": 1, "dkdv": 2, "dq": 1}[job.kernel]
    products = sum(each) + (twice - 1) * sum(each[:scores]) + FILL * len(each)
    softmax = twice * (terms["exponentials"] + terms["vector"])
    waits = _exposed(hardware, job, at, each[-1])
    if job.kernel == "forward":
        waits += ONLINE
    if job.kernel == "dq":
        # nothing between s and dp needs the other, so the compiler puts p's exponentials behind the product for dp
        waits -= min(terms["exponentials"], each[1])
    return queue_clocks(resident, (products, softmax), waits + terms["spills"])


def _exposed(hardware: Hardware, job: Job, at: Tile, last: float) -> float:
    """Clocks of one tile in which a program has nothing to do but wait for what it streams; see above."""
    # a third stage counts only where it was measured to gain; docs/06_numbers has the pairs
    stages = at.stages if job.kernel == "dq" else min(at.stages, 2)
    _, inner = outer_inner(job, at)
    row = (job.head_dim + job.value_dim) * dtype_size(job.dtype) / hardware.port_bytes_per_clock.value
    if stages == 1:
        return 2 * ARRIVAL + inner * row
    if stages == 2:
        # k and v of the dq pass arrive under one barrier, elsewhere the second has its own
        return max(0.0, ARRIVAL + inner * row / (1 if job.kernel == "dq" else 2) - last)
    return 0.0


def _product_clocks(hardware: Hardware, job: Job, at: Tile) -> list[float]:
    """Clocks of each warpgroup product of one tile, the scores first: by its FLOP, or by its operands in shared memory.

    Scores fetch both operands; what multiplies p or ds has that one in registers. Each 64 rows fetch the streamed
    tile for themselves.
    """
    outer, inner = outer_inner(job, at)
    d, dv, size = job.head_dim, job.value_dim, dtype_size(job.dtype)
    scores = (d,) if job.kernel == "forward" else (d, dv)
    sums = {"forward": (dv,), "dkdv": (dv, d), "dq": (d,)}[job.kernel]
    flop = hardware.product_rate(job.dtype) / (hardware.clock.value * 1e9 * hardware.units.value)
    path = hardware.shared_bytes_per_clock.value / size
    streamed = max(1, outer // 64) * inner
    out: list[float] = []
    for width, fetched in [*((x, outer + streamed) for x in scores), *((x, streamed) for x in sums)]:
        out.append(max(2 * outer * inner * width / flop, fetched * width / path))
    return out


def queue_clocks(customers: int, stations: tuple[float, ...], apart: float) -> float:
    """Clocks between two departures of a closed network whose customers take the same time at a station every time.

    Mean value analysis (Reiser and Lavenberg, J. ACM 27(2), 1980) with the usual approximation for fixed service: who
    arrives waits for those in front, and for half the service of the one that is being served. `apart` is time that
    customers spend without meeting.
    """
    waiting, busy, rate = [0.0] * len(stations), [0.0] * len(stations), 0.0
    for count in range(1, customers + 1):
        stays = [s * (1 + w - b / 2) for s, w, b in zip(stations, waiting, busy, strict=True)]
        rate = min(count / (apart + sum(stays)), 1 / max(stations))
        waiting, busy = [rate * stay for stay in stays], [rate * s for s in stations]
    return 1 / rate


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
