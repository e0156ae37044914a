"""Compile a kernel once per call structure, then launch it with nothing but new pointers.

Triton's own launch path binds and specialises every argument on every call, which costs more than a small attention
takes. A ``Plan`` keeps the compiled kernel and the arguments that the structure fixes. What Triton would specialise on
(strides, alignment) is part of the key under which a plan is kept, see ``launch``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.tools.tensor_descriptor import TensorDescriptor

from . import compat
from .configs import Config

MAX_DESCRIPTORS = 64


@dataclass(frozen=True)
class Address:
    """What a descriptor needs to know of a tensor, without keeping its memory alive."""

    pointer: int
    dtype: Any

    def data_ptr(self) -> int:
        """The address, by the name that Triton asks for."""
        return self.pointer


class Plan:
    """One kernel, its grid and the arguments behind the arrays.

    Args:
        kernel: a jit function whose leading parameters are the arrays.
        programs: size of the one-dimensional grid.
        arrays: how many leading parameters are arrays.
        named: every other parameter by name.
        config: launch options.
        boxes: [rows, columns] of each array, by index, that is loaded through a tensor descriptor.
        early: the device may start this kernel while the one before it ends (programmatic dependent launch); the kernel,
            which has an argument ``EARLY``, waits before it reads anything.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        arrays: int,
        named: dict[str, Any],
        config: Config,
        boxes: dict[int, tuple[int, int]] | None = None,
        *,
        early: bool = False,
    ) -> None:
        self.kernel = kernel
        self.programs = programs
        self.boxes = boxes or {}
        named = {**named, "TMA": bool(self.boxes), "EARLY": early}
        self.tail = tuple(named[at] for at in kernel.arg_names[arrays:])
        # said aloud because the compiler's own default changes in 3.10
        self.options: dict[str, Any] = {
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": True,
        }
        if config.maxnreg:
            self.options["maxnreg"] = config.maxnreg
        if early:
            self.options["launch_pdl"] = True
        self.launch: Any = None
        self.after_five = (None,) * (arrays - 5) + self.tail
        self.descriptors: dict[tuple[int, int], TensorDescriptor] = {}

    def described(self, arrays: tuple[Any, ...]) -> list[Any]:
        """The arrays with descriptors in place of those that have a box."""
        found = list(arrays)
        for index in self.boxes:
            found[index] = self._descriptor(index, found[index])
        return found

    def _descriptor(self, index: int, x: Any) -> TensorDescriptor:
        """A descriptor depends on the address alone: shape and strides are part of the plan's key."""
        key = (index, x.data_ptr())
        known = self.descriptors.get(key)
        if known is None:
            if len(self.descriptors) >= MAX_DESCRIPTORS:
                self.descriptors.clear()
            # packed rows have no batch axis; the stride of an axis of length 1 is never used
            lead = [1] * (4 - x.dim())
            shape, strides = [*lead, *x.shape], [*(16 * at for at in lead), *x.stride()]
            known = TensorDescriptor(
                Address(x.data_ptr(), x.dtype), shape, strides, [1, 1, *self.boxes[index]]
            )
            self.descriptors[key] = known
        return known

    def adopt(self, compiled: Any) -> None:
        """Launch this compiled kernel from now on."""
        self.launch = compat.launcher(compiled, self.programs)

    def five(self, a: Any, b: Any, c: Any, d: Any, e: Any) -> bool:
        """Launch on five arrays where the plan is compiled and needs no more than those, and say whether it was."""
        if self.launch is None or self.boxes:
            return False
        self.launch(a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr(), e.data_ptr(), *self.after_five)
        return True

    def __call__(self, *arrays: Any) -> None:
        """Launch on the current stream of the current device."""
        if self.boxes:
            arrays = tuple(self.described(arrays))
        if self.launch is not None:
            self.launch(
                *[x if x is None or type(x) is TensorDescriptor else x.data_ptr() for x in arrays], *self.tail
            )
            return
        # Triton's own path compiles, checks the arrays and launches
        compiled = self.kernel[(self.programs,)](*arrays, *self.tail, **self.options)
        if not compat.interpreting():
            self.adopt(compiled)
