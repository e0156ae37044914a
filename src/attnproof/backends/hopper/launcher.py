"""Launch a compiled kernel through ``launcher.c``: 5 us in place of the 100 that Triton's own path takes with descriptors.

Without a C compiler, or with a Triton whose compiled kernels look different, ``adopt`` returns None and the plain path
stays.
"""

from __future__ import annotations

import functools
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton

logger = logging.getLogger(__name__)
NAME = "attnproof_launcher"
WARP = 32
RANK = 5  # of launcher.c: the most axes that a tensor map has
KNOWN = ("3.6.",)  # versions whose parameter lists are as launcher.c says
# numbers of CUtensorMapDataType
TYPES = {"torch.float16": 6, "torch.float32": 7, "torch.bfloat16": 9}


@functools.cache
def module() -> Any:
    """The compiled ``launcher.c``, or None; Triton's cache keeps it."""
    try:
        from triton.backends.nvidia import driver
        from triton.runtime.build import compile_module_from_src

        return compile_module_from_src(
            src=Path(__file__).with_name("launcher.c").read_text(),
            name=NAME,
            include_dirs=driver.include_dirs,
            libraries=["dl"],  # the driver is found when it is used
        )
    except Exception as error:
        # no compiler, no headers, another Triton: slower launches, nothing else
        logger.info("hopper: launches stay with Triton, about 100 us each: %s", str(error).splitlines()[:1])
        return None


def adopt(
    compiled: Any, programs: int, descriptors: tuple[Any, ...], pointers: int, numbers: tuple[Any, ...]
) -> Callable[..., None] | None:
    """A function of (stream, address of each descriptor's tensor, other addresses) that launches, or None.

    Args:
        compiled: what Triton's launch returned.
        programs: size of the grid.
        descriptors: of the launch, with the shapes and strides of every later one.
        pointers: how many plain pointers follow.
        numbers: the floats and integers behind them.
    """
    if not triton.__version__.startswith(KNOWN):
        return None
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size or run.launch_cooperative_grid or run.launch_pdl:
        return None
    made = module()
    if made is None:
        return None
    metadata = compiled.metadata
    plan = pack(
        (compiled.function, programs, metadata.num_warps * WARP, metadata.shared),
        [map_bytes(x, meta) for x, meta in zip(descriptors, metadata.tensordesc_meta, strict=True)],
        pointers,
        numbers,
    )
    return functools.partial(made.launch, plan)


def pack(head: tuple[int, ...], maps: list[bytes], pointers: int, numbers: tuple[Any, ...]) -> bytes:
    """The plan that ``launcher.c`` reads; ``head`` is (function, programs, threads, shared)."""
    kinds = "".join("f" if isinstance(x, float) else "i" for x in numbers)
    first = struct.pack("=Q8I", *head, len(maps), pointers, len(numbers), 0, 0)
    return b"".join([first, *maps, struct.pack("=" + kinds, *numbers)])


def map_bytes(descriptor: Any, meta: dict[str, Any]) -> bytes:
    """One ``Map``: what a tensor map needs beside the address."""
    shape, steps = descriptor.shape, descriptor.strides
    size = descriptor.base.element_size()
    rest = [0] * (RANK - len(shape))
    return struct.pack(
        f"={2 * RANK - 1}Q{RANK}q{RANK}i{RANK}I4i",
        *(*reversed(shape), *rest),
        *(*(size * x for x in reversed(steps[:-1])), *rest),
        *(*steps, *rest),
        *(*shape, *rest),
        *(*reversed(meta["block_size"]), *rest),
        TYPES[str(descriptor.base.dtype)],
        meta["swizzle"],
        len(shape),
        0,
    )
