"""What differs between Triton versions and devices, in one place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton

MIN_CAPABILITY = (8, 0)
# ROCm targets with matrix units that Triton drives well enough; the rest spill or have none
ROCM_TARGETS = ("gfx90a", "gfx942", "gfx950", "gfx110", "gfx115", "gfx120")


@functools.cache
def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter; decided when they are decorated, that is at import."""
    from .kernels.pieces import schedule

    return type(schedule).__name__ == "InterpretedFunction"


def precision(dtype: str) -> str:
    """The dot precision to ask for: fp32 is IEEE fp32."""
    if dtype == "bfloat16" and interpreting():
        return "upcast"  # Triton's interpreter (3.6 to 3.9) multiplies the raw bits of bfloat16
    return "ieee"


@functools.cache
def unsupported_device() -> str | None:
    """Why the current GPU cannot be served, or None."""
    if not torch.cuda.is_available():
        return "needs a GPU that torch can see"
    target = architecture(torch.cuda.current_device())
    if target.startswith("gfx"):
        if target.startswith(ROCM_TARGETS):
            return None
        return f"serves {', '.join(ROCM_TARGETS)}, got {target}"
    capability = int(target.removeprefix("sm")) // 10, int(target.removeprefix("sm")) % 10
    if capability < MIN_CAPABILITY:
        return f"needs compute capability 8.0 (no matrix unit that Triton drives before it), got {capability}"
    return None


@functools.cache
def architecture(device: int) -> str:
    """``sm90``, ``gfx942`` ... of a torch device index."""
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm{properties.major}{properties.minor}"


@functools.cache
def multiprocessors(device: int) -> int:
    """Multiprocessors (compute units) of a torch device index."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def current_device() -> int:
    """Index of the current device, without torch's lazy initialisation, which has happened where tensors exist."""
    return torch._C._cuda_getDevice()  # type: ignore[no-any-return]


def launcher(compiled: Any, programs: int) -> Callable[..., None]:
    """A function of kernel arguments that launches on the current stream; pointers may be plain integers.

    Triton 3.6 spends as much time in the Python layer above its C launcher as in the launch, so that layer is left out
    where its signature is known and the kernel needs no scratch memory.
    """
    from triton.runtime import driver

    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    active: Any = driver.active
    stream = active.get_current_stream
    direct = getattr(run, "launch", None)
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if direct is not None and not scratch and triton.__version__.startswith("3.6."):
        head = (function, run.launch_cooperative_grid, run.launch_pdl, None, None, metadata, None, None, None)

        def launch_directly(*arguments: Any) -> None:
            direct(programs, 1, 1, stream(current_device()), *head, *arguments)

        return launch_directly

    def launch(*arguments: Any) -> None:
        run(programs, 1, 1, stream(current_device()), function, metadata, None, None, None, *arguments)

    return launch
