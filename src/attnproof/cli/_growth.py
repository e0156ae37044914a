"""What `drift`, `memory` and `train` do: steps into a journal, a record, and the sentences that it comes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from attnproof.cli._common import out_console, progress, show

if TYPE_CHECKING:
    from attnproof.measure.journal import Journal

FLAT, LINEAR = 0.1, 1.1  # bars: slope of z over N, exponent of the memory of a fused kernel
MUTANT = "half accumulator"
CHECKPOINTED = "eager, checkpointed"
PEERS = ("eager", "flex")
MIB = 2**20


@dataclass(frozen=True)
class DriftPlan:
    """What `drift` measures."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    longest: int
    seeds: int
    device: str


def drift_names(device: str) -> tuple[str, ...]:
    """Ours (one that serves only some dtypes, and the one behind it), and torch's flash kernel beside them."""
    from attnproof.measure import implementations

    own = [name for name in implementations.names(device) if ":" not in name and name not in PEERS]
    return (*own[: 2 if device == "cuda" else 1], "sdpa:flash")


def drift(plan: DriftPlan, journal: Journal) -> tuple[dict[str, Any], bool]:
    """Points of every candidate, dtype and length; whether those of ours hold."""
    from attnproof.measure import drift as measured
    from attnproof.measure import memory
    from attnproof.verify import records

    lengths = tuple(memory.doubling(1024, plan.longest))
    attends = {name: _attend(name) for name in plan.names} | {MUTANT: measured.half_accumulator}
    pairs = [
        (name, dtype)
        for dtype in plan.dtypes
        for name in attends
        if name != MUTANT or dtype in ("float16", "bfloat16")
    ]
    rows: list[dict[str, Any]] = []
    with progress("drift", len(pairs) * len(lengths)) as tick:
        for name, dtype in pairs:
            points, refused = _points(plan, name, attends[name], dtype, lengths, journal, tick)
            rows.append(_refused_row(name, dtype, refused) if refused else _drift_row(name, dtype, points))
    shown = [row for row in rows if row["status"] != "SKIP"]
    if not any(row["candidate"] != MUTANT for row in shown):
        raise ValueError(
            f"candidate: expected one that serves {', '.join(plan.dtypes)}, got {rows[0]['reason']}"
        )
    protocol = {
        "rows": measured.ROWS,
        "D": 64,
        "longest": plan.longest,
        "seeds": plan.seeds,
        "band": measured.band(plan.seeds),
    }
    _print_drift(shown)
    holds = all(row["status"] != "FAIL" for row in rows if row["candidate"] != MUTANT)
    return records.record("drift", protocol, rows, plan.device), holds


def _points(
    plan: DriftPlan,
    name: str,
    attend: Callable[[Any, Any, Any], Any],
    dtype: str,
    lengths: Sequence[int],
    journal: Journal,
    tick: Callable[[str], Any],
) -> tuple[list[Any], str]:
    """A candidate's points of one dtype, or why it does not serve it."""
    from attnproof.measure import drift as measured
    from attnproof.measure.implementations import Unable

    points: list[Any] = []
    for n in lengths:
        step = f"{name} {dtype} {n}"
        if step not in journal:
            try:
                found = measured.point(name, attend, n, dtype=dtype, device=plan.device, seeds=plan.seeds)
            except Unable as error:
                return [], str(error)
            journal.put(step, found.as_dict())
        points.append(measured.Point(**journal[step]))
        tick(step)
    return points, ""


def _refused_row(name: str, dtype: str, reason: str) -> dict[str, Any]:
    return {
        "case": f"drift {dtype}",
        "candidate": name,
        "dtype": dtype,
        "status": "SKIP",
        "reason": reason,
        "points": [],
        "slope": None,
    }


def _attend(name: str) -> Callable[[Any, Any, Any], Any]:
    from attnproof.measure import implementations
    from attnproof.measure.shapes import Shape

    one = implementations.load(name)

    def attend(q: Any, k: Any, v: Any) -> Any:
        dtype = str(q.dtype).removeprefix("torch.")
        return one.run(q, k, v, Shape(1, 1, k.shape[2], q.shape[3], M=q.shape[2], dtype=dtype))

    return attend


def _drift_row(name: str, dtype: str, points: Sequence[Any]) -> dict[str, Any]:
    from attnproof.measure import drift as measured

    slope = measured.slope(points) if len(points) >= 3 else None
    # the documents' bar: no worse at the far end than at 1024; a half type's z must be flat as well
    worse = points[-1].rms > 1.05 * points[0].rms
    steep = slope is not None and dtype in ("float16", "bfloat16") and slope.value > FLAT
    reason = "; ".join(
        text
        for text, wrong in (
            (f"RMS grows from {points[0].rms:.2e} to {points[-1].rms:.2e}", worse),
            (f"z grows like N^{slope.value:.2f}" if slope else "", steep),
        )
        if wrong
    )
    return {
        "case": f"drift {dtype}",
        "candidate": name,
        "dtype": dtype,
        "status": ("FINDING" if name == MUTANT else "FAIL") if reason else "PASS",
        "reason": reason,
        "points": [point.as_dict() for point in points],
        "slope": None if slope is None else asdict(slope),
    }


def _print_drift(rows: list[dict[str, Any]]) -> None:
    cells = [
        [
            row["dtype"],
            row["candidate"],
            f"{row['points'][0]['z_rms']:.2f}",
            f"{row['points'][-1]['z_rms']:.2f}",
            "" if row["slope"] is None else "{value:+.3f} [{low:+.3f}, {high:+.3f}]".format(**row["slope"]),
            f"{row['points'][0]['rms']:.1e}",
            f"{row['points'][-1]['rms']:.1e}",
            # z of float32 counts the storage's rounding only, and its errors come from the order of a sum
            row["reason"] or ("flat" if row["dtype"] in ("float16", "bfloat16") else "RMS does not grow"),
        ]
        for row in rows
    ]
    ends = (rows[0]["points"][0]["n"], rows[0]["points"][-1]["n"])
    show(
        out_console(),
        f"error over its model (z) and RMS at N = {ends[0]} and {ends[1]}; slope is d log z / d log N, 95%",
        *("dtype", "candidate", "z first", "z last", "slope", "RMS first", "RMS last", ""),
        rows=cells,
    )


@dataclass(frozen=True)
class MemoryPlan:
    """What `memory` measures besides NumPy."""

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    heads: int
    d: int
    dtype: str
    device: str
    limit: int


def memory(plan: MemoryPlan, journal: Journal) -> tuple[dict[str, Any], bool]:
    """Peak of forward and backward against N; whether ours grow linearly."""
    from attnproof.measure import memory as measured
    from attnproof.verify import records

    rows: list[dict[str, Any]] = []
    with progress("memory", len(plan.names) * len(plan.lengths)) as tick:
        for name in plan.names:
            if name not in journal:
                make = measured.call_of(
                    name, heads=plan.heads, d=plan.d, dtype=plan.dtype, device=plan.device
                )
                found = measured.grow(
                    name, make, iter(plan.lengths), plan.device, limit=plan.limit, tick=tick
                )
                journal.put(name, found.as_dict())
            rows.append(_memory_row(journal[name], plan))
    protocol = {
        "run": "forward and backward",
        "heads": plan.heads,
        "D": plan.d,
        "dtype": plan.dtype,
        "limit_bytes": plan.limit,
        "account": "allocator and driver" if plan.device == "cuda" else "resident peak of the process",
    }
    _print_memory(rows, plan)
    return records.record("memory", protocol, rows, plan.device), all(row["status"] != "FAIL" for row in rows)


def _memory_row(found: dict[str, Any], plan: MemoryPlan) -> dict[str, Any]:
    exponent, own = found["exponent"], ":" not in found["name"] and found["name"] not in ("eager", "flex")
    value = 0.0 if exponent is None else exponent["value"]
    wrong = own and value > LINEAR
    reason = f"grows like N^{value:.2f}, the bar is {LINEAR}" if wrong else found["reason"]
    status = "FAIL" if wrong else "PASS" if exponent is not None else "SKIP"
    hard = {} if exponent is None else {"exponent": value}
    return {
        "case": f"memory H{plan.heads} D{plan.d} {plan.dtype}",
        "candidate": found["name"],
        "dtype": plan.dtype,
        "status": status,
        "reason": reason or ("" if exponent else "fewer than three lengths could be measured"),
        "n": found["n"],
        "bytes": found["bytes"],
        "system_bytes": found["system_bytes"],
        "exponent": exponent,
        "deterministic": hard,
    }


def _print_memory(rows: list[dict[str, Any]], plan: MemoryPlan) -> None:
    cells: list[list[str]] = []
    for row in rows:
        peaks = dict(zip(row["n"], row["bytes"], strict=True))
        exponent = row["exponent"]
        cells.append(
            [
                row["candidate"],
                *(f"{peaks[n] / MIB:.1f}" if n in peaks else "-" for n in plan.lengths),
                "-" if exponent is None else "{value:.2f} [{low:.2f}, {high:.2f}]".format(**exponent),
                row["reason"],
            ]
        )
    show(
        out_console(),
        f"peak MiB over the inputs, forward and backward, H={plan.heads} D={plan.d} {plan.dtype}; exponent of N, 95%",
        *("candidate", *(f"N={n}" for n in plan.lengths), "exponent", ""),
        rows=cells,
    )


@dataclass(frozen=True)
class TrainPlan:
    """What `train` runs: one curve for each attention, and further seeds of the first for the spread."""

    model: str
    attentions: tuple[str, ...]
    size: Any
    steps: int
    seeds: int
    dtype: str
    device: str


def train(plan: TrainPlan, journal: Journal) -> tuple[dict[str, Any], bool]:
    """Curves of every attention with seed 0, and of the first with others; whether all coincide within their spread."""
    from attnproof.measure import published, training
    from attnproof.verify import records

    jobs = [(name, 0) for name in plan.attentions] + [
        (plan.attentions[0], seed) for seed in range(1, plan.seeds)
    ]
    done: dict[tuple[str, int], Any] = {}
    with progress("train", len(jobs) * plan.steps) as tick:
        for name, seed in jobs:
            step = f"{name} seed {seed}"
            if step in journal:
                for _ in range(plan.steps):
                    tick(step)
            else:
                journal.put(step, _one_run(plan, name, seed, tick))
            done[name, seed] = training.Run(**journal[step])
    first = done[plan.attentions[0], 0]
    others = [run for (_, seed), run in done.items() if seed]
    rows = [_train_row(training, plan, run, first, others) for run in done.values()]
    _print_train(rows, plan)
    table = published.beside(plan.model, plan.size.length, rows)
    _print_gains(table, published.SOURCE)
    size = asdict(plan.size)
    protocol = {
        "model": plan.model,
        "size": size,
        "steps": plan.steps,
        "dtype": plan.dtype,
        "seeds": plan.seeds,
    }
    protocol["optimizer"] = "AdamW 3e-4"
    protocol["gains"] = {"source": published.SOURCE, "models": [one.as_dict() for one in table]}
    return records.record("train", protocol, rows, plan.device), all(row["status"] != "FAIL" for row in rows)


def _one_run(plan: TrainPlan, name: str, seed: int, tick: Any) -> dict[str, Any]:
    import torch

    from attnproof.measure import training

    run = training.train(
        plan.model,
        "eager" if name == CHECKPOINTED else name,
        plan.size,
        recompute=name == CHECKPOINTED,
        steps=plan.steps,
        seed=seed,
        device=plan.device,
        dtype=getattr(torch, plan.dtype),
        tick=lambda at, loss: tick(f"{name} seed {seed}: loss {loss:.3f}"),
    )
    return run.as_dict() | {"attention": name}


def _train_row(training: Any, plan: TrainPlan, run: Any, first: Any, others: Sequence[Any]) -> dict[str, Any]:
    row = {
        "case": f"train {plan.model}",
        "candidate": run.attention,
        "dtype": plan.dtype,
        "seed": run.seed,
        "status": "PASS",
        "reason": "",
        "losses": list(run.losses),
        "final_loss": training.final(run),
        "tokens_per_second": run.tokens_per_second,
        "peak_bytes": run.peak_bytes,
    }
    if run.seed or run is first or not others:
        return row
    same, difference, spread = training.coincide(first, run, others)
    reason = "" if same else f"final loss differs by {difference:.4f}, seeds by {spread:.4f}"
    return row | {
        "status": "PASS" if same else "FAIL",
        "reason": reason,
        "difference": difference,
        "spread": spread,
    }


def _print_train(rows: list[dict[str, Any]], plan: TrainPlan) -> None:
    cells = [
        [
            row["candidate"],
            str(row["seed"]),
            f"{row['losses'][0]:.3f}",
            f"{row['final_loss']:.4f}",
            "" if "spread" not in row else f"{row['difference']:.4f} (seeds {row['spread']:.4f})",
            f"{row['tokens_per_second']:.0f}",
            f"{row['peak_bytes'] / MIB:.0f}",
            row["reason"],
        ]
        for row in rows
    ]
    show(
        out_console(),
        f"{plan.model}, {plan.size}, {plan.steps} steps, {plan.dtype}",
        *("attention", "seed", "first loss", "final loss", "difference", "tokens/s", "peak MiB", ""),
        rows=cells,
    )


def _print_gains(table: Sequence[Any], source: str) -> None:
    cells = [
        [
            one.model,
            "-" if one.published is None else f"{one.published:.2f}x",
            one.lengths,
            one.against,
            f"not run: attnproof train --model {one.model}" if one.ours is None else f"{one.ours:.2f}x",
            "" if one.length is None else str(one.length),
            "" if one.memory is None else f"{one.memory:.2f}x",
        ]
        for one in table
    ]
    show(
        out_console(),
        f"training speed of fused attention, published ({source}) and on this machine (attnproof over eager)",
        *(
            "model",
            "published gain",
            "N",
            "against",
            "ours on this machine",
            "our N",
            "eager's peak over ours",
        ),
        rows=cells,
    )
