"""Where the time of one call goes by the hardware's own counters, as ncu or rocprof read them, in words.

The longest kernel is described: how busy its units are (loads, products, exponentials), what its warps wait for, how
often an access to shared memory had to be repeated. A metric that a version of a profiler or a device does not have is
left out, never guessed.

The metrics' meanings are those of NVIDIA's Nsight Compute documentation (speed of light, warp states, shared memory)
and of AMD's list of derived counters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from ..ledger import counters, profilers
from ..ledger.counters import CounterError
from .shapes import Shape

TIME = "gpu__time_duration.sum"
# per cent of what each unit can do at most; rocprof's are per cent of the time
BUSY = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "matrix units",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed": "special-function units (exp)",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "busiest unit of a multiprocessor",
}
ROCM_BUSY = {
    "MemUnitBusy": "memory unit",
    "MfmaUtil": "matrix units",
    "VALUBusy": "vector units (exp among their work)",
}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
LATENCY = "smsp__average_warp_latency_per_inst_issued.ratio"  # cycles between two instructions of a warp
WAITS = {
    "long_scoreboard": "loads from memory or L2",
    "short_scoreboard": "shared memory or special functions",
    "mio_throttle": "the queue to shared memory and special functions",
    "math_pipe_throttle": "a busy arithmetic unit",
    "gmma": "matrix products of the warp group",
    "barrier": "other warps at a barrier",
    "membar": "a memory barrier",
    "lg_throttle": "the queue to global memory",
    "wait": "fixed latencies of instructions",
    "not_selected": "another warp's turn",
    "no_instruction": "instructions to be fetched",
    "sleeping": "sleep",
}
ROCM_WAITS = {
    "MemUnitStalled": "the memory unit",
    "ALUStalledByLDS": "queues of shared memory",
}
REPEATS = tuple(f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{way}.sum" for way in ("ld", "st"))
ACCESSES = tuple(f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{way}.sum" for way in ("ld", "st"))
ROCM_REPEATS = "LDSBankConflict"  # per cent of the time
NCU_METRICS = (TIME, *BUSY, LATENCY, *(STALL.format(reason) for reason in WAITS), *REPEATS, *ACCESSES)
ROCM_METRICS = (*ROCM_BUSY, *ROCM_WAITS, ROCM_REPEATS)
_SECONDS = {
    **{"nsecond": 1e-9, "ns": 1e-9, "usecond": 1e-6, "us": 1e-6},
    **{"msecond": 1e-3, "ms": 1e-3, "second": 1.0, "s": 1.0},
}
UNKNOWN = "Failed to find metric"  # what ncu says of a name that this version or device does not have
ATTEMPTS = 4  # runs at most; ncu may name the unknown metrics one by one
SHOWN = 3  # reasons to wait that are named


@dataclass(frozen=True)
class Profiled:
    """One kernel with the metrics that could be read; seconds are the profiler's, whose clocks are not a timed call's."""

    name: str
    metrics: Mapping[str, float]
    seconds: float = 0.0


@dataclass(frozen=True)
class Counted:
    """A call's kernels, and the profiler that counted."""

    tool: str
    kernels: Sequence[Profiled]


class Timed(Protocol):
    """A kernel with its time."""

    @property
    def name(self) -> str:
        """As the profiler writes it."""
        ...

    @property
    def seconds(self) -> float:
        """Its time; 0 if it was not read."""
        ...


def parse(text: str, tool: str = "ncu") -> list[Profiled]:
    """Kernels of a profiler's table in launch order, with the metrics that have numbers."""
    if tool != "ncu":
        return [
            Profiled(name, told, took or 0.0)
            for name, told, took in counters.rocprof_kernels(text, ROCM_METRICS)
        ]
    found: list[Profiled] = []
    for name, told in counters.ncu_kernels(text, NCU_METRICS):
        numbers = {
            metric: number for metric, (value, _) in told.items() if (number := _number(value)) is not None
        }
        unit = told.get(TIME, ("", ""))[1].strip().lower()
        found.append(Profiled(name, numbers, numbers.get(TIME, 0.0) * _SECONDS.get(unit, 0.0)))
    return found


def _number(value: str) -> float | None:
    """None for what is no number: "n/a" on a device that does not have the metric, "nan" for a ratio to nothing."""
    try:
        found = float(value.replace(",", ""))
    except ValueError:
        return None
    return found if abs(found) < float("inf") else None


def measure(shape: Shape, name: str, tool: str | None = None) -> Counted:
    """Make one call in a process under a profiler and return its kernels.

    Raises:
        CounterError: there is no profiler, counters are not permitted, or the process did not come to the call.
    """
    tool = tool or profilers.find_tool()
    kind = Path(tool).name
    wanted = NCU_METRICS if kind == "ncu" else ROCM_METRICS
    for _ in range(ATTEMPTS):
        try:
            seen = counters.segments(parse(_table(shape, name, tool, wanted), kind), 1)[0]
            return Counted(kind, seen)
        except CounterError as error:
            known = without_unknown(wanted, str(error))
            if known == wanted or not known:
                raise
            wanted = known
    raise CounterError(f"{kind}: expected the names of its metrics, refused some in each of {ATTEMPTS} runs")


def _table(shape: Shape, name: str, tool: str, metrics: Sequence[str]) -> str:
    # kernel replay: the whole process again for each pass would compile again each time
    return profilers.profile(
        tool,
        {"shape": asdict(shape), "name": name, "device": "cuda"},
        replay="kernel",
        workload="attnproof.measure.profiled",
        metrics=metrics,
        page="raw",
    ).table


def without_unknown(metrics: Sequence[str], said: str) -> tuple[str, ...]:
    """The metrics without those that ncu says it cannot find; it names them without what follows the first dot."""
    if UNKNOWN not in said:
        return tuple(metrics)
    return tuple(metric for metric in metrics if metric.partition(".")[0] not in said)


def sentence(kernels: Sequence[Profiled]) -> str:
    """What the counters say of a call: its kernels, then the longest one's units and waits."""
    main = longest(kernels)
    said = [each for each in (busy(main), waits(main)) if each]
    more = (
        f"; {short(main.name)}: {'; '.join(said)}"
        if said
        else "; of its units and waits nothing could be read"
    )
    return shares(kernels) + more


def longest(kernels: Sequence[Profiled]) -> Profiled:
    """The kernel with the most time."""
    if not kernels:
        raise CounterError("counters: expected at least one kernel between the markers, got none")
    return max(kernels, key=lambda kernel: kernel.seconds)


def shares(kernels: Sequence[Timed]) -> str:
    """How the time of a call is divided among its kernels, the longest first; equal names are one."""
    by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        by_name.setdefault(short(kernel.name), []).append(kernel.seconds)
    whole = sum(map(sum, by_name.values()))
    parts: list[str] = []
    for name, each in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        times = f" ({len(each)} times)" if len(each) > 1 else ""
        parts.append(f"{name}{times}" + (f" {sum(each) / whole:.0%}" if whole else ""))
    launches = f"{len(kernels)} launch{'' if len(kernels) == 1 else 'es'}"
    took = f", {whole * 1e3:.3g} ms on the device" if whole else ""
    return f"{launches}{took}: {', '.join(parts)}"


def short(name: str) -> str:
    """A kernel's name without its types and arguments."""
    plain = name.removeprefix("void ").split("(")[0].split("<")[0].strip()
    return plain.rsplit("::", 1)[-1] or name


def busy(kernel: Profiled) -> str:
    """How much of their peaks the units did."""
    told = _told(kernel, BUSY | ROCM_BUSY)
    return "busy are " + ", ".join(f"{word} {value:.0f}%" for word, value in told.items()) if told else ""


def waits(kernel: Profiled) -> str:
    """What its warps wait for, most first: cycles between two instructions of a warp, or rocprof's share of the time."""
    told = _told(kernel, {STALL.format(reason): word for reason, word in WAITS.items()})
    most = [(word, value) for word, value in sorted(told.items(), key=lambda item: -item[1]) if value][:SHOWN]
    whole = kernel.metrics.get(LATENCY)
    if most:
        parts = (
            f"{word} {f'{value / whole:.0%}' if whole else f'{value:.1f} cycles'}" for word, value in most
        )
        of = f" of {whole:.1f} cycles" if whole else ""
        return f"between two instructions{of} a warp waits for {', '.join(parts)}"
    stalled = _told(kernel, ROCM_WAITS)
    return (
        "stalled by " + ", ".join(f"{word} {value:.0f}%" for word, value in stalled.items())
        if stalled
        else ""
    )


def _told(kernel: Profiled, words: Mapping[str, str]) -> dict[str, float]:
    return {word: kernel.metrics[metric] for metric, word in words.items() if metric in kernel.metrics}


@dataclass(frozen=True)
class Conflicts:
    """Cost of bank conflicts in a call: a share of 1, and of what."""

    share: float
    of: str


def conflicts(kernels: Sequence[Profiled]) -> Conflicts | None:
    """Bank conflicts of all kernels of a call by ncu, of the longest by rocprof; None if they were not read."""
    made = [kernel for kernel in kernels if all(metric in kernel.metrics for metric in (*REPEATS, *ACCESSES))]
    if made:
        repeats, accesses = (
            sum(kernel.metrics[metric] for kernel in made for metric in metrics)
            for metrics in (REPEATS, ACCESSES)
        )
        return Conflicts(repeats / accesses if accesses else 0.0, "the passes over shared memory")
    main = longest(kernels)
    if ROCM_REPEATS in main.metrics:
        return Conflicts(main.metrics[ROCM_REPEATS] / 100, f"the time of {short(main.name)}")
    return None
