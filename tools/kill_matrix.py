"""Measure the kill matrix and choose the tiers from it.

    python tools/kill_matrix.py results/cpu/kill-matrix.json     every case against every mutant (minutes), then the choice
    python tools/kill_matrix.py results/cpu/kill-matrix.json --again   the choice alone, from the stored matrix

Writes the record and `src/attnproof/verify/tiers.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from attnproof.cases import Case, pool
from attnproof.verify import records, suite, tiers
from attnproof.verify.mutants import catalogue, kernel, matrix

# one dtype of each name, and of these a second one: what depends on the dtype shows in few places
ORDER = ("bfloat16", "float16", "float32", "float64")
SECOND = {
    "everything": ("float16", "float32", "float64"),
    "longer-queries-causal": ("float16", "float32"),
    "gqa-257x1000-causal": ("float16", "float32"),
    "layout-offset": ("float16",),
    "abyss-late": ("float16", "float32"),
    "dropout-half": ("float32",),
    "alibi": ("float32",),
    "sink": ("float32",),
    "softcap": ("float32",),
    "normal-512": ("float32", "float64"),
}
HEAVY = ("many-heads", "long-2048-grad", "long-keys-16384", "long-square-16384", "normal-1024-d128")
PLAIN = {"mask", "gqa"}  # what a function of the least form may be expected to take


def candidates_of_the_choice() -> list[Case]:
    """The cases among which tiers are chosen; the heavy ones only belong to `full`."""
    by_name: dict[str, dict[str, Case]] = {}
    for case in pool():
        by_name.setdefault(case.name, {})[case.dtype] = case
    chosen: list[Case] = []
    for name, variants in by_name.items():
        if name in HEAVY:
            continue
        first = next(dtype for dtype in ORDER if dtype in variants)
        chosen += [
            variants[dtype]
            for dtype in ORDER
            if dtype == first or (dtype in SECOND.get(name, ()) and dtype in variants)
        ]
    return chosen


def measure() -> dict[str, object]:
    """The matrix as a record."""
    cases = candidates_of_the_choice()
    cost: dict[str, float] = {}
    for case in cases:
        started = time.monotonic()
        verdict = suite.run(kernel.correct(), [case])[0]
        cost[case.id] = round(time.monotonic() - started, 3)
        if verdict.status != suite.PASS:
            sys.exit(f"the correct kernel does not pass {case.id}: {verdict.reason}")
    killers = matrix.full_matrix(cases, tick=lambda name: print(name, file=sys.stderr, flush=True))
    entries = [
        {"candidate": name, "case": case, "status": "KILLED"}
        for case, names in killers.items()
        for name in names
    ]
    dead = {name for names in killers.values() for name in names}
    missing = [operator.name for operator in catalogue.OPERATORS if operator.name not in dead]
    entries += [{"candidate": name, "case": "", "status": "SURVIVED"} for name in missing]
    protocol = {
        "mutant_set": catalogue.digest(),
        "mutants": len(catalogue.OPERATORS),
        "cases": len(cases),
        "seconds": cost,
        "survivors": missing,
    }
    return records.record("kill-matrix", protocol, entries)


def choose(document: dict[str, object]) -> dict[str, object]:
    """Smoke and standard from the matrix."""
    killers: dict[str, list[str]] = {}
    for entry in document["results"]:  # type: ignore[attr-defined]
        if entry["case"]:
            killers.setdefault(entry["case"], []).append(entry["candidate"])
    even = dict.fromkeys(killers, 1.0)
    known = {case.id: case for case in pool()}
    plain = {
        case: names
        for case, names in killers.items()
        if case == matrix.GUARDS or not set(known[case].features) - PLAIN
    }
    smoke = matrix.greedy(plain, even, share=0.97)
    smoke = matrix.greedy(killers, even, share=0.95, start=smoke)
    for name in catalogue.CLASSICS:
        if not any(name in killers[case] for case in smoke):
            smoke.append(next(case for case, names in killers.items() if name in names))
    # strongest first, so that a self-test kills most mutants at once
    first = matrix.greedy({case: killers[case] for case in smoke}, even)
    smoke = [*first, *(case for case in smoke if case not in first)]
    standard = matrix.greedy(killers, even, times=3, start=smoke)
    seen = {(known[case].group, known[case].dtype) for case in standard}
    for case in pool():
        # every group in every dtype: the matrix cannot know what it has no mutant for
        if (case.group, case.dtype) not in seen and case.name not in HEAVY:
            seen.add((case.group, case.dtype))
            standard.append(case.id)
    order = list(known)
    return {
        "mutant_set": document["protocol"]["mutant_set"],  # type: ignore[index]
        "smoke": smoke,
        "standard": sorted(standard, key=order.index),
    }


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path)
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    document = records.load(asked.record) if asked.again else measure()
    if not asked.again:
        asked.record.parent.mkdir(parents=True, exist_ok=True)
        asked.record.write_text(json.dumps(document, indent=1) + "\n")
    chosen = choose(document)
    tiers.FILE.write_text(json.dumps(chosen, indent=1) + "\n")
    print(f"smoke {len(chosen['smoke'])} cases, standard {len(chosen['standard'])}")  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
