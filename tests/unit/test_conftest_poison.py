"""The poison itself: a fixture that silently stopped working would let unwritten rows through everywhere."""

from __future__ import annotations

import numpy as np
import pytest


def as_package(source: str) -> object:
    """Evaluate `source` as if a module of the package had written it."""
    return eval(source, {"__name__": "attnproof.somewhere", "np": np, "torch": pytest.importorskip("torch")})


@pytest.mark.parametrize(
    "source", ["np.empty(3)", "np.empty((2, 2), np.float16)", "np.empty_like(np.zeros(4, np.float32))"]
)
def test_a_numpy_allocation_of_the_package_is_nan(source: str) -> None:
    assert np.isnan(as_package(source)).all()  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "source",
    [
        "torch.empty(3)",
        "torch.empty_like(torch.zeros(2, dtype=torch.bfloat16))",
        "torch.empty_strided((2, 3), (1, 2))",
        "torch.zeros(1).new_empty(5)",
    ],
)
def test_a_torch_allocation_of_the_package_is_nan(source: str) -> None:
    assert as_package(source).isnan().all()  # type: ignore[attr-defined]


def test_bfloat16_bits_and_integers_are_poisoned_too() -> None:
    assert as_package("np.empty(2, np.uint16).tolist()") == [0x7FFF, 0x7FFF]
    assert as_package("np.empty(1, np.int32)[0]") == np.iinfo(np.int32).min


def test_allocations_of_others_are_left_alone() -> None:
    """Code outside the package may hand its own empty buffers over; the call must stay the plain one."""
    made = eval("np.empty(1 << 20)", {"__name__": "someone.else", "np": np})
    assert not np.isnan(made).all()
