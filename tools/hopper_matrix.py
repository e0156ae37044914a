"""Compile the Hopper kernels without a GPU, and write what the assembler says to results/compile.

Usage: hopper_matrix.py [PROCESSES]

One record per Triton version, as tools/compile_matrix.py does it for the portable kernels. A test compiles the shipped
configurations and holds them to the record.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from attnproof.backends.hopper import compile_matrix  # noqa: E402


def main() -> None:
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=10) as pool:
        rows = []
        for row in pool.imap_unordered(compile_matrix.row, compile_matrix.jobs()):
            print(*row.values(), flush=True)
            rows.append(row)
    rows.sort(key=lambda row: (row["D"], row["Dv"], row["variant"], row["dtype"]))
    document = {
        "schema": "attnproof/record/1",
        "kind": "compile",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "environment": {"versions": compile_matrix.versions()},
        "protocol": {
            "compiler": "triton.compile for sm_90a, its own assembler; no device",
            "spills": "bytes of local memory stored per thread",
            "loops": "barriers and instructions of the innermost loops with matrix instructions, in the order of the code",
        },
        "results": rows,
    }
    path = ROOT / "results" / "compile" / f"hopper-{compile_matrix.minor()}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
