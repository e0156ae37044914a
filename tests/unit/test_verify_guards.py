"""Each guard finds the thing it is named after; and the run as a whole says what it could not check."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnproof.cases import Case, find, pool
from attnproof.verify import guards, isolation, loaders, power, probes, selftest, session, suite, tiers
from attnproof.verify.blas import one_thread
from attnproof.verify.candidate import Candidate, Outputs, Traits
from attnproof.verify.inputs import FAR_REACH, GUARD, Inputs, build
from attnproof.verify.mutants import kernel
from attnproof.verify.mutants.catalogue import find as operator

CASE = find("normal-128/float16")


def around(change: Any, traits: Traits | None = None) -> Candidate:
    """The correct kernel with something done to what it returns."""
    good = kernel.correct()

    def call(inputs: Inputs) -> Outputs:
        return change(good.call(inputs), inputs)

    return Candidate("changed", call, traits or good.traits)


def test_unwritten_memory_is_nan_and_fails() -> None:
    """G1: an output that nobody wrote must not be yesterday's right answer."""
    verdict = suite.run_case(kernel.mutate(operator("tail-rows-unwritten")), find("edge-65x63/float16"))
    assert verdict.status == "FAIL"
    assert "all NaN there" in verdict.hint


def test_allocation_is_poisoned_for_numpy_and_torch_and_put_back() -> None:
    torch = pytest.importorskip("torch")
    before = (np.empty, torch.empty)
    with guards.poisoned(Candidate("any", lambda inputs: Outputs({}))):
        assert np.isnan(np.empty(3)).all()
        assert (np.empty(3, np.uint16) == 0x7FC1).all()
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.ones(2, dtype=torch.bfloat16)).isnan().all()
    assert (np.empty, torch.empty) == before


def test_a_reference_that_is_not_finite_cannot_approve_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """G2: `nan > limit` is false, so a NaN reference would accept every kernel."""
    real = suite.expected

    def spoiled(inputs: Inputs) -> Any:
        answer = real(inputs)
        answer.tensors["out"].value[...] = np.nan
        return answer

    monkeypatch.setattr(suite, "expected", spoiled)
    verdict = suite.run_case(around(lambda outputs, inputs: outputs), CASE)
    assert not verdict.ok


def test_a_case_that_accepts_a_decoy_is_powerless() -> None:
    """G3: with one key every average is right, so that case may not count."""
    easy = find("edge-1x1/float16")
    assert easy.diagnostic
    assert "mean of v" in power.accepted(easy)


def refused(cases: list[Case]) -> list[str]:
    """The cases that count as proof although they accept a decoy."""
    return [case.id for case in cases if not case.diagnostic and power.accepted(case, 0, suite.Answers())]


def test_every_case_of_tier_standard_has_power_or_says_that_it_has_none() -> None:
    """One that does neither makes every run of the tier leave with 5, whatever the kernel."""
    with one_thread():
        assert [] == refused(tiers.cases("standard"))


@pytest.mark.slow
def test_every_case_has_power_or_says_that_it_has_none() -> None:
    heavy = ("many-heads", "long-keys-16384", "long-square-16384")
    with one_thread():
        assert [] == refused([case for case in pool() if case.name not in heavy])


def test_a_run_with_a_powerless_case_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    blunt = replace(find("edge-1x1/float16"), diagnostic=False)
    plan = session.Plan(tier="test", cases=(blunt,), sharpness="")
    document = session.run(session.Chosen([around(lambda outputs, inputs: outputs)], []), plan)
    powerless = [result for result in document["results"] if result["status"] == "POWERLESS"]
    assert ["edge-1x1/float16"] == [result["case"] for result in powerless]
    assert "mean of v" in powerless[0]["reason"]


@pytest.mark.parametrize("name", ["cached-by-shape", "cached-by-fingerprint"])
def test_cached_results_are_found_by_one_late_value_of_v(name: str) -> None:
    """G4: the first values of q are the same, one value of the last key is not."""
    broken = probes.failed(probes.probe(kernel.mutate(operator(name))))
    assert list(broken) == ["G4 fresh results"]
    assert "cached" in broken["G4 fresh results"]


def test_written_inputs_are_invalid_even_when_the_output_is_right() -> None:
    """G5: a reference computed after the call would have used the changed inputs."""
    verdict = suite.run_case(kernel.mutate(operator("writes-v")), CASE)
    assert (verdict.status, verdict.reason) == ("INVALID", "wrote to its inputs: v")


def test_a_write_next_to_an_input_is_seen() -> None:
    """G6: the bands around an array belong to its checksum."""
    verdict = suite.run_case(kernel.mutate(operator("writes-outside")), CASE)
    assert verdict.reason == "wrote to its inputs: k"


def test_inputs_lie_in_nan_on_both_sides() -> None:
    inputs = build(find("layout-offset/bfloat16"))
    assert inputs.q.offset == GUARD + 1
    assert (inputs.q.buffer[:GUARD] == 0x7FC1).all()
    assert (inputs.q.buffer[-GUARD:] == 0x7FC1).all()


@pytest.mark.parametrize("layout", ["bmhd", "offset", "strided", "transposed", "qkv", "expanded"])
def test_every_layout_holds_the_same_values(layout: str) -> None:
    """Only strides, offset and alignment change; the numbers do not."""
    plain = build(
        replace(find(f"layout-{layout}/float32"), layout="bhmd" if layout != "expanded" else layout)
    )
    other = build(find(f"layout-{layout}/float32"))
    assert other.k.strides != plain.k.strides or layout in ("offset", "expanded")
    np.testing.assert_array_equal(other.k.values(), plain.k.values())


def test_the_far_layout_passes_two_to_the_thirty_one() -> None:
    """G15: a 32-bit offset wraps where the last rows lie; nobody touches the pages between."""
    inputs = build(find("layout-far-strides/float16"))
    last = sum((size - 1) * stride for size, stride in zip(inputs.k.shape, inputs.k.strides, strict=True))
    assert last >= 2**31
    assert inputs.k.buffer.size > FAR_REACH


def test_a_result_that_changes_after_it_was_returned_is_found() -> None:
    """G7: lazy tensors and threads that still write."""
    import threading

    def late(outputs: Outputs, inputs: Inputs) -> Outputs:
        array = outputs.raw["out"]
        threading.Timer(0.005, lambda: array.fill(0)).start()
        return outputs

    assert probes.complete(around(late), CASE).startswith("fail: out changed after it was returned")


def test_exchanged_clocks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """G8: a kernel that patches the timer is infinitely fast."""

    def patch(outputs: Outputs, inputs: Inputs) -> Outputs:
        monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
        return outputs

    assert probes.clocks(around(patch), CASE) == "fail: perf_counter exchanged"


def test_impossible_speed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """G9: no time at all is less than the arithmetic needs."""
    monkeypatch.setitem(probes._CLOCKS, "perf_counter", lambda: 1.0)
    assert probes.possible_speed(around(lambda outputs, inputs: outputs), CASE).startswith("fail")


def test_a_kernel_that_does_nothing_would_not_pass_the_probe_case() -> None:
    """G10: the ghost run."""
    assert "a kernel that does nothing fails" in probes.path_witness(kernel.correct(), CASE)


def test_calls_that_differ_must_be_declared() -> None:
    """G11: races show in repetition; kernels with atomics say so."""
    calls = iter(range(10**6))

    def wobble(outputs: Outputs, inputs: Inputs) -> Outputs:
        outputs.values["out"] = outputs.values["out"] * (1 + 1e-9 * (next(calls) % 2))
        return outputs

    assert probes.repeated(around(wobble), CASE).startswith("fail: 10 of 20 calls differ")
    relaxed = replace(kernel.correct().traits, deterministic=False)
    assert probes.repeated(around(wobble, relaxed), CASE).startswith("ok: 10 of 20 calls differ, as declared")


def test_what_a_probe_raises_is_its_result() -> None:
    def refuse(inputs: Inputs) -> Outputs:
        raise ZeroDivisionError("by design")

    found = probes.probe(Candidate("raises", refuse, Traits(arrays="numpy")))
    assert found["G7 complete results"] == "fail: raised ZeroDivisionError: by design"
    nothing = Candidate("picky", refuse, Traits(arrays="numpy"), refuse=lambda case: "no")
    assert probes.probe(nothing) == {}


@pytest.fixture
def file_kernel(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "kernel.py"
    path.write_text(
        "import os\n"
        "from attnproof.api import attention_with_lse\n"
        "def attention(q, k, v, *, causal, scale, mask=None):\n"
        "    if q.shape[2] == 1:\n"
        "        os._exit(3)\n"
        "    return attention_with_lse(q, k, v, causal=causal, scale=scale, mask=mask, backend='streaming')\n"
        "attention.attnproof = {'arrays': 'numpy', 'numerics': 'precise', 'dtypes': ['float16', 'float32', 'float64']}\n"
    )
    yield f"{path}:attention"


def test_a_crash_in_a_child_process_is_a_verdict(file_kernel: str) -> None:
    """`--adversarial`: the kernel takes its child with it, and the run goes on."""
    shell = isolation.isolated(loaders.load(file_kernel))
    try:
        found = suite.run(shell, [find("edge-1x300/float32"), find("normal-128/float32")])
    finally:
        isolation.close(shell)
    assert [verdict.status for verdict in found] == ["FAIL", "PASS"]
    assert "the child process died on edge-1x300/float32" in found[0].reason


def test_an_adversarial_plan_has_a_hidden_seed_and_unseen_lengths() -> None:
    """G14: what a kernel cannot have seen it cannot have cached."""
    cases = tuple(case for case in pool() if case.group == "normal")
    plan = isolation.hidden(session.Plan(tier="test", cases=cases))
    new = [case for case in plan.cases if case not in cases]
    assert plan.seed > 0
    assert len(new) == isolation.JITTERED
    assert all(find(case.id) == case for case in new)


def test_a_session_records_coverage_guards_and_sharpness() -> None:
    cases = (find("normal-128/float16"), find("packed/float16"), find("window-both/bfloat16"))
    chosen = session.Chosen([selftest.from_control(next(iter(_flash())))], [("cudnn", "no GPU")])
    document = session.run(chosen, session.Plan(tier="test", cases=cases, sharpness="classics"))
    protocol = document["protocol"]
    assert protocol["candidates"][0]["coverage"] == "checked 2 of 3"
    assert protocol["absent"] == [{"name": "cudnn", "why": "no GPU"}]
    assert (protocol["mutants_found"], protocol["mutants_missed"]) == (5, [])
    (entry,) = [result for result in document["results"] if result["group"] == "guards"]
    assert entry["guards"]["G11 repeated calls"] == "ok: 20 calls agree bit for bit"


def _flash() -> Iterator[Any]:
    from attnproof.verify.controls import CONTROLS

    yield from CONTROLS
