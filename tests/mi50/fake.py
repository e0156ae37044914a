"""The recording fakes of libamdhip64 and of libcuda, built from ``fake_*.c``, and what they recorded."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MOST_BYTES = 4096


class _Launch(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_int),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("bytes", ctypes.c_ubyte * MOST_BYTES),
    )


@dataclass(frozen=True)
class Launch:
    """One recorded launch.

    Attributes:
        name: of the kernel.
        image: address of the code object that it came from.
        raw: the argument struct's bytes.
    """

    name: str
    image: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    raw: bytes


def build(folder: Path, text: str = "fake_hip.c") -> Any:
    """A fake as a loaded library; the test is skipped where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang-19")
    if compiler is None:
        pytest.skip("no C compiler to build the fake runtime with")
    made = folder / Path(text).with_suffix(".so")
    source = Path(__file__).with_name(text)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(source)], check=True)
    library = ctypes.CDLL(str(made))
    library.fake_launch.restype = ctypes.POINTER(_Launch)
    library.fake_image.restype = ctypes.c_void_p
    library.fake_name.restype = ctypes.c_char_p
    return library


def recorded(library: Any) -> list[Launch]:
    """Everything that was launched, in order."""
    found = []
    for at in range(library.fake_count()):
        one = library.fake_launch(at).contents
        found.append(
            Launch(
                name=library.fake_name(one.function).decode(),
                image=library.fake_image(one.function),
                grid=tuple(one.grid),
                block=tuple(one.block),
                shared=one.shared,
                stream=one.stream or 0,
                raw=bytes(one.bytes[: one.size]),
            )
        )
    return found
