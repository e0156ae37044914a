"""Compile every kernel for every target, without a GPU, and write what the assemblers say to results/compile.

Usage: compile_matrix.py [PROCESSES]

One record per Triton version. A test holds a covering part of it: spills may not grow, and nothing may need more shared
memory than its target can launch. What is only in this record is compiled, not tested: the record says so by target.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from attnproof.backends.triton import compile_matrix  # noqa: E402


def main() -> None:
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    jobs = compile_matrix.jobs()
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=20) as pool:
        rows: list[dict[str, Any]] = []
        for done in pool.imap_unordered(compile_matrix.rows, jobs):
            rows += done
            for row in done:
                print(
                    row["target"],
                    row["kernel"],
                    row["D"],
                    row["variant"],
                    row["registers"],
                    row["spills"],
                    row["shared"],
                    flush=True,
                )
    rows.sort(key=lambda row: (row["target"], row["D"], row["variant"], row["kernel"]))
    document = {
        "schema": "attnproof/record/1",
        "kind": "compile",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "environment": {"versions": compile_matrix.versions()},
        "protocol": {
            "compiler": "triton.compile for the target, its own assembler; no device",
            "spills": "bytes of stack per thread on sm targets, spilled vector registers on gfx targets",
            "support": compile_matrix.SUPPORT,
        },
        "results": rows,
    }
    path = ROOT / "results" / "compile" / f"triton-{compile_matrix.minor()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
