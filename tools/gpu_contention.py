"""Do results change while other processes share the GPU?

Usage: gpu_contention.py [CALLS] [PROCESSES] [matmul|self|contexts]

Every configuration of the Hopper kernels, and variants of the forward, runs alone, where it must repeat its bits; then
CALLS times while PROCESSES others multiply matrices, run the same kernel, or come and go (``contexts``). Outputs start
from a mark, so that rows that nobody wrote are told from rows that are wrong. ``triton``, SDPA flash and cuDNN are held to
the same. Prints what was wrong, where, and the tile counters after it; ends with 1 if anything was. What it is for: an
mbarrier in memory that tiles had taken over (``offline.idle_mbarriers``) made results wrong, most of the time beside others
and hardly ever alone.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import gpu_record  # noqa: F401  (puts the package of this checkout on the path)
from attnproof.backends import hopper
from attnproof.backends.hopper import arguments as args
from attnproof.backends.hopper import configs, counters, launch
from attnproof.backends.triton import launch as portable
from attnproof.problem import Options, bind

MARK = 777.0
SHOWN = 4  # wrong calls that are described


@dataclass(frozen=True)
class Case:
    """One call, and what its configuration has other than the table's row."""

    name: str
    d: int
    n: int
    causal: bool
    change: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("64 causal", 64, 16384, True),
    Case("64 causal, mbarrier", 64, 16384, True, {"named_release": False}),
    Case("64 causal, a tile per program", 64, 16384, True, {"dynamic": False}),
    Case("64 causal, both", 64, 16384, True, {"dynamic": False, "named_release": False}),
    Case("64 causal, two stages", 64, 16384, True, {"stages": 2}),
    Case("64 causal, out in q", 64, 16384, True, {"own_out": False}),
    Case("64 causal, 8192", 64, 8192, True),
    Case("64 full", 64, 16384, False),
    Case("64 full, mbarrier", 64, 16384, False, {"named_release": False}),
    Case("64 full, two warpgroups", 64, 16384, False, {"warpgroups": 2, "registers": (240, 24)}),
    Case("128 full", 128, 16384, False),
    Case("128 full, mbarrier", 128, 16384, False, {"named_release": False}),
    Case("128 causal", 128, 16384, True),
    Case("128 causal, named", 128, 16384, True, {"named_release": True}),
    Case("256 causal", 256, 16384, True),
)


GRADIENTS = tuple(
    (d, causal, deterministic)
    for d in (64, 128, 256)
    for causal in (False, True)
    for deterministic in (True, False)
    if deterministic or d <= 128
)


def made(case: Case) -> tuple[Any, Any, Any]:
    """(problem, tensors, plan) of a case."""
    torch.manual_seed(case.n + case.d)
    shape = (16384 // case.n, 2048 // case.d, case.n, case.d)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    problem, tensors = bind(q, k, v, Options(causal=case.causal))
    facts = configs.facts(problem, replace(configs.choose(problem), **case.change))
    numbers = (*args.factors(problem, facts), *args.numbers(problem, facts, tensors))
    units = torch.cuda.get_device_properties(0).multi_processor_count
    plan = launch.Plan(facts, args.programs(problem, facts, units), numbers)
    return problem, tensors, plan


def call(problem: Any, tensors: Any, plan: Any) -> tuple[Any, Any]:
    """One launch into marked memory."""
    out = torch.full_like(tensors.q, MARK)
    lse = torch.full(problem.out_shape[:-1], MARK, device="cuda")
    launch.run(plan, tensors, out, lse)
    return out, lse


def warm(case: Case) -> str:
    """Compile in a worker; what went wrong, or nothing."""
    try:
        call(*made(case))
        torch.cuda.synchronize()
    except Exception as error:  # a variant may not fit
        return f"{case.name}: {str(error)[:160]}"
    return ""


def context() -> None:
    """What a process does that only comes and goes."""
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()


def noise(kind: str, go: Any, stop: Any) -> None:
    """Use the GPU while ``go`` is set."""
    if kind == "contexts":
        while not stop.is_set():
            if go.wait(0.1):
                one = multiprocessing.get_context("spawn").Process(target=context)
                one.start()
                one.join()
        return
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    mine = made(CASES[0]) if kind == "self" else None
    first = None
    while not stop.is_set():
        if not go.wait(0.1):
            continue
        if mine is None:
            for _ in range(8):
                a @ a
        else:
            out, lse = call(*mine)
            if first is None:
                first = out, lse
            elif not (torch.equal(first[0], out) and torch.equal(first[1], lse)):
                print("  noise: its own result changed", flush=True)
        torch.cuda.synchronize()


def describe(got: Any, right: Any, plan: Any) -> str:
    """Which rows are off, and how."""
    out, lse = got
    bad = (out != right[0]).any(-1) | (lse != right[1])
    where = bad.nonzero()
    rows = plan.facts.block_m
    tiles = sorted({(int(b), int(h), int(i) // rows) for b, h, i in where[:: max(1, len(where) // 4096)]})
    groups = sorted({int(i) % rows // 64 for _, _, i in where[:4096]})
    unwritten = int((out == MARK).all(-1).sum()), int((lse == MARK).sum())
    lse_bad = int((lse != right[1]).sum())
    error = ((out.float() - right[0].float()).norm() / right[0].float().norm()).item()
    columns = (out != right[0]).flatten(0, 2).any(0).nonzero().flatten().tolist()
    return (
        f"rows {len(where)} (lse {lse_bad}) unwritten out/lse {unwritten} nan {int(out.isnan().any(-1).sum())} rel {error:.3g} "
        f"tiles {len(tiles)} {tiles[:6]} warpgroups {groups} columns {len(columns)} {columns[:4]}"
    )


def same(got: Any, right: Any) -> bool:
    """Whether out and lse have the same bits."""
    return all(torch.equal(x, y) for x, y in zip(got, right, strict=True))


def alone_then_not(case: Case, calls: int, go: Any) -> int:
    """How often a case was wrong beside others."""
    problem, tensors, plan = made(case)
    right = call(problem, tensors, plan)
    theirs = portable.forward(problem, tensors)[0].float()
    error = ((right[0].float() - theirs).norm() / theirs.norm()).item()
    steady = all(same(call(problem, tensors, plan), right) for _ in range(20))
    print(
        f"{case.name}: alone {'steady' if steady else 'NOT STEADY'}, against triton {error:.3g}", flush=True
    )
    go.set()
    time.sleep(0.5)
    bad, began = 0, time.time()
    for at in range(calls):
        got = call(problem, tensors, plan)
        torch.cuda.synchronize()
        pair = counters.pair(0, torch._C._cuda_getCurrentRawStream(0)).tolist()
        if not same(got, right) or any(pair):
            bad += 1
            if bad <= SHOWN:
                print(f"  call {at}: counters {pair} {describe(got, right, plan)}", flush=True)
    took = (time.time() - began) / calls * 1e3
    print(f"{case.name}: {bad} of {calls} wrong, {took:.1f} ms a call", flush=True)
    bad += not steady
    if not case.change:
        bad += controls(problem, tensors, case, max(calls // 4, 1))
    go.clear()
    return bad


def backward(d: int, causal: bool, deterministic: bool) -> Callable[[], list[Any]]:
    """A call for the gradients; dq of the pass with atomics is rounded to what two orders of its sums agree on."""
    torch.manual_seed(d)
    q, k, v, dout = (
        torch.randn(2, 2048 // d, 8192, d, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    problem, tensors = bind(q, k, v, Options(causal=causal))
    out, lse = portable.forward(problem, tensors)
    problem = replace(problem, deterministic=deterministic)

    def run() -> list[Any]:
        got = hopper.backward(problem, tensors, out, lse, dout, None, frozenset("qkv"))
        return [got.dq if deterministic else coarse(got.dq), got.dk, got.dv]

    return run


def coarse(x: Any) -> Any:
    """Steps of a 64th of the largest value of each row."""
    return (x.float() / x.float().abs().amax(-1, keepdim=True).clamp_min(1e-9) * 64).round() / 64


def near(got: list[Any], right: list[Any]) -> bool:
    """The same bits; of what is coarse, at most one step apart."""
    steps = [(x.float() - y.float()).abs().max().item() for x, y in zip(got, right, strict=True)]
    return all(
        step <= (1 / 32 if x.dtype == torch.float32 else 0) for step, x in zip(steps, got, strict=True)
    )


def backward_alone_then_not(d: int, causal: bool, deterministic: bool, calls: int, go: Any) -> int:
    """How often gradients were wrong beside others."""
    name = f"backward {d} {'causal' if causal else 'full'}{'' if deterministic else ', one pass'}"
    run = backward(d, causal, deterministic)
    right = run()
    steady = all(near(run(), right) for _ in range(10))
    go.set()
    time.sleep(0.5)
    bad = sum(not near(run(), right) for _ in range(calls))
    go.clear()
    print(f"{name}: alone {'steady' if steady else 'NOT STEADY'}; {bad} of {calls} wrong", flush=True)
    return bad + (not steady)


def warm_backward(at: tuple[int, bool, bool]) -> None:
    """Compile in a worker."""
    backward(*at)()
    torch.cuda.synchronize()


def controls(problem: Any, tensors: Any, case: Case, calls: int) -> int:
    """How often the others were not what they were."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(at: Any) -> Any:
        with sdpa_kernel(at):
            return torch.nn.functional.scaled_dot_product_attention(*tensors[:3], is_causal=case.causal)

    runs: dict[str, Callable[[], Any]] = {
        "triton": lambda: portable.forward(problem, tensors)[0],
        "flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
        "cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
    }
    found = 0
    for name, run in runs.items():
        right = run()
        wrong = sum(not torch.equal(run(), right) for _ in range(calls))
        if wrong:
            print(f"  control {name}: {wrong} of {calls} differ", flush=True)
        found += wrong
    return found


def main() -> None:
    calls, many = (int(x) for x in (*sys.argv[1:3], "100", "4")[:2]) if len(sys.argv) > 2 else (100, 4)
    kind = sys.argv[3] if len(sys.argv) > 3 else "matmul"
    if kind not in ("matmul", "self", "contexts"):
        sys.exit(f"kind: expected matmul, self or contexts, got {kind!r}")
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(8) as pool:
        said = pool.map(warm, CASES, chunksize=1)
        pool.map(warm_backward, GRADIENTS, chunksize=1)
    for line in filter(None, said):
        print(line, flush=True)
    go, stop = spawn.Event(), spawn.Event()
    others = [spawn.Process(target=noise, args=(kind, go, stop)) for _ in range(many)]
    for other in others:
        other.start()
    try:
        todo = [case for case, failed in zip(CASES, said, strict=True) if not failed]
        wrong = sum(alone_then_not(case, calls, go) for case in todo)
        wrong += sum(backward_alone_then_not(*at, calls, go) for at in GRADIENTS)
    finally:
        stop.set()
        for other in others:
            other.join()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
