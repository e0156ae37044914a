"""The verdict that a time needs: what a call returned, held against the float64 oracle by the judge of ``verify``.

A timed call is too large for a full oracle, so one part of it is judged: the queries of one key/value head of one
batch entry, the same numbers that the timed call saw. On a processor its forward is judged on sampled rows when it is
long, its gradients as a whole, since a key's gradient needs every query. On a GPU the oracle's float64 runs there:
every element is held against its hard bound, and the statistics are taken on the host from sampled rows of each
tensor, because a processor needs longer for them than the GPU for the calls. The limits are those of
``attnproof verify``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from ..cases import Case
from ..verify import suite
from ..verify.candidate import Candidate, Outputs, to_float64
from ..verify.expected import options, sampled_rows
from ..verify.inputs import Inputs, Placed
from ..verify.numerics import Numerics, hard_bound, numerics
from ..verify.oracle import Answer, Question, Terms, solve
from .shapes import Shape

SAMPLE = 32  # rows of a forward, besides the ends and the edges of tiles
PICKED = 128  # rows of each tensor for the statistics of a call that was solved on a device, besides the same
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

    @property
    def part(self) -> str:
        """What is judged, in words."""
        rows = self.inputs.case.sample
        return f"batch entry {self.batch}, key head {self.head}, {'sampled' if rows else 'all'} rows"

    def __call__(self, name: str, kind: str, outputs: Mapping[str, Any]) -> Judged:
        """The verdict on tensors by name: out [B,H,M,D], and dq, dk, dv where the shape has gradients."""
        values = {label: to_float64(self._read(label, tensor)) for label, tensor in outputs.items()}
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

    def _read(self, label: str, tensor: Any) -> Any:
        """What of a tensor goes to the judge on the host."""
        return self._cut(label, tensor)

    def _sample(self) -> int:
        """Rows that the oracle answers; 0 for all."""
        return 0 if self.shape.run != "forward" or self.shape.queries <= WHOLE else SAMPLE

    def _cut(self, label: str, tensor: Any) -> Any:
        """The judged part of a tensor; q, out and dq have query heads, the others key heads."""
        group = self.shape.H // self.shape.kv_heads
        first, count = (self.head, 1) if label in ("k", "v", "dk", "dv") else (self.head * group, group)
        return tensor[self.batch : self.batch + 1, first : first + count]

    def _inputs(self, tensors: tuple[Any, ...]) -> Inputs:
        shape = self.shape
        group = shape.H // shape.kv_heads
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
            backward=shape.run != "forward",
            sample=self._sample(),
        )
        q, k, v, dout = (
            _placed(self._cut(label, tensor), shape.dtype)
            for label, tensor in zip(("q", "k", "v", "dout"), tensors, strict=True)
        )
        return Inputs(case, self.seed, q, k, v, dout)


class DeviceJudge(Judge):
    """The same with the oracle on the device of the tensors; float32 needs a control and stays on the host."""

    def __init__(self, shape: Shape, tensors: tuple[Any, ...], seed: int = 0) -> None:
        super().__init__(shape, tensors, seed)
        cut = [
            self._cut(label, tensor) for label, tensor in zip(("q", "k", "v", "dout"), tensors, strict=True)
        ]
        answer = solved_by_torch(self.inputs, cut)
        self.exact = {label: answer.tensors[label] for label in self.expected()}
        self.rows = {label: self._picked(terms.value.shape[2]) for label, terms in self.exact.items()}
        self.answers.kept[self.inputs.case, seed] = (self._on_host(answer), None)

    @property
    def part(self) -> str:
        """What is judged, in words."""
        return f"batch entry {self.batch}, key head {self.head}, all rows by their bound, sampled ones by z"

    def __call__(self, name: str, kind: str, outputs: Mapping[str, Any]) -> Judged:
        """See ``Judge``; beside it every element of the part is held against its hard bound, on the device."""
        found = super().__call__(name, kind, outputs)
        for label, tensor in outputs.items():
            used = self._used(label, tensor, numerics(kind))
            if not used <= 1.0 and found.green:
                found = replace(found, status=suite.FAIL, reason=f"{label}: hard bound {used:.3g} > 1")
            # not max(), which would drop a NaN
            found = found if used <= found.used else replace(found, used=used)
        return found

    def _used(self, label: str, tensor: Any, kind: Numerics) -> float:
        error = (self._cut(label, tensor).detach().double() - self.exact[label].value).abs()
        bound = hard_bound(self.exact[label], self.shape.dtype, kind)
        return float((error / bound).masked_fill(error == 0, 0.0).max())

    def _sample(self) -> int:
        return 0

    def _read(self, label: str, tensor: Any) -> Any:
        rows = self.rows[label]
        cut = self._cut(label, tensor)
        return cut if rows is None else cut[:, :, rows]

    def _picked(self, length: int) -> Any:
        return sampled_rows(replace(self.inputs.case, M=length, sample=PICKED), self.seed)

    def _on_host(self, answer: Answer) -> Answer:
        """The answer to the picked rows."""

        def host(array: Any, rows: Any) -> Any:
            return (array if rows is None else array[:, :, rows]).cpu().numpy()

        tensors = {
            label: Terms(**{term: host(getattr(terms, term), self.rows[label]) for term in vars(terms)})
            for label, terms in self.exact.items()
        }
        rows = self.rows["out"] if "out" in self.rows else self._picked(self.shape.queries)
        lse, slop, dead = (host(array, rows) for array in (answer.lse, answer.lse_slop, answer.dead))
        hull = None if answer.hull is None else (host(answer.hull[0], rows), host(answer.hull[1], rows))
        return Answer(tensors, lse, slop, dead, hull, float(answer.condition))


def judge_for(shape: Shape, tensors: tuple[Any, ...], seed: int = 0) -> Judge:
    """The judge where the tensors are."""
    device = tensors[0].device.type != "cpu" and shape.dtype != "float32"
    return (DeviceJudge if device else Judge)(shape, tensors, seed)


def _placed(tensor: Any, dtype: str) -> Placed:
    """A torch tensor as the verifier holds arrays: contiguous, bfloat16 as raw bits."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    array = (plain.view(torch.int16) if dtype == "bfloat16" else plain).numpy()
    buffer = array.view(np.uint16) if dtype == "bfloat16" else array
    strides = tuple(size // buffer.itemsize for size in buffer.strides)
    return Placed(buffer.reshape(-1), tuple(buffer.shape), strides, 0, dtype)


def solved_by_torch(inputs: Inputs, tensors: Sequence[Any]) -> Answer:
    """The oracle's answer to an unsampled dense case in float64 where its tensors q, k, v, dout are."""
    import torch

    parts = [tensor.detach().double() for tensor in tensors]
    named = dict(zip(("q", "k", "v", "dout"), parts, strict=True))
    if not inputs.case.backward:
        del named["dout"]
    return solve(Question(**named, **options(inputs), xp=torch))
