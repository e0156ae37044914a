from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from attnproof import DtypeError, Mask, ShapeError, attention, causal, prefix, segments, window
from attnproof.masks import EDGE, FULL, SKIP, Explicit, as_mask, without_keep

IDS = np.array([0, 0, 1, 1, 1, 4])
MASKS: dict[str, Callable[[], Mask]] = {
    "nothing": Mask,
    "causal": causal,
    "top left": lambda: causal(align="top_left"),
    "window": lambda: window(2, 1),
    "left only": lambda: window(1, -1),
    "prefix": lambda: prefix(3),
    "segments": lambda: segments(IDS),
    "segments and causal": lambda: segments(IDS) & causal(),
    "all of them": lambda: segments(IDS) & causal() & window(3, 3) & prefix(2),
}


def picture(mask: Mask, m: int, n: int, b: int = 0) -> list[str]:
    """Rows of `x` (may be seen) and `.`, from the intervals."""
    lo, hi = mask.bounds(m, n, b)
    return [
        "".join("x" if low <= j < high else "." for j in range(n)) for low, high in zip(lo, hi, strict=True)
    ]


def test_causal_is_bottom_right() -> None:
    assert ["xxxx.", "xxxxx"] == picture(causal(), 2, 5)
    assert ["..", "..", "..", "x.", "xx"] == picture(causal(), 5, 2)


def test_top_left_is_asked_for_by_name() -> None:
    assert ["x....", "xx..."] == picture(causal(align="top_left"), 2, 5)


def test_a_window_is_inclusive_on_both_sides() -> None:
    keys = [row.count("x") for row in picture(causal() & window(3, 0), 6, 6)]
    assert [1, 2, 3, 4, 4, 4] == keys
    assert [".xx...", "..xx..", "...xx.", "....xx"] == picture(window(1, 0), 4, 6)


def test_minus_one_is_unbounded() -> None:
    assert ["xxxx", "xxxx"] == picture(window(-1, -1), 2, 4)
    assert picture(causal(), 4, 9) == picture(window(-1, 0), 4, 9)


def test_a_window_wider_than_the_keys_changes_nothing_and_keeps_causal() -> None:
    assert picture(causal(), 4, 6) == picture(causal() & window(6, 6), 4, 6)
    assert picture(causal(), 4, 6) == picture(causal() & window(2**40, 2**40), 4, 6)


def test_a_prefix_is_seen_by_everyone_and_the_rest_is_causal() -> None:
    assert ["xxxx..", "xxxx..", "xxxxx.", "xxxxxx"] == picture(prefix(4), 4, 6)


def test_prefixes_may_differ_by_sequence() -> None:
    mask = prefix([0, 3])
    assert ["x...", "xx..", "xxx.", "xxxx"] == picture(mask, 4, 4, b=0)
    assert ["xxx.", "xxx.", "xxx.", "xxxx"] == picture(mask, 4, 4, b=1)


def test_segments_see_themselves_only() -> None:
    assert ["xx....", "xx....", "..xxx.", "..xxx.", "..xxx.", ".....x"] == picture(segments(IDS), 6, 6)
    assert ["xx.", "xx.", "...", "...", "...", "..x"] == picture(segments(IDS, np.array([0, 0, 4])), 6, 3)


def test_segments_may_differ_by_sequence() -> None:
    mask = segments(np.array([[0, 0, 1], [0, 1, 1]]))
    assert ["xx.", "xx.", "..x"] == picture(mask, 3, 3, b=0)
    assert ["x..", ".xx", ".xx"] == picture(mask, 3, 3, b=1)


@pytest.mark.parametrize("name", MASKS)
def test_intervals_are_clipped_to_the_keys(name: str) -> None:
    """Kernels use them as loop bounds and addresses."""
    for m, n in [(6, 6), (6, 2), (2, 6), (6, 0), (0, 6)]:
        mask = MASKS[name]()
        lo, hi = mask.bounds(m, n)
        assert ((0 <= lo) & (lo <= hi) & (hi <= n)).all(), (m, n)


def test_an_interval_made_for_more_keys_is_clipped_too() -> None:
    """lo past the last key would be an address out of bounds."""
    lo, hi = segments(np.array([0, 0, 7, 7]), np.array([0, 0, 0, 0, 7])).bounds(4, 3)
    assert ([0, 0, 3, 3], [3, 3, 3, 3]) == (lo.tolist(), hi.tolist())


@pytest.mark.parametrize("left", MASKS)
@pytest.mark.parametrize("right", MASKS)
def test_and_is_the_intersection_in_either_order(left: str, right: str) -> None:
    a, b = (np.array([list(row) for row in picture(MASKS[name](), 6, 6)]) == "x" for name in (left, right))
    for joined in (MASKS[left]() & MASKS[right](), MASKS[right]() & MASKS[left]()):
        assert (a & b).tolist() == (np.array([list(row) for row in picture(joined, 6, 6)]) == "x").tolist()


def test_a_boolean_array_may_stand_on_either_side_of_and() -> None:
    """NumPy would otherwise apply & to the mask once per element and hand back an array of masks."""
    keep = np.eye(4, dtype=bool)
    for joined in (keep & causal(), causal() & keep):
        assert isinstance(joined, Mask)
        assert (0, 1) == (joined.right, len(joined.keep))


def test_a_boolean_tensor_may_stand_on_either_side_of_and() -> None:
    torch = pytest.importorskip("torch")
    keep = torch.ones(4, 4, dtype=torch.bool)
    for joined in (keep & causal(), causal() & keep):
        assert isinstance(joined, Mask)
        assert (0, 1) == (joined.right, len(joined.keep))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_allows_the_same_pairs(name: str, copied: Callable[[Mask], Mask]) -> None:
    mask = MASKS[name]() & np.eye(6, dtype=bool)
    other = copied(mask)
    assert picture(mask, 6, 6) == picture(other, 6, 6)
    assert mask.keep[0].tolist() == other.keep[0].tolist()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("start", "stop"), [(0, 6), (0, 1), (2, 5), (3, 3), (5, 6)])
def test_rows_of_a_mask_are_the_mask_of_those_rows(name: str, start: int, stop: int) -> None:
    """A call that is split along queries must not move the diagonal."""
    mask = MASKS[name]() & np.tri(6, dtype=bool)
    part = mask.rows(start, stop, 6, 6)
    assert picture(mask, 6, 6)[start:stop] == picture(part, stop - start, 6)
    assert mask.keep[0][start:stop].tolist() == part.keep[0].tolist()


def test_rows_keep_what_differs_by_sequence() -> None:
    mask = segments(np.array([[0, 0, 1], [0, 1, 1]])) & prefix([1, 2])
    part = mask.rows(1, 3, 3, 3)
    for b in range(2):
        assert picture(mask, 3, 3, b)[1:] == picture(part, 2, 3, b)


def test_rows_keep_a_predicate_that_is_shared_by_all_rows() -> None:
    keys = np.array([[True, False, True]])
    assert keys.tolist() == as_mask(keys).rows(1, 2, 3, 3).keep[0].tolist()


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 4)])
def test_rows_outside_the_queries_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ShapeError, match=r"^rows: expected a range within the 3 queries, got -?\d:\d$"):
        causal().rows(start, stop, 3, 3)


def test_a_split_along_queries_gives_the_same_output() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, 9, 4)) for _ in range(3))
    mask = causal() & window(4, 0) & prefix([2, 3]) & (rng.random((9, 9)) < 0.7)
    whole = attention(q, k, v, mask=mask)
    parts = [attention(q[:, :, a:b], k, v, mask=mask.rows(a, b, 9, 9)) for a, b in ((0, 4), (4, 9))]
    assert whole.tolist() == np.concatenate(parts, axis=2).tolist()


def kinds_by_hand(mask: Mask, m: int, n: int, block_m: int, block_n: int) -> list[list[int]]:
    seen = np.array([[at == "x" for at in row] for row in picture(mask, m, n)]).reshape(m, n)
    found = []
    for i in range(0, m, block_m):
        row = []
        for j in range(0, n, block_n):
            tile = seen[i : i + block_m, j : j + block_n]
            row.append(FULL if tile.all() else EDGE if tile.any() else SKIP)
        found.append(row)
    return found


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("block_m", "block_n"), [(1, 1), (2, 3), (3, 2), (4, 4), (8, 8)])
def test_tiles_are_classified_as_by_hand(name: str, block_m: int, block_n: int) -> None:
    mask = MASKS[name]()
    tiles = mask.tiles(6, 6, block_m, block_n)
    by_hand = kinds_by_hand(mask, 6, 6, block_m, block_n)
    assert by_hand == tiles.kinds.tolist()
    assert sum(row.count(SKIP) for row in by_hand) == tiles.count(SKIP) == tiles.kinds.size - tiles.kept


def test_a_predicate_leaves_no_tile_full() -> None:
    tiles = (causal() & np.ones((6, 6), bool)).tiles(6, 6, 2, 2)
    assert (0, 6, 3) == tuple(tiles.count(kind) for kind in (FULL, EDGE, SKIP))


def test_causal_skips_almost_half_of_the_tiles() -> None:
    """4096 queries in blocks of 64: 2080 of 4096 tiles are kept, (T + 1) / 2T."""
    tiles = causal().tiles(4096, 4096, 64, 64)
    assert (4096, 2080) == (tiles.kinds.size, tiles.kept)
    assert 0.4921875 == tiles.skipped_share


def test_no_tiles_no_share() -> None:
    assert 0 == causal().tiles(0, 5, 64, 64).skipped_share


def test_pairs_counts_what_may_be_seen() -> None:
    assert 6 * 7 // 2 == causal().pairs(6, 6)
    assert sum(row.count("x") for row in picture(segments(IDS), 6, 6)) == segments(IDS).pairs(6, 6)


def test_the_interval_part_can_be_had_alone() -> None:
    assert () == without_keep(causal() & np.ones((2, 2), bool)).keep


BAD = {
    "a window below -1": (
        lambda: window(-8, 0),
        ShapeError,
        r"window: expected sides of -1 \(unbounded\) or more, got \(-8, 0\)",
    ),
    "a window of floats": (
        lambda: window(2.0, 0),
        DtypeError,
        r"window: expected two integers, got \(2\.0, 0\)",
    ),
    "a window of bools": (
        lambda: window(True, 0),
        DtypeError,
        r"window: expected two integers, got \(True, 0\)",
    ),
    "an unknown corner": (
        lambda: causal(align="center"),
        ShapeError,
        "align: expected 'bottom_right' or 'top_left', got 'center'",
    ),
    "a negative prefix": (
        lambda: prefix(-1),
        ShapeError,
        r"prefix: expected lengths of 0 or more, got \(-1,\)",
    ),
    "no prefix": (lambda: prefix([]), ShapeError, r"prefix: expected lengths of 0 or more, got \(\)"),
    "a prefix of floats": (
        lambda: prefix([2.5]),
        DtypeError,
        r"prefix: expected an integer, or one per sequence, got \[2\.5\]",
    ),
    "a prefix of nothing": (lambda: prefix(None), DtypeError, "prefix: expected an integer, or one per"),
    "ids that decrease": (
        lambda: segments(np.array([1, 0])),
        ShapeError,
        "segments: expected ids that never decrease, got a decreasing row",
    ),
    "ids of floats": (
        lambda: segments(np.array([1.0])),
        ShapeError,
        r"segments: expected integer ids \[L\] or \[B, L\], got float64 \(1, 1\)",
    ),
    "ids for other batches": (
        lambda: segments(np.zeros((2, 3), int), np.zeros((3, 3), int)),
        ShapeError,
        "key_ids: expected 2 rows to match query_ids, got 3",
    ),
    "a mask of numbers": (
        lambda: causal() & np.ones((2, 2)),
        DtypeError,
        r"mask: expected dtype bool \(True = attend\), got float64",
    ),
    "a mask of nothing": (
        lambda: causal() & [True],
        DtypeError,
        "mask: expected a Mask or a boolean tensor, got list",
    ),
    "more queries than it was made for": (
        lambda: segments(IDS).bounds(7, 6),
        ShapeError,
        r"mask: expected a mask made for lengths of \(7, 6\) or more, got one for \(6, 6\)",
    ),
    "more keys than it was made for": (
        lambda: segments(IDS).tiles(6, 7, 2, 2),
        ShapeError,
        r"mask: expected a mask made for lengths of \(6, 7\) or more, got one for \(6, 6\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mask_that_makes_no_sense_is_refused(name: str) -> None:
    make, error, message = BAD[name]
    with pytest.raises(error, match=f"^{message}"):
        make()


def test_numbers_of_numpy_and_torch_are_integers_too() -> None:
    assert 3 == window(np.int64(3), np.int32(0)).left
    assert type(window(np.int64(3), 0).left) is int
    assert picture(prefix(2), 4, 4) == picture(prefix(np.int64(2)), 4, 4)
    assert picture(prefix([1, 2]), 4, 4, 1) == picture(prefix(np.array([1, 2])), 4, 4, 1)


def test_segments_take_tensors() -> None:
    torch = pytest.importorskip("torch")
    assert picture(segments(IDS), 6, 6) == picture(segments(torch.from_numpy(IDS)), 6, 6)


def test_a_term_says_for_how_many_sequences_it_was_made() -> None:
    one, two = np.zeros(3, np.int64), np.zeros((2, 3), np.int64)
    assert (1, 2, 1) == (Explicit(one, one, 4).batch, Explicit(two, two, 4).batch, causal().batch)
