"""Compile the Hopper kernels without a GPU, and write what the assembler says to results/compile.

Usage: hopper_matrix.py [forward] [backward] [missing] [PROCESSES]      (both passes without words)

One record per pass and Triton version, as tools/compile_matrix.py does it for the portable kernels. ``missing`` keeps the rows
of a record made by the same versions, and compiles what it lacks. Tests compile the shipped configurations and hold them to
the records.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from attnproof.backends.hopper import backward_matrix, compile_matrix  # noqa: E402


def forward(job: compile_matrix.Job) -> list[dict[str, Any]]:
    return [compile_matrix.row(job)]


JOB = ("D", "Dv", "variant", "dtype")  # fields that name one
# pass: (record, jobs, rows of a job)
PASSES: dict[str, tuple[str, Callable[[], list[Any]], Callable[[Any], list[dict[str, Any]]]]] = {
    "forward": ("hopper", compile_matrix.jobs, forward),
    "backward": ("hopper-backward", backward_matrix.jobs, backward_matrix.rows),
}


def main() -> None:
    words = sys.argv[1:]
    if unknown := [word for word in words if word not in (*PASSES, "missing") and not word.isdigit()]:
        sys.exit(f"pass: expected {' or '.join(PASSES)}, got {', '.join(unknown)}")
    processes = next((int(word) for word in words if word.isdigit()), 2)
    for which in [word for word in PASSES if word in words] or PASSES:
        name, jobs, rows_of = PASSES[which]
        kept = recorded(name) if "missing" in words else []
        known = {tuple(row.get(at) for at in JOB) for row in kept}
        wanted = [job for job in jobs() if tuple(job.identity().get(at) for at in JOB) not in known]
        with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=10) as pool:
            rows: list[dict[str, Any]] = list(kept)
            for part in pool.imap_unordered(rows_of, wanted):
                for row in part:
                    print(*row.values(), flush=True)
                rows += part
        write(name, rows)


def recorded(name: str) -> list[dict[str, Any]]:
    """Rows of a record, if these versions made it."""
    path = record(name)
    document: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    same = document.get("environment", {}).get("versions") == compile_matrix.versions()
    return document["results"] if same else []


def record(name: str) -> Path:
    """Where it lies."""
    return ROOT / "results" / "compile" / f"{name}-{compile_matrix.minor()}.json"


def write(name: str, rows: list[dict[str, Any]]) -> None:
    """One record; rows in the order of what names them."""
    rows.sort(key=lambda row: tuple(row.get(at, "") for at in ("kernel", "D", "Dv", "variant", "dtype")))
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
    path = record(name)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
