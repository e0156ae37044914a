"""Does the judge ever flag a correct kernel? Every correct kernel that is here, on every case of a tier, over many seeds.

    python tools/false_alarms.py results/cpu/false-alarms.json               tier standard, 20 seeds, all cores
    python tools/false_alarms.py OUT.json --tier smoke --seeds 3 --jobs 1

Writes a record: how much was judged and skipped by kernel and dtype, each alarm, and the largest z and the least room
that was left below a limit (the calibration). Leaves with 1 where there is an alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from attnproof.cases import find
from attnproof.verify import records, selftest, tiers, workers
from attnproof.verify.candidate import Candidate
from attnproof.verify.mutants import matrix


@cache
def kernels() -> tuple[Candidate, ...]:
    """The correct kernels, loaded once a process."""
    return tuple(selftest.correct_kernels())


def part(case: str, seeds: int) -> matrix.Green:
    """One case over all kernels and seeds."""
    return matrix.judge_correct(kernels(), [find(case)], range(seeds))


def measure(tier: str, seeds: int, jobs: int) -> matrix.Green:
    """The whole tier, spread over processes."""
    os.environ.update(workers.variables(jobs))
    found = matrix.Green()
    cases = [case.id for case in tiers.cases(tier)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(part, case, seeds): case for case in cases}
        for done, future in enumerate(as_completed(futures), 1):
            found.merge(future.result())
            print(f"{done}/{len(cases)} {futures[future]}: {len(found.alarms)} alarms", file=sys.stderr)
    return found


def entries(found: matrix.Green) -> list[dict[str, Any]]:
    """Alarms first, then counts by kernel and dtype, then the calibration."""
    rows: list[dict[str, Any]] = [
        {
            "candidate": alarm.candidate,
            "group": "alarm",
            "case": alarm.case.id,
            "dtype": alarm.case.dtype,
            "seed": alarm.seed,
            "status": "ALARM",
            "reason": alarm.reason,
        }
        for alarm in found.alarms
    ]
    alarmed = {(alarm.candidate, alarm.case.dtype) for alarm in found.alarms}
    for name, dtype in sorted({*found.judged, *found.skipped}):
        judged, skipped = found.judged[name, dtype], found.skipped[name, dtype]
        status = "ALARM" if (name, dtype) in alarmed else "GREEN" if judged else "SKIP"
        rows.append(
            {
                "candidate": name,
                "group": "correct kernel",
                "dtype": dtype,
                "status": status,
                "judged": judged,
                "skipped": skipped,
            }
        )
    for (name, dtype, tensor), peak in sorted(found.peaks.items()):
        rows.append(
            {"candidate": name, "group": "calibration", "dtype": dtype, "tensor": tensor, **vars(peak)}
        )
    return rows


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path)
    parser.add_argument("--tier", default="standard")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    started = time.monotonic()
    found = measure(asked.tier, asked.seeds, asked.jobs)
    protocol = {
        "command": f"python tools/false_alarms.py {asked.record} --tier {asked.tier} --seeds {asked.seeds}",
        "tier": asked.tier,
        "seeds": asked.seeds,
        "cases": len(tiers.cases(asked.tier)),
        "judged": found.judged.total(),
        "skipped": found.skipped.total(),
        "alarms": len(found.alarms),
        "seconds": round(time.monotonic() - started, 1),
    }
    asked.record.parent.mkdir(parents=True, exist_ok=True)
    asked.record.write_text(
        json.dumps(records.record("false-alarms", protocol, entries(found)), indent=1) + "\n"
    )
    print(f"{protocol['judged']} judged, {protocol['skipped']} skipped, {protocol['alarms']} alarms")
    sys.exit(1 if found.alarms else 0)


if __name__ == "__main__":
    main()
