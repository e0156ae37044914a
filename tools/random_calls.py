"""Random calls in worker processes until the clock ends it: a seed says all of a call, and a record adds up over runs.

A tool brings `Calls`, which draws and judges; every worker makes its own. A call that ends its process or does not come
back is a failure of the call, and a fresh process goes on.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol

from gpu_record import ROOT, folder, records, write

sys.path.insert(0, str(ROOT))

MOST_FAILURES = 50
PATIENCE = 120.0  # seconds that one call may take, the compiler's included
REFUSED = "refused"


class Calls(Protocol):
    """What a worker does with a seed."""

    def kind(self, seed: int) -> str:
        """What sort of call it is, for the counts; ``REFUSED`` where the backend says that it does not serve it."""
        ...

    def check(self, seed: int) -> None:
        """Run it and hold it against what is right; AssertionError where it is wrong."""
        ...


def poison() -> None:
    """Unwritten memory is NaN, as in the test suite."""
    import torch
    from tests.conftest import poison_torch, poisoned

    for name in ("empty", "empty_like", "empty_strided"):
        setattr(torch, name, poisoned(getattr(torch, name), poison_torch))


def work(make: Callable[[], Calls], next_seed: Any, stop: Any, told: Any) -> None:
    """Take seeds until told to stop; tell of each that it starts, and then its kind and how it failed."""
    import torch

    poison()
    torch.set_num_threads(1)
    calls = make()
    while not stop.is_set():
        with next_seed.get_lock():
            seed = next_seed.value
            next_seed.value += 1
        told.send((seed, None, ""))
        kind, failure = "drawn", ""
        try:
            kind = calls.kind(seed)
            if kind != REFUSED:
                calls.check(seed)
        except Exception as error:
            failure = "".join(traceback.format_exception_only(error)).strip()[:2000]
        told.send((seed, kind, failure))
        if failure and not failure.startswith("AssertionError"):
            return  # the context may be lost: a fresh process goes on


@dataclass
class Progress:
    """What the workers have told so far.

    Attributes:
        replay: how to see a seed again.
    """

    replay: Callable[[int], str]
    begun: float = field(default_factory=time.monotonic)
    shown: float = 0.0
    refused: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def count(self, kind: str) -> None:
        """One more call."""
        if kind == REFUSED:
            self.refused += 1
        else:
            self.kinds[kind] += 1

    def fail(self, seed: int, failure: str) -> None:
        """Note a failure, and say how to see it again."""
        self.failures.append((seed, failure))
        print(f"\nseed {seed} FAILED: {failure.splitlines()[0]}\n{self.replay(seed)}", flush=True)

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
        refused = f", {self.refused} refused" if self.refused else ""
        return f"{self.minutes:5.1f} min: {self.kinds.total()} calls, {len(self.failures)} failures{refused}"


@dataclass
class Worker:
    """A process, the end of the pipe that it tells through, the seed it is at and since when."""

    process: Any
    told: Any
    seed: int | None = None
    since: float = 0.0

    def take(self, progress: Progress) -> bool:
        """One message; False where there will be no more."""
        try:
            seed, kind, failure = self.told.recv()
        except EOFError:
            return False
        if kind is None:
            self.seed, self.since = seed, time.monotonic()
            return True
        self.seed = None
        progress.count(kind)
        if failure:
            progress.fail(seed, failure)
        return True

    @property
    def late(self) -> bool:
        """Whether its call takes longer than any may."""
        return self.seed is not None and time.monotonic() - self.since > PATIENCE

    def ended(self, progress: Progress, why: str) -> None:
        """It ends in the middle of a call: that is a failure of the call."""
        if self.seed is None:
            raise RuntimeError(f"a worker {why} outside of a call")
        progress.fail(self.seed, f"the process {why}")


class Pool:
    """Worker processes that share one counter of seeds; one that ends or hangs is replaced."""

    def __init__(self, make: Callable[[], Calls], workers: int, first_seed: int) -> None:
        self._calls = make
        self._make = multiprocessing.get_context("spawn")
        self.stop, self.next_seed = self._make.Event(), self._make.Value("q", first_seed)
        self.workers = [self._start() for _ in range(workers)]

    def _start(self) -> Worker:
        ours, theirs = self._make.Pipe(duplex=False)
        given = (self._calls, self.next_seed, self.stop, theirs)
        process = self._make.Process(target=work, args=given, daemon=True)
        # a Ctrl-C is for this process, which then lets the others finish; what is ignored stays so in a new program
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        process.start()
        signal.signal(signal.SIGINT, before)
        theirs.close()  # so that the end of the process is the end of the pipe
        return Worker(process, ours)

    def pump(self, progress: Progress, wait: float) -> None:
        """Take what is told within `wait` seconds; end what does not come back."""
        ready = connection.wait([worker.told for worker in self.workers], wait)
        for worker in list(self.workers):
            if worker.told in ready and worker.take(progress):
                continue
            if worker.told in ready:
                worker.process.join()
                if worker.process.exitcode and not (self.stop.is_set() and worker.seed is None):
                    worker.ended(progress, f"ended with {worker.process.exitcode}")
            elif worker.late:
                worker.process.kill()
                worker.ended(progress, f"did not come back within {PATIENCE:.0f} s")
            else:
                continue
            self.workers.remove(worker)
            if not self.stop.is_set():
                self.workers.append(self._start())

    def finish(self, progress: Progress) -> None:
        """Let calls in progress end."""
        self.stop.set()
        while self.workers:
            self.pump(progress, 0.2)


def run(
    make: Callable[[], Calls], minutes: float, seed: int, workers: int, replay: Callable[[int], str]
) -> list[dict[str, Any]]:
    """Random calls from this seed on, for so long: a row for the run and one for each call that failed."""
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    progress, pool, ended = Progress(replay), Pool(make, workers, seed), "by the clock"
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
        "refused": progress.refused, "failed": len(progress.failures), "minutes": round(progress.minutes, 2),
        "first_seed": seed, "last_seed": last, "workers": workers, "ended": ended,
        "commit": now["commit"], "dirty": now["dirty"],
    }  # fmt: skip
    failed = [
        {"case": f"seed {at}", "seed": at, "status": "FAIL", "reason": why, "replay": replay(at)}
        for at, why in progress.failures
    ]
    return [whole, *failed]


@dataclass(frozen=True)
class Record:
    """The record that runs of one candidate add up in.

    Attributes:
        code: a name for what ran; calls of other code do not count together.
        protocol: what a reader must know besides the rows.
    """

    name: str
    candidate: str
    code: str
    protocol: dict[str, Any]
    into: Path

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.into / f"{self.name}.json"

    def earlier(self, device: str) -> list[dict[str, Any]]:
        """Rows that more calls may join: of the same code, on such a device, and none that failed."""
        if not self.path.is_file():
            return []
        document = records.load(self.path)
        rows: list[dict[str, Any]] = document["results"]
        same = document["environment"]["device"] == device
        same = same and all(
            (row["candidate"], row.get("code")) == (self.candidate, self.code) for row in rows
        )
        return rows if same and not any(row.get("failed") for row in rows) else []

    def add(self, before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> bool:
        """Write rows behind those of before; whether there were calls and none failed."""
        rows = [{"candidate": self.candidate, "code": self.code, **row} for row in rows]
        records.load(write("device", self.name, self.protocol, [*before, *rows], self.into))
        whole = [*before, rows[0]]
        minutes, calls, failed = (sum(row[name] for row in whole) for name in ("minutes", "calls", "failed"))
        print(f"wrote {self.path}: {calls} calls in {minutes:.1f} minutes, {failed} failed", flush=True)
        return bool(rows[0]["calls"]) and not rows[0]["failed"]


def options(parser: argparse.ArgumentParser) -> None:
    """Words that every tool of this kind takes."""
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument(
        "--more", action="store_true", help="go on behind the record's last seed, and keep its runs"
    )
    parser.add_argument("--into", type=Path, help="folder of the record, results/<device> if left out")


def fuzz(
    asked: argparse.Namespace,
    make: Callable[[], Calls],
    record: Callable[[Path], Record],
    replay: Callable[[int], str],
) -> int:
    """One run of a tool, and its record; 1 where a call failed or there was none."""
    import torch

    if not torch.cuda.is_available():
        print("torch sees no GPU: nothing was run", flush=True)
        return 1
    device = torch.cuda.get_device_name()
    kept = record(asked.into or ROOT / "results" / folder(device))
    before = kept.earlier(device) if asked.more else []
    seed = max([asked.seed, *(row["last_seed"] + 1 for row in before)])
    return 0 if kept.add(before, run(make, asked.minutes, seed, asked.workers, replay)) else 1
