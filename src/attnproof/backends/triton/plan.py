"""Compile a kernel once per call structure, then launch it with nothing but new pointers.

Triton's own launch path binds and specialises every argument on every call, which costs more than a small attention
takes. A ``Plan`` keeps the compiled kernel and the arguments that the structure fixes. What Triton would specialise on
(strides, alignment) is part of the key under which a plan is kept, see ``launch.structure``.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from . import compat
from .configs import Config


class Plan:
    """One kernel, its grid and the arguments behind the arrays.

    Args:
        kernel: a jit function whose leading parameters are the arrays.
        programs: size of the one-dimensional grid.
        arrays: how many leading parameters are arrays.
        named: every other parameter by name.
        config: launch options.
        boxes: [rows, columns] of each array, by index, that is loaded through a tensor descriptor.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        arrays: int,
        named: dict[str, Any],
        config: Config,
        boxes: dict[int, tuple[int, int]] | None = None,
    ) -> None:
        self.kernel = kernel
        self.programs = programs
        self.boxes = boxes or {}
        named = {**named, "TMA": bool(self.boxes)}
        self.tail = tuple(named[at] for at in kernel.arg_names[arrays:])
        self.options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        if config.maxnreg:
            self.options["maxnreg"] = config.maxnreg
        self.compiled: Any = None

    def described(self, arrays: tuple[Any, ...]) -> list[Any]:
        """The arrays with descriptors in place of those that have a box."""
        found = list(arrays)
        for index, (rows, cols) in self.boxes.items():
            x = found[index]
            found[index] = TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, cols])
        return found

    def __call__(self, *arrays: Any) -> None:
        """Launch on the current stream of the current device."""
        compiled = self.compiled
        if compiled is None:
            # Triton's own path compiles, checks the arrays and launches
            found = self.kernel[(self.programs,)](*self.described(arrays), *self.tail, **self.options)
            self.compiled = None if compat.interpreting() else found
            return
        active = driver.active
        given = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in self.described(arrays)]
        compiled.run(
            self.programs, 1, 1, active.get_current_stream(active.get_current_device()), compiled.function,
            compiled.packed_metadata, None, None, None, *given, *self.tail,
        )  # fmt: skip
