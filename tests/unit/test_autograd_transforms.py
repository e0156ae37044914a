"""torch.func on attention: mapped axes are folded or looped, transforms nest, forward mode is there."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, hessian, jacfwd, jacrev, vmap  # noqa: E402

from attnproof import attention, attention_varlen, attention_with_lse  # noqa: E402
from attnproof.backends import math, native, streaming  # noqa: E402

V = 3  # mapped
B, H, HKV, M, N, D, DV = 2, 4, 2, 3, 5, 4, 2

# torch's first forward-mode call scripts some decompositions, and its own script warns that it is deprecated
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.float64)


def qkv(*lead: int) -> tuple[Any, Any, Any]:
    return randn(*lead, B, H, M, D), randn(*lead, B, HKV, N, D), randn(*lead, B, HKV, N, DV)


def causal(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, causal=True, softcap=2.0)


def loss(q: Any, k: Any, v: Any) -> Any:
    out, lse = attention_with_lse(q, k, v, causal=True, window=(3, -1))
    return (out**2).sum() + torch.where(lse.isneginf(), 0, lse).sum()


def looped(function: Any, *arguments: Any) -> Any:
    return torch.stack([function(*each) for each in zip(*arguments, strict=True)])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes that the backend is called with."""
    sizes: list[int] = []
    for backend, name in itertools.product((native, streaming), ("forward", "backward")):
        original = getattr(backend, name)

        def spy(problem: Any, *args: Any, original: Any = original) -> Any:
            sizes.append(problem.B)
            return original(problem, *args)

        monkeypatch.setattr(backend, name, spy)
    return sizes


def test_a_mapped_axis_is_folded_into_the_batch(calls: list[int]) -> None:
    """One call for all samples: a loop would launch a kernel for each."""
    inputs = qkv(V)
    mapped = vmap(causal)(*inputs)
    assert [V * B] == calls
    torch.testing.assert_close(mapped, looped(causal, *inputs), rtol=0, atol=0)


def test_any_axis_may_be_mapped_and_any_input_shared() -> None:
    """in_dims picks an axis, None shares a tensor, out_dims puts the axis where it is wanted."""
    q, k, v = qkv(V)
    expected = looped(causal, q, k, v)
    moved = vmap(causal, in_dims=(1, 2, -1), out_dims=1)(q.movedim(0, 1), k.movedim(0, 2), v.movedim(0, -1))
    torch.testing.assert_close(moved.movedim(1, 0), expected, rtol=0, atol=0)
    shared = vmap(causal, in_dims=(0, None, None))(q, k[0], v[0])
    torch.testing.assert_close(shared, torch.stack([causal(x, k[0], v[0]) for x in q]), rtol=0, atol=0)
    keys_only = vmap(causal, in_dims=(None, 0, 0))(q[0], k, v)
    torch.testing.assert_close(keys_only, looped(causal, [q[0]] * V, k, v), rtol=0, atol=0)


def test_maps_nest(calls: list[int]) -> None:
    """An ensemble of batches: both axes end in one call."""
    inputs = qkv(2, V)
    nested = vmap(vmap(causal))(*inputs)
    assert [2 * V * B] == calls
    flat = looped(causal, *(x.flatten(0, 1) for x in inputs))
    torch.testing.assert_close(nested.flatten(0, 1), flat, rtol=0, atol=0)


OPTIONS = {
    "bias of the batch": ("bias", (B, 1, M, N), True),
    "bias without a batch": ("bias", (H, 1, N), True),
    "slopes": ("alibi_slopes", (H,), True),
    "slopes of the batch": ("alibi_slopes", (B, H), True),
    "sink": ("sink", (H,), True),
    "mask": ("mask", (M, N), False),
}


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "shared"])
@pytest.mark.parametrize(("name", "shape", "differentiable"), OPTIONS.values(), ids=list(OPTIONS))
def test_options_are_mapped_with_gradients_of_every_sample(
    name: str, shape: tuple[int, ...], differentiable: bool, mapped: bool
) -> None:
    """A shared bias has one gradient per sample under vmap(grad); folding must not sum them together."""
    inputs = qkv(V)
    given = randn(V, *shape) if mapped else randn(*shape)
    given = given if differentiable else given > 0

    def with_option(q: Any, k: Any, v: Any, x: Any) -> Any:
        return attention(q, k, v, **{name: x}).pow(2).sum()

    argnums = (0, 1, 2, 3) if differentiable else (0, 1, 2)
    each = grad(with_option, argnums=argnums)
    found = vmap(each, in_dims=(0, 0, 0, 0 if mapped else None))(*inputs, given)
    samples = zip(*inputs, given if mapped else [given] * V, strict=True)
    for got, parts in zip(found, zip(*(each(*sample) for sample in samples), strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(parts))


def test_a_gradient_of_a_map_and_a_map_of_gradients_agree() -> None:
    """Per-sample gradients (a map of gradients) sum to the gradient of the whole (a gradient of a map)."""
    q, k, v = qkv(V)
    per_sample = vmap(grad(loss, argnums=(0, 1, 2)), in_dims=(0, None, None))(q, k[0], v[0])
    whole = grad(lambda q, k, v: vmap(loss, in_dims=(0, None, None))(q, k, v).sum(), argnums=(0, 1, 2))
    expected = whole(q, k[0], v[0])
    torch.testing.assert_close(per_sample[0], expected[0])
    for samples, total in zip(per_sample[1:], expected[1:], strict=True):
        torch.testing.assert_close(samples.sum(0), total)


def test_transforms_give_the_gradient_that_backward_gives() -> None:
    """Two ways into the same formula: torch.func and .backward()."""
    inputs = qkv()
    found = grad(loss, argnums=(0, 1, 2))(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    loss(*leaves).backward()
    for got, expected in zip(found, leaves, strict=True):
        torch.testing.assert_close(got, expected.grad, rtol=0, atol=0)


def test_second_derivatives_agree_by_every_road() -> None:
    """Reverse over reverse uses the slow path in backward, forward over reverse runs it from the start."""
    q, k, v = randn(1, 2, 2, 2), randn(1, 1, 3, 2), randn(1, 1, 3, 2)

    def of_q(q: Any) -> Any:
        return loss(q, k, v)

    expected = torch.autograd.functional.hessian(of_q, q)
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(jacrev(jacrev(of_q))(q), expected)
    torch.testing.assert_close(hessian(of_q)(q), expected)


def test_second_derivatives_with_respect_to_cotangents() -> None:
    """The product of a Jacobian with a vector, by two reverse passes: only dout carries a gradient in the second."""
    q, k, v = (randn(1, 1, 2, 2) for _ in range(3))
    direction = randn(1, 1, 2, 2)

    def pulled(dout: Any) -> Any:
        _, pull = torch.func.vjp(lambda q: attention(q, k, v), q)
        return pull(dout)[0]

    (twice,) = torch.func.vjp(pulled, torch.zeros(1, 1, 2, 2, dtype=torch.float64))[1](direction)
    torch.testing.assert_close(twice, torch.func.jvp(lambda q: attention(q, k, v), (q,), (direction,))[1])


def test_forward_mode_gives_the_jacobian_of_reverse_mode() -> None:
    """Kernels have no rule for tangents: without the slow path they would be dropped silently."""
    q, k, v = randn(1, 2, 2, 3), randn(1, 2, 3, 3), randn(1, 2, 3, 2)
    torch.testing.assert_close(jacfwd(causal)(q, k, v), jacrev(causal)(q, k, v))
    direction = randn(1, 2, 2, 3)
    with forward_ad.dual_level():
        out = causal(forward_ad.make_dual(q, direction), k, v)
        tangent = forward_ad.unpack_dual(out).tangent
        # a call that carries no tangent stays on its kernel
        assert forward_ad.unpack_dual(causal(q, k, v)).tangent is None
    torch.testing.assert_close(tangent, torch.func.jvp(lambda q: causal(q, k, v), (q,), (direction,))[1])


def test_many_gradients_at_once_are_mapped() -> None:
    """`is_grads_batched` maps over backward of an ordinary call, whose node was made outside of any transform."""
    q, k, v = qkv()
    q.requires_grad_()
    out = causal(q, k, v)
    douts = randn(V, *out.shape)
    (found,) = torch.autograd.grad(out, q, douts, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(out, q, dout, retain_graph=True)[0] for dout in douts]
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-14)


class TestPacked:
    cu_q, cu_k = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 7])

    def packed(self, q: Any, k: Any, v: Any) -> Any:
        return attention_varlen(q, k, v, self.cu_q, self.cu_k, causal=True)

    def test_packed_sequences_are_mapped_sample_by_sample(self) -> None:
        """Their token axis cannot take a second batch when tokens are left over at the end."""
        inputs = randn(V, 6, H, D), randn(V, 8, HKV, D), randn(V, 8, HKV, DV)
        torch.testing.assert_close(vmap(self.packed)(*inputs), looped(self.packed, *inputs), rtol=0, atol=0)

    def test_gradients_of_packed_sequences_are_mapped(self) -> None:
        """The loop of backward stacks the gradients in the order of the inputs."""
        inputs = randn(V, 6, H, D), randn(V, 8, HKV, D), randn(V, 8, HKV, DV)
        each = grad(lambda *x: self.packed(*x).pow(2).sum(), argnums=(0, 2))
        for got, parts in zip(
            vmap(each)(*inputs), zip(*(each(*x) for x in zip(*inputs, strict=True)), strict=True), strict=True
        ):
            torch.testing.assert_close(got, torch.stack(parts))


class TestDropout:
    """torch's own rule: random calls need `randomness`, and what it says is what happens."""

    def dropped(self, q: Any, k: Any) -> Any:
        """Which entries survive: v is the identity, so out shows P."""
        eye = torch.eye(N, dtype=torch.float64).expand(B, HKV, N, N)
        return attention(q, k, eye, dropout_p=0.5) != 0

    def test_it_is_refused_without_randomness(self) -> None:
        """Silently equal or silently different masks are both wrong for somebody."""
        q, k, _ = qkv(V)
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(self.dropped)(q, k)

    def test_same_drops_the_same_entries_in_every_sample(self) -> None:
        """Folded into the batch, every sample would have its own plane of the generator."""
        q, k, _ = qkv(V)
        kept = vmap(self.dropped, randomness="same")(q, k)
        assert all(torch.equal(kept[0], other) for other in kept[1:])
        assert 0.2 < kept.double().mean() < 0.8

    def test_different_drops_others(self) -> None:
        """An ensemble with one mask is no ensemble."""
        q, k, _ = qkv(V)
        kept = vmap(self.dropped, randomness="different")(q, k)
        assert not torch.equal(kept[0], kept[1])

    def test_a_mapped_seed_gives_what_each_seed_gives_alone(self) -> None:
        """(seed, offset) as a tensor is an input like any other."""
        inputs, seeds = qkv(V), torch.tensor([[1, 0], [2, 0], [2, 5]])

        def seeded(q: Any, k: Any, v: Any, seed: Any) -> Any:
            return attention(q, k, v, dropout_p=0.3, seed=seed)

        torch.testing.assert_close(
            vmap(seeded)(*inputs, seeds), looped(seeded, *inputs, seeds), rtol=0, atol=0
        )


def test_the_operators_can_be_mapped_by_themselves() -> None:
    """An exported graph holds the operator, and somebody may map over that graph."""
    from attnproof.autograd import operators
    from attnproof.problem import Options, bind

    inputs = qkv(V)
    problem, tensors = bind(*(x[0] for x in inputs), Options(causal=True))
    settings, none = operators.settings_of("math", problem), [None] * 10
    forward, backward = torch.ops.attnproof.forward, torch.ops.attnproof.backward
    out, lse = vmap(lambda *x: forward(*x, *none, *settings))(*inputs)
    for n in range(V):
        for got, expected in zip(
            (out[n], lse[n]), forward(*(x[n] for x in inputs), *none, *settings), strict=True
        ):
            torch.testing.assert_close(got, expected)
    grads = vmap(lambda q, k, v, o, s: backward(q, k, v, *none, o, s, o, None, *settings, "q,v"))(
        *inputs, out, lse
    )
    for n in range(V):
        _, tensors = bind(*(x[n] for x in inputs), Options(causal=True))
        expected = math.backward(problem, tensors, None, None, out[n], None, frozenset("qv"))
        torch.testing.assert_close(grads[0][n], expected.dq)
        torch.testing.assert_close(grads[2][n], expected.dv)
