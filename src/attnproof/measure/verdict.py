"""The verdict that a time needs: what a call returned, held against the float64 oracle by the judge of ``verify``.

A timed call is too large for a full oracle, so one part of it is judged: the queries of one key/value head of one
batch entry, the same numbers that the timed call saw. Its forward is judged on sampled rows when it is long, its
gradients as a whole, since a key's gradient needs every query. The limits are those of ``attnproof verify``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from ..cases import Case
from ..verify import suite
from ..verify.candidate import Candidate, Outputs, to_float64
from ..verify.expected import question
from ..verify.inputs import Inputs, Placed
from ..verify.numerics import numerics
from ..verify.oracle import Answer, Terms, solve
from .shapes import Shape

SAMPLE = 32  # rows of a forward, besides the ends and the edges of tiles
WHOLE = 512  # a forward of at most so many rows is judged as a whole
GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Judged:
    """What the judge said of one call; ``used`` is the largest error over its hard bound."""

    status: str
    reason: str
    used: float
    max_abs: float
    rms: float
    part: str

    @property
    def green(self) -> bool:
        """Whether a time may be quoted."""
        return self.status == suite.PASS

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)


class Judge:
    """Judges the calls of one shape on one set of inputs; the oracle's answer is made once for all candidates."""

    def __init__(self, shape: Shape, tensors: tuple[Any, ...], seed: int = 0) -> None:
        self.shape, self.seed = shape, seed
        rng = np.random.default_rng([seed, shape.N])
        self.batch, self.head = int(rng.integers(shape.B)), int(rng.integers(shape.kv_heads))
        self.answers = suite.Answers()
        self.inputs = self._inputs(tensors)
        device = tensors[0].device.type
        if device != "cpu" and self.inputs.case.backward and shape.dtype != "float32":
            # gradients of long sequences take a processor minutes; float32 is judged beside a control, on the host
            self.answers.kept[self.inputs.case, seed] = (solved_by_torch(self.inputs, device), None)

    @property
    def part(self) -> str:
        """What is judged, in words."""
        rows = self.inputs.case.sample
        return f"batch entry {self.batch}, key head {self.head}, {'sampled' if rows else 'all'} rows"

    def __call__(self, name: str, kind: str, outputs: Mapping[str, Any]) -> Judged:
        """The verdict on tensors by name: out [B,H,M,D], and dq, dk, dv where the shape has gradients."""
        values = {label: to_float64(self._cut(label, tensor)) for label, tensor in outputs.items()}
        asked = SimpleNamespace(name=name, kind=numerics(kind))
        verdict = suite.judge_outputs(
            cast(Candidate, asked), self.inputs, Outputs(values), self.answers, explain=False
        )
        missing = [label for label in self.expected() if label not in values]
        if missing:
            verdict.status, verdict.reason = suite.FAIL, f"did not return {', '.join(missing)}"
        worst = max((report.bound_used for report in verdict.tensors), default=0.0)
        first = next((report for report in verdict.tensors if report.tensor == self.expected()[0]), None)
        numbers = (first.max_abs, first.rms) if first else (float("nan"), float("nan"))
        return Judged(verdict.status, verdict.reason, worst, *numbers, self.part)

    def expected(self) -> tuple[str, ...]:
        """Names of the tensors that a call of this shape must return."""
        return {"forward": ("out",), "backward": GRADIENTS, "both": ("out", *GRADIENTS)}[self.shape.run]

    def _cut(self, label: str, tensor: Any) -> Any:
        """The judged part of a tensor; q, out and dq have query heads, the others key heads."""
        group = self.shape.H // self.shape.kv_heads
        first, count = (self.head, 1) if label in ("k", "v", "dk", "dv") else (self.head * group, group)
        return tensor[self.batch : self.batch + 1, first : first + count]

    def _inputs(self, tensors: tuple[Any, ...]) -> Inputs:
        shape = self.shape
        group = shape.H // shape.kv_heads
        gradients = shape.run != "forward"
        case = Case(
            name=f"timed {shape.name}",
            group="timed",
            dtype=shape.dtype,
            H=group,
            Hkv=1,
            M=shape.queries,
            N=shape.N,
            D=shape.D,
            Dv=shape.D,
            causal=shape.causal,
            window=(shape.left, -1),
            backward=gradients,
            sample=0 if gradients or shape.queries <= WHOLE else SAMPLE,
        )
        q, k, v, dout = (
            _placed(self._cut(label, tensor), shape.dtype)
            for label, tensor in zip(("q", "k", "v", "dout"), tensors, strict=True)
        )
        return Inputs(case, self.seed, q, k, v, dout)


def _placed(tensor: Any, dtype: str) -> Placed:
    """A torch tensor as the verifier holds arrays: contiguous, bfloat16 as raw bits."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    array = (plain.view(torch.int16) if dtype == "bfloat16" else plain).numpy()
    buffer = array.view(np.uint16) if dtype == "bfloat16" else array
    strides = tuple(size // buffer.itemsize for size in buffer.strides)
    return Placed(buffer.reshape(-1), tuple(buffer.shape), strides, 0, dtype)


def solved_by_torch(inputs: Inputs, device: str) -> Answer:
    """The oracle's answer to an unsampled dense case, computed in float64 on a device."""
    import torch

    asked = question(inputs)
    parts = {
        name: torch.as_tensor(getattr(asked, name), dtype=torch.float64, device=device)
        for name in ("q", "k", "v", "dout")
        if getattr(asked, name) is not None
    }
    answer = solve(replace(asked, xp=torch, **parts))
    tensors = {
        name: Terms(**{term: _host(getattr(terms, term)) for term in Terms.__dataclass_fields__})
        for name, terms in answer.tensors.items()
    }
    hull = None if answer.hull is None else (_host(answer.hull[0]), _host(answer.hull[1]))
    rows = (_host(answer.lse), _host(answer.lse_slop), _host(answer.dead))
    return Answer(tensors, *rows, hull, float(answer.condition))


def _host(array: Any) -> Any:
    return array.cpu().numpy() if hasattr(array, "cpu") else array
