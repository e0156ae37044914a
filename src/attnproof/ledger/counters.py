"""Counters beside the prediction: what ncu or rocprof print, cut into calls and compared with the model.

A profiler lists kernels, not calls. The profiled process (`workload`) therefore launches a marker kernel
before and after each measured call; `segments` cuts the list there and refuses if the count does not match
the calls that were made. What a segment holds is compared with an account: memory traffic with its cache
replay, L2 traffic with its requests.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from ..errors import AttentionError
from . import accounts
from .accounts import Account
from .cache import Memory, on
from .hardware import Hardware
from .traffic import Call

MARKER = "spin_kernel"  # what torch.cuda._sleep launches: it touches no memory
SECTOR = 32  # bytes of an L2 sector on NVIDIA devices
READ, WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
SECTORS, TIME = "lts__t_sectors_srcunit_tex.sum", "gpu__time_duration.sum"
NCU_METRICS = (READ, WRITE, SECTORS, TIME)
ROCPROF_METRICS = ("FETCH_SIZE", "WRITE_SIZE")
GEMM = (128, 128)  # tile of a library's matrix product, for the requests of the materialised form
NEAR = 4  # a working set of so many L2 sizes is far above it

_SCALE: Mapping[str, float] = {
    "": 1, "byte": 1, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "sector": 1, "second": 1, "s": 1,
    "nsecond": 1e-9, "ns": 1e-9, "usecond": 1e-6, "us": 1e-6, "msecond": 1e-3, "ms": 1e-3,
}  # fmt: skip


class CounterError(AttentionError, RuntimeError):
    """A profiler did not deliver what was asked for; the message says what to do."""


@dataclass(frozen=True)
class Counted:
    """One kernel as the profiler saw it; None where the profiler has no such counter."""

    name: str
    read: float
    written: float
    l2: float | None = None
    seconds: float | None = None


def parse_ncu(text: str) -> list[Counted]:
    """Kernels in launch order, from `ncu --csv`: a line per metric (details page) or kernel (raw page)."""
    out: list[Counted] = []
    for name, told in ncu_kernels(text, NCU_METRICS):
        metrics = {metric: _number(value, unit) for metric, (value, unit) in told.items()}
        missing = [metric for metric in (READ, WRITE) if metric not in metrics]
        if missing:
            raise CounterError(f"ncu: expected the metrics {', '.join(missing)}, got {sorted(told)}")
        sectors = metrics.get(SECTORS)
        l2 = None if sectors is None else SECTOR * sectors
        out.append(Counted(name, metrics[READ], metrics[WRITE], l2, metrics.get(TIME)))
    return out


def ncu_kernels(text: str, columns: Sequence[str]) -> list[tuple[str, dict[str, tuple[str, str]]]]:
    """Name of each kernel in launch order with its metrics as ncu writes them: (value, unit) by name.

    Both pages of `ncu --csv` are read: the details page has a line per metric; the raw page has a line per kernel, a
    column per metric (those of `columns` are taken), and a second header line with the units.
    """
    names: dict[str, str] = {}
    found: dict[str, dict[str, tuple[str, str]]] = {}
    units: dict[str, str] = {}
    for row in _rows(text, '"ID"', "ncu"):
        identity = row["ID"]
        if not identity:
            units = dict(row)
            continue
        names[identity] = row["Kernel Name"]
        metrics = found.setdefault(identity, {})
        if "Metric Name" in row:
            metrics[row["Metric Name"]] = (row["Metric Value"], row["Metric Unit"])
        else:
            metrics.update({m: (row[m], units.get(m, "")) for m in columns if row.get(m)})
    return [(names[identity], metrics) for identity, metrics in found.items()]


def parse_rocprof(text: str) -> list[Counted]:
    """Kernels in dispatch order, from rocprofv3 (one line per counter) or rocprof (one line per kernel).

    FETCH_SIZE and WRITE_SIZE are in KiB.
    """
    out: list[Counted] = []
    for name, told, _ in rocprof_kernels(text, ROCPROF_METRICS):
        out.append(_fetched(name, told))
    return out


def rocprof_kernels(text: str, columns: Sequence[str]) -> list[tuple[str, dict[str, float], float | None]]:
    """Name, counters and seconds of each kernel in dispatch order; of `columns` where a line is a kernel.

    Seconds are the time stamps' difference, which the older rocprof writes only when it is asked to.
    """
    header = text.lstrip().splitlines()[:1]
    if not header or "Counter_Name" not in header[0]:
        rows = _rows(text, "Index", "rocprof")
        return [
            (row["KernelName"], {m: _number(row[m], "") for m in columns if row.get(m)}, None) for row in rows
        ]
    found: dict[int, dict[str, float]] = {}
    about: dict[int, tuple[str, float]] = {}
    for row in _rows(text, '"Correlation_Id"', "rocprofv3"):
        dispatch = int(row["Dispatch_Id"])
        took = 1e-9 * (float(row["End_Timestamp"]) - float(row["Start_Timestamp"]))
        about[dispatch] = (row["Kernel_Name"], took)
        counters = found.setdefault(dispatch, {})
        # several instances of a counter (one per die) come as several lines
        value = _number(row["Counter_Value"], "")
        counters[row["Counter_Name"]] = counters.get(row["Counter_Name"], 0.0) + value
    return [(about[at][0], found[at], about[at][1]) for at in sorted(found)]


def _fetched(name: str, counters: Mapping[str, float]) -> Counted:
    missing = [metric for metric in ROCPROF_METRICS if metric not in counters]
    if missing:
        raise CounterError(f"rocprof: expected the counters {', '.join(missing)}, got {sorted(counters)}")
    return Counted(name, 1024 * counters["FETCH_SIZE"], 1024 * counters["WRITE_SIZE"])


def _rows(text: str, start: str, tool: str) -> Iterable[dict[str, str]]:
    """The CSV part of a profiler's output, without the lines it prints around it."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("==")]
    head = next((n for n, line in enumerate(lines) if line.lstrip().startswith(start)), None)
    if head is None:
        raise CounterError(explain_failure(text, tool))
    return csv.DictReader(io.StringIO("\n".join(lines[head:])))


def explain_failure(text: str, tool: str) -> str:
    """What a profiler's output without a table means."""
    if "ERR_NVGPUCTRPERM" in text:
        return "ncu: the driver keeps counters for administrators (ERR_NVGPUCTRPERM); run as root"
    if "No kernels were profiled" in text:
        return "ncu: no kernel was profiled; the measured process did not reach a call"
    tail = " / ".join(line.strip() for line in text.splitlines() if line.strip())[-400:]
    return f"{tool}: expected a table of counters, got {tail or 'nothing'}"


def _number(value: str, unit: str) -> float:
    """A profiler's number: thousands separated by commas, in the unit that it names."""
    scale = _SCALE.get(unit.strip().lower())
    if scale is None:
        raise CounterError(f"counter: expected bytes, sectors or seconds, got the unit {unit!r}")
    try:
        return float(value.replace(",", "")) * scale
    except ValueError:
        raise CounterError(
            f"counter: expected a number, got {value!r}; this device may not have it"
        ) from None


class Named(Protocol):
    """A kernel that a profiler saw."""

    @property
    def name(self) -> str:
        """As the profiler writes it."""
        ...


K = TypeVar("K", bound=Named)


def segments(kernels: Sequence[K], calls: int) -> list[list[K]]:
    """The kernels between each pair of markers; as many pairs as calls, or a CounterError."""
    at = [number for number, kernel in enumerate(kernels) if MARKER in kernel.name]
    if len(at) != 2 * calls:
        raise CounterError(f"counters: expected {2 * calls} markers for {calls} calls, got {len(at)}")
    return [list(kernels[at[2 * n] + 1 : at[2 * n + 1]]) for n in range(calls)]


def account_of(implementation: str, direction: str, call: Call) -> Account:
    """The account that predicts an implementation.

    A fused library kernel is predicted as queries outer with an atomic backward, ours with its two sweeps.
    """
    if implementation == "eager":
        make = accounts.eager if direction == "forward" else accounts.eager_backward
        return make(call, gemm=GEMM, scaled=True)
    if direction == "forward":
        return accounts.forward(call)
    return accounts.backward_atomic(call) if implementation == "sdpa" else accounts.backward(call)


def working_set(account: Account) -> int:
    """Bytes of all tensors that a pass touches, each once."""
    sizes: dict[str, int] = {}
    for kernel in account.kernels:
        for touch in kernel.touches(1 << 30):
            sizes[touch.tensor] = max(sizes.get(touch.tensor, 0), touch.stop)
    return sum(sizes.values())


@dataclass(frozen=True)
class Compared:
    """One measured call beside its prediction; bytes."""

    implementation: str
    direction: str
    working_set: int
    kernels: tuple[Counted, ...]
    predicted: Memory
    requests: int

    @property
    def read(self) -> float:
        """Bytes read from memory, counted."""
        return sum(kernel.read for kernel in self.kernels)

    @property
    def written(self) -> float:
        """Bytes written to memory, counted."""
        return sum(kernel.written for kernel in self.kernels)

    @property
    def l2(self) -> float | None:
        """Bytes that the units asked the L2 for, counted."""
        counts = [kernel.l2 for kernel in self.kernels if kernel.l2 is not None]
        return sum(counts) if counts else None

    @property
    def ratio(self) -> float:
        """Counted over predicted memory traffic."""
        return (self.read + self.written) / self.predicted.total if self.predicted.total else float("inf")

    def limit(self, hardware: Hardware) -> float:
        """How far the ratio may be from 1: 10% far above the L2, a factor of two near it."""
        return 1.1 if self.working_set > NEAR * hardware.l2_bytes else 2.0

    def holds(self, hardware: Hardware) -> bool:
        """Whether the prediction is as close as was promised."""
        limit = self.limit(hardware)
        return 2 - limit <= self.ratio <= limit if limit < 2 else 1 / limit <= self.ratio <= limit

    def as_result(self, hardware: Hardware, case: str, shape: Mapping[str, Any]) -> dict[str, Any]:
        """One entry of a record; `case` names the call, `shape` is its structure."""
        return {
            "candidate": self.implementation,
            "case": case,
            "status": "PASS" if self.holds(hardware) else "FAIL",
            "shape": dict(shape),
            "direction": self.direction,
            "working_set": self.working_set,
            "l2_size": int(hardware.l2_bytes),
            "counted": {"read": self.read, "written": self.written, "l2": self.l2},
            "predicted": {
                "read": self.predicted.read,
                "written": self.predicted.written,
                "left_in_cache": self.predicted.resident,
                "requests": self.requests,
            },
            "ratio": self.ratio if self.predicted.total else None,
            "limit": self.limit(hardware),
            "kernels": [asdict(kernel) for kernel in self.kernels],
            "predicted_kernels": [asdict(kernel) for kernel in self.predicted.kernels],
        }


def compare(
    implementation: str, direction: str, call: Call, kernels: Sequence[Counted], hardware: Hardware
) -> Compared:
    """Put a segment beside its prediction from an empty cache: before each call other memory was read."""
    account = account_of(implementation, direction, call)
    memory = on(hardware, account)
    return Compared(implementation, direction, working_set(account), tuple(kernels), memory, account.total)
