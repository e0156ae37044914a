"""From a problem to the compile-time facts of a kernel, as -D flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...masks import BIG
from ...problem import Problem
from .configs import Config
from .source import Kernel

DTYPES = {"float16": 0, "bfloat16": 1, "float32": 2}
NARROWED = 3
ROWS = {"dense": 0, "packed": 1, "cached": 2, "paged": 3}


@dataclass(frozen=True)
class Variant:
    """One compiled kernel: which text, with which flags, and the name to look up in it.

    Attributes:
        kernel: the text.
        flags: compiler flags, sorted.
        entry: name of the function, where it is not the text's own.
    """

    kernel: Kernel
    flags: tuple[str, ...]
    entry: str = ""

    @property
    def name(self) -> str:
        """The function's name."""
        return self.entry or self.kernel


@dataclass(frozen=True)
class Step:
    """One launch.

    Attributes:
        variant: what runs.
        groups: workgroups, along one axis.
        threads: of each.
        numbers: fields of the argument struct that are no pointers.
        arrays: tensors by pointer field.
    """

    variant: Variant
    groups: int
    threads: int
    numbers: dict[str, Any] = field(hash=False)
    arrays: dict[str, Any] = field(hash=False)


def banded(problem: Problem) -> bool:
    """Whether the band restricts anything."""
    return problem.left < BIG or problem.right < BIG or problem.top_left


def folds(problem: Problem) -> bool:
    """Whether scores can stay raw products with the scale in the exponent: a maximum needs a positive scale."""
    plain = not (problem.softcap or problem.has_alibi or problem.has_bias)
    return plain and problem.scale > 0


def defines(**given: int) -> tuple[str, ...]:
    """-D flags of the values that differ from the default 0, in one order."""
    return tuple(f"-D{name}={int(value)}" for name, value in sorted(given.items()))


def common(problem: Problem, config: Config, *, wide: bool, dtype: int) -> dict[str, int]:
    """Facts that every kernel looks at."""
    return {
        "DTYPE": dtype,
        "HEAD_D": problem.D,
        "HEAD_DV": problem.Dv,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "THREADS": config.threads,
        "WAVES": config.waves,
        "WIDE": int(wide),
    }


def pairwise(problem: Problem) -> dict[str, int]:
    """Facts about scores, masks and dropout; those that are off stay unnamed, so that equal variants are one."""
    bias = 0 if not problem.has_bias else 1 if problem.bias_dtype == problem.dtype else 2
    facts = {
        "ROWS": ROWS[problem.rows],
        "PAGE": problem.page if problem.rows == "paged" else 0,
        # beside a mask the band costs nothing, and with both the compiler stays within 128 registers
        "BANDED": banded(problem) or problem.has_keep,
        "KEEP": problem.has_keep,
        "BOUNDS": problem.has_bounds,
        "BIAS": bias,
        "ALIBI": problem.has_alibi,
        "SOFTCAP": problem.softcap > 0,
        "DROPOUT": problem.dropout_p > 0,
    }
    return {name: int(value) for name, value in facts.items() if value}
