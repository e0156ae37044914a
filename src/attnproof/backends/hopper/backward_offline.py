"""Compile the kernels of the backward for a Hopper that is not here, from the launches that a call would make."""

from __future__ import annotations

from typing import Any

import torch
from triton.compiler import ASTSource
from triton.compiler.compiler import compile as compile_source
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from ...problem import Problem, Tensors
from ..triton.backprop import Given
from . import backward_configs as configs
from . import backward_launches
from .backward_launches import OPTIONS, Launch
from .compat import TensorDescriptor
from .offline import ALIGNED, TARGET

TYPES: dict[Any, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
}


def launches(problem: Problem) -> list[Launch]:
    """What the backward of a dense problem launches, on meta tensors: statistics, dk and dv, dq; and the joint pass."""
    dtype = getattr(torch, problem.dtype)

    def empty(*shape: int, of: Any = dtype) -> Any:
        return torch.empty(shape, dtype=of, device="meta")

    q, k = (
        empty(problem.B, problem.H, problem.M, problem.D),
        empty(problem.B, problem.Hkv, problem.N, problem.D),
    )
    v, out = empty(problem.B, problem.Hkv, problem.N, problem.Dv), empty(*problem.out_shape)
    slopes = empty(problem.B, problem.H, of=torch.float32) if problem.has_alibi else None
    tensors = Tensors(q, k, v, alibi_slopes=slopes)
    given = Given(out, empty(*out.shape[:-1], of=torch.float32), out, None)
    stats = backward_launches.empty_statistics(problem, q.device)
    found = [
        backward_launches.statistics(problem, given, stats),
        backward_launches.keys(problem, tensors, stats, out, k, v),
        backward_launches.queries(problem, tensors, stats, given, q),
    ]
    if configs.joint_config(problem) is not None:
        total = torch.empty_like(q, dtype=torch.float32)
        found.append(backward_launches.joint(problem, tensors, stats, out, k, v, total))
    return found


def source(launch: Launch) -> Any:
    """The kernel as a launch with aligned arrays would specialise it."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        kind = "constexpr" if launch.compiled_in(parameter) else _type(value)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(index,)] = value
        elif kind.startswith("*") or (kind == "i32" and value % 16 == 0 and not parameter.do_not_specialize):
            attributes[(index,)] = ALIGNED
    make: Any = GluonASTSource if isinstance(launch.kernel, GluonJITFunction) else ASTSource
    return make(launch.kernel, signature, constants, attributes)


def _type(value: Any) -> str:
    """Triton's name for the type of an argument."""
    if isinstance(value, TensorDescriptor):
        described: Any = value
        return f"tensordesc<{TYPES[described.base.dtype]}{list(described.block_shape)},{described.layout!r}>"
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def compile_launch(launch: Launch) -> Any:
    """Triton's compiled kernel; no device is touched."""
    return compile_source(source(launch), target=TARGET, options=dict(OPTIONS))
