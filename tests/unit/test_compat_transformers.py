"""transformers' attention and mask interfaces, served by ours: tiny random models against their eager attention.

Long because every kind of model asks for masks in its own way, and all are built by the same helpers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import attnproof

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attnproof.compat import interval_mask  # noqa: E402
from attnproof.compat import transformers as compat  # noqa: E402
from attnproof.compat.interval_mask import IntervalMask, as_mask  # noqa: E402

pytestmark = pytest.mark.real

# big weights: attention that is nearly uniform would hide a wrong mask or a missing softcap
WEIGHT_SPREAD = 0.15
SHARED = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped heads": ("LlamaConfig", {}),
    "softcap and alternating windows": (
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    "a window in every layer": ("MistralConfig", {"head_dim": 16, "sliding_window": 6}),
    "sinks": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "sliding_window": 4,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "rope_scaling": None,
        },
    ),
    "chunks": ("Llama4TextConfig", {"head_dim": 16, "attention_chunk_size": 8, "num_local_experts": 2}),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads cost more than they give at this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def registered() -> str:
    return compat.register()


def randomise(model: Any) -> Any:
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1 or weight.shape == (4,):  # matrices, and the sinks of four heads
            torch.nn.init.normal_(weight, std=WEIGHT_SPREAD if weight.ndim > 1 else 1.0)
    return model.eval()


def decoder(kind: str) -> Any:
    name, extra = DECODERS[kind]
    config = getattr(transformers, name)(**{**SHARED, **extra})
    config._attn_implementation = "eager"
    return randomise(transformers.AutoModelForCausalLM.from_config(config))


def padded_ids(side: str) -> tuple[Any, Any]:
    """Three sequences of 24, 17 and 9 tokens."""
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 97, (3, 24), generator=made)
    mask = torch.ones_like(ids)
    for row, length in enumerate((24, 17, 9)):
        empty = slice(0, 24 - length) if side == "left" else slice(length, 24)
        mask[row, empty] = 0
        ids[row, empty] = 0
    return ids, mask


def logits_and_gradients(model: Any, implementation: str, ids: Any, mask: Any) -> tuple[Any, dict[str, Any]]:
    model.set_attn_implementation(implementation)
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    logits[:, :5].square().mean().backward()
    return logits.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def relative(a: Any, b: Any) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_gives_the_logits_and_gradients_of_its_eager_attention(kind: str, side: str) -> None:
    """A window off by one, a sink without its gradient or a scale taken twice shows here."""
    model, (ids, mask) = decoder(kind), padded_ids(side)
    logits, grads = logits_and_gradients(model, "eager", ids, mask)
    ours, our_grads = logits_and_gradients(model, "attnproof", ids, mask)
    assert relative(ours, logits) < 1e-5
    assert grads.keys() == our_grads.keys()
    apart = {name: relative(our_grads[name], grads[name]) for name in grads if grads[name].norm() > 1e-6}
    assert {} == {name: value for name, value in apart.items() if value > 1e-4}


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", DECODERS)
def test_generation_with_a_cache_gives_the_tokens_of_eager_attention(kind: str, cache: str | None) -> None:
    """The cache grows past the window, is longer than what it holds (static), and starts with left padding."""
    model, (ids, mask) = decoder(kind), padded_ids("left")
    tokens = []
    for implementation in ("eager", "attnproof"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            made = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=10,
                do_sample=False,
                cache_implementation=cache,
                disable_compile=True,
            )
        tokens.append(made.tolist())
    assert tokens[0] == tokens[1]


def test_a_cached_step_sees_what_a_full_pass_sees() -> None:
    """Queries of a chunk are at the end of the keys, not at their beginning."""
    model, (ids, _) = decoder("a window in every layer"), padded_ids("left")
    model.set_attn_implementation("attnproof")
    with torch.no_grad():
        full = model(input_ids=ids[:1], use_cache=False).logits
        cache = {cache_argument(model): transformers.DynamicCache(config=model.config)}
        model(input_ids=ids[:1, :13], **cache)
        rest = model(input_ids=ids[:1, 13:], **cache).logits
    assert relative(rest, full[:, 13:]) < 1e-5


def cache_argument(model: Any) -> str:
    """Its name changed in the course of 5.x."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def test_an_encoder_reads_no_padding_at_all() -> None:
    model, (ids, mask) = encoder(), padded_ids("right")
    other = torch.where(mask.bool(), ids, 50)
    with torch.no_grad():
        one, two = (model(input_ids=x, attention_mask=mask).last_hidden_state for x in (ids, other))
        model.set_attn_implementation("eager")
        eager = model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert torch.equal(one[mask.bool()], two[mask.bool()])
    assert relative(one[mask.bool()], eager[mask.bool()]) < 1e-5


def encoder(**extra: Any) -> Any:
    shared = {key: value for key, value in SHARED.items() if key != "num_key_value_heads"}
    model = randomise(
        transformers.BertModel(transformers.BertConfig(**shared, **extra), add_pooling_layer=False)
    )
    model.set_attn_implementation("attnproof")
    return model


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_loses_no_more_than_eager_attention_does(dtype: str) -> None:
    model, (ids, mask) = decoder("softcap and alternating windows"), padded_ids("right")
    with torch.no_grad():
        exact = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        model.to(getattr(torch, dtype))
        eager = model(input_ids=ids, attention_mask=mask).logits[mask.bool()].float()
        model.set_attn_implementation("attnproof")
        ours = model(input_ids=ids, attention_mask=mask).logits[mask.bool()].float()
    unit = attnproof.dtypes.ROUNDOFF[dtype]
    assert relative(ours, exact) < 2 * relative(eager, exact) + unit


def test_autocast_runs_attention_in_the_lower_precision() -> None:
    model, (ids, mask) = encoder(), padded_ids("right")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours = model(input_ids=ids, attention_mask=mask).last_hidden_state
        model.set_attn_implementation("sdpa")
        theirs = model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert ours.dtype == theirs.dtype
    assert relative(ours[mask.bool()].float(), theirs[mask.bool()].float()) < 2**-5


def test_dropout_acts_in_training_only_and_follows_torch_seed() -> None:
    model, (ids, mask) = (
        encoder(attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0),
        padded_ids("right"),
    )

    def read(seed: int) -> Any:
        torch.manual_seed(seed)
        return model(input_ids=ids, attention_mask=mask).last_hidden_state.detach()

    calm = read(0)
    assert torch.equal(calm, read(1))
    model.train()
    assert torch.equal(read(0), read(0))
    assert not torch.equal(read(0), read(1))
    assert not torch.allclose(read(0), calm, atol=1e-3)


# --- the attention function alone ------------------------------------------------------------------------------------


def tensors(b: int = 2, h: int = 4, m: int = 7, n: int = 7, d: int = 8, hkv: int = 2) -> tuple[Any, ...]:
    made = torch.Generator().manual_seed(2)
    shapes = ((b, h, m, d), (b, hkv, n, d), (b, hkv, n, d))
    return tuple(torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes)


def call(q: Any, k: Any, v: Any, mask: Any = None, *, is_causal: bool = False, **given: Any) -> Any:
    function = transformers.AttentionInterface()["attnproof"]
    out, weights = function(SimpleNamespace(is_causal=is_causal), q, k, v, mask, **given)
    assert weights is None
    return out.transpose(1, 2)


def plain(q: Any, k: Any, v: Any, added: Any, scale: float | None = None) -> Any:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return torch.softmax(scores + added, -1) @ v


def window_bias(m: int, n: int, left: int, right: int) -> Any:
    distance = torch.arange(n)[None] - torch.arange(m)[:, None] - (n - m)
    seen = (distance >= -left) & (distance <= right)
    return torch.where(seen, 0.0, -torch.inf).double()


@pytest.mark.parametrize(("causal", "band"), [(True, (2, 0)), (False, (2, 2))])
def test_without_a_mask_the_flags_decide_what_is_seen(causal: bool, band: tuple[int, int]) -> None:
    """``sliding_window`` counts the query's own token."""
    q, k, v = tensors()
    expected = plain(q, k, v, window_bias(7, 7, *band))
    assert torch.allclose(expected, call(q, k, v, is_causal=causal, sliding_window=3), atol=1e-14)


def test_the_module_says_whether_it_is_causal_unless_the_call_does() -> None:
    q, k, v = tensors()
    assert torch.allclose(plain(q, k, v, window_bias(7, 7, 99, 0)), call(q, k, v, is_causal=True), atol=1e-14)
    function = transformers.AttentionInterface()["attnproof"]
    out, _ = function(SimpleNamespace(is_causal=True), q, k, v, None, is_causal=False)
    assert torch.allclose(plain(q, k, v, 0.0), out.transpose(1, 2), atol=1e-14)


def test_a_mask_is_the_whole_truth() -> None:
    """As with sdpa: the flags of the module are already in a mask that the model made."""
    q, k, v = tensors()
    seen = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    seen[1, :, :, 4:] = False
    added = torch.where(seen, 0.0, -torch.inf).double()
    assert torch.allclose(
        plain(q, k, v, added), call(q, k, v, seen, is_causal=True, sliding_window=2), atol=1e-14
    )


def test_position_bias_floats_and_scale_add_up_and_get_their_gradient() -> None:
    q, k, v = tensors()
    bias = torch.randn(1, 4, 7, 7, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(2, 1, 7, 7, dtype=torch.float64)
    grads = []
    for out in (call(q, k, v, mask, position_bias=bias, scaling=0.3), plain(q, k, v, bias + mask, 0.3)):
        (grad,) = torch.autograd.grad(out.square().sum(), bias)
        grads.append((out.detach(), grad))
    assert torch.allclose(grads[0][0], grads[1][0], atol=1e-14)
    assert torch.allclose(grads[0][1], grads[1][1], atol=1e-13)


def test_terms_in_another_dtype_are_widened_not_refused() -> None:
    """Mixed precision keeps sinks and relative positions in another dtype than q."""
    q, k, v = (x.float() for x in tensors())
    sink = torch.randn(4).bfloat16()
    bias = torch.randn(1, 4, 7, 7).half()
    expected = call(q, k, v, s_aux=sink.float(), position_bias=bias.float())
    assert torch.equal(expected, call(q, k, v, s_aux=sink, position_bias=bias))
    wide = call(*(x.double() for x in (q, k, v)), s_aux=sink, position_bias=bias)
    assert torch.allclose(wide, expected.double(), atol=1e-6)


def test_queries_shared_by_the_batch_are_stretched() -> None:
    q, k, v = tensors()
    assert torch.allclose(call(q[:1].expand(2, -1, -1, -1), k, v), call(q[:1], k, v))


@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences_do_not_see_each_other(masked: bool) -> None:
    q, k, v = tensors(b=1, m=9, n=9)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril() if masked else None
    packed = call(
        q, k, v, mask, is_causal=True, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=5, max_length_k=5
    )
    parts = [call(*(x[:, :, part] for x in (q, k, v)), is_causal=True) for part in (slice(0, 4), slice(4, 9))]
    assert torch.allclose(torch.cat(parts, 2), packed, atol=1e-14)


def test_a_mask_made_for_the_capacity_of_a_cache_is_cut_to_the_keys() -> None:
    q, k, v = tensors()
    mask = torch.ones(2, 1, 7, 12, dtype=torch.bool).tril()
    assert torch.equal(call(q, k, v, mask[..., :7]), call(q, k, v, mask))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown argument": (
        {"block_indices": torch.zeros(1)},
        attnproof.Unsupported,
        "attnproof: the model passes block_indices, which may change the result",
    ),
    "attention weights": ({"output_attentions": True}, attnproof.Unsupported, "weights are never formed"),
    "mask of two axes": (
        {"mask": torch.ones(2, 7)},
        ValueError,
        r"attention_mask: expected 4 axes .*got shape \(2, 7\)",
    ),
    "integer mask": (
        {"mask": torch.ones(2, 1, 7, 7, dtype=torch.int64)},
        TypeError,
        "attention_mask: expected bool or floating point, got torch.int64",
    ),
    "mask of another kind": ({"mask": {}}, TypeError, "attention_mask: expected a tensor, got dict"),
    "one of two cumulative lengths": (
        {"cu_seq_lens_q": torch.tensor([0, 7])},
        TypeError,
        "cu_seq_lens_q, cu_seq_lens_k: expected two tensors, got Tensor and NoneType",
    ),
    "packed batch of two": (
        {"cu_seq_lens_q": torch.tensor([0, 7]), "cu_seq_lens_k": torch.tensor([0, 7])},
        ValueError,
        "cu_seq_lens_q: expected sequences packed into a batch of 1, got 2",
    ),
    "packed lengths beside a mask": (
        {
            "mask": torch.ones(2, 1, 7, 7, dtype=torch.bool),
            "cu_seq_lens_q": torch.tensor([0, 3]),
            "cu_seq_lens_k": torch.tensor([0, 7]),
        },
        ValueError,
        "attention_mask: expected None beside",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_nothing_that_changes_the_result_is_ignored(what: str) -> None:
    given, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        call(*tensors(), **given)


def test_lengths_that_differ_need_a_mask() -> None:
    """Without one, top-left and bottom-right are both plausible, and libraries disagree."""
    q, k, v = tensors(m=3)
    with pytest.raises(ValueError, match="attention_mask: expected a mask, since 3 queries and 7 keys"):
        call(q, k, v, is_causal=True)
    one = call(q[:, :, :1], k, v, is_causal=True)
    assert torch.allclose(plain(q[:, :, :1], k, v, 0.0), one, atol=1e-14)


def test_packed_sequences_take_no_position_bias() -> None:
    q, k, v = tensors(b=1)
    cu = torch.tensor([0, 7])
    with pytest.raises(attnproof.Unsupported, match="position_bias has no place"):
        call(q, k, v, cu_seq_lens_q=cu, cu_seq_lens_k=cu, position_bias=torch.zeros(1, 4, 7, 7))


def test_packed_lengths_beside_a_mask_need_as_many_queries_as_keys() -> None:
    q, k, v = tensors(b=1, m=3)
    cu = torch.tensor([0, 3])
    with pytest.raises(
        ValueError, match="cu_seq_lens_q: expected as many queries as keys beside a mask, 7, got 3"
    ):
        call(q, k, v, torch.ones(1, 1, 3, 7, dtype=torch.bool), cu_seq_lens_q=cu, cu_seq_lens_k=cu)


def test_a_caller_can_vouch_for_an_argument_of_its_own_model() -> None:
    name = compat.register("attnproof-lenient", ignore=("block_indices",))
    q, k, v = tensors()
    function = transformers.AttentionInterface()[name]
    out, _ = function(SimpleNamespace(is_causal=False), q, k, v, None, block_indices=torch.zeros(1))
    assert torch.equal(call(q, k, v), out.transpose(1, 2))


def test_registering_names_the_backend_and_refuses_one_that_is_not_there() -> None:
    assert "attnproof-reference" == compat.register("attnproof-reference", backend="reference")
    with pytest.raises(ValueError, match="backend: expected"):
        compat.register("attnproof-x", backend="nothing")
    assert "attnproof-x" not in transformers.AttentionInterface()


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(attnproof.BackendMissing, match=r"pip install 'attnproof\[real\]'"):
        compat.register()


# --- masks -----------------------------------------------------------------------------------------------------------


def masks_of(**given: Any) -> tuple[Any, Any]:
    """Our mask and transformers' own boolean tensor for the same request."""
    from transformers import masking_utils

    keys = set(masking_utils.sdpa_mask.__annotations__)
    if "cache_position" in keys:
        start = given.pop("q_offset", 0)
        given["cache_position"] = torch.arange(given.pop("q_length")) + start
    else:
        given.setdefault("q_offset", 0)
        given |= {"allow_is_bidirectional_skip": True}
    ours = compat.make_mask(**given, config=None, dtype=torch.float32)
    no_skip = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
    return ours, masking_utils.sdpa_mask(**{**given, **no_skip})


def functions() -> Any:
    from transformers import masking_utils

    return masking_utils


PADDED = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)
REQUESTS: dict[str, Any] = {
    "causal": lambda: {"mask_function": functions().causal_mask_function},
    "causal, padded": lambda: {"mask_function": functions().causal_mask_function, "attention_mask": PADDED},
    "padded": lambda: {
        "mask_function": functions().and_masks(lambda b, h, i, j: j >= 0),
        "attention_mask": PADDED,
    },
    "window": lambda: {"mask_function": functions().sliding_window_causal_mask_function(3)},
    "window over a cache": lambda: {
        "mask_function": functions().sliding_window_causal_mask_function(4),
        "attention_mask": PADDED,
        "q_length": 3,
        "q_offset": 6,
    },
    "chunks": lambda: {
        "mask_function": functions().chunked_causal_mask_function(4, torch.tensor([2, 0])),
        "attention_mask": PADDED,
    },
    "packed": lambda: {
        "mask_function": functions().and_masks(
            functions().causal_mask_function,
            functions().packed_sequence_mask_function(torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]] * 2)),
        )
    },
}


@pytest.mark.parametrize("rows_per_block", [1, 100])
@pytest.mark.parametrize("what", REQUESTS)
def test_a_mask_kept_as_intervals_is_the_mask_that_was_asked_for(
    what: str, rows_per_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of query rows must be looked at with the positions it has in the whole."""
    monkeypatch.setattr(interval_mask, "BLOCK_ELEMENTS", rows_per_block * 2 * 9)
    ours, expected = masks_of(**{"batch_size": 2, "q_length": 9, "kv_length": 9} | REQUESTS[what]())
    assert isinstance(ours, IntervalMask)
    assert expected.shape == ours.shape
    assert torch.equal(expected, ours.materialise())


def test_rows_with_holes_become_a_boolean_tensor() -> None:
    """Padding in the middle is not one run of keys."""
    padding = torch.tensor([[1, 0, 1, 1]], dtype=torch.bool)
    ours, expected = masks_of(
        batch_size=1,
        q_length=4,
        kv_length=4,
        mask_function=functions().causal_mask_function,
        attention_mask=padding,
    )
    assert not isinstance(ours, IntervalMask)
    assert torch.equal(expected, ours)


def test_a_mask_per_head_becomes_a_boolean_tensor() -> None:
    import numpy as np

    heads = torch.ones(1, 2, 3, 3, dtype=torch.bool)
    assert interval_mask.intervals(lambda start, stop: heads[:, :, start:stop], 1, 3, 3, "cpu") is None
    assert np.array_equal(
        [[3, 3, 3]], interval_mask.intervals(lambda i, j: heads[:, :1, i:j], 1, 3, 3, "cpu").hi
    )


def test_masks_of_one_shape_are_told_apart_as_bands_and_intervals() -> None:
    """The narrowest description lets a kernel skip most: a band where there is one, else intervals."""
    found = {}
    for what in ("causal", "window", "padded", "packed"):
        ours, _ = masks_of(**{"batch_size": 2, "q_length": 9, "kv_length": 9} | REQUESTS[what]())
        mask = as_mask(ours)
        found[what] = (min(mask.left, 99), min(mask.right, 99), [term.lo.ndim for term in mask.terms])
    assert found == {
        "causal": (99, 0, []),
        "window": (2, 0, []),
        "padded": (99, 99, [2]),
        "packed": (99, 99, [1]),
    }


def test_a_mask_that_is_written_to_keeps_what_was_written() -> None:
    """Model code may edit a mask through a view; the intervals are then no longer the truth."""
    ours, expected = masks_of(
        batch_size=1, q_length=5, kv_length=5, mask_function=functions().causal_mask_function
    )
    assert ours.plain is None
    view = ours[:, :, 2]
    view[..., 0] = False
    expected[:, :, 2, 0] = False
    assert torch.equal(expected, as_mask(ours))


def test_an_empty_mask_request_is_left_to_transformers() -> None:
    ours, expected = masks_of(
        batch_size=1, q_length=0, kv_length=5, mask_function=functions().causal_mask_function
    )
    assert expected.shape == ours.shape
