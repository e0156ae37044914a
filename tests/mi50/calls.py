"""Calls of backend dot2 that run on the interpreter, and the parity suite's judgement of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity import targets
from tests.parity.calls import Call
from tests.parity.checking import _check_gradient, check_frame
from tests.parity.problems import CASES, Case, everything, packed
from tests.parity.targets import Target
from tests.parity.tolerance import GRADIENTS, Allowed, assert_close, expected

import attnproof
from attnproof.backends import dot2
from attnproof.problem import Problem

from .interpreter import Ahead, Interpreter

TARGET = Target("dot2", "torch")


def refuses(problem: Problem) -> bool:
    return problem.dtype == "float64" or max(problem.D, problem.Dv) > 256


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parity suite's tables as they are for a backend that rounds p and dS to fp16."""
    monkeypatch.setitem(targets.REFUSES, "dot2", refuses)
    monkeypatch.setattr(targets, "HALF_OPERANDS", targets.HALF_OPERANDS | {"dot2"})


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def run(call: Call, *, gradients: bool = True) -> tuple[Any, tuple[str, ...]]:
    """The results of a call, and which gradients are among them."""
    if not (gradients and call.case.differentiable):
        return call.forward(), ()
    needs = tuple(name for name in GRADIENTS if name in call.arrays)
    return call.gradients(needs), needs


def compile_all(cases: Iterable[Case], ahead: Ahead | None = None, *, gradients: bool = True) -> None:
    """Start to compile what these cases will run."""
    with dot2.running_on(ahead or Ahead()):
        for case in cases:
            run(Call(TARGET, case), gradients=gradients)


def judge(case: Case, interpreter: Interpreter, *, gradients: bool = True) -> Any:
    """Run a case once, forward and (if it has them) every gradient, and hold all of it against float64."""
    return hold(Call(TARGET, case), expected(case, half_operands=True), interpreter, gradients=gradients)


def hold(call: Call, right: dict[str, Allowed], runner: Any, *, gradients: bool = True) -> Any:
    """Run a call once on a runner of steps, and hold everything that comes back against what is allowed."""
    with dot2.running_on(runner):
        result, needs = run(call, gradients=gradients)
    check_frame(call.case, call.target, result)
    for name, got in result.named(call.case).items():
        if got is not None:
            assert_close(got, right[name], name)
    for name in needs:
        _check_gradient(call, name, result.grads[name], right[name])
    return result


def plain(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention of one head in float64."""
    s = q @ k.T / np.sqrt(q.shape[1])
    top = s.max(axis=1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(axis=1, keepdims=True)
    return p / total @ v, (top + np.log(total))[:, 0]


def distances(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, on: Interpreter | None = None
) -> tuple[float, float]:
    """Largest |out - float64| and |lse - float64| of fp16 arrays [n, d]."""
    tensors = [torch.from_numpy(x.astype(np.float16))[None, None] for x in (q, k, v)]
    with dot2.running_on(on or Interpreter()):
        out, lse = attnproof.attention_with_lse(*tensors, backend="dot2")
    right, right_lse = plain(*(x[0, 0].double().numpy() for x in tensors))
    return (
        float(np.abs(out[0, 0].double().numpy() - right).max()),
        float(np.abs(lse[0, 0].double().numpy() - right_lse).max()),
    )


UNEVEN = ((5, 0, 33, 1, 17), (9, 12, 33, 40, 0))
SMALL: dict[str, Any] = {"B": 1, "H": 2, "Hkv": 1, "dtype": "float16"}
# every option at least once, every dtype, every way of storing rows, tile edges, head dims of all kinds
PARITY: tuple[Case, ...] = (
    Case("two tiles each way", M=70, N=77, D=64, Dv=64, **SMALL),
    Case("two tiles each way, causal", M=70, N=77, D=64, Dv=64, options={"causal": True}, **SMALL),
    Case("top left", M=70, N=40, options={"causal": True, "align": "top_left"}, **SMALL),
    Case("window", M=70, N=100, options={"window": (20, 5)}, **SMALL),
    Case("D 128", M=65, N=33, D=128, Dv=128, options={"causal": True}, **SMALL),
    Case("D 80 and Dv 40", M=21, N=37, D=80, Dv=40, **SMALL),
    Case("D 512", M=9, N=20, D=512, Dv=512, options={"causal": True}, **SMALL),
    Case("D 59, not aligned", M=21, N=37, D=59, Dv=24, **SMALL),
    Case("mask by tiles", M=70, N=100, keep="11MN", dead=(2,), first_key=66, **SMALL),
    Case("mask of every head, bfloat16", keep="BHMN", **{**SMALL, "dtype": "bfloat16"}),
    Case("bias", bias="1HMN", **SMALL),
    Case("bias of keys in float32", bias="B11N", bias_dtype="float32", **SMALL),
    Case("alibi", alibi="BH", options={"causal": True}, **SMALL),
    Case("softcap", options={"softcap": 2.0}, spread=2, **SMALL),
    Case(
        "sink and dead rows",
        sink=True,
        keep="11MN",
        dead=(0, 7),
        M=40,
        N=23,
        options={"causal": True},
        **SMALL,
    ),
    Case("sink in float32", sink=True, sink_dtype="float32", **SMALL),
    Case("dropout", M=40, N=70, options={"dropout_p": 0.3}, **SMALL),
    Case("dropout 1", options={"dropout_p": 1.0}, **SMALL),
    Case("segments", M=37, mask="segments", **SMALL),
    Case("scale 0", options={"scale": 0.0}, **SMALL),
    Case("negative scale", options={"scale": -0.3, "causal": True}, **SMALL),
    Case("bmhd, group of three", **{**SMALL, "H": 6, "Hkv": 2, "options": {"layout": "bmhd"}}),
    Case(
        "bfloat16, causal",
        M=70,
        N=77,
        D=32,
        Dv=32,
        options={"causal": True},
        **{**SMALL, "dtype": "bfloat16"},
    ),
    Case(
        "float32, causal", M=40, N=77, D=32, Dv=32, options={"causal": True}, **{**SMALL, "dtype": "float32"}
    ),
    Case("N 0 with a sink", N=0, sink=True, **SMALL),
    Case("D 0 under a bias", D=0, bias="11MN", **SMALL),
    packed("everything", *UNEVEN, **{**SMALL, "B": 5}),
    everything(Case("everything", B=2, H=4, Hkv=2, dtype="float16")),
    everything(Case("everything in bfloat16", **{**SMALL, "dtype": "bfloat16"})),
)
PARITY = tuple(everything(case) if case.rows == "packed" else case for case in PARITY)
# the other decodes have less than one tile of keys per part, so nothing is combined
PARTS = Case(
    "cached, 200 keys, three parts",
    rows="cached",
    B=2,
    M=1,
    N=200,
    k_lengths=(200, 67),
    dtype="float16",
    sink=True,
    options={"num_splits": 3},
)
DECODE: tuple[Case, ...] = (
    PARTS,
    replace(named("cached"), dtype="float16", name="cached, float16"),
    replace(named("cached, an empty sequence"), dtype="float16", name="cached, empty, float16"),
    replace(named("cached, splits"), dtype="float16", name="cached, splits, float16"),
    replace(named("cached, everything"), dtype="float16", name="cached, everything, float16"),
    replace(named("paged, bmhd"), dtype="float16", name="paged, bmhd, float16"),
    replace(named("paged, more splits than keys"), dtype="float16", name="paged, splits, float16"),
    replace(named("paged, append of a chunk"), dtype="float16", H=8, Hkv=1, name="paged, chunk, float16"),
    named("paged, bfloat16"),
    named("paged, everything"),
)
