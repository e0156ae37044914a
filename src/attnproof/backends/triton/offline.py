"""Compile a plan for a target that is not here, and read what the assembler says about it.

Used by the compile matrix (registers, spills, shared memory per target, no GPU needed) and by the tuner, to leave out
candidates that spill or cannot launch before any of them is timed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from .plan import Plan

# bytes of shared memory (LDS) a program may use
SHARED_LIMIT = {
    "sm80": 166912,
    "sm86": 101376,
    "sm89": 101376,
    "sm90": 232448,
    "sm100": 232448,
    "sm120": 101376,
    "gfx90a": 65536,
    "gfx942": 65536,
    "gfx950": 163840,
    "gfx1100": 65536,
    "gfx1201": 65536,
}
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.bool: "i1",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    Attributes:
        registers: per thread (vector registers on AMD).
        spills: bytes of local memory per thread on NVIDIA, spilled vector registers on AMD.
        shared: bytes of shared memory per program.
        fits: whether the target can launch it.
    """

    registers: int
    spills: int
    shared: int
    fits: bool


def target(architecture: str) -> GPUTarget:
    """``sm90`` or ``gfx942`` as Triton's target."""
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 32 if architecture.startswith(("gfx11", "gfx12")) else 64)
    return GPUTarget("cuda", int(architecture.removeprefix("sm")), 32)


def source(plan: Plan, arrays: tuple[Any, ...]) -> ASTSource:
    """The specialised source that Triton would compile for a launch with aligned arrays."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    aligned = [["tt.divisibility", 16]]
    for index, (parameter, value) in enumerate(zip(plan.kernel.params, (*arrays, *plan.tail), strict=True)):
        free = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not free):
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            attributes[(index,)] = aligned
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not free:
                attributes[(index,)] = aligned
    return ASTSource(plan.kernel, signature, constants, attributes)


def compile_plan(plan: Plan, arrays: tuple[Any, ...], architecture: str) -> Any:
    """Triton's compiled kernel for ``architecture``; no device is touched."""
    options = {name: value for name, value in plan.options.items() if name != "maxnreg" or value}
    if architecture.startswith("gfx"):
        options.pop("maxnreg", None)
    return triton.compile(source(plan, arrays), target=target(architecture), options=options)


def resources(compiled: Any, architecture: str) -> Resources:
    """Registers, spills and shared memory of a compiled kernel."""
    shared = int(compiled.metadata.shared)
    if architecture.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        registers, spills = (
            _number(rf"\.{name}:\s+(\d+)", text) for name in ("vgpr_count", "vgpr_spill_count")
        )
    else:
        text = _usage(compiled.asm["cubin"])
        registers, spills = _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)
    return Resources(registers, spills, shared, shared <= SHARED_LIMIT[architecture])


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern} in the assembler's report")
    return int(found.group(1))


def _usage(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    return done.stdout
