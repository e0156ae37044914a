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
        "slopes": None if slopes is None else slopes.astype(np.float64),
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
    """The oracle's answer for any case; only for the sampled rows where the case asks for a sample."""
    if inputs.case.rows == "dense":
        return solve(_sampled(question(inputs), inputs.case, inputs.seed))
    return join([solve(part) for part in sequences(inputs)], inputs)


def control(inputs: Inputs) -> Answer:
    """The same case by the plainest float32 evaluation: the yardstick for float32 kernels."""
    dense = inputs.case.rows == "dense"
    asked = _sampled(question(inputs), inputs.case, inputs.seed) if dense else None
    parts = [asked] if asked is not None else sequences(inputs)
    solved = [solve(_single(part)) for part in parts]
    return solved[0] if asked is not None else join(solved, inputs)


def sampled_rows(case: Case, seed: int) -> Array | None:
    """Positions of the judged rows: the ends, the edges of tiles, and others at random; None for all rows."""
    if not case.sample or case.sample >= case.M:
        return None
    rng = np.random.default_rng([seed, case.M])
    edges = [
        row
        for row in (0, 1, 63, 64, 127, 128, case.M // 2, case.M - 65, case.M - 64, case.M - 1)
        if 0 <= row < case.M
    ]
    others = rng.permutation(case.M)[: case.sample]
    return np.unique(np.concatenate([edges, others]))


def _sampled(asked: Question, case: Case, seed: int) -> Question:
    rows = sampled_rows(case, seed)
    if rows is None:
        return asked

    def pick(array: Any) -> Any:
        return array if array is None or array.shape[2] == 1 else array[:, :, rows]

    return replace(
        asked,
        q=asked.q[:, :, rows],
        keep=pick(asked.keep),
        bias=pick(asked.bias),
        dout=None,
        dlse=None,
        row_ids=rows,
        rows=case.M,
    )


def _single(asked: Question) -> Question:
    names = ("q", "k", "v", "bias", "slopes", "sink", "dout", "dlse")
    values = {name: getattr(asked, name) for name in names}
    return replace(
        asked, **{name: None if value is None else value.astype(np.float32) for name, value in values.items()}
    )


def sequences(inputs: Inputs) -> list[Question]:
    """One dense question per sequence of a packed, cached or paged case."""
    case = inputs.case
    shared = options(inputs)
    slopes = shared.pop("slopes")
    parts: list[Question] = []
    for index, (q, k, v, dout, dlse) in enumerate(inputs.extra["sequences"]):
        parts.append(
            Question(
                q=q[None],
                k=k[None],
                v=v[None],
                sequence=index,
                slopes=None if slopes is None else slopes[index : index + 1],
                dout=dout[None] if case.backward else None,
                dlse=None if dlse is None or not case.backward else dlse[None],
                **shared,
            )
        )
    return parts


def join(answers: list[Answer], inputs: Inputs) -> Answer:
    """Answers of the sequences as one: along the tokens when packed, along the batch otherwise."""
    packed = inputs.case.rows == "packed"
    tensors: dict[str, Terms] = {}
    for name in answers[0].tensors:
        columns: dict[str, Array] = {}
        for term in Terms.__dataclass_fields__:
            arrays = [getattr(answer.tensors[name], term) for answer in answers]
            if name == "dsink":
                columns[term] = np.sum(arrays, axis=0)
            elif packed and name != "dslopes":
                columns[term] = _tokens([array[0].swapaxes(0, 1) for array in arrays], inputs, 0.0)
            else:
                columns[term] = np.concatenate(arrays)
        tensors[name] = Terms(**columns)
    condition = max(answer.condition for answer in answers)
    rows = {name: [getattr(answer, name) for answer in answers] for name in ("lse", "lse_slop", "dead")}
    if not packed:
        joined: dict[str, Any] = {name: np.concatenate(arrays) for name, arrays in rows.items()}
        return Answer(tensors, **joined, condition=condition)
    fill = {"lse": -np.inf, "lse_slop": 1.0, "dead": True}
    joined = {
        name: _tokens([array[0].T for array in arrays], inputs, fill[name]) for name, arrays in rows.items()
    }
    # the rows of out are tokens first, those of lse are heads first
    return Answer(tensors, joined["lse"].T, joined["lse_slop"].T, joined["dead"], condition=condition)


def _tokens(parts: list[Array], inputs: Inputs, loose: Any) -> Array:
    """Sequences one behind the other, and what belongs in the tokens past the last one."""
    tail = np.full((inputs.extra["loose"], *parts[0].shape[1:]), loose, parts[0].dtype)
    return np.concatenate([*parts, tail])
