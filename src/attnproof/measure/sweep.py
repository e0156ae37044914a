"""A sweep: many shapes, several implementations side by side, every time behind a green verdict.

Results go into a journal as they come, so a run that is stopped loses at most the shape in hand, and the same command
goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..dtypes import NAMES
from ..ledger import accounts, cache, hardware
from ..verify import suite
from . import implementations, roofs
from .implementations import Implementation, Unable
from .journal import Journal
from .protocol import Protocol, Samples, Subject, interleave
from .shapes import Shape
from .stats import median_interval, paired_log_ratio, summarise
from .timer import Timer, device_state
from .verdict import GRADIENTS, Judge, Judged

Tick = Callable[[str], Any]
TABLE = 2**12  # rows of a shape up to which the ledger's cache model is worth its time


class Bench:
    """One shape with its inputs, its judges and what the judged calls returned, for every implementation alike."""

    def __init__(self, shape: Shape, device: str, slots: int) -> None:
        self.shape, self.device = shape, device
        self.inputs = [make_inputs(shape, device, slot) for slot in range(slots)]
        self.judges = [Judge(shape, inputs, slot) for slot, inputs in enumerate(self.inputs)]
        self.judged: dict[tuple[str, int], tuple[Any, ...]] = {}

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

    def recheck(self, one: Implementation, slot: int, result: Any) -> str:
        """Why a timed result is not the one that was judged, or "": equal bits, else judged itself."""
        import torch

        got = _tensors(result)
        if all(torch.equal(a, b) for a, b in zip(got, self.judged[one.name, slot], strict=True)):
            return ""
        found = self._judge(one, slot, got)
        return "" if found.green else f"a timed result differs from the judged one: {found.reason}"

    def _timed(self, one: Implementation, slot: int) -> implementations.Run:
        q, k, v, _ = self.inputs[slot]
        return one.timed(q, k, v, self.shape)

    def _first(self, one: Implementation, slot: int) -> Any:
        """The result of the whole call, outside the clock."""
        return self._call(one, slot, one.run)()

    def _call(self, one: Implementation, slot: int, run: implementations.Run) -> Callable[[], Any]:
        import torch

        shape, (q, k, v, dout) = self.shape, self.inputs[slot]
        if shape.run == "forward":
            return lambda: run(q, k, v, shape)
        if shape.run == "backward":
            out = run(q, k, v, shape)
            return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        def both() -> Any:
            out = run(q, k, v, shape)
            return (out, *torch.autograd.grad(out, (q, k, v), dout))

        return both

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


def _tensors(result: Any) -> tuple[Any, ...]:
    return tuple(part.detach() for part in (result if isinstance(result, tuple) else (result,)))


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

    def deterministic(self) -> dict[str, float]:
        """What does not depend on the clock: the error, and the size of compiled code of ours."""
        held = {} if self.judged is None else {"rms": self.judged.rms}
        code = compiled_bytes(self.name)
        return held if code is None else held | {"code_bytes": float(code)}

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


def measure_shape(
    shape: Shape, chosen: Sequence[Implementation], device: str, timer: Timer, protocol: Protocol
) -> list[Row]:
    """All implementations on one shape, interleaved; ratios are to the first that is green."""
    bench = Bench(shape, device, protocol.slots)
    rows: dict[str, Row] = {}
    for one in chosen:
        try:
            found = bench.verdict(one)
        except (Unable, NotImplementedError) as error:
            rows[one.name] = Row(shape, one.name, suite.SKIP, str(error))
        except MemoryError as error:
            rows[one.name] = Row(shape, one.name, suite.SKIP, f"not enough memory: {error}")
        except (
            Exception
        ) as error:  # a foreign kernel may raise anything; that is a verdict, not a crash of ours
            if "out of memory" in str(error).lower() or "can't allocate" in str(error):
                rows[one.name] = Row(shape, one.name, suite.SKIP, "not enough memory")
                continue
            reason = f"raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            rows[one.name] = Row(shape, one.name, suite.FAIL, reason)
        else:
            rows[one.name] = Row(shape, one.name, found.status, found.reason, found)
    green = [one for one in chosen if rows[one.name].status == suite.PASS]
    if green:
        _time(bench, green, timer, protocol, rows)
    return list(rows.values())


def _time(
    bench: Bench, green: Sequence[Implementation], timer: Timer, protocol: Protocol, rows: dict[str, Row]
) -> None:
    by_name = {one.name: one for one in green}
    wrong: dict[str, str] = {}

    def check(name: str, slot: int, result: Any) -> None:
        wrong.setdefault(name, bench.recheck(by_name[name], slot, result))
        if not wrong[name]:
            del wrong[name]

    taken = interleave([bench.subject(one) for one in green], timer, protocol, check=check)
    first = taken[green[0].name].seconds
    for name, samples in taken.items():
        if name in wrong:
            rows[name] = replace(rows[name], status=suite.FAIL, reason=wrong[name])
            continue
        rows[name] = replace(rows[name], samples=samples.seconds, ratio=_ratio(first, samples))


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
    """What came out: plain rows, the roofs, and the share of the wall time outside the samples."""

    rows: list[dict[str, Any]]
    roofs: dict[str, Any]
    overhead: float


def run(
    shapes: Iterable[Shape],
    names: Sequence[str],
    device: str,
    timer: Timer,
    protocol: Protocol,
    *,
    journal: Journal,
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
        tick: called with the name of each shape when it is done.

    Returns:
        Rows as ``Row.as_dict`` gives them, and what they share.
    """
    chosen = [implementations.load(name) for name in names]
    wanted = list(shapes)
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
            started, state = time.perf_counter(), device_state(device)
            rows = measure_shape(shape, chosen, device, timer, protocol)
            wall = time.perf_counter() - started
            moved = None if model is None else ledger_bytes(shape, model)
            plain = [row.as_dict(measured, moved) | {"state": state} for row in rows]
            timed = sum(sum(row.samples) for row in rows)
            journal.put(shape.name, {"rows": plain, "wall": wall, "timed": timed})
        tick(shape.name)
    done = [journal[shape.name] for shape in wanted]
    overhead = roofs.host_share(sum(one["timed"] for one in done), sum(one["wall"] for one in done))
    return Sweep([row for one in done for row in one["rows"]], measured.as_dict(), overhead)
