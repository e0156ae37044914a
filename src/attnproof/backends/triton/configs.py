"""Tile sizes per (architecture class, dtype, head dim bucket, pass): measured where a record is named, else started
from the register and shared memory reports of the offline compile matrix (``results/compile``), which is no claim of speed.

On sm90 a tile of 64 queries by 128 keys on four warps with one stage, small enough that three programs share a
multiprocessor, beats every deeper pipeline: the compiler waits for each matrix product, and only *other* programs can
fill that wait. ``tools/gpu_tune.py`` made the records that the rows name; those without one were never timed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ...masks import BIG
from ...problem import Problem

Pass = Literal["forward", "dkdv", "dq", "dbias", "decode"]
PASSES: tuple[Pass, ...] = ("forward", "dkdv", "dq", "dbias", "decode")


@dataclass(frozen=True)
class Config:
    """How one kernel is cut and launched.

    Attributes:
        block_m: queries per tile.
        block_n: keys per tile.
        num_warps: warps per program.
        num_stages: tiles in flight in the software pipeline.
        tma: load tiles through tensor descriptors (Hopper and later, aligned inputs).
        maxnreg: register cap per thread, 0 for the compiler's choice.
        narrowest: least head dim tile. Triton 3.6 computes a warpgroup product with a 32-wide operand from memory outside
            of it (found by memcheck), so Hopper pads to 64.
        record: file under results/ whose measurements chose this row; empty for a starting point.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    maxnreg: int = 0
    narrowest: int = 16
    record: str = ""


@dataclass(frozen=True)
class Key:
    """What a table row is looked up by.

    Attributes:
        family: architecture class, see ``family``.
        which: the pass.
        width: head dim bucket: 64, 128 or 256.
        banded: a causal mask or window cuts the rows unevenly.
        heavy: something is loaded or drawn per pair (bias, mask, dropout), which costs registers.
    """

    family: str
    which: Pass
    width: int
    banded: bool = False
    heavy: bool = False


# small tiles, so that interpreter tests cross tile borders at small sizes
INTERPRETER = Config(32, 32, 4, 1)
# below this many multiply-adds the host time of building descriptors shows
DESCRIPTOR_WORK = 2**32
TUNED = "h200/tune.json"
TUNED_DECODE = "h200/tune-decode.json"
# keys of a paged plane up to which one program reads it alone rather than two whose parts are merged, see ``TUNED_DECODE``
ALONE = 16384
WARPGROUP = frozenset({"sm90", "sm100", "sm103"})  # matrix units fed from shared memory by descriptor
DEPENDENT = WARPGROUP | {"sm120"}  # a kernel may be started while the one before it ends


def _sm90() -> dict[Key, Config]:
    """bfloat16, B * N = 16384 tokens, H * D = 2048, N = 8192."""
    table: dict[Key, Config] = {}

    def put(which: Pass, width: int, full: Config, cut: Config) -> None:
        table[Key("sm90", which, width)] = replace(full, record=TUNED)
        table[Key("sm90", which, width, banded=True)] = replace(cut, record=TUNED)

    put("forward", 64, Config(64, 128, 4, 1, True), Config(64, 128, 4, 2, True))
    put("forward", 128, Config(64, 128, 4, 1, True), Config(64, 128, 4, 1, True, 168))
    put("forward", 256, Config(64, 128, 4, 1, True), Config(64, 128, 4, 1, True))
    put("dkdv", 64, Config(128, 64, 4, 2, True), Config(128, 64, 4, 2, True))
    put("dkdv", 128, Config(64, 64, 4, 2, True), Config(64, 64, 4, 2, True))
    put("dkdv", 256, Config(64, 64, 8, 2, True), Config(64, 64, 8, 2, True))
    put("dq", 64, Config(128, 64, 4, 3, True), Config(128, 64, 4, 3, True))
    put("dq", 128, Config(128, 64, 8, 3, True), Config(128, 64, 8, 3, True))
    put("dq", 256, Config(128, 32, 8, 3, True), Config(64, 64, 4, 2, True))
    for width in (64, 128, 256):
        record = TUNED_DECODE if width == 128 else ""
        table[Key("sm90", "decode", width)] = Config(16, 64, 4, 4 if width < 256 else 2, record=record)
        table[Key("sm90", "dbias", width)] = Config(64, 64, 4, 1)
    # starting points that the compile matrix shows without large spills
    for banded in (False, True):
        for width, full, keys, queries in (
            (64, Config(64, 128, 4, 1, True), Config(64, 64, 4, 2, True), Config(64, 64, 4, 2, True)),
            (128, Config(64, 64, 4, 2, True), Config(64, 64, 4, 2, True), Config(64, 64, 4, 2, True)),
            (256, Config(64, 64, 4, 1, True), Config(64, 64, 8, 1, True), Config(64, 64, 8, 1, True)),
        ):
            passes: tuple[tuple[Pass, Config], ...] = (("forward", full), ("dkdv", keys), ("dq", queries))
            for which, config in passes:
                table[Key("sm90", which, width, banded, heavy=True)] = config
    return table


# rows that serve every family that has none of its own: (forward, dkdv, dq) by width, all without descriptors
_LARGE = {
    64: (Config(128, 64, 4, 3), Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
    128: (Config(128, 64, 8, 2), Config(64, 64, 8, 2), Config(64, 64, 8, 2)),
    256: (Config(64, 32, 4, 2), Config(32, 64, 8, 1), Config(64, 32, 8, 1)),
}
_SMALL = {
    64: (Config(64, 64, 4, 2), Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
    128: (Config(64, 64, 4, 2), Config(64, 64, 8, 1), Config(64, 64, 8, 1)),
    256: (Config(64, 32, 4, 1), Config(16, 32, 8, 1), Config(32, 16, 8, 1)),
}
_CDNA = {
    64: (Config(128, 64, 4, 1), Config(64, 64, 4, 1), Config(64, 64, 4, 1)),
    128: (Config(128, 32, 4, 1), Config(32, 64, 4, 1), Config(64, 32, 4, 1)),
    256: (Config(64, 32, 4, 1), Config(16, 64, 8, 1), Config(32, 32, 4, 1)),
}
_RDNA = {
    64: (Config(64, 32, 4, 1), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
    128: (Config(64, 32, 4, 1), Config(16, 64, 8, 1), Config(64, 32, 8, 1)),
    256: (Config(32, 16, 8, 1), Config(16, 32, 8, 1), Config(16, 16, 8, 1)),
}
_FALLBACK = {"large": _LARGE, "small": _SMALL, "cdna": _CDNA, "rdna": _RDNA}
# IEEE float32 has no matrix unit: the tile is what the registers hold
_SINGLE = {64: Config(32, 32, 4, 1), 128: Config(32, 32, 8, 1), 256: Config(16, 16, 4, 1)}

TABLE = _sm90()


def padded(width: int, least: int = 16) -> int:
    """Head dim as a tile axis: a power of two, at least what a matrix instruction takes."""
    return max(least, 1 << (width - 1).bit_length()) if width > 0 else least


def bucket(problem: Problem) -> int:
    """64, 128 or 256: the smallest that holds both head dims."""
    return next(width for width in (64, 128, 256) if width >= max(problem.D, problem.Dv))


def family(architecture: str) -> str:
    """Architectures that share a table: by matrix unit, shared memory and registers."""
    if architecture == "sm90":
        return "sm90"
    if architecture in ("sm80", "sm100", "sm103"):
        return "large"
    if architecture.startswith("sm"):
        return "small"  # 99 KB of shared memory
    return "cdna" if architecture.startswith("gfx9") else "rdna"


def work(problem: Problem) -> int:
    """Multiply-adds of one product of the forward pass, not counting what a band skips."""
    rows = problem.tokens[0] if problem.rows == "packed" else problem.B * problem.M
    return rows * problem.H * problem.N * max(problem.D, 1)


def key_of(problem: Problem, which: Pass, architecture: str) -> Key:
    """The table row that a call asks for."""
    width = bucket(problem)
    heavy = problem.has_bias or problem.has_keep or problem.dropout_p > 0
    heavy = heavy or (problem.softcap > 0 and which == "dkdv" and width == 64)
    banded = problem.left < BIG or problem.right < BIG or problem.top_left or problem.has_bounds
    return Key(family(architecture), which, width, banded, heavy)


def choose(problem: Problem, which: Pass, architecture: str) -> Config:
    """The table's configuration for one pass of a problem."""
    if architecture == "interpreter":
        return INTERPRETER
    if problem.dtype == "float32":
        return _SINGLE[bucket(problem)] if which != "decode" else Config(16, 32, 4, 1)
    found = _row(key_of(problem, which, architecture))
    if problem.rows == "paged":
        # the pipeline spends its first stage on the page numbers
        found = replace(found, num_stages=found.num_stages + 1, tma=False)
    if found.tma and work(problem) < DESCRIPTOR_WORK:
        found = _row(Key("large", which, bucket(problem)))
    return fitted(found, architecture)


def fitted(config: Config, architecture: str) -> Config:
    """A configuration with what its architecture asks of every one."""
    return replace(config, narrowest=64) if architecture in WARPGROUP else config


def programs_per_multiprocessor(problem: Problem, multiprocessors: int) -> int:
    """How many decode programs share a multiprocessor: two hide page look-ups, unless one spares the merge."""
    if problem.rows != "paged":
        return 1
    fills = problem.B * problem.Hkv >= 0.9 * multiprocessors
    return 1 if fills and problem.N <= ALONE else 2


def _row(key: Key) -> Config:
    """The most specific row of the table, or the family's starting point."""
    for heavy in (key.heavy, False):
        for banded in (key.banded, False):
            found = TABLE.get(replace(key, heavy=heavy, banded=banded))
            if found is not None:
                return found
    if key.which == "decode":
        return Config(16, 64 if key.width < 256 else 32, 4, 2)
    fallback = _FALLBACK["large" if key.family == "sm90" else key.family][key.width]
    if key.which == "dbias":
        return replace(fallback[2], block_m=32, block_n=32)
    return fallback[("forward", "dkdv", "dq").index(key.which)]
