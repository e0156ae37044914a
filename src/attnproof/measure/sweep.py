"""A sweep: many shapes, several implementations side by side, every time behind a green verdict.

Results are appended to a file as they come, so a run that is stopped loses at most the shape in hand, and the same
command goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..dtypes import NAMES
from . import implementations
from .implementations import Run, Unable
from .protocol import Protocol, Subject, interleave
from .shapes import Shape
from .spot import Spot, judge_rows
from .stats import median_interval, paired_log_ratio, summarise
from .timer import Timer, device_state

Tick = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One implementation on one shape: a verdict, and a time only if the verdict is green."""

    shape: Shape
    name: str
    reason: str = ""
    spot: Spot | None = None
    seconds: tuple[float, ...] = ()
    ratio: tuple[float, float, float] | None = None  # time of the baseline over this one's, with 99% interval

    @property
    def tflops(self) -> float | None:
        """TFLOP/s by exact pair count at the median time."""
        return self.shape.flop / summarise(self.seconds).median / 1e12 if self.seconds else None

    @property
    def gbps(self) -> float | None:
        """Effective bandwidth, the documents' formula, in GB/s."""
        return self.shape.bytes / summarise(self.seconds).median / 1e9 if self.seconds else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record; raw samples are kept."""
        plain = asdict(self) | {"case": self.shape.name, "seconds": list(self.seconds)}
        if self.seconds:
            plain |= {"summary": summarise(self.seconds).as_dict(), "tflops": self.tflops, "gbps": self.gbps}
        return plain


def make_inputs(shape: Shape, device: str, slot: int) -> tuple[Any, ...]:
    """q, k, v and dout, normal, different for every slot."""
    import torch

    if shape.dtype not in NAMES:
        raise ValueError(f"dtype: expected one of {', '.join(NAMES)}, got {shape.dtype}")
    generator = torch.Generator(device).manual_seed(slot)
    sizes = [
        (shape.H, shape.queries),
        (shape.kv_heads, shape.N),
        (shape.kv_heads, shape.N),
        (shape.H, shape.queries),
    ]
    kind = getattr(torch, shape.dtype)
    grad = shape.run != "forward"
    made = [
        torch.randn(shape.B, heads, rows, shape.D, generator=generator, device=device, dtype=torch.float32)
        .to(kind)
        .requires_grad_(grad and at < 3)
        for at, (heads, rows) in enumerate(sizes)
    ]
    return tuple(made)


def subject(name: str, run: Run, shape: Shape, device: str) -> Subject:
    """Something to interleave: forward alone, backward alone (its forward outside the clock), or both."""

    def prepare(slot: int) -> Callable[[], Any]:
        import torch

        q, k, v, dout = make_inputs(shape, device, slot)
        quick: Run = getattr(run, "direct", run)
        if shape.run == "forward":
            return lambda: quick(q, k, v, shape)
        if shape.run == "both":
            return lambda: torch.autograd.grad(quick(q, k, v, shape), (q, k, v), dout)
        out = quick(q, k, v, shape)
        return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    return Subject(name, prepare)


def verdict(run: Run, shape: Shape, device: str) -> Spot:
    """The forward of this shape, judged on sampled rows."""
    import torch

    q, k, v, _ = (x.detach() for x in make_inputs(shape, device, 0))
    with torch.no_grad():
        out = run(q, k, v, shape)
    return judge_rows(q, k, v, out, mask=shape.mask, scale=shape.D**-0.5, dtype=shape.dtype)


def measure_shape(
    shape: Shape, names: Sequence[str], device: str, timer: Timer, protocol: Protocol
) -> list[Row]:
    """All implementations on one shape, interleaved; ratios are to the first that is green."""
    rows: dict[str, Row] = {}
    subjects: list[Subject] = []
    for name in names:
        try:
            run = implementations.load(name)
            spot = verdict(run, shape, device)
        except Unable as error:
            rows[name] = Row(shape, name, reason=str(error))
            continue
        rows[name] = Row(shape, name, spot=spot, reason="" if spot.green else "wrong: no time is quoted")
        if spot.green:
            subjects.append(subject(name, run, shape, device))
    if subjects:
        taken = interleave(subjects, timer, protocol)
        first = taken[subjects[0].name].seconds
        for each in subjects:
            seconds = taken[each.name].seconds
            found = median_interval(paired_log_ratio(first, seconds)).exp()
            ratio = (found.value, found.low, found.high)
            rows[each.name] = replace(rows[each.name], seconds=seconds, ratio=ratio)
    return list(rows.values())


def run(
    shapes: Iterable[Shape],
    names: Sequence[str],
    device: str,
    timer: Timer,
    protocol: Protocol,
    *,
    journal: Path | None = None,
    tick: Tick = lambda name: None,
) -> list[dict[str, Any]]:
    """Measure every shape; rows already in ``journal`` are taken from there.

    Args:
        shapes: see ``shapes.PRESETS``.
        names: see ``implementations.names``; ratios are to the first green one.
        device: "cpu" or "cuda".
        timer: see ``timer.timer_for``.
        protocol: numbers of calls and cache mode.
        journal: a JSON-lines file, one line a shape, appended to as results come.
        tick: called with the name of each shape when it is done.

    Returns:
        Plain rows as ``Row.as_dict`` gives them.
    """
    done = _journalled(journal, names, protocol)
    results: list[dict[str, Any]] = []
    for shape in shapes:
        rows = done.get(shape.name)
        if rows is None:
            state = device_state(device)
            found = measure_shape(shape, names, device, timer, protocol)
            rows = [row.as_dict() | {"state": state} for row in found]
            if journal is not None:
                line = {
                    "case": shape.name,
                    "names": list(names),
                    "protocol": protocol.as_dict(),
                    "rows": rows,
                }
                with journal.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        results += rows
        tick(shape.name)
    return results


def _journalled(
    journal: Path | None, names: Sequence[str], protocol: Protocol
) -> dict[str, list[dict[str, Any]]]:
    """Finished shapes of an earlier run with the same candidates and protocol; a torn last line is dropped."""
    if journal is None or not journal.exists():
        return {}
    found: dict[str, list[dict[str, Any]]] = {}
    for text in journal.read_text().splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if line["names"] == list(names) and line["protocol"] == protocol.as_dict():
            found[line["case"]] = line["rows"]
    return found
