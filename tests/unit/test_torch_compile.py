"""torch.compile, torch.export and the operators below them: one graph, right strides, few compilations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import attnproof  # noqa: E402
from attnproof import attention, attention_decode, attention_varlen, attention_with_lse  # noqa: E402
from attnproof.autograd import operators  # noqa: E402
from attnproof.problem import GRADIENTS, Bound, Options, bind, bind_varlen  # noqa: E402


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(B: int = 2, M: int = 5, N: int = 7) -> tuple[Any, Any, Any]:
    return torch.randn(B, 4, M, 8), torch.randn(B, 2, N, 8), torch.randn(B, 2, N, 6)


def results(function: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """The output and the gradient of every floating input."""
    torch.manual_seed(1)
    inputs = tuple(x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs)
    out = function(*inputs)
    out.pow(2).sum().backward()
    return [out.detach(), *(x.grad for x in inputs if x.is_floating_point())]


def assert_compiles(function: Any, *calls: tuple[Any, ...], dynamic: bool | None = None) -> None:
    """One graph without a break, compiled once, forward and backward with the bits and strides of eager calls."""
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for inputs in calls:
            for got, expected in zip(results(compiled, inputs), results(function, inputs), strict=True):
                assert expected.stride() == got.stride()
                torch.testing.assert_close(got, expected, rtol=0, atol=0)


def everything(q: Any, k: Any, v: Any, bias: Any, slopes: Any, sink: Any) -> Any:
    keep = torch.ones(5, 7, device=q.device).tril(3) > 0
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = {"bias": bias, "alibi_slopes": slopes, "sink": sink, "mask": keep, "softcap": 2.0, "scale": 0.3}
    return attention(q, k, v, causal=True, window=(4, 1), layout="bmhd", **options)


class TestCompile:
    def test_options_of_every_kind_are_one_graph(self) -> None:
        """Validation reads shapes and raises sentences; none of it may break the graph."""
        assert_compiles(everything, (*qkv(), torch.randn(4, 1, 7), torch.rand(4), torch.randn(4)))

    def test_one_compilation_serves_other_sizes(self) -> None:
        """A serving loop sees a new length each step; a compilation for each would never end."""

        def function(q: Any, k: Any, v: Any) -> Any:
            out, lse = attention_with_lse(q, k, v, causal=True, window=(3, -1))
            return out.sum(-1) + lse

        # no two sizes are equal at first: the compiler would take them for one
        assert_compiles(function, qkv(3, 5, 7), qkv(9, 11, 13), qkv(9, 10, 14), dynamic=True)

    def test_packed_sequences_with_given_lengths_are_one_graph(self) -> None:
        """Reading a length in the graph would wait for the device in every layer."""

        def function(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
            return attention_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=8, max_seqlen_k=9, causal=True)

        def call(cu_q: list[int], cu_k: list[int]) -> tuple[Any, ...]:
            sizes = ((cu_q[-1] + 1, 4, 8), (cu_k[-1] + 2, 2, 8), (cu_k[-1] + 2, 2, 6))
            lengths = (torch.tensor(x, dtype=torch.int32) for x in (cu_q, cu_k))
            return (*(torch.randn(*size) for size in sizes), *lengths)

        assert_compiles(function, call([0, 2, 9], [0, 4, 9]), call([0, 8, 12], [0, 3, 12]), dynamic=True)

    def test_intervals_of_a_mask_enter_the_graph_as_inputs(self) -> None:
        """Documents end elsewhere in every batch: new segments of the same size must not compile again."""
        masks = [attnproof.segments(torch.tensor([0, 0, 1, 1, end])) for end in (1, 2)]

        prefixed = [mask & attnproof.prefix(4) for mask in masks]
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(
            lambda q, k, v, mask: attention(q, k, v, mask=mask & attnproof.causal()),
            fullgraph=True,
            backend=counter,
        )
        inputs = qkv(2, 5, 5)
        outs = [compiled(*inputs, mask) for mask in prefixed]
        for out, mask in zip(outs, prefixed, strict=True):
            torch.testing.assert_close(out, attention(*inputs, mask=mask, causal=True), rtol=0, atol=0)
        assert not torch.equal(*outs)
        assert 1 == counter.frame_count

    def test_a_mask_of_another_length_says_both_lengths(self) -> None:
        """Silently wrong otherwise: the intervals of 5 rows on a call of 6."""
        mask = attnproof.segments(torch.tensor([0, 0, 1, 1, 1]))
        compiled = torch.compile(
            lambda q, k, v: attention(q, k, v, mask=mask), fullgraph=True, backend="eager"
        )
        compiled(*qkv(1, 5, 5))
        with pytest.raises(
            RuntimeError, match=r"mask: expected a mask made for lengths \(6, 5\), got one for \(5, 5\)"
        ):
            compiled(*qkv(1, 6, 5))

    def test_a_bad_argument_shows_its_sentence(self) -> None:
        """The compiler wraps the error; the sentence that names the argument has to survive that."""
        q, k, v = qkv()
        with pytest.raises(RuntimeError, match="k: expected head dim 8 to match q, got 7"):
            torch.compile(attention, fullgraph=True, backend="eager")(q, k[..., 1:], v)

    def test_a_length_that_would_have_to_be_read_is_asked_for(self) -> None:
        """Without the longest lengths the graph would break, or wait for the device in every layer."""
        q, cu = torch.randn(5, 2, 4), torch.tensor([0, 2, 5])
        with pytest.raises(
            RuntimeError, match="max_seqlen_q: expected an int, because lengths are not known in a traced"
        ):
            torch.compile(attention_varlen, fullgraph=True, backend="eager")(q, q, q, cu, cu)

    def test_autocast_is_seen_inside_the_graph(self) -> None:
        """The graph is made of what autocast made of the call, gradients in float32 included."""

        def function(q: Any, k: Any, v: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                out = attention(q, k, v)
            assert torch.bfloat16 == out.dtype
            return out.float()

        assert_compiles(function, qkv())

    def test_dropout_in_a_graph_drops_the_same_forward_and_backward(self) -> None:
        """A partitioner that recomputes the seed would draw another one."""
        eye = torch.eye(24).expand(1, 2, 24, 24).clone().requires_grad_()
        q, k = torch.randn(1, 2, 24, 8), torch.randn(1, 2, 24, 8)
        compiled = torch.compile(
            lambda q, k, v: attention(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager"
        )
        first, second = compiled(q, k, eye), compiled(q, k, eye)
        assert not torch.equal(first, second)
        first.backward(torch.eye(24).expand_as(first))
        torch.testing.assert_close(eye.grad.mT, first.detach())

    def test_a_map_and_a_checkpoint_are_part_of_the_graph(self) -> None:
        """Per-sample code and memory savings are written inside the compiled function."""

        def function(q: Any, k: Any, v: Any) -> Any:
            mapped = torch.vmap(lambda q, k, v: attention(q, k, v, causal=True), in_dims=(0, None, None))(
                q, k[0], v[0]
            )
            return mapped + checkpoint(
                lambda *x: attention(*x, softcap=3.0), q[0], k[0], v[0], use_reentrant=False
            )

        q, k, v = (torch.stack([x] * 2) for x in qkv())
        assert_compiles(function, (q, k, v))

    def test_a_decoding_step_with_its_append_is_one_graph(self) -> None:
        """The cache is written in place: the graph has to write it too."""
        q, new = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 1, 8)
        cache, table = torch.randn(6, 2, 4, 8), torch.tensor([[1, 2], [5, 4]], dtype=torch.int32)

        def step(q: Any, k: Any, v: Any, lengths: Any, new: Any) -> Any:
            return attention_decode(q, k, v, lengths, k_new=new, v_new=new, block_table=table, causal=True)

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        ours, theirs = (cache.clone(), cache.clone()), (cache.clone(), cache.clone())
        for lengths in ([3, 0], [4, 1]):
            at = torch.tensor(lengths, dtype=torch.int32)
            torch.testing.assert_close(compiled(q, *ours, at, new), step(q, *theirs, at, new), rtol=0, atol=0)
        assert torch.equal(ours[0], theirs[0])
        assert not torch.equal(ours[0], cache)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_the_default_compiler_runs_it(self) -> None:
        """Inductor plans memory from the strides of the fake kernels and writes over what it believes free."""
        torch._dynamo.reset()
        inputs = qkv()
        compiled = torch.compile(lambda q, k, v: attention(q + 1, k, v, causal=True).sin(), fullgraph=True)
        eager = results(lambda q, k, v: attention(q + 1, k, v, causal=True).sin(), inputs)
        for got, expected in zip(results(compiled, inputs), eager, strict=True):
            torch.testing.assert_close(got, expected)


def test_an_exported_model_holds_the_operator() -> None:
    """Export runs the model on fake tensors without the compiler's front end."""

    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, causal=True, mask=attnproof.prefix(2))

    inputs = qkv()
    program = torch.export.export(Model(), inputs)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.attnproof.forward.default in targets
    torch.testing.assert_close(program.module()(*inputs), Model()(*inputs), rtol=0, atol=0)


def structures() -> dict[str, Bound]:
    """Calls whose results are stored in different ways."""
    torch.manual_seed(0)
    q, k, v = qkv()
    extras = {"bias": torch.randn(4, 1, 7), "alibi_slopes": torch.rand(4), "sink": torch.randn(4)}
    packed = torch.randn(6, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 6)
    cu = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 7])
    many = torch.randn(65536, 1, 1, 1)
    return {
        "bhmd": bind(q, k, v, Options(causal=True)),
        "bmhd with extras": bind(
            *(x.transpose(1, 2).contiguous() for x in (q, k, v)), Options(layout="bmhd", **extras)
        ),
        "bhmd as views of bmhd": bind(
            *(x.permute(0, 2, 1, 3).contiguous().transpose(1, 2) for x in (q, k, v)), Options()
        ),
        "one row, one head": bind(q[:, :1, :1], k[:, :1, :1], v[:, :1, :1], Options(layout="bhmd")),
        "one row, bmhd": bind(*(x[:, :1].transpose(1, 2) for x in (q, k, v)), Options(layout="bmhd")),
        "expanded": bind(q[:, :1].expand(2, 4, 5, 8), k[:1].expand(2, 2, 7, 8), v, Options()),
        "no key": bind(q, k[:, :, :0], v[:, :, :0], Options()),
        "no query": bind(q[:, :, :0], k, v, Options()),
        "many sequences": bind(many, many, many, Options()),
        "packed": bind_varlen(*packed, *cu, 5, 7, Options(dropout_p=0.3, seed=3)),
    }


# NumPy walks the sequences one by one
SLOW = ("many sequences", "streaming")


def described(results: Any) -> list[tuple[Any, ...]]:
    return [(tuple(x.shape), x.stride(), x.dtype) for x in results]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        (name, backend)
        for name in structures()
        for backend in ("math", "streaming")
        if (name, backend) != SLOW
    ],
)
def test_fake_and_real_results_agree_in_shape_stride_and_dtype(name: str, backend: str) -> None:
    """Compiled code indexes the real result with the fake one's strides: wrong numbers, or a crash."""
    problem, tensors = structures()[name]
    settings = operators.settings_of(backend, problem)
    needs = ",".join(at for at in GRADIENTS if getattr(tensors, at) is not None)
    forward, backward = torch.ops.attnproof.forward, torch.ops.attnproof.backward
    out, lse = forward(*tensors, *settings)
    grads = backward(*tensors, out, lse, out, lse, *settings, needs)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        given = [None if x is None else mode.from_tensor(x) for x in (*tensors, out, lse)]
        fake = forward(*given[:-2], *settings)
        fake_grads = backward(*given, given[-2], given[-1], *settings, needs)
    assert described(fake) == described((out, lse))
    assert described(fake_grads) == described(grads)
    assert lse.is_contiguous()


@pytest.mark.parametrize("name", ["bmhd with extras", "packed"])
def test_the_operators_pass_torchs_own_check(name: str) -> None:
    """Schema, fake kernel, autograd registration, and a whole traced training step with symbolic sizes."""
    problem, tensors = structures()[name]
    settings = operators.settings_of("math", problem)
    inputs = [x.detach().requires_grad_() if x is not None and x.is_floating_point() else x for x in tensors]
    torch.library.opcheck(torch.ops.attnproof.forward.default, (*inputs, *settings))
    out, lse = torch.ops.attnproof.forward(*tensors, *settings)
    needs = ",".join(at for at in GRADIENTS if getattr(tensors, at) is not None)
    given = (out, lse, torch.randn_like(out), torch.randn_like(lse))
    torch.library.opcheck(torch.ops.attnproof.backward.default, (*tensors, *given, *settings, needs))
