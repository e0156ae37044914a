"""The kernels' text as CUDA: NVRTC by ctypes, a string in, PTX out. No GPU and no CUDA toolkit are needed.

The text is the one that is shipped, and three things are done around it, all of them here. ``nvrtc_words.h`` stands in
front and gives NVRTC the words of clang that it lacks. Clang's vector typedefs become a struct template with the same
members. And where the static arrays of a kernel exceed the 48 KB that CUDA allows them (LDS is 64 KB), they are laid out
one after the other in one dynamic array, by their names in the PTX.

Products and sums are not fused (``--fmad=false``), because NVRTC does not know the pragma that forbids it in places.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnproof.backends.dot2 import compiler, source
from attnproof.backends.dot2.variants import Variant

WORDS = Path(__file__).with_name("nvrtc_words.h")
FLAGS = (
    "--gpu-architecture=compute_90",
    "--std=c++17",
    "--fmad=false",
    "--device-as-default-execution-space",
    "--generate-line-info",
    "--disable-warnings",
)
STATIC_LIMIT = 48 * 1024
ARENA = "twin_shared"
_VECTOR = re.compile(r"typedef (\w+) (\w+) __attribute__\(\(ext_vector_type\(([\w:]+)\)\)\);")
_SHARED = re.compile(r"^\s*\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\];\n", re.MULTILINE)


def translated(text: str) -> str:
    """A kernel's text for NVRTC."""
    replaced, count = _VECTOR.subn(r"typedef TwinVector<\1, \3> \2;", text)
    if count == 0 or "ext_vector_type" in replaced:
        raise ValueError(f"text: expected vector typedefs of one form, got {count} of it and others left")
    return WORDS.read_text(encoding="utf-8") + replaced


@dataclass(frozen=True)
class Image:
    """PTX, and the bytes of dynamic shared memory that its kernels need."""

    ptx: str
    dynamic: int


def placed(ptx: str) -> Image:
    """PTX within CUDA's limit on static shared memory."""
    arrays = [(int(align), name, int(size)) for align, name, size in _SHARED.findall(ptx)]
    if sum(size for _, _, size in arrays) <= STATIC_LIMIT:
        return Image(ptx, 0)
    starts: dict[str, int] = {}
    end = 0
    for align, name, size in arrays:
        starts[name] = -(-end // align) * align
        end = starts[name] + size
    ptx = _SHARED.sub("", ptx)
    for name, start in starts.items():
        ptx = re.sub(
            rf"\b{name}\b(?:\+(\d+))?", lambda found, at=start: f"{ARENA}+{at + int(found[1] or 0)}", ptx
        )
    arena = f".extern .shared .align 16 .b8 {ARENA}[];\n"
    at = ptx.index(".visible .entry")
    return Image(ptx[:at] + arena + ptx[at:], end)


@dataclass(frozen=True)
class Compiler:
    """A loaded NVRTC.

    Attributes:
        library: with the nvrtc functions.
        version: as it reports itself, part of the cache key.
    """

    library: Any
    version: str

    @classmethod
    def of(cls, library: Any) -> Compiler:
        """Ask a library for its version."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return cls(library, f"nvrtc {major.value}.{minor.value}")

    def compile(self, text: str, flags: tuple[str, ...] = ()) -> str:
        """The PTX of a translated text; several threads may compile at a time."""
        rtc, program = self.library, ctypes.c_void_p()
        code = rtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"dot2.cu", 0, None, None)
        if code:
            raise compiler.CompileError(f"nvrtcCreateProgram returned {code}")
        try:
            options = [option.encode() for option in (*FLAGS, *flags)]
            code = rtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
            if code:
                log = self._string(program, rtc.nvrtcGetProgramLogSize, rtc.nvrtcGetProgramLog)
                raise compiler.CompileError(f"nvrtcCompileProgram returned {code}:\n{log}")
            return self._string(program, rtc.nvrtcGetPTXSize, rtc.nvrtcGetPTX)
        finally:
            rtc.nvrtcDestroyProgram(ctypes.byref(program))

    def image(self, variant: Variant, text: str | None = None) -> Image:
        """What the driver is given for a variant: kept by text, flags and version, or compiled."""
        whole = translated(source.text(variant.kernel) if text is None else text)
        path = kept() / f"{source.digest(whole, *FLAGS, *variant.flags, self.version)}.ptx"
        try:
            return placed(path.read_text(encoding="utf-8"))
        except OSError:
            ptx = self.compile(whole, variant.flags)
        made = path.with_suffix(f".{os.getpid()}")
        made.write_text(ptx, encoding="utf-8")
        made.replace(path)
        return placed(ptx)

    @staticmethod
    def _string(program: Any, size_of: Any, get: Any) -> str:
        size = ctypes.c_size_t()
        size_of(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        get(program, buffer)
        return buffer.value.decode(errors="replace")


@functools.cache
def kept() -> Path:
    """Where PTX is kept: a folder of this process, or one for several that ATTNPROOF_TWIN_CACHE names."""
    named = os.environ.get("ATTNPROOF_TWIN_CACHE")
    folder = Path(named) if named else Path(tempfile.mkdtemp(prefix="attnproof-twin-"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def places() -> Iterator[Path]:
    """Where libnvrtc may lie: where ATTNPROOF_NVRTC says, in NVIDIA's Python packages, in a toolkit."""
    if named := os.environ.get("ATTNPROOF_NVRTC"):
        yield Path(named)
        return
    for entry in sys.path:
        yield from sorted(Path(entry).glob("nvidia/*/lib/libnvrtc.so.*"))
    for toolkit in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if toolkit:
            yield from sorted(Path(toolkit).glob("lib64/libnvrtc.so.*"))


@functools.cache
def find() -> Compiler | None:
    """The first NVRTC that loads, or None."""
    for path in places():
        try:
            # the library looks for its other half by name only, so that must be there already
            for half in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(half))
            return Compiler.of(ctypes.CDLL(str(path)))
        except OSError:
            continue
    return None
