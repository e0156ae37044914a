"""Hopper's backward without a GPU: which blocks its kernels visit, and what the host gives them.

The functions that place a program are device code; here their Python bodies run on integers, see ``plain``.
"""

from __future__ import annotations

import logging
import types
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.experimental.gluon")

from attnproof.backends.hopper import backprop, backward_configs, backward_launches, backward_offline, device  # noqa: E402
from attnproof.backends.hopper.kernels import backward_keys, backward_pieces, backward_queries  # noqa: E402
from attnproof.backends.triton.backprop import Given  # noqa: E402
from attnproof.masks import BIG  # noqa: E402
from attnproof.problem import Problem, Tensors  # noqa: E402

BANDS = [
    {},
    {"right": 0},
    {"top_left": True},
    {"left": 100, "right": 0},
    {"left": 77, "right": 33},
    {"left": 0},
    {"left": 300, "top_left": True},
    {"right": -40},
]
SIZES = [(1, 1), (64, 128), (256, 256), (333, 201), (201, 333), (130, 700), (700, 130), (1, 300), (300, 1)]


class Tile(np.ndarray[Any, Any]):
    """An array with the method by which device code converts."""

    def to(self, dtype: Any) -> Tile:
        return self.astype(dtype)


INTEGERS = types.SimpleNamespace(
    minimum=min, maximum=max, where=lambda c, a, b: a if c else b, to_tensor=lambda x: x, constexpr=None
)
ARRAYS = types.SimpleNamespace(
    minimum=np.minimum,
    maximum=np.maximum,
    where=np.where,
    exp2=np.exp2,
    float32=np.float32,
    constexpr=None,
)


# pieces that are written in assembly
INSTRUCTIONS: dict[str, Any] = {
    "reciprocal": np.reciprocal,
    "keep_up_to": lambda p, columns, high: np.where(columns[None, :] <= high[:, None], p, 0.0),
    "keep_from": lambda p, columns, low: np.where(columns[None, :] >= low[:, None], p, 0.0),
}


def plain(function: Any, arithmetic: Any = INTEGERS) -> Any:
    """The Python body of a device function: what it calls likewise, ``gl`` and ``tl`` replaced."""
    body = function.fn if hasattr(function, "fn") else function
    names = dict(body.__globals__)
    for name in body.__code__.co_names:
        value = names.get(name)
        if name in ("gl", "tl"):
            names[name] = arithmetic
        elif name == "Walk":
            names[name] = walk_of_integers
        elif name in INSTRUCTIONS:
            names[name] = INSTRUCTIONS[name]
        elif hasattr(value, "fn"):
            names[name] = plain(value, arithmetic)
        elif name == "LOG2E":
            names[name] = value.value
    return types.FunctionType(body.__code__, names, body.__name__, body.__defaults__)


def walk_of_integers(*fields: Any) -> Any:
    names = ("start", "full_start", "full_stop", "n_full", "total", "edges", "last", "GROUPED")
    return types.SimpleNamespace(**dict(zip(names, fields, strict=True)))


def problem(**changes: Any) -> Problem:
    given = {
        **{"dtype": "bfloat16", "device": "cuda", "B": 1, "H": 2, "Hkv": 2, "M": 300, "N": 300},
        **{"D": 128, "Dv": 128, "scale": 0.1},
    }
    return Problem(**(given | changes))


def seen(p: Problem) -> np.ndarray[Any, Any]:
    i, j = np.arange(p.M)[:, None], np.arange(p.N)[None, :]
    distance = j - i - (p.N - p.M)
    allowed = (distance >= -p.left) & (distance <= p.right)
    return allowed & (j <= i) if p.top_left else allowed


def visits(walk: Any, edges: bool) -> list[tuple[int, int, bool]]:
    """(head of the group, tile, masked) of every step, in the order of the consumers' loops."""
    unmasked = plain(backward_pieces.Walk.plain)(walk, edges)
    at = plain(backward_pieces.Walk.at)
    return [(*at(walk, i), edges and i >= unmasked) for i in range(walk.total)]


def walk_of_keys(p: Problem, first: int, keys: int, block: int) -> Any:
    walk = plain(backward_keys.walk_queries)
    return walk(
        first,
        p.M,
        p.N,
        p.left,
        backward_launches.right_of(p),
        p.G,
        keys,
        block,
        p.G > 1,
        backward_configs.banded(p),
    )


def walk_of_queries(p: Problem, first: int, block: int) -> Any:
    walk = plain(backward_queries.walk_keys)
    return walk(first, p.M, p.N, p.left, backward_launches.right_of(p), block, backward_configs.banded(p))


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(("M", "N"), SIZES)
@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_keys_meet_every_query_that_sees_them_once_and_unmasked_blocks_are_all_visible(
    band: dict[str, Any], M: int, N: int, width: int, heads: tuple[int, int]
) -> None:
    """A block left out or visited twice is a wrong sum; an unmasked block with a hidden pair a leak of the future."""
    H, Hkv = heads
    p = problem(M=M, N=N, D=width, Dv=width, H=H, Hkv=Hkv, **band)
    config, allowed = backward_configs.keys_config(p), seen(p)
    block, keys = config.block_m, config.keys
    for first in range(0, N, keys):
        met = np.zeros((p.G, M, min(keys, N - first)), int)
        steps = visits(walk_of_keys(p, first, keys, block), backward_configs.banded(p))
        assert len(steps) > 0
        for member, tile, masked in steps:
            assert 0 <= tile * block < M
            rows = slice(tile * block, min((tile + 1) * block, M))
            visible = allowed[rows, first : first + keys]
            assert masked or visible.all()
            met[member, rows] += visible
        assert (allowed[None, :, first : first + keys] == met).all()


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(("M", "N"), SIZES)
@pytest.mark.parametrize("width", [128, 256])
def test_queries_meet_every_key_they_see_once_and_unmasked_blocks_are_all_visible(
    band: dict[str, Any], M: int, N: int, width: int
) -> None:
    """As above for dq, where a key past the end must not enter a sum unmasked either."""
    p = problem(M=M, N=N, D=width, Dv=width, **band)
    block, allowed = backward_configs.queries_config(p).block_n, seen(p)
    masks = backward_configs.banded(p) or N % block != 0
    for first in range(0, M, backward_configs.QUERIES):
        rows = slice(first, min(first + backward_configs.QUERIES, M))
        met = np.zeros((rows.stop - rows.start, N), int)
        steps = visits(walk_of_queries(p, first, block), masks)
        assert len(steps) > 0
        for _, tile, masked in steps:
            assert 0 <= tile * block < N
            keys = slice(tile * block, min((tile + 1) * block, N))
            visible = allowed[rows, keys]
            assert masked or (visible.all() and keys.stop - keys.start == block)
            met[:, keys] += visible
        assert (allowed[rows] == met).all()


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("keys_are_rows", [False, True])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_weights_are_those_of_the_definition_whichever_side_is_the_rows(
    band: dict[str, Any], keys_are_rows: bool, alibi: bool, softcap: float
) -> None:
    """P, and P times the derivative of softcap, of an edge tile that ends past the last key."""
    p = problem(M=48, N=40, scale=-0.3, softcap=softcap, has_alibi=alibi, **band)
    rng = np.random.default_rng(0)
    raw, lse, slope = rng.standard_normal((48, 64)), rng.standard_normal(48), 0.25
    i, j = np.arange(48), np.arange(64)
    factors, right = backward_launches.factors(p), backward_launches.right_of(p)
    score = types.SimpleNamespace(
        scale=factors["scale"],
        cap=factors["cap"],
        unit=factors["unit"],
        below=right if keys_are_rows else p.left,
        above=p.left if keys_are_rows else right,
        last=p.N - 1,
        HAS_SOFTCAP=softcap > 0,
        HAS_ALIBI=alibi,
        HAS_BELOW=(right if keys_are_rows else p.left) < BIG,
        HAS_ABOVE=(p.left if keys_are_rows else right) < BIG,
        HAS_LAST=not keys_are_rows,
    )
    score.hide = types.MethodType(plain(backward_pieces.Scoring.hide, ARRAYS), score)
    weigh = types.MethodType(plain(backward_pieces.Scoring.weigh, ARRAYS), score)
    shift = lse * np.log2(np.e)
    first = 4096  # positions count from the tile's first column
    if keys_are_rows:
        center = (j - (p.N - p.M) - first).view(Tile)
        got = [
            x.T[:, : p.N]
            for x in weigh(
                raw.T, shift[None, :], center, (i - first).view(Tile), first, slope, None, None, True, ""
            )
        ]
    else:
        center, keys = (i + p.N - p.M - first).view(Tile), (j - first).view(Tile)
        got = weigh(raw, shift[:, None], center, keys, first, slope, None, None, True, "")
        assert not got[0][:, p.N :].any()
        got = [x[:, : p.N] for x in got]
    s = p.scale * raw[:, : p.N]
    derivative = np.ones_like(s)
    if softcap:
        derivative = 1 - np.tanh(s / softcap) ** 2
        s = softcap * np.tanh(s / softcap)
    if alibi:
        s = s - slope * abs(i[:, None] + p.N - p.M - j[None, : p.N])
    weight = np.where(seen(p), np.exp(s - lse[:, None]), 0)
    assert np.allclose(weight, got[0], rtol=1e-6, atol=0)
    assert np.allclose(weight * derivative, got[1], rtol=1e-6, atol=1e-9)


def test_padding_covers_every_row_that_a_block_can_touch() -> None:
    """The kernels read row statistics without a test, so the last block's rows must exist."""
    for M in (1, 63, 64, 65, 128, 129, 1000):
        p = problem(M=M)
        rows = backward_launches.empty_statistics(p, "meta").shape[2]
        for block in (backward_configs.QUERIES, backward_configs.keys_config(p).block_m):
            assert -(-M // block) * block <= rows
            assert rows % block == 0
        assert rows % backward_configs.ROWS == 0


LISTED = (
    {"has_bounds": True},
    {"rows": "packed", "tokens": (700, 600), "has_bounds": True, "has_alibi": True, "H": 4, "top_left": True},
)


@pytest.mark.parametrize("width", [8, 64, 72, 128, 136, 256])
def test_every_kernel_is_given_every_argument_it_has(width: int) -> None:
    """A missing or unknown name would show only at the first launch, on a GPU."""
    for more in ({}, {"has_alibi": True, "softcap": 5.0, "right": 0, "H": 4}, *LISTED):
        for launch in backward_offline.launches(problem(D=width, Dv=width, **more)):
            assert set(launch.kernel.arg_names) == set(launch.arguments)
            assert launch.programs > 0


FAST = {"deterministic": False, "D": 64, "Dv": 64}


@pytest.mark.parametrize(
    ("changes", "needs", "jointly"),
    [
        ({}, "q k v", False),
        (FAST, "q k v", True),
        (FAST, "q v", True),
        (FAST, "q", False),
        (FAST, "k v", False),
        (FAST | {"D": 256}, "q k v", False),
        (FAST | {"D": 128, "Dv": 128, "N": 8192, "M": 8191}, "q k v", False),
        (FAST | {"D": 128, "Dv": 128, "N": 8192, "M": 8192}, "q k v", True),
        (FAST | {"has_alibi": True}, "q k v", True),
        (FAST | {"has_alibi": True}, "q k v alibi_slopes", False),
        (FAST | {"has_sink": True}, "q k v sink", True),
    ],
)
def test_sums_in_no_fixed_order_are_only_for_who_allows_them(
    changes: dict[str, Any], needs: str, jointly: bool
) -> None:
    """Equal bits are the default; and where one gradient is not asked for, the two kernels do less."""
    assert jointly == backprop.goes_jointly(problem(**changes), frozenset(needs.split()))


class TestDeclines:
    def tensors(self, p: Problem) -> tuple[Tensors, Given]:
        q, k, v, dout = (
            torch.zeros(p.B, heads, rows, width, dtype=torch.bfloat16)
            for heads, rows, width in ((2, p.M, p.D), (2, p.N, p.D), (2, p.N, p.Dv), (2, p.M, p.Dv))
        )
        return Tensors(q, k, v), Given(dout, dout[..., 0].float(), dout, None)

    def test_a_plain_call_is_not_declined(self) -> None:
        p = problem()
        assert backprop.declines(p, *self.tensors(p)) is None

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"dtype": "float32"}, "got float32"),
            ({"rows": "paged"}, "got paged"),
            ({"rows": "packed"}, "has not run with packed"),
            ({"has_bounds": True}, "has not run with bounds"),
            ({"has_keep": True}, "has no keep"),
            ({"dropout_p": 0.5}, "has no dropout"),
            ({"bias_shape": (1, 1, 1, 1)}, "has no bias"),
        ],
    )
    def test_what_these_kernels_do_not_compute_is_named(self, changes: dict[str, Any], words: str) -> None:
        p = problem(**changes)
        assert words in (backprop.declines(p, *self.tensors(problem())) or "")

    def test_a_gradient_that_came_in_by_broadcasting_is_declined(self) -> None:
        """``out.sum().backward()`` hands back one number for every element."""
        p = problem()
        tensors, given = self.tensors(p)
        broadcast = given.dout[:, :1, :1, :1].expand_as(given.dout)
        assert "dout" in (backprop.declines(p, tensors, given._replace(dout=broadcast)) or "")

    def test_an_input_whose_dense_gradient_cannot_be_described_is_declined(self) -> None:
        p = problem(D=36, Dv=64)
        tensors, given = self.tensors(problem(Dv=64))
        padded = torch.zeros(1, 2, 300, 40, dtype=torch.bfloat16)[..., :36]
        reason = backprop.declines(p, tensors._replace(q=padded, k=padded), given)
        assert "dq" in (reason or "")

    def test_it_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        device.say.cache_clear()
        with caplog.at_level(logging.WARNING):
            device.say("a sentence")
            device.say("a sentence")
        assert ["a sentence"] == [record.message for record in caplog.records]


def test_unbounded_sides_do_not_leave_32_bits() -> None:
    """The kernels add band sides to positions in int32."""
    assert BIG + 2 * 2**28 < 2**31


@pytest.mark.parametrize("more", [{}, {"has_alibi": True, "right": 0, "H": 4}, *LISTED], ids=str)
def test_parameters_come_in_the_order_that_the_launcher_passes_them(more: dict[str, Any]) -> None:
    """Descriptors, then addresses, then numbers: another order would be read as garbage on the GPU."""
    for width in (64, 256):
        for launch in backward_offline.launches(problem(D=width, Dv=width, **more)):
            passed = [launch.arguments[at.name] for at in launch.kernel.params if not launch.compiled_in(at)]
            kinds = [2 if isinstance(x, (int, float)) else int(isinstance(x, torch.Tensor)) for x in passed]
            assert sorted(kinds) == kinds


def test_a_second_call_of_a_structure_launches_with_the_new_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kept launch with old addresses would write into memory that belongs to somebody else by now."""
    p = problem(H=4, has_alibi=True)
    sent: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(backward_launches.Launch, "run", lambda self: "compiled")
    monkeypatch.setattr(
        backward_launches.Launch,
        "adopt",
        lambda self, compiled: lambda stream, *at: sent.append((stream, *at)),
    )
    q, k, v, out, dout = (torch.zeros(1, heads, 300, 128, dtype=torch.bfloat16) for heads in (4, 2, 2, 4, 4))
    lse = torch.zeros(1, 4, 300)
    tensors = Tensors(q, k, v, alibi_slopes=torch.zeros(1, 4))
    backprop._routes.clear()
    for _ in range(2):
        got = backprop.backward(p, tensors, out, lse, dout, None, frozenset("qkv"))
    assert 2 == len(sent)
    queries, keys = sent
    shift, delta = queries[6:8]
    assert delta - shift == 4 * 384 * 4
    slopes = tensors.alibi_slopes.data_ptr()
    inputs = (7, q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr())
    assert (*inputs, got.dq.data_ptr(), shift, delta, slopes, out.data_ptr(), lse.data_ptr()) == queries
    assert (*inputs, got.dk.data_ptr(), got.dv.data_ptr(), shift, delta, slopes) == keys
    backprop._routes.clear()
