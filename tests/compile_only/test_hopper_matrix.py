"""Hopper's kernels are compiled where there is no GPU, and their machine code may not get worse.

results/compile/hopper-<version>.json holds every kernel (tools/hopper_matrix.py writes it); this compiles each shipped
configuration once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.experimental.gluon")

from attnproof.backends.hopper import compile_matrix, configs, offline

RECORD = Path(__file__).parents[2] / "results" / "compile" / f"hopper-{compile_matrix.minor()}.json"
NAMES = ("D", "Dv", "variant", "dtype")


def recorded() -> dict[tuple[Any, ...], dict[str, Any]]:
    if not RECORD.is_file():
        pytest.skip(f"no record for Triton {compile_matrix.minor()}; tools/hopper_matrix.py writes one")
    return {tuple(row[name] for name in NAMES): row for row in json.loads(RECORD.read_text())["results"]}


@pytest.mark.slow
@pytest.mark.parametrize("job", compile_matrix.covering(), ids=lambda job: f"{job.width}-{job.variant}")
def test_the_machine_code_of_a_shipped_kernel_is_as_recorded(job: compile_matrix.Job) -> None:
    """Spills, a barrier more per tile or serialised products cost speed long before anyone times it."""
    known = recorded()[tuple(job.identity().values())]
    row = compile_matrix.row(job)
    config = configs.choose(job.problem())
    assert row["wgmma"] == known["wgmma"]
    assert row["spills"] <= known["spills"]
    assert row["local_in_loops"] <= known["local_in_loops"]
    assert sum(row["barriers"]) <= sum(known["barriers"])
    assert not row["serialised"]
    assert row["fits"]
    assert set(config.registers) <= set(row["splits"])


@pytest.mark.slow
@pytest.mark.parametrize("job", compile_matrix.covering(), ids=lambda job: f"{job.width}-{job.variant}")
def test_no_mbarrier_is_made_in_memory_that_tiles_take_over(job: compile_matrix.Job) -> None:
    """One lay in tiles: with others on the card, results of head dim 64 were wrong in a tile or not at all."""
    code = offline.compile_facts(configs.facts(job.problem()), job.dtype).asm["ttgir"]
    assert [] == offline.idle_mbarriers(code)


def test_an_mbarrier_that_is_only_initialised_is_idle() -> None:
    used, idle = (
        f"%{name} = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #s>\n"
        f"%{name}_0 = ttg.memdesc_index %{name}[%c0] : !ttg.memdesc<2x1xi64, #s> -> !ttg.memdesc<1xi64, #s>\n"
        f"ttng.init_barrier %{name}_0, 1 : !ttg.memdesc<1xi64, #s>\n"
        for name in ("used", "idle")
    )
    code = used + idle + "ttng.wait_barrier %used_0, %phase : !ttg.memdesc<1xi64, #s>\n"
    assert ["%idle"] == offline.idle_mbarriers(code)


def test_the_record_is_whole_and_launchable() -> None:
    """Every kernel of the matrix is in it, feeds the matrix unit without waiting, and can be launched."""
    rows = recorded()
    assert {tuple(job.identity().values()) for job in compile_matrix.jobs()} == set(rows)
    for row in rows.values():
        assert row["wgmma"] > 0
        assert not row["serialised"], row
        assert row["shared"] <= offline.SHARED_LIMIT
