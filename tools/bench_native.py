"""Measures the native backend against its bars and writes a record: `python tools/bench_native.py --out FILE`.

One process, A and B in turn, the order swapped each round, the median of the ratios. Between two measurements the
process sleeps: OpenMP workers spin for some milliseconds after torch has used them, and nobody shall pay for the
other's spinning. The rate of a large sgemm (the better of torch's MKL and NumPy's OpenBLAS) is taken in the same run,
beside the cases that are held against it. Each time stands beside a verdict on the same call and the same inputs, by
the judge of `attnproof measure` and `attnproof verify`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
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
from attnproof.measure.shapes import Shape
from attnproof.measure.verdict import Judge, Judged
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


def judged(shape: Shape, inputs: tuple[torch.Tensor, ...], found: tuple[Any, ...]) -> Judged:
    """The verdict on out (and the gradients, where the shape has them) of a dense call."""
    judge = Judge(shape, (*inputs, inputs[0])[:4])
    names = judge.expected()
    return judge(
        "native", "precise", {name: as_torch(x, inputs[0]) for name, x in zip(names, found, strict=True)}
    )


def verdict(*each: Judged) -> dict[str, Any]:
    """What a record says of one or more judged parts."""
    return {"ok": all(one.green for one in each), "each": [one.as_dict() for one in each]}


def as_torch(x: Any, like: torch.Tensor) -> torch.Tensor:
    """An array of ours as a tensor; bfloat16 comes as bits."""
    if isinstance(x, torch.Tensor):
        return x
    x = torch.from_numpy(np.ascontiguousarray(x))
    return x.view(torch.bfloat16) if like.dtype == torch.bfloat16 else x


def sgemm_rate(rounds: int = 9) -> float:
    """FLOP/s of the better of MKL and OpenBLAS at 2048^3."""
    a = torch.randn(2048, 2048)
    b = a.numpy()
    best = 0.0
    for call in (lambda: a @ a, lambda: b @ b):
        call()
        best = max(best, 2 * 2048.0**3 / float(np.median([seconds(call) for _ in range(rounds)])))
    return best


def dense(shape: Shape, rounds: int) -> dict[str, Any]:
    backward, causal, dtype = shape.run == "both", shape.causal, getattr(torch, shape.dtype)
    size = (shape.B, shape.H, shape.N, shape.D)
    q, k, v = (normal(*size, dtype=dtype).requires_grad_(backward) for _ in range(3))
    g = normal(*size, dtype=dtype)
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

    held_against_sgemm = dtype == torch.float32 and not (causal or backward) and shape.N == 4096
    rate = sgemm_rate() if held_against_sgemm else 0.0
    found: dict[str, Any] = compare(ours, theirs, rounds)
    found["gflops"] = shape.flop / found["ours_ms"] / 1e6
    if held_against_sgemm:
        found["sgemm_gflops"] = max(rate, sgemm_rate()) / 1e9
        found["of_sgemm"] = found["gflops"] / found["sgemm_gflops"]
    out, lse = native.forward(problem, tensors)
    grads = native.backward(problem, tensors, out, lse, dout, None, frozenset("qkv"))[:3] if backward else ()
    return found | {"verdict": verdict(judged(shape, (q, k, v, g), (out, *grads)))}


def naive(rounds: int) -> dict[str, Any]:
    shape = Shape(1, 8, 4096, 64, dtype="float32")
    q, k, v = (normal(1, 8, 4096, 64) for _ in range(3))
    call = host(bind(q, k, v, Options()))
    found = compare(
        lambda: native.forward(*call), lambda: torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v, rounds
    )
    return found | {"verdict": verdict(judged(shape, (q, k, v), native.forward(*call)[:1]))}


def windowed(rounds: int) -> dict[str, Any]:
    n, i = 8192, torch.arange(8192)
    q, k, v = (normal(1, 8, n, 64) for _ in range(3))
    keep = (i[:, None] >= i[None, :]) & (i[:, None] - i[None, :] < 256)
    call = host(bind(q, k, v, Options(causal=True, window=(255, 0))))
    found = compare(
        lambda: native.forward(*call), lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=keep), rounds
    )
    shape = Shape(1, 8, n, 64, dtype="float32", causal=True, left=255)
    return found | {"verdict": verdict(judged(shape, (q, k, v), native.forward(*call)[:1]))}


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
    out = as_torch(native.forward(*call)[0], q).transpose(0, 1)  # [T, H, D]
    each = []
    for b in {0, int(lengths.argmax()), 63}:
        document = slice(int(cu[b]), int(cu[b + 1]))
        rows = tuple(x[document].transpose(0, 1)[None] for x in (q, k, v))
        shape = Shape(1, 8, int(lengths[b]), 64, dtype="float32", causal=True)
        each.append(judged(shape, rows, (out[document].transpose(0, 1)[None],)))
    return found | {"longest": int(lengths.max()), "verdict": verdict(*each)}


def decode(rounds: int) -> dict[str, Any]:
    """Bytes per second of the cache, against a plain sum of the same bytes: on a virtual machine the rate depends on which
    pages they lie in, and that of a tensor of 1 GiB, taken beside, is another one.
    """
    q = normal(1, 32, 1, 128, dtype=torch.bfloat16)
    k, v = (normal(1, 8, 32768, 128, dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.tensor([32768], dtype=torch.int32)
    problem, tensors = host(bind_decode(q, k, v, lengths, None, Options()))
    words = [x.view(torch.float32) for x in (k, v)]
    tokens = 4  # one after the other, as they are decoded: the first call after a pause wakes a core up
    found = compare(
        lambda: [native.forward(problem, tensors) for _ in range(tokens)],
        lambda: [x.sum() for _ in range(tokens) for x in words],
        max(rounds, 25),
    )
    large = torch.zeros(2**28)
    large.sum()
    size, shape = tokens * 2 * k.numel() * 2, Shape(1, 32, 32768, 128, M=1, Hkv=8, dtype="bfloat16")
    return found | {
        "verdict": verdict(judged(shape, (q, k, v), native.forward(problem, tensors)[:1])),
        "bytes_per_s": size / found["ours_ms"] * 1e3,
        "bandwidth": size / found["theirs_ms"] * 1e3,
        "bandwidth_1gib": 4 * large.numel() / float(np.median([seconds(large.sum) for _ in range(rounds)])),
    }


def cases(rounds: int) -> list[tuple[str, float, Callable[[], dict[str, Any]]]]:
    """(name, least ratio, measurement)."""
    found: list[tuple[str, float, Callable[[], dict[str, Any]]]] = []
    sizes = ((1024, 64, 1.4), (4096, 64, 1.4), (4096, 128, 1.15))
    for dtype, bar in (("float32", None), ("bfloat16", 1.1), ("float16", 1.6)):
        for n, d, own in sizes:
            for causal in (False, True):
                name = f"{dtype} forward (1,8,{n},{d}) {'causal' if causal else 'full'}"
                shape = Shape(1, 8, n, d, dtype=dtype, causal=causal)
                more = 3 * rounds if n == 1024 else rounds
                found.append((name, bar or own, functools.partial(dense, shape, more)))
    for d in (64, 128):
        for causal in (False, True):
            name = f"float32 forward+backward (1,8,2048,{d}) {'causal' if causal else 'full'}"
            shape = Shape(1, 8, 2048, d, dtype="float32", causal=causal, run="both")
            found.append((name, 1.2, functools.partial(dense, shape, rounds)))
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
    found.append(("float32 forward (1,8,4096,64) against naive eager", 4.0, lambda: naive(rounds)))
    return found


MEMORY = """
import numpy as np
from attnproof.backends import native
from attnproof.problem import Options, bind
rng = np.random.default_rng(0)
q, k, v, dout = (rng.standard_normal((1, 8, 16384, 64), dtype=np.float32) for _ in range(4))
problem, tensors = bind(q, k, v, Options(causal=True))
# not ru_maxrss: a new process inherits that of the one that started it
def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))
before = status("VmRSS")
out, lse = native.forward(problem, tensors)
grads = native.backward(problem, tensors, out, lse, dout, None, frozenset("qkv"))
held = sum(x.nbytes for x in (out, lse, *grads[:3]))
print(status("VmHWM") - before - held)
"""


def memory(threads: int) -> dict[str, Any]:
    """Peak memory of forward and backward beyond inputs, outputs and gradients, in a process of its own."""
    environment = os.environ | {loader.THREADS: str(threads)}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], env=environment, capture_output=True, text=True, check=True
    )
    return {"extra_bytes": int(done.stdout), "limit_bytes": 64 * 2**20}


def bars(results: list[dict[str, Any]]) -> list[tuple[str, float, float, bool]]:
    """(case, wanted, found, green verdict): a line for each bar, and for each other measure that it may be held to."""
    lines = []
    for row in results:
        ok = row["verdict"]["ok"]
        lines.append((row["case"], row["bar"], row["ratio"], ok))
        if "of_sgemm" in row:
            share = 0.7 if ",64)" in row["case"] else 0.85
            lines.append((f"{row['case']}: share of sgemm", share, row["of_sgemm"], ok))
        if "bandwidth_1gib" in row:
            share = row["bytes_per_s"] / row["bandwidth_1gib"]
            lines.append((f"{row['case']}: of a sum over 1 GiB", row["bar"], share, ok))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="record to write")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="substring of the cases' names")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    print(f"sgemm {sgemm_rate() / 1e9:.0f} GFLOP/s, {native.simd_target()}")
    results, started, load = [], time.monotonic(), os.getloadavg()[0]
    for name, bar, measure in cases(given.rounds):
        if given.only in name:
            results.append({"candidate": "native", "case": name, "bar": bar, **measure()})
            row = results[-1]
            print(
                f"  {time.monotonic() - started:4.0f} s  {row['ratio']:6.2f}  {row['ours_ms']:8.1f} ms  {name}",
                flush=True,
            )
    lines = bars(results)
    extra = memory(given.threads)
    print(f"{'':4} {'bar':>6} {'found':>6}  verdict")
    for name, bar, found, ok in lines:
        print(
            f"{'ok' if ok and found >= bar else 'MISS':4} {bar:6.2f} {found:6.2f}  {'green' if ok else 'RED':7}  {name}"
        )
    less = extra["extra_bytes"] < extra["limit_bytes"]
    print(
        f"{'ok' if less else 'MISS':4} {64:6} {extra['extra_bytes'] / 2**20:6.1f}  MiB beyond inputs and outputs at N=16384"
    )
    missed = [name for name, bar, found, ok in lines if not (ok and found >= bar)]
    protocol = {
        "description": __doc__,
        "threads": given.threads,
        "pause_s": PAUSE,
        "load_average": {"before": load, "after": os.getloadavg()[0]},
        "memory": extra,
        "missed": missed,
        "simd": loader.describe(),
    }
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(records.record("measure", protocol, results), indent=2) + "\n")


if __name__ == "__main__":
    main()
