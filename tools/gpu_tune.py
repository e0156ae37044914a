"""Time tile sizes of the Triton kernels on the GPU at hand, and say how far the table and the planner are off.

Usage: gpu_tune.py OUT [forward] [dkdv] [dq] [decode] [heavy] [WIDTH ...]      (all but heavy without words)

``heavy`` times calls that read or draw something for every pair (mask, bias, dropout), for their own rows of the table.

Candidates of a bucket are the table's row, the planner's first choices and what ``attnproof tune`` would try through
descriptors. All are compiled side by side, then timed in turn; the record names every time.
"""

from __future__ import annotations

import functools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnproof.backends.triton import cached, compat, configs, launch, registry, tuning
from attnproof.backends.triton.configs import Config, Pass
from attnproof.ledger import hardware, tiles
from attnproof.ledger.resources import STYLES, Job
from attnproof.problem import Options, bind, bind_decode
from gpu_measure import ROUNDS, TOKENS, WIDTH, bench, rotated
from gpu_record import write
from gpu_variants import HEAVY, options

PLANNED = 2  # first choices of the planner that are timed
SHARED = 232448
WORKERS = 15
PROTOCOL = {
    "dtype": "bfloat16",
    "shape": f"B * N = {TOKENS} tokens, H * D = {WIDTH}",
    "timer": "triton do_bench (L2 flushed before each call)",
    "statistic": f"median of {ROUNDS} rounds' medians, candidates in turn, each round from another one on",
}


@dataclass(frozen=True)
class Bucket:
    """One row of the table, at one length."""

    which: Pass
    width: int
    variant: str
    length: int

    def __str__(self) -> str:
        return f"{self.which} D={self.width} {self.variant} N={self.length}"

    @property
    def causal(self) -> bool:
        """Whether the option is set; a dense mask is none to the table."""
        return self.variant in ("causal", "dropout")

    @property
    def job(self) -> Job:
        """The same, as the planner knows it."""
        heads = WIDTH // self.width * (TOKENS // self.length)
        return Job("bfloat16", self.width, self.width, self.which, self.length, heads, self.causal)

    def call(self) -> tuple[Any, Any]:
        """(problem, tensors); see ``_call``."""
        return _call(self)

    def bind(self) -> tuple[Any, Any]:
        """Random inputs of this shape, bound."""
        torch.manual_seed(self.length + self.width)
        shape = (TOKENS // self.length, WIDTH // self.width, self.length, self.width)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        return bind(q, k, v, options(self.variant, shape[1], self.length))


_call = functools.cache(Bucket.bind)


def buckets(words: list[str]) -> list[Bucket]:
    widths = [int(word) for word in words if word.isdigit()] or [64, 128, 256]
    passes = [which for which in tuning.TUNED_PASSES if which in words] or list(tuning.TUNED_PASSES)
    if "heavy" in words:
        return [Bucket(p, w, variant, 8192) for p in passes for w in widths for variant in HEAVY]
    long = [Bucket(p, w, c, 8192) for p in passes for w in widths for c in ("full", "causal")]
    return long + [Bucket(p, 128, "full", 1024) for p in passes if p != "forward" and 128 in widths]


def planned(bucket: Bucket) -> list[Config]:
    """The planner's first choices for this kind of kernel."""
    found = tiles.plan(hardware.get("h200"), bucket.job, STYLES["wgmma"]).fitting[:PLANNED]
    tiles_of = (c.tile for c in found)
    return [Config(t.block_q, t.block_k, t.warps, t.stages, True, t.cap, narrowest=64) for t in tiles_of]


def candidates(bucket: Bucket) -> dict[Config, str]:
    """Configurations by where they come from."""
    problem, tensors = bucket.call()
    architecture = compat.architecture(tensors.q.get_device())
    found = {configs.choose(problem, bucket.which, architecture): "table"}
    for rank, config in enumerate(planned(bucket), 1):
        found.setdefault(config, f"planner {rank}")
    if bucket.causal:
        return found  # the search is made once, without a mask
    for config in tuning.candidates(bucket.which, bucket.width):
        fitted = configs.fitted(config, architecture)
        if config.tma and config.block_m * config.block_n >= 4096 and _fits(bucket, fitted):
            found.setdefault(fitted, "search")
    return found


def _fits(bucket: Bucket, config: Config) -> bool:
    """Whether tiles in flight fit shared memory by a coarse count; three stages pay only where queries wait for keys."""
    if config.num_stages > 2 and bucket.which != "dq":
        return False
    streamed = config.block_m if bucket.which == "dkdv" else config.block_n
    kept = config.block_n if bucket.which == "dkdv" else config.block_m
    return 4 * bucket.width * (kept + config.num_stages * streamed) <= SHARED


def runner(bucket: Bucket, config: Config) -> Callable[[], Any]:
    """The pass alone, launched with this configuration."""
    problem, tensors = bucket.call()
    out, lse = _forward_of(bucket)
    with registry.rehearse("sm90", {bucket.which: config}) as rehearsal:
        launch.forward(problem, tensors)
        if bucket.which != "forward":
            launch.backward(problem, tensors, out, lse, out, None, frozenset("qkv"))
    for tag, plan, arrays in rehearsal.plans:
        if tag.endswith(f" {bucket.which}"):
            plan(*arrays)  # the tile lists that the pass will read
    plan, arrays = next((plan, arrays) for tag, plan, arrays in rehearsal.plans if tag == bucket.which)
    return functools.partial(plan, *arrays)


@functools.cache
def _forward_of(bucket: Bucket) -> tuple[Any, Any]:
    return launch.forward(*bucket.call())


def warm(task: tuple[Bucket, Config]) -> None:
    """Compile one candidate in a worker process; what fails here says so when it is timed."""
    try:
        runner(*task)()
        torch.cuda.synchronize()
    except Exception as error:
        print("warm", task, str(error)[:100].replace("\n", " "), flush=True)


def timed(bucket: Bucket, found: dict[Config, str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    samples: dict[Config, list[float]] = {config: [] for config in found}
    reasons: dict[Config, str] = {}
    for turn in range(ROUNDS):
        for config in rotated(list(found), turn):
            if config in reasons:
                continue
            try:
                samples[config].append(bench(runner(bucket, config)))
            except Exception as error:
                reasons[config] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    for config, source in found.items():
        ms = None if config in reasons else statistics.median(samples[config])
        rows.append(
            {
                "candidate": "attnproof:triton",
                **{"pass": bucket.which, "D": bucket.width, "causal": bucket.causal, "N": bucket.length},
                **({"variant": bucket.variant} if bucket.variant in HEAVY else {}),
                "source": source,
                "config": asdict(config),
                "ms": ms,
                "reason": reasons.get(config, ""),
            }
        )
    return rows


def show(bucket: Bucket, rows: list[dict[str, Any]]) -> None:
    ran = sorted((row for row in rows if row["ms"]), key=lambda row: row["ms"])
    best = ran[0]["ms"]
    text = "; ".join(f"{_name(row)} {row['ms'] / best:.3f}" for row in ran[:4])
    own = "; ".join(
        f"{row['source']} {_name(row)} {row['ms'] / best:.3f}" for row in ran if row["source"] != "search"
    )
    print(f"{bucket}: {best:.3f} ms | {text} | {own}", flush=True)


def _name(row: dict[str, Any]) -> str:
    c = row["config"]
    tail = f" r{c['maxnreg']}" if c["maxnreg"] else ""
    return f"{c['block_m']}x{c['block_n']}w{c['num_warps']}s{c['num_stages']}{tail}"


def passes(words: list[str], into: Path) -> None:
    todo = {bucket: candidates(bucket) for bucket in buckets(words)}
    began = time.time()
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        pool.map(warm, [(bucket, config) for bucket, found in todo.items() for config in found], chunksize=1)
    print(f"{sum(map(len, todo.values()))} candidates compiled after {time.time() - began:.0f} s", flush=True)
    results: list[dict[str, Any]] = []
    for bucket, found in todo.items():
        rows = timed(bucket, found)
        results += rows
        show(bucket, rows)
        write("tune", "tune-heavy" if "heavy" in words else "tune", PROTOCOL, results, into)


# ---- decode: how many programs share a multiprocessor, and what each keeps in flight ----


DECODED = ((16, 8192), (16, 65536), (1, 65536), (1, 8192))
PAGES = (0, 16, 256)
STREAMS = tuple(
    Config(16, keys, warps, stages)
    for keys, warps, stages in ((64, 4, 4), (64, 4, 3), (64, 4, 5), (128, 4, 2), (128, 4, 3))
)
Decoded = tuple[int, int, int, Config, int]  # batch, length, page, configuration, programs a multiprocessor


def decode(into: Path) -> None:
    todo = [
        (batch, n, page, config, programs)
        for batch, n in DECODED
        for page in PAGES
        for config in STREAMS
        for programs in (1, 2)
    ]
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        pool.map(_warm_decode, todo, chunksize=1)
    results: list[dict[str, Any]] = []
    for batch, n in DECODED:
        for page in PAGES:
            rows = _decode_rows([at for at in todo if at[:3] == (batch, n, page)])
            results += rows
            rows = sorted(rows, key=lambda row: -row["GB/s"])
            text = "; ".join(f"{_name(row)} x{row['programs']} {row['GB/s']:.0f}" for row in rows[:6])
            print(f"decode B={batch} N={n} page={page}: {text}", flush=True)
    write("tune", "tune-decode", PROTOCOL, results, into)


@functools.lru_cache(maxsize=1)
def _decode_call(batch: int, n: int, page: int) -> tuple[Any, Any]:
    q = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, 8, n, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    lengths = torch.full((batch,), n, dtype=torch.int32, device="cuda")
    if not page:
        return bind_decode(q, k, v, lengths, None, Options(), None)
    table = torch.arange(batch * n // page, dtype=torch.int32, device="cuda").view(batch, -1)
    shape = (batch, 8, n // page, page, 128)
    pools = [x.view(shape).transpose(1, 2).reshape(-1, 8, page, 128) for x in (k, v)]
    return bind_decode(q, *pools, lengths, table, Options(), None)


def _decode_run(at: Decoded, *, small: bool = False) -> tuple[Callable[[], Any], int]:
    """The call under this configuration, and its splits; ``small`` runs the same kernels on one sequence."""
    batch, n, page, config, programs = at
    problem, tensors = _decode_call(1 if small else batch, n, page)
    planes = batch * problem.Hkv
    splits = cached.best_splits(132 * programs, planes, max(1, min(n // config.block_n // 2, 128)))
    configs.TABLE[configs.Key("sm90", "decode", 128)] = replace(
        config, num_stages=config.num_stages - bool(page)
    )
    registry.forget()
    cached._decode_shape.cache_clear()
    fixed = replace(problem, num_splits=splits)
    return lambda: launch.forward(fixed, tensors), splits


def _warm_decode(at: Decoded) -> None:
    try:
        _decode_run(at, small=True)[0]()
        torch.cuda.synchronize()
    except Exception as error:
        print("warm decode", at, str(error)[:100].replace("\n", " "), flush=True)


def _decode_rows(cell: list[Decoded]) -> list[dict[str, Any]]:
    """Rows of one shape, its candidates timed in turn."""
    samples: dict[Decoded, list[float]] = {at: [] for at in cell}
    reasons: dict[Decoded, str] = {}
    for turn in range(ROUNDS):
        for at in rotated(cell, turn):
            try:
                samples[at].append(bench(_decode_run(at)[0]))
            except Exception as error:
                reasons[at] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return [_decode_row(at, samples[at], reasons.get(at, "")) for at in cell]


def _decode_row(at: Decoded, samples: list[float], reason: str) -> dict[str, Any]:
    batch, n, page, config, programs = at
    rate = 0.0 if reason else 2 * batch * 8 * n * 128 * 2 / statistics.median(samples) / 1e6
    return {
        **{"candidate": "attnproof:triton", "pass": "decode", "B": batch, "N": n, "page": page},
        **{"config": asdict(config), "programs": programs, "splits": _decode_run(at)[1]},
        **{"GB/s": rate, "reason": reason},
    }


def main() -> None:
    into, words = Path(sys.argv[1]), sys.argv[2:]
    if "decode" in words or not words:
        decode(into)
    if words != ["decode"]:
        passes([word for word in words if word != "decode"], into)


if __name__ == "__main__":
    main()
