"""Decoding against a cache: what is written, when, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from attnproof import DtypeError, ShapeError, Unsupported, attention, attention_decode
from attnproof.cache import plan

B, H, HKV, CAPACITY, PAGE, D = 2, 4, 2, 12, 4, 8
BEFORE = np.array([3, 7], np.int32)
# the pages of the two sequences in a pool of 8; what is not used may hold anything
TABLE = np.array([[5, 2, -1], [7, 0, 3]], np.int32)


def arrays(layout: str = "bhmd") -> dict[str, Any]:
    """Queries, a cache of 12 slots, and three new tokens."""
    rng = np.random.default_rng(0)
    shapes = {"q": (B, H, 3, D), "k_cache": (B, HKV, CAPACITY, D), "v_cache": (B, HKV, CAPACITY, D)}
    shapes |= {"k_new": (B, HKV, 3, D), "v_new": (B, HKV, 3, D)}
    made = {at: rng.standard_normal(shape) for at, shape in shapes.items()}
    return {at: x.swapaxes(1, 2).copy() if layout == "bmhd" else x for at, x in made.items()}


def paged(x: dict[str, Any], layout: str = "bhmd") -> dict[str, Any]:
    """The same cache as a pool of pages."""
    made = dict(x)
    for at in ("k_cache", "v_cache"):
        cache = x[at].swapaxes(1, 2) if layout == "bmhd" else x[at]
        pool = np.full((8, HKV, PAGE, D), np.nan)
        for b in range(B):
            for slot in range(-(-(int(BEFORE[b]) + 3) // PAGE)):
                pool[TABLE[b, slot]] = cache[b, :, slot * PAGE : (slot + 1) * PAGE]
        made[at] = pool.swapaxes(1, 2).copy() if layout == "bmhd" else pool
    return {**made, "block_table": TABLE}


def decode(x: dict[str, Any], lengths: Any = BEFORE, **more: Any) -> Any:
    given = {**x, **more}
    return attention_decode(given.pop("q"), given.pop("k_cache"), given.pop("v_cache"), lengths, **given)


def full(x: dict[str, Any], b: int) -> tuple[Any, Any]:
    """Old and new keys and values of one sequence, joined."""
    n = int(BEFORE[b])
    pairs = (("k_cache", "k_new"), ("v_cache", "v_new"))
    return tuple(np.concatenate([x[old][b : b + 1, :, :n], x[new][b : b + 1]], axis=2) for old, new in pairs)


@pytest.mark.parametrize("layout", ["bhmd", "bmhd"])
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_new_tokens_are_stored_behind_the_old_and_nothing_else_changes(
    layout: str, pages: bool, kind: str
) -> None:
    x = arrays(layout)
    x = paged(x, layout) if pages else x
    given, lengths = x, BEFORE
    if kind == "torch":
        torch = pytest.importorskip("torch")
        given = {at: torch.from_numpy(part.copy()) for at, part in x.items()}
        lengths = torch.from_numpy(BEFORE)
    before = {at: np.asarray(given[at]).copy() for at in ("k_cache", "v_cache")}
    decode(given, lengths, layout=layout, causal=True)
    for cache, new in (("k_cache", "k_new"), ("v_cache", "v_new")):
        right = before[cache].swapaxes(1, 2) if layout == "bmhd" else before[cache]
        tokens = np.asarray(given[new])
        tokens = tokens.swapaxes(1, 2) if layout == "bmhd" else tokens
        for b, n in enumerate(BEFORE.tolist()):
            for t in range(3):
                slot, row = (TABLE[b, (n + t) // PAGE], (n + t) % PAGE) if pages else (b, n + t)
                right[slot, :, row] = tokens[b, :, t]
        got = np.asarray(given[cache])
        assert np.array_equal(right, got.swapaxes(1, 2) if layout == "bmhd" else got, equal_nan=True)


@pytest.mark.parametrize("pages", [False, True])
def test_attention_sees_old_and_new(pages: bool) -> None:
    x = arrays()
    for b in range(B):
        right = attention(x["q"][b : b + 1], *full(x, b), causal=True)
        got = decode(paged(x) if pages else {at: part.copy() for at, part in x.items()}, causal=True)
        assert np.allclose(right[0], got[b], rtol=0, atol=1e-14)


def test_an_append_of_nothing_is_no_append() -> None:
    x = arrays()
    none = {"k_new": np.zeros((B, HKV, 0, D)), "v_new": np.zeros((B, HKV, 0, D))}
    assert decode({**x, "k_new": None, "v_new": None}).tolist() == decode({**x, **none}).tolist()


def test_the_query_rows_need_not_match_the_new_tokens() -> None:
    """One query after an append of three sees all of them."""
    x = arrays()
    right = [attention(x["q"][b : b + 1, :, 2:], *full(x, b))[0] for b in range(B)]
    got = decode({**x, "q": x["q"][:, :, 2:]}, causal=True)
    assert np.allclose(right, got, rtol=0, atol=1e-14)


BAD: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "past the capacity": (
        ShapeError,
        {"lengths": np.array([3, 10])},
        "k_new: expected room in the cache capacity of 12 tokens, got 13 needed",
    ),
    "past the pages": (
        ShapeError,
        {"pages": True, "block_table": TABLE[:, :2]},
        "k_new: expected room in the cache capacity of 8 tokens, got 10 needed",
    ),
    "k alone": (ShapeError, {"v_new": None}, "v_new: expected both k_new and v_new, or neither, got None"),
    "v alone": (ShapeError, {"k_new": None}, "k_new: expected both k_new and v_new, or neither, got None"),
    "new tokens for another batch": (
        ShapeError,
        {"k_new": np.zeros((3, HKV, 3, D))},
        "k_new: expected shape (2, 2, 3, 8), got (3, 2, 3, 8)",
    ),
    "v for other tokens": (
        ShapeError,
        {"v_new": np.zeros((B, HKV, 2, D))},
        "v_new: expected shape (2, 2, 3, 8), got (2, 2, 2, 8)",
    ),
    "new tokens of another dtype": (
        DtypeError,
        {"k_new": np.zeros((B, HKV, 3, D), np.float32)},
        "k_new: expected dtype float64 to match k_cache, got float32",
    ),
    "lengths for another batch": (
        ShapeError,
        {"lengths": np.array([3, 7, 1])},
        "cache_seqlens: expected shape [2], got (3,)",
    ),
    "one number for lengths": (ShapeError, {"lengths": 3}, "cache_seqlens: expected shape [2], got ()"),
    "a negative length": (
        ShapeError,
        {"lengths": np.array([3, -1])},
        "cache_seqlens: expected 0 or more, got -1",
    ),
    "a length past the capacity": (
        ShapeError,
        {"lengths": np.array([3, 13]), "k_new": None, "v_new": None},
        "cache_seqlens: expected at most the cache capacity 12, got 13",
    ),
    "lengths in floats": (
        DtypeError,
        {"lengths": np.array([3.0, 7])},
        "cache_seqlens: expected int32 or int64, got float64",
    ),
    "a length that int32 cannot hold": (
        ShapeError,
        {"lengths": np.array([3, 2**32 + 1])},
        "cache_seqlens: expected at most the cache capacity 12, got 2147483647",
    ),
    "a used page that does not exist": (
        ShapeError,
        {"pages": True, "block_table": np.array([[5, 2, -1], [7, 8, 3]])},
        "block_table[1]: expected used pages in [0, 8), got 8",
    ),
    "a used page of minus one": (
        ShapeError,
        {"pages": True, "block_table": np.array([[5, -1, -1], [7, 0, 3]])},
        "block_table[0]: expected used pages in [0, 8), got -1",
    ),
    "a used page that int32 would wrap to 1": (
        ShapeError,
        {"pages": True, "block_table": np.array([[5, 2**32 + 1, -1], [7, 0, 3]])},
        "block_table[0]: expected used pages in [0, 8), got 2147483647",
    ),
    "a table for another batch": (
        ShapeError,
        {"pages": True, "block_table": TABLE[:1]},
        "k_new: expected shape (1, 2, 3, 8), got (2, 2, 3, 8)",
    ),
    "a table without columns": (
        ShapeError,
        {"pages": True, "block_table": TABLE[0]},
        "block_table: expected shape [2, width], got (3,)",
    ),
    "queries for another batch": (
        ShapeError,
        {"q": np.zeros((3, H, 3, D))},
        "k_cache: expected batch 3 to match q, got 2",
    ),
    "another head dim": (
        ShapeError,
        {"q": np.zeros((B, H, 3, 6))},
        "k_cache: expected head dim 6 to match q, got 8",
    ),
    "a v cache of another size": (
        ShapeError,
        {"v_cache": np.zeros((B, HKV, 13, D))},
        "v_cache: expected shape (2, 2, 12) to match k_cache, got (2, 2, 13)",
    ),
    "heads that do not divide": (
        ShapeError,
        {"q": np.zeros((B, 3, 3, D))},
        "k: expected a head count that divides the 3 query heads, got 2",
    ),
    "no split": (
        ShapeError,
        {"num_splits": 0},
        "num_splits: expected an integer of 1 or more, or None, got 0",
    ),
    "half a split": (
        ShapeError,
        {"num_splits": 1.5},
        "num_splits: expected an integer of 1 or more, or None, got 1.5",
    ),
    "a bad softcap": (
        ShapeError,
        {"softcap": -1.0},
        "softcap: expected a finite number above 0, or None for no cap, got -1.0",
    ),
    "a bad layout": (ShapeError, {"layout": "mbhd"}, "layout: expected 'bhmd' or 'bmhd', got 'mbhd'"),
    "an unknown backend": (ShapeError, {"backend": "cudnn"}, "backend: expected 'auto' or one of "),
    "a mask for other queries": (
        ShapeError,
        {"mask": np.ones((4, CAPACITY), bool)},
        "mask: expected a shape that broadcasts to (2, 4, 3, 12), got (4, 12)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_call_that_is_refused_has_written_nothing(name: str) -> None:
    """The cache outlives the call: half an append would corrupt every later token."""
    error, change, message = BAD[name]
    change = dict(change)
    x = paged(arrays()) if change.pop("pages", False) else arrays()
    x |= {at: part for at, part in change.items() if at != "lengths"}
    before = {at: x[at].copy() for at in ("k_cache", "v_cache")}
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        decode(x, change.get("lengths", BEFORE))
    for at, right in before.items():
        assert np.array_equal(right, x[at], equal_nan=True)


def test_a_backend_that_refuses_has_written_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnproof.backends import streaming

    monkeypatch.setattr(streaming, "why_not", lambda problem: "it is closed today")
    x = arrays()
    before = x["k_cache"].copy()
    with pytest.raises(Unsupported, match=r"^streaming: it is closed today$"):
        decode(x, backend="streaming")
    assert before.tolist() == x["k_cache"].tolist()


def test_unused_slots_and_page_entries_may_hold_anything() -> None:
    """Table entries past the valid length are -1, far outside, or beyond int32; slots hold NaN."""
    x = paged(arrays())
    right = decode({**x, "k_cache": x["k_cache"].copy(), "v_cache": x["v_cache"].copy()}, causal=True)
    for unused in (-1, 10**6, 2**40, -(2**40)):
        table = TABLE.astype(np.int64)
        table[0, 2] = unused
        again = {**x, "k_cache": x["k_cache"].copy(), "v_cache": x["v_cache"].copy(), "block_table": table}
        assert right.tolist() == decode(again, causal=True).tolist()
    assert np.isfinite(right).all()


def test_an_empty_cache_gives_zeros() -> None:
    x = {**arrays(), "k_new": None, "v_new": None}
    assert not decode(x, np.zeros(B, int)).any()
    assert not decode(paged(x), np.zeros(B, int)).any()
    pool = {
        **x,
        "k_cache": np.zeros((8, HKV, 0, D)),
        "v_cache": np.zeros((8, HKV, 0, D)),
        "block_table": TABLE,
    }
    for backend in ("reference", "streaming"):
        assert not decode(pool, np.zeros(B, int), backend=backend).any()


def test_a_cache_has_no_gradient_and_says_so() -> None:
    torch = pytest.importorskip("torch")
    x = {at: torch.from_numpy(part) for at, part in arrays().items()}
    x["q"].requires_grad_()
    before = x["k_cache"].clone()
    with pytest.raises(Unsupported, match=r"^attention_decode: no gradient through a cache written in place"):
        decode(x, torch.from_numpy(BEFORE))
    assert torch.equal(before, x["k_cache"])
    with torch.no_grad():
        assert bool(torch.isfinite(decode(x, torch.from_numpy(BEFORE))).all())


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("lengths", [(11, 3), (3, 11), (12, 12), (10, 9), (0, 0)])
def test_on_a_device_what_does_not_fit_is_dropped(
    monkeypatch: pytest.MonkeyPatch, pages: bool, lengths: tuple[int, int]
) -> None:
    """Nobody waits for a device to hear that an append is too long: nothing may be written or read past the end."""
    torch = pytest.importorskip("torch")
    from attnproof import checks

    x = {at: torch.from_numpy(part) for at, part in (paged(arrays()) if pages else arrays()).items()}
    table = torch.tensor([[5, 2, 4], [7, 0, 3]]) if pages else None
    monkeypatch.setattr(checks, "host_known", lambda x: False)
    right = {at: x[at].clone() for at in ("k_cache", "v_cache")}
    append = plan(x["k_cache"], x["v_cache"], torch.tensor(lengths), x["k_new"], x["v_new"], table, "bhmd")
    append.write()
    assert [min(n + 3, CAPACITY) for n in lengths] == append.after.tolist()
    for at, part in right.items():
        for b, n in enumerate(lengths):
            for t in range(min(3, CAPACITY - n)):
                slot, row = (table[b, (n + t) // PAGE], (n + t) % PAGE) if pages else (b, n + t)
                part[slot, :, row] = x[at[0] + "_new"][b, :, t]
        assert torch.equal(part.nan_to_num(), x[at].nan_to_num())


def test_on_a_device_a_page_that_does_not_exist_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above all not page 0 instead of it."""
    torch = pytest.importorskip("torch")
    from attnproof import checks

    x = {at: torch.from_numpy(part) for at, part in paged(arrays()).items()}
    monkeypatch.setattr(checks, "host_known", lambda x: False)
    for bad in (-1, 8, 2**40):
        table = torch.tensor([[5, bad, -1], [bad, bad, bad]])
        right = x["k_cache"].clone()
        plan(x["k_cache"], x["v_cache"], torch.tensor([3, 7]), x["k_new"], x["v_new"], table, "bhmd").write()
        right[5, :, 3] = x["k_new"][0, :, 0]
        assert torch.equal(right.nan_to_num(), x["k_cache"].nan_to_num())
