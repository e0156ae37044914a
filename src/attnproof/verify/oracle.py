"""The right answer in float64, with the size of the error that a correct kernel may make.

Independent of every backend: it shares no code with what it judges, the dropout generator included. Memory is
O(chunk): rows are taken in blocks against all keys. The same code runs on NumPy arrays and on torch float64 tensors
(`xp` is the module), so a GPU can serve as the oracle of large cases.

Besides each value `x` the oracle returns `Terms`, the sensitivities that the error model in `numerics` combines:

    rounding   x^2                         the output is rounded once
    operand    sum_j p_j^2 v_j^2           the weights are rounded to the input dtype before the product
    scores     sum_j p_j^2 s_j^2 (v_j-o)^2 the logits are rounded too (eager kernels)
    slop       sum_j p_j (1+|s_j|) |v_j|   any error of relative size 2^-24 in the logits or the exponential
    linear     sum_j p_j |v_j|             worst case of the operand rounding
    delta      variance that reaches a gradient through rowsum(dout * out), whose out was rounded
    reach      worst case of the same
    floor      variance below the normal range of the dtype
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

BIG = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Question:
    """One dense attention problem in float64.

    q `[B,H,M,D]`, k `[B,Hkv,N,D]`, v `[B,Hkv,N,E]`; keep and bias broadcastable to `[B,H,M,N]`; slopes `[B,H]`;
    sink `[H]`; dout `[B,H,M,E]`; dlse `[B,H,M]`. `row_ids` are the positions of the given rows of q when only some
    of the M are asked for. `sequence` is the batch index that dropout sees for the first entry.
    """

    q: Any
    k: Any
    v: Any
    scale: float
    dtype: str = "float64"
    left: int = BIG
    right: int = BIG
    top_left: bool = False
    keep: Any = None
    bias: Any = None
    slopes: Any = None
    sink: Any = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    rng: tuple[int, int] = (0, 0)
    sequence: int = 0
    dout: Any = None
    dlse: Any = None
    row_ids: Any = None
    rows: int | None = None  # M of the whole problem when row_ids is given
    xp: Any = np


@dataclass(frozen=True)
class Terms:
    """A value and its sensitivities, all of one shape (see the module docstring)."""

    value: Any
    operand: Any
    scores: Any
    slop: Any
    linear: Any
    floor: Any
    delta: Any
    reach: Any


@dataclass
class Answer:
    """What the oracle returns: `tensors` by name (out, dq, dk, dv, dbias, dslopes, dsink) and the lse."""

    tensors: dict[str, Terms]
    lse: Any
    lse_slop: Any  # [B,H,M]: largest 1+|s| of the row, plus what the dot product may lose
    dead: Any  # [B,H,M] bool: rows without a key
    hull: tuple[Any, Any] | None = None  # smallest and largest value of the column, per output element
    condition: float = 0.0  # largest |q|.|k| * scale: what a logit may lose in units of 2^-24
    extra: dict[str, Any] = field(default_factory=dict)


def solve(question: Question) -> Answer:
    """Forward, lse and, when `question.dout` is given, all gradients."""
    from attnproof.verify.oracle_gradients import Solver

    return Solver(question).run()
