"""The MI50 kernels' source as CUDA on this GPU against float64: the interpreter's cases, and full size.

It shows the algorithm on real threads; it says nothing about an AMD GPU. The tolerances are the parity suite's.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.mi50 import fuzz  # noqa: E402
from tests.mi50.calls import DECODE, PARITY, hold, run, suite  # noqa: E402
from tests.mi50.full import FULL, FULL_DECODE  # noqa: E402
from tests.mi50.twin import Twin, twin  # noqa: E402
from tests.parity.calls import Call  # noqa: E402
from tests.parity.problems import CASES, Case, draw  # noqa: E402
from tests.parity.targets import Target  # noqa: E402
from tests.parity.tolerance import judge  # noqa: E402

from attnproof.backends import dot2  # noqa: E402

__all__ = ["suite"]

# the first matrix product of torch on autograd's own thread
pytestmark = [pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"), pytest.mark.usefixtures("suite")]
TARGET = Target("dot2", "torch", "cuda")


@pytest.fixture(scope="module")
def runner() -> Twin:
    return twin()


def bits(result: Any) -> list[Any]:
    """Everything that came back, as bytes."""
    parts = [result.out, *([] if result.lse is None else [result.lse]), *result.grads.values()]
    return [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in parts]


def hold_twice(case: Case, runner: Twin) -> None:
    """Against float64, and the same bits from a second run."""
    first = hold(Call(TARGET, case), judge(case, draw(case), half_operands=True), runner)
    with dot2.running_on(runner):
        again, _ = run(Call(TARGET, case))
    assert len(bits(first)) == len(bits(again))
    assert all(torch.equal(left, right) for left, right in zip(bits(first), bits(again), strict=True))


@pytest.mark.parametrize("case", (*PARITY, *DECODE), ids=str)
def test_the_interpreters_cases_agree_with_float64_and_repeat(case: Case, runner: Twin) -> None:
    """What the interpreter shows of gfx906 code, real threads show of the algorithm."""
    hold_twice(case, runner)


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype != "float64"], ids=str)
def test_every_case_of_the_parity_suite_agrees_with_float64_and_repeats(case: Case, runner: Twin) -> None:
    """An interpreter would take an hour; float64 is refused, which needs no device to be seen."""
    hold_twice(case, runner)


@pytest.mark.parametrize("case", (*FULL, *FULL_DECODE), ids=str)
def test_full_size_agrees_with_float64_and_repeats(case: Case, runner: Twin) -> None:
    """Hundreds of tiles and thousands of workgroups, which an interpreter cannot afford."""
    hold_twice(case, runner)


@pytest.mark.parametrize("seed", range(1_000_000, 1_000_012))
def test_random_calls_agree_with_float64(seed: int, runner: Twin) -> None:
    """A few of what `tools/mi50_twin.py fuzz` draws for as long as one likes."""
    fuzz.check(seed, runner)


def test_a_dropped_barrier_is_noticed() -> None:
    """The comparison has teeth on this device too: without barriers tiles are read before they are written."""
    shared = twin()

    def edit(kernel: str, text: str) -> str:
        assert kernel != "attn_forward" or text.count("barrier();") > 3
        return text.replace("  barrier();", "  ;") if kernel == "attn_forward" else text

    broken = Twin(shared.compiler, shared.driver, shared.stream, shared.units, edit)
    case = Case("no barriers", B=2, H=16, Hkv=4, M=300, N=500, D=128, Dv=128, dtype="float16")
    with pytest.raises(AssertionError, match="elements are off"):
        hold(Call(TARGET, case), judge(case, draw(case), half_operands=True), broken, gradients=False)
