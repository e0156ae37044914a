"""Compile a kernel once per call structure, then launch it with nothing but new pointers.

Triton's own launch path binds and specialises every argument on every call, which costs more than a small attention
takes. A ``Plan`` keeps the compiled kernel and the arguments that the structure fixes. What Triton would specialise on
(strides, alignment) is part of the key under which a plan is kept, see ``launch.structure``.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import driver

from . import compat
from .configs import Config


class Plan:
    """One kernel, its grid and the arguments behind the pointers.

    Args:
        kernel: a jit function whose leading parameters are the arrays.
        programs: size of the one-dimensional grid.
        arrays: how many leading parameters are arrays.
        named: every other parameter by name.
        config: launch options.
    """

    def __init__(self, kernel: Any, programs: int, arrays: int, named: dict[str, Any], config: Config) -> None:
        self.kernel = kernel
        self.programs = programs
        self.tail = tuple(named[at] for at in kernel.arg_names[arrays:])
        self.options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        if config.maxnreg:
            self.options["maxnreg"] = config.maxnreg
        self.compiled: Any = None

    def __call__(self, *arrays: Any) -> None:
        """Launch on the current stream of the current device."""
        compiled = self.compiled
        if compiled is None:
            # Triton's own path compiles, checks the arrays and launches
            found = self.kernel[(self.programs,)](*arrays, *self.tail, **self.options)
            self.compiled = None if compat.interpreting() else found
            return
        active = driver.active
        compiled.run(
            self.programs, 1, 1, active.get_current_stream(active.get_current_device()), compiled.function,
            compiled.packed_metadata, None, None, None,
            *[None if x is None else x.data_ptr() for x in arrays], *self.tail,
        )  # fmt: skip
