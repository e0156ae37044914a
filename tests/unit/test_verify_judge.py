"""The judge: correct kernels of every class pass, decoys do not, and the fixed thresholds are only reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attnproof.cases import find
from attnproof.verify import controls, loaders, numerics, power
from attnproof.verify.candidate import Skip
from attnproof.verify.expected import expected
from attnproof.verify.inputs import Inputs, build
from attnproof.verify.judge import Check, TensorReport, _lean, judge, scorable, setting_for
from attnproof.verify.mutants.catalogue import find as operator
from attnproof.verify.mutants.kernel import mutate
from attnproof.verify.suite import Answers, run_case

CASES = (
    "normal-128/float16",
    "normal-128/bfloat16",
    "normal-128/float32",
    "normal-128/float64",
    "everything/bfloat16",
    "everything/float32",
    "large-v-200x330/float16",
    "mask-dead-rows/float16",
    "dropout-half/float32",
)


ANSWERS = Answers()


def judged(inputs: Inputs, outputs: dict[str, Any], kind: str = "flash") -> dict[str, TensorReport]:
    answer, plain = ANSWERS.of(inputs)
    setting = setting_for(inputs.case, answer, numerics.numerics(kind))
    stored = {} if inputs.bias is None else {"dbias": inputs.bias.dtype}
    with np.errstate(all="ignore"):
        return {report.tensor: report for report in judge(outputs, answer, setting, plain, stored)}


@pytest.mark.parametrize("kernel", controls.CONTROLS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("identifier", CASES)
def test_independent_correct_kernels_pass(kernel: controls.Control, identifier: str) -> None:
    """A false alarm costs more trust than a missed fault."""
    case = find(identifier)
    reason = controls.serves(kernel, case)
    if reason:
        pytest.skip(reason)
    inputs = build(case, 7)
    with np.errstate(all="ignore"):
        outputs = controls.run(kernel, inputs)
    reports = judged(inputs, outputs, kernel.kind)
    assert {} == {name: report.failures() for name, report in reports.items() if not report.ok}


@pytest.mark.parametrize("identifier", ["longer-queries-causal/bfloat16", "everything/bfloat16"])
def test_weights_in_two_numbers_pass_and_in_one_they_do_not(identifier: str) -> None:
    """The class of a matrix unit that takes each weight as a sum of two bf16 numbers is far narrower than `flash`."""
    inputs = build(find(identifier), 0)
    split, flash = (
        next(kernel for kernel in controls.CONTROLS if kernel.kind == kind) for kind in ("split", "flash")
    )
    with np.errstate(all="ignore"):
        in_two, in_one = ({"out": controls.run(kernel, inputs)["out"]} for kernel in (split, flash))
    assert judged(inputs, in_two, "split")["out"].ok
    assert not judged(inputs, in_one, "split")["out"].ok


def test_z_of_a_correct_half_precision_kernel_stands_near_one_whatever_the_length() -> None:
    """The point of the model: the limit does not grow lax with the number of keys."""
    found = []
    for identifier in ("normal-128/bfloat16", "normal-512/bfloat16", "long-far-tail/bfloat16"):
        inputs = build(replace(find(identifier), backward=False), 1)
        found.append(judged(inputs, controls.run(controls.CONTROLS[0], inputs))["out"].z_rms)
    assert all(z is not None and 0.85 < z < 1.1 for z in found), found


@pytest.mark.parametrize("identifier", ["normal-128/bfloat16", "long-keys-16384/bfloat16", "gqa-8-2/float32"])
def test_no_decoy_passes_a_case_that_counts(identifier: str) -> None:
    """Zeros, the mean of v, another row or head: a case that accepts one of them proves nothing."""
    assert [] == power.accepted(find(identifier))


def test_zeros_pass_the_fixed_thresholds_on_long_rows_and_fail_the_model() -> None:
    """Outputs shrink with the number of keys: at 300000 keys max abs <= 1e-2 lets the all-zero kernel through."""
    case = replace(find("long-keys-16384/bfloat16"), name="long-keys-300000", N=300_000, M=2, backward=False)
    report = judged(build(case, 0), {"out": np.zeros((1, 1, 2, 64))})["out"]
    assert (report.max_abs < 1e-2, report.ok) == (True, False)


def test_a_nan_never_passes_a_check() -> None:
    """`nan > limit` is false, so a check written that way accepts everything."""
    assert not Check("any", float("nan"), 1.0).ok
    inputs = build(find("normal-128/bfloat16"), 0)
    out = np.array(expected(inputs).tensors["out"].value)
    out[0, 0, 3, 5] = np.nan
    report = judged(inputs, {"out": out})["out"]
    assert not report.ok
    assert report.worst is not None and report.worst.index == (0, 0, 3, 5)


def test_a_wrong_shape_is_a_failure_and_not_a_broadcast() -> None:
    inputs = build(find("normal-128/bfloat16"), 0)
    report = judged(inputs, {"out": np.zeros((1, 1, 1, 1))})["out"]
    assert [check.name for check in report.failures()] == ["shape"]
    assert "(1, 2, 128, 64)" in report.failures()[0].why


def test_rows_without_a_key_must_be_exactly_zero_and_their_lse_minus_infinity() -> None:
    inputs = build(find("mask-dead-rows/float32"), 0)
    answer = expected(inputs)
    out, lse = np.array(answer.tensors["out"].value), np.array(answer.lse)
    assert judged(inputs, {"out": out, "lse": lse}, "precise")["out"].ok
    out[0, 0, 0, 0] = 1e-30
    lse[0, 0, 0] = -1e30
    reports = judged(inputs, {"out": out, "lse": lse}, "precise")
    assert "exact zeros" in [check.name for check in reports["out"].failures()]
    assert [check.name for check in reports["lse"].failures()] == ["non-finite"]


def test_the_lse_shows_one_dropped_key_among_a_thousand() -> None:
    """A key in 1000 moves the lse by 1e-3, four thousand times what fp32 may lose."""
    inputs = build(find("gqa-257x1000-causal/bfloat16"), 0)
    case = inputs.case
    answer = expected(inputs)
    short = np.array(answer.lse) - 1.0 / case.N
    assert judged(inputs, {"lse": short})["lse"].bound_used > 100


def test_an_eager_kernel_fails_the_flash_class_and_passes_its_own() -> None:
    """The class is part of the claim: rounding the logits is not what a fused kernel does."""
    inputs = build(find("peaked4-150x330/bfloat16"), 0)
    eager = next(kernel for kernel in controls.CONTROLS if kernel.kind == "eager")
    outputs = controls.run(eager, inputs)
    assert not judged(inputs, outputs, "flash")["out"].ok
    assert judged(inputs, outputs, "eager")["out"].ok


def test_logits_beyond_fp32_are_asked_for_invariants_only() -> None:
    """With every input at 1e4 a logit is known to half a unit; no kernel can be scored there, but all stay finite."""
    inputs = build(find("large-all-130x200/float16"), 0)
    answer = expected(inputs)
    assert not scorable(answer, "float16")
    inside = judged(inputs, {"out": np.full((1, 4, 130, 64), 1e4)})["out"]
    outside = judged(inputs, {"out": np.full((1, 4, 130, 64), 3e4)})["out"]
    assert inside.ok and not outside.ok


def test_truncated_outputs_are_found_by_their_lean() -> None:
    """Rounding towards zero stays within every bound and leans one way: only the bias statistic sees it."""
    verdict = run_case(mutate(operator("output-truncated")), find("normal-512/bfloat16"), 0, Answers())
    assert not verdict.ok
    failing = {check.name for report in verdict.tensors for check in report.failures()}
    assert "bias" in failing


def test_custom_numerics_come_from_a_dict_and_unknown_names_are_refused() -> None:
    assert numerics.numerics({"operand": 0.5, "eta_exp": 1e-4}).eta_exp == 1e-4
    with pytest.raises(ValueError, match="expected one of flash, precise, split, eager, got 'fast'"):
        numerics.numerics("fast")


def test_a_lean_is_counted_in_rows() -> None:
    """Roundings shared by a row make it one sample: counted as 64, they would look like a bias of the kernel."""
    rng = np.random.default_rng(0)
    value, alive = rng.standard_normal((1, 4, 256, 64)), np.ones((1, 4, 256, 64), bool)
    alone = rng.standard_normal(value.shape)
    shared = np.sign(value) * rng.standard_normal((1, 4, 256, 1))
    biased = alone + 0.1 * np.sign(value)
    assert abs(_lean(alone, value, alive)) < 4
    assert abs(_lean(shared, value, alive)) < 4
    # 0.1 standard errors of one element, in 65536 elements
    assert _lean(biased, value, alive) == pytest.approx(0.1 * 256, rel=0.2)
    assert _lean(-biased, value, alive) < -20


@pytest.mark.parametrize(("case", "seed"), [("edge-1x1/float32", 77), ("head-dim-1/float32", 70)])
def test_a_correct_fp32_kernel_with_few_samples_is_not_flagged(case: str, seed: int) -> None:
    """These seeds were false alarms: one weight decides a gradient, and heads of one number round nothing in the plain form."""
    try:
        native = loaders.load("attnproof:native", "cpu")
    except Skip as reason:
        pytest.skip(str(reason))
    verdict = run_case(native, find(case), seed)
    assert "PASS" == verdict.status, verdict.reason


@pytest.mark.parametrize(
    ("tensor", "shape", "factor"),
    [("dv", (1, 2, 1, 64), 2.5), ("dsink", (8,), 1.75), ("out", (1, 2, 225, 64), 1.1)],
)
def test_the_samples_of_a_single_precision_limit_are_rows(
    tensor: str, shape: tuple[int, ...], factor: float
) -> None:
    """A weight's error is shared by the whole row: 64 elements of one row are one sample."""
    assert factor == pytest.approx(numerics.single_chance(tensor, shape))
