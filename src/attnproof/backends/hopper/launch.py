"""What runs when: allocate, look the plan up by the structure of the call, launch; or hand the call to ``triton``.

Handed over, with one line in the log per reason: tensors that the copy engine cannot describe, and every call once a
kernel did not compile (newer versions of Triton may change Gluon).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...problem import Grads, Problem, Tensors
from .. import triton as portable
from ..triton.compat import current_device, multiprocessors
from ..triton.launch import empty_out
from ..triton.registry import device_of
from . import arguments as args
from . import backprop, configs, counters, device, launcher, listings
from .kernels.forward import forward_kernel

MAX_PLANS = 4096  # a runaway of shapes must not hold memory for ever
MAX_NEAR = 512  # torch.compile makes an equal problem anew in every call
# said aloud because the compiler's own default changes in 3.10
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
POINTERS = 4  # lse, counter, slopes, sink; listed also tiles, and bounds where there are some


@dataclass
class Plan:
    """What the structure of a call decides; ``elsewhere`` is why ``triton`` serves it, if so.

    ``fast`` launches without Triton's help, once Triton has compiled and launched the kernel, ``compiled``, which is kept
    because it owns the code on the device. ``like_q`` says that out has
    the shape and strides of q, and ``lse`` is a tensor of lse's shape that takes no memory: allocating like something
    known costs less than from numbers.
    """

    problem: Problem
    facts: configs.Facts
    programs: int
    numbers: tuple[Any, ...]
    elsewhere: str = ""
    fast: Callable[..., None] | None = None
    compiled: Any = None
    like_q: bool = False
    lse: Any = None


_plans: dict[Problem, dict[Any, Plan]] = {}
# the same by the identity of a problem, which is kept so that its id stays its own: hashing one costs half a launch
_near: dict[int, tuple[Problem, dict[Any, Plan]]] = {}


def forward(problem: Problem, tensors: Tensors) -> tuple[Any, Any]:
    """See ``backends.Backend``."""
    plan = plan_of(problem, tensors)
    q = tensors.q
    if plan.fast is not None and q.get_device() == current_device():
        out = torch.empty_like(q) if plan.like_q else empty_out(problem, q)
        lse = torch.empty_like(plan.lse, memory_format=torch.contiguous_format)
        run(plan, tensors, out, lse)
        return out, lse
    if plan.elsewhere or device.broken():
        return portable.forward(problem, tensors)
    return first(plan, problem, tensors)


def first(plan: Plan, problem: Problem, tensors: Tensors) -> tuple[Any, Any]:
    """A call whose kernel may have to be compiled, or that has no work for one."""
    q = tensors.q
    out = empty_out(problem, q)
    lse = torch.empty(problem.out_shape[:-1], dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    if problem.N == 0 and problem.rows == "dense":
        return out.zero_(), fill_without_keys(lse, tensors.sink)
    with device_of(q):
        try:
            run(plan, tensors, out, lse)
        except Exception as error:
            # only a kernel that does not compile is handed over; what else goes wrong is the caller's to see
            if not _compiling(error):
                raise
            device.failed(error)
            return portable.forward(problem, tensors)
    return out, lse


def backward(
    problem: Problem, tensors: Tensors, out: Any, lse: Any, dout: Any, dlse: Any, needs: frozenset[str]
) -> Grads:
    """See ``backends.Backend``; the lse of both backends is the same."""
    given = (problem, tensors, out, lse, dout, dlse, needs)
    if device.broken():
        return portable.backward(*given)
    try:
        return backprop.backward(*given)
    except Exception as error:
        if not _compiling(error):
            raise
        device.failed(error)
        return portable.backward(*given)


def plan_of(problem: Problem, tensors: Tensors) -> Plan:
    """The plan of this structure, made when it is new."""
    kept = _near.get(id(problem))
    if kept is None:
        kept = remember(problem)
    q, k, v = tensors[:3]
    slopes, sink = tensors.alibi_slopes, tensors.sink
    key: tuple[Any, ...] = (
        q.stride(),
        k.stride(),
        v.stride(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) % args.ALIGNMENT,
        q.get_device(),
    )
    if slopes is not None:
        key = (*key, slopes.shape, slopes.stride())
    if sink is not None:
        key = (*key, sink.dtype, sink.stride())
    if tensors.bounds is not None:
        key = (*key, tensors.bounds.shape)
    found = kept[1].get(key)
    if found is None:
        found = kept[1][key] = make_plan(problem, tensors)
    return found


def remember(problem: Problem) -> tuple[Problem, dict[Any, Plan]]:
    """A problem that is new, or a new one that is equal to an old one, with its plans."""
    if len(_near) >= MAX_NEAR:
        _near.clear()
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
        _near.clear()
    kept = _near[id(problem)] = (problem, _plans.setdefault(problem, {}))
    return kept


def make_plan(problem: Problem, tensors: Tensors) -> Plan:
    """Decide once what every call of this structure does."""
    q = tensors.q
    facts = configs.facts(problem)
    reason = cannot(problem, tensors)
    if reason:
        device.say(f"hopper: {reason}; triton serves such calls")
        return Plan(problem, facts, 0, (), elsewhere=reason)
    units = multiprocessors(q.get_device())
    numbers = (*args.factors(problem, facts), *args.numbers(problem, facts, tensors))
    rows = q.transpose(-2, -3) if facts.packed or problem.layout == "bmhd" else q
    return Plan(
        problem,
        facts,
        args.programs(problem, facts, units),
        numbers,
        like_q=problem.Dv == problem.D and rows.is_contiguous(),
        lse=torch.empty(1, dtype=torch.float32, device=q.device).expand(problem.out_shape[:-1]),
    )


def cannot(problem: Problem, tensors: Tensors) -> str | None:
    """Why ``triton`` serves calls of this structure, or None."""
    if problem.rows == "packed" and 0 in (*problem.tokens, problem.B):
        return "packed rows without a token or a sequence"
    if problem.N == 0:
        return None
    return args.undescribable(q=tensors.q, k=tensors.k, v=tensors.v)


def run(plan: Plan, tensors: Tensors, out: Any, lse: Any) -> None:
    """Launch on the current stream of the current device."""
    q, k, v = tensors[:3]
    # what a kernel does not have it never reads, and lse is as good an address as any
    slopes, sink = (lse if x is None else x for x in (tensors.alibi_slopes, tensors.sink))
    index = q.get_device()
    stream = torch._C._cuda_getCurrentRawStream(index)
    counter = counters.pair(index, stream) if plan.facts.dynamic else lse
    pointers = (lse, counter, slopes, sink)
    lists: tuple[Any, ...] = ()
    if plan.facts.listed:
        lists = listed(plan, tensors)
    if plan.fast is not None:
        addresses = [x.data_ptr() for x in (q, k, v, out, *pointers, *lists)]
        plan.fast(stream, *addresses)
        return
    kernel: Any = forward_kernel
    descriptors = args.descriptors(plan.facts, q, k, v, out)
    missing = (None,) * (2 - len(lists))
    compiled = kernel[(plan.programs,)](
        *descriptors, *pointers, *lists, *missing, *plan.numbers, C=plan.facts, **OPTIONS
    )
    plan.compiled = compiled
    plan.fast = launcher.adopt(compiled, plan.programs, descriptors, POINTERS + len(lists), plan.numbers)


def listed(plan: Plan, tensors: Tensors) -> tuple[Any, ...]:
    """The list of tiles, and what bounds leave if there are some."""
    problem, facts = plan.problem, plan.facts
    cut = listings.Cut(facts.block_m, facts.block_n, args.slots(problem, facts.block_m))
    return tuple(x for x in listings.query_tiles(problem, tensors, cut) if x is not None)


def fill_without_keys(lse: Any, sink: Any) -> Any:
    """lse of rows that have no key: -inf, or the sink's logit."""
    if sink is None:
        return lse.fill_(float("-inf"))
    return lse.copy_(sink.to(lse.dtype)[None, :, None].expand_as(lse))


def _compiling(error: Exception) -> bool:
    """Whether an error comes from Triton's compiler or its assembler, not from the driver."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import PTXASError

    return isinstance(error, (CompilationError, PTXASError)) or "PassManager" in str(error)
