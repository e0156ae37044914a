"""Streaming equals the reference on calls that nobody thought of: sizes, masks, strides, tiles, loop orders, splits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnproof import Mask, attention_with_lse, causal, merge, prefix, segments, window
from attnproof.backends import reference, streaming
from attnproof.masks import EDGE, FULL, SKIP
from attnproof.problem import GRADIENTS, Bound, Options, bind, bind_decode, bind_varlen

Array = np.ndarray[Any, Any]
# the same examples on every machine, and no verdict from a clock
bounded = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
lengths = st.integers(0, 40)
sides = st.integers(-1, 45)


@st.composite
def masks(draw: st.DrawFn, m: int, n: int, B: int, H: int) -> Any:
    """None, a mask object, booleans, or any of them joined."""
    parts: list[Any] = []
    if draw(st.booleans()):
        parts.append(
            prefix(draw(st.lists(st.integers(0, n + 3), min_size=B, max_size=B))) if B else prefix(0)
        )
    if draw(st.booleans()):
        q_ids, k_ids = (
            np.sort(draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))) for size in (m, n)
        )
        parts.append(segments(q_ids.astype(int), k_ids.astype(int)))
    if draw(st.booleans()):
        axes = [draw(st.sampled_from([1, size])) for size in (B, H, m, n)]
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        parts.append(rng.random(axes) < draw(st.sampled_from([0.1, 0.6, 0.95])))
    joined: Any = None
    for part in parts:
        joined = part if joined is None else (joined & part if isinstance(joined, Mask) else part & joined)
    return joined


@st.composite
def extras(draw: st.DrawFn, m: int, n: int, B: int, H: int) -> dict[str, Any]:
    """Options and score modifiers, each there or not."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    made: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "window": (draw(sides), draw(sides)),
        "align": draw(st.sampled_from(["bottom_right", "top_left"])),
        "scale": draw(st.sampled_from([None, 0.0, -0.7, 1.3])),
        "softcap": draw(st.sampled_from([None, 0.5, 20.0])),
        "dropout_p": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "seed": draw(st.integers(0, 2**62)),
        "mask": draw(masks(m, n, B, H)),
    }
    if draw(st.booleans()):
        axes = [draw(st.sampled_from([1, size])) for size in (B, H, m, n)]
        made["bias"] = np.where(rng.random(axes) < 0.1, -np.inf, rng.standard_normal(axes))
    if draw(st.booleans()):
        made["alibi_slopes"] = rng.uniform(0, 1, draw(st.sampled_from([(H,), (B, H)])))
    if draw(st.booleans()):
        made["sink"] = np.where(rng.random(H) < 0.3, -np.inf, rng.standard_normal(H))
    return made


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Normal numbers of this shape at any strides: permuted axes, steps, and backwards."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 2, -1])) for _ in shape]
    wide = tuple(shape[axis] * abs(steps[axis]) for axis in order)
    stored = rng.standard_normal(wide)
    back = np.transpose(stored, np.argsort(order))
    return back[tuple(slice(None, None, step) for step in steps)]


@st.composite
def dense(draw: st.DrawFn) -> tuple[Bound, Array, Array]:
    """A dense call, and gradients to send into it."""
    B, groups, ratio = draw(st.integers(0, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    m, n, d, dv = draw(lengths), draw(lengths), draw(st.integers(0, 9)), draw(st.integers(0, 9))
    H = groups * ratio
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    shapes = ((B, H, m, d), (B, groups, n, d), (B, groups, n, dv))
    q, k, v = (draw(views(shape, rng)) for shape in shapes)
    options = draw(extras(m, n, B, H))
    dout = draw(views((B, H, m, dv), rng))
    return bind(q, k, v, Options(**options)), dout, rng.standard_normal((B, H, m))


def agree(right: Any, got: Any, what: str) -> None:
    """Within 2^16 roundings of float64, infinities equal; the parity suite has the bound step by step."""
    assert right.shape == got.shape, what
    assert np.array_equal(np.isfinite(right), np.isfinite(got)), what
    assert np.allclose(right, got, rtol=2.0**-37, atol=2.0**-37, equal_nan=True), what


@bounded
@given(dense(), st.integers(1, 50), st.integers(1, 50), st.sampled_from(["queries", "keys"]))
def test_any_tiling_in_either_order_is_the_reference(
    call: tuple[Bound, Array, Array], block_m: int, block_n: int, order: Any
) -> None:
    bound, dout, dlse = call
    out, lse = streaming.forward(*bound, order=order, block_m=block_m, block_n=block_n)
    for name, right, got in zip(("out", "lse"), reference.forward(*bound), (out, lse), strict=True):
        agree(right, got, name)
    needs = frozenset(at for at in GRADIENTS if getattr(bound.tensors, at) is not None)
    right_grads = reference.backward(*bound, out, lse, dout, dlse, needs)
    grads = streaming.backward(*bound, out, lse, dout, dlse, needs, block_m=block_m, block_n=block_n)
    for name, right, got in zip(grads._fields, right_grads, grads, strict=True):
        assert (right is None) == (got is None)
        if right is not None:
            agree(right, got, name)


@st.composite
def cuts(draw: st.DrawFn, sequences: int) -> Array:
    """cu_seqlens of so many sequences, some of them empty."""
    return np.cumsum([0, *draw(st.lists(st.integers(0, 12), min_size=sequences, max_size=sequences))])


@bounded
@given(st.data(), st.integers(0, 4), st.integers(1, 20), st.integers(1, 20))
def test_packed_is_each_sequence_alone(data: st.DataObject, count: int, block_m: int, block_n: int) -> None:
    """Streaming and the reference on the packed call, against dense calls one by one."""
    rng = np.random.default_rng(count)
    cu_q, cu_k = data.draw(cuts(count)), data.draw(cuts(count))
    tail = data.draw(st.integers(0, 3))
    q, k, v = (data.draw(views((int(cu[-1]) + tail, 2, 4), rng)) for cu in (cu_q, cu_k, cu_k))
    options = Options(causal=data.draw(st.booleans()), window=(data.draw(sides), data.draw(sides)))
    bound = bind_varlen(q, k, v, cu_q, cu_k, None, None, options)
    out, lse = streaming.forward(*bound, block_m=block_m, block_n=block_n)
    for name, right, got in zip(("out", "lse"), reference.forward(*bound), (out, lse), strict=True):
        agree(right, got, name)
    for b in range(count):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one = (x.swapaxes(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        alone = attention_with_lse(*one, causal=options.causal, window=options.window, backend="reference")
        agree(alone[0][0], out[:, rows], "out alone")
        agree(alone[1][0], lse[:, rows], "lse alone")
    assert not out[:, cu_q[-1] :].any()


@bounded
@given(st.data(), st.integers(1, 3), st.integers(1, 6), st.integers(0, 6))
def test_paged_is_cached_is_dense(data: st.DataObject, B: int, page: int, width: int) -> None:
    """Where a key is stored must not matter, nor what is stored beside it."""
    rng = np.random.default_rng(page)
    capacity = page * width
    valid = np.array(data.draw(st.lists(st.integers(0, capacity), min_size=B, max_size=B)), np.int32)
    k, v = rng.standard_normal((2, B, 2, capacity, 4))
    for b, n in enumerate(valid):
        k[b, :, n:], v[b, :, n:] = np.nan, np.nan
    pages = rng.permutation(B * width + 2)[: B * width].reshape(B, width)
    pools = [np.full((B * width + 2, 2, page, 4), np.nan) for _ in range(2)]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[pages.ravel()] = x.reshape(B, 2, width, page, 4).swapaxes(1, 2).reshape(B * width, 2, page, 4)
    used = np.arange(width) * page < valid[:, None]
    table = np.where(used, pages, rng.choice([-1, 10**6], pages.shape))
    q = rng.standard_normal((B, 4, data.draw(st.integers(0, 3)), 4))
    options = Options(causal=data.draw(st.booleans()), window=(data.draw(sides), -1))
    cached = streaming.forward(*bind_decode(q, k, v, valid, None, options))
    paged = streaming.forward(
        *bind_decode(q, *pools, valid, table, options), block_n=data.draw(st.integers(1, 9))
    )
    plain = reference.forward(*bind_decode(q, *pools, valid, table, options))
    for name, a, b, c in zip(("out", "lse"), cached, paged, plain, strict=True):
        agree(c, a, f"cached {name}")
        agree(c, b, f"paged {name}")
    for b, n in enumerate(valid):
        one = (q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
        agree(
            attention_with_lse(*one, causal=options.causal, window=options.window)[0][0],
            cached[0][b],
            "alone",
        )


@bounded
@given(st.data(), st.integers(0, 30))
def test_keys_may_be_cut_anywhere_and_merged(data: st.DataObject, n: int) -> None:
    """Empty parts, parts that a row does not see, in any order of merging."""
    rng = np.random.default_rng(n)
    m = data.draw(st.integers(0, 6))
    q, k, v = (rng.standard_normal((1, 2, size, 4)) for size in (m, n, n))
    keep = rng.random((m, n)) < 0.4
    points = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    parts = []
    for start, stop in zip([0, *points], [*points, n], strict=True):
        keys = slice(start, stop)
        parts.append(attention_with_lse(q, k[:, :, keys], v[:, :, keys], mask=keep[:, keys]))
    out, lse = parts[0]
    for other in data.draw(st.permutations(parts[1:])):
        out, lse = merge(out, lse, *other)
    for name, right, got in zip(
        ("out", "lse"), attention_with_lse(q, k, v, mask=keep), (out, lse), strict=True
    ):
        agree(right, got, name)


@bounded
@given(st.data(), lengths, lengths, st.integers(1, 17), st.integers(1, 17))
def test_tiles_are_what_counting_pairs_says(
    data: st.DataObject, m: int, n: int, block_m: int, block_n: int
) -> None:
    """Skip: no pair; full: every pair. A full tile is not masked at all, and a skipped one never loaded."""
    mask = window(data.draw(sides), data.draw(sides))
    if data.draw(st.booleans()):
        mask = mask & causal(align=data.draw(st.sampled_from(["bottom_right", "top_left"])))
    if data.draw(st.booleans()):
        mask = mask & prefix(data.draw(lengths))
    lo, hi = mask.bounds(m, n)
    assert ((0 <= lo) & (lo <= hi) & (hi <= n)).all()
    seen = (np.arange(n) >= lo[:, None]) & (np.arange(n) < hi[:, None])
    tiles = mask.tiles(m, n, block_m, block_n)
    assert (-(-m // block_m), -(-n // block_n)) == tiles.kinds.shape
    for (i, j), kind in np.ndenumerate(tiles.kinds):
        tile = seen[i * block_m : (i + 1) * block_m, j * block_n : (j + 1) * block_n]
        assert (SKIP if not tile.any() else FULL if tile.all() else EDGE) == kind
    assert int(seen.sum()) == mask.pairs(m, n)


@bounded
@given(st.data(), st.integers(1, 20), st.integers(0, 20))
def test_rows_of_a_mask_are_rows_of_the_whole(data: st.DataObject, m: int, n: int) -> None:
    start = data.draw(st.integers(0, m))
    stop = data.draw(st.integers(start, m))
    mask = window(data.draw(sides), data.draw(sides)) & prefix(
        data.draw(st.lists(lengths, min_size=1, max_size=3))
    )
    part = mask.rows(start, stop, m, n)
    for b in range(mask.batch):
        for right, got in zip(mask.bounds(m, n, b), part.bounds(stop - start, n, b), strict=True):
            assert right[start:stop].tolist() == got.tolist()


@pytest.mark.parametrize("order", ["queries", "keys"])
def test_the_trace_shows_the_recurrence(order: Any) -> None:
    """Every step's factor is at most one, maxima never fall, and the last state is the result."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1, 24, 8))
    bound = bind(q, k, v, Options(causal=True))
    steps: list[streaming.Step] = []
    _, lse = streaming.forward(*bound, order=order, block_m=8, block_n=6, trace=steps.append)
    last: dict[tuple[int, int], streaming.Step] = {}
    for step in steps:
        assert (step.alpha <= 1).all()
        before = last.get(step.rows)
        if before is not None:
            assert (step.m >= before.m).all()
            assert np.array_equal(np.exp(before.m - step.m), step.alpha)
        last[step.rows] = step
    got = np.concatenate([last[rows].m + np.log(last[rows].l) for rows in sorted(last)])
    assert lse[0, 0].tolist() == got.tolist()
    assert [(0, 8), (8, 16), (16, 24)] == sorted(last)
