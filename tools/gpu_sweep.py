"""Time tile configurations of one pass on the GPU at hand, after compiling them all in parallel.

Usage: gpu_sweep.py OUT.json PLAN.json, where PLAN.json is a list of
``[pass, head dim, causal, N, [config, ...], exact, options]``. Every candidate is compared with SDPA before it is timed.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from attnproof.backends.triton import arguments, launch, offline
from attnproof.backends.triton.configs import Config
from attnproof.backends.triton.plan import Plan
from attnproof.problem import Options, Problem, Tensors, bind

TOKENS, WIDTH = 16384, 2048
captured: list[tuple[Plan, tuple[Any, ...]]] = []


def capture(plan: Plan, *arrays: Any) -> None:
    captured.append((plan, arrays))


def structure(which: str, config: Config, x: Any, lse: Any, causal: bool, exact: bool, **options: Any):
    """The plan of one pass for these tensors, not launched."""
    captured.clear()
    launch._PLANS.clear()
    launch._config = lambda *_: config
    constants = arguments.constants
    arguments.constants = lambda p: {**constants(p), "EXACT": exact}
    swizzle = options.pop("swizzle", None)
    grid = arguments.grid
    if swizzle:
        arguments.grid = lambda *a: {**grid(*a), "swizzle": swizzle}
    call, Plan.__call__ = Plan.__call__, capture
    try:
        if which.startswith("decode"):
            decode_structure(which, x, lse, options)
            return captured[0]
        q, k, v, out, dout = x
        problem, t = bind(q, k, v, Options(causal=causal, **options))
        t = t.expand(problem)
        if which == "forward":
            launch._forward(problem, t, out, lse)
        elif which == "dkdv":
            launch._dkdv(problem, t, torch.empty((2, *lse.shape), device=lse.device), dout)
        elif which == "dq":
            launch._dq(problem, t, torch.empty((2, *lse.shape), device=lse.device), dout, False)
    finally:
        Plan.__call__ = call
        arguments.constants = constants
        arguments.grid = grid
    return captured[-1]


def decode_structure(which: str, x: Any, lse: Any, options: dict[str, Any]) -> None:
    q, k, v, out, lengths, table = x
    page = k.shape[2] if table is not None else 0
    problem = Problem(
        "bfloat16",
        "cuda",
        q.shape[0],
        q.shape[1],
        k.shape[1],
        1,
        k.shape[2] if table is None else page * table.shape[1],
        q.shape[3],
        q.shape[3],
        "cached" if table is None else "paged",
        page=page,
        scale=q.shape[3] ** -0.5,
        num_splits=options["splits"],
    )
    launch._decode(problem, Tensors(q, k, v, lengths=lengths, block_table=table), out, lse)


def decode_tensors(b: int, n: int, page: int, device: str) -> Any:
    q = torch.empty((b, 32, 1, 128), dtype=torch.bfloat16, device=device)
    table = None
    k, v = (torch.empty((b, 8, n, 128), dtype=torch.bfloat16, device=device) for _ in range(2))
    if page:
        k, v = (y.view(b * n // page, 8, page, 128) for y in (k, v))
        table = torch.empty((b, n // page), dtype=torch.int32, device=device)
    lengths = torch.empty(b, dtype=torch.int32, device=device)
    return [q, k, v, torch.empty_like(q), lengths, table], torch.empty((b, 32, 1), device=device)


def shape(d: int, n: int) -> tuple[int, int, int, int]:
    return TOKENS // n, WIDTH // d, n, d


def compile_one(job: tuple[Any, ...]) -> tuple[Any, ...]:
    which, d, causal, n, config, exact, options = job
    began = time.time()
    try:
        if which.startswith("decode"):
            x, lse = decode_tensors(d, n, int(which[6:] or 0), "meta")
        else:
            x = [torch.empty(shape(d, n), dtype=torch.bfloat16, device="meta")] * 5
            lse = torch.empty(shape(d, n)[:3], device="meta")
        plan, arrays = structure(which, Config(*config), x, lse, causal, exact, **options)
        compiled = offline.compile_plan(plan, tuple(plan.described(arrays)), "sm90")
        r = offline.resources(compiled, "sm90")
        return job, [r.registers, r.spills, r.shared, r.fits], time.time() - began
    except Exception as error:
        return job, f"{type(error).__name__}: {error}"[:300], time.time() - began


def flops(which: str, d: int, causal: bool, n: int) -> float:
    if which.startswith("decode"):
        return 2.0 * d * 8 * n * 128 * 2 * 1000  # bytes, shown as GB/s
    b, h, _, _ = shape(d, n)
    pairs = n * (n + 1) // 2 if causal else n * n
    return {"forward": 4, "dkdv": 8, "dq": 6}[which] * b * h * pairs * d


def bench(run: Any) -> float:
    from triton.testing import do_bench

    return do_bench(run, warmup=5, rep=30, return_mode="median")


@lru_cache(maxsize=1)
def reference(d: int, causal: bool, n: int) -> Any:
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(shape(d, n), device="cuda", dtype=torch.bfloat16) for _ in range(4))
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    grads = torch.autograd.grad(out, (q, k, v), do)
    q, k, v, out = (x.detach() for x in (q, k, v, out))
    problem, t = bind(q, k, v, Options(causal=causal))
    got, lse = launch.forward(problem, t)
    stats, _ = launch._stats(problem, t, got, lse, do, None, False)
    return q, k, v, out, do, lse, stats, grads


def worst(a: Any, b: Any) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def time_one(job: tuple[Any, ...]) -> tuple[float, float]:
    which, d, causal, n, config, exact, options = job
    if which.startswith("decode"):
        return time_decode(job)
    q, k, v, out, do, lse, stats, grads = reference(d, causal, n)
    mine, my_lse = torch.empty_like(q), torch.empty_like(lse)
    plan, arrays = structure(which, Config(*config), (q, k, v, mine, do), my_lse, causal, exact, **options)
    arrays = list(arrays)
    preload(plan, arrays)
    if which != "forward":
        arrays[4], arrays[5] = stats
    plan(*arrays)
    torch.cuda.synchronize()
    if options and set(options) - {"swizzle"}:
        error = 0.0
    elif which == "forward":
        error = worst(mine, out)
    elif which == "dq":
        error = worst(arrays[6], grads[0])
    else:
        error = max(worst(arrays[6], grads[1]), worst(arrays[7], grads[2]))
    return bench(lambda: plan(*arrays)), error


def preload(plan: Plan, arrays: Any) -> None:
    """Take the kernel that a worker compiled; Triton's launch path would not always find it."""
    plan.adopt(offline.compile_plan(plan, tuple(plan.described(tuple(arrays))), "sm90"))


DECODE: dict[Any, Any] = {}


def time_decode(job: tuple[Any, ...]) -> tuple[float, float]:
    which, b, causal, n, config, exact, options = job
    page = int(which[6:] or 0)
    if (b, n) not in DECODE:
        DECODE.clear()
        torch.manual_seed(0)
        (q, k, v, out, lengths, _), lse = decode_tensors(b, n, 0, "cuda")
        for y in (q, k, v):
            y.normal_()
        lengths.fill_(n)
        from torch.nn.attention import SDPBackend, sdpa_kernel

        sdpa = torch.nn.functional.scaled_dot_product_attention
        for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
            try:
                with sdpa_kernel(getattr(SDPBackend, name)):
                    want = sdpa(q, k, v, enable_gqa=True)
                    ms = bench(lambda: sdpa(q, k, v, enable_gqa=True))
                print("peer", name, b, n, f"{flops('decode', b, False, n) / ms / 1e9:.0f} GB/s", flush=True)
            except RuntimeError as error:
                print("peer", name, str(error)[:100], flush=True)
        DECODE[b, n] = (q, k, v, out, lengths, lse, want)
    q, k, v, out, lengths, lse, want = DECODE[b, n]
    table = None
    if page:
        table = torch.arange(b * n // page, dtype=torch.int32, device="cuda").view(b, -1)
        # a sequence's pages hold its keys of all heads: the same numbers as the dense cache
        k, v = (y.view(b, 8, n // page, page, 128).transpose(1, 2).reshape(-1, 8, page, 128) for y in (k, v))
    captured.clear()
    structure(which, Config(*config), [q, k, v, out, lengths, table], lse, causal, exact, **options)
    pairs = list(captured)
    for plan, arrays in pairs:
        preload(plan, arrays)

    def run() -> None:
        for plan, arrays in pairs:
            plan(*arrays)

    out.fill_(float("nan"))
    run()
    return bench(run), worst(out, want)


def main() -> None:
    out, plans = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    jobs = [(w, d, c, n, tuple(cfg), e, o) for w, d, c, n, cfgs, e, o in plans for cfg in cfgs]
    began = time.time()
    with multiprocessing.get_context("fork").Pool(16) as pool:
        done = list(pool.imap_unordered(compile_one, jobs, chunksize=1))
    print(f"compiled {len(jobs)} in {time.time() - began:.0f} s", flush=True)
    resources = {json.dumps(job): r for job, r, _ in done}
    rows = []
    for job in jobs:
        r = resources[json.dumps(job)]
        row = {"job": job, "resources": r}
        if isinstance(r, str) or not r[3]:
            row["error"] = r
        else:
            try:
                ms, off = time_one(job)
                row |= {"ms": ms, "tflops": flops(*job[:4]) / ms / 1e9, "off": off}
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
                if "illegal" in str(error) or "misaligned" in str(error):
                    traceback.print_exc()
                    break
        rows.append(row)
        out.write_text(json.dumps(rows))
    show(rows)
    print(f"total {time.time() - began:.0f} s", flush=True)


def show(rows: list[dict[str, Any]]) -> None:
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        groups.setdefault((*row["job"][:4], json.dumps(row["job"][6])), []).append(row)
    for key, members in groups.items():
        members.sort(key=lambda r: -r.get("tflops", 0))
        print(*key)
        for r in members[:5]:
            what = f"{r['tflops']:.0f} off {r['off']:.4f}" if "ms" in r else str(r.get("error"))[:80]
            print(
                "   ",
                r["job"][4],
                "exact" if r["job"][5] else "fused",
                what,
                r["resources"] if not isinstance(r["resources"], str) else "",
            )


if __name__ == "__main__":
    main()
