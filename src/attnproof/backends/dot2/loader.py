"""The device side by ctypes: modules and launches through the HIP runtime that torch has mapped.

Each step that decides how kernels come about (which libraries, compiled or prebuilt) is announced once per process
through ``logging`` at warning level, so that nobody has to guess what ran.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import BackendMissing
from . import arguments, compiler, libraries, prebuilt
from .compiler import Compiler
from .variants import Step, Variant

log = logging.getLogger("attnproof.dot2")
MAX_LAUNCH = 2**22  # workgroups per launch: the runtime counts work items in 32 bits
# the ends of hipModuleLaunchKernel's `extra` list
BUFFER_POINTER, BUFFER_SIZE, END = 1, 2, 3
_announced: set[str] = set()


def announce(text: str) -> None:
    """Say something once per process."""
    if text not in _announced:
        _announced.add(text)
        log.warning("dot2: %s", text)


def announced() -> list[str]:
    """What has been said so far."""
    return sorted(_announced)


@dataclass
class Runtime:
    """A HIP runtime, and the compiler that goes with it if there is one.

    Attributes:
        hip: with the hipModule functions.
        compiler: None where only prebuilt code objects can serve.
    """

    hip: Any
    compiler: Compiler | None

    def check(self, code: int, what: str) -> None:
        """Raise where a runtime function failed."""
        if code:
            self.hip.hipGetErrorName.restype = ctypes.c_char_p
            name = self.hip.hipGetErrorName(code)
            raise BackendMissing(f"dot2: {what} failed with {name.decode() if name else code}")

    @property
    def driver(self) -> int:
        """The runtime's version number, part of what a self-test's verdict is kept under."""
        version = ctypes.c_int()
        self.check(self.hip.hipRuntimeGetVersion(ctypes.byref(version)), "hipRuntimeGetVersion")
        return version.value

    def load(self, code: bytes, name: str) -> ctypes.c_void_p:
        """A kernel of a code object on the current device."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.hip.hipModuleLoadData(ctypes.byref(module), code), "hipModuleLoadData")
        found = self.hip.hipModuleGetFunction(ctypes.byref(function), module, name.encode())
        self.check(found, f"hipModuleGetFunction({name})")
        return function

    def attributes(self, function: Any) -> dict[str, int]:
        """Registers and memory of a kernel, by hipFuncGetAttribute's numbers."""
        found: dict[str, int] = {}
        for name, number in (("registers", 4), ("lds_bytes", 1), ("scratch_bytes", 3)):
            value = ctypes.c_int()
            self.check(
                self.hip.hipFuncGetAttribute(ctypes.byref(value), number, function), "hipFuncGetAttribute"
            )
            found[name] = value.value
        return found

    def launch(self, function: Any, groups: int, threads: int, raw: bytes, stream: int) -> None:
        """Launch on a stream with the argument struct as it stands."""
        buffer = ctypes.create_string_buffer(raw, len(raw))
        size = ctypes.c_size_t(len(raw))
        extra = (ctypes.c_void_p * 5)(
            BUFFER_POINTER, ctypes.addressof(buffer), BUFFER_SIZE, ctypes.addressof(size), END
        )
        code = self.hip.hipModuleLaunchKernel(
            function, groups, 1, 1, threads, 1, 1, 0, ctypes.c_void_p(stream), None, extra
        )
        self.check(code, "hipModuleLaunchKernel")


@dataclass
class Device:
    """One GPU: its kernels, compiled when first asked for.

    Attributes:
        runtime: how it is driven.
        architecture: full name with features, as the runtime reports it.
        units: compute units.
        stream: gives the handle of the stream that torch is on.
        functions: kernels by variant.
    """

    runtime: Runtime
    architecture: str
    units: int
    stream: Callable[[], int]
    functions: dict[Variant, Any] = field(default_factory=dict[Variant, Any])

    def run(self, step: Step) -> None:
        """Launch a step on torch's current stream."""
        function = self.functions.get(step.variant)
        if function is None:
            code = self.code_object(step.variant)
            function = self.functions[step.variant] = self.runtime.load(code, step.variant.name)
        for raw, groups in packed(step):
            self.runtime.launch(function, groups, step.threads, raw, self.stream())

    def code_object(self, variant: Variant) -> bytes:
        """From the disk cache, else compiled, else from the package."""
        made = self.runtime.compiler
        if made is not None:
            key = compiler.cache_key(variant, self.architecture, made.version)
            kept = compiler.read_cache(key)
            if kept is not None:
                announce(f"kernels for {self.architecture} come from {compiler.cache_folder()}")
                return kept
            announce(f"compiling kernels for {self.architecture} with {made.version}")
            code = made.compile(_text(variant), variant.flags, self.architecture)
            compiler.write_cache(key, code)
            return code
        found = prebuilt.find(variant, self.architecture)
        if found is None:
            raise BackendMissing(
                f"dot2: {variant.name} for {self.architecture} is not among the prebuilt kernels, and no libhiprtc was "
                "found to compile it"
            )
        announce(
            "no libhiprtc was found: prebuilt kernels are used, and other calls than the usual ones fail"
        )
        return found


def _text(variant: Variant) -> str:
    from . import source

    return source.text(variant.kernel)


def packed(step: Step) -> list[tuple[bytes, int]]:
    """(argument bytes, workgroups) of each launch that a step takes: one, or more past the runtime's limit."""
    values = {**step.numbers, **arguments.pointers(step.arrays)}
    return [
        (arguments.pack({**values, "first_group": first}), min(MAX_LAUNCH, step.groups - first))
        for first in range(0, step.groups, MAX_LAUNCH)
    ]


@functools.cache
def runtime() -> Runtime:
    """The process's HIP runtime.

    Raises:
        BackendMissing: there is none.
    """
    import torch

    folder = Path(torch.__file__).parent
    found = libraries.load(libraries.RUNTIME, folder)
    if found is None:
        raise BackendMissing("dot2: libamdhip64 was not found, though torch is built for ROCm")
    hip, where = found
    announce(f"HIP runtime {where}")
    compiling = libraries.load_compiler(hip, where, folder)
    if compiling is not None:
        announce(f"run-time compiler {compiling[1]}")
    return Runtime(hip, None if compiling is None else Compiler.of(compiling[0]))


@functools.cache
def device(index: int) -> Device:
    """The device of a torch index."""
    import torch

    about: Any = torch.cuda.get_device_properties(index)

    def stream() -> int:
        return int(torch.cuda.current_stream(index).cuda_stream)

    return Device(runtime(), str(about.gcnArchName), int(about.multi_processor_count), stream)
