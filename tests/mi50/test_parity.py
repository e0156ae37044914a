"""Compiled gfx906 code against float64: forward, backward and decode, with the parity suite's own tolerances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.parity.problems import Case

import attnproof
from attnproof.backends import dot2

from . import fuzz
from .calls import DECODE, PARITY, compile_all, distances, judge, plain, suite
from .interpreter import Interpreter

__all__ = ["suite"]


@pytest.fixture(autouse=True, scope="module")
def compiled_ahead() -> None:
    """What the cases need is compiled while they run."""
    compile_all((*PARITY, *DECODE))


@pytest.mark.usefixtures("suite")
@pytest.mark.parametrize("case", PARITY, ids=str)
def test_out_lse_and_gradients_agree_with_float64(case: Case) -> None:
    """Every instruction is executed from the compiled code, every access checked."""
    judge(case, Interpreter())


@pytest.mark.usefixtures("suite")
@pytest.mark.parametrize("case", DECODE, ids=str)
def test_caches_and_pages_agree_with_float64(case: Case) -> None:
    """What lies past the valid length is NaN: a load that is not cut exactly shows."""
    judge(case, Interpreter())


@pytest.mark.usefixtures("suite")
@pytest.mark.parametrize("seed", [172, 303])
def test_random_calls_whose_heavy_keys_are_dropped_agree_with_float64(seed: int) -> None:
    """Random calls of the twin that the suite's tolerance did not know how to judge: p is below the normal halves."""
    fuzz.check(seed, Interpreter(), device="cpu")


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_the_order_of_waves_changes_no_bit(order: str) -> None:
    """Waves that run one after the other see what a missing barrier leaves behind."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, n, 32, generator=generator).half() for n in (40, 70, 70))
    with dot2.running_on(Interpreter()):
        together = attnproof.attention_with_lse(q, k, v, causal=True, backend="dot2")
    with dot2.running_on(Interpreter(order=order)):
        alone = attnproof.attention_with_lse(q, k, v, causal=True, backend="dot2")
    for left, right in zip(together, alone, strict=True):
        assert torch.equal(left, right)


def test_normal_inputs_are_within_a_thousandth_and_lse_within_two_millionths() -> None:
    rng = np.random.default_rng(0)
    error, lse = distances(*(rng.standard_normal((n, 128)) for n in (70, 130, 130)))
    print(f"max |out| error {error:.2e}, max |lse| error {lse:.2e}")
    assert error <= 1e-3
    assert lse <= 2e-6


@pytest.mark.parametrize("spread", [1e-4, 8.0])
def test_extreme_inputs_keep_the_same_bounds(spread: float) -> None:
    """Nearly uniform rows, and rows that one key takes whole."""
    rng = np.random.default_rng(1)
    q, k = (rng.standard_normal((n, 64)) * spread for n in (33, 70))
    error, lse = distances(q, k, rng.standard_normal((70, 64)))
    print(f"spread {spread}: max |out| error {error:.2e}, max |lse| error {lse:.2e}")
    assert error <= 1e-3
    # lse is a float32 number: half a unit in its last place is all that is allowed on top
    assert lse <= 2e-6 + 2.0**-24 * 64 * spread**2


def test_equal_inputs_give_themselves() -> None:
    """Every weight is 1 / n, and every value the same: the result is exact."""
    x = torch.full((1, 1, 70, 64), 3.0, dtype=torch.float16)
    with dot2.running_on(Interpreter()):
        out, lse = attnproof.attention_with_lse(x, x, x, backend="dot2")
    assert {3.0} == set(out.flatten().tolist())
    assert float((lse.double() - (9 * 8 + np.log(70))).abs().max()) <= 2.0**-18


def test_products_past_the_range_of_half_are_held_in_single() -> None:
    """q.k is 5.76e6, 88 times the largest fp16 number."""
    q = torch.full((1, 1, 8, 64), 300.0, dtype=torch.float16)
    k = q.clone()
    k[:, :, 1::2] = -300.0
    v = torch.arange(8.0).half()[None, None, :, None].expand(1, 1, 8, 64)
    with dot2.running_on(Interpreter()):
        out, _ = attnproof.attention_with_lse(q, k, v, backend="dot2")
    assert {3.0} == set(out.flatten().tolist())  # the mean of keys 0, 2, 4, 6


def test_nan_and_infinity_stay_in_their_rows() -> None:
    """A maximum that skips NaN would turn it into a plausible zero."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 1, n, 16, generator=generator).half() for n in (40, 70, 70))
    bias = torch.zeros(40, 70)
    with dot2.running_on(Interpreter()):
        clean = attnproof.attention_with_lse(q, k, v, bias=bias, causal=True, backend="dot2")
        q[0, 0, 33, 5], bias[12, 3], bias[2, 69] = torch.nan, torch.inf, torch.nan  # the last is not seen
        got = attnproof.attention_with_lse(q, k, v, bias=bias, causal=True, backend="dot2")
    bad = torch.tensor([12, 33])
    good = torch.tensor([i for i in range(40) if i not in (12, 33)])
    for left, right in zip(clean, got, strict=True):
        assert torch.equal(left[0, 0, good], right[0, 0, good])
        assert right[0, 0, bad].isnan().all()


def test_bfloat16_is_narrowed_to_half_only_on_request_and_within_its_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The opt-in doubles the rate; a value that fp16 cannot hold must not become infinity."""
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, 1, n, 32, generator=generator).bfloat16() for n in (20, 40, 40))
    monkeypatch.setenv("ATTNPROOF_DOT2_BF16", "half")
    flags = []
    for factor in (1.0, 1e5):
        run = Interpreter()
        with dot2.running_on(run):
            out, _ = attnproof.attention_with_lse(q, k, v * factor, backend="dot2")
        right, _ = plain(*(x[0, 0].double().numpy() for x in (q, k, v * factor)))
        assert float(np.abs(out[0, 0].double().numpy() - right).max()) <= 2.0**-7 * factor
        flags.append([flag for flag in run.counts[0][0].variant.flags if "DTYPE" in flag])
    assert [["-DDTYPE=3"], ["-DDTYPE=1"]] == flags


def test_backward_gives_the_same_bits_twice() -> None:
    """No gradient is a race of additions."""
    generator = torch.Generator().manual_seed(9)
    made = []
    for _ in range(2):
        generator.manual_seed(9)
        q, k, v = (
            torch.randn(1, h, n, 16, generator=generator).half().requires_grad_()
            for h, n in ((4, 40), (2, 70), (2, 70))
        )
        with dot2.running_on(Interpreter()):
            out = attnproof.attention(q, k, v, causal=True, backend="dot2")
            made.append(torch.autograd.grad(out.float().square().sum(), (q, k, v)))
    assert all(torch.equal(left, right) for left, right in zip(*made, strict=True))
