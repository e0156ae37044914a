"""``attnproof doctor --amd``: what an owner of a served GPU runs once, and shares.

Prints the stack and the libraries that were chosen, compiles, self-tests, verifies named calls against fp32 torch, times
prefill and decode beside the materialised form, and measures the pipes that the model in docs/07_mi50.md takes from
elsewhere: dot2, LDS reads of 16 bytes (and how lanes share a phase), exponentials, memory. Everything goes into one
JSON document. Nobody of this project has run it on such a GPU.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...problem import Options, bind
from . import configs
from .variants import Step, Variant, common, defines

Clock = Callable[[Callable[[], Any]], float]  # seconds of a function
THREADS = configs.ROWS.threads
ALLOWED = 2.0**-7  # of results around 1 in fp16; bf16 rounds 8 times as much
ROUNDS = 7
MODELLED = (
    0.76  # of the dot2 rate: the bound with full overlap that the instruction counts give, docs/07_mi50.md
)


@dataclass(frozen=True)
class Named:
    """A call that is verified."""

    name: str
    heads: tuple[int, int]
    m: int
    n: int
    d: int
    dtype: str = "float16"
    causal: bool = False


CASES = (
    Named("head dim 64", (4, 4), 256, 256, 64),
    Named("head dim 128, causal", (4, 2), 300, 300, 128, causal=True),
    Named("head dim 80, causal", (2, 2), 129, 200, 80, causal=True),
    Named("head dim 256", (2, 1), 100, 130, 256),
    Named("head dim 40, not aligned", (2, 2), 77, 77, 59),
    Named("decode", (8, 2), 1, 1000, 128),
    Named("bfloat16, causal", (2, 1), 200, 200, 64, "bfloat16", causal=True),
    Named("float32, causal", (2, 1), 100, 100, 64, "float32", causal=True),
)
SHAPES = (
    ("prefill 2048, D 128", 32, 2048, 2048, 128),
    ("prefill 8192, D 128", 8, 8192, 8192, 128),
    ("prefill 4096, D 64", 16, 4096, 4096, 64),
    ("decode 8192, D 128", 32, 1, 8192, 128),
    ("decode 65536, D 128", 8, 1, 65536, 128),
)


def whole(q: Any, k: Any, v: Any, scale: float, *, causal: bool) -> Any:
    """The materialised form in fp32."""
    import torch

    q, k, v = (x.float() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * scale
    if causal:
        m, n = s.shape[-2:]
        rows, keys = torch.arange(m, device=q.device)[:, None], torch.arange(n, device=q.device)
        s = s.masked_fill(keys > rows + n - m, -torch.inf)
    return torch.softmax(s, -1) @ v


def draw(named: Named, device: Any) -> tuple[Any, Any, Any]:
    """q, k, v of a named call; the same numbers on every machine."""
    import torch

    generator = torch.Generator().manual_seed(named.m)
    dtype = getattr(torch, named.dtype)
    heads, groups = named.heads
    shapes = ((1, heads, named.m, named.d), (1, groups, named.n, named.d), (1, groups, named.n, named.d))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes)
    return q, k, v


def verify(device: Any, cases: tuple[Named, ...] = CASES) -> list[dict[str, Any]]:
    """Each named call against fp32 torch on the same device."""
    from . import forward, why_not

    found: list[dict[str, Any]] = []
    for named in cases:
        q, k, v = draw(named, device)
        problem, tensors = bind(q, k, v, Options(causal=named.causal))
        reason = why_not(problem)
        if reason is not None:
            found.append({"case": named.name, "ok": False, "reason": reason})
            continue
        out, _ = forward(problem, tensors)
        error = float((out.float() - whole(q, k, v, problem.scale, causal=named.causal)).abs().max())
        allowed = ALLOWED * (8 if named.dtype == "bfloat16" else 1)
        found.append({"case": named.name, "ok": error <= allowed, "error": error})
    return found


@dataclass(frozen=True)
class Bench:
    """A kernel that keeps one pipe busy.

    Attributes:
        entry: its name.
        per_round: what a thread does in a round, in ``unit``.
        unit: flop, byte or exp.
        numbers: further argument fields.
    """

    name: str
    entry: str
    per_round: int
    unit: str
    numbers: tuple[tuple[str, int], ...] = ()


BENCHES = (
    Bench("dot2", "bench_dot2", 64, "flop"),
    Bench("exp2", "bench_exp", 8, "exp"),
    Bench("LDS, 16 bytes, neighbours", "bench_lds", 128, "byte", (("N", 0),)),
    Bench("LDS, 16 bytes, lanes 0-3 with 20-23", "bench_lds", 128, "byte", (("N", 1),)),
)


def bench_step(bench: Bench, groups: int, rounds: int, parts: Any) -> Step:
    """The launch of a bench kernel."""
    from ...problem import Problem

    plain = Problem("float16", "cuda", 1, 1, 1, 1, 1, 64, 64)
    flags = defines(**common(plain, configs.ROWS, wide=True, dtype=0))
    numbers: dict[str, Any] = {"M": rounds, **dict(bench.numbers)}
    return Step(Variant("bench", flags, bench.entry), groups, THREADS, numbers, {"parts": parts})


def pipes(
    device: Any, run: Callable[[Step], None], units: int, clock: Clock, rounds: int = 4096
) -> list[dict[str, Any]]:
    """Rates of the pipes: per second over the whole device."""
    import torch

    groups = 8 * units
    parts = torch.empty(groups * THREADS, dtype=torch.float32, device=device)
    found: list[dict[str, Any]] = []
    for bench in BENCHES:
        step = bench_step(bench, groups, rounds, parts)
        seconds = clock(lambda step=step: run(step))
        work = bench.per_round * rounds * groups * THREADS
        found.append({"pipe": bench.name, "unit": f"{bench.unit}/s", "rate": work / seconds})
    source = torch.ones(2**26, dtype=torch.int32, device=device)
    reads = bench_step(Bench("memory", "bench_read", 0, "byte"), groups, 1, parts)
    reads = Step(
        reads.variant,
        groups,
        THREADS,
        {"N": source.numel(), "tiles": groups},
        {"parts": parts, "q": source},
    )
    seconds = clock(lambda: run(reads))
    found.append({"pipe": "memory, reads", "unit": "byte/s", "rate": 4 * source.numel() / seconds})
    return found


def timings(device: Any, clock: Clock) -> list[dict[str, Any]]:
    """Prefill and decode in fp16 beside the materialised form, where that fits in memory."""
    import torch

    from . import forward

    found: list[dict[str, Any]] = []
    for name, heads, m, n, d in SHAPES:
        q, k, v = draw(Named(name, (heads, heads), m, n, d), device)
        problem, tensors = bind(q, k, v, Options())
        ours = clock(lambda p=problem, t=tensors: forward(p, t))
        row: dict[str, Any] = {"shape": name, "ms": ours * 1e3, "tflops": 4 * heads * m * n * d / ours / 1e12}
        row["gigabytes_per_second"] = 4 * heads * n * d / ours / 1e9
        try:
            row["materialised_ms"] = 1e3 * clock(
                lambda q=q, k=k, v=v, p=problem: torch.softmax(q @ k.transpose(-1, -2) * p.scale, -1) @ v
            )
        except torch.cuda.OutOfMemoryError:
            row["materialised_ms"] = None
        found.append(row)
    return found


def event_clock(fn: Callable[[], Any]) -> float:
    """Median seconds of ``ROUNDS`` runs on the current stream, after one that compiles."""
    import torch

    fn()
    seconds: list[float] = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fn()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def stack() -> dict[str, Any]:
    """Versions, the device, and what the loader found."""
    import torch

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "hip": torch.version.hip,
    }
    if torch.version.hip and torch.cuda.is_available():
        about: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts |= {
            "device": about.name,
            "architecture": str(about.gcnArchName),
            "units": about.multi_processor_count,
            "memory_gib": about.total_memory / 2**30,
            "clock_hz": 1e3 * getattr(about, "clock_rate", 0),
        }
    return facts


def examine() -> dict[str, Any]:
    """Everything, as one document; ``reason`` says why it stopped early, if it did."""
    from . import gate, loader

    document: dict[str, Any] = {"command": "doctor --amd", "stack": stack(), "holds": False}
    reason = gate.closed()
    if reason is not None:
        return {**document, "reason": reason}
    import torch

    index = torch.cuda.current_device()
    device = loader.device(index)
    compiler = device.runtime.compiler
    document["libraries"] = {
        "driver": device.runtime.driver,
        "compiler": None if compiler is None else compiler.version,
        "steps": loader.announced(),
    }
    document["self_test"] = gate.self_test(index)
    document["cases"] = verify(index)
    document["kernels"] = kernels(device)
    document["pipes"] = pipes(index, device.run, device.units, event_clock)
    document["timings"] = timings(index, event_clock)
    document["holds"] = all(case["ok"] for case in document["cases"])
    return document


def kernels(device: Any) -> list[dict[str, Any]]:
    """Registers, LDS and scratch of what was compiled so far, as the runtime reports them."""
    return [
        {"kernel": variant.name, "flags": list(variant.flags), **device.runtime.attributes(function)}
        for variant, function in device.functions.items()
    ]


def as_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    """What the command prints: one line per fact."""
    rows = [(str(name), str(value)) for name, value in document["stack"].items()]
    if "reason" in document:
        return [*rows, ("dot2", document["reason"])]
    rows += [(str(name), str(value)) for name, value in document["libraries"].items() if name != "steps"]
    rows += [("step", step) for step in document["libraries"]["steps"]]
    for case in document["cases"]:
        verdict = "ok" if case["ok"] else "WRONG"
        rows.append((f"case: {case['case']}", f"{verdict}, {case.get('reason') or case['error']}"))
    rows += [(f"pipe: {p['pipe']}", f"{p['rate'] / 1e12:.3f} T{p['unit']}") for p in document["pipes"]]
    for row in document["timings"]:
        beside = "did not fit" if row["materialised_ms"] is None else f"{row['materialised_ms']:.2f} ms"
        share = row["tflops"] * 1e12 / document["pipes"][0]["rate"]
        rate = f"{row['tflops']:.1f} TFLOP/s, {share:.0%} of dot2 (model: at most {MODELLED:.0%} at D 128)"
        rows.append((row["shape"], f"{row['ms']:.2f} ms, {rate}; materialised {beside}"))
    return rows
