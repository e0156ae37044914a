"""Tests that may hang a GPU: every one of them gets a verdict, whatever the others do.

    python tools/gpu_trial.py [-k EXPRESSION] [--jobs 10] [--limit 120] [--minutes 9] [--record FILE] [TEST ...]

Without words: what is on trial in tests/gpu/test_hopper.py. Tests run in processes that note what they begin and how it ends.
A process is killed when one test takes longer than ``--limit`` seconds: that test hung, and the others go on in a new
process, as they do behind a failure, which may leave a broken context. ``--minutes`` ends it all, and says what did not run.
Leaves with 1 unless every test passed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ON_TRIAL = ("tests/gpu/test_hopper.py", "-k", "packed or bounds")
JOURNAL = "ATTNPROOF_TRIAL_JOURNAL"
PYTEST = (
    *(sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-q", "-x"),
    *("-p", "no:cacheprovider", "-p", "gpu_trial"),
)
CHUNK = 12  # tests per process: starting one takes longer than most tests
Verdict = tuple[str, str]  # passed, failed, skipped, hung, died or not run; and a line about it


# ---- inside of the processes, where pytest loads this file as a plugin ----


def note(*entry: str) -> None:
    with Path(os.environ[JOURNAL]).open("a") as journal:
        journal.write(json.dumps(entry) + "\n")


def name_of(nodeid: str, location: tuple[str, int | None, str]) -> str:
    """What pytest finds it by from the root, also where its file lies elsewhere."""
    return f"{location[0]}::{nodeid.partition('::')[2]}"


def pytest_collection_finish(session: Any) -> None:
    for item in session.items:
        note("collected", name_of(item.nodeid, item.location))


def pytest_runtest_logstart(nodeid: str, location: tuple[str, int | None, str]) -> None:
    note("began", name_of(nodeid, location))


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or not report.passed:
        last = "" if report.passed else str(report.longrepr).strip().splitlines()[-1]
        note(report.outcome, name_of(report.nodeid, report.location), last)


# ---- outside of them ----


def start(arguments: list[str], journal: Path) -> subprocess.Popen[bytes]:
    """A process of tests that ends with the first failure; what it says lies beside its journal."""
    own = {
        "PYTHONPATH": os.pathsep.join(str(ROOT / at) for at in ("src", "tools")),
        "OMP_NUM_THREADS": "1",  # what is expected comes from the host, where many of these share the cores
        "ATTNPROOF_TEST_TRIAL": "1",
        JOURNAL: str(journal),
    }
    with said(journal).open("w") as out:
        return subprocess.Popen(
            [*PYTEST, *arguments],
            cwd=ROOT,
            env={**os.environ, **own},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def said(journal: Path) -> Path:
    return journal.with_suffix(".txt")


def last_line(journal: Path) -> str:
    return (said(journal).read_text(errors="replace").strip().splitlines() or [""])[-1]


def waited(journal: Path) -> str:
    """Where a process was that has been stopped by SIGABRT: pytest's fault handler writes the innermost call first."""
    _, found, calls = said(journal).read_text(errors="replace").rpartition("(most recent call first):\n")
    return calls.partition("\n")[0].strip() if found else "nowhere in Python"


def entries(journal: Path) -> list[list[str]]:
    """What a process has noted so far."""
    lines = journal.read_text().splitlines(keepends=True) if journal.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process of ours and what it started, first so that it says where it is; a busy driver may keep it longer."""
    for how, seconds in ((signal.SIGABRT, 5), (signal.SIGKILL, 30)):
        try:
            os.killpg(process.pid, how)
            process.wait(seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
    if process.poll() is None:
        print(f"process {process.pid} does not end", flush=True)


def watch(tests: list[str], limit: float, deadline: float, journal: Path) -> dict[str, Verdict]:
    """Verdicts of one process; tests without one are still to be run."""
    process = start(tests, journal)
    seen, since = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        found = len(entries(journal))
        if found != seen:
            seen, since = found, time.monotonic()
        if time.monotonic() - since > limit or time.monotonic() > deadline:
            kill(process)
            break
    noted = entries(journal)
    verdicts: dict[str, Verdict] = {entry[1]: (entry[0], entry[2]) for entry in noted if len(entry) == 3}
    if time.monotonic() > deadline:
        return verdicts
    running = [name for kind, name, *_ in noted if kind == "began" and name not in verdicts]
    if not running and not verdicts:
        running = tests[:1]  # it ended before it came to its first test
    hung = time.monotonic() - since > limit
    word: Verdict = ("hung", f"{limit:.0f} s, in {waited(journal)}") if hung else ("died", last_line(journal))
    return verdicts | dict.fromkeys(running, word)


def lane(
    tests: list[str], limit: float, deadline: float, folder: Path, tell: Callable[[str, Verdict], None]
) -> dict[str, Verdict]:
    """Verdicts of all tests of a chunk, one process after the other."""
    verdicts: dict[str, Verdict] = {}
    rest = tests
    while rest and time.monotonic() < deadline:
        found = watch(rest, limit, deadline, folder / f"{abs(hash((*rest,)))}.jsonl")
        for name, verdict in found.items():
            tell(name, verdict)
        verdicts |= found
        rest = [name for name in rest if name not in verdicts]
    return verdicts | dict.fromkeys(rest, ("not run", ""))


def collect(arguments: list[str], folder: Path) -> list[str]:
    """Names of the tests."""
    journal = folder / "collected.jsonl"
    start(["--collect-only", *arguments], journal).wait()
    return [entry[1] for entry in entries(journal) if entry[0] == "collected"]


def trial(arguments: list[str], jobs: int, limit: float, minutes: float) -> dict[str, Verdict]:
    """Verdicts of all tests; neighbours go to different processes, so that a short run has seen every kind."""
    deadline = time.monotonic() + 60 * minutes

    def tell(name: str, verdict: Verdict) -> None:
        print(verdict[0], name.partition("::")[2], verdict[1], flush=True)

    with tempfile.TemporaryDirectory() as kept, ThreadPoolExecutor(jobs) as pool:
        folder = Path(kept)
        tests = collect(arguments, folder)
        n_chunks = max(jobs, -(-len(tests) // CHUNK))
        chunks = [tests[at::n_chunks] for at in range(n_chunks)]
        found = pool.map(lambda chunk: lane(chunk, limit, deadline, folder, tell), chunks)
        return {name: verdict for each in found for name, verdict in each.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tests", nargs="*")
    parser.add_argument("-k", dest="expression", default="")
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--limit", type=float, default=120.0)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--record", type=Path)
    asked = parser.parse_args()
    arguments = [*asked.tests, *(("-k", asked.expression) if asked.expression else ())] or list(ON_TRIAL)
    verdicts = trial(arguments, asked.jobs, asked.limit, asked.minutes)
    if asked.record is not None:
        asked.record.write_text(json.dumps(verdicts, indent=1) + "\n")
    print("---")
    for name, (word, line) in verdicts.items():
        if word != "passed":
            print(word, name, line)
    counts = Counter(word for word, _ in verdicts.values())
    print(", ".join(f"{count} {word}" for word, count in counts.items()) or "no test")
    sys.exit(0 if set(counts) == {"passed"} else 1)


if __name__ == "__main__":
    main()
