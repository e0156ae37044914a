"""The MI50 kernels' source run as CUDA on an NVIDIA GPU: random calls, the replay of one, and a compile-only proof.

    python tools/mi50_twin.py fuzz --minutes 20 [--seed 0] [--workers 12]     writes results/<device>/mi50-twin.json
    python tools/mi50_twin.py fuzz --minutes 5 --more                         adds to it what the seeds behind its last show
    python tools/mi50_twin.py replay SEED ...
    python tools/mi50_twin.py compile [--ptxas] [--clang]                     needs no GPU

What it shows is the algorithm and its bookkeeping, on real threads. It says nothing about an AMD GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

from gpu_record import ROOT, folder, records, write

sys.path.insert(0, str(ROOT))

CANDIDATE = "dot2: HIP source compiled as CUDA"
SAYS = (
    "The MI50 kernels' source ran as CUDA on the NVIDIA GPU named in `environment`. This tests the algorithm; it says "
    "nothing about AMD code, an AMD GPU or its speed."
)
JUDGED = "float64, with the parity suite's tolerances: out, lse and every gradient"
MOST_FAILURES = 50
PATIENCE = 120.0  # seconds that a worker is given to finish its last call


def poison() -> None:
    """Unwritten memory is NaN, as in the test suite."""
    import torch
    from tests.conftest import poison_torch, poisoned

    for name in ("empty", "empty_like", "empty_strided"):
        setattr(torch, name, poisoned(getattr(torch, name), poison_torch))


def work(next_seed: Any, stop: Any, told: Any) -> None:
    """Take seeds until told to stop; tell of each that it starts, and then its rows and dtype and how it failed."""
    import torch
    from tests.mi50 import fuzz, twin

    poison()
    torch.set_num_threads(1)
    runner = twin.twin()
    while not stop.is_set():
        with next_seed.get_lock():
            seed = next_seed.value
            next_seed.value += 1
        told.send((seed, None, ""))
        case, failure = fuzz.random_case(seed), ""
        try:
            fuzz.check(seed, runner)
        except Exception as error:
            failure = "".join(traceback.format_exception_only(error)).strip()[:2000]
        told.send((seed, f"{case.rows}, {case.dtype}", failure))
        if failure and not failure.startswith("AssertionError"):
            return  # the context may be lost: a fresh process goes on


@dataclass
class Progress:
    """What the workers have told so far."""

    begun: float = field(default_factory=time.monotonic)
    shown: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def fail(self, seed: int, failure: str) -> None:
        """Note a failure, and say how to see it again."""
        self.failures.append((seed, failure))
        print(f"\nseed {seed} FAILED: {failure.splitlines()[0]}\n{replay_of(seed)}", flush=True)

    @property
    def minutes(self) -> float:
        """Since the beginning."""
        return (time.monotonic() - self.begun) / 60

    def show(self) -> None:
        """The line once a second in place, on a terminal; else every quarter of a minute."""
        here = sys.stdout.isatty()
        if time.monotonic() - self.shown >= (1 if here else 15):
            self.shown = time.monotonic()
            print(f"\r{self.line()}" if here else self.line(), end="" if here else "\n", flush=True)

    def line(self) -> str:
        """What a reader wants to know while it runs."""
        return f"{self.minutes:5.1f} min: {self.kinds.total()} calls, {len(self.failures)} failures"


def replay_of(seed: int) -> str:
    return f"python tools/mi50_twin.py replay {seed}"


@dataclass
class Worker:
    """A process, the end of the pipe that it tells through, and the seed it is at."""

    process: Any
    told: Any
    seed: int | None = None

    def take(self, progress: Progress) -> bool:
        """One message; False where there will be no more."""
        try:
            seed, kind, failure = self.told.recv()
        except EOFError:
            return False
        if kind is None:
            self.seed = seed
            return True
        self.seed = None
        progress.kinds[kind] += 1
        if failure:
            progress.fail(seed, failure)
        return True

    def ended(self, progress: Progress, why: str) -> None:
        """It ends in the middle of a call: that is a failure of the call."""
        if self.seed is None:
            raise RuntimeError(f"a worker {why} outside of a call")
        progress.fail(self.seed, f"the process {why}")


class Pool:
    """Worker processes that share one counter of seeds; one that ends is replaced, for it may have lost the device."""

    def __init__(self, workers: int, first_seed: int) -> None:
        self._make = multiprocessing.get_context("spawn")
        self.stop, self.next_seed = self._make.Event(), self._make.Value("q", first_seed)
        self.workers = [self._start() for _ in range(workers)]

    def _start(self) -> Worker:
        ours, theirs = self._make.Pipe(duplex=False)
        process = self._make.Process(target=work, args=(self.next_seed, self.stop, theirs), daemon=True)
        # a Ctrl-C is for this process, which then lets the others finish; what is ignored stays so in a new program
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        process.start()
        signal.signal(signal.SIGINT, before)
        theirs.close()  # so that the end of the process is the end of the pipe
        return Worker(process, ours)

    def pump(self, progress: Progress, wait: float) -> None:
        """Take what is told within `wait` seconds."""
        ready = connection.wait([worker.told for worker in self.workers], wait)
        for worker in [one for one in self.workers if one.told in ready]:
            if worker.take(progress):
                continue
            self.workers.remove(worker)
            worker.process.join()
            if worker.process.exitcode and not (self.stop.is_set() and worker.seed is None):
                worker.ended(progress, f"ended with {worker.process.exitcode}")
            if not self.stop.is_set():
                self.workers.append(self._start())

    def finish(self, progress: Progress) -> None:
        """Let calls in progress end; what does not end is a failure."""
        self.stop.set()
        until = time.monotonic() + PATIENCE
        while self.workers and time.monotonic() < until:
            self.pump(progress, 0.2)
        for worker in self.workers:
            worker.process.terminate()
            if worker.seed is not None:
                worker.ended(progress, f"did not end within {PATIENCE:.0f} s")


def code() -> str:
    """A name for all that was compiled and for the words around it."""
    from tests.mi50 import nvrtc

    from attnproof.backends.dot2 import source

    return source.digest(*(nvrtc.translated(source.text(kernel)) for kernel in source.FILES), *nvrtc.FLAGS)


def earlier(path: Path, device: str) -> list[dict[str, Any]]:
    """Rows of a record that more calls may join: of the same code, on such a device, and none that failed."""
    if not path.is_file():
        return []
    document = records.load(path)
    rows: list[dict[str, Any]] = document["results"]
    same = document["environment"]["device"] == device and all(row.get("code") == code() for row in rows)
    return rows if same and not any(row.get("failed") for row in rows) else []


def fuzz(minutes: float, first_seed: int, workers: int, into: Path | None, more: bool) -> int:
    import torch

    if not torch.cuda.is_available():
        print("torch sees no GPU: nothing was run", flush=True)
        return 1
    os.environ.setdefault("ATTNPROOF_TWIN_CACHE", tempfile.mkdtemp(prefix="attnproof-twin-"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    device = torch.cuda.get_device_name()
    into = into or ROOT / "results" / folder(device)
    before = earlier(into / "mi50-twin.json", device) if more else []
    seed = max([first_seed, *(row["last_seed"] + 1 for row in before)])
    rows = run(minutes, seed, workers)
    protocol = {
        "command": f"tools/mi50_twin.py fuzz --minutes {minutes:g} --seed {seed}{' --more' * more}",
        "workers": workers, "says": SAYS, "judged": JUDGED, "compiler": compiler_name(),
    }  # fmt: skip
    path = write("device", "mi50-twin", protocol, [*before, *rows], into)
    records.load(path)
    whole = [row for row in (*before, *rows) if "calls" in row]
    total = {name: round(sum(row[name] for row in whole), 2) for name in ("minutes", "calls", "failed")}
    print(
        f"wrote {path}: {', '.join(f'{total[name]} {name}' for name in total)} in {len(whole)} runs",
        flush=True,
    )
    return 1 if rows[0]["failed"] or not rows[0]["calls"] else 0


def run(minutes: float, seed: int, workers: int) -> list[dict[str, Any]]:
    """Random calls from this seed on, for so long: a row for the run and one for each call that failed."""
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)
    progress, pool, ended = Progress(), Pool(workers, seed), "by the clock"
    try:
        while progress.minutes < minutes and len(progress.failures) < MOST_FAILURES:
            pool.pump(progress, 1.0)
            progress.show()
    except KeyboardInterrupt:
        ended = "by a signal"
    pool.finish(progress)
    last, now = pool.next_seed.value - 1, records.environment("cuda")
    print(f"\n{progress.line()}; seeds {seed} to {last}, ended {ended}", flush=True)
    whole = {
        "case": "random calls", "calls": progress.kinds.total(), "calls_by_kind": dict(sorted(progress.kinds.items())),
        "failed": len(progress.failures), "minutes": round(progress.minutes, 2), "first_seed": seed, "last_seed": last,
        "ended": ended, "commit": now["commit"], "dirty": now["dirty"],
    }  # fmt: skip
    failed = [
        {"case": f"seed {at}", "seed": at, "status": "FAIL", "reason": why, "replay": replay_of(at)}
        for at, why in progress.failures
    ]
    return [{"candidate": CANDIDATE, "code": code(), **row} for row in (whole, *failed)]


def compiler_name() -> str:
    from tests.mi50 import nvrtc

    found = nvrtc.find()
    return "none" if found is None else f"{found.version} {' '.join(nvrtc.FLAGS)}"


def replay(seeds: list[int]) -> int:
    from tests.mi50 import fuzz, twin

    poison()
    failed = 0
    for seed in seeds:
        print(f"seed {seed}: {fuzz.described(fuzz.random_case(seed))}", flush=True)
        try:
            fuzz.check(seed, twin.twin())
            print("  agrees with float64")
        except AssertionError as error:
            failed = 1
            print(f"  {error}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    random = commands.add_parser("fuzz", help="random calls on the GPU against float64")
    random.add_argument("--minutes", type=float, default=20)
    random.add_argument("--seed", type=int, default=0, help="the first one")
    random.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    random.add_argument(
        "--more", action="store_true", help="go on behind the record's last seed, and keep its runs"
    )
    random.add_argument("--into", type=Path, help="folder of the record, results/<device> if left out")
    again = commands.add_parser("replay", help="the calls of these seeds, one after the other")
    again.add_argument("seeds", type=int, nargs="+")
    compiles = commands.add_parser("compile", help="every kernel of the suite to PTX, without a GPU")
    compiles.add_argument("--ptxas", action="store_true", help="on to machine code of sm_90, with spills")
    compiles.add_argument("--clang", action="store_true", help="by clang 19 as well")
    compiles.add_argument("--random", type=int, default=0, help="so many random calls too")
    given = parser.parse_args()
    if given.command == "fuzz":
        sys.exit(fuzz(given.minutes, given.seed, given.workers, given.into, given.more))
    if given.command == "replay":
        sys.exit(replay(given.seeds))
    from tests.mi50 import compile_twin

    sys.exit(compile_twin.main(ptxas=given.ptxas, clang=given.clang, random=given.random))


if __name__ == "__main__":
    main()
