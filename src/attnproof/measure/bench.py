"""One shape with everything that a candidate's times need: inputs, judges, and the results that were judged.

Results of timed calls are looked at while the clock runs, but judged after it: of those whose bits are not the judged
ones' (a backward that adds in another order each time) the one that is farthest away is kept for each candidate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from ..dtypes import NAMES
from ..verify import suite
from . import implementations
from .implementations import Implementation
from .protocol import Subject
from .shapes import Shape
from .verdict import GRADIENTS, Judged, judge_for


@dataclass(frozen=True)
class Other:
    """A timed result with other bits than the judged one."""

    slot: int
    distance: float
    result: tuple[Any, ...]


class Bench:
    """One shape with its inputs, its judges and what the judged calls returned, for every implementation alike."""

    def __init__(self, shape: Shape, device: str, slots: int) -> None:
        self.shape, self.device = shape, device
        self.inputs = [make_inputs(shape, device, slot) for slot in range(slots)]
        self.judges = [judge_for(shape, inputs, slot) for slot, inputs in enumerate(self.inputs)]
        self.judged: dict[tuple[str, int], tuple[Any, ...]] = {}
        self.others: dict[str, Other] = {}

    def verdict(self, one: Implementation) -> Judged:
        """The worst verdict over the sets of inputs; each judges another head.

        Raises:
            Unable: the implementation does not serve the shape.
        """
        worst: Judged | None = None
        for slot in range(len(self.inputs)):
            result = _tensors(self._first(one, slot))
            found = self._judge(one, slot, result)
            self.judged[one.name, slot] = result
            if not found.green:
                return found
            worst = found if worst is None or found.used > worst.used else worst
        return worst or Judged(suite.INVALID, "no inputs", 0.0, 0.0, 0.0, "")

    def subject(self, one: Implementation) -> Subject:
        """Something to interleave: forward alone, backward alone (its forward outside the clock), or both."""
        return Subject(one.name, lambda slot: self._call(one, slot, self._timed(one, slot)))

    def look(self, name: str, slot: int, result: Any) -> None:
        """Keep a timed result if it is farther from the judged one than any before: cheap, for between the samples."""
        import torch

        got, judged = _tensors(result), self.judged[name, slot]
        if all(torch.equal(a, b) for a, b in zip(got, judged, strict=True)):
            return
        distance = max(_distance(a, b) for a, b in zip(got, judged, strict=True))
        known = self.others.get(name)
        if known is None or distance > known.distance:
            self.others[name] = Other(slot, distance, got)

    def recheck(self, one: Implementation) -> str:
        """Why a timed result is wrong, or "": the farthest of those that were looked at is judged itself."""
        other = self.others.get(one.name)
        if other is None:
            return ""
        found = self._judge(one, other.slot, other.result)
        return "" if found.green else f"a timed result differs from the judged one: {found.reason}"

    def _timed(self, one: Implementation, slot: int) -> implementations.Run:
        q, k, v, _ = self.inputs[slot]
        return one.timed(q, k, v, self.shape)

    def _first(self, one: Implementation, slot: int) -> Any:
        """The result of the whole call, outside the clock."""
        return self._call(one, slot, one.run)()

    def _call(self, one: Implementation, slot: int, run: implementations.Run) -> Callable[[], Any]:
        return prepared(self.shape, self.inputs[slot], run)

    def _judge(self, one: Implementation, slot: int, result: tuple[Any, ...]) -> Judged:
        labels = self.judges[slot].expected()
        sizes = {"out": self.inputs[slot][3], **dict(zip(GRADIENTS, self.inputs[slot], strict=False))}
        for label, tensor in zip(labels, result, strict=True):
            if tensor.shape != sizes[label].shape:
                reason = f"{label}: expected shape {tuple(sizes[label].shape)}, got {tuple(tensor.shape)}"
                return Judged(suite.FAIL, reason, float("inf"), float("nan"), float("nan"), "")
            if not tensor.isfinite().all():
                return Judged(
                    suite.FAIL, f"{label} is not finite", float("inf"), float("nan"), float("nan"), ""
                )
        return self.judges[slot](one.name, one.numerics, dict(zip(labels, result, strict=True)))


def prepared(shape: Shape, inputs: tuple[Any, ...], run: implementations.Run) -> Callable[[], Any]:
    """The call of a shape's pass: forward alone, backward alone with its forward already made, or both."""
    import torch

    q, k, v, dout = inputs
    if shape.run == "forward":
        return lambda: run(q, k, v, shape)
    if shape.run == "backward":
        out = run(q, k, v, shape)
        return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    def both() -> Any:
        out = run(q, k, v, shape)
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    return both


def _tensors(result: Any) -> tuple[Any, ...]:
    return tuple(part.detach() for part in (result if isinstance(result, tuple) else (result,)))


def _distance(a: Any, b: Any) -> float:
    """Largest difference, in units of the judged tensor's own size; infinite for another shape or a NaN."""
    if a.shape != b.shape:
        return inf
    size = float(b.abs().max()) or 1.0
    found = float((a.float() - b.float()).abs().max()) / size
    return found if isfinite(found) else inf


def make_inputs(shape: Shape, device: str, slot: int) -> tuple[Any, ...]:
    """q, k, v and dout, normal, different for every slot."""
    import torch

    if shape.dtype not in NAMES:
        raise ValueError(f"dtype: expected one of {', '.join(NAMES)}, got {shape.dtype}")
    generator = torch.Generator(device).manual_seed(slot)
    heads = (shape.H, shape.kv_heads, shape.kv_heads, shape.H)
    rows = (shape.queries, shape.N, shape.N, shape.queries)
    kind = getattr(torch, shape.dtype)
    return tuple(
        torch.randn(shape.B, h, n, shape.D, generator=generator, device=device, dtype=torch.float32)
        .to(kind)
        .requires_grad_(shape.run != "forward" and at < 3)
        for at, (h, n) in enumerate(zip(heads, rows, strict=True))
    )
