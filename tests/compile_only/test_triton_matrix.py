"""Kernels are compiled for GPUs that are not here, and what the assemblers report may not get worse.

results/compile holds the whole matrix per Triton version (tools/compile_matrix.py writes it); this compiles a covering part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from attnproof.backends.triton import compile_matrix, offline

RECORD = Path(__file__).parents[2] / "results" / "compile" / f"triton-{compile_matrix.minor()}.json"


def recorded() -> dict[tuple[Any, ...], dict[str, Any]]:
    if not RECORD.is_file():
        pytest.skip(f"no record for Triton {compile_matrix.minor()}; tools/compile_matrix.py writes one")
    rows = json.loads(RECORD.read_text())["results"]
    return {tuple(row[name] for name in ("target", "kernel", "D", "variant", "dtype")): row for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", compile_matrix.covering(), ids=lambda job: f"{job.target}-{job.sample.width}-{job.sample.variant}"
)
def test_nothing_spills_more_than_its_record(job: compile_matrix.Job) -> None:
    """A change that costs registers shows as spills on some card long before anyone times it there."""
    before = recorded()
    for row in compile_matrix.rows(job):
        known = before[tuple(compile_matrix.identity(job, row["kernel"]).values())]
        assert row["fits"], f"{row} needs more shared memory than {job.target} has"
        assert row["spills"] <= known["spills"], f"{row} spills more than the recorded {known['spills']}"


def test_the_record_is_whole_and_launchable() -> None:
    """Every job of the matrix is in the record, and nothing in it is more than its target can launch."""
    rows = recorded()
    jobs = {
        (job.target, job.sample.width, job.sample.variant, job.sample.dtype) for job in compile_matrix.jobs()
    }
    assert jobs == {(target, width, variant, dtype) for target, _, width, variant, dtype in rows}
    assert all(row["fits"] and row["shared"] <= offline.SHARED_LIMIT[row["target"]] for row in rows.values())


def test_what_is_only_compiled_is_called_untested() -> None:
    """A record of registers is no claim that a card works."""
    assert {"sm90"} == {at for at, words in compile_matrix.SUPPORT.items() if "untested" not in words}
