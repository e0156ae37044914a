"""The SDPA-shaped entry point against torch's own."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention as theirs  # noqa: E402

from attnproof.compat.sdpa import scaled_dot_product_attention as ours  # noqa: E402
from attnproof.errors import DtypeError, ShapeError, Unsupported  # noqa: E402


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.float64)


def qkv(*lead: int) -> tuple[Any, Any, Any]:
    return randn(*lead, 5, 8), randn(*lead, 7, 8), randn(*lead, 7, 6)


BATCH = (2, 4)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": (BATCH, {}),
    "causal, longer keys": (BATCH, {"is_causal": True}),
    "scale": (BATCH, {"scale": 0.3}),
    "boolean mask": (BATCH, {"attn_mask": torch.rand(5, 7) > 0.3}),
    "mask with a dead row": (BATCH, {"attn_mask": (torch.arange(5) != 2)[:, None].expand(5, 7)}),
    "bias of the batch": (BATCH, {"attn_mask": randn(2, 1, 5, 7)}),
    "no heads": ((3,), {"attn_mask": randn(3, 5, 7)}),
    "no batch": ((), {"is_causal": True}),
    "five axes": ((3, 2, 4), {"is_causal": True}),
    "five axes, mask of the heads": ((3, 2, 4), {"attn_mask": randn(2, 4, 5, 7)}),
    "five axes, mask of the outer batch": ((3, 2, 4), {"attn_mask": randn(3, 1, 1, 5, 7)}),
    "five axes, mask of nobody": ((3, 2, 4), {"attn_mask": randn(1, 1, 4, 5, 7)}),
}


@pytest.mark.parametrize(("lead", "options"), CASES.values(), ids=list(CASES))
def test_results_and_gradients_are_torchs(lead: tuple[int, ...], options: dict[str, Any]) -> None:
    """A drop-in that differs in one convention (top-left, mask axes, scale) trains to another model."""
    results = []
    for function in (theirs, ours):
        torch.manual_seed(1)
        inputs = [x.requires_grad_() for x in qkv(*lead)]
        mask = options.get("attn_mask")
        given = dict(options)
        if mask is not None and mask.is_floating_point():
            given["attn_mask"] = mask.clone().requires_grad_()
            inputs.append(given["attn_mask"])
        out = function(*inputs[:3], **given)
        out.pow(2).sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs)])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_a_mask_and_causal_both_apply() -> None:
    """torch raises or intersects, by path; one of the two dropped silently would let a model see the future."""
    q, k, v = qkv(2, 4)
    mask = torch.rand(5, 7) > 0.2
    both = mask & torch.ones(5, 7, dtype=torch.bool).tril()
    torch.testing.assert_close(ours(q, k, v, attn_mask=mask, is_causal=True), theirs(q, k, v, attn_mask=both))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_grouped_heads_are_torchs(heads: int) -> None:
    """Query head h reads key head h // G: tiled instead of repeated, every head but the first is wrong."""
    q, (_, k, v) = qkv(2, 4)[0], qkv(2, heads)
    torch.testing.assert_close(ours(q, k, v, enable_gqa=True), theirs(q, k, v, enable_gqa=True))


def test_batches_broadcast_as_in_torch() -> None:
    """One set of keys for many queries is legal there, and costs no copy here."""
    q, k, v = qkv(2, 4)
    torch.testing.assert_close(ours(q, k[:1], v[:1]), theirs(q, k[:1], v[:1]))
    torch.testing.assert_close(ours(q[:1], k, v), theirs(q[:1], k, v))


def test_the_signature_is_torchs() -> None:
    """Callers pass these by position and by name."""
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    parameters = inspect.signature(ours).parameters
    assert names == list(parameters)
    assert [None, 0.0, False, None, False] == [parameters[name].default for name in names[3:]]


def test_causal_with_more_queries_than_keys_is_top_left() -> None:
    """The core is bottom-right: without the translation the first rows would see nothing."""
    q, k, v = randn(1, 1, 7, 4), randn(1, 1, 5, 4), randn(1, 1, 5, 4)
    torch.testing.assert_close(ours(q, k, v, is_causal=True), theirs(q, k, v, is_causal=True))
    torch.testing.assert_close(ours(q, k, v, is_causal=True)[:, :, 0], v[:, :, 0])


def test_dropout_is_applied_whenever_it_is_asked_for() -> None:
    """A functional knows no training mode; the rate is torch's, the entries are our own."""
    eye = torch.eye(40, dtype=torch.float64).expand(1, 4, 40, 40)
    q = randn(1, 4, 40, 8)
    dropped = ours(q, q, eye, dropout_p=0.25) == 0
    assert 0.2 < float(dropped.double().mean()) < 0.3


def test_differences_are_errors_with_a_sentence() -> None:
    """What torch accepts and we do not must not be computed as something else."""
    q, k, v = qkv(2, 4)
    with pytest.raises(
        ShapeError, match=r"key: expected 4 heads to match query \(or enable_gqa=True\), got 1"
    ):
        ours(q, k[:, :1], v[:, :1])
    with pytest.raises(ShapeError, match="v: expected 2 heads to match k, got 1"):
        ours(q, k[:, :2], v[:, :1], enable_gqa=True)
    with pytest.raises(ShapeError, match="key: expected 4 axes, got shape"):
        ours(q, k[0], v)
    with pytest.raises(ShapeError, match="key: expected batch axes that broadcast with"):
        ours(q, k.repeat(3, 1, 1, 1)[:3], v.repeat(3, 1, 1, 1)[:3])
    with pytest.raises(ShapeError, match="attn_mask: expected 2 to 4 axes"):
        ours(q, k, v, attn_mask=torch.ones(7, dtype=torch.bool))
    with pytest.raises(DtypeError, match="bias: expected dtype float64"):
        ours(q, k, v, attn_mask=torch.ones(5, 7, dtype=torch.int64))
    with pytest.raises(DtypeError, match="query: expected a torch tensor, got ndarray"):
        ours(q.numpy(), k, v)
    with pytest.raises(DtypeError, match="attn_mask: expected a torch tensor, got list"):
        ours(q, k, v, attn_mask=[True])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_is_pointed_to_packed_sequences() -> None:
    """Its lengths are hidden from every check; attention_varlen takes them openly."""
    nested = torch.nested.nested_tensor([randn(4, 2, 8), randn(4, 3, 8)])
    with pytest.raises(Unsupported, match="query is a nested tensor; use attention_varlen"):
        ours(nested, nested, nested)
