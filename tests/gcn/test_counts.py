"""Bank conflicts, cache lines and instruction classes against a count by hand, lane after lane."""

from __future__ import annotations

import random

import numpy as np
import pytest

from attnproof.gcn.counts import class_of, lds_cycles, lines_touched
from attnproof.gcn.decode import decode, decode_line
from attnproof.gcn.faults import Fault

READ_128 = [(0, 20), (4, 16), (8, 28), (12, 24)]


def groups(size: int, load: bool) -> list[list[int]]:
    """Lanes that the LDS serves together."""
    if size == 16 and load:
        return [[*range(a + h, a + h + 4), *range(b + h, b + h + 4)] for h in (0, 32) for a, b in READ_128]
    lanes = {4: 32, 8: 16, 16: 8}[max(4, size)]
    return [list(range(first, first + lanes)) for first in range(0, 64, lanes)]


def by_hand(addresses: list[int], active: list[bool], size: int, load: bool) -> tuple[int, int]:
    cycles = free = 0
    for lanes in groups(size, load):
        banks: dict[int, set[int]] = {}
        for lane in lanes:
            if active[lane]:
                for k in range(max(1, size // 4)):
                    word = addresses[lane] // 4 + k
                    banks.setdefault(word % 32, set()).add(word)
        cycles += max((len(words) for words in banks.values()), default=0)
        free += bool(banks)
    return cycles, free


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("load", [True, False])
def test_lds_cycles_are_the_worst_bank_of_every_phase(size: int, load: bool) -> None:
    rng = random.Random(size)
    for kind in range(6):
        pitch = [size, 128, 132, 144, 0, 4][kind]
        rows = [
            [(lane * pitch if kind < 5 else rng.randrange(0, 4096)) // size * size for lane in range(64)]
            for _ in range(3)
        ]
        masks = [[rng.random() < 0.7 or kind == 0 for _ in range(64)] for _ in range(3)]
        masks[2] = [False] * 64 if kind == 3 else masks[2]
        expected = [by_hand(row, mask, size, load) for row, mask in zip(rows, masks, strict=True)]
        got = lds_cycles(np.array(rows, np.int64), np.array(masks), size, load)
        assert (sum(c for c, _ in expected), sum(f for _, f in expected)) == got


def test_padding_a_row_by_16_bytes_takes_the_conflicts_away() -> None:
    """What the kernels' padded rows are for: 16 lanes read 16 bytes each from rows 256 bytes apart."""
    lanes = np.arange(64)[None]
    everyone = np.ones((1, 64), np.bool_)
    for pitch, cycles in ((256, 64), (272, 8)):
        assert (cycles, 8) == lds_cycles(lanes * pitch, everyone, 16, load=True)


def test_cache_lines_are_counted_once_per_wave() -> None:
    rng = random.Random(1)
    for size in (2, 4, 16):
        rows = [[rng.randrange(0, 5000) // size * size for _ in range(64)] for _ in range(3)]
        masks = [[rng.random() < 0.5 for _ in range(64)] for _ in range(3)]
        expected = sum(
            len({(a + k) // 64 for a, on in zip(row, mask, strict=True) if on for k in (0, size - 1)})
            for row, mask in zip(rows, masks, strict=True)
        )
        assert expected == lines_touched(np.array(rows, np.int64), np.array(masks), size)
    assert 4 == lines_touched(np.arange(64)[None] * 4, np.ones((1, 64), np.bool_), 4)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("v_add_f32_e32 v0, v1, v2", "valu"), ("v_exp_f32_e32 v0, v1", "quarter"), ("v_mul_lo_u32 v0, v1, v2", "quarter"),
        ("v_dot2_f32_f16 v0, v1, v2, v3", "dot2"), ("s_add_u32 s0, s1, s2", "salu"), ("ds_read_b32 v0, v1", "lds"),
        ("global_load_dword v0, v[1:2], off", "vmem"), ("s_load_dword s0, s[2:3], 0x0", "smem"), ("s_branch 1", "branch"),
        ("s_cbranch_execz 3", "branch"), ("s_barrier", "other"), ("v_fma_f64 v[0:1], v[2:3], v[4:5], v[6:7]", "quarter"),
    ],
)  # fmt: skip
def test_an_instruction_has_one_class(text: str, name: str) -> None:
    made = decode_line(f"    {text}    // 000000001000: 00000000")
    assert made is not None
    assert name == class_of(made)


def test_text_of_the_disassembler_is_taken_apart() -> None:
    """Operands, modifiers, negative and literal constants, branch targets in both directions."""
    text = """
0000000000001000 <k>:
    v_fma_mix_f32 v0, -|v1|, v2, neg(1) op_sel:[1,0,0] op_sel_hi:[1,1,0]   // 000000001000: 00000000 00000000
    global_load_dwordx4 v[1:4], v[1:2], off offset:-16 glc   // 000000001008: 00000000
    s_cbranch_scc1 65534   // 000000001010: 00000000 <k+0xc>
    s_branch 1   // 000000001014: 00000000
    ds_swizzle_b32 v1, v2 offset:swizzle(BITMASK_PERM, "0p00p")   // 000000001018: 00000000
    s_waitcnt vmcnt(0) lgkmcnt(3)   // 000000001020: 00000000
"""
    mix, load, back, on, swizzle, wait = decode(text)
    assert [(True, True), (False, False), (True, False)] == [(o.neg, o.abs) for o in mix.operands[1:]]
    assert ((1, 0, 0), (1, 1, 0)) == (mix.bits("op_sel", 3, 0), mix.bits("op_sel_hi", 3, 0))
    assert (4, 2, -16, "1") == (
        load.operands[0].count,
        load.operands[1].count,
        load.number("offset"),
        load.modifiers["glc"],
    )
    assert (0x1010 + 4 - 8, 0x1014 + 4 + 4) == (back.target, on.target)
    assert ('swizzle(BITMASK_PERM, "0p00p")', "vmcnt(0) lgkmcnt(3)") == (
        swizzle.modifiers["offset"],
        wait.modifiers["raw"],
    )


def test_a_constant_has_a_pattern_for_every_width() -> None:
    made = decode_line("    v_add_f32_e32 v0, 0.15915494, v1    // 000000001000: 00000000")
    assert made is not None
    assert (0x3118, 0x3E22F983, 0x3FC45F306DC9C882) == made.operands[1].patterns
    made = decode_line("    v_add_f32_e32 v0, -4.0, v1    // 000000001000: 00000000")
    assert made is not None
    assert (0xC400, 0xC0800000, 0xC010000000000000) == made.operands[1].patterns


def test_a_fault_keeps_its_first_place() -> None:
    fault = Fault("reason").at(1, "first", "wave 0").at(2, "second", "wave 1")
    assert "reason [at 0x1: first; wave 0]" == str(fault)
