"""Judge kernels on what the layers of a real model were given: captured q, k, v, padding mask and output gradient."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from attnproof.cases import Case
from attnproof.verify.adapters import ours, sdpa
from attnproof.verify.candidate import Candidate, Outputs, Skip, to_float64
from attnproof.verify.inputs import Inputs, place
from attnproof.verify.judge import Setting, judge, scorable
from attnproof.verify.oracle import Answer, Question, Terms, solve
from attnproof.verify.real_model import Layer
from attnproof.verify.suite import FAIL, PASS, SKIP, Verdict

# what a real layer holds is neither normal nor alike from element to element, yet its roundings are independent
GENERATOR = "captured"


def candidates() -> list[Candidate]:
    """Every backend of ours that runs on the host, and torch's own as peers."""
    made = [ours.build(name, "cpu") for name in ours.names()]
    for name in sdpa.BACKENDS:
        try:
            peer = sdpa.build(name, "cpu")
        except Skip:
            continue
        peer.peer = True
        made.append(peer)
    return made


def case_of(layer: Layer, index: int, group: str) -> Case:
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
        backward=True,
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
            dout=inputs.dout.values(),
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


def judge_layer(
    layer: Layer, case: Case, judged: list[Candidate], tick: Callable[[str], Any]
) -> list[Verdict]:
    """Every candidate on one layer; each runs before the exact answer is known."""
    inputs = inputs_of(layer, case)
    ran = [_run(candidate, inputs) for candidate in judged]
    with np.errstate(all="ignore"):
        answer = answer_of(inputs)
    control = control_of(layer, answer)
    verdicts: list[Verdict] = []
    for candidate, (outputs, reason, seconds) in zip(judged, ran, strict=True):
        verdicts.append(_verdict(candidate, case, outputs, reason, answer, control))
        verdicts[-1].seconds = seconds
        tick(f"{case.name} {candidate.name}")
    return verdicts


def _run(candidate: Candidate, inputs: Inputs) -> tuple[Outputs | None, str, float]:
    """Outputs, or None and why not; and the seconds it took."""
    reason = candidate.refuse(inputs.case)
    if reason:
        return None, reason, 0.0
    started = time.monotonic()
    try:
        with np.errstate(all="ignore"):
            outputs = candidate.call(inputs)
    except (Skip, NotImplementedError) as refusal:
        return None, str(refusal).splitlines()[0], 0.0
    return outputs, "", time.monotonic() - started


def _verdict(
    candidate: Candidate, case: Case, outputs: Outputs | None, reason: str, answer: Answer, control: Answer
) -> Verdict:
    if outputs is None:
        return Verdict(case, candidate.name, SKIP, reason=reason)
    setting = Setting(case.dtype, candidate.kind, True, False, not scorable(answer, case.dtype))
    with np.errstate(all="ignore"):
        reports = judge(outputs.values, answer, setting, control)
    broken = [f"{report.tensor}: {check.name}" for report in reports for check in report.failures()]
    status = PASS if not broken else "FINDING" if candidate.peer else FAIL
    return Verdict(
        case, candidate.name, status, reason="; ".join(broken), tensors=reports, notes=outputs.notes
    )
