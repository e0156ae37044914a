"""Gradients in torch: numerically right for every input and option, and only those that are asked for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attnproof  # noqa: E402
from attnproof import attention, attention_varlen_with_lse, attention_with_lse, dispatch  # noqa: E402
from attnproof.backends import math, streaming  # noqa: E402
from attnproof.errors import Unsupported  # noqa: E402

B, H, HKV, M, N, D, DV = 2, 2, 1, 3, 4, 2, 2


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def leaf(*shape: int, dtype: Any = None) -> Any:
    return torch.randn(*shape, dtype=dtype or torch.float64, requires_grad=True)


def qkv(dtype: Any = None) -> tuple[Any, Any, Any]:
    return leaf(B, H, M, D, dtype=dtype), leaf(B, HKV, N, D, dtype=dtype), leaf(B, HKV, N, DV, dtype=dtype)


def visible(lse: Any) -> Any:
    """lse of rows that see something: -inf has no finite difference."""
    return torch.where(lse.isneginf(), 0, lse)


def checked(function: Any, *inputs: Any, **options: Any) -> bool:
    """Both outputs against central differences; the step is small enough for float64 and large enough for tanh."""
    names = [name for name, x in options.items() if isinstance(x, torch.Tensor) and x.requires_grad]
    tensors = (*inputs, *(options[name] for name in names))

    def call(*values: Any) -> tuple[Any, Any]:
        changed = dict(zip(names, values[len(inputs) :], strict=True))
        out, lse = function(*values[: len(inputs)], **{**options, **changed})
        return out, visible(lse)

    return torch.autograd.gradcheck(call, tensors)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window and cap": {"window": (1, 2), "softcap": 0.7, "scale": 0.9},
    "dead rows": {
        "causal": True,
        "window": (0, -1),
        "mask": torch.tensor([[True] * N, [False] * N, [True] * N]),
    },
    "dropout": {"dropout_p": 0.4, "seed": 11},
    "everything": {"causal": True, "softcap": 1.5, "dropout_p": 0.2, "seed": 3, "mask": attnproof.prefix(2)},
}


@pytest.mark.parametrize("backend", ["streaming", "math"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_every_input_and_lse_pass_gradcheck(options: Any, backend: str) -> None:
    """One missing factor (cap, scale, group sum, dlse) is a gradient that trains to something else."""
    extras = {"bias": leaf(H, 1, N), "alibi_slopes": leaf(B, H), "sink": leaf(H)}
    assert checked(attention_with_lse, *qkv(), **options, **extras, backend=backend)


@pytest.mark.parametrize(
    "shape", [(M, N), (1, 1, 1, N), (1, H, M, N), (B, 1, M, N), (H, M, 1), (B, H, M, N)], ids=str
)
def test_a_bias_that_broadcasts_passes_gradcheck(shape: tuple[int, ...]) -> None:
    """Summed over a wrong axis, or not summed, the gradient has the wrong shape or the wrong size."""
    q, k, v = (x.detach() for x in qkv())
    bias = leaf(*shape)
    assert checked(lambda bias: attention_with_lse(q, k, v, bias=bias, causal=True), bias)
    attention(q, k, v, bias=bias).sum().backward()
    assert (shape, torch.float64) == (tuple(bias.grad.shape), bias.grad.dtype)


@pytest.mark.parametrize("shape", [(H,), (B, H)], ids=str)
def test_alibi_slopes_pass_gradcheck(shape: tuple[int, ...]) -> None:
    """Slopes of [H] serve every sequence: their gradient is a sum over the batch."""
    q, k, v = (x.detach() for x in qkv())
    assert checked(lambda slopes: attention_with_lse(q, k, v, alibi_slopes=slopes), leaf(*shape))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "dropout_p": 0.3, "seed": 5}, {"softcap": 2.0}], ids=str
)
@pytest.mark.parametrize("backend", ["streaming", "math"])
def test_packed_sequences_pass_gradcheck(options: Any, backend: str) -> None:
    """Tokens outside every sequence have gradient zero, and sequences do not see each other."""
    cu_q, cu_k = torch.tensor([0, 1, 1, 3]), torch.tensor([0, 2, 3, 5])
    inputs = leaf(4, H, D), leaf(6, HKV, D), leaf(6, HKV, DV)
    extras = {"sink": leaf(H), "alibi_slopes": leaf(3, H)}

    def call(q: Any, k: Any, v: Any, **given: Any) -> Any:
        return attention_varlen_with_lse(q, k, v, cu_q, cu_k, **given)

    assert checked(call, *inputs, **options, **extras, backend=backend)


def test_gradients_have_the_dtype_of_their_input() -> None:
    """Slopes may be float32 beside float64, a sink float32 beside half types: the engine would raise or cast."""
    q, k, v = qkv()
    slopes, sink = leaf(H, dtype=torch.float32), leaf(H, dtype=torch.float32)
    attention(q, k, v, alibi_slopes=slopes, sink=sink).sum().backward()
    assert [torch.float64] * 3 == [x.grad.dtype for x in (q, k, v)]
    assert [torch.float32] * 2 == [slopes.grad.dtype, sink.grad.dtype]
    half = [x.detach().half().requires_grad_() for x in (q, k, v, sink)]
    bias = leaf(M, N, dtype=torch.float32)
    attention(*half[:3], sink=half[3], bias=bias).sum().backward()
    assert [torch.float16] * 4 + [torch.float32] == [x.grad.dtype for x in (*half, bias)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[str]]:
    """The gradients that the streaming backend is asked for, call by call."""
    calls: list[frozenset[str]] = []
    original = streaming.backward

    def spy(*args: Any) -> Any:
        calls.append(args[-1])
        return original(*args)

    monkeypatch.setattr(streaming, "backward", spy)
    return calls


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=3)), ids=str)
def test_only_the_gradients_asked_for_are_computed(
    flags: tuple[bool, ...], asked: list[frozenset[str]]
) -> None:
    """Frozen k and v must not cost a gradient that is thrown away; None, not zeros, says that there is none."""
    inputs = [x.detach().requires_grad_(flag) for x, flag in zip(qkv(), flags, strict=True)]
    out = attention(*inputs, backend="streaming")
    assert any(flags) == out.requires_grad
    if not any(flags):
        return
    out.sum().backward()
    assert [frozenset(name for name, flag in zip("qkv", flags, strict=True) if flag)] == asked
    assert list(flags) == [x.grad is not None for x in inputs]
    whole = [x.detach().requires_grad_() for x in inputs]
    attention(*whole, backend="streaming").sum().backward()
    for part, all_of_it in zip(inputs, whole, strict=True):
        if part.grad is not None:
            torch.testing.assert_close(part.grad, all_of_it.grad, rtol=0, atol=0)


class TestOutputs:
    def test_an_output_that_is_not_used_gets_no_gradient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A dlse of zeros would be subtracted from every row for nothing; a dout of zeros costs M x Dv memory."""
        seen: list[tuple[Any, ...]] = []
        original = math.backward
        monkeypatch.setattr(math, "backward", lambda *args: (seen.append(args), original(*args))[1])
        q, k, v = qkv()
        attention_with_lse(q, k, v, backend="math")[0].sum().backward()
        assert seen[-1][5] is None
        attention_with_lse(q, k, v, backend="math")[1].sum().backward()
        assert (0, 0, 0, 0) == seen[-1][4].stride()

    def test_lse_alone_is_differentiable(self) -> None:
        """dS = P dLSE: without out in the loss the gradient is that of a logsumexp."""
        q, k, v = qkv()
        lse = attention_with_lse(q, k, v, scale=0.5)[1]
        lse.sum().backward()
        got, q.grad = q.grad, None
        torch.logsumexp(0.5 * q @ k.repeat_interleave(H // HKV, 1).mT, -1).sum().backward()
        torch.testing.assert_close(got, q.grad)
        assert not v.grad.any()

    def test_a_dead_row_takes_no_gradient_through_lse(self) -> None:
        """-inf times 0 is NaN: one padded query would make every gradient of the batch NaN."""
        q, k, v = qkv()
        keep = torch.ones(M, N, dtype=torch.bool)
        keep[1] = False
        out, lse = attention_with_lse(q, k, v, mask=keep)
        torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])
        assert not q.grad[:, :, 1].any()
        assert all(x.grad.isfinite().all() for x in (q, k, v))


STRIDES = {
    "expanded": lambda x: x.new_ones(()).expand(x.shape),
    "transposed": lambda x: torch.randn_like(x.mT).mT,
    "rows and heads swapped": lambda x: torch.randn_like(x.transpose(1, 2)).transpose(1, 2),
    "every second column": lambda x: torch.randn(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2],
    "an odd offset": lambda x: torch.randn(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape),
}


@pytest.mark.parametrize("backend", ["streaming", "math"])
@pytest.mark.parametrize("make", STRIDES.values(), ids=list(STRIDES))
def test_dout_may_have_any_strides(make: Any, backend: str) -> None:
    """The sum of outputs sends an expanded dout; a kernel that assumes rows reads something else."""
    grads = []
    dout = make(torch.empty(B, H, M, DV, dtype=torch.float64))
    for given in (dout, dout.contiguous()):
        torch.manual_seed(1)
        inputs = qkv()
        attention(*inputs, causal=True, backend=backend).backward(given)
        grads.append([x.grad for x in inputs])
    for got, expected in zip(*grads, strict=True):
        # the product of a strided matrix may add in another order
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)


def test_inputs_with_any_strides_give_gradients_of_their_own_shape() -> None:
    """Expanded and transposed inputs are ordinary: their gradient sums or moves back through the view."""
    base = leaf(B, 1, N, D)
    q = leaf(B, D, M, H).permute(0, 3, 2, 1)
    out = attention(q, base.expand(B, H, N, D), base[..., 1:].expand(B, H, N, D - 1), causal=True)
    out.sum().backward()
    assert base.shape == base.grad.shape
    copy = base.detach().clone().requires_grad_()
    heads = copy.repeat(1, H, 1, 1)
    attention(q.detach().clone(), heads, heads[..., 1:].contiguous(), causal=True).sum().backward()
    torch.testing.assert_close(base.grad, copy.grad)


class TestHigherOrder:
    @pytest.mark.parametrize(
        "options", [{"causal": True, "softcap": 0.9}, {"dropout_p": 0.3, "seed": 2}], ids=str
    )
    def test_gradients_of_gradients_pass_gradgradcheck(self, options: Any) -> None:
        """Silent zeros in a second derivative spoil a gradient penalty without an error."""
        q, k, v = leaf(1, 2, 2, 2), leaf(1, 1, 3, 2), leaf(1, 1, 3, 2)
        extras = {"bias": leaf(2, 1, 3), "alibi_slopes": leaf(2), "sink": leaf(2)}
        names = list(extras)

        def call(q: Any, k: Any, v: Any, *values: Any) -> Any:
            return attention_with_lse(q, k, v, **options, **dict(zip(names, values, strict=True)))

        assert torch.autograd.gradgradcheck(call, (q, k, v, *extras.values()))

    def test_packed_sequences_pass_gradgradcheck(self) -> None:
        """The slow path finds every token's row by itself, tokens of no sequence included."""
        cu_q, cu_k = torch.tensor([0, 1, 3]), torch.tensor([0, 2, 4])

        def call(q: Any, k: Any, v: Any) -> Any:
            out, lse = attention_varlen_with_lse(q, k, v, cu_q, cu_k, causal=True)
            return out, visible(lse)

        assert torch.autograd.gradgradcheck(call, (leaf(4, 2, 2), leaf(5, 1, 2), leaf(5, 1, 2)))

    def test_third_order_is_there_as_well(self) -> None:
        """The slow path is plain torch, so it does not stop at two."""
        q = leaf(1, 1, 2, 2)
        k, v = leaf(1, 1, 2, 2).detach(), leaf(1, 1, 2, 2).detach()

        def nth(function: Any, order: int) -> Any:
            y = function(q, k, v).pow(2).sum()
            for _ in range(order):
                (y,) = torch.autograd.grad(y.sum(), q, create_graph=True)
            return y

        def plain(q: Any, k: Any, v: Any) -> Any:
            return torch.softmax(q @ k.mT / 2**0.5, -1) @ v

        torch.testing.assert_close(nth(attention, 3), nth(plain, 3))

    def test_the_slow_path_equals_the_fast_one(self) -> None:
        """Both are the same function: rows, masks and modifiers may not drift apart."""
        from attnproof.problem import Options, bind, bind_varlen

        cu = torch.tensor([0, 0, 3, 5])
        options = Options(causal=True, softcap=2.0, sink=torch.randn(H).double(), dropout_p=0.2, seed=4)
        packed = (torch.randn(6, heads, D).double() for heads in (H, HKV, HKV))
        for problem, tensors in (
            bind(*(x.detach() for x in qkv()), options),
            bind_varlen(*packed, cu, cu, None, None, options),
        ):
            for fast, slow in zip(
                math.forward(problem, tensors), math.differentiable(problem, tensors), strict=True
            ):
                torch.testing.assert_close(slow, fast)


class TestDeterminism:
    @pytest.fixture
    def torch_is_deterministic(self) -> Any:
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)

    def test_an_unordered_backward_is_refused_in_torchs_deterministic_mode(
        self, torch_is_deterministic: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """torch promises repeatable bits then; atomics in one backend would break it silently."""
        monkeypatch.setattr(math, "unordered_backward", True, raising=False)
        with pytest.raises(
            Unsupported, match="math: deterministic=False sums gradients in an order that varies"
        ):
            attention(*qkv(), deterministic=False, backend="math")
        attention(*qkv(), deterministic=True, backend="math").sum().backward()

    def test_a_backward_that_meets_the_mode_later_is_refused_too(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The mode counts when the gradient is computed, as it does for torch's own operators."""
        monkeypatch.setattr(math, "unordered_backward", True, raising=False)
        out = attention(*qkv(), deterministic=False, backend="math").sum()
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(Unsupported, match="leave deterministic=True"):
                out.backward()
        finally:
            torch.use_deterministic_algorithms(False)

    def test_the_warning_form_of_the_mode_warns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`warn_only` is how people find out what would fail."""
        monkeypatch.setattr(math, "unordered_backward", True, raising=False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with pytest.warns(UserWarning, match="sums gradients in an order that varies"):
                attention(*qkv(), deterministic=False, backend="math")
        finally:
            torch.use_deterministic_algorithms(False)

    def test_a_backend_without_such_a_path_takes_the_flag(self, torch_is_deterministic: None) -> None:
        """deterministic=False is a permission, not a wish: nothing to refuse where nothing varies."""
        attention(*qkv(), deterministic=False, backend="math").sum().backward()

    @pytest.mark.parametrize("backend", ["streaming", "math"])
    def test_two_backwards_give_the_same_bits(self, backend: str) -> None:
        """The default: a training run can be repeated."""
        runs = []
        for _ in range(2):
            torch.manual_seed(3)
            inputs = qkv()
            attention(*inputs, causal=True, backend=backend).pow(2).sum().backward()
            runs.append([x.grad for x in inputs])
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_decode_that_wants_gradients_is_refused() -> None:
    """The cache is written in place: a gradient through it would be of something that no longer exists."""
    q, k, v = qkv()
    with pytest.raises(Unsupported, match="attention_decode: no gradient through a cache written in place"):
        attnproof.attention_decode(q, k, v, torch.tensor([3, 4]))
    with torch.no_grad():
        attnproof.attention_decode(q, k, v, torch.tensor([3, 4]))


def test_all_backends_share_the_gradient_code() -> None:
    """NumPy backends are reached through the same function as torch ones; their results come back as torch."""
    for name in (each for each in dispatch.ORDER if each not in ("hopper", "triton", "dot2")):
        inputs = qkv()
        attention(*inputs, backend=name).sum().backward()
        assert all(isinstance(x.grad, torch.Tensor) for x in inputs)
