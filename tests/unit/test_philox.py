from __future__ import annotations

import numpy as np
import pytest

from attnproof import attention, attention_backward, attention_varlen
from attnproof.backends import streaming
from attnproof.philox import keep, philox4x32, threshold
from attnproof.problem import Options, bind

# published with Random123 for philox4x32-10: counter, key, output; zeros, ones, and the digits of pi
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_the_generator_gives_the_published_answers(counter: str, key: str, answer: str) -> None:
    given = tuple(np.array([word], np.uint64) for word in words(counter))
    assert words(answer) == [int(word[0]) for word in philox4x32(given, tuple(words(key)))]


def test_the_generator_works_on_arrays_of_counters() -> None:
    """One call on a grid is many calls on points."""
    grid = (np.arange(3)[:, None], np.arange(4)[None, :], np.array(7), np.array(9))
    whole = philox4x32(tuple(x.astype(np.uint64) for x in grid), (1, 2))
    point = philox4x32(tuple(np.array(x, np.uint64) for x in (2, 3, 7, 9)), (1, 2))
    assert [int(word[2, 3]) for word in whole] == [int(word) for word in point]


def test_the_known_answer_decides_which_keys_stay() -> None:
    """Key j of query i goes by word j mod 4 of the counter (j // 4, i, b H + h, offset)."""
    counter, key, answer = (words(text) for text in KNOWN[2])
    quad, i, plane, offset = counter
    seed = key[0] | key[1] << 32
    for j, word in enumerate(answer):
        for p, kept in [((word + 1) / 2**32, False), (word / 2**32, True)]:
            found = keep(
                p,
                seed=seed,
                offset=offset,
                plane=plane,
                i=np.array([i]),
                start=4 * quad + j,
                stop=4 * quad + j + 1,
            )
            assert [[kept]] == found.tolist()


@pytest.mark.parametrize(("start", "stop"), [(0, 40), (1, 40), (3, 5), (5, 5), (7, 8), (16, 33)])
def test_any_cut_of_the_keys_gives_the_same_decisions(start: int, stop: int) -> None:
    """Forward, backward and every tile size must drop the same pairs."""
    given = {"seed": 5, "offset": 6, "plane": 7, "i": np.arange(9)}
    whole = keep(0.4, **given, start=0, stop=40)
    assert whole[:, start:stop].tolist() == keep(0.4, **given, start=start, stop=stop).tolist()


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_the_share_of_dropped_pairs_is_p(p: float) -> None:
    """Within five standard deviations of a binomial, over a million pairs."""
    kept = keep(p, seed=1, offset=2, plane=3, i=np.arange(1000), start=0, stop=1000)
    assert abs(kept.mean() - (1 - p)) < 5 * np.sqrt(p * (1 - p) / kept.size)


def test_neighbours_are_independent() -> None:
    """Four keys share one call of the generator; a lane used twice would show here."""
    kept = keep(0.5, seed=1, offset=2, plane=3, i=np.arange(1000), start=0, stop=1000) - 0.5
    bound = 5 / np.sqrt(kept.size)
    for shift in range(1, 9):
        assert abs((kept[:, shift:] * kept[:, :-shift]).mean() * 4) < bound
        assert abs((kept[shift:] * kept[:-shift]).mean() * 4) < bound


@pytest.mark.parametrize("other", [{"seed": 2}, {"seed": 1 + 2**32}, {"offset": 3}, {"plane": 4}])
def test_every_part_of_the_key_matters(other: dict[str, int]) -> None:
    given = {"seed": 1, "offset": 2, "plane": 3}
    a, b = (keep(0.5, **{**given, **more}, i=np.arange(100), start=0, stop=100) - 0.5 for more in ({}, other))
    assert abs((a * b).mean() * 4) < 5 / np.sqrt(a.size)


def test_the_offset_counts_modulo_2_to_the_32() -> None:
    a, b = (
        keep(0.5, seed=1, offset=offset, plane=3, i=np.arange(9), start=0, stop=9)
        for offset in (5, 5 + 2**32)
    )
    assert a.tolist() == b.tolist()


def test_thresholds() -> None:
    assert [0, 2**31, 2**32 - 1, 2**32 - 1] == [threshold(p) for p in (0.0, 0.5, 1 - 1e-15, 1.0)]


def test_probability_one_drops_even_the_largest_word() -> None:
    assert not keep(1.0, seed=0, offset=0, plane=0, i=np.arange(50), start=0, stop=50).any()


def drawn(m: int, n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, 3, length, 8)) for length in (m, n, n)]


@pytest.mark.parametrize("order", ["queries", "keys"])
@pytest.mark.parametrize("blocks", [(1, 1), (3, 5), (16, 4), (128, 128)])
def test_tile_sizes_do_not_move_the_dropped_pairs(order: str, blocks: tuple[int, int]) -> None:
    q, k, v = drawn(20, 30)
    bound = bind(q, k, v, Options(dropout_p=0.5, seed=3))
    given = {"block_m": blocks[0], "block_n": blocks[1]}
    out, lse = streaming.forward(*bound, order=order, **given)
    whole, _ = streaming.forward(*bound)
    assert np.allclose(whole, out, rtol=0, atol=1e-14)
    grads = streaming.backward(*bound, out, lse, q, None, frozenset("qkv"), **given)
    for a, b in zip(
        grads[:3], streaming.backward(*bound, out, lse, q, None, frozenset("qkv"))[:3], strict=True
    ):
        assert np.allclose(a, b, rtol=0, atol=1e-13)


def test_forward_and_backward_drop_the_same_pairs() -> None:
    """With v the identity, out is the dropped P; dv of dout = identity is its transpose."""
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 2, 12, 8))
    v = np.broadcast_to(np.eye(12), (1, 2, 12, 12))
    out = attention(q[None, 0], k[None, 0], v, dropout_p=0.5, seed=9)
    lse = streaming.forward(*bind(q[None, 0], k[None, 0], v, Options()))[1]
    dv = attention_backward(q[None, 0], k[None, 0], v, out, lse, v, dropout_p=0.5, seed=9).dv
    assert 0.3 < (out == 0).mean() < 0.7
    assert (out == 0).tolist() == (dv.swapaxes(2, 3) == 0).tolist()


def test_a_packed_sequence_drops_what_its_dense_twin_drops() -> None:
    """Positions are counted inside the sequence, whatever stands before it in the buffer."""
    q, k, v = drawn(7, 7)
    dense = attention(q, k, v, dropout_p=0.5, seed=4)
    flat = [x.swapaxes(1, 2).reshape(14, 3, 8) for x in (q, k, v)]
    packed = attention_varlen(*flat, np.array([0, 7, 14]), np.array([0, 7, 14]), dropout_p=0.5, seed=4)
    assert dense.swapaxes(1, 2).reshape(14, 3, 8).tolist() == packed.tolist()


def test_calls_differ_and_are_equal_after_reseeding() -> None:
    q, k, v = drawn(9, 9)
    np.random.seed(0)
    first, second = (attention(q, k, v, dropout_p=0.5) for _ in range(2))
    np.random.seed(0)
    again = attention(q, k, v, dropout_p=0.5)
    assert first.tolist() == again.tolist()
    assert first.tolist() != second.tolist()


def test_no_dropout_leaves_the_generator_alone() -> None:
    q, k, v = drawn(9, 9)
    before = np.random.get_state()[1].tolist()
    attention(q, k, v, dropout_p=0.0)
    assert before == np.random.get_state()[1].tolist()


def test_the_torch_generator_decides_for_tensors() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in drawn(9, 9))
    torch.manual_seed(0)
    first, second = (attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(0)
    state = torch.get_rng_state().tolist()
    assert first.tolist() == attention(q, k, v, dropout_p=0.5).tolist()
    assert first.tolist() != second.tolist()
    assert state != torch.get_rng_state().tolist()
    state = torch.get_rng_state().tolist()
    attention(q, k, v)
    assert state == torch.get_rng_state().tolist()
