"""attention_backward: gradients for NumPy arrays without torch."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from attnproof import DtypeError, ShapeError, attention_backward, attention_with_lse
from attnproof.problem import GRADIENTS

rng = np.random.default_rng(0)
QKV = [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6))]
EXTRAS = {
    "bias": rng.standard_normal((1, 4, 5, 1)).astype(np.float32),
    "alibi_slopes": rng.uniform(0, 1, 4).astype(np.float32),
    "sink": rng.standard_normal(4).astype(np.float32),
}
OUT, LSE = attention_with_lse(*QKV, **EXTRAS)
DOUT = rng.standard_normal(OUT.shape).astype(np.float32)


def backward(**change: Any) -> Any:
    given = {"out": OUT, "lse": LSE, "dout": DOUT, **EXTRAS, **change}
    return attention_backward(*QKV, given.pop("out"), given.pop("lse"), given.pop("dout"), **given)


@pytest.mark.parametrize(
    "needs", [(), ("q",), ("k", "bias"), ("v",), ("alibi_slopes", "sink"), "q", GRADIENTS]
)
@pytest.mark.parametrize("backend", ["streaming", "reference"])
def test_only_what_is_asked_for_is_computed_and_it_does_not_depend_on_the_rest(
    needs: Any, backend: str
) -> None:
    everything = backward(backend=backend)
    for name, right, got in zip(GRADIENTS, everything, backward(needs=needs, backend=backend), strict=True):
        if name in ((needs,) if isinstance(needs, str) else needs):
            assert right.tolist() == got.tolist()
        else:
            assert got is None


def test_gradients_of_inputs_that_were_not_given_are_none() -> None:
    grads = attention_backward(*QKV, OUT, LSE, DOUT)
    assert [False] * 3 + [True] * 3 == [grad is None for grad in grads]


def test_shapes_and_dtypes_are_those_of_the_inputs() -> None:
    grads = backward()
    inputs = [*QKV, EXTRAS["bias"]]
    assert [(x.shape, x.dtype) for x in inputs] == [(grad.shape, grad.dtype) for grad in grads[:4]]
    assert [(2, 4), (4,)] == [grad.shape for grad in grads[4:]]


def test_any_strides_of_dout_will_do() -> None:
    wide = np.zeros((*OUT.shape[:3], 12), np.float32)
    wide[..., ::2] = DOUT
    flipped = DOUT[:, ::-1].copy()[:, ::-1]
    for dout in (wide[..., ::2], flipped, DOUT.swapaxes(1, 3).copy().swapaxes(1, 3)):
        for right, got in zip(backward(), backward(dout=dout), strict=True):
            assert right.tolist() == got.tolist()


def test_a_dout_that_is_one_number_will_do() -> None:
    """The gradient of a sum has stride 0 everywhere."""
    ones = np.broadcast_to(np.float32(1), OUT.shape)
    for right, got in zip(backward(dout=ones.copy()), backward(dout=ones), strict=True):
        assert right.tolist() == got.tolist()


def test_the_layout_is_only_strides() -> None:
    swapped = [x.swapaxes(1, 2) for x in (*QKV, OUT)]
    got = attention_backward(*swapped, LSE, DOUT.swapaxes(1, 2), layout="bmhd", **EXTRAS)
    for right, grad in zip(backward()[:3], got[:3], strict=True):
        assert right.tolist() == grad.swapaxes(1, 2).tolist()
    for right, grad in zip(backward()[3:], got[3:], strict=True):
        assert right.tolist() == grad.tolist()


BAD: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "out of another shape": (
        ShapeError,
        {"out": OUT[..., :5]},
        "out: expected shape (2, 4, 5, 6), got (2, 4, 5, 5)",
    ),
    "dout of another shape": (
        ShapeError,
        {"dout": DOUT[:1]},
        "dout: expected shape (2, 4, 5, 6), got (1, 4, 5, 6)",
    ),
    "dout in the other layout": (
        ShapeError,
        {"dout": DOUT.swapaxes(1, 2)},
        "dout: expected shape (2, 4, 5, 6), got (2, 5, 4, 6)",
    ),
    "dout in another dtype": (
        DtypeError,
        {"dout": DOUT.astype(float)},
        "dout: expected dtype float32, got float64",
    ),
    "lse of another shape": (ShapeError, {"lse": LSE[0]}, "lse: expected shape (2, 4, 5), got (4, 5)"),
    "lse in another dtype": (
        DtypeError,
        {"lse": LSE.astype(np.float16)},
        "lse: expected dtype float32, got float16",
    ),
    "dlse of another shape": (
        ShapeError,
        {"dlse": LSE[..., None]},
        "dlse: expected shape (2, 4, 5), got (2, 4, 5, 1)",
    ),
    "dlse as a number": (DtypeError, {"dlse": 1.0}, "dlse: expected a NumPy array to match q, got float"),
    "an unknown name": (
        ShapeError,
        {"needs": ("q", "keys")},
        "needs: expected names out of alibi_slopes, bias, k, q, sink, v, got ['keys']",
    ),
    "dropout without the forward's seed": (
        ShapeError,
        {"dropout_p": 0.5},
        "seed: expected the (seed, offset) of the forward call, which drew its own, got None",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_the_forward_is_refused(name: str) -> None:
    """Half bits read as another dtype, or another draw of dropout, would give plausible gradients."""
    error, change, message = BAD[name]
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        backward(**change)


def test_tensors_are_told_where_their_gradients_come_from() -> None:
    torch = pytest.importorskip("torch")
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(
        DtypeError, match=r"^q: expected NumPy arrays, got torch tensors \(their gradients come from"
    ):
        attention_backward(q, q, q, q, q[..., 0], q)


def test_an_option_that_does_not_exist_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_causal'"):
        backward(is_causal=True)
