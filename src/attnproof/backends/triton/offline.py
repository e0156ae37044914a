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

from ...problem import Problem, Tensors
from . import launch, registry
from .configs import Config, Pass
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


@dataclass(frozen=True)
class Sample:
    """A call to compile for: its structure and meta tensors.

    Attributes:
        width: head dim of q, k and v.
        variant: "full", "causal" or one option: window, softcap, alibi, bias, keep, bounds, dropout, sink, packed,
            cached, paged.
        dtype: of q, k and v.
        length: queries and keys.
    """

    width: int
    variant: str = "causal"
    dtype: str = "bfloat16"
    length: int = 8192

    def problem(self) -> Problem:
        """H * D = 2048 and B = 2, as in the measurements."""
        heads = max(1, 2048 // self.width)
        options: dict[str, Any] = (
            {"right": 0} if self.variant not in ("full", "bias", "keep", "paged", "cached") else {}
        )
        options |= {
            "window": {"left": 1023},
            "softcap": {"softcap": 30.0},
            "alibi": {"has_alibi": True},
            "bias": {"bias_shape": (1, heads, self.length, self.length), "bias_dtype": self.dtype},
            "keep": {"has_keep": True},
            "bounds": {"has_bounds": True},
            "dropout": {"dropout_p": 0.1},
            "sink": {"has_sink": True},
            "packed": {"rows": "packed", "tokens": (2 * self.length, 2 * self.length)},
            "cached": {"rows": "cached", "M": 1},
            "paged": {"rows": "paged", "M": 1, "page": 16},
        }.get(self.variant, {})
        given: dict[str, Any] = {
            "dtype": self.dtype,
            "device": "cuda",
            "B": 2,
            "H": heads,
            "Hkv": heads,
            "M": self.length,
            "N": self.length,
            "D": self.width,
            "Dv": self.width,
            "scale": self.width**-0.5,
        }
        return Problem(**(given | options))

    def tensors(self) -> Tensors:
        """Meta tensors of the problem, bias and mask not yet expanded."""
        p = self.problem()
        dtype = getattr(torch, self.dtype)

        def empty(*shape: int, of: Any = dtype) -> Any:
            return torch.empty(shape, dtype=of, device="meta")

        if p.rows == "packed":
            q, k, v = (empty(p.tokens[0], p.H, p.D).transpose(0, 1) for _ in range(3))
        elif p.rows == "paged":
            pool = (p.B * p.N // p.page, p.H, p.page, p.D)
            q, k, v = empty(p.B, p.H, p.M, p.D), empty(*pool), empty(*pool)
        else:
            q, k, v = empty(p.B, p.H, p.M, p.D), empty(p.B, p.H, p.N, p.D), empty(p.B, p.H, p.N, p.D)
        int32 = torch.int32
        more = {
            "alibi": {"alibi_slopes": empty(1, p.H, of=torch.float32)},
            "bias": {"bias": empty(1, p.H, p.M, p.N)},
            "keep": {"keep": empty(p.B, 1, p.M, p.N, of=torch.bool)},
            "bounds": {"bounds": empty(1, p.M, 2, of=int32)},
            "dropout": {"rng": empty(2, of=torch.int64)},
            "sink": {"sink": empty(p.H)},
            "packed": {"cu_q": empty(p.B + 1, of=int32), "cu_k": empty(p.B + 1, of=int32)},
            "cached": {"lengths": empty(p.B, of=int32)},
            "paged": {"lengths": empty(p.B, of=int32), "block_table": empty(p.B, p.N // 16, of=int32)},
        }
        return Tensors(q, k, v, **more.get(self.variant, {}))

    def plans(
        self,
        architecture: str,
        given: dict[Pass, Config] | None = None,
        needs: frozenset[str] = frozenset("qkv"),
    ) -> list[tuple[str, Plan, tuple[Any, ...]]]:
        """Every kernel of forward and (where there is one) backward, by name, with the arrays of its launch."""
        problem, tensors = self.problem(), self.tensors()
        with registry.rehearse(architecture, given) as rehearsal:
            out, lse = launch.forward(problem, tensors)
            if problem.rows in ("dense", "packed"):
                launch.backward(problem, tensors, out, lse, torch.empty_like(out), None, needs)
        return rehearsal.plans


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
