"""Gradients, heads, dropout and repeatability: what has gone wrong elsewhere, and the right value here."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import attnproof

from .checking import case_of, check
from .direct import Attend, drawn
from .problems import SEED, Array
from .targets import Target, every_target, every_torch_target, values
from .tolerance import assert_close, judge


def arrays(m: int, n: int, **more: int) -> dict[str, Array]:
    return dict(zip("qkv", drawn(m, n, **more), strict=True))


@every_target
@pytest.mark.parametrize("shape", [(1, 1, 1, 7), (1, 4, 5, 7), (2, 1, 5, 7), (5, 7), (4, 1, 7), (2, 4, 5, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_a_broadcast_bias_has_its_shape(
    target: Target, shape: tuple[int, ...], dtype: str
) -> None:
    """Refused, or not summed over the axes that were broadcast: xformers#783, #636."""
    x = arrays(5, 7, B=2, H=4)
    x["bias"] = np.random.default_rng(0).standard_normal(shape)
    for bias_dtype in {"float32", dtype}:
        case = case_of(f"bias {shape}", x, dtype, bias_dtype=bias_dtype)
        result = check(target, case, x)
        if result is not None and target.kind == "torch":
            assert (shape, bias_dtype) == (
                tuple(result.grads["bias"].shape),
                str(result.grads["bias"].dtype)[6:],
            )


@every_target
@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (8, 4), (9, 3), (5, 1)])
def test_gradients_of_shared_heads_are_sums_over_their_group(target: Target, heads: int, groups: int) -> None:
    """Not summed, or written through a wrong index; a ratio that equals the count hides it: levanter#449."""
    x = arrays(9, 12, H=heads, Hkv=groups, D=8)
    for dtype in ("float32", "bfloat16"):
        check(target, case_of(f"{heads} on {groups}", x, dtype, causal=True), x)


@every_target
def test_key_heads_are_repeated_in_blocks_not_tiled(target: Target) -> None:
    """0, 0, 1, 1 and not 0, 1, 0, 1: jax-js#180."""
    v = np.array([0.0, 1.0]).reshape(1, 2, 1, 1) * np.ones((1, 2, 5, 8))
    q, k, _ = drawn(3, 5, H=4, Hkv=2, D=8)
    # an average of equal numbers is that number up to rounding; which number it is, is the question
    assert [0.0, 0.0, 1.0, 1.0] == np.rint(Attend(target)(q, k, v).out[0, :, 0, 0]).tolist()


@every_target
@pytest.mark.parametrize(("heads", "groups"), [(3, 2), (33, 2), (5, 4), (2, 3), (4, 0)])
def test_key_heads_that_do_not_divide_are_refused(target: Target, heads: int, groups: int) -> None:
    """Floor division left heads unwritten or read one that does not exist: flash-linear-attention#1029."""
    attend = Attend(target)
    q, k = (attend.native(np.zeros((1, h, 2, 4))) for h in (heads, groups))
    message = f"^k: expected a head count that divides the {heads} query heads, got {groups}$"
    with pytest.raises(ValueError, match=message):
        attend.raw(q, k, k)


@every_target
def test_keys_and_values_have_the_same_heads(target: Target) -> None:
    """One front end accepted 4 and 2, another refused: rocm-libraries#5888. And no head is broadcast silently."""
    attend = Attend(target)
    q, k, v = (attend.native(np.zeros((1, h, 2, 4))) for h in (8, 4, 2))
    with pytest.raises(ValueError, match=r"^v: expected 4 heads to match k, got 2$"):
        attend.raw(q, k, v)


@every_torch_target
@pytest.mark.parametrize(
    "needs", [names for size in range(1, 4) for names in itertools.combinations("qkv", size)]
)
def test_any_subset_of_inputs_may_need_a_gradient(target: Target, needs: tuple[str, ...]) -> None:
    """It worked for all or for none: Paddle#58461, pytorch#136101."""
    x = arrays(9, 12, D=8)
    attend, dout = Attend(target), np.ones((1, 2, 9, 8))
    every = attend.gradients(**x, dout=dout)
    some = attend.gradients(**x, dout=dout, needs=needs)
    assert set(needs) == set(some)
    for at in needs:
        assert every[at].tolist() == some[at].tolist()


@every_torch_target
def test_no_gradient_is_computed_that_nobody_asked_for(target: Target) -> None:
    import torch

    x = {at: Attend(target).native(part) for at, part in arrays(4, 4, D=8).items()}
    out, lse = Attend(target).raw(**x)
    assert not (out.requires_grad or lse.requires_grad)
    with torch.no_grad():
        x["q"].requires_grad_()
        assert not Attend(target).raw(**x)[0].requires_grad
    out, _ = Attend(target).raw(**x)
    out.sum().backward()
    assert x["q"].grad is not None
    assert x["k"].grad is None


@every_target
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_gradient_through_lse_counts_and_dead_rows_take_none(target: Target, dtype: str) -> None:
    """Returned but not differentiated, or NaN when used: flash-attention#889, pytorch#136232."""
    x = arrays(9, 6, D=8)
    case = case_of("lse", x, dtype, causal=True)
    x["dlse"] = np.random.default_rng(0).standard_normal((1, 2, 9))
    check(target, case, x)
    dout = np.zeros((1, 2, 9, 8))
    only_lse = Attend(target, dtype).gradients(
        **{at: x[at] for at in "qkv"}, dout=dout, dlse=x["dlse"], causal=True
    )
    assert only_lse["q"][:, :, 3:].any()
    assert not only_lse["q"][:, :, :3].any()
    assert not only_lse["v"].any()
    for value in (np.nan, np.inf):
        x["dlse"][:, :, :3] = value
        again = Attend(target, dtype).gradients(
            **{at: x[at] for at in "qkv"}, dout=dout, dlse=x["dlse"], causal=True
        )
        for at in "qkv":
            assert only_lse[at].tolist() == again[at].tolist()


@every_target
def test_lse_is_the_natural_logarithm_of_the_sum(target: Target) -> None:
    """One library's lse is in base 2 and the merge expects e: flashinfer#2113, vllm#28840."""
    attend = Attend(target, "float32")
    zeros = np.zeros((1, 1, 1, 8))
    for n in (1, 2, 16, 300):
        got = attend(zeros, np.zeros((1, 1, n, 8)), np.zeros((1, 1, n, 8))).lse
        assert abs(float(got[0, 0, 0]) - np.log(n)) <= 4 * 2.0**-24 * max(1.0, np.log(n))


@every_target
@pytest.mark.parametrize("m", [1, 33])
def test_lse_is_not_padded(target: Target, m: int) -> None:
    """Padded to 32 rows on one platform only: pytorch#146848."""
    x = arrays(m, 5, D=8)
    _, lse = Attend(target).raw(**{at: Attend(target).native(part) for at, part in x.items()})
    assert (1, 2, m) == tuple(lse.shape)


# dropout


@every_target
def test_the_backward_drops_what_the_forward_dropped(target: Target) -> None:
    """The seed was read before it was written and the backward drew another mask: pytorch PR #197563."""
    n = 70
    q, k, _ = drawn(n, n, H=2, D=8)
    eye = np.broadcast_to(np.eye(n), (1, 2, n, n)).copy()
    attend, options = Attend(target), {"dropout_p": 0.5, "seed": (SEED, 3)}
    # with v the identity out is the dropped P, and with dout the identity dv is its transpose
    forward = attend(q, k, eye, **options).out != 0
    backward = attend.gradients(q, k, eye, eye, needs=("v",), **options)["v"] != 0
    assert forward.tolist() == backward.swapaxes(2, 3).tolist()
    assert abs(forward.mean() - 0.5) < 5 * 0.5 / np.sqrt(forward.size)


@every_target
def test_dropout_keeps_the_expectation_and_does_not_renormalise(target: Target) -> None:
    """Over 4096 draws of one row the mean is the row without dropout, within five standard errors."""
    q, k, v = np.zeros((1, 1, 4096, 4)), np.zeros((1, 1, 20, 4)), np.ones((1, 1, 20, 4))
    rows = 4096 if target.fast else 512
    out = Attend(target)(q[:, :, :rows], k, v, dropout_p=0.25, seed=(SEED, 0)).out[0, 0, :, 0]
    deviation = np.sqrt(0.25 / 0.75 / 20)
    assert abs(out.mean() - 1) < 5 * deviation / np.sqrt(rows)
    assert abs(out.std() - deviation) < 5 * deviation / np.sqrt(rows)


@every_target
def test_lse_does_not_know_about_dropout(target: Target) -> None:
    x = arrays(9, 12, D=8)
    attend = Attend(target)
    assert attend(**x).lse.tolist() == attend(**x, dropout_p=0.5, seed=1).lse.tolist()


@every_target
def test_dropping_everything_gives_zeros_and_zero_gradients(target: Target) -> None:
    """1 / (1 - p) is infinite and times zero NaN; some check p < 1 instead."""
    x = arrays(9, 12, D=8)
    attend, dout = Attend(target), np.ones((1, 2, 9, 8))
    assert not attend(**x, dropout_p=1.0, seed=1).out.any()
    for grad in attend.gradients(**x, dout=dout, dropout_p=1.0, seed=1).values():
        assert not grad.any()


@every_target
@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_a_probability_is_between_zero_and_one(target: Target, p: float) -> None:
    """Torch's math path accepts -0.1, others assert without a message."""
    x = {at: Attend(target).native(part) for at, part in arrays(2, 2, D=8).items()}
    with pytest.raises(ValueError, match=r"^dropout_p: expected a probability in \[0, 1\], got"):
        Attend(target).raw(**x, dropout_p=p)


@every_target
def test_consecutive_calls_draw_different_masks_and_reseeding_repeats_them(target: Target) -> None:
    """Constants, or an offset that never advances: flash-attention#2088, #314."""
    x = {at: Attend(target).native(part) for at, part in arrays(20, 20, D=8).items()}

    def seed() -> None:
        if target.kind == "torch":
            import torch

            torch.manual_seed(5)
        else:
            np.random.seed(5)

    def call() -> Any:
        return values(Attend(target).raw(**x, dropout_p=0.5)[0]).tolist()

    seed()
    first, second = call(), call()
    seed()
    assert (first, second) == (call(), call())
    assert first != second


# zero sizes


@every_target
@pytest.mark.parametrize("sizes", [{"B": 0}, {"M": 0}, {"N": 0}, {"H": 0}, {"D": 0}, {"Dv": 0}], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_an_axis_of_length_zero_gives_zeros_of_the_right_shape(
    target: Target, sizes: dict[str, int], causal: bool
) -> None:
    """A division by zero in the process, or "batch must be positive": pytorch#141218, flash-attention PR #2776."""
    size = {"B": 2, "H": 2, "M": 3, "N": 5, "D": 8, "Dv": 6, **sizes}
    q = np.ones((size["B"], size["H"], size["M"], size["D"]))
    k, v = (np.ones((size["B"], size["H"], size["N"], size[at])) for at in ("D", "Dv"))
    dout = np.ones((*q.shape[:3], size["Dv"]))
    attend = Attend(target)
    got = attend(q, k, v, causal=causal)
    grads = attend.gradients(q, k, v, dout, np.ones(q.shape[:3]), causal=causal)
    assert dout.shape == got.out.shape
    assert [q.shape, k.shape, v.shape] == [grads[at].shape for at in "qkv"]
    if "N" in sizes:
        assert not got.out.any()
        assert np.isneginf(got.lse).all()
        assert not grads["q"].any()
    if "D" in sizes:  # all logits are 0: the mean of v
        assert {1.0} == set(got.out.ravel().tolist())


# repeatability


@every_target
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forward_and_backward_repeat_bit_for_bit(target: Target, dtype: str) -> None:
    """dq differed from run to run, even with the deterministic switch: flash-attention#2244, #414."""
    x = arrays(200, 200, H=4, Hkv=2, D=16)
    attend, dout = Attend(target, dtype), np.ones((1, 4, 200, 16))
    first, grads = attend(**x, causal=True), attend.gradients(**x, dout=dout, causal=True)
    for _ in range(3 if target.fast else 1):
        again = attend(**x, causal=True)
        assert first.out.tobytes() == again.out.tobytes()
        assert first.lse.tobytes() == again.lse.tobytes()
        for at, grad in attend.gradients(**x, dout=dout, causal=True).items():
            assert grads[at].tobytes() == grad.tobytes(), at


@every_target
def test_a_backward_that_may_differ_between_runs_is_still_right(target: Target) -> None:
    x = arrays(70, 90, H=2, D=8)
    check(target, case_of("not repeatable", x, deterministic=False, causal=True), x)


@every_target
def test_a_batch_entry_is_the_same_alone_and_among_others(target: Target) -> None:
    x = arrays(33, 40, B=3, D=8)
    out = Attend(target)(**x, causal=True).out
    for b in range(3):
        alone = Attend(target)(**{at: part[b : b + 1] for at, part in x.items()}, causal=True).out
        assert out[b].tolist() == alone[0].tolist()


@every_target
def test_merge_joins_what_this_backend_returns(target: Target) -> None:
    """First five keys and last four; a prefix of 4096 and a suffix of 16."""
    for n, cut in ((9, 5), (4112, 4096) if target.fast else (300, 260)):
        q, k, v = drawn(2, n, H=1, D=8)
        attend = Attend(target)
        x = [attend.native(part) for part in (q, k, v)]
        parts = [attend.raw(x[0], x[1][:, :, s], x[2][:, :, s]) for s in (slice(cut), slice(cut, n))]
        given = {"q": q, "k": k, "v": v}
        right = judge(case_of("merged", given), given)
        for at, got in zip(("out", "lse"), attnproof.merge(*parts[0], *parts[1]), strict=True):
            assert_close(values(got), right[at], at)
