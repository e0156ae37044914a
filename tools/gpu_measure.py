"""Time the GPU backends against their peers on the GPU at hand, interleaved in one process, and write the records.

Usage: gpu_measure.py OUT [dense] [variants] [heavy] [decode] [host] [VARIANT:D:N ...]

TFLOP/s count the pairs that the mask allows, exactly.
"""

from __future__ import annotations

import functools
import multiprocessing
import statistics
import sys
import time
import warnings
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

from attnproof import dispatch
from attnproof.backends.triton import launch
from attnproof.problem import Options, bind, bind_decode
from gpu_record import write
from gpu_variants import HEAVY, SDPA, Run, first, installed, options, pairs, peers, sdpa

TOKENS, WIDTH = 16384, 2048
LENGTHS = (8192, 512, 1024, 4096, 16384)
ROUNDS, WARM_MS, REP_MS = 3, 2, 10
OWN = ("hopper", "triton")  # fastest first
NEEDS = frozenset("qkv")


def cells(groups: list[str]) -> list[tuple[str, int, int]]:
    """(variant, head dim, length)."""
    found = [(v, int(d), int(n)) for v, d, n in (at.split(":") for at in groups if ":" in at)]
    if "dense" in groups:
        found += [(v, d, n) for n in LENGTHS for d in (64, 128, 256) for v in ("full", "causal")]
    if "variants" in groups:
        found += [(v, d, 8192) for d in (128, 64) for v in ("window", "softcap", "alibi", "document")]
    if "heavy" in groups:
        found += [(v, d, 8192) for d in (128, 64) for v in HEAVY]
    return found


def inputs(d: int, n: int) -> list[Any]:
    torch.manual_seed(n + d)
    shape = (TOKENS // n, WIDTH // d, n, d)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)] + [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    ]


def candidates(variant: str, d: int, n: int) -> tuple[dict[str, Run], dict[str, Run]]:
    """Forward and backward of everyone on one cell; who disagrees with the first of ours is not timed."""
    *qkv, dout = inputs(d, n)
    problem, tensors = bind(*(x.detach() for x in qkv), options(variant, WIDTH // d, n))
    out, lse = launch.forward(problem, tensors)
    forward: dict[str, Run] = {}
    backward: dict[str, Run] = {}
    for name in OWN:
        own = dispatch.load(name)
        if own.why_not(problem) is not None:
            continue
        run = functools.partial(own.forward, problem, tensors)
        if not close(run()[0], out):
            print("DISAGREE", variant, d, n, name, flush=True)
            continue
        forward[name] = run
        backward[name] = functools.partial(own.backward, problem, tensors, out, lse, dout, None, NEEDS)
        if getattr(own, "unordered_backward", False):
            fast = replace(problem, deterministic=False)
            backward[f"{name}_fast"] = functools.partial(
                own.backward, fast, tensors, out, lse, dout, None, NEEDS
            )
    for name, peer in peers(variant, *qkv, dout).items():
        try:
            their = peer.run()
            # no two draw the same numbers: whether dropout is right is the parity suite's business
            if variant != "dropout" and not close(peer.laid_out(their), out):
                print("DISAGREE", variant, d, n, name, flush=True)
                continue
            with torch.no_grad():
                peer.run()
            peer.backward(their)()
        except Exception as error:
            print("peer", variant, d, n, name, str(error)[:150].replace("\n", " "), flush=True)
            continue
        forward[name], backward[name] = without_grad(peer.run), peer.backward(their)
    if "sdpa_flash" in backward:
        backward["sdpa_flash_deterministic"] = deterministic(backward["sdpa_flash"])
    return forward, backward


def close(ours: Any, theirs: Any) -> bool:
    """The same call; whether it is right is the parity suite's business."""
    return ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item() < 0.02


def deterministic(run: Run) -> Run:
    """Under torch's deterministic mode, which only serves where it refuses what varies."""

    def inner() -> Any:
        torch.use_deterministic_algorithms(True)
        try:
            return run()
        finally:
            torch.use_deterministic_algorithms(False)

    return inner


def without_grad(run: Run) -> Run:
    def inner() -> Any:
        with torch.no_grad():
            return run()

    return inner


def bench(run: Run) -> float:
    from triton.testing import do_bench

    return do_bench(run, warmup=WARM_MS, rep=REP_MS, return_mode="median")


def rotated(names: list[Any], turn: int) -> list[Any]:
    """The names from another one on in each round: what ran just before decides how hot and how fast the card is."""
    start = turn * len(names) // ROUNDS
    return names[start:] + names[:start]


def interleaved(runs: dict[str, Run]) -> dict[str, dict[str, float]]:
    """Median of the rounds' medians, and their spread, in ms."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS):
        for name in rotated(list(runs), turn):
            samples[name].append(bench(runs[name]))
    return {
        name: {"ms": statistics.median(at), "spread": (max(at) - min(at)) / statistics.median(at)}
        for name, at in samples.items()
    }


def warm(cell: tuple[str, int, int]) -> None:
    """Fill the compilers' disk caches from a worker process."""
    try:
        forward, backward = candidates(*cell)
        for run in (*forward.values(), *backward.values()):
            run()
        torch.cuda.synchronize()
    except Exception as error:
        print("warm", cell, str(error)[:200], flush=True)


def warm_all(todo: list[tuple[str, int, int]]) -> None:
    began = time.time()
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(warm, todo, chunksize=1)
    print(f"warm after {time.time() - began:.0f} s", flush=True)


def tables(todo: list[tuple[str, int, int]], into: Path) -> None:
    """Every cell; the record is complete after each, so that a run that is cut short leaves one."""
    results: list[dict[str, Any]] = []
    for variant, d, n in todo:
        forward, backward = candidates(variant, d, n)
        flops = 4 * TOKENS // n * (WIDTH // d) * pairs(variant, n) * d
        for which, runs, factor in (("forward", forward, 1.0), ("backward", backward, 2.5)):
            for name, row in interleaved(runs).items():
                tflops = flops * factor / row["ms"] / 1e9
                results.append(
                    {
                        "pass": which,
                        "variant": variant,
                        "D": d,
                        "N": n,
                        "candidate": name,
                        "tflops": tflops,
                        **row,
                    }
                )
            show(results[-len(runs) :])
        write("measure", "attention", PROTOCOL, results, into)


def show(rows: list[dict[str, Any]]) -> None:
    own = next(r for r in rows if r["candidate"] in OWN)
    text = "  ".join(f"{r['candidate']} {r['tflops']:.0f} ({own['tflops'] / r['tflops']:.2f}x)" for r in rows)
    print(f"{own['pass']:8s} {own['variant']:8s} D={own['D']} N={own['N']}: {text}", flush=True)


def decode(into: Path) -> None:
    """GB/s of keys and values read; 32 heads on 8, D = 128."""
    results: list[dict[str, Any]] = []
    for batch, n in ((16, 8192), (16, 65536), (1, 8192), (1, 65536)):
        torch.manual_seed(0)
        q = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, 8, n, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        lengths = torch.full((batch,), n, dtype=torch.int32, device="cuda")
        runs: dict[str, Run] = {}
        bound = bind_decode(q, k, v, lengths, None, Options(), None)
        runs["triton"] = lambda bound=bound: launch.forward(*bound)
        for page in (16, 256):
            table = torch.arange(batch * n // page, dtype=torch.int32, device="cuda").view(batch, -1)
            pools = [
                x.view(batch, 8, n // page, page, 128).transpose(1, 2).reshape(-1, 8, page, 128)
                for x in (k, v)
            ]
            paged = bind_decode(q, *pools, lengths, table, Options(), None)
            runs[f"triton, pages of {page}"] = lambda paged=paged: launch.forward(*paged)
        for name, at in SDPA.items():

            def run(at: Any = at, q: Any = q, k: Any = k, v: Any = v) -> Any:
                with sdpa_kernel(at):
                    return sdpa(q, k, v, enable_gqa=True)

            runs[name] = run
        right = runs["sdpa_flash"]()
        for name, run in runs.items():
            got = first(run())
            if not (got - right).float().norm() / right.float().norm() < 0.02:
                print("DISAGREE decode", batch, n, name, flush=True)
        moved = 2 * k.numel() * 2
        for name, row in interleaved(runs).items():
            rate = moved / row["ms"] / 1e6
            results.append({"pass": "decode", "B": batch, "N": n, "candidate": name, "GB/s": rate, **row})
        text = "  ".join(f"{r['candidate']} {r['GB/s']:.0f}" for r in results[-len(runs) :])
        print(f"decode B={batch} N={n}: {text}", flush=True)
        write("measure", "decode", PROTOCOL, results, into)


def host(into: Path) -> None:
    """Microseconds of host time per eager call, and of device time per call under a graph; B1 H8 N128 D64 causal."""
    from attnproof import attention

    q, k, v = (torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    problem, tensors = bind(q, k, v, Options(causal=True))
    grads = [x.detach().requires_grad_() for x in (q, k, v)]
    runs: dict[str, Run] = {}
    for name in OWN:
        own = dispatch.load(name)
        if own.why_not(problem) is None:
            call = functools.partial(attention, causal=True, backend=name)
            runs[f"{name} forward"] = functools.partial(own.forward, problem, tensors)
            runs[f"{name} attention()"] = functools.partial(call, q, k, v)
            runs[f"{name} attention(), gradients on"] = functools.partial(call, *grads)
    runs["sdpa"] = lambda: sdpa(q, k, v, is_causal=True)
    runs["sdpa, gradients on"] = lambda: sdpa(*grads, is_causal=True)
    results = []
    for name, run in runs.items():
        for _ in range(100):
            run()
        samples = []
        for _ in range(7):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(200):
                run()
            samples.append((time.perf_counter() - began) / 200 * 1e6)
        row = {
            "pass": "host",
            "candidate": name,
            "us": statistics.median(samples),
            "us_in_graph": float("nan") if "gradients" in name else replayed(run),
        }
        results.append(row)
        print(f"host {name}: {row['us']:.1f} us, in a graph {row['us_in_graph']:.2f} us", flush=True)
    write("measure", "host", PROTOCOL, results, into)


def replayed(run: Run, calls: int = 20) -> float:
    """Microseconds of one call inside a captured graph; NaN if it cannot be captured."""
    captured = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(captured):
            for _ in range(calls):
                run()
    except RuntimeError as error:
        print("not captured:", str(error)[:200], flush=True)
        return float("nan")
    return bench(captured.replay) / calls * 1e3


PROTOCOL = {
    "dtype": "bfloat16",
    "shape": "B * N = 16384 tokens, H * D = 2048",
    "timer": f"triton do_bench (L2 flushed before each call), warm-up {WARM_MS} ms, {REP_MS} ms a round",
    "statistic": f"median of {ROUNDS} rounds' medians, candidates in turn in one process, each round from another one on",
    "flops": "4 B H D pairs forward, 2.5 times that backward; pairs are counted from the mask",
    "others": {name: version(name) for name in ("flash-attn-4", "nvidia-cutlass-dsl") if installed(name)},
    "scope": "hopper and triton are timed as backends (allocation, launches); the front end's host time is in the host record",
}


def main() -> None:
    warnings.simplefilter("ignore")
    into, groups = Path(sys.argv[1]), sys.argv[2:] or ["dense", "variants", "heavy", "decode", "host"]
    todo = cells(groups)
    if todo:
        warm_all(todo)
    if "host" in groups:
        host(into)
    if "decode" in groups:
        decode(into)
    if todo:
        tables(todo, into)


if __name__ == "__main__":
    main()
