"""Guards that look at a candidate once, on a small case, instead of at each result.

Each probe returns a sentence: it starts with "ok", "fail" or "n/a" and says what was seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from attnproof.cases import Case, find
from attnproof.verify.candidate import Candidate, Outputs, Skip
from attnproof.verify.dtypes import Array
from attnproof.verify.inputs import Inputs, build, place

# bound at import, so a candidate that exchanges them later is seen (G8)
_CLOCKS = {name: getattr(time, name) for name in ("time", "perf_counter", "perf_counter_ns", "monotonic")}
REPEATS = 20
PROBE_CASES = ("normal-128/bfloat16", "normal-128/float16", "normal-128/float32", "normal-128/float64")
# nothing that runs this package moves or computes more per second than this
CPU_BYTES, CPU_FLOPS = 2e12, 2e13
GPU_BYTES, GPU_FLOPS = 1e13, 5e15


def probe(candidate: Candidate) -> dict[str, str]:
    """All probes of a candidate; empty when it takes none of the probe cases."""
    case = next((case for case in map(find, PROBE_CASES) if candidate.refuse(case) is None), None)
    if case is None:
        return {}
    probes: dict[str, Callable[[Candidate, Case], str]] = {
        "G4 fresh results": fresh,
        "G7 complete results": complete,
        "G8 real clocks": clocks,
        "G9 possible speed": possible_speed,
        "G10 path witness": path_witness,
        "G11 repeated calls": repeated,
        "G12 no TF32": no_tf32,
        "G13 launches checked": launches,
    }
    found: dict[str, str] = {}
    for name, run in probes.items():
        try:
            with np.errstate(all="ignore"):
                found[name] = run(candidate, case)
        except (Skip, NotImplementedError) as reason:
            found[name] = f"n/a: {reason}"
        except Exception as error:  # whatever a foreign kernel raises is what this probe saw
            found[name] = f"fail: raised {type(error).__name__}: {error}"
    return found


def failed(found: dict[str, str]) -> dict[str, str]:
    """The probes that found something."""
    return {name: text for name, text in found.items() if text.startswith("fail")}


def _same(a: Outputs, b: Outputs) -> bool:
    return all(
        np.array_equal(a.values[name], b.values[name], equal_nan=True)
        for name in a.values
        if name in b.values
    )


def _with_values(inputs: Inputs, name: str, values: Array) -> Inputs:
    """The same inputs with one tensor replaced, at another address."""
    return replace(inputs, **{name: place(values, inputs.case.dtype)})


def fresh(candidate: Candidate, case: Case) -> str:
    """One late value of v changes: so must the output. The same values elsewhere in memory: the output must not."""
    case = replace(case, backward=False)
    inputs = build(case, seed=11)
    first = candidate.call(inputs)
    kept = {name: value.copy() for name, value in first.values.items()}
    v = inputs.v.values()
    moved = candidate.call(_with_values(inputs, "v", v))
    v[:, :, -1, -1] += 4.0
    changed = candidate.call(_with_values(inputs, "v", v))
    if np.array_equal(kept["out"], changed.values["out"]):
        return "fail: v changed and the output did not: a cached result"
    if candidate.traits.deterministic and not np.array_equal(kept["out"], moved.values["out"]):
        return "fail: the same values at another address give another output"
    other = candidate.call(build(case, seed=12))
    if np.array_equal(kept["out"], other.values["out"]):
        return "fail: other inputs and the same output: a replayed result"
    return "ok: one late value of v shows, and the address does not"


def complete(candidate: Candidate, case: Case) -> str:
    """What was returned does not change after it was returned: no lazy tensor, no thread still writing."""
    outputs = candidate.call(build(case, seed=13))
    raw: Any = outputs.raw.get("out")
    if hasattr(raw, "untyped_storage") and raw.untyped_storage().size() == 0 and raw.numel():
        return "fail: the returned tensor has no storage"
    from attnproof.verify.candidate import to_float64

    now = {name: value.copy() for name, value in outputs.values.items()}
    time.sleep(0.02)
    later = {name: to_float64(value) for name, value in outputs.raw.items() if name in now}
    for name, value in later.items():
        before = now[name] if now[name].shape == value.shape else now[name].reshape(value.shape)
        if not np.array_equal(before, value, equal_nan=True):
            return f"fail: {name} changed after it was returned"
    return "ok: nothing changed after the call"


def clocks(candidate: Candidate, case: Case) -> str:
    """The time functions are those that were there at import."""
    candidate.call(build(case, seed=14))
    exchanged = [name for name, function in _CLOCKS.items() if getattr(time, name) is not function]
    return (
        f"fail: {', '.join(exchanged)} exchanged" if exchanged else "ok: the clocks are the ones from import"
    )


def possible_speed(candidate: Candidate, case: Case) -> str:
    """No faster than reading the inputs and computing the products allows on the fastest machine there is."""
    inputs = build(replace(case, backward=False), seed=15)
    candidate.call(inputs)
    started = _CLOCKS["perf_counter"]()
    candidate.call(inputs)
    took = _CLOCKS["perf_counter"]() - started
    gpu = candidate.device != "cpu"
    flops = 4.0 * case.B * case.H * case.M * case.N * case.D
    floor = 0.95 * flops / (GPU_FLOPS if gpu else CPU_FLOPS)
    if not took >= floor:
        return f"fail: {took:.2e} s, below the possible {floor:.2e} s"
    return f"ok: {took:.1e} s, the least possible is {floor:.1e} s"


def path_witness(candidate: Candidate, case: Case) -> str:
    """Which kernel ran, and that a kernel which writes nothing would not pass."""
    from attnproof.verify.suite import Answers, judge_outputs

    inputs = build(case, seed=16)
    outputs = candidate.call(inputs)
    ghost = Outputs({name: np.zeros_like(value) for name, value in outputs.values.items()})
    if judge_outputs(candidate, inputs, ghost, Answers()).ok:
        return "fail: a kernel that does nothing would have passed"
    ran = (
        f"{candidate.witness()} ran"
        if candidate.witness is not None
        else "the path cannot be told from outside"
    )
    return f"ok: {ran}; a kernel that does nothing fails"


def repeated(candidate: Candidate, case: Case) -> str:
    """Twenty calls agree bit for bit, unless the candidate says that they need not."""
    inputs = build(case, seed=17)
    first = candidate.call(inputs)
    kept = Outputs({name: value.copy() for name, value in first.values.items()})
    differing = sum(not _same(kept, candidate.call(inputs)) for _ in range(REPEATS - 1))
    if not differing:
        return f"ok: {REPEATS} calls agree bit for bit"
    if candidate.traits.deterministic:
        return (
            f"fail: {differing} of {REPEATS} calls differ, and it does not say that it is not deterministic"
        )
    return f"ok: {differing} of {REPEATS} calls differ, as declared"


def no_tf32(candidate: Candidate, case: Case) -> str:
    """TF32 is off, so fp32 means fp32 for candidate and control."""
    if candidate.device == "cpu":
        return "n/a: a CPU has no TF32"
    import torch

    # cuDNN's flag is on as torch ships it and speaks of convolutions alone
    return (
        "fail: torch allows TF32; set torch.backends.cuda.matmul.allow_tf32 = False"
        if torch.backends.cuda.matmul.allow_tf32
        else "ok: TF32 is off"
    )


def launches(candidate: Candidate, case: Case) -> str:
    """No launch error is left behind; resources of compiled kernels are the business of their build records."""
    if candidate.device == "cpu":
        return "n/a: no launches on a CPU"
    import torch

    candidate.call(build(case, seed=18))
    torch.cuda.synchronize()
    return "ok: no error after a synchronised call"
