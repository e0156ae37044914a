"""The device's place taken by an NVIDIA GPU: the same steps, the same argument bytes, the same text compiled as CUDA.

It shows the algorithm at full size and on real threads: 32 lanes that may drift apart where a wave of 64 runs in step,
and memory that is not checked by an interpreter. It says nothing about AMD code, an AMD GPU or its speed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attnproof.backends.dot2 import loader, source
from attnproof.backends.dot2.variants import Step, Variant

from . import nvrtc

# the ends of cuLaunchKernel's `extra` list; HIP counts the last one differently
BUFFER_POINTER, BUFFER_SIZE, END = 1, 2, 0
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class DriverError(RuntimeError):
    """A function of the CUDA driver failed."""


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel: its handle, and the dynamic shared memory that it is launched with."""

    function: ctypes.c_void_p
    dynamic: int


@dataclass
class Driver:
    """libcuda, on the context that torch uses.

    Attributes:
        library: with the driver's functions.
        device: its ordinal.
        context: the primary one of the device.
    """

    library: Any
    device: int = 0
    context: ctypes.c_void_p = field(default_factory=ctypes.c_void_p)

    def __post_init__(self) -> None:
        number = ctypes.c_int()
        self.check(self.library.cuInit(0), "cuInit")
        self.check(self.library.cuDeviceGet(ctypes.byref(number), self.device), "cuDeviceGet")
        code = self.library.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), number)
        self.check(code, "cuDevicePrimaryCtxRetain")

    def check(self, code: int, what: str) -> None:
        """Raise where a driver function failed."""
        if not code:
            return
        name = ctypes.c_char_p()
        self.library.cuGetErrorName(code, ctypes.byref(name))
        raise DriverError(f"{what} failed with {name.value.decode() if name.value else code}")

    def enter(self) -> None:
        """Make the context current: autograd calls from a thread of its own."""
        self.check(self.library.cuCtxSetCurrent(self.context), "cuCtxSetCurrent")

    def load(self, image: nvrtc.Image, name: str) -> Kernel:
        """A kernel of an image."""
        self.enter()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(
            self.library.cuModuleLoadData(ctypes.byref(module), image.ptx.encode()), "cuModuleLoadData"
        )
        found = self.library.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        self.check(found, f"cuModuleGetFunction({name})")
        if image.dynamic:
            allowed = self.library.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, image.dynamic)
            self.check(allowed, f"cuFuncSetAttribute({image.dynamic} bytes of shared memory)")
        return Kernel(function, image.dynamic)

    def launch(self, kernel: Kernel, groups: int, threads: int, raw: bytes, stream: int) -> None:
        """Launch on a stream with the argument struct as it stands."""
        self.enter()
        buffer, size = ctypes.create_string_buffer(raw, len(raw)), ctypes.c_size_t(len(raw))
        extra = (ctypes.c_void_p * 5)(
            BUFFER_POINTER, ctypes.addressof(buffer), BUFFER_SIZE, ctypes.addressof(size), END
        )
        code = self.library.cuLaunchKernel(
            kernel.function, groups, 1, 1, threads, 1, 1, kernel.dynamic, ctypes.c_void_p(stream), None, extra
        )
        self.check(code, "cuLaunchKernel")


@dataclass
class Twin:
    """Takes steps in an AMD GPU's place; for ``dot2.running_on``.

    Attributes:
        compiler: NVRTC.
        driver: of the device.
        stream: gives the handle of the stream that torch is on.
        units: multiprocessors, which decodes are split for.
        edit: from a kernel's name and text to the text that is compiled.
        kernels: by variant.
    """

    compiler: nvrtc.Compiler
    driver: Driver
    stream: Callable[[], int]
    units: int
    edit: Callable[[str, str], str] = lambda kernel, text: text
    kernels: dict[Variant, Kernel] = field(default_factory=dict)

    def __call__(self, step: Step) -> None:
        kernel = self.kernels.get(step.variant)
        if kernel is None:
            text = self.edit(step.variant.kernel, source.text(step.variant.kernel))
            image = self.compiler.image(step.variant, text)
            kernel = self.kernels[step.variant] = self.driver.load(image, step.variant.name)
        for raw, groups in loader.packed(step):
            self.driver.launch(kernel, groups, step.threads, raw, self.stream())


@functools.cache
def twin(device: int = 0) -> Twin:
    """The twin on a CUDA device of torch; one per process, so that its kernels are compiled once.

    Raises:
        RuntimeError: there is no NVRTC, or no driver.
    """
    import torch

    compiler = nvrtc.find()
    if compiler is None:
        raise RuntimeError(
            "libnvrtc: expected it in a package of NVIDIA or in a toolkit, found none (ATTNPROOF_NVRTC)"
        )
    torch.cuda.init()
    about: Any = torch.cuda.get_device_properties(device)

    def stream() -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    driver = Driver(ctypes.CDLL("libcuda.so.1"), device)
    return Twin(compiler, driver, stream, int(about.multi_processor_count))
