"""The Hopper backend alone on this GPU: every configuration against float64, the same bits again, and no call that hangs.

The suite of all backends runs on it as well; this knows where its tiles end.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.parity.calls import Call, Result  # noqa: E402
from tests.parity.checking import check_forward, check_gradients  # noqa: E402
from tests.parity.problems import Case  # noqa: E402
from tests.parity.targets import Target  # noqa: E402
from tests.parity.tolerance import expected  # noqa: E402

from attnproof.backends import hopper  # noqa: E402

from .hopper_cases import BOUNDS_CASES, CASES, PACKED_CASES, WIDTHS, dense  # noqa: E402

TARGET = Target("hopper", "torch", "cuda")
# a barrier that nobody reaches hangs: pytest-timeout ends the run and names the case
pytestmark = [pytest.mark.timeout(120)] if find_spec("pytest_timeout") else []


@pytest.fixture(autouse=True)
def served() -> None:
    """Elsewhere the backend refuses, which is no verdict on it."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


def bits(result: Result | None) -> list[Any]:
    assert result is not None
    parts = [result.out, *([] if result.lse is None else [result.lse]), *result.grads.values()]
    return [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in parts]


def hold(target: Target, case: Case) -> None:
    """Forward and every gradient against float64; a second run has the same bits."""
    right = expected(case, target.half_operands)
    found = [
        [*bits(check_forward(Call(target, case), right)), *bits(check_gradients(Call(target, case), right))]
        for _ in range(2)
    ]
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_configuration_agrees_with_float64_and_repeats(case: Case) -> None:
    hold(TARGET, case)


@pytest.fixture
def on_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused until it has run on a device must run here, forward and backward, where it is asked for: a hang takes
    the device with it.
    """
    if hopper.ON_TRIAL and not os.environ.get("ATTNPROOF_TEST_TRIAL"):
        pytest.skip("on trial: set ATTNPROOF_TEST_TRIAL=1 to run it")
    from attnproof.backends.hopper import backprop

    monkeypatch.setattr(hopper, "ON_TRIAL", frozenset())
    monkeypatch.setattr(backprop, "ON_TRIAL", frozenset())
    monkeypatch.setattr(backprop, "_routes", {})


@pytest.mark.usefixtures("on_trial")
@pytest.mark.parametrize("case", (*PACKED_CASES, *BOUNDS_CASES), ids=str)
def test_packed_and_bounds_forward_agrees_with_float64_and_repeats(case: Case) -> None:
    right = expected(case, TARGET.half_operands)
    found = [bits(check_forward(Call(TARGET, case), right)) for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.usefixtures("on_trial")
@pytest.mark.parametrize("case", (*PACKED_CASES, *BOUNDS_CASES), ids=str)
def test_packed_and_bounds_gradients_agree_with_float64_and_repeat(case: Case) -> None:
    right = expected(case, TARGET.half_operands)
    found = [bits(check_gradients(Call(TARGET, case), right)) for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.usefixtures("on_trial")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_packed_rows_never_see_or_touch_the_next_sequence(width: int, gradients: bool) -> None:
    """A block that runs over a sequence's end must read zeros there, and store nothing."""
    from attnproof import attention_varlen_with_lse

    lengths = [100, 70, 129, 1, 200]
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    made = [torch.randn(sum(lengths), 4, width, device="cuda", dtype=torch.bfloat16) for _ in range(4)]

    def run(*arrays: Any) -> list[Any]:
        *qkv, dout = (x.clone().requires_grad_(gradients) for x in arrays)
        out, lse = attention_varlen_with_lse(*qkv, cu, cu, causal=True, backend=hopper.name)
        grads = torch.autograd.grad(out, qkv, dout.detach()) if gradients else ()
        return [out, lse.mT, *grads]

    right = run(*made)
    poisoned = [x.clone() for x in made]
    for x in poisoned:
        x[cu[1] : cu[2]] = torch.nan
        x[cu[3] : cu[4]] = torch.inf
    found = run(*poisoned)
    for start, stop in ((0, 1), (2, 3), (4, 5)):
        for x, y in zip(right, found, strict=True):
            assert torch.equal(x[cu[start] : cu[stop]], y[cu[start] : cu[stop]])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_sums_in_no_fixed_order_agree_with_float64(
    width: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass for all gradients, also where the two kernels would be faster."""
    from attnproof.backends.hopper import backprop

    monkeypatch.setattr(
        backprop.configs, "joint_gains", lambda problem: backprop.configs.joint_config(problem) is not None
    )
    options = {"causal": causal, "deterministic": False}
    case = dense("in one pass", 333, 300, width, H=6, options=options)
    right = expected(replace(case, options={"causal": causal}), TARGET.half_operands)
    assert check_gradients(Call(TARGET, case), right) is not None


def test_streams_and_graphs_do_not_share_tile_counters() -> None:
    """Programs that stay draw tiles from a counter: two launches at a time on one would each do half of the work."""
    from attnproof import attention

    q, k, v = (torch.randn(2, 8, 512, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    right = attention(q, k, v, causal=True, backend=hopper.name)
    torch.cuda.synchronize()
    found = []
    for stream in [torch.cuda.Stream() for _ in range(3)] * 5:
        with torch.cuda.stream(stream):
            found.append(attention(q, k, v, causal=True, backend=hopper.name))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, causal=True, backend=hopper.name)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(right, x) for x in (*found, out))
