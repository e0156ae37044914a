"""Finding the HIP runtime that torch uses, and a run-time compiler that fits it.

The runtime must be the very library that torch has mapped: pointers and streams of another copy mean nothing to it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAPS = Path("/proc/self/maps")
RUNTIME, COMPILER = "amdhip64", "hiprtc"
VERSIONS = ("7", "6", "5")


def mapped(name: str, maps: str) -> list[str]:
    """Paths of the libraries of this name in the text of a process map, each once."""
    found = re.findall(rf"\s(/\S*/lib{name}\.so[.\d]*)$", maps, re.MULTILINE)
    return list(dict.fromkeys(found))


def candidates(name: str, maps: str, torch_folder: Path | None = None) -> Iterator[str]:
    """Where to look for a library, best first.

    What the process has mapped; for the compiler, beside the mapped runtime; the ROCm wheels; torch's own folder;
    $ROCM_PATH; /opt/rocm; and last whatever the system's loader finds.
    """
    yield from mapped(name, maps)
    if name == COMPILER:
        for runtime in mapped(RUNTIME, maps):
            yield from _in_folder(Path(runtime).parent, name)
    yield from _from_wheels(name)
    folders = [torch_folder / "lib"] if torch_folder else []
    roots = [Path(os.environ["ROCM_PATH"])] if os.environ.get("ROCM_PATH") else []
    folders += [root / "lib" for root in (*roots, Path("/opt/rocm"))]
    for folder in folders:
        yield from _in_folder(folder, name)
    yield from (f"lib{name}.so.{version}" for version in VERSIONS)


def _in_folder(folder: Path, name: str) -> Iterator[str]:
    yield from sorted((str(path) for path in folder.glob(f"lib{name}.so*")), key=len)


def _from_wheels(name: str) -> Iterator[str]:
    try:
        sdk: Any = importlib.import_module("rocm_sdk")
        yield from (str(path) for path in sdk.find_libraries(name))
    except Exception:
        # the wheel is absent, or a version without this function or this library: the next place is looked at
        return


def load(name: str, torch_folder: Path | None = None) -> tuple[ctypes.CDLL, str] | None:
    """The first candidate that loads, with its path; None if there is none."""
    maps = MAPS.read_text(encoding="utf-8", errors="replace") if MAPS.exists() else ""
    for path in candidates(name, maps, torch_folder):
        try:
            return ctypes.CDLL(path), path
        except OSError:
            continue
    return None


def load_compiler(
    runtime: ctypes.CDLL, where: str, torch_folder: Path | None = None
) -> tuple[ctypes.CDLL, str] | None:
    """A library with the hiprtc functions: its own, or up to ROCm 6 the runtime itself."""
    found = load(COMPILER, torch_folder)
    if found is not None and hasattr(found[0], "hiprtcCompileProgram"):
        return found
    return (runtime, where) if hasattr(runtime, "hiprtcCompileProgram") else None
