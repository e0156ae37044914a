"""What a call is made of on a GPU, counted: launches, registers, shared memory, spills and code, none of it a time.

torch's own profiler lists what ran on the device, with registers and shared memory of every kernel, and needs no
permission for counters. Spills and the size of the code it does not know: those come from the compiled kernels that
Triton keeps, found by name.

The calls of one look share a session of the profiler, cut at marker kernels as in ``ledger.counters``.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..ledger.counters import MARKER, CounterError

ACTIVITIES = frozenset({"kernel", "gpu_memset", "gpu_memcpy"})
OWN = "attnproof.backends."
UNLOADED = -1  # registers and spills of a kernel that no driver has loaded
WORD = 4  # bytes: Triton counts spills in words


@dataclass(frozen=True)
class Ran:
    """One activity of a device; registers are those of a thread, shared memory that of a block, in bytes."""

    name: str
    seconds: float
    registers: int | None = None
    shared: int | None = None


@dataclass(frozen=True)
class Compiled:
    """What a compiled kernel knows of itself; spills are bytes of a thread's local memory, as the driver tells them."""

    name: str
    registers: int
    spills: int
    shared: int
    code: int


def look(calls: Mapping[str, Callable[[], Any]]) -> dict[str, list[Ran]]:
    """What each call runs on the current GPU, in order; the calls must have been made before.

    Raises:
        CounterError: the profiler did not see the device.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as session:
        for call in calls.values():
            torch.cuda._sleep(1000)
            held = call()
            torch.cuda.synchronize()
            del held
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()
    return dict(zip(calls, cut(read(trace_of(session)), len(calls)), strict=True))


def trace_of(session: Any) -> str:
    """The trace of a finished session; torch writes it to files only."""
    with TemporaryDirectory(prefix="attnproof-") as folder:
        path = Path(folder) / "trace.json"
        session.export_chrome_trace(str(path))
        return path.read_text(encoding="utf-8")


def read(text: str) -> list[Ran]:
    """The device's activities of a trace as torch writes it, in the order of their start; times there are microseconds."""
    found: list[tuple[float, Ran]] = []
    for event in json.loads(text)["traceEvents"]:
        if event.get("cat") not in ACTIVITIES:
            continue
        about = event.get("args", {})
        one = Ran(
            event["name"],
            float(event["dur"]) * 1e-6,
            about.get("registers per thread"),
            about.get("shared memory"),
        )
        found.append((float(event["ts"]), one))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def cut(ran: Sequence[Ran], calls: int) -> list[list[Ran]]:
    """What lies between neighbouring markers."""
    at = [number for number, one in enumerate(ran) if MARKER in one.name]
    if len(at) != calls + 1:
        raise CounterError(f"profiler: expected {calls + 1} markers for {calls} calls, got {len(at)}")
    return [list(ran[at[n] + 1 : at[n + 1]]) for n in range(calls)]


def compiled() -> list[Compiled]:
    """Every kernel of ours that Triton has compiled and loaded in this process."""
    found: list[Compiled] = []
    for module in [module for name, module in sys.modules.items() if name.startswith(OWN)]:
        for function in list(vars(module).values()):
            caches = getattr(function, "device_caches", None)
            for entry in list(caches.values()) if isinstance(caches, dict) else ():
                found += [about(kernel) for kernel in list(entry[0].values()) if hasattr(kernel, "metadata")]
    return list(dict.fromkeys(found))


def about(kernel: Any) -> Compiled:
    """The facts of one of Triton's compiled kernels; those that only a driver tells are UNLOADED before."""
    registers, words = (getattr(kernel, name, None) for name in ("n_regs", "n_spills"))
    binary = kernel.asm.get("cubin") or kernel.asm.get("hsaco") or b""
    return Compiled(
        str(kernel.metadata.name),
        UNLOADED if registers is None else int(registers),
        UNLOADED if words is None else WORD * int(words),
        int(kernel.metadata.shared),
        text_bytes(binary),
    )


def facts(ran: Sequence[Ran], known: Iterable[Compiled] = ()) -> dict[str, float]:
    """The quantities of gate C of one call: sums of launches, spills and code, the most of registers and shared memory.

    Spills and code are those of the kernels among ``known``: none of them, no such quantity. Where a name has several, the
    one that fits in registers and shared memory, or the largest of them.
    """
    if not ran:
        return {}
    found: dict[str, float] = {"launches": float(len(ran))}
    for quantity, values in (
        ("registers", [one.registers for one in ran]),
        ("shared_bytes", [one.shared for one in ran]),
    ):
        if told := [value for value in values if value is not None]:
            found[quantity] = float(max(told))
    by_name: dict[str, list[Compiled]] = {}
    for kernel in known:
        by_name.setdefault(kernel.name, []).append(kernel)
    own = [_fitting(one, by_name[one.name]) for one in ran if one.name in by_name]
    if own:
        found["code_bytes"] = float(sum(one.code for one in own))
    if own and all(one.spills != UNLOADED for one in own):
        found["spills"] = float(sum(one.spills for one in own))
    return found


def _fitting(one: Ran, kernels: Sequence[Compiled]) -> Compiled:
    """The compiled kernel that ran."""
    same = [kernel for kernel in kernels if kernel.registers == one.registers] or list(kernels)
    same = [kernel for kernel in same if kernel.shared == one.shared] or same
    return max(same, key=lambda kernel: (kernel.spills, kernel.code))


def text_bytes(binary: bytes) -> int:
    """Bytes of instructions in an ELF file: its sections .text*; debug information, which names paths, is left out."""
    if binary[:5] != b"\x7fELF\x02":
        return 0
    (offset,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, names = struct.unpack_from("<3H", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", binary, offset + at * size) for at in range(count)]
    strings = headers[names][4]
    return sum(header[5] for header in headers if binary[strings + header[0] :].startswith(b".text"))
