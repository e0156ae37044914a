"""Why is a call slow? The documents' order: first whether it is right, then the profiler, then spills, then banks.

Each step is one question and one sentence. What cannot be answered here says so and names what would answer it; the
ledger's model is marked as a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..ledger import accounts, hardware, roofline
from ..ledger.counters import CounterError
from ..verify import suite
from . import implementations, kernels, roofs, split
from .bench import Bench
from .implementations import Implementation
from .kernels import Ran
from .protocol import Protocol, interleave
from .shapes import Shape
from .split import Counted
from .stats import summarise
from .timer import timer_for

STEPS = (
    "verdict",
    "time and roof",
    "where the time goes",
    "registers and spills",
    "bank conflicts",
    "alignment",
)
ALIGNED = 16  # bytes of one vector load
CACHE_LINE = 64
CONFLICTS = 0.1  # share of bank conflicts from which they are a finding
FINDING = "FINDING"


@dataclass(frozen=True)
class Step:
    """An answer: PASS nothing wrong here, FINDING something to look at, FAIL stop here, SKIP not answered."""

    question: str
    status: str
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {"group": self.question, "status": self.status, "reason": self.sentence}


def explain(shape: Shape, name: str, device: str) -> Iterator[Step]:
    """The steps in order; a wrong result ends them."""
    one = implementations.load(name)
    bench = Bench(shape, device, 3)
    try:
        found = bench.verdict(one)
    except implementations.Unable as error:
        yield Step(STEPS[0], suite.FAIL, f"{name} does not serve this call: {error}")
        return
    if not found.green:
        yield Step(STEPS[0], suite.FAIL, f"wrong before it is slow: {found.reason}")
        return
    yield Step(
        STEPS[0], suite.PASS, f"right: at most {found.used:.0%} of the error bound is used ({found.part})"
    )
    timer = timer_for(device)
    samples = interleave([bench.subject(one)], timer, Protocol(5, 20, device == "cuda", 3))[name].seconds
    median = summarise(samples).median
    where = roofs.stand(shape, median, roofs.probe(device, (shape.dtype,), timer))
    status = suite.PASS if where.share > 0.5 else FINDING
    yield Step(
        STEPS[1], status, f"{median * 1e3:.3g} ms; what holds it by this machine's own probes: {where}"
    )
    counted, ran = _counters(shape, name, device), _ran(bench, one)
    yield _split(shape, counted, ran)
    yield _registers(ran)
    yield _banks(shape, device, counted)
    yield _alignment(bench)


def _counters(shape: Shape, name: str, device: str) -> Counted | str:
    """The kernels of a call with the hardware's counters, or why there are none."""
    if device != "cuda":
        return "ncu and rocprof look at GPUs"
    try:
        return split.measure(shape, name)
    except CounterError as error:
        return str(error)


def _ran(bench: Bench, one: Implementation) -> Sequence[Ran] | str:
    """The kernels of a call by torch's profiler, which asks for no permission, or why there are none."""
    if bench.device != "cuda":
        return "a processor spills to its first cache and reports nothing; read on a GPU from the compiled kernel"
    try:
        return kernels.look({one.name: bench.subject(one).prepare(0)})[one.name]
    except (RuntimeError, ValueError, OSError) as error:
        return f"torch's profiler did not see the device: {error}"


def _split(shape: Shape, counted: Counted | str, ran: Sequence[Ran] | str) -> Step:
    """The profiler's split where one can be used; the kernels' times and the model otherwise."""
    if not isinstance(counted, str):
        return Step(STEPS[2], suite.PASS, f"by {counted.tool}, {split.sentence(counted.kernels)}")
    parts = [f"no counters ({counted})"]
    if not isinstance(ran, str) and ran:
        parts.append(f"by torch's profiler, {split.shares(ran)}")
    return Step(STEPS[2], suite.SKIP, "; ".join([*parts, _model(shape)]))


def _model(shape: Shape) -> str:
    """The parts of a call's time by the ledger's model."""
    account = accounts.forward(shape.call) if shape.run == "forward" else accounts.backward(shape.call)
    try:
        bound = roofline.roofline(account, hardware.detect())
    except Exception as error:  # a device that the table does not know has no model
        return f"the ledger cannot model this device: {error}"
    terms: dict[str, float] = {}
    for kernel in bound.kernels:
        for term, seconds in kernel.terms.items():
            terms[term] = terms.get(term, 0.0) + seconds
    parts = ", ".join(f"{roofline.WORDS[term]} {seconds * 1e3:.3g} ms" for term, seconds in terms.items())
    return f"by the ledger's model, lower bounds: {parts}; it is held by {bound.sentence}"


def _registers(ran: Sequence[Ran] | str) -> Step:
    """Registers and shared memory of the longest kernel, and what the call's kernels spill, if they are ours."""
    if isinstance(ran, str):
        return Step(STEPS[3], suite.SKIP, ran)
    told = [one for one in ran if one.registers is not None]
    if not told:
        return Step(STEPS[3], suite.SKIP, "the profiler saw no kernel with registers in this call")
    longest = max(told, key=lambda one: one.seconds)
    said = f"{split.short(longest.name)}, the longest kernel, has {longest.registers} registers a thread"
    if longest.shared is not None:
        said += f" and {longest.shared} bytes of shared memory a block"
    spills = kernels.facts(ran, kernels.compiled()).get("spills")
    if spills is None:
        return Step(STEPS[3], suite.PASS, f"{said}; what it spills, only a compiled kernel of ours tells")
    if spills:
        return Step(
            STEPS[3],
            FINDING,
            f"{said}; {spills:.0f} bytes a thread spill to memory over the call: smaller tiles or more warps",
        )
    return Step(STEPS[3], suite.PASS, f"{said}; nothing spills")


def _banks(shape: Shape, device: str, counted: Counted | str) -> Step:
    """Counted conflicts; without counters the row stride against the banks, on a CPU against the sets of its first cache."""
    found = None if isinstance(counted, str) else split.conflicts(counted.kernels)
    if found is not None:
        costly = found.share > CONFLICTS
        advice = ": pad or swizzle the tiles" if costly else ""
        return Step(
            STEPS[4],
            FINDING if costly else suite.PASS,
            f"bank conflicts take {found.share:.1%} of {found.of}{advice}",
        )
    size = shape.call.size * shape.D
    if device == "cpu":
        if size % 4096 == 0:
            return Step(
                STEPS[4],
                FINDING,
                f"rows are {size} bytes apart, a multiple of 4096: they share the sets of the first cache",
            )
        return Step(
            STEPS[4], suite.PASS, f"rows are {size} bytes apart: they spread over the sets of the first cache"
        )
    if size % 128 == 0:
        return Step(
            STEPS[4],
            FINDING,
            f"a row of {size} bytes starts at the same of 32 banks every time: a kernel must pad or swizzle it, and Triton does",
        )
    return Step(STEPS[4], suite.PASS, f"a row of {size} bytes does not repeat over the 32 banks")


def _alignment(bench: Bench) -> Step:
    wrong: list[str] = []
    for label, tensor in zip(("q", "k", "v"), bench.inputs[0][:3], strict=True):
        strides = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
        if tensor.stride(-1) != 1:
            wrong.append(f"{label} has a stride of {tensor.stride(-1)} between neighbouring channels")
        elif tensor.data_ptr() % ALIGNED or any(stride % ALIGNED for stride in strides):
            wrong.append(f"{label} has rows that do not start on {ALIGNED} bytes")
    if wrong:
        return Step(STEPS[5], FINDING, "; ".join(wrong) + ": loads of full width need two accesses or a copy")
    lines = bench.shape.D * bench.shape.call.size % CACHE_LINE == 0
    more = (
        f"and fill whole lines of {CACHE_LINE} bytes"
        if lines
        else f"but do not fill whole lines of {CACHE_LINE} bytes"
    )
    return Step(STEPS[5], suite.PASS, f"rows of q, k and v start on {ALIGNED} bytes {more}")
