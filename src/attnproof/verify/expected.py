"""From the inputs of a case to the oracle's answer, in the shapes that a candidate returns.

Dense rows are one question. Packed, cached and paged rows are one dense question per sequence, so the oracle never
needs to know how the rows were stored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from attnproof.cases import UNBOUNDED, Case
from attnproof.verify.dtypes import Array
from attnproof.verify.inputs import Inputs
from attnproof.verify.oracle import BIG, Answer, Question, Terms, solve


def question(inputs: Inputs) -> Question:
    """The dense float64 question of a dense case."""
    case = inputs.case
    return Question(
        q=inputs.q.values(),
        k=inputs.k.values(),
        v=inputs.v.values(),
        dout=inputs.dout.values() if case.backward else None,
        dlse=inputs.dlse if case.backward else None,
        keep=inputs.keep,
        bias=None if inputs.bias is None else inputs.bias.values(),
        **options(inputs),
    )


def options(inputs: Inputs) -> dict[str, Any]:
    """What a question says besides its tensors."""
    case = inputs.case
    left, right = band(case)
    slopes = inputs.slopes
    return {
        "scale": case.softmax_scale,
        "dtype": case.dtype,
        "left": left,
        "right": right,
        "top_left": case.causal and case.align == "top_left",
        "slopes": None if slopes is None else np.broadcast_to(slopes.astype(np.float64), (case.B, case.H)),
        "sink": inputs.sink,
        "softcap": case.softcap,
        "dropout_p": case.dropout_p,
        "rng": inputs.rng,
    }


def band(case: Case) -> tuple[int, int]:
    """Window and bottom-right causality as one band around i + N - M."""
    left, right = (BIG if side == UNBOUNDED else side for side in case.window)
    if case.causal and case.align == "bottom_right":
        right = min(right, 0)
    return left, right


def expected(inputs: Inputs) -> Answer:
    """The oracle's answer for any case."""
    if inputs.case.rows == "dense":
        return solve(question(inputs))
    return join([solve(part) for part in sequences(inputs)], packed=inputs.case.rows == "packed")


def control(inputs: Inputs) -> Answer:
    """The same case by the plainest float32 evaluation: the yardstick for float32 kernels."""
    asked = question(inputs) if inputs.case.rows == "dense" else None
    parts = [asked] if asked is not None else sequences(inputs)
    solved = [solve(_single(part)) for part in parts]
    return solved[0] if asked is not None else join(solved, packed=inputs.case.rows == "packed")


def _single(asked: Question) -> Question:
    names = ("q", "k", "v", "bias", "slopes", "sink", "dout", "dlse")
    values = {name: getattr(asked, name) for name in names}
    return replace(asked, **{name: None if value is None else value.astype(np.float32) for name, value in values.items()})


def sequences(inputs: Inputs) -> list[Question]:
    """One dense question per sequence of a packed, cached or paged case."""
    case = inputs.case
    shared = options(inputs)
    slopes = shared.pop("slopes")
    parts: list[Question] = []
    for index, (q, k, v, dout, dlse) in enumerate(inputs.extra["sequences"]):
        parts.append(Question(q=q[None], k=k[None], v=v[None], sequence=index,
                              slopes=None if slopes is None else slopes[index : index + 1],
                              dout=dout[None] if case.backward else None,
                              dlse=None if dlse is None or not case.backward else dlse[None], **shared))
    return parts


def join(answers: list[Answer], packed: bool) -> Answer:
    """Answers of the sequences as one: along the tokens when packed, along the batch otherwise."""
    tensors: dict[str, Terms] = {}
    for name in answers[0].tensors:
        columns: dict[str, Array] = {}
        for term in Terms.__dataclass_fields__:
            arrays = [getattr(answer.tensors[name], term) for answer in answers]
            if name in ("dsink",):
                columns[term] = np.sum(arrays, axis=0)
            elif packed and name != "dslopes":
                columns[term] = np.concatenate([array[0].swapaxes(0, 1) for array in arrays])
            else:
                columns[term] = np.concatenate(arrays)
        tensors[name] = Terms(**columns)
    rows = {name: [getattr(answer, name) for answer in answers] for name in ("lse", "lse_slop", "dead")}
    if packed:
        joined = {name: np.concatenate([array[0] for array in arrays], axis=-1) for name, arrays in rows.items()}
        dead = joined["dead"].T  # the rows of out are tokens first
        return Answer(tensors, joined["lse"], joined["lse_slop"], dead, None, max(a.condition for a in answers))
    joined = {name: np.concatenate(arrays) for name, arrays in rows.items()}
    return Answer(tensors, joined["lse"], joined["lse_slop"], joined["dead"], None, max(a.condition for a in answers))
