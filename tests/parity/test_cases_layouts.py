"""Strides, offsets, alignment and tile edges: what has gone wrong elsewhere, and the right value here."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .checking import case_of, check
from .direct import Attend, drawn, sparse
from .problems import Array
from .targets import Target, every_host_target, every_numpy_target, every_target, values
from .tolerance import Allowed, assert_close, judge


def arrays(m: int, n: int, **more: int) -> dict[str, Array]:
    return dict(zip("qkv", drawn(m, n, **more), strict=True))


def empty_like(x: Any, shape: tuple[int, ...]) -> Any:
    """Memory of x's kind, dtype and device, full of NaN."""
    if isinstance(x, np.ndarray):
        return np.full(shape, np.nan, x.dtype)
    return x.new_full(shape, float("nan"))


def placed(x: Any, view: Any) -> Any:
    """x's values in somebody else's memory."""
    view[...] = x
    return view


def transposed(x: Any, a: int, b: int) -> Any:
    """x stored with two axes swapped."""
    y = x.swapaxes(a, b)
    return (y.copy() if isinstance(y, np.ndarray) else y.contiguous()).swapaxes(a, b)


# the same values in other places; a trailing NaN shows a read that goes too far
DRESSES: dict[str, Callable[[Any], Any]] = {
    "heads inside": lambda x: transposed(x, 1, 2),
    "head dim outside of length": lambda x: transposed(x, 2, 3),
    "batch last": lambda x: transposed(x, 0, 3),
    "every second column": lambda x: placed(x, empty_like(x, (*x.shape[:3], 2 * x.shape[3]))[..., ::2]),
    "every third row": lambda x: placed(
        x, empty_like(x, (*x.shape[:2], 3 * x.shape[2], x.shape[3]))[:, :, 1::3]
    ),
    "inside a wider row": lambda x: placed(x, empty_like(x, (*x.shape[:3], x.shape[3] + 5))[..., 3:-2]),
    "one element off": lambda x: placed(x, empty_like(x, (count(x) + 1,))[1:].reshape(x.shape)),
    "between other heads": lambda x: placed(
        x, empty_like(x, (x.shape[0], 3 * x.shape[1], *x.shape[2:]))[:, 1::3]
    ),
}
NUMPY_ONLY: dict[str, Callable[[Any], Any]] = {
    "backwards along the length": lambda x: x[:, :, ::-1].copy()[:, :, ::-1],
    "backwards along everything": lambda x: x[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1],
    "one byte off": lambda x: placed(x, np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)),
    "a field of a record": lambda x: placed(x, np.zeros(x.shape, [("a", np.int8), ("x", x.dtype)])["x"]),
    "read only": lambda x: read_only(x),
    "in Fortran order": lambda x: np.asfortranarray(x),
}


def count(x: Any) -> int:
    return int(np.prod(x.shape))


def read_only(x: Array) -> Array:
    x = x.copy()
    x.flags.writeable = False
    return x


@every_target
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dress", DRESSES)
def test_it_does_not_matter_where_the_numbers_lie(target: Target, dtype: str, dress: str) -> None:
    """A view read as if it were contiguous, a base off its 16-byte boundary, a backward that forgets a stride."""
    check_dressed(Attend(target, dtype), DRESSES[dress])


@every_numpy_target
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dress", NUMPY_ONLY)
def test_arrays_that_tensors_cannot_be_are_read_right(target: Target, dtype: str, dress: str) -> None:
    """Negative strides, odd bytes and read-only memory, which a NumPy caller may well have."""
    check_dressed(Attend(target, dtype), NUMPY_ONLY[dress])


def dressed() -> dict[str, Array]:
    """What is put elsewhere."""
    x = arrays(33, 62, B=2, H=4, Hkv=2, D=24)
    x["bias"] = np.random.default_rng(0).standard_normal((2, 4, 33, 62))
    x["dout"] = np.random.default_rng(1).standard_normal((2, 4, 33, 24))
    return x


@functools.cache
def right_of_dressed(dtype: str, half_operands: bool) -> dict[str, Allowed]:
    x = dressed() | {"dlse": np.zeros((2, 4, 33))}
    return judge(case_of("dressed", x, dtype, causal=True), x, half_operands)


def check_dressed(attend: Attend, put: Callable[[Any], Any]) -> None:
    """Forward and backward with every input put elsewhere."""
    right = right_of_dressed(attend.dtype, attend.target.half_operands)
    x = {at: put(attend.native(part)) for at, part in dressed().items()}
    dout = x.pop("dout")
    for at, got in zip(("out", "lse"), attend.raw(**x, causal=True), strict=True):
        assert_close(values(got), right[at], at)
    for at, grad in attend.raw_gradients(x | {"causal": True}, dout, None, ("q", "k", "v", "bias")).items():
        assert_close(values(grad), right[at], f"d{at}")


@every_target
@pytest.mark.parametrize(
    "views", [views for size in range(1, 4) for views in itertools.combinations("qkv", size)]
)
def test_any_subset_of_transposed_inputs_gives_the_same_bits(target: Target, views: tuple[str, ...]) -> None:
    """v alone as a view was read as contiguous; padding it hid the fault: FlagGems#5896, pytorch#181133."""
    attend = Attend(target)
    x = {at: attend.native(part) for at, part in arrays(62, 62, H=4, D=128 if target.fast else 32).items()}
    right = attend.raw(**x)
    got = attend.raw(**{at: transposed(part, 1, 2) if at in views else part for at, part in x.items()})
    assert values(right[0]).tolist() == values(got[0]).tolist()


@every_target
def test_axes_of_length_one_may_have_any_stride(target: Target) -> None:
    """They count as not contiguous in some checks and must not be multiplied by in others: pytorch#116333."""
    attend = Attend(target)
    for m, n, d in [(1, 1, 8), (1, 9, 8), (9, 1, 8), (5, 9, 1), (1, 1, 1)]:
        x = {at: attend.native(part) for at, part in arrays(m, n, H=1, D=d).items()}
        right = attend.raw(**x)
        got = attend.raw(**{at: odd_strides(part) for at, part in x.items()})
        assert values(right[0]).tolist() == values(got[0]).tolist()


def odd_strides(x: Any) -> Any:
    """Strides of 17 and more along axes of length one."""
    if isinstance(x, np.ndarray):
        steps = [
            17 * x.itemsize * (at + 1) if size == 1 else s
            for at, (size, s) in enumerate(zip(x.shape, x.strides, strict=True))
        ]
        return np.lib.stride_tricks.as_strided(x, x.shape, steps)
    steps = [
        17 * (at + 1) if size == 1 else s
        for at, (size, s) in enumerate(zip(x.shape, x.stride(), strict=True))
    ]
    return x.as_strided(x.shape, steps)


@every_target
def test_inputs_may_be_one_number_expanded(target: Target) -> None:
    """Stride 0 on any axis: one head for all, one key for all, one number for everything."""
    attend = Attend(target)
    x = arrays(7, 9, B=2, H=2, D=4)
    dout = np.random.default_rng(0).standard_normal(x["q"].shape)
    for axes in [(0,), (1,), (2,), (3,), (0, 1, 2, 3)]:
        cut = {
            at: part[tuple(slice(0, 1) if a in axes else slice(None) for a in range(4))]
            for at, part in x.items()
        }
        wide = {at: np.broadcast_to(part, x[at].shape) for at, part in cut.items()} | {"dout": dout}
        wide["dlse"] = np.zeros(dout.shape[:3])
        if len(axes) == 4:
            wide["dout"] = np.broadcast_to(dout[:1, :1, :1, :1], dout.shape)
        right = judge(case_of(f"expanded along {axes}", wide), wide, target.half_operands)
        native = {at: expanded(attend.native(part), x[at].shape) for at, part in cut.items()}
        for at, got in zip(("out", "lse"), attend.raw(**native), strict=True):
            assert_close(values(got), right[at], at)
        sent = attend.native(dout)
        sent = expanded(sent[:1, :1, :1, :1], dout.shape) if len(axes) == 4 else sent
        for at, grad in attend.raw_gradients(native, sent, None, ("q", "k", "v")).items():
            assert_close(values(grad), right[at], f"d{at}")


def expanded(x: Any, shape: Any) -> Any:
    return np.broadcast_to(x, shape) if isinstance(x, np.ndarray) else x.expand(shape)


BIASES: dict[str, Callable[[Array], Any]] = {
    "expanded over the keys": lambda x: (x[:1, :1, :, :1], (1, 1, 40, 40)),
    "transposed": lambda x: (x[0, 0].T, None),
    "of each batch's keys": lambda x: (x[:, :1, :1], None),
    "every second of more columns": lambda x: (np.repeat(x, 2, axis=3)[..., ::2], None),
}


@every_target
@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("kind", ["bias", "mask"])
def test_a_mask_or_bias_may_be_any_view(target: Target, name: str, kind: str) -> None:
    """Stride 0 or a last stride other than 1 was refused in some shapes only: pytorch#139424, #109607."""
    x = arrays(40, 40, B=2, H=2, D=8)
    full = np.round(np.random.default_rng(0).standard_normal((2, 2, 40, 40)) * 32) / 32
    given, wide = BIASES[name](full if kind == "bias" else full > 0)
    attend = Attend(target)
    native = attend.native(np.ascontiguousarray(given))
    if name == "transposed":
        native = attend.native(np.ascontiguousarray(given.T)).swapaxes(0, 1)
    if wide is not None:
        native = expanded(native, wide)
    qkv = {at: attend.native(part) for at, part in x.items()}
    plain = np.broadcast_to(given if wide is None else np.broadcast_to(given, wide), full.shape)
    x["keep" if kind == "mask" else "bias"] = plain
    right = judge(case_of(f"{kind} {name}", x), x, target.half_operands)
    for at, got in zip(("out", "lse"), attend.raw(**qkv, **{kind: native}), strict=True):
        assert_close(values(got), right[at], at)


@every_target
@pytest.mark.parametrize("keys", [43, 77])
def test_a_bias_row_may_have_any_length(target: Target, keys: int) -> None:
    """Rows that are no multiple of 8 were refused or crashed, and the padding leaked into gradients: xformers#813."""
    x = arrays(16, keys, H=2)
    x["bias"] = np.random.default_rng(0).standard_normal((1, 1, 16, keys))
    check(target, case_of(f"{keys} keys", x, "float16"), x)


EDGES = (1, 15, 16, 17, 63, 65, 127, 129, 192, 193)


@every_target
@pytest.mark.parametrize("m", EDGES)
def test_lengths_that_are_no_multiple_of_a_tile_are_right(target: Target, m: int) -> None:
    """Wrong output without a warning: jax#27224, tiny-flash-attention#12."""
    for n in EDGES if target.fast else EDGES[::3]:
        for causal in (False, True):
            x = arrays(m, n, H=1, D=8)
            check(target, case_of(f"{m} on {n}", x, causal=causal), x, gradients=n in (17, 129))


@every_target
def test_a_head_is_the_same_alone_and_among_others(target: Target) -> None:
    """The tail tile of one head overwrote the first rows of the next: FlagGems#898."""
    x = arrays(65, 65, H=3, D=64)
    dout = drawn(65, 65, H=3, D=64, seed=1)[0]
    attend = Attend(target)
    out, grads = attend(**x, causal=True).out, attend.gradients(**x, dout=dout, causal=True)
    for h in range(3):
        alone = {at: part[:, h : h + 1] for at, part in x.items()}
        assert out[:, h].tolist() == attend(**alone, causal=True).out[:, 0].tolist()
        for at, grad in attend.gradients(**alone, dout=dout[:, h : h + 1], causal=True).items():
            assert grads[at][:, h].tolist() == grad[:, 0].tolist()


@every_target
@pytest.mark.parametrize("d", [8, 16, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256])
def test_every_channel_counts(target: Target, d: int) -> None:
    """A head dim fixed at 64 used half of 128: triton#621. Data is in the last eight channels only."""
    x = arrays(20, 30, H=1, D=d)
    for part in x.values():
        part[..., : d - 8] = 0
    check(target, case_of(f"last channels of {d}", x), x)


@every_target
@pytest.mark.parametrize("d", [5, 59])
def test_the_default_scale_is_that_of_the_head_dim_before_any_padding(target: Target, d: int) -> None:
    """Padded to 8 it is off by a tenth, and gradients came back padded: flash-attention#1347, llama.cpp#20031."""
    x = arrays(20, 30, H=2, D=d)
    check(target, case_of(f"D {d}", x), x)
    attend = Attend(target)
    assert attend(**x).out.tolist() == attend(**x, scale=1 / np.sqrt(d)).out.tolist()


@every_host_target
@pytest.mark.parametrize("name", ["mask", "bias", "kv"])
def test_offsets_past_two_to_the_31_are_right(target: Target, name: str, tmp_path: Path) -> None:
    """row * stride in 32 bits: pytorch#147585, #145040, #162588, #190857. The memory is a file full of holes."""
    rows, step = 5, 2**29 + 3
    x = arrays(rows if name != "kv" else 3, 9 if name != "kv" else rows, H=1, D=8)
    dtype = np.dtype(bool) if name == "mask" else np.dtype(np.float16)
    width = {"mask": 9, "bias": 9, "kv": 8}[name]
    attend = Attend(target, "float16")
    given = {at: attend.native(part) for at, part in x.items()}
    content = np.random.default_rng(0).standard_normal((rows, width))
    content = content > 0 if name == "mask" else content.astype(np.float16)
    memory = sparse(tmp_path / "holes", (rows - 1) * step + width, dtype)
    view = np.lib.stride_tricks.as_strided(memory, (rows, width), (step * dtype.itemsize, dtype.itemsize))
    view[...] = content
    if target.kind == "torch":
        import torch

        view = torch.from_numpy(view)
    if name == "kv":
        far, near = (dict.fromkeys("kv", y[None, None]) for y in (view, attend.native(content)))
    else:
        far, near = {name: view}, {name: attend.native(content)}
    right, got = attend.raw(**(given | near)), attend.raw(**(given | far))
    for a, b in zip(right, got, strict=True):
        assert values(a).tolist() == values(b).tolist()
