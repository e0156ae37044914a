"""Accounts of whole passes, the cache replay and the rooflines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from attnproof.ledger import accounts, documents
from attnproof.ledger.cache import Cache, on, replay
from attnproof.ledger.hardware import get
from attnproof.ledger.roofline import roofline
from attnproof.ledger.traffic import Call, Touch
from attnproof.masks import Mask, causal, window
from attnproof.problem import Options, bind, bind_varlen

H200, MI50 = get("h200"), get("mi50")
MB = 1e6


@pytest.mark.parametrize("length", [512, 1000, 4096])
def test_the_exact_keys_outer_account_reduces_to_the_tutorials_formula(length) -> None:
    """With statistics of one element, as the tutorial counts them, both must agree to the byte."""
    exact = accounts.keys_outer(Call.dense(length), 64, 384, stat=2)
    assert exact.total == documents.io_row(length).flash_bytes


def test_the_eager_account_without_a_mask_is_the_tutorials_naive_form() -> None:
    assert accounts.eager(Call.dense(4096)).total == documents.io_row(4096).naive_bytes


def test_eager_computes_and_moves_every_pair_whatever_the_mask() -> None:
    full, cut = accounts.eager(Call.dense(256)), accounts.eager(Call.dense(256, mask=causal()))
    assert cut.executed_flops == full.executed_flops
    square = 256 * 256
    assert (
        cut.total - full.total == 2 * 2 * square + square
    )  # a mask kernel: s read, s written, one byte of mask
    assert cut.flops < full.flops


def test_grouped_heads_share_keys_in_ours_and_are_repeated_by_eager() -> None:
    grouped, single = Call.dense(256, heads=8, kv_heads=2), Call.dense(256, heads=8)
    assert "repeat k" in accounts.eager(grouped).by_kernel()
    assert accounts.backward(grouped).total < accounts.backward(single).total
    memory = [on(H200, accounts.forward(call)).read for call in (grouped, single)]
    row = 256 * 64 * 2
    assert memory == [(8 + 2 + 2) * row, (8 + 8 + 8) * row]


def test_a_causal_forward_asks_for_the_share_of_tiles_that_causality_keeps() -> None:
    """T5: (T + 1) / 2T of the tiles are kept, so of the k and v bytes too."""
    read = {}
    for name, mask in (("full", Mask()), ("causal", causal())):
        account = accounts.forward(Call.dense(4096, mask=mask), 64, 64)
        read[name] = sum(entry.read for entry in account.entries if entry.tensor in "kv")
    assert read["causal"] * 2 * 64 == read["full"] * 65


def test_decode_reads_the_cache_once_for_a_group_and_pays_for_splits_with_partials() -> None:
    call = Call.dense(1, keys=8192, heads=32, kv_heads=8, head_dim=128)
    one, many = accounts.decode(call), accounts.decode(call, splits=16)
    cache = 2 * 8 * 8192 * 128 * 2
    assert sum(e.read for e in one.entries if e.tensor in "kv") == cache
    assert sum(e.read for e in many.entries if e.tensor in "kv") == cache
    partial = 16 * 32 * (128 * 4 + 4)
    assert many.by_kernel()["decode"][1] == partial
    assert many.by_kernel()["combine"] == (partial, 32 * (128 * 2 + 4))
    assert many.kernels[0].blocks == 16 * one.kernels[0].blocks


def test_the_atomic_backward_does_five_products_and_two_sweeps_do_seven() -> None:
    call = Call.dense(1024)
    pairs = 1024 * 1024
    assert accounts.backward_atomic(call).executed_flops == 5 * 2 * 64 * pairs
    assert accounts.backward(call).executed_flops == 7 * 2 * 64 * pairs
    assert accounts.backward(call).flops == accounts.backward_atomic(call).flops == 10 * 64 * pairs


def test_a_boolean_mask_and_a_bias_are_read_where_tiles_are_computed() -> None:
    keep = np.ones((1, 1, 64, 64), bool)
    call = replace(Call.dense(64, heads=2, mask=causal() & keep), bias_bytes=4)
    account = accounts.forward(call, 32, 32)
    area = 3 * 32 * 32 * 2  # three of four tiles, two heads
    assert {e.tensor: e.read for e in account.entries if e.tensor in ("mask", "bias")} == {
        "mask": area,
        "bias": 4 * area,
    }
    kernels = accounts.eager(call).by_kernel()
    assert {"bias", "mask"} <= set(kernels)


def test_a_call_is_read_off_a_bound_problem() -> None:
    q, k, v = np.zeros((2, 4, 10, 8)), np.zeros((2, 2, 12, 8)), np.zeros((2, 2, 12, 6))
    call = Call.of(*bind(q, k, v, Options(causal=True, bias=np.zeros((10, 12)))))
    assert call.lengths == ((10, 12), (10, 12))
    assert (call.heads, call.kv_heads, call.head_dim, call.value_dim) == (4, 2, 8, 6)
    assert (call.dtype, call.bias_bytes) == ("float64", 8)
    assert call.pairs == 2 * 4 * sum(i + 3 for i in range(10))


def test_packed_rows_are_counted_with_their_own_lengths() -> None:
    cu_q, cu_k = (np.array(x, np.int32) for x in ([0, 3, 3, 40], [0, 5, 9, 50]))
    q, k = np.zeros((40, 1, 8)), np.zeros((50, 1, 8))
    call = Call.of(*bind_varlen(q, k, k, cu_q, cu_k, None, None, Options(causal=True, mask=window(20, -1))))
    assert call.lengths == ((3, 5), (0, 4), (37, 41))
    account = accounts.forward(call, 16, 16)
    assert sum(e.written for e in account.entries if e.tensor == "out") == 40 * 8 * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [({"heads": 3, "kv_heads": 2}, "heads: expected a multiple of 2"), ({"lengths": ((-1, 2),)}, "lengths")],
)
def test_an_impossible_call_is_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Call.dense(8), **change)


def test_blocks_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="tile: expected blocks of 1 or more"):
        accounts.forward(Call.dense(8), 0, 16).kernels[0].blocks  # noqa: B018


# the cache


def test_a_write_reaches_memory_only_when_it_is_pushed_out() -> None:
    cache = Cache(1 << 20)
    cache.touch(Touch("a", 0, 1 << 20, write=True))
    assert (cache.read, cache.written, cache.dirty) == (0, 0, 1 << 20)
    cache.touch(Touch("b", 0, 1 << 19))
    assert (cache.read, cache.written, cache.dirty) == (1 << 19, 1 << 19, 1 << 19)


def test_a_read_of_what_was_just_written_is_free() -> None:
    cache = Cache(1 << 20)
    cache.touch(Touch("a", 5000, 90000, write=True))
    cache.touch(Touch("a", 6000, 80000))
    assert (cache.read, cache.dirty) == (0, 85000)


def test_the_least_recently_used_goes_first() -> None:
    cache = Cache(1 << 20)
    half = 1 << 19
    for tensor in ("a", "b", "a", "c"):
        cache.touch(Touch(tensor, 0, half))
    before = cache.read
    cache.touch(Touch("a", 0, half))
    assert cache.read == before
    cache.touch(Touch("b", 0, half))
    assert cache.read == before + half


def test_many_heads_of_eager_move_every_byte_of_their_squares() -> None:
    """Known from counters, fp16, D=64, N=4096, H=32: 1047 MB written for s, 1091 MB read for p and v."""
    memory = on(H200, accounts.eager(Call.dense(4096, heads=32)))
    moved = {kernel.kernel: kernel for kernel in memory.kernels}
    assert moved["scores"].written / MB == pytest.approx(1047, rel=0.05)
    assert moved["output"].read / MB == pytest.approx(1091, rel=0.01)


def test_one_head_of_eager_stays_in_the_l2_in_part() -> None:
    """What ncu counted there on an H200, in MB: 1 and 5, 18 and 40, 16 and 8, where the account says 130 MiB."""
    call = Call.dense(4096)
    memory = on(H200, accounts.eager(call))
    assert 2 / 3 <= memory.total / (87 * MB) <= 3 / 2
    assert all(kernel.read + kernel.written < 60 * MB for kernel in memory.kernels)
    assert accounts.eager(call).total > 130 * MB


def test_a_forward_pass_reads_its_operands_once_though_it_asks_many_times() -> None:
    call = Call.dense(16384, heads=8)
    account = accounts.forward(call)
    memory = on(H200, account)
    operand = 8 * 16384 * 64 * 2
    assert memory.read == 3 * operand
    assert memory.written + memory.resident == operand + 8 * 16384 * 4
    assert account.read > 40 * memory.read


def test_keys_that_outgrow_a_small_cache_are_fetched_again_by_every_wave() -> None:
    account = accounts.forward(Call.dense(65536, head_dim=128))
    keys = 2 * 65536 * 128 * 2
    assert on(H200, account).read == pytest.approx(keys * 1.5, rel=0.01)
    # 512 query tiles, 60 blocks at a time on the MI50: nine passes over keys that its 4 MiB cannot hold
    assert on(MI50, account).read == pytest.approx(keys * 9.5, rel=0.01)


def test_a_warm_cache_saves_what_the_pass_before_left_in_it() -> None:
    call = Call.dense(1024, heads=4)
    fwd, bwd = accounts.forward(call), accounts.backward(call)
    cold, warm = on(H200, bwd), on(H200, fwd, bwd, counted=1)
    assert [k.kernel for k in warm.kernels] == ["delta", "dk, dv", "dq"]
    # only dout is new after the forward pass
    assert warm.read == 4 * 1024 * 64 * 2
    assert cold.read > warm.read


def test_accounts_can_be_replayed_in_a_row_and_reported_together() -> None:
    call = Call.dense(256)
    memory = replay([accounts.forward(call), accounts.backward(call)], 1 << 30, 8)
    assert [k.kernel for k in memory.kernels] == ["forward", "delta", "dk, dv", "dq"]


def test_streams_far_above_the_cache_are_counted_without_replaying_every_chunk(monkeypatch) -> None:
    """A million keys must not take minutes; the short cut may only cost the cache's own size."""
    call = Call.dense(8192)
    exact = replay(accounts.eager(call), 1 << 19, 8)
    monkeypatch.setattr("attnproof.ledger.cache.STREAM", 1 << 60)
    slow = replay(accounts.eager(call), 1 << 19, 8)
    assert abs(exact.total - slow.total) <= 4 << 19
    assert exact.total >= 0.99 * accounts.eager(call).total


# rooflines


def test_at_d_64_an_h200_spends_as_long_on_exponentials_as_on_products() -> None:
    line = roofline(accounts.forward(Call.dense(16384, heads=32)), H200)
    assert set(line.limits) == {"products", "exponentials"}
    assert "matrix products" in line.sentence and "exponentials" in line.sentence
    assert roofline(accounts.forward(Call.dense(16384, heads=32, head_dim=128)), H200).limits == ("products",)


def test_the_classic_roofline_does_not_see_the_exponentials() -> None:
    """At D = 32 they take twice as long as the products: the two-term form is too low by that factor."""
    line = roofline(accounts.forward(Call.dense(16384, heads=32, head_dim=32)), H200)
    assert line.limits == ("exponentials",)
    assert line.seconds / line.classic_seconds == pytest.approx(2, rel=0.05)
    assert line.seconds <= line.serial_seconds


def test_eager_is_limited_by_memory_and_the_tile_loop_is_not() -> None:
    call = Call.dense(8192, heads=32)
    assert roofline(accounts.eager(call), H200).limits == ("memory",)
    assert "memory" not in roofline(accounts.forward(call), H200).limits


def test_without_a_matrix_unit_products_and_exponentials_share_one_pipe() -> None:
    line = roofline(accounts.forward(Call.dense(4096, heads=16)), MI50)
    (kernel,) = line.kernels
    assert line.limits == ("vector unit",)
    assert set(kernel.terms) == {"memory", "ports", "vector unit"}
    products = 16 * 4096 * 4096 * 4 * 64 / 26.5e12
    assert kernel.terms["vector unit"] > products


def test_a_decode_without_splits_is_limited_by_the_few_blocks_it_has() -> None:
    call = Call.dense(1, keys=32768, heads=32, kv_heads=8, head_dim=128)
    one, many = (roofline(accounts.decode(call, splits), H200) for splits in (1, 16))
    assert "6% of the units busy" in one.sentence
    assert many.kernels[0].limits == ("memory",)
    assert one.seconds > 4 * many.seconds


def test_intensity_compares_asked_for_flop_with_bytes_that_reach_memory() -> None:
    call = Call.dense(4096, heads=32)
    line = roofline(accounts.eager(call), H200)
    assert line.balance == pytest.approx(989.4e12 / 4800e9)
    assert line.intensity < line.balance < roofline(accounts.forward(call), H200).intensity


def test_a_backward_after_its_forward_finds_a_warm_cache() -> None:
    call = Call.dense(1024, heads=4)
    fwd, bwd = accounts.forward(call), accounts.backward(call)
    assert roofline(bwd, H200, fwd).memory.read < roofline(bwd, H200).memory.read


def test_no_work_is_limited_by_nothing() -> None:
    line = roofline(accounts.forward(Call.dense(0)), H200)
    assert line.seconds == 0
    assert line.sentence == "nothing: there is no work"
