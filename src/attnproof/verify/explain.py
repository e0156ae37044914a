"""One case, one seed, one candidate: everything there is to see about its worst row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attnproof.cases import Case
from attnproof.verify.blas import one_thread
from attnproof.verify.candidate import Candidate, Outputs, Skip
from attnproof.verify.dtypes import Array
from attnproof.verify.expected import question
from attnproof.verify.guards import poisoned
from attnproof.verify.inputs import Inputs, build
from attnproof.verify.judge import TensorReport, setting_for
from attnproof.verify.numerics import hard_bound
from attnproof.verify.oracle import Answer, solve
from attnproof.verify.suite import Answers, Verdict, judge_outputs

TILE = 64  # coordinates are also given in tiles of this size, the most common one


@dataclass
class Replay:
    """A verdict and the row behind it.

    Attributes:
        verdict: as in a run.
        tensor: the tensor that is shown: the first that fails, else out.
        place: index of the worst element.
        tile: the same, in tiles of 64 (row, channel or key axes).
        elements: channel, got, expected, error, bound of the worst row, worst first.
        keys: key, weight and logit of the row's heaviest keys, for a row of out in a dense case.
    """

    verdict: Verdict
    tensor: str = ""
    place: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    elements: list[tuple[int, float, float, float, float]] = field(default_factory=list)
    keys: list[tuple[int, float, float]] = field(default_factory=list)


def replay(candidate: Candidate, case: Case, seed: int = 0) -> Replay:
    """Run the case again and look at its worst row.

    Raises:
        Skip: the candidate does not take the case.
    """
    reason = candidate.refuse(case)
    if reason:
        raise Skip(f"{candidate.name} skips {case.id}: {reason}")
    answers = Answers()
    with one_thread(), np.errstate(all="ignore"):
        inputs = build(case, seed)
        with poisoned(candidate):
            outputs = candidate.call(inputs)
        fresh = build(case, seed)
        verdict = judge_outputs(candidate, fresh, outputs, answers)
        answer, _ = answers.of(fresh)
        return _worst_row(verdict, candidate, fresh, outputs, answer)


def _worst_row(
    verdict: Verdict, candidate: Candidate, inputs: Inputs, outputs: Outputs, answer: Answer
) -> Replay:
    shown = next((report for report in verdict.tensors if not report.ok), None)
    shown = shown or next((report for report in verdict.tensors if report.tensor == "out"), None)
    found = Replay(verdict)
    if shown is None or shown.worst is None:
        return found
    found.tensor, found.place = shown.tensor, shown.worst.index
    found.tile = tuple(index // TILE for index in found.place[-2:])
    found.elements = _elements(shown, inputs, outputs, answer, candidate)
    if inputs.case.rows == "dense" and shown.tensor in ("out", "lse", "dq"):
        found.keys = heaviest_keys(inputs, found.place[:3])
    return found


def _elements(
    report: TensorReport, inputs: Inputs, outputs: Outputs, answer: Answer, candidate: Candidate
) -> list[tuple[int, float, float, float, float]]:
    got = outputs.values[report.tensor]
    if report.worst is None:
        raise ValueError("report: expected a worst element, got None")
    if report.tensor == "lse":
        right, bound = np.asarray(answer.lse), np.full(got.shape, report.worst.bound)
        index = (*report.worst.index[:-1], slice(None))
    else:
        terms = answer.tensors[report.tensor]
        kind = setting_for(inputs.case, answer, candidate.kind).kind
        right, bound = np.asarray(terms.value), hard_bound(terms, inputs.case.dtype, kind)
        index = (*report.worst.index[:-1], slice(None))
    return rank(got[index], right[index], bound[index])


def rank(got: Array, right: Array, bound: Array) -> list[tuple[int, float, float, float, float]]:
    """Elements of a row, the one furthest outside its bound first; what is not finite comes before all."""
    error = np.abs(got - right)
    used = np.where(np.isfinite(error), error / np.maximum(bound, 1e-300), np.inf)
    order = np.argsort(-used, kind="stable")
    return [(int(i), float(got[i]), float(right[i]), float(error[i]), float(bound[i])) for i in order]


def heaviest_keys(inputs: Inputs, row: tuple[int, ...], count: int = 6) -> list[tuple[int, float, float]]:
    """The keys that decide a row: index, softmax weight and final logit, by the oracle."""
    b, h, i = row
    asked = question(inputs)
    group = inputs.case.H // inputs.case.Hkv
    one = replace(
        asked,
        q=asked.q[b : b + 1, h : h + 1, i : i + 1],
        k=asked.k[b : b + 1, h // group : h // group + 1],
        v=np.eye(inputs.case.N)[None, None],
        dout=None,
        dlse=None,
        row_ids=np.array([i]),
        rows=inputs.case.M,
        keep=_at(asked.keep, b, h, i),
        bias=_at(asked.bias, b, h, i),
        slopes=None if asked.slopes is None else asked.slopes[b : b + 1, h : h + 1],
        sink=None if asked.sink is None else asked.sink[h : h + 1],
        dropout_p=0.0,
    )
    answer = solve(one)
    weights = np.asarray(answer.tensors["out"].value)[0, 0, 0]
    lse = float(np.asarray(answer.lse)[0, 0, 0])
    order = np.argsort(-weights, kind="stable")[:count]
    with np.errstate(divide="ignore"):
        return [(int(j), float(weights[j]), float(np.log(weights[j]) + lse)) for j in order if weights[j] > 0]


def _at(array: Any, b: int, h: int, i: int) -> Any:
    if array is None:
        return None
    picked = tuple(min(index, size - 1) for index, size in zip((b, h, i), array.shape, strict=False))
    return array[picked[0] : picked[0] + 1, picked[1] : picked[1] + 1, picked[2] : picked[2] + 1]
