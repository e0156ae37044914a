"""hiprtc by ctypes: a string of HIP C++ in, a code object out; results are kept on disk."""

from __future__ import annotations

import ctypes
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import source
from .variants import Variant

FLAGS = ("-O3", "-std=c++17")
ELF = b"\x7fELF"


class CompileError(RuntimeError):
    """The compiler refused a kernel; the message is its log."""


@dataclass(frozen=True)
class Compiler:
    """A loaded hiprtc.

    Attributes:
        library: with the hiprtc functions.
        version: as it reports itself, part of the cache key.
    """

    library: Any
    version: str

    @classmethod
    def of(cls, library: Any) -> Compiler:
        """Ask a library for its version."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.hiprtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return cls(library, f"hiprtc {major.value}.{minor.value}")

    def compile(self, text: str, flags: tuple[str, ...], architecture: str) -> bytes:
        """The code object of a translation unit for a full architecture name, features included."""
        rtc, program = self.library, ctypes.c_void_p()
        code = rtc.hiprtcCreateProgram(ctypes.byref(program), text.encode(), b"dot2.hip", 0, None, None)
        if code:
            raise CompileError(f"hiprtcCreateProgram returned {code}")
        try:
            options = [f"--offload-arch={architecture}", *FLAGS, *flags]
            array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            code = rtc.hiprtcCompileProgram(program, len(options), array)
            if code:
                raise CompileError(f"hiprtcCompileProgram returned {code}:\n{self._log(program)}")
            return self._bytes(program, rtc.hiprtcGetCodeSize, rtc.hiprtcGetCode)
        finally:
            rtc.hiprtcDestroyProgram(ctypes.byref(program))

    def _log(self, program: Any) -> str:
        rtc = self.library
        log = self._bytes(program, rtc.hiprtcGetProgramLogSize, rtc.hiprtcGetProgramLog)
        return log.rstrip(b"\0").decode(errors="replace")

    @staticmethod
    def _bytes(program: Any, size_of: Any, get: Any) -> bytes:
        size = ctypes.c_size_t()
        size_of(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        get(program, buffer)
        return buffer.raw


def cache_folder() -> Path:
    """Where code objects are kept between processes."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "attnproof" / "dot2"


def cache_key(variant: Variant, architecture: str, version: str) -> str:
    """A name that changes with the text, the flags, the architecture and the compiler."""
    return source.digest(source.text(variant.kernel), *variant.flags, architecture, version)


def read_cache(key: str) -> bytes | None:
    """A kept code object; None if there is none, or if it is no code object."""
    try:
        found = (cache_folder() / f"{key}.co").read_bytes()
    except OSError:
        return None
    return found if found.startswith(ELF) else None


def write_cache(key: str, code: bytes) -> None:
    """Keep a code object; a cache that cannot be written is no error, only slow."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(code)
        Path(file.name).replace(folder / f"{key}.co")
    except OSError:
        return
