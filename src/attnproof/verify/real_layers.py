"""Judge kernels on what the layers of a real model were given: q, k, v, mask, gradient of the output."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnproof.cases import Case
from attnproof.verify import guards
from attnproof.verify.candidate import Candidate, Outputs, Skip, to_float64
from attnproof.verify.inputs import Inputs, place
from attnproof.verify.judge import Setting, TensorReport, judge, scorable
from attnproof.verify.oracle import Answer, Question, Terms, solve
from attnproof.verify.real_model import Layer
from attnproof.verify.steps import FINDING
from attnproof.verify.suite import FAIL, PASS, SKIP, Verdict

# how a real layer's numbers come about: no generator of ``inputs`` makes them
GENERATOR = "captured"


def case_of(layer: Layer, index: int, group: str, *, backward: bool) -> Case:
    """The captured call as a named case."""
    B, H, M, D = layer.q.shape
    return Case(
        name=f"real-layer-{index + 1}",
        group=group,
        B=B,
        H=H,
        Hkv=layer.k.shape[1],
        M=M,
        N=layer.k.shape[2],
        D=D,
        Dv=layer.v.shape[3],
        generator=GENERATOR,
        keep="padding",
        keep_axes="B1MN",
        scale=layer.scale,
        layout="bmhd",
        backward=backward,
    )


def inputs_of(layer: Layer, case: Case) -> Inputs:
    """The captured arrays in poisoned buffers, laid out as the model lays them out."""
    q, k, v, dout = (
        place(to_float64(x), case.dtype, "bmhd") for x in (layer.q, layer.k, layer.v, layer.dout)
    )
    return Inputs(case, 0, q=q, k=k, v=v, dout=dout, keep=layer.keep.numpy())


def answer_of(inputs: Inputs) -> Answer:
    """The exact answer, with its sensitivities."""
    return solve(
        Question(
            q=inputs.q.values(),
            k=inputs.k.values(),
            v=inputs.v.values(),
            dout=inputs.dout.values() if inputs.case.backward else None,
            keep=inputs.keep,
            scale=inputs.case.softmax_scale,
            dtype=inputs.case.dtype,
        )
    )


def control_of(layer: Layer, answer: Answer) -> Answer:
    """The same by the plainest float32 evaluation, the yardstick of root mean square errors."""
    import torch

    leaves = [x.float().requires_grad_(True) for x in (layer.q, layer.k, layer.v)]
    q, k, v = leaves
    scores = (layer.scale * q @ k.transpose(-1, -2)).masked_fill(~layer.keep, float("-inf"))
    out = torch.softmax(scores, -1) @ v
    grads = torch.autograd.grad(out, leaves, layer.dout)
    plain = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
    tensors = {name: _terms(to_float64(value)) for name, value in plain.items()}
    return Answer(tensors, answer.lse, answer.lse_slop, answer.dead)


def _terms(value: Any) -> Terms:
    nothing = np.zeros(())
    return Terms(value, *(nothing,) * (len(Terms.__dataclass_fields__) - 1))


@dataclass(frozen=True)
class Ran:
    """What became of one call: outputs, or a status and its reason."""

    candidate: Candidate
    outputs: Outputs | None = None
    status: str = PASS
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Heard:
    """One layer, and what each candidate made of it; nothing is judged yet."""

    layer: Layer
    inputs: Inputs
    ran: tuple[Ran, ...]


def ask(layer: Layer, case: Case, judged: list[Candidate], tick: Callable[[str], Any]) -> Heard:
    """Run every candidate on one layer, before the exact answer is known."""
    inputs = inputs_of(layer, case)
    ran: list[Ran] = []
    for candidate in judged:
        ran.append(_run(candidate, inputs))
        tick(f"{case.name} {candidate.name}")
    return Heard(layer, inputs, tuple(ran))


def decide(heard: Heard) -> list[Verdict]:
    """Compute the exact answer of one layer and hold every candidate against it."""
    with np.errstate(all="ignore"):
        answer = answer_of(heard.inputs)
    control = control_of(heard.layer, answer)
    verdicts: list[Verdict] = []
    for ran in heard.ran:
        verdict = _verdict(ran, heard.inputs.case, answer, control)
        verdict.seconds = ran.seconds
        for report in verdict.tensors:
            report.failing = None  # a boolean per element, which nobody reads again
        verdicts.append(verdict)
    return verdicts


def _run(candidate: Candidate, inputs: Inputs) -> Ran:
    """Call one candidate, on memory that it must not rely on and inputs that it must not write to."""
    reason = candidate.refuse(inputs.case)
    if reason:
        return Ran(candidate, None, SKIP, reason)
    before, started = guards.fingerprint(inputs), time.monotonic()
    try:
        with guards.poisoned(candidate), np.errstate(all="ignore"):
            outputs = candidate.call(inputs)
    except (Skip, NotImplementedError) as refusal:
        return Ran(candidate, None, SKIP, str(refusal).splitlines()[0])
    except Exception as error:  # a foreign kernel may raise anything; that is a verdict, not a crash of ours
        return Ran(candidate, None, FAIL, f"raised {type(error).__name__}: {error}".splitlines()[0])
    seconds = time.monotonic() - started
    changed = guards.changed(inputs, before)
    if changed:
        return Ran(candidate, None, FAIL, f"wrote to its inputs: {', '.join(changed)}", seconds)
    return Ran(candidate, outputs, seconds=seconds)


def _verdict(ran: Ran, case: Case, answer: Answer, control: Answer) -> Verdict:
    candidate, status, reason, reports = ran.candidate, ran.status, ran.reason, list[TensorReport]()
    if ran.outputs is not None:
        setting = Setting(case.dtype, candidate.kind, True, False, not scorable(answer, case.dtype))
        with np.errstate(all="ignore"):
            reports = judge(ran.outputs.values, answer, setting, control)
        broken = [f"{report.tensor}: {check.name}" for report in reports for check in report.failures()]
        status, reason = (FAIL if broken else PASS), "; ".join(broken)
    if status == FAIL and candidate.peer:
        status = FINDING
    notes = () if ran.outputs is None else ran.outputs.notes
    return Verdict(case, candidate.name, status, reason=reason, tensors=reports, notes=notes)
