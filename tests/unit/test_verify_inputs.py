"""Every way of drawing a case's numbers: the correct kernel passes on it, and the seed decides the numbers."""

from __future__ import annotations

import pytest

from attnproof.cases import Case, pool
from attnproof.verify import suite
from attnproof.verify.inputs import GENERATORS, KEEPS, build
from attnproof.verify.mutants import kernel

FIXED = {"equal", "huge_equal"}  # nothing is drawn


def smallest(name: str, value: str) -> Case:
    """The cheapest dense case of the pool that uses one generator, mask or bias."""

    def size(case: Case) -> int:
        return case.B * case.H * case.M * case.N * case.D

    found = [case for case in pool() if getattr(case, name) == value and case.rows == "dense" and size(case)]
    return min(found, key=size)


WAYS = [
    *(("generator", name) for name in GENERATORS),
    *(("keep", name) for name in KEEPS),
    *(("bias", name) for name in sorted({case.bias for case in pool()} - {""})),
]


@pytest.mark.parametrize(("name", "value"), WAYS, ids=lambda part: str(part))
def test_a_correct_kernel_passes_on_every_kind_of_numbers(name: str, value: str) -> None:
    """A generator whose numbers a correct kernel cannot serve would be blamed on whoever is judged."""
    (verdict,) = suite.run(kernel.correct(), [smallest(name, value)])
    assert ("PASS", "") == (verdict.status, verdict.reason)


@pytest.mark.parametrize("name", GENERATORS)
def test_the_seed_decides_the_numbers(name: str) -> None:
    """A case that drew the same numbers for every seed could be answered from memory."""
    case = smallest("generator", name)
    one, again, other = (
        b"".join(part.values().tobytes() for part in (drawn.q, drawn.k, drawn.v))
        for drawn in (build(case, seed) for seed in (0, 0, 1))
    )
    assert one == again
    assert (name in FIXED) == (one == other)
