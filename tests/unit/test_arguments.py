"""Every argument that makes no sense is refused with a message that names it, what was expected and what came."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import attnproof
from attnproof import DtypeError, ShapeError, attention, attention_varlen

F = np.float32


def zeros(*shape: int, dtype: Any = F) -> Any:
    return np.zeros(shape, dtype)


def dense(**change: Any) -> Any:
    """attention() on [B 2, H 4, M 5, D 8] against [Hkv 2, N 7], with arguments replaced."""
    given = {"q": zeros(2, 4, 5, 8), "k": zeros(2, 2, 7, 8), "v": zeros(2, 2, 7, 6), **change}
    return attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def packed(**change: Any) -> Any:
    """attention_varlen() on 5 + 4 queries and 3 + 6 keys, with arguments replaced."""
    given = {"q": zeros(9, 4, 8), "k": zeros(9, 2, 8), "v": zeros(9, 2, 6), **change}
    cu_q, cu_k = (
        given.pop(at, cu) for at, cu in (("cu_q", np.array([0, 5, 9])), ("cu_k", np.array([0, 3, 9])))
    )
    return attention_varlen(given.pop("q"), given.pop("k"), given.pop("v"), cu_q, cu_k, **given)


SHAPES: list[tuple[dict[str, Any], str]] = [
    ({"k": zeros(2, 2, 7, 9)}, "k: expected head dim 8 to match q, got 9"),
    ({"k": zeros(3, 2, 7, 8)}, "k: expected batch 2 to match q, got 3"),
    ({"v": zeros(1, 2, 7, 6)}, "v: expected batch 2 to match q, got 1"),
    ({"v": zeros(2, 2, 6, 6)}, "v: expected length 7 to match k, got 6"),
    ({"v": zeros(2, 1, 7, 6)}, "v: expected 2 heads to match k, got 1"),
    ({"q": zeros(4, 5, 8)}, "q: expected 4 axes, got shape (4, 5, 8)"),
    ({"k": zeros(2, 3, 7, 8), "v": zeros(2, 3, 7, 6)}, "k: expected a head count that divides the 4 query heads, got 3"),
    ({"k": zeros(2, 0, 7, 8), "v": zeros(2, 0, 7, 6)}, "k: expected a head count that divides the 4 query heads, got 0"),
    ({"k": zeros(2, 8, 7, 8), "v": zeros(2, 8, 7, 6)}, "k: expected a head count that divides the 4 query heads, got 8"),
    ({"layout": "bhdm"}, "layout: expected 'bhmd' or 'bmhd', got 'bhdm'"),
    ({"align": "center"}, "align: expected 'bottom_right' or 'top_left', got 'center'"),
    ({"align": "center", "causal": True}, "align: expected 'bottom_right' or 'top_left', got 'center'"),
    ({"backend": "cuda"}, "backend: expected 'auto' or one of "),
    ({"window": (-2, 0)}, "window: expected sides of -1 (unbounded) or more, got (-2, 0)"),
    ({"window": (0, -8)}, "window: expected sides of -1 (unbounded) or more, got (0, -8)"),
    ({"window": 3}, "window: expected a pair (left, right), got 3"),
    ({"window": (1, 2, 3)}, "window: expected a pair (left, right), got (1, 2, 3)"),
    ({"softcap": 0}, "softcap: expected a finite number above 0, or None for no cap, got 0"),
    ({"softcap": -1.0}, "softcap: expected a finite number above 0, or None for no cap, got -1.0"),
    ({"softcap": np.nan}, "softcap: expected a finite number above 0, or None for no cap, got nan"),
    ({"softcap": np.inf}, "softcap: expected a finite number above 0, or None for no cap, got inf"),
    ({"scale": np.inf}, "scale: expected a finite number, got inf"),
    ({"scale": np.nan}, "scale: expected a finite number, got nan"),
    ({"dropout_p": -0.1}, "dropout_p: expected a probability in [0, 1], got -0.1"),
    ({"dropout_p": 1.5}, "dropout_p: expected a probability in [0, 1], got 1.5"),
    ({"dropout_p": np.nan}, "dropout_p: expected a probability in [0, 1], got nan"),
    ({"dropout_p": 0.5, "seed": -1}, "seed: expected an integer in [0, 2^63), got -1"),
    ({"dropout_p": 0.5, "seed": 2**63}, "seed: expected an integer in [0, 2^63), got 9223372036854775808"),
    ({"dropout_p": 0.5, "seed": (1.5, 0)}, "seed: expected two integers (seed, offset) of int64, got (1.5, 0)"),
    ({"dropout_p": 0.5, "seed": (1,)}, "seed: expected two integers (seed, offset) of int64, got (1,)"),
    ({"dropout_p": 0.5, "seed": (2**63, 0)}, "seed: expected two integers (seed, offset) of int64, got (9223372036854775808, 0)"),
    ({"dropout_p": 0.5, "seed": np.zeros(3, np.int64)}, "seed: expected an integer or int64 [2] (seed, offset), got int64 (3,)"),
    ({"dropout_p": 0.5, "seed": np.zeros(2)}, "seed: expected an integer or int64 [2] (seed, offset), got float64 (2,)"),
    ({"bias": zeros(7)}, "bias: expected 2 to 4 axes that broadcast to [B, H, M, N] = (2, 4, 5, 7), got shape (7,)"),
    ({"bias": zeros(1, 1, 1, 5, 7)}, "bias: expected 2 to 4 axes that broadcast to [B, H, M, N] = (2, 4, 5, 7), got shape (1, 1, 1, 5, 7)"),
    ({"bias": zeros(5, 8)}, "bias: expected a shape that broadcasts to (2, 4, 5, 7), got (5, 8)"),
    ({"bias": zeros(2, 5, 7)}, "bias: expected a shape that broadcasts to (2, 4, 5, 7), got (2, 5, 7)"),
    ({"mask": zeros(7, dtype=bool)}, "mask: expected 2 to 4 axes that broadcast to [B, H, M, N] = (2, 4, 5, 7), got shape (7,)"),
    ({"mask": zeros(7, 5, dtype=bool)}, "mask: expected a shape that broadcasts to (2, 4, 5, 7), got (7, 5)"),
    ({"mask": attnproof.prefix([1, 2, 3])}, "mask: expected 1 or 2 prefix lengths, got 3"),
    ({"mask": attnproof.segments(zeros(256, dtype=int))}, "mask: expected a mask made for lengths (5, 7), got one for (256, 256)"),
    ({"mask": attnproof.segments(zeros(3, 5, dtype=int), zeros(3, 7, dtype=int))}, "mask: expected intervals for 1 or 2 sequences, got 3"),
    ({"alibi_slopes": zeros(3)}, "alibi_slopes: expected shape [4] or [2, 4], got (3,)"),
    ({"alibi_slopes": zeros(1, 4)}, "alibi_slopes: expected shape [4] or [2, 4], got (1, 4)"),
    ({"sink": zeros(2)}, "sink: expected shape [4], got (2,)"),
    ({"sink": zeros(1, 4)}, "sink: expected shape [4], got (1, 4)"),
]  # fmt: skip

DTYPES: list[tuple[dict[str, Any], str]] = [
    ({"q": [[1.0]]}, "q: expected a NumPy array or torch tensor, got list"),
    ({"q": zeros(2, 4, 5, 8, dtype=int)}, "q: expected one of float16, bfloat16, float32, float64, got int64"),
    ({"q": zeros(2, 4, 5, 8, dtype=complex)}, "q: expected one of float16, bfloat16, float32, float64, got complex128"),
    ({"q": zeros(2, 4, 5, 8, dtype=">f4")}, "q: expected one of float16, bfloat16, float32, float64, got >f4"),
    ({"k": zeros(2, 2, 7, 8, dtype=float)}, "k: expected dtype float32 to match q, got float64"),
    ({"v": zeros(2, 2, 7, 6, dtype=np.float16)}, "v: expected dtype float32 to match q, got float16"),
    ({"window": (1.0, 0)}, "window: expected two integers, got (1.0, 0)"),
    ({"softcap": "30"}, "softcap: expected a number, got str"),
    ({"softcap": True}, "softcap: expected a number, got bool"),
    ({"scale": np.ones(1)}, "scale: expected a number, got ndarray"),
    ({"dropout_p": None}, "dropout_p: expected a number, got NoneType"),
    ({"dropout_p": 0.5, "seed": 1.5}, "seed: expected a NumPy array to match q, got float"),
    ({"deterministic": 1}, "deterministic: expected True or False, got int"),
    ({"causal": "no"}, "causal: expected True or False, got str"),
    ({"causal": np.zeros((5, 7))}, "causal: expected True or False, got ndarray"),
    ({"bias": 0.5}, "bias: expected a NumPy array to match q, got float"),
    ({"bias": zeros(5, 7, dtype=float)}, "bias: expected dtype float32, got float64"),
    ({"bias": zeros(5, 7, dtype=np.float16)}, "bias: expected dtype float32, got float16"),
    ({"bias": zeros(5, 7, dtype=int)}, "bias: expected dtype float32, got int64"),
    ({"bias": zeros(5, 7, dtype=np.uint8)}, "bias: expected dtype float32, got uint8"),
    ({"bias": zeros(5, 7, dtype=bool)}, "bias: expected dtype float32 (use mask= for a boolean mask), got bool"),
    ({"mask": zeros(5, 7, dtype=int)}, "mask: expected dtype bool (True = attend), got int64"),
    ({"mask": zeros(5, 7)}, "mask: expected dtype bool (True = attend), got float32"),
    ({"mask": [[True]]}, "mask: expected a Mask or a boolean tensor, got list"),
    ({"alibi_slopes": zeros(4, dtype=float)}, "alibi_slopes: expected dtype float32, got float64"),
    ({"alibi_slopes": zeros(4, dtype=int)}, "alibi_slopes: expected dtype float32, got int64"),
    ({"sink": zeros(4, dtype=int)}, "sink: expected dtype float32, got int64"),
    ({"sink": 0.0}, "sink: expected a NumPy array to match q, got float"),
]  # fmt: skip

PACKED: list[tuple[type[Exception], dict[str, Any], str]] = [
    (ShapeError, {"q": zeros(1, 9, 4, 8)}, "q: expected 3 axes, got shape (1, 9, 4, 8)"),
    (ShapeError, {"k": zeros(9, 2, 7)}, "k: expected head dim 8 to match q, got 7"),
    (ShapeError, {"v": zeros(8, 2, 6)}, "v: expected 9 tokens to match k, got 8"),
    (ShapeError, {"v": zeros(9, 1, 6)}, "v: expected 2 heads to match k, got 1"),
    (ShapeError, {"k": zeros(9, 3, 8), "v": zeros(9, 3, 6)}, "k: expected a head count that divides the 4 query heads, got 3"),
    (ShapeError, {"cu_q": np.array([1, 5, 9])}, "cu_seqlens_q: expected 0 as its first entry, got 1"),
    (ShapeError, {"cu_q": np.array([0, 5, 4])}, "cu_seqlens_q: expected entries that never decrease, got [0, 5, 4]"),
    (ShapeError, {"cu_k": np.array([0, 5, 10])}, "cu_seqlens_k: expected at most 9 tokens, got 10"),
    (ShapeError, {"cu_k": np.array([0, 3, 2**32 + 5])}, "cu_seqlens_k: expected at most 9 tokens, got 2147483647"),
    (ShapeError, {"cu_k": np.array([0, -(2**33), 9])}, "cu_seqlens_k: expected entries that never decrease, got [0, -2147483648, 9]"),
    (ShapeError, {"cu_k": np.array([0, 9])}, "cu_seqlens_k: expected 3 entries to match cu_seqlens_q, got 2"),
    (ShapeError, {"cu_k": np.zeros((2, 2), int)}, "cu_seqlens_k: expected shape [B + 1], got (2, 2)"),
    (ShapeError, {"cu_k": np.zeros(0, int)}, "cu_seqlens_k: expected shape [B + 1], got (0,)"),
    (DtypeError, {"cu_k": np.array([0.0, 3, 9])}, "cu_seqlens_k: expected int32 or int64, got float64"),
    (DtypeError, {"cu_q": np.array([0, 5, 9], np.uint8)}, "cu_seqlens_q: expected int32 or int64, got uint8"),
    (ShapeError, {"max_seqlen_q": 4}, "max_seqlen_q: expected at least the longest sequence, 5, got 4"),
    (ShapeError, {"max_seqlen_k": 5}, "max_seqlen_k: expected at least the longest sequence, 6, got 5"),
    (ShapeError, {"max_seqlen_k": -1}, "max_seqlen_k: expected 0 or more, got -1"),
    (DtypeError, {"max_seqlen_k": 6.0}, "max_seqlen_k: expected a Python int (reading a tensor would wait for the device), got float"),
    (DtypeError, {"max_seqlen_k": np.array(6)}, "max_seqlen_k: expected a Python int (reading a tensor would wait for the device), got ndarray"),
    (DtypeError, {"max_seqlen_k": "6"}, "max_seqlen_k: expected a Python int (reading a tensor would wait for the device), got str"),
    (ShapeError, {"mask": attnproof.segments(zeros(4, dtype=int), zeros(6, dtype=int))}, "mask: expected a mask made for lengths of (5, 3) or more, got one for (4, 6)"),
    (ShapeError, {"mask": attnproof.segments(zeros(5, dtype=int))}, "mask: expected a mask made for lengths of (4, 6) or more, got one for (5, 5)"),
    (ShapeError, {"bias": zeros(4, 6)}, "bias: expected a shape that broadcasts to (2, 4, 5, 6), got (4, 6)"),
]  # fmt: skip


def name(entry: Any) -> str:
    return entry if isinstance(entry, str) else ""


@pytest.mark.parametrize(("change", "message"), SHAPES, ids=name)
def test_a_size_or_range_that_does_not_fit_is_a_value_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
        dense(**change)
    assert ShapeError is type(caught.value)


@pytest.mark.parametrize(("change", "message"), DTYPES, ids=name)
def test_a_dtype_or_kind_that_does_not_fit_is_a_type_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$") as caught:
        dense(**change)
    assert DtypeError is type(caught.value)


@pytest.mark.parametrize(
    ("error", "change", "message"), PACKED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_packed_call_that_does_not_fit_is_refused(
    error: type[Exception], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        packed(**change)


def test_the_calls_that_these_tests_change_are_right() -> None:
    """Otherwise every refusal above might be for another reason."""
    assert (2, 4, 5, 6) == dense().shape
    assert (9, 4, 6) == packed().shape


def test_a_bias_in_float32_stands_beside_every_dtype() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        q, k, v = (zeros(1, 1, 2, 4, dtype=dtype) for _ in range(3))
        for bias_dtype in (dtype, np.float32):
            assert dtype == attention(q, k, v, bias=zeros(2, 2, dtype=bias_dtype)).dtype
            assert dtype == attention(q, k, v, sink=zeros(1, dtype=bias_dtype)).dtype


@pytest.mark.parametrize("bias_dtype", ["float16", "float64", "int64", "uint8"])
def test_a_bias_beside_bfloat16_is_bfloat16_or_float32(bias_dtype: str) -> None:
    """Integers 0 and 1 are a mask that somebody forgot to convert, never a bias."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q = zeros(1, 1, 2, 4, dtype=ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match=f"^bias: expected dtype bfloat16 or float32, got {bias_dtype}$"):
        attention(q, q, q, bias=zeros(2, 2, dtype=bias_dtype))


def test_slopes_in_float64_stand_beside_float64() -> None:
    q = zeros(1, 2, 3, 4, dtype=float)
    one, two = (attention(q, q, q + 1, alibi_slopes=np.ones(2, dtype)) for dtype in (np.float32, np.float64))
    assert one.tolist() == two.tolist()


def test_lengths_are_int32_or_int64_or_a_list() -> None:
    right = packed().tolist()
    for made in (np.int32, np.int64, list):
        cu = [made([0, 5, 9]) if made is list else np.array([0, 5, 9], made)] * 2
        assert right == packed(cu_q=cu[0], cu_k=np.array([0, 3, 9])).tolist()


def test_a_larger_max_seqlen_changes_nothing() -> None:
    """Not the result, and not which biases and masks fit either."""
    rng = np.random.default_rng(0)
    given = {
        "q": rng.standard_normal((9, 4, 8)),
        "k": rng.standard_normal((9, 2, 8)),
        "v": rng.standard_normal((9, 2, 6)),
    }
    for more in (
        {},
        {"bias": rng.standard_normal((5, 6))},
        {"mask": rng.random((4, 5, 6)) < 0.5},
        {"causal": True},
    ):
        right = packed(**given, **more)
        assert right.tolist() == packed(**given, **more, max_seqlen_q=5, max_seqlen_k=6).tolist()
        assert (
            right.tolist() == packed(**given, **more, max_seqlen_q=500, max_seqlen_k=np.int64(600)).tolist()
        )


def test_a_bias_made_for_longer_sequences_is_fine() -> None:
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((8, 11)).astype(F)
    q = rng.standard_normal((9, 4, 8)).astype(F)
    assert packed(q=q, bias=bias[:5, :6]).tolist() == packed(q=q, bias=bias).tolist()


def test_numbers_of_numpy_are_numbers() -> None:
    right = dense(scale=0.5, softcap=2.0, dropout_p=0.5, seed=3, window=(2, 1))
    got = dense(
        scale=F(0.5),
        softcap=np.int64(2),
        dropout_p=F(0.5),
        seed=np.int64(3),
        window=(np.int64(2), np.int32(1)),
    )
    assert right.tolist() == got.tolist()


def test_a_seed_is_a_pair_with_offset_zero() -> None:
    given = {"v": np.ones((2, 2, 7, 6), F), "dropout_p": 0.5}
    first = dense(**given, seed=7)
    for seed in ((7, 0), [7, 0], np.array([7, 0])):
        assert first.tolist() == dense(**given, seed=seed).tolist()
    assert first.tolist() != dense(**given, seed=(7, 1)).tolist()


class TestTorchArguments:
    """The same checks on tensors, and those that only tensors can fail."""

    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        pytest.importorskip("torch")

    @staticmethod
    def call(**change: Any) -> Any:
        import torch

        given = {
            "q": torch.zeros(2, 4, 5, 8),
            "k": torch.zeros(2, 2, 7, 8),
            "v": torch.zeros(2, 2, 7, 6),
            **change,
        }
        return attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)

    @staticmethod
    def tensors(change: dict[str, Any]) -> dict[str, Any]:
        import torch

        return {at: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for at, x in change.items()}

    @pytest.mark.parametrize(("change", "message"), SHAPES, ids=name)
    def test_a_size_or_range_is_checked_on_tensors_too(self, change: dict[str, Any], message: str) -> None:
        """Also after a valid call of the same shapes, whose validation is remembered."""
        self.call()
        self.call(dropout_p=0.5)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
                self.call(**self.tensors(change))

    @pytest.mark.parametrize(
        ("change", "message"), [entry for entry in DTYPES if ">f4" not in entry[1]], ids=name
    )
    def test_a_dtype_or_kind_is_checked_on_tensors_too(self, change: dict[str, Any], message: str) -> None:
        self.call()
        self.call(dropout_p=0.5)
        message = message.replace("a NumPy array to match", "a torch tensor to match").replace(
            "ndarray", "Tensor"
        )
        for _ in range(2):
            with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
                self.call(**self.tensors(change))

    def test_arrays_and_tensors_are_not_mixed(self) -> None:
        for at, x in {"k": zeros(2, 2, 7, 8), "v": zeros(2, 2, 7, 6)}.items():
            with pytest.raises(TypeError, match=f"^{at}: expected the kind of q, got ndarray$"):
                self.call(**{at: x})
        for at, x in {"bias": zeros(5, 7), "sink": zeros(4), "alibi_slopes": zeros(4)}.items():
            with pytest.raises(TypeError, match=f"^{at}: expected a torch tensor to match q, got ndarray$"):
                self.call(**{at: x})
        with pytest.raises(TypeError, match=r"^mask: expected a torch tensor to match q, got ndarray$"):
            self.call(mask=zeros(5, 7, dtype=bool))

    @pytest.mark.parametrize("dtype", ["int32", "complex64", "uint8", "bool"])
    def test_only_floats_are_attended(self, dtype: str) -> None:
        import torch

        wanted = f"^q: expected one of float16, bfloat16, float32, float64, got {dtype}$"
        with pytest.raises(TypeError, match=wanted):
            self.call(q=torch.zeros(2, 4, 5, 8, dtype=getattr(torch, dtype)))

    def test_devices_are_not_mixed(self) -> None:
        import torch

        with pytest.raises(TypeError, match=r"^k: expected device cpu to match q, got meta$"):
            self.call(k=torch.zeros(2, 2, 7, 8, device="meta"))
        with pytest.raises(TypeError, match=r"^bias: expected device cpu to match q, got meta$"):
            self.call(bias=torch.zeros(5, 7, device="meta"))
        q, k = torch.zeros(9, 4, 8), torch.zeros(9, 2, 8)
        with pytest.raises(TypeError, match=r"^cu_seqlens_q: expected device cpu to match q, got meta$"):
            attention_varlen(
                q, k, k, torch.zeros(3, dtype=torch.int32, device="meta"), torch.tensor([0, 3, 9])
            )

    def test_max_seqlen_is_no_tensor(self) -> None:
        import torch

        q, k, cu = torch.zeros(9, 4, 8), torch.zeros(9, 2, 8), torch.tensor([0, 9])
        with pytest.raises(
            TypeError, match=r"^max_seqlen_q: expected a Python int \(reading a tensor would wait"
        ):
            attention_varlen(q, k, k, cu, cu, max_seqlen_q=torch.tensor(9))

    def test_lengths_of_tensors_are_int32_or_int64(self) -> None:
        import torch

        q, k = torch.zeros(9, 4, 8), torch.zeros(9, 2, 8)
        for cu in (torch.tensor([0, 9]), torch.tensor([0, 9], dtype=torch.int32), np.array([0, 9]), [0, 9]):
            assert (9, 4, 8) == tuple(attention_varlen(q, k, k, cu, cu).shape)
        with pytest.raises(TypeError, match=r"^cu_seqlens_q: expected int32 or int64, got float32$"):
            attention_varlen(q, k, k, torch.tensor([0.0, 9]), torch.tensor([0, 9]))
        with pytest.raises(ValueError, match=r"^cu_seqlens_q: expected at most 9 tokens, got 2147483647$"):
            attention_varlen(q, k, k, torch.tensor([0, 2**32 + 9]), torch.tensor([0, 9]))

    def test_a_seed_may_be_a_tensor(self) -> None:
        import torch

        given = {"v": torch.ones(2, 2, 7, 6), "dropout_p": 0.5}
        right = self.call(**given, seed=(7, 3))
        assert right.tolist() == self.call(**given, seed=torch.tensor([7, 3])).tolist()
        with pytest.raises(TypeError, match=r"^seed: expected a torch tensor to match q, got ndarray$"):
            self.call(**given, seed=np.array([7, 3]))
