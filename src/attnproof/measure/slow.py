"""Why is a call slow? The documents' order: first whether it is right, then the profiler, then spills, then banks.

Each step is one question and one sentence. What cannot be answered here says so and names what would answer it; the
ledger's model is marked as a model.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..ledger import accounts, hardware, roofline
from ..verify import suite
from . import implementations, roofs
from .bench import Bench
from .protocol import Protocol, interleave
from .shapes import Shape
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
    status = suite.PASS if where.share > 0.5 else "FINDING"
    yield Step(
        STEPS[1], status, f"{median * 1e3:.3g} ms; what holds it by this machine's own probes: {where}"
    )
    yield _split(shape, device)
    yield _registers(name, device)
    yield _banks(shape, device)
    yield _alignment(bench)


def _split(shape: Shape, device: str) -> Step:
    """The profiler's split where one can be used, the model's otherwise."""
    tool = (
        next((tool for tool in ("ncu", "rocprof", "rocprofv2") if shutil.which(tool)), None)
        if device == "cuda"
        else None
    )
    account = accounts.forward(shape.call) if shape.run == "forward" else accounts.backward(shape.call)
    try:
        bound = roofline.roofline(account, hardware.detect())
    except Exception as error:
        return Step(
            STEPS[2], suite.SKIP, f"no profiler here, and the ledger cannot model this device: {error}"
        )
    terms: dict[str, float] = {}
    for kernel in bound.kernels:
        for term, seconds in kernel.terms.items():
            terms[term] = terms.get(term, 0.0) + seconds
    parts = ", ".join(f"{roofline.WORDS[term]} {seconds * 1e3:.3g} ms" for term, seconds in terms.items())
    how = (
        f"counters of this call: attnproof ledger --measure runs it under {tool}; "
        if tool
        else "no profiler (ncu, rocprof) for this device here; "
    )
    return Step(
        STEPS[2],
        suite.SKIP if tool is None else suite.PASS,
        f"{how}by the ledger's model, lower bounds: {parts}; it is held by {bound.sentence}",
    )


def _registers(name: str, device: str) -> Step:
    if device != "cuda":
        return Step(
            STEPS[3],
            suite.SKIP,
            "a processor spills to its first cache and reports nothing; read on a GPU from the compiled kernel",
        )
    if name != "triton":
        return Step(STEPS[3], suite.SKIP, f"{name} does not hand out its compiled kernels")
    from ..backends.triton import registry

    found = getattr(registry, "resources", None)
    if found is None:
        return Step(STEPS[3], suite.SKIP, "the compiled kernels of this process do not tell their registers")
    return Step(STEPS[3], suite.PASS, str(found()))


def _banks(shape: Shape, device: str) -> Step:
    """Row stride of a tile in shared memory against the banks; on a CPU, of a row against the sets of its first cache."""
    size = shape.call.size * shape.D
    if device == "cpu":
        if size % 4096 == 0:
            return Step(
                STEPS[4],
                "FINDING",
                f"rows are {size} bytes apart, a multiple of 4096: they share the sets of the first cache",
            )
        return Step(
            STEPS[4], suite.PASS, f"rows are {size} bytes apart: they spread over the sets of the first cache"
        )
    if size % 128 == 0:
        return Step(
            STEPS[4],
            "FINDING",
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
        return Step(
            STEPS[5], "FINDING", "; ".join(wrong) + ": loads of full width need two accesses or a copy"
        )
    lines = bench.shape.D * bench.shape.call.size % CACHE_LINE == 0
    more = (
        f"and fill whole lines of {CACHE_LINE} bytes"
        if lines
        else f"but do not fill whole lines of {CACHE_LINE} bytes"
    )
    return Step(STEPS[5], suite.PASS, f"rows of q, k and v start on {ALIGNED} bytes {more}")
