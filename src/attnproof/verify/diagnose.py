"""From failing elements to a sentence: where they are, what is there, and which known mistake gives that result.

Three looks, from cheap to dear: the pattern of the failing elements (tail tile, one row per tile, some heads), the
values in them (zeros, NaN), and hypotheses: the oracle answers the question that a kernel with a common mistake would
have answered, and the candidate's output is compared with that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, log2, sqrt
from typing import Any

import numpy as np

from attnproof.verify.candidate import Candidate, Outputs
from attnproof.verify.dtypes import Array
from attnproof.verify.expected import question
from attnproof.verify.inputs import Inputs
from attnproof.verify.judge import Setting, TensorReport, judge_lse, judge_tensor
from attnproof.verify.oracle import BIG, Answer, Question, solve

AXES = {
    "out": ("batch", "head", "row", "channel"),
    "dq": ("batch", "head", "row", "channel"),
    "dk": ("batch", "key head", "key", "channel"),
    "dv": ("batch", "key head", "key", "channel"),
    "dbias": ("batch", "head", "row", "key"),
    "lse": ("batch", "head", "row"),
    "dslopes": ("batch", "head"),
    "dsink": ("head",),
}
PACKED_AXES = {"lse": ("head", "token")}
LARGEST = 1 << 22  # score elements above which no hypothesis is tried


def diagnose(
    candidate: Candidate,
    inputs: Inputs,
    outputs: Outputs,
    answer: Answer,
    setting: Setting,
    broken: list[TensorReport],
) -> str:
    """A sentence or two about a failure, empty when nothing is known."""
    first = broken[0]
    parts: list[str] = []
    if first.failing is not None and first.failing.any():
        got = outputs.values[first.tensor]
        parts.append(f"{first.tensor}: {pattern(first, got, inputs.case.rows == 'packed')}")
    match = hypothesis(inputs, outputs, setting, {report.tensor for report in broken})
    if match:
        parts.append(match)
    return "; ".join(parts)


def pattern(report: TensorReport, got: Array, packed: bool = False) -> str:
    """Where the failing elements are and what is in them."""
    failing = report.failing
    if failing is None:
        raise ValueError("report: expected its failing elements, got None")
    names = AXES.get(report.tensor, ())
    if packed:
        names = PACKED_AXES.get(report.tensor, ("token", "head", "channel"))
    share = float(failing.mean())
    places = [place for axis, name in enumerate(names) if (place := _axis_words(failing, axis, name))]
    words = ", ".join(places) if places else "everywhere"
    text = f"{int(failing.sum())} of {failing.size} elements off ({share:.1%}): {words}"
    found = _values_words(got[failing])
    meaning = _meaning(failing, names, share)
    return text + (f", {found}" if found else "") + (f" ({meaning})" if meaning else "")


def _axis_words(failing: Array, axis: int, name: str) -> str:
    """`rows from 896`, `heads 2, 3`, `rows 63 of each 64`: how the failing indices of one axis look, if not all."""
    size = failing.shape[axis]
    others = tuple(other for other in range(failing.ndim) if other != axis)
    hit = np.flatnonzero(failing.any(axis=others))
    if len(hit) == size or size == 1:
        return ""
    if len(hit) == 1:
        return f"{name} {hit[0]}"
    if hit[-1] - hit[0] + 1 == len(hit):
        if hit[-1] == size - 1:
            return f"{name}s from {hit[0]}"
        return f"{name}s {hit[0]} to {hit[-1]}"
    for tile in (256, 128, 64, 32, 16, 8, 4, 2):
        residues = np.unique(hit % tile)
        if len(residues) == 1 and len(hit) >= size // tile and size > tile:
            return f"{name}s {residues[0]} of each {tile}"
    return f"{name}s {', '.join(map(str, hit))}" if len(hit) <= 4 else f"{len(hit)} of {size} {name}s"


def _values_words(values: Array) -> str:
    if np.isnan(values).all():
        return (
            "all NaN there: never written, or read from beyond an array (there is only NaN around the inputs)"
        )
    if np.isnan(values).any():
        return "NaN among them"
    if (values == 0).all():
        return "all zeros there"
    if np.isinf(values).any():
        return "infinities among them"
    return ""


def _meaning(failing: Array, names: tuple[str, ...], share: float) -> str:
    """What a pattern usually means; only the clear ones."""
    for axis, name in enumerate(names):
        words = _axis_words(failing, axis, name)
        size = failing.shape[axis]
        if name in ("row", "key", "token") and " from " in words:
            start = int(words.rsplit(" ", 1)[1])
            if start and start % 16 == 0 and size - start < 128:
                return f"tail tile: {name}s after the last whole tile"
        if name in ("row", "key") and " of each " in words:
            return "one place in every tile"
        if name == "channel" and " from " in words:
            return "a loop over the head dim stops early"
        if name == "head" and words and failing.shape[axis] > 1:
            return "some heads only: the map from query heads to key heads, mask or bias"
    return "all of it: scale, base of the exponential, or which keys are seen" if share > 0.95 else ""


def hypothesis(inputs: Inputs, outputs: Outputs, setting: Setting, broken: set[str]) -> str:
    """The known mistake whose answer the candidate gave, if there is one."""
    case = inputs.case
    if case.rows != "dense" or case.B * case.H * case.M * case.N > LARGEST or not case.M or not case.N:
        return ""
    if "out" not in broken:
        return _lse_hypothesis(inputs, outputs, setting) if "lse" in broken else ""
    asked = replace(question(inputs), dout=None, dlse=None)
    for name, changed in _changes(asked, inputs):
        with np.errstate(all="ignore"):
            other = solve(changed)
            report = judge_tensor(
                "out", outputs.values["out"], other.tensors["out"], other, setting, None, case.dtype
            )
        if report.ok:
            return f"it is the right answer with {name}"
    return ""


def _changes(asked: Question, inputs: Inputs) -> Iterator[tuple[str, Question]]:
    """Common mistakes as other questions, the likely ones first."""
    case = inputs.case
    if case.causal and case.M != case.N:
        if asked.top_left:
            yield "causal aligned bottom right", replace(asked, top_left=False, right=min(asked.right, 0))
        else:
            yield "causal aligned top left", replace(asked, top_left=True, right=BIG)
    if case.causal:
        yield "no causal mask", replace(asked, top_left=False, right=BIG)
    if asked.right < BIG:
        yield "the diagonal one key too far left", replace(asked, right=asked.right - 1)
        yield "the diagonal one key too far right", replace(asked, right=asked.right + 1)
        yield "no right side of the window", replace(asked, right=BIG)
    if asked.left < BIG:
        yield "a window one key wider", replace(asked, left=asked.left + 1)
        yield "a window one key narrower", replace(asked, left=asked.left - 1)
        yield "no left side of the window", replace(asked, left=BIG)
    yield from _scale_changes(asked, inputs)
    if asked.keep is not None:
        yield "no boolean mask", replace(asked, keep=None)
        yield "the boolean mask inverted", replace(asked, keep=~asked.keep)
    if asked.bias is not None:
        yield "no bias", replace(asked, bias=None)
        yield "the bias multiplied by the scale", replace(asked, bias=asked.bias * asked.scale)
    if asked.softcap:
        yield "no softcap", replace(asked, softcap=0.0)
    if asked.slopes is not None:
        yield "no ALiBi", replace(asked, slopes=None)
    if asked.sink is not None:
        yield "no sink", replace(asked, sink=None)
    if case.Hkv != case.H:
        tiled = np.arange(case.H) % case.Hkv
        yield "key heads tiled instead of repeated", replace(asked, k=asked.k[:, tiled], v=asked.v[:, tiled])
    if case.N > 1:
        yield "the last key left out", _without_last_key(asked)


def _scale_changes(asked: Question, inputs: Inputs) -> Iterator[tuple[str, Question]]:
    case = inputs.case
    D = max(case.D, 1)
    scales = {
        "the scale of the head dim padded to a power of two": 1 / sqrt(2 ** ceil(log2(D))),
        "the default scale": 1 / sqrt(D),
        "the scale of v's head dim": 1 / sqrt(max(case.Dv, 1)),
        "a scale of 1": 1.0,
        "the scale without its sign": abs(asked.scale),
        "the scale squared": asked.scale**2,
    }
    for name, scale in scales.items():
        if scale != asked.scale:
            yield name, replace(asked, scale=scale)


def _without_last_key(asked: Question) -> Question:
    keep = np.arange(asked.k.shape[2]) < asked.k.shape[2] - 1
    merged = keep[None, None, None, :] if asked.keep is None else asked.keep & keep
    return replace(asked, keep=merged)


def _lse_hypothesis(inputs: Inputs, outputs: Outputs, setting: Setting) -> str:
    """An lse that is right except for its base, its maximum or its dead rows."""
    with np.errstate(all="ignore"):
        answer = solve(replace(question(inputs), dout=None, dlse=None))
        got, right = outputs.values["lse"], np.asarray(answer.lse)
        if got.shape != right.shape:
            return ""
        tries: dict[str, Any] = {
            "a base-2 logarithm": got / 1.4426950408889634,
            "its sign changed": -got,
        }
        dead = np.isneginf(right)
        for word in (0.0, np.inf, np.nan):
            same = np.isnan(got[dead]) if np.isnan(word) else got[dead] == word
            if dead.any() and same.all():
                tries[f"{word:g} instead of -inf for rows without a key"] = np.where(dead, -np.inf, got)
        for name, corrected in tries.items():
            report = judge_lse(corrected, answer, setting)
            if report.ok:
                return f"the lse is right but for {name}"
    return ""
