"""Peak extra memory of a call, by allocator and by driver or operating system, and how it grows with N.

Hand-written kernels may bypass torch's allocator, so on a GPU the device's own account is read as well; on a CPU the
resident peak of the process is, which counts every allocator.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .stats import Interval, fit_exponent


@dataclass(frozen=True)
class Peak:
    """Bytes above what was held before the call; ``allocator`` is None where only the process can be asked."""

    allocator: int | None
    system: int

    @property
    def bytes(self) -> int:
        """The allocator's account where there is one: it is exact."""
        return self.system if self.allocator is None else self.allocator

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)


def peak(call: Callable[[], Any], device: str) -> Peak:
    """Run ``call`` once and say how much more memory was held at its highest point."""
    gc.collect()
    return _device_peak(call) if device == "cuda" else _process_peak(call)


def _device_peak(call: Callable[[], Any]) -> Peak:
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, free_before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    lowest = [free_before]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            lowest[0] = min(lowest[0], torch.cuda.mem_get_info()[0])

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        call()
        torch.cuda.synchronize()
    finally:
        done.set()
        watcher.join()
    # blocks stay with the allocator after the call, so the last reading holds even a peak the watcher missed
    lowest[0] = min(lowest[0], torch.cuda.mem_get_info()[0])
    return Peak(torch.cuda.max_memory_allocated() - before, free_before - lowest[0])


def _process_peak(call: Callable[[], Any]) -> Peak:
    """Resident peak from the kernel, which can be reset for one process on Linux."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    return Peak(None, max(_status("VmHWM") - before, 0))


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status: expected a field {field}, got none")


@dataclass(frozen=True)
class Growth:
    """Peak against N of one implementation, and the exponent of a power law through it."""

    name: str
    n: tuple[int, ...]
    bytes: tuple[int, ...]
    exponent: Interval | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)


def doubling(start: int, stop: int) -> Iterator[int]:
    """start, 2 start, 4 start, ... up to stop."""
    n = start
    while n <= stop:
        yield n
        n *= 2


def grow(
    name: str,
    make: Callable[[int], Callable[[], Any]],
    lengths: Iterator[int],
    device: str,
    *,
    limit: int,
    tick: Callable[[str], None] = lambda text: None,
) -> Growth:
    """Peak for each length until one would pass ``limit`` bytes (judged by the growth so far) or memory runs out.

    Args:
        name: shown with the result.
        make: ``make(n)`` allocates the inputs of length n and returns the call.
        lengths: increasing lengths.
        device: "cpu" or "cuda".
        limit: bytes; a length whose extrapolated peak is above it is not tried.
        tick: called after each length.

    Returns:
        What was measured; the exponent needs three lengths, the first two are left to warm-up effects if there are
        more than four.
    """
    sizes: list[int] = []
    found: list[int] = []
    for n in lengths:
        if len(found) >= 2 and found[-1] * (found[-1] / max(found[-2], 1)) > limit:
            break
        try:
            found.append(peak(make(n), device).bytes)
        except (MemoryError, RuntimeError) as error:
            if "memory" not in str(error).lower():
                raise
            break
        sizes.append(n)
        tick(f"{name} N={n}")
    skip = 2 if len(found) > 4 else 0
    points = [(n, y) for n, y in zip(sizes, found, strict=True) if y > 0][skip:]
    exponent = fit_exponent(*zip(*points, strict=True)) if len(points) >= 3 else None
    return Growth(name, tuple(sizes), tuple(found), exponent)
