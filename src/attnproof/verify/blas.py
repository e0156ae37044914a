"""One BLAS thread while many small products are computed.

NumPy's OpenBLAS starts its threads for products that take microseconds and spins while it waits for them; on a busy
two-core machine the oracle then runs ten times slower than on one thread. There is no NumPy call to change that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

_NAMES = (
    "scipy_openblas_{}_num_threads64_",
    "scipy_openblas_{}_num_threads",
    "openblas_{}_num_threads64_",
    "openblas_{}_num_threads",
)


@contextmanager
def one_thread() -> Generator[None, None, None]:
    """Limit every loaded OpenBLAS to one thread inside the block; does nothing where there is none."""
    before = [(setter, getter()) for getter, setter in _libraries()]
    try:
        for setter, _ in before:
            setter(1)
        yield
    finally:
        for setter, count in before:
            setter(count)


@cache
def _libraries() -> tuple[tuple[Any, Any], ...]:
    try:
        mapped = Path("/proc/self/maps").read_text().split()
    except OSError:  # not Linux
        return ()
    found: list[tuple[Any, Any]] = []
    for path in sorted({word for word in mapped if "openblas" in word and word.startswith("/")}):
        library = ctypes.CDLL(path)
        for name in _NAMES:
            if hasattr(library, name.format("set")):
                found.append((getattr(library, name.format("get")), getattr(library, name.format("set"))))
                break
    return tuple(found)
