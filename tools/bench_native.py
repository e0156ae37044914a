"""Measures the native backend against its bars and writes a record: `python tools/bench_native.py --out FILE`.

One process, A and B in turn, the order swapped each round, the median of the ratios. Between two measurements the
process sleeps: OpenMP workers spin for some milliseconds after torch has used them, and nobody shall pay for the
other's spinning. The rate of a large sgemm (the better of torch's MKL and NumPy's OpenBLAS) is taken in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from attnproof.arrays import to_numpy
from attnproof.backends import native
from attnproof.backends.native import loader
from attnproof.problem import Options, Problem, Tensors, bind, bind_decode, bind_varlen
from attnproof.verify import records

PAUSE = 0.03  # seconds
Call = Callable[[], Any]


def seconds(call: Call) -> float:
    time.sleep(PAUSE)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(ours: Call, theirs: Call, rounds: int) -> dict[str, float]:
    """Medians of both, and the median of theirs / ours."""
    ours(), theirs()
    pairs = []
    for turn in range(rounds):
        if turn % 2:
            b = seconds(theirs)
            pairs.append((seconds(ours), b))
        else:
            a = seconds(ours)
            pairs.append((a, seconds(theirs)))
    ratios = sorted(b / a for a, b in pairs)
    return {
        "ours_ms": float(np.median([a for a, _ in pairs]) * 1e3),
        "theirs_ms": float(np.median([b for _, b in pairs]) * 1e3),
        "ratio": float(np.median(ratios)),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[-1 - len(ratios) // 4],
        "rounds": rounds,
    }


def host(bound: tuple[Problem, Tensors]) -> tuple[Problem, Tensors]:
    problem, tensors = bound
    return problem, Tensors(*(to_numpy(x) for x in tensors))


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def pair_flops(n: int, d: int, heads: int, causal: bool, products: int) -> float:
    """2 products forward, 5 more backward; the pairs a causal mask leaves are n (n + 1) / 2."""
    pairs = n * (n + 1) / 2 if causal else n * n
    return 2.0 * products * heads * pairs * d


def sgemm_rate(rounds: int = 9) -> float:
    """FLOP/s of the better of MKL and OpenBLAS at 2048^3."""
    a = torch.randn(2048, 2048)
    b = a.numpy()
    best = 0.0
    for call in (lambda: a @ a, lambda: b @ b):
        call()
        best = max(best, 2 * 2048.0**3 / float(np.median([seconds(call) for _ in range(rounds)])))
    return best


def bandwidth(rounds: int = 9) -> float:
    """Bytes per second of a sum over 1 GiB, both cores."""
    x = torch.zeros(2**28)
    x.sum()
    return x.numel() * 4 / float(np.median([seconds(x.sum) for _ in range(rounds)]))


def dense(n: int, d: int, causal: bool, dtype: torch.dtype, backward: bool, rounds: int) -> dict[str, Any]:
    q, k, v = (normal(1, 8, n, d, dtype=dtype).requires_grad_(backward) for _ in range(3))
    g = normal(1, 8, n, d, dtype=dtype)
    problem, tensors = host(bind(q, k, v, Options(causal=causal)))
    dout = to_numpy(g)

    def ours() -> None:
        out, lse = native.forward(problem, tensors)
        if backward:
            native.backward(problem, tensors, out, lse, dout, None, frozenset("qkv"))

    def theirs() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        if backward:
            out.backward(g)

    found = compare(ours, theirs, rounds)
    found["gflops"] = pair_flops(n, d, 8, causal, 7 if backward else 2) / found["ours_ms"] / 1e6
    return found


def naive(n: int, d: int, rounds: int) -> dict[str, Any]:
    q, k, v = (normal(1, 8, n, d) for _ in range(3))
    call = host(bind(q, k, v, Options()))
    return compare(
        lambda: native.forward(*call), lambda: torch.softmax(q @ k.transpose(-1, -2) / d**0.5, -1) @ v, rounds
    )


def windowed(rounds: int) -> dict[str, Any]:
    n, i = 8192, torch.arange(8192)
    q, k, v = (normal(1, 8, n, 64) for _ in range(3))
    keep = (i[:, None] >= i[None, :]) & (i[:, None] - i[None, :] < 256)
    call = host(bind(q, k, v, Options(causal=True, window=(255, 0))))
    return compare(
        lambda: native.forward(*call), lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=keep), rounds
    )


def packed(rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.choice(np.arange(1, 16384), 63, replace=False))
    cu = np.concatenate([[0], cuts, [16384]]).astype(np.int32)
    lengths = np.diff(cu)
    q, k, v = (normal(16384, 8, 64) for _ in range(3))
    padded = [torch.zeros(64, 8, int(lengths.max()), 64) for _ in range(3)]
    for b, (start, stop) in enumerate(itertools.pairwise(cu)):
        for to, x in zip(padded, (q, k, v), strict=True):
            to[b, :, : stop - start] = x[start:stop].transpose(0, 1)
    cus = torch.from_numpy(cu)
    call = host(bind_varlen(q, k, v, cus, cus, None, None, Options(causal=True)))
    found = compare(
        lambda: native.forward(*call), lambda: F.scaled_dot_product_attention(*padded, is_causal=True), rounds
    )
    return found | {"longest": int(lengths.max())}


def decode(rounds: int) -> dict[str, Any]:
    q = normal(1, 32, 1, 128, dtype=torch.bfloat16)
    k, v = (normal(1, 8, 32768, 128, dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.tensor([32768], dtype=torch.int32)
    problem, tensors = host(bind_decode(q, k, v, lengths, None, Options()))
    native.forward(problem, tensors)
    took = float(np.median([seconds(lambda: native.forward(problem, tensors)) for _ in range(rounds)]))
    moved = 2 * k.numel() * 2 / took
    peak = bandwidth()
    return {
        "ours_ms": took * 1e3,
        "bytes_per_s": moved,
        "bandwidth": peak,
        "ratio": moved / peak,
        "rounds": rounds,
    }


def cases(rounds: int) -> list[tuple[str, float, Callable[[], dict[str, Any]]]]:
    """(name, least ratio, measurement)."""
    found: list[tuple[str, float, Callable[[], dict[str, Any]]]] = []
    sizes = ((1024, 64, 1.4), (4096, 64, 1.4), (4096, 128, 1.15))
    for dtype, bar in ((torch.float32, None), (torch.bfloat16, 1.1), (torch.float16, 1.6)):
        for n, d, own in sizes:
            for causal in (False, True):
                name = f"{str(dtype)[6:]} forward (1,8,{n},{d}) {'causal' if causal else 'full'}"
                found.append((name, bar or own, lambda a=(n, d, causal, dtype): dense(*a, False, rounds)))
    for d in (64, 128):
        for causal in (False, True):
            name = f"float32 forward+backward (1,8,2048,{d}) {'causal' if causal else 'full'}"
            found.append((name, 1.2, lambda a=(2048, d, causal, torch.float32): dense(*a, True, rounds)))
    found.append(
        ("float32 window 256 of 8192, D=64, against SDPA with the mask", 8.0, lambda: windowed(rounds))
    )
    found.append(
        (
            "float32 packed, 64 documents, 16384 tokens, causal, against padded SDPA",
            3.0,
            lambda: packed(rounds),
        )
    )
    found.append(
        ("bfloat16 decode M=1 H=32 Hkv=8 N=32768 D=128, of memory bandwidth", 0.8, lambda: decode(rounds))
    )
    found.append(("float32 forward (1,8,4096,64) against naive eager", 4.0, lambda: naive(4096, 64, rounds)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="record to write")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="substring of the cases' names")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    results = []
    rate = sgemm_rate()
    print(f"sgemm {rate / 1e9:.0f} GFLOP/s, {native.simd_target()}")
    for name, bar, measure in cases(given.rounds):
        if given.only not in name:
            continue
        found = {"name": name, "bar": bar, **measure()}
        found["met"] = found["ratio"] >= bar
        if "gflops" in found and name.startswith("float32 forward ("):
            found["of_sgemm"] = found["gflops"] * 1e9 / rate
        results.append(found)
        more = f"  {found['of_sgemm']:.2f} of sgemm" if "of_sgemm" in found else ""
        print(
            f"{'ok  ' if found['met'] else 'MISS'} {found['ratio']:6.2f} (bar {bar}) {found['ours_ms']:8.1f} ms {name}{more}",
            flush=True,
        )
    protocol = {
        "description": __doc__,
        "threads": given.threads,
        "pause_s": PAUSE,
        "sgemm_gflops": rate / 1e9,
        "scheduling": {0: "normal", 1: "fifo"}.get(os.sched_getscheduler(0), "other"),
        "load_average": os.getloadavg()[0],
        "simd": loader.describe(),
    }
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(records.record("measure", protocol, results), indent=2) + "\n")


if __name__ == "__main__":
    main()
