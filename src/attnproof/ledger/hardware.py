"""What a machine can do: a frozen `Hardware` per device, each figure with its unit, source and doubt mark.

Two kinds of number must not be mixed up: what a data sheet promises (peaks at boost clock) and what a kernel
reaches. Everything here is the first kind. A user who knows better (a power cap, a measured stream) writes a
TOML profile over a row of the table; see `load_profile`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from ..errors import BackendMissing, ShapeError, expected

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10

DTYPE_BYTES: Mapping[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Figure:
    """One number of a data sheet: `value` in `unit`, where it comes from, and whether that is in doubt."""

    value: float
    unit: str
    source: str = ""
    uncertain: bool = False

    def __str__(self) -> str:
        mark = "?" if self.uncertain else ""
        return f"{self.value:g}{mark} {self.unit}"


@dataclass(frozen=True)
class Hardware:
    """A device as the ledger sees it. `None`: the figure does not exist or is not known; nothing is guessed.

    A *unit* is what owns one shared memory: an SM, a CU, or a core of a CPU.
    """

    name: str
    title: str
    vendor: str
    arch: str
    units: Figure
    clock: Figure
    matrix_float16: Figure | None
    matrix_bfloat16: Figure | None
    packed_float16: Figure | None
    vector_float32: Figure
    exp_per_clock: Figure
    memory_bandwidth: Figure
    memory_size: Figure
    l2_size: Figure
    l3_size: Figure | None
    port_bytes_per_clock: Figure
    shared_per_unit: Figure
    shared_per_block: Figure
    onchip_per_unit: Figure
    shared_bytes_per_clock: Figure
    registers_per_unit: Figure
    warp: int
    threads_per_unit: int
    registers_per_thread: int
    note: str = ""
    measured: tuple[str, ...] = field(default=())

    @property
    def exp_rate(self) -> float:
        """Exponentials per second of the whole device."""
        return self.units.value * self.exp_per_clock.value * self.clock.value * 1e9

    @property
    def shared_bandwidth(self) -> float:
        """Bytes per second of all shared memories together."""
        return self.units.value * self.shared_bytes_per_clock.value * self.clock.value * 1e9

    @property
    def port_bandwidth(self) -> float:
        """Bytes per second that all units together can take from the L2."""
        return self.units.value * self.port_bytes_per_clock.value * self.clock.value * 1e9

    @property
    def memory_bytes_per_second(self) -> float:
        """Peak of the device memory in bytes per second."""
        return self.memory_bandwidth.value * 1e9

    @property
    def l2_bytes(self) -> float:
        """Bytes of the last cache before memory: the L2, or the L3 where there is one."""
        last = self.l2_size if self.l3_size is None else self.l3_size
        return last.value * MIB

    def matrix_unit(self, dtype: str) -> Figure | None:
        """The dense matrix rate for `dtype`, or None where the products run on the vector unit."""
        dtype_size(dtype)
        return {"float16": self.matrix_float16, "bfloat16": self.matrix_bfloat16}.get(dtype)

    def product_rate(self, dtype: str) -> float:
        """FLOP per second of the matrix products, on the best unit for `dtype` that accumulates in fp32."""
        matrix = self.matrix_unit(dtype)
        if matrix is not None:
            return matrix.value * 1e12
        if dtype == "float16" and self.packed_float16 is not None:
            return self.packed_float16.value * 1e12
        if dtype == "float64":
            raise ShapeError(f"dtype: {self.name} has no float64 rate in the table, got 'float64'")
        return self.vector_float32.value * 1e12

    def figures(self) -> dict[str, Figure]:
        """Every figure that is known, by field name, in the order of the class."""
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in pairs if isinstance(value, Figure)}


def dtype_size(dtype: str) -> int:
    """Bytes of one element of `dtype`."""
    if dtype not in DTYPE_BYTES:
        raise ShapeError(expected("dtype", f"one of {', '.join(DTYPE_BYTES)}", repr(dtype)))
    return DTYPE_BYTES[dtype]


def names() -> tuple[str, ...]:
    """The names of the table, in its order."""
    return tuple(_table())


def get(name: str) -> Hardware:
    """The row called `name` (case, spaces, dashes do not matter), or a ShapeError that lists the names."""
    wanted = _plain(name)
    for row in _table().values():
        if wanted in (_plain(row.name), _plain(row.title)):
            return row
    raise ShapeError(expected("hardware", f"one of {', '.join(names())} or a .toml profile", repr(name)))


def resolve(name: str | None) -> Hardware:
    """A row of the table, a profile file, or (for None) this machine's own device."""
    if name is None:
        return detect()
    if name.endswith(".toml"):
        return load_profile(Path(name))
    return get(name)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _table() -> dict[str, Hardware]:
    return import_module(".catalog", __package__).TABLE


def load_profile(path: Path) -> Hardware:
    """Read a user's profile: a row of the table with some figures replaced.

    The file names its `base` row and has a table `[figures]`, whose entries are a number or
    `{value = 867, source = "stream test", uncertain = false}`. Units are those of the base and cannot change.
    """
    data = _read_toml(path)
    if "base" not in data:
        raise ShapeError(f"{path.name}: expected a key 'base' naming a row of the table, got {list(data)}")
    base = get(str(data["base"]))
    known = base.figures()
    changes: dict[str, Any] = {}
    for key, entry in dict(data.get("figures", {})).items():
        if key not in known:
            raise ShapeError(f"{path.name}: expected figures among {', '.join(known)}, got {key!r}")
        changes[key] = _figure_of(entry, known[key], f"profile {path.name}", f"{path.name}: figures.{key}")
    for key in set(data) - {"base", "figures", "name", "title", "note"}:
        raise ShapeError(f"{path.name}: expected base, name, title, note and [figures], got {key!r}")
    name = str(data.get("name", path.stem))
    return replace(
        base,
        name=name,
        title=str(data.get("title", name)),
        note=str(data.get("note", f"{base.title} with figures of {path.name}")),
        measured=tuple(sorted(changes)),
        **changes,
    )


def _figure_of(entry: Any, like: Figure, source: str, where: str) -> Figure:
    if isinstance(entry, dict):
        entry = cast("dict[str, Any]", entry)
        if "value" not in entry or set(entry) - {"value", "source", "uncertain"}:
            raise ShapeError(f"{where}: expected value, source, uncertain, got {sorted(entry)}")
        number = entry["value"]
        source, uncertain = str(entry.get("source", source)), bool(entry.get("uncertain", False))
    else:
        number, uncertain = entry, False
    if isinstance(number, bool) or not isinstance(number, (int, float)) or number <= 0:
        raise ShapeError(f"{where}: expected a positive number of {like.unit}, got {number!r}")
    return Figure(float(number), like.unit, source, uncertain)


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ShapeError(f"hardware: expected a readable .toml profile, got {str(path)!r}")
    for module in ("tomllib", "tomli"):  # the first is in the standard library from Python 3.11
        try:
            loads = import_module(module).loads
        except ModuleNotFoundError:
            continue
        try:
            return loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ShapeError(f"{path.name}: expected TOML, got {error}") from error
    raise BackendMissing("hardware: a .toml profile needs Python 3.11 or the package tomli")


def detect() -> Hardware:
    """This machine's device: its CUDA or ROCm GPU where torch sees one, else its CPU.

    A GPU of the table keeps the table's rates, and takes the number of units from the driver, which knows about
    partitions, and the cache where the driver knows of less: what it reports above the data sheet does not serve
    (docs/06_numbers, the L2 of an H200). One that is not in the table is refused: its bandwidth is not for guessing.
    """
    properties = _gpu_properties()
    if properties is None:
        return _this_cpu()
    title = str(properties.name)
    row = _match(title, str(getattr(properties, "gcnArchName", "")), int(properties.total_memory))
    if row is None:
        raise ShapeError(
            f"hardware: expected a device of the table, got {title!r}; name a row or a .toml profile"
        )
    changes: dict[str, Any] = {"measured": ("units",)}
    changes["units"] = Figure(float(properties.multi_processor_count), "units", "driver")
    cache = int(getattr(properties, "L2_cache_size", 0)) / MIB
    if 0 < cache < row.l2_size.value:
        changes["l2_size"] = Figure(cache, "MiB", "driver")
        changes["measured"] = ("units", "l2_size")
    return replace(row, title=title, **changes)


def _gpu_properties() -> Any:
    try:
        torch = import_module("torch")
    except ModuleNotFoundError:
        return None
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device())


def _match(title: str, gcn_arch: str, total_memory: int) -> Hardware | None:
    """The row for a driver's device name; where two rows share it (A100 40, 80 GB) the nearer memory wins."""
    plain = _plain(title)
    gpus = [row for row in _table().values() if row.vendor != "cpu"]
    rows = [row for row in gpus if _plain(row.name.split("-")[0]) in plain]
    if not rows and gcn_arch:
        arch = gcn_arch.split(":")[0]
        rows = [row for row in gpus if row.arch == arch]
    if not rows:
        return None
    longest = max(len(row.name.split("-")[0]) for row in rows)  # "h200" must not fall to "h20"
    rows = [row for row in rows if len(row.name.split("-")[0]) == longest]
    return min(rows, key=lambda row: abs(row.memory_size.value * GIB - total_memory))


def _this_cpu() -> Hardware:
    """The generic CPU row with the number of cores this process may use."""
    row = get("cpu")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    per_core = row.vector_float32.value / row.units.value
    return replace(
        row,
        title=f"{platform.machine()} CPU, {cores} cores (generic rates)",
        units=Figure(float(cores), "units", "operating system"),
        vector_float32=Figure(per_core * cores, "TFLOP/s", "cores x a typical core", uncertain=True),
        measured=("units",),
    )
