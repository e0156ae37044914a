"""One timed call: device events where there is a device, a monotonic clock where there is not.

Timer functions are bound at import, so that code under test that replaces ``time.perf_counter_ns`` later changes
nothing here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, Protocol

Call = Callable[[], Any]

FLUSH_BYTES_CPU = 64 * 2**20  # more than twice the last-level cache of a desktop part


class Timer(Protocol):
    """Times a sequence of calls, one sample each, and returns their results as well."""

    name: str
    flushed: float  # seconds spent on emptying caches so far

    def run(self, calls: Sequence[Call], *, cold: bool) -> tuple[list[float], list[Any]]:
        """Seconds and result of each call, in order; ``cold`` empties the caches before each."""
        ...


class HostTimer:
    """Monotonic clock around each call."""

    name = "host monotonic clock"

    def __init__(self) -> None:
        self._flush: Any = None
        self.flushed = 0.0

    def run(self, calls: Sequence[Call], *, cold: bool) -> tuple[list[float], list[Any]]:
        """See ``Timer.run``."""
        seconds, results = [], []
        for call in calls:
            if cold:
                began = perf_counter_ns()
                self._evict()
                self.flushed += (perf_counter_ns() - began) * 1e-9
            start = perf_counter_ns()
            results.append(call())
            seconds.append((perf_counter_ns() - start) * 1e-9)
        return seconds, results

    def _evict(self) -> None:
        import numpy as np

        if self._flush is None:
            self._flush = np.zeros(FLUSH_BYTES_CPU // 8)
        self._flush += 1.0  # reads and writes every line


class DeviceTimer:
    """A pair of events around each call on the current stream; one wait at the end of the sequence.

    The flush before a cold call also covers the host's launch time, so that a gap in the stream is not measured.
    """

    name = "device events"

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.flushed = 0.0
        cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flush = torch.empty(max(4 * cache, 2**28) // 4, dtype=torch.int32, device="cuda")

    def run(self, calls: Sequence[Call], *, cold: bool) -> tuple[list[float], list[Any]]:
        """See ``Timer.run``."""
        torch = self._torch
        events, results = [], []
        for call in calls:
            before, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            if cold:
                before.record()
                self._flush.add_(1)
            start.record()
            results.append(call())
            end.record()
            events.append((before, start, end))
        torch.cuda.synchronize()
        if cold:
            self.flushed += sum(before.elapsed_time(start) for before, start, _ in events) * 1e-3
        return [start.elapsed_time(end) * 1e-3 for _, start, end in events], results


def timer_for(device: str) -> Timer:
    """The timer of "cpu" or "cuda"."""
    return DeviceTimer() if device == "cuda" else HostTimer()


FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")
Ask = Callable[[], dict[str, Any]]


def device_state(device: str) -> Ask:
    """Begin to read clocks, power and throttle reasons; the function returned waits for them.

    ``nvidia-smi``, which changes nothing, may take a second: work goes on meanwhile. Empty where they cannot be read.
    """
    if device != "cuda" or "torch" not in sys.modules:
        return dict
    import shutil
    import subprocess

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return dict
    command = [tool, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "-i", "0"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def wait() -> dict[str, Any]:
        try:
            said, _ = child.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            return {}
        values = [part.strip() for part in said.strip().split(",")]
        return dict(zip(FIELDS, values, strict=False)) if child.returncode == 0 else {}

    return wait
