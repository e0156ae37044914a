"""How forward kernels are cut, by head dim and shape of the mask, and what a kernel is compiled for.

Rows were chosen on an H200 with Triton 3.6, bfloat16, B * N = 16384 tokens, H * D = 2048, by times of a prototype of these
kernels. The kernels themselves are timed in results/h200/attention.json, their rows not yet against others.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...masks import BIG
from ...problem import Problem

COARSE_CAP = 64.0  # up to here capped scores are off by at most 2e-5, a hundredth of the rounding of p
WIDTHS = (64, 128, 256)
ROWS = 64  # query rows of a warpgroup: what one wgmma instruction computes


@dataclass(frozen=True)
class Config:
    """One row of the table.

    Attributes:
        warpgroups: consumer warpgroups, each of 64 query rows.
        block_n: keys per tile.
        stages: tiles of k, and of v, in flight.
        dynamic: programs stay and draw their next tile from a counter; else one program per tile.
        own_out: out is staged in memory of its own, so that the next q may arrive while it is stored; else it takes the
            place of q.
        named_release: consumers hand a stage back through a named barrier, which does not wait, instead of an mbarrier.
        registers: per thread of a consumer and of the producer.
        why: what was seen when it was chosen.
    """

    warpgroups: int
    block_n: int
    stages: int
    dynamic: bool = True
    own_out: bool = True
    named_release: bool = True
    registers: tuple[int, int] = (240, 24)
    why: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything that a forward kernel is compiled for: its one compile-time argument.

    Attributes:
        width, width_v: head dims of q and k, and of v and out, filled up with zeros to 64, 128 or 256.
        warpgroups, block_n, stages, dynamic, own_out, named_release, consumer_registers, producer_registers: see ``Config``.
        has_left, has_right: sides on which the band is bounded.
        has_tail: the last tile of keys is not full.
        has_idle: the last tile of queries has warpgroups without a row; they only keep the others' barriers going.
        has_softcap, has_alibi, has_sink: options.
        coarse_cap: tanh is ``1 - 2 r`` with ``r = 1 / (e^2x + 1)``, wrong by a few 1e-7 wherever it is: small against scores
            for small caps. Scores are then -r, in units of twice the cap, and the cap itself is added to lse.
        only_behind: no query sees a key ahead of it.
        fold: scores stay raw products (or capped ratios), and the scale enters the exponent.
        listed: tiles of queries and their keys stand in a list that another kernel has made, see ``kernels.listing``.
        packed: rows of all sequences lie behind each other.
        has_bounds: every query has an interval of keys of its own.
        top_left: packed only; ``j <= i`` is one more bound, whose place depends on the sequence.
    """

    width: int
    width_v: int
    warpgroups: int
    block_n: int
    stages: int
    dynamic: bool
    own_out: bool
    named_release: bool
    consumer_registers: int
    producer_registers: int
    has_left: bool
    has_right: bool
    has_tail: bool
    has_idle: bool
    has_softcap: bool
    has_alibi: bool
    has_sink: bool
    coarse_cap: bool
    only_behind: bool
    fold: bool
    listed: bool = False
    packed: bool = False
    has_bounds: bool = False
    top_left: bool = False

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return ROWS * self.warpgroups

    @property
    def masks_first(self) -> bool:
        """Whether the first tile of keys may hold a pair that is not seen."""
        return self.has_left or self.has_right or self.has_tail or self.has_bounds

    @property
    def left_edges(self) -> bool:
        """Whether tiles of keys that need a test may come after those that do not."""
        return self.has_left or self.has_bounds

    @property
    def right_edges(self) -> bool:
        """Whether more than the first tile of keys may need a test before those that do not."""
        return self.has_right or self.has_bounds


_THREE = (160, 32)
_TABLE = {
    (64, False): Config(3, 128, 2, registers=_THREE, why="13% over two warpgroups of 128 rows together"),
    (64, True): Config(2, 128, 3, why="three lose to masked pairs; a third stage gave up to 2%"),
    (128, False): Config(2, 128, 2, why="5% at N = 1024 over a tile per program; named release 3%"),
    (128, True): Config(2, 128, 2, named_release=False, why="named release lost up to 5%"),
    (256, False): Config(2, 64, 2, own_out=False, why="5% at N = 1024 over a tile per program"),
    (256, True): Config(
        2, 64, 2, dynamic=False, own_out=False, why="drawing tiles lost up to 10% at N = 8192"
    ),
}


def padded(width: int) -> int:
    """The head dim a kernel computes with."""
    return next(each for each in WIDTHS if each >= width)


def uneven(problem: Problem) -> bool:
    """Whether some queries of a sequence see more keys than others."""
    return problem.left < BIG or problem.right < BIG or problem.top_left or problem.has_bounds


def listed(problem: Problem) -> bool:
    """Whether numbers of the call alone do not say which tiles there are."""
    return problem.rows == "packed" or problem.has_bounds


def choose(problem: Problem) -> Config:
    """The configuration of the forward pass."""
    width = padded(max(problem.D, problem.Dv))
    found = _TABLE[width, uneven(problem)]
    # how many tiles a list has only the device knows: programs must stay and draw
    return found if found.dynamic or not listed(problem) else _TABLE[width, False]


def table() -> dict[tuple[int, bool], Config]:
    """Every row by (head dim, uneven mask)."""
    return dict(_TABLE)


def folds(problem: Problem) -> bool:
    """Whether the scale can wait for the exponent: a maximum of raw products needs it positive, and ALiBi is not scaled."""
    return not problem.has_alibi and 2.0**-100 < (problem.softcap or problem.scale) < 2.0**100


def facts(problem: Problem, config: Config | None = None) -> Facts:
    """What the kernel of a problem is compiled for."""
    config = config or choose(problem)
    width, width_v = padded(problem.D), padded(problem.Dv)
    consumer, producer = config.registers
    has_right = problem.right < BIG or problem.top_left
    packed = problem.rows == "packed"
    rest = problem.M % (ROWS * config.warpgroups)
    return Facts(
        width=width,
        width_v=width_v,
        warpgroups=config.warpgroups,
        block_n=config.block_n,
        stages=config.stages,
        dynamic=config.dynamic,
        own_out=config.own_out or width != width_v,
        named_release=config.named_release,
        consumer_registers=consumer,
        producer_registers=producer,
        has_left=problem.left < BIG,
        has_right=has_right,
        has_tail=(packed or problem.N % config.block_n != 0) and not has_right,
        has_idle=packed or 0 < rest <= ROWS * (config.warpgroups - 1),
        has_softcap=problem.softcap > 0,
        has_alibi=problem.has_alibi,
        has_sink=problem.has_sink,
        coarse_cap=0 < problem.softcap <= COARSE_CAP and folds(problem),
        only_behind=problem.right <= 0,
        fold=folds(problem),
        listed=listed(problem),
        packed=packed,
        has_bounds=problem.has_bounds,
        top_left=packed and problem.top_left,
    )
