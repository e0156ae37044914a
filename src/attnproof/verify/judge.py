"""Compare what a candidate returned with the oracle's answer.

Every check is written as "holds if value <= limit", so a NaN never passes. Maximum and root mean square errors are
always reported; they decide nothing, because a limit on them that good kernels keep lets broken ones through.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import Any

import numpy as np

from attnproof.verify.dtypes import DTYPES, Array
from attnproof.verify.numerics import (
    SINGLE_CONTROL,
    SINGLE_SLOP,
    Numerics,
    hard_bound,
    limits,
    lse_bound,
    row_limits,
    single_chance,
    variance,
)
from attnproof.verify.oracle import Answer, Terms

CLASSIC_MAX, CLASSIC_RMS = 1e-2, 1e-3  # the thresholds of the source documents, a second opinion only


@dataclass(frozen=True)
class Check:
    """One comparison of a number with its limit."""

    name: str
    value: float
    limit: float
    why: str = ""

    @property
    def ok(self) -> bool:
        """True only for a number that is there and within the limit."""
        return self.value <= self.limit


@dataclass(frozen=True)
class Worst:
    """The element furthest outside its bound."""

    index: tuple[int, ...]
    got: float
    expected: float
    bound: float


@dataclass
class TensorReport:
    """Numbers and checks of one tensor."""

    tensor: str
    max_abs: float
    rms: float
    rel: float
    checks: list[Check]
    z_rms: float | None = None
    z_max: float | None = None
    bound_used: float = 0.0  # largest |error| / hard bound
    bound: float = 0.0  # the hard bound where the error is largest
    worst: Worst | None = None
    failing: Array | None = field(default=None, repr=False)  # bool per element

    @property
    def ok(self) -> bool:
        """All checks hold."""
        return all(check.ok for check in self.checks)

    @property
    def classic_ok(self) -> bool:
        """What max abs <= 1e-2 and RMS <= 1e-3 would have said."""
        return self.max_abs <= CLASSIC_MAX and self.rms <= CLASSIC_RMS

    def failures(self) -> list[Check]:
        """The checks that do not hold."""
        return [check for check in self.checks if not check.ok]


@dataclass(frozen=True)
class Setting:
    """What the limits of a case depend on."""

    dtype: str
    kind: Numerics
    statistical: bool
    gaussian: bool = False
    only_invariants: bool = False


def judge(
    outputs: dict[str, Array],
    answer: Answer,
    setting: Setting,
    control: Answer | None = None,
    stored: dict[str, str] | None = None,
) -> list[TensorReport]:
    """Reports for each tensor that the candidate returned; `stored` names dtypes that differ from that of q."""
    reports: list[TensorReport] = []
    for name, terms in answer.tensors.items():
        if name not in outputs:
            continue
        base = None if control is None else control.tensors[name]
        dtype = (stored or {}).get(name, setting.dtype)
        reports.append(judge_tensor(name, outputs[name], terms, answer, setting, base, dtype))
    if "lse" in outputs:
        reports.append(judge_lse(outputs["lse"], answer, setting))
    return reports


def judge_tensor(
    name: str, got: Array, terms: Terms, answer: Answer, setting: Setting, control: Terms | None, stored: str
) -> TensorReport:
    """One tensor against its terms."""
    reference = np.asarray(terms.value)
    if got.shape != reference.shape:
        return _misshapen(name, got, reference)
    scorable = np.isfinite(reference)
    lost = _non_finite(got, scorable)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(scorable & np.isfinite(got), got - reference, 0.0)
    bound = np.where(scorable, hard_bound(terms, setting.dtype, setting.kind, stored), np.inf)
    used = _ratio(np.abs(error), bound)
    size = float(np.sqrt(np.mean(reference[scorable] ** 2))) if scorable.any() else 0.0
    report = _summary(name, error, size, int(lost.sum()))
    report.failing = lost.copy()
    report.checks.append(
        Check("non-finite", float(lost.sum()), 0.0, "finite exactly where the exact answer is")
    )
    report.checks.append(_exact_zeros(name, got, terms, answer, report))
    if setting.only_invariants:
        report.checks.append(_in_hull(name, got, answer, setting))
        return report
    if error.size:
        _hard(report, got, reference, error, bound, used)
        if setting.dtype in ("float32", "float64"):
            _single(report, error, terms, setting, control, _rms(np.asarray(answer.lse)))
        else:
            _statistics(report, error, terms, setting, stored, scorable & ~lost)
    return report


def _misshapen(name: str, got: Array, reference: Array) -> TensorReport:
    why = f"expected shape {tuple(reference.shape)}, got {tuple(got.shape)}"
    return TensorReport(name, float("nan"), float("nan"), float("nan"), [Check("shape", 1.0, 0.0, why)])


def _non_finite(got: Array, scorable: Array) -> Array:
    """Elements that are finite where they must not be, or the other way round."""
    return np.isfinite(got) != scorable


def _summary(name: str, error: Array, size: float, lost: int) -> TensorReport:
    if error.size == 0:
        return TensorReport(name, 0.0, 0.0, 0.0, [])
    rms = float(np.sqrt(np.mean(error**2)))
    largest = float(np.max(np.abs(error)))
    if lost:
        rms = largest = float("inf")
    return TensorReport(name, largest, rms, rms / size if size else 0.0, [])


def _exact_zeros(name: str, got: Array, terms: Terms, answer: Answer, report: TensorReport) -> Check:
    """Rows without a key, keys that no query sees: exactly 0, in every precision."""
    zero = _untouched(terms)
    if name == "out" and answer.dead.shape == zero.shape[:-1]:
        zero = zero | answer.dead[..., None]
    with np.errstate(invalid="ignore"):
        wrong = zero & ~(got == 0)
    if report.failing is not None:
        report.failing |= wrong
    return Check("exact zeros", float(wrong.sum()), 0.0, "rows without a key and keys without a query give 0")


def _untouched(terms: Terms) -> Array:
    """Elements that no weight reaches: not small, but exactly zero."""
    parts = (terms.value, terms.linear, terms.slop, terms.reach)
    return np.logical_and.reduce([np.asarray(part) == 0 for part in parts])


def _in_hull(name: str, got: Array, answer: Answer, setting: Setting) -> Check:
    """Where no fp32 logit means anything: still an average of the values."""
    if name != "out" or answer.hull is None or got.size == 0:
        return Check("hull", 0.0, 0.0)
    low, high = answer.hull
    room = 4 * DTYPES[setting.dtype].unit * np.maximum(np.abs(low), np.abs(high))
    outside = ~((got >= np.minimum(low, 0) - room) & (got <= np.maximum(high, 0) + room))
    return Check("hull", float(outside.sum()), 0.0, "an output is an average of values")


def _ratio(error: Array, bound: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(error == 0, 0.0, error / bound)


def _hard(
    report: TensorReport, got: Array, reference: Array, error: Array, bound: Array, used: Array
) -> None:
    report.bound_used = float(np.max(used))
    if report.failing is not None:
        report.failing |= used > 1
        where = np.argmax(np.where(report.failing, np.where(np.isfinite(got), 1.0 + used, np.inf), used))
    else:
        where = np.argmax(used)
    index = tuple(int(axis) for axis in np.unravel_index(int(where), used.shape))
    report.worst = Worst(index, float(got[index]), float(reference[index]), float(bound[index]))
    report.bound = float(bound[np.unravel_index(int(np.argmax(np.abs(error))), error.shape)])
    why = "worst case of every rounding that the class allows"
    report.checks.append(Check("hard bound", report.bound_used, 1.0, why))


def _statistics(
    report: TensorReport,
    error: Array,
    terms: Terms,
    setting: Setting,
    stored: str,
    valid: Array,
) -> None:
    spread = np.sqrt(variance(terms, setting.dtype, setting.kind, stored))
    alive = valid & (spread > 0) & np.isfinite(spread) & ~_untouched(terms)
    if not alive.any():
        return
    z = np.where(alive, error / np.where(spread > 0, spread, 1.0), 0.0)
    n = int(alive.sum())
    report.z_rms = float(sqrt(float((z**2).sum()) / n))
    report.z_max = float(np.abs(z).max())
    if not setting.statistical:
        return
    bound = limits(setting.kind, report.tensor, n)
    report.checks.append(Check("z rms", report.z_rms, bound.z_rms, "error over its model, root mean square"))
    report.checks.append(Check("z max", report.z_max, bound.z_max, "error over its model, largest"))
    if report.failing is not None:
        report.failing |= np.abs(z) > bound.z_max
    _row_check(report, z, alive, setting.kind)
    if setting.gaussian and report.tensor == "out" and n >= 4096:
        lean = _lean(z, np.asarray(terms.value), alive)
        report.checks.append(Check("bias", abs(lean), bound.bias, "roundings must not all lean one way"))


def _lean(z: Array, value: Array, alive: Array) -> float:
    """How far errors lean away from zero (or towards it) on average, in standard errors.

    The elements of a row share its weights: where those were rounded (eager kernels round their logits) the whole row leans
    together, and is one sample and not as many as it has elements. So rows are the samples, with the scatter that they
    show, and never a smaller one than independent roundings would give.
    """
    counts = alive.sum(-1)
    seen = counts > 0
    rows = (z * np.where(alive, np.sign(value), 0.0)).sum(-1)[seen] / counts[seen]
    scatter = max(float(rows.std()), 1 / sqrt(float(counts[seen].mean())))
    return float(rows.mean()) * sqrt(len(rows)) / scatter


def _row_check(report: TensorReport, z: Array, alive: Array, kind: Numerics) -> None:
    if z.ndim < 2:
        return
    counts = alive.sum(-1)
    rows = np.sqrt((z**2).sum(-1) / np.maximum(counts, 1))
    limit = row_limits(kind, report.tensor, counts)
    excess = np.where(counts >= 8, rows / limit, 0.0)
    worst = np.unravel_index(int(np.argmax(excess)), excess.shape)
    report.checks.append(
        Check(
            "row z", float(rows[worst]) if excess[worst] else 0.0, float(limit[worst]), "the worst single row"
        )
    )
    if report.failing is not None:
        over = excess > 1
        report.failing |= over[..., None] & (np.abs(z) > limit[..., None])


def _single(
    report: TensorReport, error: Array, terms: Terms, setting: Setting, control: Terms | None, lse: float
) -> None:
    """fp32 and fp64: root mean square against the logits' noise and against a plain evaluation."""
    if not setting.statistical:
        return
    unit, value = DTYPES[setting.dtype].unit, np.asarray(terms.value)
    floor, chance = _rms(np.sqrt(terms.floor)), single_chance(report.tensor, error.shape)
    why = "root mean square error against what a unit in each logit does"
    limit = chance * SINGLE_SLOP * unit * _rms(terms.slop) + floor
    report.checks.append(Check("rms", report.rms, limit, why))
    if control is None or setting.dtype != "float32" or error.size < 256:
        return
    plain = _rms(np.asarray(control.value, np.float64) - value)
    # what the plain form does not round: logits once more, where log2(e) goes into the scale; and the lse, from which
    # a backward pass makes the weights of a row anew, so that its rounding moves them all together
    more = _rms(np.sqrt(terms.scores))
    if report.tensor != "out":
        more += lse * _rms(np.sqrt(terms.operand))
    limit = chance * SINGLE_CONTROL * plain + unit * (_rms(value) + more) + floor
    why = "at most 4 x the error of a plain fp32 evaluation, and what logits in base 2 and a stored lse round more"
    report.checks.append(Check("rms/eager", report.rms, limit, why))


def _rms(values: Array) -> float:
    """Root mean square of what is finite."""
    array = np.asarray(values)
    finite = array[np.isfinite(array)]
    return float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0


def judge_lse(got: Array, answer: Answer, setting: Setting) -> TensorReport:
    """The lse: the sharpest sensor, because it is fp32 whatever the input dtype."""
    reference = np.asarray(answer.lse)
    if got.shape != reference.shape:
        return _misshapen("lse", got, reference)
    finite = np.isfinite(reference)
    with np.errstate(invalid="ignore"):
        same = np.where(np.isnan(reference), ~np.isfinite(got), got == reference)
        wrong = np.where(finite, ~np.isfinite(got), ~same)
        error = np.where(finite & np.isfinite(got), got - reference, 0.0)
    size = float(np.sqrt(np.mean(reference[finite] ** 2))) if finite.any() else 0.0
    report = _summary("lse", error, size, int(wrong.sum()))
    bound = lse_bound(reference, np.asarray(answer.lse_slop), setting.dtype, setting.kind)
    bound = np.where(np.isfinite(bound), bound, np.inf)
    used = _ratio(np.abs(error), bound)
    report.failing = wrong | (used > 1)
    report.checks.append(Check("non-finite", float(wrong.sum()), 0.0, "-inf exactly for rows without a key"))
    if setting.only_invariants or error.size == 0:
        return report
    report.bound_used = float(used.max())
    where = np.unravel_index(int(np.argmax(np.where(wrong, np.inf, used))), used.shape)
    index = tuple(int(axis) for axis in where)
    report.worst = Worst(index, float(got[index]), float(reference[index]), float(bound[index]))
    report.bound = float(bound[index])
    report.checks.append(
        Check("lse bound", report.bound_used, 1.0, "8 units of fp32 of the terms of the sum")
    )
    return report


def scorable(answer: Answer, dtype: str) -> bool:
    """Whether logits mean anything in fp32: beyond this only invariants can be asked for."""
    unit = DTYPES[dtype].compute
    return isfinite(answer.condition) and unit * answer.condition < 1e-2


def setting_for(case: Any, answer: Answer, kind: Numerics) -> Setting:
    """The setting of a case under a numerics class."""
    from attnproof.cases import GAUSSIAN

    unit, compute = DTYPES[case.dtype].unit, DTYPES[case.dtype].compute
    # beyond this the noise of the fp32 logits outweighs the roundings that z counts
    quiet = case.dtype in ("float32", "float64") or compute * answer.condition < unit / 8
    # equal weights and repeated factors round alike, so their errors do lean one way
    gaussian = case.generator in GAUSSIAN and case.scale is None and not case.dropout_p
    return Setting(case.dtype, kind, case.statistical and quiet, gaussian, not scorable(answer, case.dtype))
