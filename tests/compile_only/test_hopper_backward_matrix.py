"""Hopper's backward kernels are compiled where there is no GPU, and their machine code may not get worse.

results/compile/hopper-backward-<version>.json holds every kernel (tools/hopper_matrix.py writes it).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.experimental.gluon")

from attnproof.backends.hopper import (
    backward_configs,
    backward_matrix,
    backward_offline,
    compile_matrix,
    offline,
)

RECORD = Path(__file__).parents[2] / "results" / "compile" / f"hopper-backward-{compile_matrix.minor()}.json"
NAMES = ("kernel", "D", "variant", "dtype")


def recorded() -> dict[tuple[Any, ...], dict[str, Any]]:
    if not RECORD.is_file():
        pytest.skip(f"no record for Triton {compile_matrix.minor()}; tools/hopper_matrix.py writes one")
    return {tuple(row[name] for name in NAMES): row for row in json.loads(RECORD.read_text())["results"]}


@pytest.mark.slow
@pytest.mark.parametrize("job", backward_matrix.covering(), ids=lambda job: f"{job.width}-{job.variant}")
def test_the_machine_code_of_a_shipped_kernel_is_as_recorded(job: backward_matrix.Job) -> None:
    """Spills, a barrier more per block or serialised products cost speed long before anyone times it."""
    before = recorded()
    registers = backward_configs.keys_config(job.problem()).registers
    for row in backward_matrix.rows(job):
        known = before[tuple(row[name] for name in NAMES)]
        assert known["wgmma"] == row["wgmma"]
        assert row["spills"] <= known["spills"]
        assert row["local_in_loops"] <= known["local_in_loops"]
        assert sum(row["barriers"]) <= sum(known["barriers"])
        assert not row["serialised"]
        assert row["fits"]
        if row["wgmma"]:
            assert set(registers) <= set(row["splits"])


@pytest.mark.slow
@pytest.mark.parametrize("job", backward_matrix.covering(), ids=lambda job: f"{job.width}-{job.variant}")
def test_no_mbarrier_is_made_in_memory_that_tiles_take_over(job: backward_matrix.Job) -> None:
    """The pass with atomics made a ring of barriers for stages that are handed back with those of another."""
    for launch in backward_offline.launches(job.problem()):
        code = backward_offline.compile_launch(launch).asm["ttgir"]
        assert [] == offline.idle_mbarriers(code), launch.kernel.fn.__name__


def test_the_record_is_whole_and_launchable() -> None:
    """Every kernel of the matrix is in it, feeds the matrix unit without waiting, and can be launched."""
    rows = recorded()
    jobs = {(job.width, job.variant, job.dtype) for job in backward_matrix.jobs()}
    assert jobs == {key[1:] for key in rows}
    assert sum(4 if width <= 128 else 3 for width, _, _ in jobs) == len(rows)
    for row in rows.values():
        assert (row["wgmma"] > 0) == (row["kernel"] != "rows_kernel")
        assert not row["serialised"], row
        assert row["shared"] <= offline.SHARED_LIMIT
