"""The process that a profiler watches: `python -m attnproof.ledger.workload PLAN MANIFEST`.

PLAN is JSON, a list of cases; MANIFEST is written with one entry for each call that was made, in order, or
with the reason why it was not. Each call is warmed up (compilation, allocator), the cache is filled with
unrelated clean lines, and then the call runs between two markers. Only that part is profiled.

The materialised form is written out here, so that its kernels are the ones that `materialised` counts:
q is scaled first, the mask is applied in place.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

DIRECTIONS = ("forward", "backward")
FILL = 4  # times the L2 that is read before a measured call


@dataclass(frozen=True)
class Case:
    """One call to profile, square and without grouped heads: the shapes that the ledger's figures show."""

    implementation: str
    direction: str
    length: int
    heads: int
    head_dim: int
    dtype: str = "float16"
    causal: bool = False

    def __str__(self) -> str:
        causal = " causal" if self.causal else ""
        return f"{self.direction} {self.dtype} N={self.length} H={self.heads} D={self.head_dim}{causal}"


def _torch() -> Any:
    # imported by name: torch is optional, and its own types are of no use here
    return import_module("torch")


def eager(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Attention as a chain of torch operations, scores and probabilities stored."""
    torch = _torch()
    s: Any = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    if causal:
        future = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1)
        s = s.masked_fill_(future, float("-inf"))
    return torch.matmul(torch.softmax(s, dim=-1), v)


def implementation(name: str) -> Callable[[Any, Any, Any, bool], Any]:
    """eager, sdpa, or a backend of this package by name."""
    if name == "eager":
        return eager
    if name == "sdpa":
        torch = _torch()
        fused: Any = torch.nn.functional.scaled_dot_product_attention

        def sdpa(q: Any, k: Any, v: Any, causal: bool) -> Any:
            return fused(q, k, v, is_causal=causal)

        return sdpa
    from ..api import attention

    def ours(q: Any, k: Any, v: Any, causal: bool) -> Any:
        return attention(q, k, v, causal=causal, backend=name)

    return ours


def implementations() -> list[str]:
    """eager, sdpa and every fused backend of ours that serves a plain half-precision call on the GPU here."""
    from ..dispatch import automatic, load
    from ..problem import Problem

    plain = Problem("float16", "cuda", B=1, H=1, Hkv=1, M=1024, N=1024, D=64, Dv=64, scale=0.125)
    able = [name for name in automatic() if load(name).why_not(plain) is None]
    # the chunked torch fallback serves everything, and is not a fused kernel to be predicted as one
    return ["eager", "sdpa", *(name for name in able if name != "math")]


@contextmanager
def profiled(cuda: Any) -> Generator[None]:
    """Between two markers, with the profiler on."""
    cuda.synchronize()
    cuda.profiler.start()
    cuda._sleep(1000)
    yield
    cuda._sleep(1000)
    cuda.synchronize()
    cuda.profiler.stop()


def run(case: Case) -> str | None:
    """Make one profiled call; returns why it could not be made, before anything was profiled."""
    torch = _torch()
    device = "cuda"
    needs_grad = case.direction == "backward"
    shape = (1, case.heads, case.length, case.head_dim)
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)
    q, k, v = (
        torch.randn(shape, dtype=dtype, device=device, generator=generator).requires_grad_(needs_grad)
        for _ in range(3)
    )
    call = implementation(case.implementation)
    dout = torch.ones_like(q)

    def forward() -> Any:
        return call(q, k, v, case.causal)

    def backward(out: Any) -> None:
        torch.autograd.grad(out, (q, k, v), dout)

    try:
        out = forward()
        if needs_grad:
            backward(out)
            out = forward()
    except (torch.cuda.OutOfMemoryError, NotImplementedError, ImportError) as error:
        return str(error).splitlines()[0]
    size = torch.cuda.get_device_properties(0).L2_cache_size
    fill = torch.zeros(FILL * size // 4, device=device)
    fill.sum().item()
    with profiled(torch.cuda):
        if needs_grad:
            backward(out)
        else:
            out = forward()
    return None


def main(plan: Path, manifest: Path) -> None:
    """Run every case of `plan`, and write what came of each to `manifest`."""
    torch = _torch()
    done: list[dict[str, Any]] = []
    for each in json.loads(plan.read_text(encoding="utf-8")):
        case = Case(**each)
        skipped = run(case)
        done.append({**asdict(case), "skipped": skipped})
        torch.cuda.empty_cache()
        print(
            f"{case.implementation} {case}: {'ok' if skipped is None else f'skipped, {skipped}'}", flush=True
        )
    manifest.write_text(json.dumps(done), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
