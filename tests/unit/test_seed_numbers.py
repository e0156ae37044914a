"""The numbers this project started from, reproduced by the code that users run (docs/01_idea.md tells them)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attnproof import masks, online_softmax
from attnproof.backends import streaming
from attnproof.cli import _lessons
from attnproof.cli._lessons import EXACT, MIB, Inputs, naive, stream

# j, m, l, corr after each tile of two keys
TRACE = [
    (0, 0.2968, 1.7748, 0.0),
    (2, 0.6071, 3.0317, 0.7333),
    (4, 0.6071, 3.9732, 1.0),
    (6, 0.6071, 5.3007, 1.0),
]
SIZES = (256, 1024, 2048, 4096)
# N -> (naive MiB, streaming MiB)
MEMORY = {1024: (16.5, 1.1), 2048: (65.0, 2.2), 4096: (258.0, 4.2), 8192: (1028.0, 8.3)}


@pytest.mark.parametrize("order", ["keys", "queries"])
def test_the_traced_recurrence_has_the_known_states(order: streaming.Order) -> None:
    result = _lessons.trace(8, 4, 2, order, row=0, seed=0)
    assert TRACE == [(r.j, round(r.m, 4), round(r.l, 4), round(r.corr, 4)) for r in result.rows]
    assert result.holds


@pytest.mark.parametrize("order", ["keys", "queries"])
@pytest.mark.parametrize("block", [1, 3, 7, 8, 100])
def test_any_block_size_ends_with_the_same_result_and_never_a_growing_factor(
    block: int, order: streaming.Order
) -> None:
    for row in (0, 5, 7):
        result = _lessons.trace(8, 4, block, order, row, seed=0)
        assert result.holds
        assert all(0 <= r.corr <= 1 for r in result.rows)
        assert pytest.approx(5.3007 if row == 0 else result.rows[-1].l, abs=5e-5) == result.rows[-1].l


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("causal", [False, True])
def test_every_float64_backend_is_exact(n: int, causal: bool) -> None:
    """The bar is 2e-15; a lost rescale or a half-precision sum anywhere is orders of magnitude above it."""
    inputs = Inputs.draw(n, 64, n)
    want, _ = naive(inputs, causal)
    errors = {
        name: float(np.abs(run(inputs, causal) - want).max())
        for name, (ours, run) in _lessons.candidates().items()
        if ours
    }
    assert "streaming" in errors
    assert {} == {name: error for name, error in errors.items() if not error < EXACT}


@pytest.fixture(scope="module")
def peaks() -> dict[int, _lessons.MemoryRow]:
    return {row.n: row for row in _lessons.memory(list(MEMORY), 64, 64, lambda label: None)}


@pytest.mark.slow
@pytest.mark.parametrize("n", MEMORY)
def test_peak_memory_is_that_of_the_table(peaks: dict[int, _lessons.MemoryRow], n: int) -> None:
    naive_mib, streaming_mib = MEMORY[n]
    assert pytest.approx(naive_mib, rel=0.02) == peaks[n].naive / MIB
    assert pytest.approx(streaming_mib, rel=0.15) == peaks[n].keys_outer / MIB
    # the other loop order keeps one row block's state only
    assert peaks[n].queries_outer < peaks[n].keys_outer


@pytest.mark.slow
@pytest.mark.parametrize("n", [1024, 2048, 4096])
def test_memory_doubles_with_the_length_and_quadruples_without_streaming(
    peaks: dict[int, _lessons.MemoryRow], n: int
) -> None:
    assert pytest.approx(4.0, abs=0.1) == peaks[2 * n].naive / peaks[n].naive
    assert pytest.approx(2.0, abs=0.2) == peaks[2 * n].keys_outer / peaks[n].keys_outer
    # the other order keeps so little that one tile still counts at N=1024
    assert peaks[2 * n].queries_outer / peaks[n].queries_outer <= 2.2


def test_causality_keeps_half_of_the_tiles_and_the_diagonal() -> None:
    result = _lessons.blocks(masks.causal(), 4096, 4096, 64, 64)
    assert (4096, 2080, 64, 49.2) == (
        result.total,
        result.kept,
        result.edge,
        round(100 * result.skipped_share, 1),
    )
    for tiles in (1, 2, 5, 33):
        n = 16 * tiles
        assert tiles * (tiles + 1) // 2 == _lessons.blocks(masks.causal(), n, n, 16, 16).kept


def without_rescale(m: Any, tile_max: Any) -> Any:
    m_new, point, alpha = rescale(m, tile_max)
    return m_new, point, np.ones_like(alpha)


rescale = online_softmax.rescale


def test_the_planted_mistake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rescale the result stays plausible: wrong by 0.28 at most and by 0.014 on average."""
    inputs = Inputs.draw(1024, 64, 1024)
    want, _ = naive(inputs)
    assert np.abs(stream(inputs, block=64)[0] - want).max() < EXACT
    monkeypatch.setattr(online_softmax, "rescale", without_rescale)
    wrong = np.abs(stream(inputs, block=64)[0] - want)
    assert pytest.approx(0.276, abs=5e-4) == wrong.max()
    assert pytest.approx(0.0136, abs=5e-5) == wrong.mean()


def test_a_masked_score_of_zero_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second classic: 0 is an ordinary logit, so every masked key gets weight."""
    logits = streaming.Head.logits

    def zero_filled(*args: Any) -> Any:
        s, capped = logits(*args)
        return np.where(np.isneginf(s), 0.0, s), capped

    inputs = Inputs.draw(256, 64, 256)
    want, _ = naive(inputs, causal=True)
    monkeypatch.setattr(streaming.Head, "logits", zero_filled)
    assert np.abs(stream(inputs, causal=True, block=64)[0] - want).max() > 0.1
