"""Bugs that other attention libraries had on devices, as tests; the number is the row of the case list.

Long because it is that list, one test a row.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attnproof import attention, attention_decode, attention_varlen, attention_with_lse  # noqa: E402

from . import exact  # noqa: E402

# the first matrix product of torch on autograd's own thread
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Equal inputs, and no plan of a test that changed how calls are planned."""
    from attnproof.backends.triton import registry

    torch.manual_seed(0)
    yield
    registry.forget()
    torch.cuda.empty_cache()


def randn(*shape: int, dtype: Any = BF16, grad: bool = False) -> Any:
    return torch.randn(*shape, dtype=torch.float32, device="cuda").to(dtype).requires_grad_(grad)


@pytest.mark.parametrize("n", [43, 77])
def test_a_bias_row_of_any_length_works(n: int) -> None:
    """11: alignment demands on the bias row, and gradients of a padded shape."""
    q, k, v = randn(1, 2, 16, 64, dtype=FP16), randn(1, 2, n, 64, dtype=FP16), randn(1, 2, n, 64, dtype=FP16)
    bias = randn(1, 1, 16, n, dtype=FP16, grad=True)
    out = attention(q, k, v, bias=bias, backend="triton")
    exact.assert_near(out, exact.attention(q, k, v, bias=bias)[0], FP16)
    out.float().sum().backward()
    wide = bias.detach().double().requires_grad_()
    exact.attention(q, k, v, bias=wide)[0].sum().backward()
    assert bias.shape == bias.grad.shape
    exact.assert_near(bias.grad, wide.grad, FP16, "dbias")


def test_a_mask_past_two_billion_entries_is_indexed_right() -> None:
    """13: row * stride + column of an N x N mask passes 2^31."""
    n, rows = 46352, 64
    q, k, v = (randn(1, 1, n, 64, grad=True) for _ in range(3))
    mask = torch.ones(n, n, dtype=torch.bool, device="cuda").tril_()
    mask[-rows:, ::3] = False
    out = attention(q, k, v, mask=mask, backend="triton")
    last = q[:, :, -rows:].detach().requires_grad_()
    right, _ = exact.attention(last, k.detach(), v.detach(), allowed=mask[-rows:])
    exact.assert_near(out[:, :, -rows:], right, BF16)
    dout = torch.zeros_like(out)
    dout[:, :, -rows:] = torch.randn_like(dout[:, :, -rows:])
    out.backward(dout)
    right.backward(dout[:, :, -rows:].double())
    exact.assert_near(q.grad[:, :, -rows:], last.grad.double(), BF16, "dq")
    assert 0 == q.grad[:, :, :-rows].abs().max().item()


def test_float32_is_not_tf32() -> None:
    """23: fp32 inputs through TF32 products are off by 1e-3 and more."""
    x = [randn(1, 2, 128, 32, dtype=FP32, grad=True) for _ in range(3)]
    out = attention(*x, causal=True, backend="triton")
    out.sum().backward()
    wide = [y.detach().double().requires_grad_() for y in x]
    exact.attention(*wide, allowed=exact.causal(128, 128))[0].sum().backward()
    assert max((a.grad - b.grad).abs().max().item() for a, b in zip(x, wide, strict=True)) < 1e-4


def test_backward_is_bitwise_repeatable() -> None:
    """25: dq from atomics differs between runs."""
    x = [randn(1, 8, 2048, 128, grad=True) for _ in range(3)]
    dout = randn(1, 8, 2048, 128)
    out = attention(*x, causal=True, backend="triton")
    first = torch.autograd.grad(out, x, dout, retain_graph=True)
    for _ in range(30):
        again = torch.autograd.grad(out, x, dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_large_batch_of_single_tokens_has_gradients() -> None:
    """26: a padded workspace that int32 cannot index."""
    x = [randn(8300, 16, 1, 128, grad=True) for _ in range(3)]
    out = attention(*x, backend="triton")
    out.float().sum().backward()
    half = [y[4150:].detach().requires_grad_() for y in x]
    attention(*half, backend="triton").float().sum().backward()
    assert all(torch.equal(a.grad[4150:], b.grad) for a, b in zip(x, half, strict=True))
    assert torch.equal(out, x[2].detach())


def test_keys_with_a_huge_stride_are_read_right() -> None:
    """27: key * stride passes 2^31 though the view is small."""
    n, batch = 24000, 700
    stores = [torch.empty(n, batch, 128, dtype=BF16, device="cuda") for _ in range(2)]
    k, v = (x.permute(1, 0, 2)[:, None] for x in stores)
    for x in (k, v):
        x[-1] = randn(1, n, 128)
    q = randn(1, 1, 16, 128, grad=True)
    views = [x[-1:].requires_grad_() for x in (k, v)]
    copies = exact.leaves(*views)
    dout = randn(1, 1, 16, 128)
    got, right = (attention(q, *x, backend="triton") for x in (views, copies))
    assert torch.equal(got, right)
    for a, b in zip(
        torch.autograd.grad(got, [q, *views], dout),
        torch.autograd.grad(right, [q, *copies], dout),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_append_writes_only_the_addressed_rows() -> None:
    """28: a batch stride of 2^30 elements made the append write into sequence 0."""
    buffer = torch.zeros(5, 4096, 2, 32, 32, 128, dtype=FP16, device="cuda")
    k, v = buffer[:, :, 0, 7], buffer[:, :, 1, 7]
    assert 2**30 == k.stride(0)
    lengths = torch.tensor([9, 4000, 17, 2047], dtype=torch.int32, device="cuda")
    new = [randn(4, 3, 32, 128, dtype=FP16) for _ in range(2)]
    q = randn(4, 3, 32, 128, dtype=FP16)
    attention_decode(
        q, k[1:], v[1:], lengths, k_new=new[0], v_new=new[1], layout="bmhd", causal=True, backend="triton"
    )
    for cache, rows in ((k, new[0]), (v, new[1])):
        for b, at in enumerate(lengths.tolist()):
            assert torch.equal(cache[b + 1, at : at + 3], rows[b])
            cache[b + 1, at : at + 3] = 0
    assert 0 == torch.count_nonzero(buffer).item()


@pytest.mark.parametrize(("batch", "heads"), [(65536, 1), (80000, 1), (1, 65536)])
def test_more_planes_than_a_grid_axis_holds(batch: int, heads: int) -> None:
    """29: batch or heads above 65535."""
    q, k, v = (randn(batch, heads, 4, 16) for _ in range(3))
    out = attention(q, k, v, causal=True, backend="triton")
    exact.assert_near(out, exact.attention(q, k, v, allowed=exact.causal(4, 4))[0], BF16)


def test_more_sequences_than_a_grid_axis_holds() -> None:
    """29: 65537 packed sequences of one token each attend to themselves."""
    q, k, v = (randn(65537, 1, 16) for _ in range(3))
    cu = torch.arange(65538, dtype=torch.int32, device="cuda")
    out = attention_varlen(q, k, v, cu, cu, max_seqlen_q=1, max_seqlen_k=1, backend="triton")
    assert torch.equal(out, v)


def test_a_failed_launch_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """30: a launch that the device refuses must not return unwritten memory."""
    from attnproof.backends.triton import configs, registry

    registry.forget()
    monkeypatch.setattr(registry, "config_of", lambda *_: configs.Config(128, 128, 8, 6))
    q, k, v = (randn(1, 2, 300, 256) for _ in range(3))
    with pytest.raises(Exception, match="shared memory|resource"):
        attention(q, k, v, backend="triton")


def test_forward_and_backward_tiles_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """33: a pre-pass on the forward's grid left part of delta garbage."""
    from attnproof.backends.triton import registry
    from attnproof.backends.triton.configs import Config

    sizes = {"forward": (128, 64), "dkdv": (64, 128), "dq": (32, 64)}
    registry.forget()
    monkeypatch.setattr(registry, "config_of", lambda p, which, x: Config(*sizes[which], 4, 1))
    x = [randn(1, 2, 192, 64, dtype=FP16, grad=True) for _ in range(3)]
    dout = randn(1, 2, 192, 64, dtype=FP16)
    wide = [y.detach().double().requires_grad_() for y in x]
    right = torch.autograd.grad(exact.attention(*wide)[0], wide, dout.double())
    got = torch.autograd.grad(attention(*x, backend="triton"), x, dout)
    for name, a, b in zip(("dq", "dk", "dv"), got, right, strict=True):
        exact.assert_near(a, b, FP16, name)


@pytest.mark.parametrize("m", [3, 5, 33])
def test_nothing_is_stored_past_the_last_row(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """36: rows past M were stored into the neighbour's memory."""
    from attnproof.backends.triton import launch

    buffer = torch.full((4, m + 200, 64), 7.0, dtype=FP16, device="cuda")
    inner = buffer[:, 100 : 100 + m].unsqueeze(0)
    monkeypatch.setattr(launch, "empty_out", lambda *_: inner)
    attention(
        randn(1, 4, m, 64, dtype=FP16), *(randn(1, 4, 50, 64, dtype=FP16) for _ in "kv"), backend="triton"
    )
    assert torch.all(buffer[:, :100] == 7.0)
    assert torch.all(buffer[:, 100 + m :] == 7.0)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_a_base_off_the_alignment_is_right(dtype: Any) -> None:
    """41: a view that starts at an odd element met 16-byte loads."""
    q, k, v = (randn(2 * 40 * 64 + 1, dtype=dtype)[1:].view(1, 2, 40, 64).requires_grad_() for _ in range(3))
    out, lse = attention_with_lse(q, k, v, causal=True, backend="triton")
    right, right_lse = exact.attention(q, k, v, allowed=exact.causal(40, 40))
    exact.assert_near(out, right.detach(), dtype)
    exact.assert_near(lse, right_lse.detach(), FP32, "lse")
    out.float().sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


def test_a_cache_that_starts_at_an_odd_element_is_right() -> None:
    """41: the same for a cache slice."""
    k, v = (randn(2 * 64 * 64 + 1, dtype=FP16)[1:].view(1, 2, 64, 64) for _ in "kv")
    q = randn(1, 4, 1, 64, dtype=FP16)
    out = attention_decode(q, k, v, torch.tensor([50], device="cuda"), backend="triton")
    exact.assert_near(out, exact.attention(q, k[:, :, :50], v[:, :, :50])[0], FP16)


def test_cumulative_lengths_are_not_read_past_their_end() -> None:
    """46: surplus tiles read behind cu_seqlens, which is a slice of a larger array here."""
    lengths = list(range(1, 8))
    ends = [sum(lengths[:at]) for at in range(8)]
    store = torch.full((64,), 2**31 - 1, dtype=torch.int32, device="cuda")
    store[:8] = torch.tensor(ends, dtype=torch.int32)
    x = [randn(28, 2, 32, dtype=FP16, grad=True) for _ in range(3)]
    out = attention_varlen(
        *x, store[:8], store[:8], max_seqlen_q=512, max_seqlen_k=512, causal=True, backend="triton"
    )
    out.float().sum().backward()
    for first, last in pairwise(ends):
        q, k, v = (y[None, first:last].transpose(1, 2) for y in x)
        right, _ = exact.attention(q, k, v, allowed=exact.causal(last - first, last - first))
        exact.assert_near(out[first:last].transpose(0, 1)[None], right, FP16)
    assert all(torch.isfinite(y.grad).all() for y in x)


@pytest.mark.parametrize("n", [1, 2, 17])
@pytest.mark.parametrize("splits", [1, 2, 8, 64])
def test_empty_splits_change_nothing(n: int, splits: int) -> None:
    """50, 51: parts without a key brought NaN, or overwrote a valid lse."""
    q, k, v = randn(2, 8, 1, 64), *(randn(2, 2, 4096, 64) for _ in "kv")
    k[:, :, n:] = torch.nan
    v[:, :, n:] = torch.nan
    lengths = torch.full((2,), n, dtype=torch.int32, device="cuda")
    out = attention_decode(q, k, v, lengths, num_splits=splits, backend="triton")
    exact.assert_near(out, exact.attention(q, k[:, :, :n], v[:, :, :n])[0], BF16)


def test_a_narrow_window_leaves_most_splits_empty() -> None:
    """50: the same, by a window."""
    q, k, v = randn(1, 4, 1, 64), *(randn(1, 4, 4096, 64) for _ in "kv")
    lengths = torch.tensor([4000], dtype=torch.int32, device="cuda")
    out = attention_decode(q, k, v, lengths, window=(2, 0), num_splits=16, backend="triton")
    exact.assert_near(out, exact.attention(q, k[:, :, 3997:4000], v[:, :, 3997:4000])[0], BF16)


def graph(run: Any) -> tuple[Any, Any]:
    """Warm up on a side stream, capture, and return (graph, result)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = run()
    return captured, result


def test_replay_follows_the_lengths_on_the_device() -> None:
    """56: a captured decode kept the lengths of its capture."""
    q, k, v = randn(1, 8, 1, 64), *(randn(1, 2, 1024, 64) for _ in "kv")
    lengths = torch.tensor([16], dtype=torch.int32, device="cuda")
    captured, out = graph(lambda: attention_decode(q, k, v, lengths, backend="triton"))
    for n in (5, 100, 1000):
        lengths.fill_(n)
        captured.replay()
        exact.assert_near(out, exact.attention(q, k[:, :, :n], v[:, :, :n])[0], BF16)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_forward_and_backward_can_be_captured() -> None:
    """A host sync, or an allocation outside the graph's pool, ends a capture."""
    x = [randn(2, 4, 200, 64, grad=True) for _ in range(3)]
    dout = randn(2, 4, 200, 64)

    def run() -> Any:
        out = attention(*x, causal=True, backend="triton")
        return (out, *torch.autograd.grad(out, x, dout))

    captured, got = graph(run)
    with torch.no_grad():
        for y in x:
            y.normal_()
    captured.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, run(), strict=True))


def test_dropout_keeps_the_same_pairs_forward_and_backward() -> None:
    """62: the backward drew another mask on a busy stream."""
    n = 128
    q, k = (randn(1, 1, n, 32, dtype=FP32, grad=True) for _ in range(2))
    v = torch.eye(n, device="cuda")[None, None].requires_grad_()
    for _ in range(50):
        busy = randn(2048, 2048)
        busy = busy @ busy
        weights = attention(q, k, v, dropout_p=0.5, backend="triton")
        # dv of an identity dout is the dropped p itself, transposed
        (dv,) = torch.autograd.grad(weights, v, torch.eye(n, device="cuda")[None, None])
        assert torch.equal(weights != 0, dv.transpose(-1, -2) != 0)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_replays_with_a_seed_on_the_device_draw_new_masks() -> None:
    """64: a seed frozen on the host gives every replay the same mask."""
    x = [randn(1, 2, 64, 32, dtype=FP32, grad=True) for _ in range(3)]
    rng = torch.tensor([1, 0], device="cuda")

    def run() -> Any:
        rng[1] += 1
        out = attention(*x, dropout_p=0.5, seed=rng, backend="triton")
        return (out, *torch.autograd.grad(out, x, torch.ones_like(out)))

    captured, got = graph(run)
    captured.replay()
    first = [y.clone() for y in got]
    captured.replay()
    assert not torch.equal(first[0], got[0])
    rng[1] -= 1
    assert all(torch.equal(a, b) for a, b in zip(got, run(), strict=True))


def test_work_goes_to_the_device_of_the_tensors() -> None:
    """70: tensors on cuda:1 while cuda:0 is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    x = [randn(1, 2, 100, 64).to("cuda:1") for _ in range(3)]
    out = attention(*x, causal=True, backend="triton")
    assert 0 == torch.cuda.current_device()
    right = attention(*(y.to("cuda:0") for y in x), causal=True, backend="triton")
    assert torch.equal(out.to("cuda:0"), right)
    with pytest.raises(TypeError):
        attention(x[0].to("cuda:0"), x[1], x[2], backend="triton")


def test_work_goes_to_the_stream_of_the_caller() -> None:
    """71: launched on the default stream, the kernel ran before its inputs were there."""
    stream = torch.cuda.Stream()
    source = randn(4096, 4096, dtype=FP32) / 64
    k, v = (randn(1, 2, 256, 64, dtype=FP32) for _ in "kv")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        x = source
        for _ in range(20):
            x = x @ source
            x = x / x.norm() * 64
        q = x[:2, : 256 * 16].reshape(1, 2, 64, 64)
        out = attention(q, k, v, backend="triton") * 1.0
    stream.synchronize()
    exact.assert_near(out, exact.attention(q, k, v)[0], FP32)


def test_many_repeats_of_a_backward_agree() -> None:
    """78: a missing barrier made results depend on timing."""
    q, dout = (randn(300, 1, 2048, 128) for _ in range(2))
    k, v = (randn(300, 1, 128, 128) * 3 for _ in "kv")
    x = [y.requires_grad_() for y in (q, k, v)]
    out = attention(*x, backend="triton")
    first = torch.autograd.grad(out, x, dout, retain_graph=True)
    for _ in range(50):
        again = torch.autograd.grad(out, x, dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("n", [512, 4096])
def test_descriptors_and_pointers_give_the_same_bits(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor descriptors are the fast way in, not another result."""
    from attnproof.backends.triton import arguments, configs, registry

    x = [randn(2, 4, n + 37, 128, grad=True) for _ in range(3)]
    dout = randn(2, 4, n + 37, 128)
    monkeypatch.setattr(configs, "DESCRIPTOR_WORK", 0)

    def run() -> Any:
        registry.forget()
        out = attention(*x, causal=True, window=(700, 0), backend="triton")
        return (out, *torch.autograd.grad(out, x, dout))

    described = run()
    monkeypatch.setattr(arguments, "boxes", lambda *_: {})
    assert all(torch.equal(a, b) for a, b in zip(described, run(), strict=True))


@pytest.mark.parametrize(("d", "dv"), [(16, 16), (32, 32), (64, 32), (32, 64), (96, 24)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("work", [0, 2**60])
def test_narrow_head_dims_are_repeatable(
    d: int, dv: int, causal: bool, work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A narrow operand of a warpgroup product was read from outside its memory: other bits at every call."""
    from attnproof.backends.triton import configs, registry

    monkeypatch.setattr(configs, "DESCRIPTOR_WORK", work)
    registry.forget()
    x = [randn(1, 2, 300, d, grad=True), randn(1, 2, 300, d, grad=True), randn(1, 2, 300, dv, grad=True)]
    dout = randn(1, 2, 300, dv)
    wide = [y.detach().double().requires_grad_() for y in x]
    allowed = exact.causal(300, 300) if causal else None
    right, _ = exact.attention(*wide, allowed=allowed)
    right = (right, *torch.autograd.grad(right, wide, dout.double()))
    for _ in range(3):
        out = attention(*x, causal=causal, backend="triton")
        got = (out, *torch.autograd.grad(out, x, dout))
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, right, strict=True):
            exact.assert_near(a.detach(), b.detach(), BF16, name)


def test_neighbour_sequences_never_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed tiles read past their sequence; NaN in the next one must not arrive, forward or backward."""
    from attnproof.backends.triton import configs, registry

    monkeypatch.setattr(configs, "DESCRIPTOR_WORK", 0)
    registry.forget()
    lengths = [100, 77, 64, 200]
    ends = [0, *(sum(lengths[: at + 1]) for at in range(4))]
    cu = torch.tensor(ends, dtype=torch.int32, device="cuda")
    x = [randn(ends[-1], 4, 64) for _ in range(3)]
    clean = [y.clone().requires_grad_() for y in x]
    for y in x:
        y[ends[1] : ends[2]] = torch.nan
    dirty = [y.requires_grad_() for y in x]
    dout = randn(ends[-1], 4, 64)
    got = []
    for y in (clean, dirty):
        out = attention_varlen(*y, cu, cu, max_seqlen_q=200, max_seqlen_k=200, causal=True, backend="triton")
        got.append((out, *torch.autograd.grad(out, y, dout)))
    others = [at for at in range(ends[-1]) if not ends[1] <= at < ends[2]]
    for a, b in zip(*got, strict=True):
        assert torch.equal(a[others], b[others])


@pytest.mark.parametrize("page", [5, 16, 256])
def test_a_shuffled_page_table_reads_the_same_keys(page: int) -> None:
    """Pages in any order, entries past the length pointing nowhere."""
    q, k, v = randn(3, 8, 2, 64), *(randn(3, 2, 1280, 64) for _ in "kv")
    lengths = torch.tensor([1280, 3, 700], dtype=torch.int32, device="cuda")
    width = 1280 // page
    order = list(range(3 * width))
    random.Random(0).shuffle(order)
    table = torch.tensor(order, dtype=torch.int32, device="cuda").view(3, width)
    pools = []
    for x in (k, v):
        pool = torch.full((3 * width, 2, page, 64), torch.nan, dtype=BF16, device="cuda")
        for b in range(3):
            pool[table[b].long()] = x[b, :, : width * page].view(2, width, page, 64).transpose(0, 1)
        pools.append(pool)
    table[1, 1 + 3 // page :] = 2**30
    dense = attention_decode(q, k, v, lengths, causal=True, backend="triton")
    paged = attention_decode(q, *pools, lengths, block_table=table, causal=True, backend="triton")
    exact.assert_near(paged, dense.double(), BF16)


def test_long_sequences_need_little_memory() -> None:
    """N = 131072, 8 heads of 64: forward and backward in less than 4 GB in all."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = [randn(1, 8, 131072, 64, grad=True) for _ in range(3)]
    out = attention(*x, causal=True, backend="triton")
    out.backward(torch.ones_like(out))
    assert torch.cuda.max_memory_allocated() - before < 4 * 2**30
    assert all(torch.isfinite(y.grad).all() for y in x)
