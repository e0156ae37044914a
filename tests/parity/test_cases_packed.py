"""Packed sequences: what has gone wrong elsewhere, and the right value here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attnproof

from .checking import case_of, check
from .direct import Attend, drawn, varlen
from .problems import Array, draw, packed
from .targets import Target, every_target, values
from .tolerance import assert_close, judge


def sequence(x: Array, lengths: tuple[int, ...], b: int) -> Array:
    """Rows of sequence b of a packed array."""
    start = sum(lengths[:b])
    return x[start : start + lengths[b]]


@every_target
def test_many_queries_on_one_key_each_leave_all_but_one_row_dead(target: Target) -> None:
    """dq went NaN for lengths 76, 34 and 146 against one key: flash-attention#443, #1778."""
    lengths = (76, 34, 146) if target.fast else (19, 8, 36)
    case = packed(
        "one key each", lengths, (1, 1, 1), dtype="float16", D=32, Dv=32, spread=3, options={"causal": True}
    )
    result = check(target, case)
    if result is None:
        return
    dq, out = values(result.grads["q"]), values(result.out)
    for b, n in enumerate(lengths):
        assert not sequence(out, lengths, b)[: n - 1].any()
        assert not sequence(dq, lengths, b)[: n - 1].any()
        assert sequence(out, lengths, b)[n - 1 :].any()


@every_target
def test_lse_and_gradients_are_right_around_a_tile(target: Target) -> None:
    """A wrong lse in the tail row of 64 n + 1 queries spoiled the backward only: xformers 0.0.23."""
    check(target, packed("1, 65 and 129 queries", (1, 65, 129), (1, 65, 129), H=2, Hkv=1, D=8, Dv=8))


@every_target
@pytest.mark.parametrize("d", [64, 256])
def test_keys_without_queries_get_exactly_no_gradient(target: Target, d: int) -> None:
    """Their dk and dv stayed unwritten, or it crashed; no keys hung: flash-attention PR #2421, #2562."""
    lengths = ((0, 12, 8, 0), (25, 17, 9, 30))
    result = check(target, packed(f"no queries, D {d}", *lengths, H=4, Hkv=1, D=d, Dv=d))
    if result is not None:
        for at in "kv":
            grad = values(result.grads[at])
            assert not sequence(grad, lengths[1], 0).any()
            assert not sequence(grad, lengths[1], 3).any()
            assert sequence(grad, lengths[1], 1).any()


class Pack:
    """attention_varlen_with_lse() on one target, with lengths."""

    def __init__(self, target: Target, dtype: str = "float32") -> None:
        self.attend, self.target = Attend(target, dtype), target

    def __call__(
        self, q: Array, k: Array, v: Array, cu_q: Any, cu_k: Any, **options: Any
    ) -> tuple[Array, Array]:
        cu = [
            x if not isinstance(x, (list, tuple)) else self.target.array(np.array(x), "int32")
            for x in (cu_q, cu_k)
        ]
        given = self.attend.options(options)
        native = [self.attend.native(x) for x in (q, k, v)]
        return tuple(values(x) for x in varlen(self.target, *native, *cu, **given))


def tokens(total: int, **more: int) -> list[Array]:
    """Packed q, k and v of so many tokens."""
    return [x[0].swapaxes(0, 1) for x in drawn(total, total, **more)]


@every_target
@pytest.mark.parametrize("filler", [1e3, np.nan])
def test_padding_after_the_last_sequence_is_neither_read_nor_left_unwritten(
    target: Target, filler: float
) -> None:
    """Padding was mistaken for data, or came back as garbage: TransformerEngine#3331, #2186."""
    q, k, v = tokens(40, D=8)
    cu = [0, 9, 20, 28]
    clean, clean_lse = Pack(target)(q[:28], k[:28], v[:28], cu, cu, causal=True)
    for x in (q, k, v):
        x[28:] = filler
    out, lse = Pack(target)(q, k, v, cu, cu, causal=True)
    assert clean.tolist() == out[:28].tolist()
    assert clean_lse.tolist() == lse[:, :28].tolist()
    assert not out[28:].any()
    assert np.isneginf(lse[:, 28:]).all()


@every_target
def test_padding_between_sequences_is_a_sequence_that_nobody_else_sees(target: Target) -> None:
    """Valid lengths 9, 8, 8, 8 at starts 0, 12, 20, 28: the gap of three is an entry of its own in cu_seqlens."""
    q, k, v = tokens(40, D=8)
    for x in (q, k, v):
        x[9:12], x[36:] = 1e3, np.nan
    out, lse = Pack(target)(q, k, v, [0, 9, 12, 20, 28, 36], [0, 9, 12, 20, 28, 36])
    for start, stop in ((0, 9), (12, 20), (20, 28), (28, 36)):
        alone = {at: y[start:stop].swapaxes(0, 1)[None] for at, y in zip("qkv", (q, k, v), strict=True)}
        right = judge(case_of("alone", alone), alone, target.half_operands)
        assert_close(out[start:stop].swapaxes(0, 1)[None], right["out"], "out")
        assert_close(lse[None, :, start:stop], right["lse"], "lse")
    assert not out[36:].any()


@every_target
def test_sequences_never_see_each_other_whatever_they_hold(target: Target) -> None:
    q, k, v = tokens(30, D=8)
    cu = [0, 7, 19, 30]
    clean, _ = Pack(target)(q, k, v, cu, cu)
    for x in (q, k, v):
        x[7:19] = np.nan
    out, lse = Pack(target)(q, k, v, cu, cu)
    for rows in (slice(0, 7), slice(19, 30)):
        assert clean[rows].tolist() == out[rows].tolist()
        assert np.isfinite(lse[:, rows]).all()
    assert np.isnan(out[7:19]).all()


@every_target
def test_lengths_are_read_only_as_far_as_they_go(target: Target) -> None:
    """Surplus tiles read cu_seqlens past its end: flash-attention PR #2333. Huge values follow it here."""
    lengths = np.cumsum([0, 1, 2, 3, 4, 5, 6, 7])
    q, k, v = tokens(28, D=8)
    long = np.concatenate([lengths, np.full(600, 2**30)])
    whole = target.array(long, "int32")
    cu = whole[: len(lengths)]
    right, right_lse = Pack(target)(q, k, v, lengths.tolist(), lengths.tolist(), causal=True)
    out, lse = Pack(target)(q, k, v, cu, cu, causal=True, max_seqlen_q=512, max_seqlen_k=512)
    assert right.tolist() == out.tolist()
    assert right_lse.tolist() == lse.tolist()


@every_target
def test_a_packed_sequence_is_its_dense_twin(target: Target) -> None:
    """The same rows in the same order of tiles: nothing but addresses may differ."""
    q, k, v = drawn(20, 20, B=3, H=4, Hkv=2, D=8)
    out, lse = Attend(target)(q, k, v, causal=True)
    flat = [x.swapaxes(1, 2).reshape(60, -1, 8) for x in (q, k, v)]
    packed_out, packed_lse = Pack(target)(*flat, [0, 20, 40, 60], [0, 20, 40, 60], causal=True)
    assert out.swapaxes(1, 2).reshape(60, 4, 8).tolist() == packed_out.tolist()
    assert lse.swapaxes(0, 1).reshape(4, 60).tolist() == packed_lse.tolist()


@every_target
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_odd_length_split_unevenly_keeps_every_token(target: Target, dtype: str) -> None:
    """Seven tokens over two parts became six: TransformerEngine#1930."""
    q, k, v = drawn(7, 7, H=1, D=8)
    attend, x = Attend(target, dtype), {"q": q, "k": k, "v": v}
    native = {at: attend.native(part) for at, part in x.items()}
    whole = judge(case_of("seven keys", x, dtype), x)
    for cut in (3, 4, 6):
        cuts = (slice(cut), slice(cut, 7))
        parts = [attend.raw(native["q"], *(native[at][:, :, s] for at in "kv")) for s in cuts]
        for at, got in zip(("out", "lse"), attnproof.merge(*parts[0], *parts[1]), strict=True):
            assert_close(values(got), whole[at], at)
    # queries in parts: the second part's mask goes on where the first one's stopped
    mask, rows = attnproof.causal(), ((0, 4), (4, 7))
    outs = [
        attend.raw(native["q"][:, :, a:b], native["k"], native["v"], mask=mask.rows(a, b, 7, 7))[0]
        for a, b in rows
    ]
    right = judge(case_of("seven queries", x, dtype, causal=True), x)["out"]
    assert_close(np.concatenate([values(out) for out in outs], axis=2), right, "out")


def test_the_cases_of_this_file_are_drawn_as_they_are_named() -> None:
    """A packed case whose arrays were all of one sequence would prove nothing."""
    x = draw(packed("two", (3, 4), (5, 6)))
    assert ((7, 4, 16), (11, 2, 16), (4, 7)) == (x["q"].shape, x["k"].shape, x["dlse"].shape)
