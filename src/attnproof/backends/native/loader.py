"""Finding the compiled extension, its SIMD target and the number of threads."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

from ...errors import BackendMissing, ShapeError, expected

SIMD = "ATTNPROOF_SIMD"
THREADS = "ATTNPROOF_NUM_THREADS"
POOL = "ATTNPROOF_POOL"


@functools.cache
def _extension() -> tuple[Any, str]:
    """The module ``_kernels`` and "", or None and the sentence that says why it is not there."""
    try:
        return importlib.import_module("._kernels", __package__), ""
    except ImportError as error:
        return None, (
            "its C++ extension is not built: reinstall attnproof from source with a C++20 compiler "
            f"(GCC 12, Clang 15 or newer) present ({error})"
        )


def why_not() -> str | None:
    """Why the extension cannot be used, or None."""
    module, reason = _extension()
    if module is None:
        return reason
    try:
        simd()
    except ShapeError as error:
        return str(error)
    return None


def kernels() -> Any:
    """The extension module.

    Raises:
        BackendMissing: it was not built.
    """
    module, reason = _extension()
    if module is None:
        raise BackendMissing(f"native: {reason}")
    return module


@functools.cache
def _checked(wanted: str) -> str:
    try:
        kernels().choice(wanted)
    except ValueError as error:
        raise ShapeError(str(error)) from error
    return wanted


def simd() -> str:
    """The SIMD target that ``ATTNPROOF_SIMD`` asks for, "" for the widest.

    Raises:
        ShapeError: this machine or this build does not have it.
    """
    wanted = os.environ.get(SIMD, "")
    return _checked(wanted) if wanted else ""


def borrows_torch_threads() -> bool:
    """Torch is loaded: from now on our calls run on its threads, unless ``ATTNPROOF_POOL`` says no or it is not safe.

    It is not in a process that was forked, and with another OpenMP runtime than GNU's: see ``csrc/team.h``.

    Raises:
        ShapeError: ``ATTNPROOF_POOL`` is neither own nor empty.
    """
    given = os.environ.get(POOL, "")
    if given not in ("", "own"):
        raise ShapeError(expected(POOL, "own or nothing", repr(given)))
    return bool(kernels().borrow_team(not given))


def threads() -> int:
    """torch's thread count where torch is loaded, else ``ATTNPROOF_NUM_THREADS``, else the usable processors."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        borrows_torch_threads()
        return int(torch.get_num_threads())
    given = os.environ.get(THREADS)
    if given is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not given.isdecimal() or int(given) < 1:
        raise ShapeError(expected(THREADS, "a positive integer", repr(given)))
    return int(given)


def describe() -> dict[str, Any]:
    """What runs and why, for ``attnproof doctor`` and records."""
    module, reason = _extension()
    if module is None:
        return {"built": False, "why": reason}
    target, bits, why = module.choice(simd())
    return {
        "built": True,
        "simd": target,
        "bits": bits,
        "why": why,
        "usable": list(module.targets()),
        "threads": threads(),
        "pool": "torch's threads" if "torch" in sys.modules and borrows_torch_threads() else "own",
    }
