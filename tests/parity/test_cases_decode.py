"""Decoding: what has gone wrong elsewhere, and the right value here."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import attnproof
from attnproof.problem import Options, bind_decode

from .checking import case_of, check
from .direct import Attend, drawn, served, sparse, varlen
from .problems import Array
from .targets import Target, every_host_target, every_target, values
from .tolerance import Allowed, assert_close, judge


class Decode:
    """attention_decode() on one target."""

    def __init__(self, target: Target, dtype: str = "float32") -> None:
        self.attend, self.target = Attend(target, dtype), target

    def __call__(self, q: Array, k: Array, v: Array, lengths: Any, **options: Any) -> Array:
        table = options.pop("block_table", None)
        given = self.attend.options(options)
        table = None if table is None else self.target.array(np.asarray(table), "int32")
        native = [self.attend.native(x) for x in (q, k, v)]
        lengths = self.target.array(np.asarray(lengths), "int32")
        return values(decode(self.target, *native, lengths, block_table=table, **given))


def decode(target: Target, q: Any, k: Any, v: Any, lengths: Any, **given: Any) -> Any:
    """attention_decode() on native arrays."""
    return served(
        target,
        lambda: attnproof.attention_decode(q, k, v, lengths, backend=target.backend, **given),
        lambda: bind_decode(q, k, v, lengths, given.get("block_table"), Options()),
    )


@every_target
@pytest.mark.parametrize("keys", [1024, 1025])
def test_many_query_heads_on_two_key_heads_read_their_own(target: Target, keys: int) -> None:
    """The second pass used the stride of the wrong head count and read past K: pytorch#174861."""
    d = 128 if target.fast else 32
    q, k, v = drawn(1, keys, H=32, Hkv=2, D=d)
    right = repeated(keys, d)
    assert_close(Decode(target)(q, k, v, [keys]), right, "out")
    assert_close(Attend(target)(q, k, v).out, right, "out")


@functools.cache
def repeated(keys: int, d: int) -> Allowed:
    """The same with every key head repeated sixteen times."""
    q, k, v = drawn(1, keys, H=32, Hkv=2, D=d)
    x = {"q": q, "k": np.repeat(k, 16, axis=1), "v": np.repeat(v, 16, axis=1)}
    return judge(case_of("repeated heads", x), x)["out"]


@every_target
def test_a_window_holds_while_decoding(target: Target) -> None:
    """Keys 0 to 23 are poisoned: nanochat#452."""
    q, k, v = drawn(1, 32, D=8)
    clean = Decode(target)(q, k, v, [32], causal=True, window=(7, 0))
    k[:, :, :24], v[:, :, :24] = 1e4, 1e4
    assert clean.tolist() == Decode(target)(q, k, v, [32], causal=True, window=(7, 0)).tolist()
    last = {"q": q, "k": k[:, :, 24:], "v": v[:, :, 24:]}
    assert_close(clean, judge(case_of("eight keys", last), last)["out"], "out")


@every_target
@pytest.mark.parametrize("unused", [-1, 10**6])
def test_unused_entries_of_a_page_table_are_never_followed(target: Target, unused: int) -> None:
    """A bad id read as page 0 turns a crash into silent corruption: onnxruntime#32391, vllm flash-attention#42."""
    q, k, v = drawn(1, 48, B=2, H=4, Hkv=2, D=8)
    table = np.array([[4, unused, unused, unused], [2, 5, 1, unused]])
    pools = []
    for x in (k, v):
        pool = np.full((6, 2, 16, 8), np.nan)
        pool[4] = x[0, :, :16]
        pool[[2, 5, 1]] = x[1].reshape(2, 3, 16, 8).swapaxes(0, 1)
        pools.append(pool)
    out = Decode(target)(q, *pools, [5, 33], block_table=table)
    for b, n in enumerate((5, 33)):
        x = {"q": q[b : b + 1], "k": k[b : b + 1, :, :n], "v": v[b : b + 1, :, :n]}
        assert_close(out[b : b + 1], judge(case_of(f"{n} keys", x), x)["out"], "out")
    if target.device != "cpu":
        return  # a table on a device is not read back
    table[1, 1] = 6
    with pytest.raises(ValueError, match=r"^block_table\[1\]: expected used pages in \[0, 6\), got 6$"):
        Decode(target)(q, *pools, [5, 33], block_table=table)


@every_target
@pytest.mark.parametrize("history", [0, 63, 64, 65, 200])
def test_a_row_of_a_chunk_does_not_depend_on_later_tokens(target: Target, history: int) -> None:
    """From 64 cached tokens on it did: tt-metal#48899."""
    n = history + 5
    q, k, v = drawn(5, n, H=2, D=8)
    k_other, v_other = k.copy(), v.copy()
    k_other[:, :, n - 1], v_other[:, :, n - 1] = 3.0, -9.0
    decode = Decode(target)
    a, b = (decode(q, kk, vv, [n], causal=True) for kk, vv in ((k, v), (k_other, v_other)))
    assert a[:, :, :4].tolist() == b[:, :, :4].tolist()
    assert a[:, :, 4].tolist() != b[:, :, 4].tolist()


@every_target
@pytest.mark.parametrize("keys", [1, 2, 17, 200])
@pytest.mark.parametrize("splits", [1, 2, 8, 64])
def test_any_number_of_splits_gives_the_same_result(target: Target, keys: int, splits: int) -> None:
    """Empty splits brought NaN or overwrote a valid lse: tilelang#328, aiter#4420. The window leaves most empty."""
    q, k, v = drawn(1, keys, H=2, D=8)
    for window in ((-1, -1), (3, 0)):
        x = {"q": q, "k": k, "v": v}
        right = judge(case_of("splits", x, window=window), x)
        got = Decode(target)(q, k, v, [keys], num_splits=splits, window=window)
        assert_close(got, right["out"], "out")


@every_target
def test_a_sink_is_counted_once_however_the_keys_are_split(target: Target) -> None:
    q, k, v = drawn(1, 40, H=2, D=8)
    x = {"q": q, "k": k, "v": v, "sink": np.array([0.5, 3.0])}
    right = judge(case_of("sink", x), x)
    for splits in (1, 2, 5, 64):
        assert_close(Decode(target)(q, k, v, [40], sink=x["sink"], num_splits=splits), right["out"], "out")


@every_target
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_size_of_the_buffer_does_not_matter(target: Target, dtype: str) -> None:
    """The split was chosen from the buffer instead of the valid length: flash-attention#1417."""
    size, length = (8192, 1000) if target.fast else (1024, 125)
    q, k, v = drawn(1, size, H=2, D=16)
    decode = Decode(target, dtype)
    whole = [decode(q, k, v, [length], num_splits=splits) for splits in (1, None)]
    cut = [decode(q, k[:, :, :length], v[:, :, :length], [length], num_splits=splits) for splits in (1, None)]
    assert whole[0].tolist() == cut[0].tolist()
    # rounding is relative to what was summed: sum p |v|, not to what its signs leave over
    summed = decode(q, k[:, :, :length], np.abs(v[:, :, :length]), [length])
    ulp = np.spacing(summed.astype(np.float32)) * (1 if dtype == "float32" else 2.0**16)
    assert float((np.abs(whole[1] - cut[1]) / ulp).max()) <= 2


@every_target
@pytest.mark.parametrize("filler", [np.nan, np.inf, 1e4])
def test_the_tail_of_a_cache_never_leaks(target: Target, filler: float) -> None:
    """0 * NaN is NaN: keys past the length must not be multiplied at all."""
    q, k, v = drawn(3, 40, B=3, H=2, D=8)
    lengths = [17, 3, 40]
    clean = Decode(target)(q, k, v, lengths, causal=True)
    for b, n in enumerate(lengths):
        k[b, :, n:], v[b, :, n:] = filler, filler
    assert clean.tolist() == Decode(target)(q, k, v, lengths, causal=True).tolist()


@every_target
@pytest.mark.parametrize("scale", [None, 0.125, 0.5, 1.0])
def test_the_scale_is_used_on_every_path(target: Target, scale: float | None) -> None:
    """Accepted and not used on one path; None read as 1: tt-metal#33304."""
    q, k, v = drawn(3, 20, H=2, D=16)
    x = {"q": q, "k": k, "v": v}
    case = case_of(f"scale {scale}", x, scale=scale, causal=True)
    check(target, case, x)
    right = judge(case, x)["out"]
    assert_close(Decode(target)(q, k, v, [20], scale=scale, causal=True), right, "decode")
    flat = [target.array(y[0].swapaxes(0, 1), "float32") for y in (q, k, v)]
    cu = [target.array(np.array([0, n]), "int32") for n in (3, 20)]
    out, _ = varlen(target, *flat, *cu, scale=scale, causal=True)
    assert_close(values(out).swapaxes(0, 1)[None], right, "packed")


@every_target
def test_an_append_is_seen_and_stored(target: Target) -> None:
    q, k, v = drawn(3, 20, B=2, H=4, Hkv=2, D=8)
    attend = Attend(target)
    caches = [
        attend.native(np.concatenate([x[:, :, :17], np.full((2, 2, 8, 8), np.nan)], axis=2)) for x in (k, v)
    ]
    new = {"k_new": attend.native(k[:, :, 17:]), "v_new": attend.native(v[:, :, 17:])}
    lengths = target.array(np.array([17, 17]), "int32")
    out = decode(target, attend.native(q), *caches, lengths, **new, causal=True)
    x = {"q": q, "k": k, "v": v}
    assert_close(values(out), judge(case_of("append", x, causal=True), x)["out"], "out")
    for cache, right in zip(caches, (k, v), strict=True):
        assert right.tolist() == values(cache)[:, :, :20].tolist()
        assert np.isnan(values(cache)[:, :, 20:]).all()


@every_host_target
@pytest.mark.parametrize("batch", [(1, 3), (0, 1, 2)])
def test_an_append_through_a_far_stride_changes_only_its_rows(
    target: Target, batch: tuple[int, ...], tmp_path: Any
) -> None:
    """A batch stride of 2^30 elements wrote row 1 into row 0: flash-attention#772. The file is full of holes."""
    step, rows = 2**30, len(batch)
    memory = sparse(tmp_path / "holes", (rows - 1) * step + 2 * 6 * 2 * 8, np.float16)
    shape, strides = (rows, 6, 2, 8), (step * 2, 2 * 2 * 8 * 2, 8 * 2, 2)
    attend = Attend(target, "float16")
    views = [np.lib.stride_tricks.as_strided(memory[16 * at :], shape, strides) for at in range(2)]
    if target.kind == "torch":
        import torch

        views = [torch.from_numpy(view) for view in views]
    q, k, v = drawn(1, 3, B=rows, H=2, D=8)
    new = {at: attend.native(x).swapaxes(1, 2) for at, x in (("k_new", k), ("v_new", v))}
    lengths = target.array(np.array(batch), "int32")
    attnproof.attention_decode(
        attend.native(q).swapaxes(1, 2), *views, lengths, layout="bmhd", backend=target.backend, **new
    )
    for view, right in zip(views, (k, v), strict=True):
        got = values(view)
        for b, start in enumerate(batch):
            assert right[b].swapaxes(0, 1).tolist() == got[b, start : start + 3].tolist()
            assert not got[b, :start].any()
            assert not got[b, start + 3 :].any()
