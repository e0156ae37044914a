"""A sweep: many shapes, several implementations side by side, every time behind a green verdict.

Results go into a journal as they come, so a run that is stopped loses at most the shape in hand, and the same command
goes on where it stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from .. import dispatch
from ..ledger import accounts, cache, hardware
from ..verify import suite
from . import implementations, kernels, roofs, warm
from .bench import Bench
from .implementations import Implementation, Unable
from .journal import Journal
from .protocol import Protocol, Samples, Spent, interleave
from .shapes import Shape
from .stats import median_interval, paired_log_ratio, summarise
from .timer import Timer, device_state
from .verdict import Judged

Tick = Callable[[str], Any]
TABLE = 2**12  # rows of a shape up to which the ledger's cache model is worth its time


@dataclass(frozen=True)
class Row:
    """One implementation on one shape: a verdict, and times only if it is green."""

    shape: Shape
    name: str
    status: str
    reason: str = ""
    judged: Judged | None = None
    samples: tuple[float, ...] = ()
    ratio: tuple[float, float, float] | None = (
        None  # time of the first one over this one's, with its 99% interval
    )
    counted: Mapping[str, float] = field(default_factory=lambda: {})  # see kernels.facts

    def deterministic(self) -> dict[str, float]:
        """The quantities of gate C."""
        return without_a_clock(self.name, self.judged, self.counted)

    def as_dict(self, measured: roofs.Roofs, moved: int | None) -> dict[str, Any]:
        """Plain values for a record; raw samples are kept, seconds. ``moved`` are the ledger's bytes."""
        shape = self.shape
        plain: dict[str, Any] = {
            "case": shape.name,
            "candidate": self.name,
            "dtype": shape.dtype,
            "status": self.status,
            "reason": self.reason,
            "shape": {
                "run": shape.run,
                "B": shape.B,
                "H": shape.H,
                "Hkv": shape.kv_heads,
                "M": shape.queries,
                "N": shape.N,
                "D": shape.D,
                "causal": shape.causal,
                "left": shape.left,
                "pairs": shape.call.pairs,
            },
            "verdict": None if self.judged is None else self.judged.as_dict(),
        }
        if not self.samples:
            return plain
        found = summarise(self.samples)
        where = roofs.stand(shape, found.median, measured)
        return plain | {
            "samples": list(self.samples),
            "summary": found.as_dict(),
            "ratio": self.ratio,
            "tflops": shape.flop / found.median / 1e12,
            "gbps": shape.bytes / found.median / 1e9,
            "deterministic": self.deterministic(),
            "ledger_gbps": None if moved is None else moved / found.median / 1e9,
            "roof": where.as_dict() | {"sentence": str(where)},
        }


@dataclass
class Cost:
    """Where the wall time of a shape went: seconds by what was done, and what the samples spent."""

    seconds: dict[str, float] = field(default_factory=dict)
    spent: Spent = field(default_factory=Spent)

    @contextmanager
    def on(self, what: str) -> Generator[None, None, None]:
        """Count the block as this."""
        began = perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + perf_counter() - began


def measure_shape(
    shape: Shape,
    chosen: Sequence[Implementation],
    device: str,
    timer: Timer,
    protocol: Protocol,
    cost: Cost | None = None,
) -> list[Row]:
    """All implementations on one shape, interleaved; ratios are to the first that is green."""
    cost = cost or Cost()
    with cost.on("inputs and oracle"):
        bench = Bench(shape, device, protocol.slots)
    rows: dict[str, Row] = {}
    with cost.on("verdicts"):
        for one in chosen:
            rows[one.name] = _judged(bench, one)
    green = [one for one in chosen if rows[one.name].status == suite.PASS]
    if green:
        with cost.on("samples"):
            taken = interleave(
                [bench.subject(one) for one in green], timer, protocol, check=bench.look, spent=cost.spent
            )
        with cost.on("verdicts"):
            wrong = {one.name: bench.recheck(one) for one in green}
        first = taken[green[0].name].seconds
        for name, samples in taken.items():
            if wrong[name]:
                rows[name] = replace(rows[name], status=suite.FAIL, reason=wrong[name])
                continue
            rows[name] = replace(rows[name], samples=samples.seconds, ratio=_ratio(first, samples))
        if device == "cuda":
            with cost.on("counts"):
                for name, counted in count(bench, green).items():
                    rows[name] = replace(rows[name], counted=counted)
    return list(rows.values())


def without_a_clock(name: str, judged: Judged | None, counted: Mapping[str, float]) -> dict[str, float]:
    """What gate C holds of one call: the error, and of ours launches, registers, spills, code."""
    held = {} if judged is None else {"rms": judged.rms}
    code = compiled_bytes(name)
    return held | dict(counted) | ({} if code is None else {"code_bytes": float(code)})


def count(bench: Bench, green: Sequence[Implementation]) -> dict[str, dict[str, float]]:
    """What the calls of ours are made of; nothing where the profiler does not see the device."""
    own = [one for one in green if one.name in dispatch.backends()]
    try:
        ran = kernels.look({one.name: bench.subject(one).prepare(0) for one in own}) if own else {}
    except (RuntimeError, ValueError, OSError) as error:
        # no profiler is no reason to lose the times
        logging.getLogger(__name__).warning("launches and registers are not counted: %s", error)
        return {}
    known = kernels.compiled()
    return {name: kernels.facts(each, known) for name, each in ran.items()}


def _judged(bench: Bench, one: Implementation) -> Row:
    """The verdict of one implementation as a row without times."""
    try:
        found = bench.verdict(one)
    except (Unable, NotImplementedError) as error:
        return Row(bench.shape, one.name, suite.SKIP, str(error))
    except MemoryError as error:
        return Row(bench.shape, one.name, suite.SKIP, f"not enough memory: {error}")
    except Exception as error:  # a foreign kernel may raise anything; that is a verdict, not a crash of ours
        if "out of memory" in str(error).lower() or "can't allocate" in str(error):
            return Row(bench.shape, one.name, suite.SKIP, "not enough memory")
        reason = f"raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return Row(bench.shape, one.name, suite.FAIL, reason)
    return Row(bench.shape, one.name, found.status, found.reason, found)


def _ratio(first: tuple[float, ...], other: Samples) -> tuple[float, float, float] | None:
    pairs = paired_log_ratio(first, other.seconds)
    if pairs.size < 10:
        return None  # too few for an interval
    found = median_interval(pairs).exp()
    return found.value, found.low, found.high


def compiled_bytes(name: str) -> int | None:
    """Size of the extension of the native backend; None for what is not compiled ahead."""
    if name != "native":
        return None
    found = find_spec("attnproof.backends.native._kernels")
    return None if found is None or found.origin is None else Path(found.origin).stat().st_size


def ledger_bytes(shape: Shape, device: hardware.Hardware) -> int | None:
    """Bytes between cache and memory by the ledger's cache model; None where the model would take long."""
    if max(shape.queries, shape.N) > TABLE or shape.B * shape.H > 64:
        return None
    forward, backward = accounts.forward(shape.call), accounts.backward(shape.call)
    if shape.run == "forward":
        return cache.on(device, forward).total
    if shape.run == "backward":
        return cache.on(device, forward, backward, counted=1).total
    return cache.on(device, forward, backward).total


@dataclass(frozen=True)
class Sweep:
    """What came out: plain rows, the roofs, and where the wall time went.

    ``overhead`` is the host's work between samples over the samples' own time (the emptying of caches counts as
    theirs), ``seconds`` what inputs, verdicts, samples and the rest took, summed over the shapes.
    """

    rows: list[dict[str, Any]]
    roofs: dict[str, Any]
    overhead: float
    seconds: dict[str, float]


def run(
    shapes: Iterable[Shape],
    names: Sequence[str],
    device: str,
    timer: Timer,
    protocol: Protocol,
    *,
    journal: Journal,
    jobs: int = 0,
    tick: Tick = lambda name: None,
) -> Sweep:
    """Measure every shape; those that ``journal`` holds are taken from there.

    Args:
        shapes: see ``shapes.PRESETS``.
        names: see ``implementations.load``; ratios are to the first green one.
        device: "cpu" or "cuda".
        timer: see ``timer.timer_for``.
        protocol: numbers of calls and cache mode.
        journal: finished shapes.
        jobs: processes that compile what is left before the first sample; see ``warm``.
        tick: called with the name of each shape when it is done, and once for each that was compiled.

    Returns:
        Rows as ``Row.as_dict`` gives them, and what they share.
    """
    chosen = [implementations.load(name) for name in names]
    wanted = list(shapes)
    cost = Cost()
    with cost.on("compiling"):
        warm.warm([shape for shape in wanted if shape.name not in journal], names, device, jobs, tick)
    before = journal.done.get("compiling", 0.0)
    compiling = journal.put("compiling", before + cost.seconds["compiling"])
    if "roofs" not in journal:
        journal.put("roofs", roofs.probe(device, tuple(shape.dtype for shape in wanted), timer).as_dict())
    measured = roofs.Roofs(**journal["roofs"])
    tick("roofs")
    try:
        model = hardware.detect()
    except Exception:  # a device that the table does not know has no ledger figures, and needs none
        model = None
    for shape in wanted:
        if shape.name not in journal:
            cost, state = Cost(), device_state(device)
            rows = measure_shape(shape, chosen, device, timer, protocol, cost)
            with cost.on("the rest"):
                moved = None if model is None else ledger_bytes(shape, model)
                told = {"state": state()}
                plain = [row.as_dict(measured, moved) | told for row in rows]
            journal.put(shape.name, {"rows": plain, **asdict(cost)})
        tick(shape.name)
    found = gathered([journal[shape.name] for shape in wanted], measured)
    return replace(found, seconds={"compiling": compiling} | found.seconds)


def gathered(done: Sequence[Mapping[str, Any]], measured: roofs.Roofs) -> Sweep:
    """The steps of a journal as one sweep."""
    spent = Spent(*(sum(one["spent"][what] for one in done) for what in ("wall", "busy")))
    seconds: dict[str, float] = {}
    for one in done:
        for what, took in one["seconds"].items():
            seconds[what] = seconds.get(what, 0.0) + took
    return Sweep([row for one in done for row in one["rows"]], measured.as_dict(), spent.between, seconds)
