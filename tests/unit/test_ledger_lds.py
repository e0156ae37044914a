"""Bank conflicts of shared memory: phases, counts, padding advice, pictures."""

from __future__ import annotations

import numpy as np
import pytest

from attnproof.ledger import lds


@pytest.mark.parametrize("wave", [32, 64])
@pytest.mark.parametrize("width", lds.WIDTHS)
@pytest.mark.parametrize("write", [False, True])
def test_the_phases_of_an_access_serve_every_lane_once(wave, width, write) -> None:
    groups = lds.phases(wave, width, write=write)
    assert sorted(lane for group in groups for lane in group) == list(range(wave))
    assert {len(group) * width for group in groups} == {128}


def test_wide_reads_of_a_wave_of_64_are_grouped_as_the_hardware_notes_say() -> None:
    groups = lds.phases(64, 16)
    assert groups[0] == (0, 1, 2, 3, 20, 21, 22, 23)
    assert groups[3] == (12, 13, 14, 15, 24, 25, 26, 27)
    assert groups[4] == tuple(lane + 32 for lane in groups[0])
    assert lds.phases(64, 16, write=True)[0] == tuple(range(8))


@pytest.mark.parametrize(("width", "clocks"), [(4, 1), (8, 2), (16, 4)])
def test_neighbours_never_conflict(width, clocks) -> None:
    assert lds.conflicts(lds.contiguous(width, 32), width).clocks == clocks
    assert lds.conflicts(lds.contiguous(width, 64), width).clocks == 2 * clocks


def test_lanes_that_want_the_same_dword_share_it() -> None:
    result = lds.conflicts(np.zeros(32, int), 4)
    assert (result.clocks, result.ways, result.extra) == (1, 1, 0)


def test_a_column_of_unpadded_halves_is_served_one_lane_after_the_other() -> None:
    """Rows of 64 halves are 128 bytes: all lanes of a phase want the same banks."""
    assert lds.conflicts(lds.column(128, 32), 4).clocks == 32
    assert lds.conflicts(lds.column(128, 64), 16).clocks == 64
    assert lds.conflicts(lds.column(128, 64), 16).ways == 8


def test_the_count_agrees_with_counting_one_dword_at_a_time() -> None:
    """An independent count: for each phase and bank, the set of dwords, in plain Python."""
    generator = np.random.default_rng(0)
    for wave, width in ((32, 4), (32, 8), (64, 16), (64, 4)):
        addresses = generator.integers(0, 512, wave) * width
        expected = 0
        for lanes in lds.phases(wave, width):
            banks: dict[int, set[int]] = {}
            for lane in lanes:
                for dword in range(addresses[lane] // 4, (addresses[lane] + width) // 4):
                    banks.setdefault(dword % 32, set()).add(dword)
            expected += max(len(dwords) for dwords in banks.values())
        assert lds.conflicts(addresses, width).clocks == expected


def test_sixteen_bytes_of_padding_make_a_column_of_wide_reads_free() -> None:
    advice = lds.padding_advice(128, 16, 64)
    assert (advice.padding, advice.before, advice.after) == (16, 64, 8)
    assert str(advice) == "pad rows of 128 B by 16 B: 64 -> 8 clocks, 12% more memory"


def test_rows_that_do_not_conflict_are_left_alone() -> None:
    assert lds.padding_advice(144, 16, 64).padding == 0
    assert str(lds.padding_advice(132, 4, 32)) == "rows of 132 B need no padding: 1 clocks for b32"


def test_eight_rows_a_thread_conflict_in_spite_of_padding_and_four_do_not() -> None:
    """Why the dot2 kernels keep four rows a thread: 8 x 272 bytes is a multiple of all banks."""
    lane = np.arange(64)
    assert lds.conflicts((lane // 16) * 4 * 272, 16).clocks == 8
    assert lds.conflicts((lane // 16) * 8 * 272, 16).clocks == 16


def test_a_swizzle_does_without_padding() -> None:
    for chunk in range(8):
        assert lds.conflicts(lds.swizzled_column(128, 64, 16, chunk), 16).clocks == 8
    with pytest.raises(ValueError, match="power-of-two number of 16-byte chunks, got 96"):
        lds.swizzled_column(96, 64, 16)


def test_lanes_that_are_switched_off_ask_for_nothing() -> None:
    addresses = lds.column(128, 32)
    addresses[1:] = -1
    assert lds.conflicts(addresses, 4).clocks == 1


def test_the_fragment_of_a_register_tile_repeats_every_sixteen_threads() -> None:
    addresses = lds.fragment(144, 64, rows_per_lane=1)
    assert addresses[:16].tolist() == addresses[48:].tolist()
    assert lds.conflicts(addresses, 16).clocks == 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lds.conflicts(np.arange(32), 4), "expected one multiple of 4 per lane"),
        (lambda: lds.phases(48, 4), "expected wave 32 or 64"),
        (lambda: lds.padding_advice(100, 16, 64), "row_bytes: expected a positive multiple of 16, got 100"),
    ],
)
def test_impossible_accesses_are_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_picture_shows_a_line_per_phase_and_a_column_per_bank() -> None:
    lines = lds.picture(lds.conflicts(lds.column(128, 32), 16)).splitlines()
    assert lines[0].startswith("bank    0123456789")
    assert lines[1] == "phase 0 8888" + "." * 28 + "  8 clocks"
    assert len(lines) == 1 + 4
