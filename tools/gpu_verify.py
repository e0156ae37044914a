"""`attnproof verify --tier standard` over every kernel of a GPU, side by side, each in worker processes of its own.

    python tools/gpu_verify.py OUT                            everything that is here, from cold compiler caches
    python tools/gpu_verify.py OUT --warm --jobs 2 sdpa:cudnn torch:flex

Writes OUT/verify.json (counts, seconds and the calibration: z by kernel, dtype and tensor), OUT/findings-gpu.json (what
did not pass, by kernel, tensor and check, with the cases) and OUT/cases/NAME.json (every case of a kernel), all of them
again whenever a kernel is done, so that a run that is cut short has said what it knows. Leaves with 1 where a kernel of
ours fails; what others do are findings.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from attnproof.verify import findings, records, session, tiers
from attnproof.verify.calibration import calibration, kinds
from attnproof.verify.findings_gpu import suspects

LIMIT = 180.0  # seconds that a tier `standard` of one kernel may take
# how many processes share a kernel's cases; those that compile for each case get more
JOBS = {
    "attnproof:triton": 6,
    "attnproof:hopper": 4,
    "torch:flex": 6,
    "sdpa:flash": 2,
    "sdpa:cudnn": 2,
    "sdpa:efficient": 2,
    "sdpa:math": 2,
}
TOGETHER = 4  # programs of suspects that run at once, each in a process of its own
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def judge(word: str, asked: argparse.Namespace) -> dict[str, Any]:
    """The verify record of one kernel; one that cannot run here gives a record without results."""
    try:
        chosen = session.choose([word], [], asked.device)
    except ValueError as absent:
        return {"protocol": {"candidates": [], "seconds": 0.0, "absent": str(absent)}, "results": []}
    for candidate in chosen.candidates:
        candidate.peer = not candidate.own
    plan = session.Plan(
        tier=asked.tier,
        cases=tuple(case for case in tiers.cases(asked.tier) if asked.case in case.id),
        seed=asked.seed,
        sharpness="",
        jobs=asked.jobs or JOBS.get(word, 2),
        patience=asked.patience,
        budget=asked.budget,
    )
    return session.run(chosen, plan)


def ask_suspects(device: str) -> list[dict[str, Any]]:
    """What the smallest programs of suspected deviations show here."""
    with ThreadPoolExecutor(TOGETHER) as pool:
        seen = list(pool.map(findings.observe, suspects() if device != "cpu" else ()))
    return [
        {
            "candidate": one.finding.kernel,
            "group": "suspect",
            "case": one.finding.name,
            "reason": one.finding.title,
            "seen": one.status,
            "got": one.got,
            "right": one.right,
            "why": one.why,
        }
        for one in seen
    ]


def summary(word: str, document: dict[str, Any]) -> dict[str, Any]:
    """Counts and seconds of one kernel."""
    protocol, results = document["protocol"], document["results"]
    count = {
        s: sum(one["status"] == s for one in results) for s in ("PASS", "FAIL", "INVALID", "FINDING", "SKIP")
    }
    unbegun = sum(one["reason"].startswith("not begun") for one in results)
    return {
        "candidate": word,
        "group": "summary",
        "passed": count["PASS"],
        "failed": count["FAIL"] + count["INVALID"],
        "findings": count["FINDING"],
        "skipped": count["SKIP"],
        "not_begun": unbegun,
        "powerless": sum(one["status"] == "POWERLESS" for one in results),
        "seconds": protocol["seconds"],
        "of_limit": round(protocol["seconds"] / LIMIT, 3),
        "jobs": protocol.get("jobs", 0),
        "processes_lost": protocol.get("processes_lost", 0),
        "kernel_and_oracle_seconds": round(sum(one.get("seconds", 0.0) for one in results), 1),
        **({"absent": protocol["absent"]} if protocol.get("absent") else {}),
        **({"error": document["error"]} if "error" in document else {}),
    }


def line(row: dict[str, Any]) -> str:
    """One kernel in one line."""
    if "absent" in row or "error" in row:
        return f"{row['candidate']}: {row.get('absent') or 'ERROR ' + row['error']}"
    words = (
        f"{row['candidate']}: {row['passed']} passed, {row['failed']} failed, {row['findings']} findings, "
    )
    words += f"{row['skipped']} skipped ({row['not_begun']} not begun), {row['seconds']:.0f} s with {row['jobs']} jobs"
    return words + (f", {row['processes_lost']} processes lost" if row["processes_lost"] else "")


def write(
    asked: argparse.Namespace,
    documents: dict[str, dict[str, Any]],
    seen: list[dict[str, Any]],
    seconds: float,
) -> list[dict[str, Any]]:
    """Both records, from what is done by now."""
    rows = [summary(word, document) for word, document in documents.items()]
    every = [one for document in documents.values() for one in document["results"]]
    protocol = {
        "command": "python tools/gpu_verify.py OUT",
        "tier": asked.tier,
        "seed": asked.seed,
        "cold": not asked.warm,
        "side_by_side": len(documents),
        "limit_seconds": LIMIT,
        "seconds": round(seconds, 1),
        "candidates": [
            about for document in documents.values() for about in document["protocol"]["candidates"]
        ],
    }
    for name, kind, results in (
        ("verify", "verify-device", [*rows, *calibration(every)]),
        ("findings-gpu", "findings-gpu", [*kinds(every), *seen]),
    ):
        document = records.record(kind, protocol, results, asked.device)
        (asked.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    return rows


def run(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Every kernel at once; the cores are the limit, and the workers of each wait for compilers most of the time."""
    (asked.out / "cases").mkdir(parents=True, exist_ok=True)
    started, done = time.monotonic(), {}
    with ThreadPoolExecutor(len(asked.kernels) + 1) as pool:
        asking = pool.submit(ask_suspects, asked.device)
        futures = {pool.submit(judge, word, asked): word for word in asked.kernels}
        for future in as_completed(futures):
            word = futures[future]
            error = future.exception()
            if error is not None:
                said = f"{type(error).__name__}: {error}"
                done[word] = {"protocol": {"candidates": [], "seconds": 0.0}, "results": [], "error": said}
            else:
                done[word] = future.result()
                path = asked.out / "cases" / f"{word.replace(':', '-').replace('/', '-')}.json"
                path.write_text(json.dumps(done[word]) + "\n")
            print(line(summary(word, done[word])), flush=True)
            write(asked, done, asking.result() if asking.done() else [], time.monotonic() - started)
        seen = asking.result()
        shown = sum(one["seen"] == "reproduced" for one in seen)
        print(f"suspects: {shown} of {len(seen)} reproduced", flush=True)
        return write(asked, done, seen, time.monotonic() - started)


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "kernels", nargs="*", default=list(JOBS), help="words as `attnproof verify -c` takes them"
    )
    parser.add_argument("--tier", default="standard")
    parser.add_argument("--case", default="", metavar="TEXT", help="only cases whose id contains TEXT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--jobs", type=int, default=0, help="workers of each kernel; 0 for the table's numbers"
    )
    parser.add_argument(
        "--patience", type=float, default=150.0, help="seconds until a silent process is dead"
    )
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no case is begun")
    parser.add_argument("--warm", action="store_true", help="use the compilers' caches as they are")
    return parser.parse_intermixed_args(words)


def main() -> None:
    """Run as a script."""
    asked = arguments(sys.argv[1:])
    # two dozen processes share the cores, and none of them knows of the others
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if not asked.warm:
            # cold means cold, whatever ran here before; workers inherit this
            os.environ.update({name: str(Path(folder) / name.lower()) for name in CACHES})
        rows = run(asked)
    bad = [row for row in rows if row["failed"] or row["powerless"] or "error" in row]
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
