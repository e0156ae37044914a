"""Compile the forward kernel for a Hopper that is not here, and read its machine code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import compile as compile_source
from triton.experimental.gluon._runtime import GluonASTSource

from .compat import gl
from .configs import ROWS, Facts
from .kernels.forward import forward_kernel

TARGET = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 232448
TOOLS = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
TYPES = {"bfloat16": "bf16", "float16": "fp16"}
ALIGNED = [["tt.divisibility", 16]]


def descriptor_type(dtype: str, block: list[int]) -> str:
    """Triton's name of a descriptor of such blocks, with the layout that the launcher gives it."""
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if dtype == "bfloat16" else gl.float16)
    return f"tensordesc<{TYPES[dtype]}{block},{layout!r}>"


def source(facts: Facts, dtype: str = "bfloat16") -> Any:
    """The forward kernel as a launch would specialise it."""
    query, value = ([1, 1, ROWS, width] for width in (facts.width, facts.width_v))
    blocks = {
        "q": query,
        "k": [1, 1, facts.block_n, facts.width],
        "v": [1, 1, facts.block_n, facts.width_v],
        "out": value,
    }
    signature: dict[str, str] = {at: descriptor_type(dtype, block) for at, block in blocks.items()}
    kernel: Any = forward_kernel
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    pointers = {
        "lse": "*fp32",
        "counter": "*i32" if facts.dynamic else "*fp32",
        "slopes": "*fp32",
        "sink": f"*{TYPES[dtype]}" if facts.has_sink else "*fp32",
    }
    for index, name in enumerate(kernel.arg_names):
        if name in blocks:
            continue
        if name in pointers:
            signature[name] = pointers[name]
            attributes[(index,)] = ALIGNED
        elif name == "C":
            signature[name], constants[(index,)] = "constexpr", facts
        else:
            signature[name] = "fp32" if name in ("scale", "cap", "unit", "wide_unit", "lift") else "i32"
    return GluonASTSource(kernel, signature, constants, attributes)


def compile_facts(facts: Facts, dtype: str = "bfloat16") -> Any:
    """Triton's compiled kernel; no device is touched."""
    return compile_source(
        source(facts, dtype), target=TARGET, options={"num_warps": 4, "enable_fp_fusion": True}
    )
