"""Compile the Hopper kernels of the backward without a GPU, and write what the assembler says to results/compile.

Usage: hopper_backward_matrix.py [PROCESSES]

As hopper_matrix.py does it for the forward; one record per Triton version.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from attnproof.backends.hopper import backward_matrix, compile_matrix  # noqa: E402


def main() -> None:
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=10) as pool:
        rows = []
        for part in pool.imap_unordered(backward_matrix.rows, backward_matrix.jobs()):
            for row in part:
                print(*row.values(), flush=True)
            rows += part
    rows.sort(key=lambda row: (row["kernel"], row["D"], row["variant"], row["dtype"]))
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
    path = ROOT / "results" / "compile" / f"hopper-backward-{compile_matrix.minor()}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
