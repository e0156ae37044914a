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

from .implementations import Unable
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
    if device == "cpu":
        _settle()
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


M_MMAP_THRESHOLD, MMAP_THRESHOLD = -3, 2**16  # glibc's mallopt


def _settle() -> None:
    """Let the C allocator give back what it holds, and hold less: kept pages would hide the next peak."""
    import ctypes

    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):  # glibc only
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
        libc.malloc_trim(0)


def _process_peak(call: Callable[[], Any]) -> Peak:
    """Resident peak from the kernel, which can be reset for one process on Linux.

    Raises:
        NotImplementedError: another system, or one that does not let a process reset its peak.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise NotImplementedError(f"the resident peak of a process cannot be reset here: {error}") from error
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
    system_bytes: tuple[int, ...]  # by driver or operating system
    exponent: Interval | None
    reason: str = ""  # why it ended before the last length

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
    found: dict[int, Peak] = {}
    reason = ""
    for n in lengths:
        held = [one.bytes for one in found.values()]
        if len(held) >= 2 and held[-1] * (held[-1] / max(held[-2], 1)) > limit:
            reason = f"N={n} would pass {limit / 2**30:.1f} GiB"
            break
        try:
            call = make(n)
            if not found:
                call()  # thread pools, libraries and compiled kernels are loaded once, not part of a call
            found[n] = peak(call, device)
        except Unable as error:
            reason = str(error)
            break
        except (MemoryError, RuntimeError) as error:
            if "memory" not in str(error).lower():
                raise
            reason = f"out of memory at N={n}"
            break
        tick(f"{name} N={n}")
    skip = 2 if len(found) > 4 else 0
    points = [(n, one.bytes) for n, one in found.items() if one.bytes > 0][skip:]
    exponent = fit_exponent(*zip(*points, strict=True)) if len(points) >= 3 else None
    peaks, system = tuple(one.bytes for one in found.values()), tuple(one.system for one in found.values())
    return Growth(name, tuple(found), peaks, system, exponent, reason)


def call_of(name: str, *, heads: int, d: int, dtype: str, device: str) -> Callable[[int], Callable[[], Any]]:
    """``make`` of ``grow`` for an implementation: its forward and backward on one sequence of n tokens, causal."""
    from . import implementations
    from .bench import make_inputs
    from .shapes import Shape

    one = implementations.load(name)

    def make(n: int) -> Callable[[], Any]:
        import torch

        shape = Shape(1, heads, n, d, dtype=dtype, causal=True, run="both")
        q, k, v, dout = make_inputs(shape, device, 0)
        return lambda: torch.autograd.grad(one.run(q, k, v, shape), (q, k, v), dout)

    return make
