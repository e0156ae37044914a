"""A CUDA driver that only writes down what it is asked for, below the C launcher; and one for Triton that launches nothing."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

COMPILER = shutil.which("cc") or shutil.which("gcc")
BUILDS = COMPILER is not None and Path(sysconfig.get_path("include"), "Python.h").exists()
FUNCTION = 0xF00D


def library(folder: Path) -> Path:
    """Build the fake libcuda.so.1."""
    made = folder / "libcuda.so.1"
    shared = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run([str(COMPILER), *shared, "-o", str(made), str(source)], check=True)
    return made


def preload(path: str) -> None:
    """Whoever asks for libcuda.so.1 in this process gets the fake."""
    ctypes.CDLL(path, ctypes.RTLD_GLOBAL)


class Launcher:
    """What Triton makes of a compiled kernel, to call it."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    calls: list[tuple[Any, ...]] = []  # noqa: RUF012 - one list for the process
    source: Any = None

    def __init__(self, source: Any, metadata: Any) -> None:
        Launcher.source = source

    def __call__(self, *arguments: Any) -> None:
        Launcher.calls.append(arguments)


class Driver:
    """A device of compute capability 9.0 for ``triton.runtime.driver``."""

    launcher_cls = Launcher
    utils = SimpleNamespace(
        load_binary=lambda *_: (1, FUNCTION, 168, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 232448, "multiprocessor_count": 132},
    )

    def get_current_target(self) -> Any:
        """As Triton names it."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0
