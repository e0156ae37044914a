"""Plain torch calls: dtypes, autocast, checkpoints, random numbers, and a short way from the call to the backend."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import attnproof  # noqa: E402
from attnproof import attention, attention_decode, attention_varlen, attention_with_lse, dispatch  # noqa: E402
from attnproof.autograd import function, transforms  # noqa: E402
from attnproof.autograd.call import _known  # noqa: E402
from attnproof.errors import DtypeError, ShapeError  # noqa: E402

CU = torch.tensor([0, 2, 5], dtype=torch.int32)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    _known.clear()


def qkv(dtype: Any = torch.float32, **options: Any) -> tuple[Any, ...]:
    return tuple(torch.randn(2, 4, 6, 8, **options).to(dtype) for _ in range(3))


class TestDtypes:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
    def test_floating_types_are_served(self, dtype: Any) -> None:
        """float64 has to work somewhere, or nobody can run gradcheck."""
        out, lse = attention_with_lse(*qkv(dtype))
        assert (dtype, torch.float64 if dtype == torch.float64 else torch.float32) == (out.dtype, lse.dtype)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool], ids=str)
    def test_other_types_are_refused_by_name(self, dtype: Any) -> None:
        """A TypeError that lists what is served, not a failure inside a product."""
        with pytest.raises(DtypeError, match="q: expected one of float16, bfloat16, float32, float64, got"):
            attention(*(x.to(dtype) for x in qkv()))

    def test_mixed_types_are_refused(self) -> None:
        """A silent cast would hide that half of the model runs in another precision."""
        q, k, v = qkv()
        with pytest.raises(DtypeError, match="k: expected dtype float32 to match q, got float16"):
            attention(q, k.half(), v)


class TestAutocast:
    @pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
    def test_inputs_are_cast_as_torch_casts_them(self, to: Any) -> None:
        """torch's own attention is on the list of operators that run in the autocast dtype."""
        q, k, v = qkv()
        mask = torch.randn(6, 6)
        with torch.autocast("cpu", to):
            ours, theirs = attention(q, k, v, bias=mask), sdpa(q, k, v, attn_mask=mask)
        assert to == theirs.dtype == ours.dtype
        expected = attention(q.to(to), k.to(to), v.to(to), bias=mask.to(to))
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)

    def test_inputs_of_different_types_meet(self) -> None:
        """A layer in float32 beside one in bfloat16 is what autocast is for."""
        q, k, v = qkv()
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(q, k.bfloat16(), v.half(), sink=torch.randn(4).half(), alibi_slopes=torch.rand(4))
        assert torch.bfloat16 == out.dtype

    def test_float64_stays(self) -> None:
        """torch leaves float64 alone, so a gradcheck under autocast still checks float64."""
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.float64 == attention(*qkv(torch.float64)).dtype

    def test_gradients_come_back_in_the_dtype_of_the_parameter(self) -> None:
        """Through the cast: a float32 weight gets a float32 gradient."""
        inputs = [x.requires_grad_() for x in qkv()]
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(*inputs)
        out.sum().backward()
        assert [torch.float32] * 3 == [x.grad.dtype for x in inputs]

    def test_the_cache_of_a_decode_step_keeps_its_dtype(self) -> None:
        """The append writes into the caller's memory: a cast copy would take the new tokens and vanish."""
        q, k, v = qkv()
        new = torch.randn(2, 4, 1, 8)
        with torch.autocast("cpu", torch.bfloat16):
            out = attention_decode(q, k, v, torch.tensor([3, 4]), k_new=new, v_new=new)
        assert (torch.bfloat16, torch.float32) == (out.dtype, k.dtype)
        torch.testing.assert_close(k[0, :, 3], new[0, :, 0], rtol=0, atol=0)


class TestCheckpoints:
    @pytest.mark.parametrize("reentrant", [False, True], ids=["by hooks", "reentrant"])
    @pytest.mark.parametrize("dropout_p", [0.0, 0.5])
    def test_recomputing_gives_the_same_gradients(self, reentrant: bool, dropout_p: float) -> None:
        """Another mask in the recomputation is a gradient of something that was never computed."""

        def block(q: Any, k: Any, v: Any) -> Any:
            return attention(q * 2, k, v, causal=True, dropout_p=dropout_p)

        results = []
        for run in (block, lambda *x: checkpoint(block, *x, use_reentrant=reentrant)):
            torch.manual_seed(1)
            inputs = [x.requires_grad_() for x in qkv()]
            out = run(*inputs)
            torch.rand(3)  # the generator moves on before backward
            out.pow(2).sum().backward()
            results.append([out.detach(), *(x.grad for x in inputs)])
        for expected, got in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)

    def test_a_selective_policy_sees_the_operator(self) -> None:
        """Policies decide by operator: a call that is no operator could be neither kept nor recomputed."""
        from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

        seen = []

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(op)
            mine = op == torch.ops.attnproof.forward.default
            return CheckpointPolicy.MUST_SAVE if mine else CheckpointPolicy.PREFER_RECOMPUTE

        inputs = [x.requires_grad_() for x in qkv()]
        out = checkpoint(
            lambda *x: attention(*x, causal=True),
            *inputs,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        out.sum().backward()
        assert torch.ops.attnproof.forward.default in seen
        plain = [x.detach().requires_grad_() for x in inputs]
        attention(*plain, causal=True).sum().backward()
        for expected, got in zip(plain, inputs, strict=True):
            torch.testing.assert_close(got.grad, expected.grad, rtol=0, atol=0)


class TestRandomNumbers:
    def test_two_calls_drop_different_entries_and_reseeding_repeats_them(self) -> None:
        """A constant seed is the same mask each step; a hidden one cannot be repeated."""
        q, k, v = qkv()
        torch.manual_seed(7)
        first, second = (attention(q, k, v, dropout_p=0.5) for _ in range(2))
        assert not torch.equal(first, second)
        torch.manual_seed(7)
        torch.testing.assert_close(attention(q, k, v, dropout_p=0.5), first, rtol=0, atol=0)

    @pytest.mark.parametrize("dropout_p", [0.0, 1.0])
    def test_the_generator_moves_only_when_something_random_is_asked_for(self, dropout_p: float) -> None:
        """Evaluation must not shift the random numbers of the training around it."""
        before = torch.get_rng_state()
        out = attention(*qkv_without_random(), dropout_p=dropout_p)
        assert (dropout_p == 0) == torch.equal(before, torch.get_rng_state())
        assert (dropout_p == 1) == (not out.any())

    def test_a_given_seed_leaves_the_generator_alone(self) -> None:
        """The caller brought the randomness."""
        before = torch.get_rng_state()
        for given in (3, (3, 0), torch.tensor([3, 0])):
            attention(*qkv_without_random(), dropout_p=0.5, seed=given)
        assert torch.equal(before, torch.get_rng_state())

    @pytest.mark.parametrize(
        "backend", [name for name in dispatch.ORDER if name not in ("hopper", "triton", "dot2")]
    )
    def test_forward_and_backward_drop_the_same_entries(self, backend: str) -> None:
        """v is the identity, so out shows P after dropout, and dv for dout = identity shows it from backward."""
        n = 40
        q, k = (torch.randn(1, 2, n, 8, dtype=torch.float64) for _ in range(2))
        v = torch.eye(n, dtype=torch.float64).expand(1, 2, n, n).clone().requires_grad_()
        out = attention(q, k, v, dropout_p=0.5, backend=backend)
        out.backward(torch.eye(n, dtype=torch.float64).expand_as(out))
        assert 0.4 < float((out != 0).double().mean()) < 0.6
        torch.testing.assert_close(v.grad.mT, out.detach(), rtol=0, atol=1e-14)


def qkv_without_random() -> tuple[Any, ...]:
    return tuple(torch.linspace(-1, 1, 2 * 4 * 6 * 8).view(2, 4, 6, 8) for _ in range(3))


class TestShortWay:
    def test_a_call_without_gradients_makes_no_node(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A node costs more host time than everything else in a small call."""
        monkeypatch.setattr(function, "_Attention", None)
        q, k, v = qkv()
        assert not attention(q, k, v).requires_grad
        with torch.no_grad():
            attention(q.requires_grad_(), k, v)

    def test_no_operator_is_dispatched_in_a_plain_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Operators implemented in Python cost tens of microseconds per call, forward and backward."""
        monkeypatch.setattr(transforms, "forward", None)
        monkeypatch.setattr(transforms, "backward", None)
        inputs = [x.requires_grad_() for x in qkv()]
        attention(*inputs, causal=True).sum().backward()
        assert all(x.grad is not None for x in inputs)

    def test_validation_is_remembered_by_structure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same shapes again skip the checks; other shapes, options or dtypes do not."""
        module = sys.modules["attnproof.autograd.call"]
        bound = []
        original = module.bind_call
        monkeypatch.setattr(module, "bind_call", lambda *args: (bound.append(args[0]), original(*args))[1])
        q, k, v = qkv()
        bias = torch.randn(6, 6)
        calls: list[Any] = [
            lambda: attention(q, k, v),
            lambda: attention(q, k, v, causal=True),
            lambda: attention(q, k, v, window=(2, 2)),
            lambda: attention(q, k, v, bias=bias, alibi_slopes=bias[0, :4], sink=bias[1, :4], scale=0.5),
            lambda: attention(q, k, v, mask=bias > 0, softcap=3.0, layout="bhmd"),
            lambda: attention(q, k, v, mask=attnproof.causal() & attnproof.window(2, -1)),
            lambda: attention(q, k, v, dropout_p=0.2, seed=5),
            lambda: attention(q.mT, k.mT, v.mT, layout="bmhd"),
        ]
        first = [run() for run in calls]
        assert len(calls) == len(bound)
        for expected, run in zip(first, calls, strict=True):
            torch.testing.assert_close(run(), expected, rtol=0, atol=0)
        assert len(calls) == len(bound)
        attention(q[:1], k[:1], v[:1])
        attention(q.double(), k.double(), v.double())
        assert len(calls) + 2 == len(bound)

    def test_what_is_remembered_does_not_excuse_bad_arguments(self) -> None:
        """1, 1.0 and True are one dictionary key; only some of them are valid."""
        q, k, v = qkv()
        attention(q, k, v, scale=1, window=(1, 0), dropout_p=0.0, softcap=1.0)
        for wrong, message in (
            ({"scale": True}, "scale: expected a number"),
            ({"softcap": True}, "softcap: expected a number"),
            ({"dropout_p": False}, "dropout_p: expected a number"),
            ({"window": (1.0, 0)}, "window: expected two integers"),
            ({"window": (True, 0)}, "window: expected two integers"),
            ({"bias": torch.zeros(6, 6, dtype=torch.int32)}, "bias: expected dtype float32"),
            ({"mask": torch.ones(6, 6)}, "mask: expected dtype bool"),
            ({"scale": [1]}, "scale: expected a number"),
        ):
            valid = {"scale": 1, "window": (1, 0), "dropout_p": 0.0, "softcap": 1.0}
            attention(q, k, v, **valid)
            with pytest.raises((DtypeError, ShapeError), match=message):
                attention(q, k, v, **{**valid, **wrong})

    def test_an_argument_that_is_missing_is_named(self) -> None:
        """The short way looks at shapes first; what has none must still get a sentence."""
        q, k, v = qkv()
        for wrong in ((q, None, v), (q, k, [1.0]), (q, k.numpy(), v)):
            with pytest.raises(
                DtypeError, match="[kv]: expected (a NumPy array or torch tensor|the kind of q), got"
            ):
                attention(*wrong)

    def test_lengths_may_be_any_sequence_of_integers(self) -> None:
        """A tuple can be a dictionary key, and is no tensor when the structure is known."""
        q = torch.randn(5, 4, 8)
        expected = attention_varlen(q, q, q, CU, CU)
        for lengths in ((0, 2, 5), [0, 2, 5], CU.long(), CU.numpy()):
            for _ in range(2):
                torch.testing.assert_close(
                    attention_varlen(q, q, q, lengths, lengths), expected, rtol=0, atol=0
                )

    def test_values_are_checked_in_every_call(self) -> None:
        """Lengths on the host are read each time: the shape says nothing about them."""
        q = torch.randn(5, 4, 8)
        attention_varlen(q, q, q, CU, CU, max_seqlen_q=3, max_seqlen_k=3)
        with pytest.raises(ShapeError, match="cu_seqlens_q: expected entries that never decrease"):
            attention_varlen(q, q, q, torch.tensor([0, 4, 2]), CU)
        with pytest.raises(
            ShapeError, match="max_seqlen_q: expected at least the longest sequence, 3, got 2"
        ):
            attention_varlen(q, q, q, CU, CU, max_seqlen_q=2, max_seqlen_k=3)
        cache = torch.randn(1, 4, 5, 8)
        attention_decode(cache, cache, cache, torch.tensor([5]))
        with pytest.raises(ShapeError, match="cache_seqlens: expected at most the cache capacity 5, got 6"):
            attention_decode(cache, cache, cache, torch.tensor([6]))

    def test_the_first_torch_call_loads_no_compiler(self) -> None:
        """torch._dynamo takes seconds to import; only who compiles should pay."""
        code = (
            "import sys, torch, attnproof; q = torch.zeros(1, 1, 2, 2, requires_grad=True);"
            "attnproof.attention(q, q, q).sum().backward();"
            "print(*sorted({'torch._dynamo', 'torch._inductor', 'triton'} & set(sys.modules)))"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert "" == run.stdout.strip()


class TestTensorsThatAreNotPlain:
    def test_fake_tensors_give_the_shape_of_the_result(self) -> None:
        """Memory planners run a model on fake tensors; a backend would read memory that does not exist."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() as mode:
            q, k, v = (mode.from_tensor(x.requires_grad_()) for x in qkv())
            out, lse = attention_with_lse(q, k, v, layout="bmhd", dropout_p=0.1)
            out.sum().backward()
        assert ((2, 4, 6, 8), (2, 6, 4), (2, 4, 6, 8)) == (
            tuple(out.shape),
            tuple(lse.shape),
            tuple(q.grad.shape),
        )

    def test_meta_tensors_need_no_values(self) -> None:
        """Nothing is read when the caller gives the longest lengths: no device would have to be waited for."""
        q = torch.empty(5, 4, 8, device="meta")
        cu = torch.empty(3, dtype=torch.int64, device="meta")
        for _ in range(2):  # the second call takes the remembered structure
            out = attention_varlen(
                q, q, q, cu, cu, max_seqlen_q=3, max_seqlen_k=3, causal=True, mask=attnproof.prefix(1)
            )
            assert ((5, 4, 8), "meta") == (tuple(out.shape), out.device.type)
            out = attention_varlen(q, q, q, cu, cu, max_seqlen_q=3, max_seqlen_k=3)
            assert (5, 4, 8) == tuple(out.shape)
            cache, table = (
                torch.empty(6, 4, 2, 8, device="meta"),
                torch.empty(3, 5, dtype=torch.int32, device="meta"),
            )
            now, lengths = (
                torch.empty(3, 4, 1, 8, device="meta"),
                torch.empty(3, dtype=torch.int32, device="meta"),
            )
            out = attention_decode(now, cache, cache, lengths, block_table=table, k_new=now, v_new=now)
            assert (3, 4, 1, 8) == tuple(out.shape)

    def test_a_mode_that_watches_operators_sees_the_call(self) -> None:
        """Profilers and counters look at operators; a call that goes around them would be missing."""
        from torch.utils._python_dispatch import TorchDispatchMode

        seen = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(func)
                return func(*args, **(kwargs or {}))

        q, k, v = qkv()
        with Watch():
            attention(q, k, v)
        assert torch.ops.attnproof.forward.default in seen
