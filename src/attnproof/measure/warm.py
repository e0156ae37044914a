"""Kernels compiled side by side in processes of their own, before the clock starts.

A sweep of 72 shapes compiles for each of them (FlexAttention always does, ours where the structure is new), and one
process after the other would wait longer for compilers than for the GPU. The workers make every call once and are
thrown away; what they leave are the compilers' caches on disk, which the measuring process then reads.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from . import implementations
from .shapes import Shape

COMPILED = frozenset({"hopper", "triton", "flex"})
MOST = 14  # processes: each holds a context and the inputs of one shape on the device
# inside a worker everything compiles in that worker: the others are the parallelism
ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}


def jobs_for(device: str) -> int:
    """How many processes compile by default; none on a CPU, whose candidates are compiled ahead."""
    return max(1, min(MOST, (os.cpu_count() or 2) - 2)) if device == "cuda" else 0


def spread(shapes: Iterable[Shape]) -> list[Shape]:
    """Shapes by length, so that neighbours differ in what a kernel is compiled for, and no two workers compile the same."""
    return sorted(shapes, key=lambda shape: (shape.N, shape.D, shape.causal, shape.run))


def warm(
    shapes: Sequence[Shape],
    names: Sequence[str],
    device: str,
    jobs: int,
    tick: Callable[[str], Any] = lambda name: None,
) -> list[str]:
    """Make every call of the compiled candidates once, in worker processes; what went wrong there, in words.

    A failure is no verdict: the measuring process makes the same call and gives one.
    """
    compiled = tuple(name for name in names if name.rpartition(":")[2] in COMPILED)
    if not jobs or not compiled or not shapes:
        return []
    wrong: list[str] = []
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(shapes)), context, initializer=_begin)
    try:
        futures = {pool.submit(once, shape, compiled, device): shape for shape in spread(shapes)}
        for future in as_completed(futures):
            shape = futures[future]
            try:
                wrong += future.result()
            except Exception as error:  # a compiler that took its process down is the sweep's to report
                wrong.append(f"{shape.name}: {type(error).__name__}")
            tick(f"compiled {shape.name}")
    finally:
        # one that is interrupted does not wait for what nobody has begun
        pool.shutdown(cancel_futures=True)
    return wrong


def _begin() -> None:
    os.environ.update(ALONE)


def once(shape: Shape, names: Sequence[str], device: str) -> list[str]:
    """Every candidate's call on one shape, with its gradients where the shape has them."""
    import torch

    from .bench import make_inputs

    q, k, v, dout = make_inputs(shape, device, 0)
    wrong: list[str] = []
    for name in names:
        try:
            out = implementations.load(name).run(q, k, v, shape)
            if shape.run != "forward":
                torch.autograd.grad(out, (q, k, v), dout)
        except (implementations.Unable, NotImplementedError):
            continue
        except Exception as error:
            wrong.append(f"{shape.name}, {name}: {type(error).__name__}")
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return wrong
