"""Movement between lanes: DPP, SDWA, READLANE, and the LDS permutes, against tables written here."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

LANES = list(range(64))
M32 = (1 << 32) - 1
VALUES = [1000 + lane for lane in LANES]


def row(function: Callable[[int], int | None]) -> Callable[[int], int | None]:
    """A movement inside 16 lanes; None when it leaves them."""

    def run(lane: int) -> int | None:
        at = function(lane % 16)
        return None if at is None or not 0 <= at < 16 else lane // 16 * 16 + at

    return run


DPP: dict[str, Callable[[int], int | None]] = {
    "quad_perm:[1,0,3,2]": lambda lane: lane ^ 1,
    "quad_perm:[2,3,0,1]": lambda lane: lane ^ 2,
    "quad_perm:[3,3,0,0]": lambda lane: lane // 4 * 4 + (3, 3, 0, 0)[lane % 4],
    "row_mirror": row(lambda at: 15 - at),
    "row_half_mirror": lambda lane: lane // 8 * 8 + 7 - lane % 8,
    "row_shl:1": row(lambda at: at + 1),
    "row_shl:8": row(lambda at: at + 8),
    "row_shr:1": row(lambda at: at - 1),
    "row_shr:15": row(lambda at: at - 15),
    "row_ror:3": row(lambda at: (at - 3) % 16),
    "wave_shl:1": lambda lane: lane + 1 if lane < 63 else None,
    "wave_shr:1": lambda lane: lane - 1 if lane else None,
    "wave_rol:1": lambda lane: (lane + 1) % 64,
    "wave_ror:1": lambda lane: (lane - 1) % 64,
    "row_bcast:15": lambda lane: lane // 16 * 16 - 1 if lane >= 16 else None,
    "row_bcast:31": lambda lane: 31 if lane >= 32 else None,
}


@pytest.mark.parametrize("control", DPP)
@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("masks", [(15, 15), (10, 15), (15, 6)])
@pytest.mark.parametrize("active", [(1 << 64) - 1, random.Random(1).getrandbits(64)])
def test_dpp_moves_values_between_lanes(
    execute: Any, control: str, bound: bool, masks: tuple[int, int], active: int
) -> None:
    """A lane without a source reads 0 with bound_ctrl, else keeps its register; row and bank masks keep it too."""
    text = (
        f"v_mov_b32_dpp v0, v1 {control} row_mask:{masks[0]:#x} bank_mask:{masks[1]:#x}"
        + " bound_ctrl:1" * bound
    )
    expected: list[int] = []
    for lane in LANES:
        source = DPP[control](lane)
        has_source = source is not None and active >> source & 1
        enabled = masks[0] >> lane // 16 & 1 and masks[1] >> lane % 16 // 4 & 1 and active >> lane & 1
        if not enabled or (not has_source and not bound):
            expected.append(7)
        else:
            expected.append(VALUES[source] if has_source and source is not None else 0)
    assert expected == execute(text, {0: 7, 1: VALUES}, exec_mask=active).vector(0)


def test_a_16_lane_sum_by_dpp_is_the_sum_in_every_lane(execute: Any) -> None:
    """The kernel's row reduction."""
    steps = ["quad_perm:[1,0,3,2]", "quad_perm:[2,3,0,1]", "row_half_mirror", "row_mirror"]
    text = "\n".join(
        f"v_add_u32_dpp v1, v1, v1 {step} row_mask:0xf bank_mask:0xf bound_ctrl:1" for step in steps
    )
    expected = [sum(VALUES[lane // 16 * 16 : lane // 16 * 16 + 16]) for lane in LANES]
    assert expected == execute(text, {1: VALUES}).vector(1)


def selected(word: int, name: str) -> int:
    if name == "DWORD":
        return word
    kind, number = name.split("_")
    return word >> 8 * int(number) & 255 if kind == "BYTE" else word >> 16 * int(number) & 0xFFFF


SELECTIONS = ["BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD"]


@pytest.mark.parametrize("name", SELECTIONS)
def test_sdwa_selects_part_of_a_source(execute: Any, name: str) -> None:
    rng = random.Random(1)
    a, b = [rng.getrandbits(32) for _ in LANES], [rng.getrandbits(32) for _ in LANES]
    text = f"v_add_u32_sdwa v0, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:{name} src1_sel:WORD_1"
    expected = [selected(x, name) + (y >> 16) & M32 for x, y in zip(a, b, strict=True)]
    assert expected == execute(text, {1: a, 2: b}).vector(0)


def test_sdwa_extends_the_sign_when_asked(execute: Any) -> None:
    words = [0x80, 0x7F, 0x8000, 0x12345678] * 16
    text = (
        "v_add_u32_sdwa v0, sext(v1), v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:DWORD"
    )
    expected = [((word & 255) - (word << 1 & 256)) & M32 for word in words]
    assert expected == execute(text, {1: words, 2: 0}).vector(0)


@pytest.mark.parametrize("name", SELECTIONS[:-1])
@pytest.mark.parametrize("unused", ["UNUSED_PAD", "UNUSED_PRESERVE", "UNUSED_SEXT"])
def test_sdwa_puts_its_result_into_part_of_the_destination(execute: Any, name: str, unused: str) -> None:
    rng = random.Random(2)
    a, old = [rng.getrandbits(32) for _ in LANES], [rng.getrandbits(32) for _ in LANES]
    text = f"v_add_u32_sdwa v0, v1, v2 dst_sel:{name} dst_unused:{unused} src0_sel:DWORD src1_sel:DWORD"
    size = 8 if name.startswith("BYTE") else 16
    shift = size * int(name[-1])
    expected = []
    for word, before in zip(a, old, strict=True):
        part = word + 1 & (1 << size) - 1
        if unused == "UNUSED_PRESERVE":
            expected.append(before & ~((1 << size) - 1 << shift) | part << shift)
        elif unused == "UNUSED_SEXT":
            expected.append((part - ((part >> size - 1) << size)) << shift & M32)
        else:
            expected.append(part << shift)
    assert expected == execute(text, {0: old, 1: a, 2: 1}).vector(0)


def test_fp16_sdwa_takes_the_upper_half_and_its_sign(execute: Any) -> None:
    text = "v_cvt_f32_f16_sdwa v0, -v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1"
    assert [0xC0000000] * 64 == execute(text, {1: 0x40003C00}).vector(0)


def test_a_carry_instruction_selects_and_moves_its_own_first_source(execute: Any) -> None:
    """Its second operand is the carry mask, so sources are counted from the third."""
    rng = random.Random(1)
    a, b = [rng.getrandbits(32) for _ in LANES], [rng.getrandbits(32) for _ in LANES]
    tail = "dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_1"
    state = execute(f"v_add_co_u32_sdwa v0, vcc, v1, v2 {tail}", {1: a, 2: b})
    sums = [x + (y >> 8 & 255) for x, y in zip(a, b, strict=True)]
    assert [total & M32 for total in sums] == state.vector(0)
    assert sum((total >> 32) << lane for lane, total in enumerate(sums)) == state.vcc
    dpp = "quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf bound_ctrl:1"
    state = execute(f"v_addc_co_u32_dpp v0, vcc, v1, v2, vcc {dpp}", {1: a, 2: b}, vcc=1)
    sums = [a[lane ^ 1] + b[lane] + (lane == 0) for lane in LANES]
    assert [total & M32 for total in sums] == state.vector(0)
    assert sum((total >> 32) << lane for lane, total in enumerate(sums)) == state.vcc


def test_readlane_writelane_and_readfirstlane(execute: Any) -> None:
    state = execute("v_readlane_b32 s2, v1, s3", {1: VALUES}, {3: 64 + 9}, exec_mask=1)
    assert VALUES[9] == state.scalar(2)
    assert VALUES[5] == execute("v_readfirstlane_b32 s2, v1", {1: VALUES}, exec_mask=0xE0).scalar(2)
    assert VALUES[0] == execute("v_readfirstlane_b32 s2, v1", {1: VALUES}, exec_mask=0).scalar(2)
    written = execute("v_writelane_b32 v0, s4, 63", {0: 7}, {4: 99}, exec_mask=1).vector(0)
    assert [7] * 63 + [99] == written


def test_swap_exchanges_active_lanes(execute: Any) -> None:
    state = execute("v_swap_b32 v0, v1", {0: VALUES, 1: 3}, exec_mask=0xFF)
    assert [3] * 8 + VALUES[8:] == state.vector(0)
    assert VALUES[:8] + [3] * 56 == state.vector(1)


def test_bpermute_pulls_and_permute_pushes(execute: Any) -> None:
    """Addresses count in bytes and wrap at 64 lanes; an inactive source gives 0."""
    rng = random.Random(1)
    order = LANES.copy()
    rng.shuffle(order)
    active = rng.getrandbits(64)
    address = [4 * lane + 256 for lane in order]
    pulled = execute(
        "ds_bpermute_b32 v0, v2, v1 offset:4", {0: 7, 1: VALUES, 2: address}, exec_mask=active
    ).vector(0)
    for lane in LANES:
        source = (order[lane] + 1) % 64
        wanted = VALUES[source] if active >> source & 1 else 0
        assert (wanted if active >> lane & 1 else 7) == pulled[lane]
    pushed = execute("ds_permute_b32 v0, v2, v1", {1: VALUES, 2: address}).vector(0)
    assert all(VALUES[lane] == pushed[order[lane]] for lane in LANES)


@pytest.mark.parametrize(
    ("offset", "function"),
    [
        ("swizzle(SWAP,16)", lambda low: low ^ 16),
        ("swizzle(REVERSE,8)", lambda low: low // 8 * 8 + 7 - low % 8),
        ("swizzle(BROADCAST,4,2)", lambda low: low // 4 * 4 + 2),
        ("swizzle(QUAD_PERM,3,2,1,0)", lambda low: low // 4 * 4 + 3 - low % 4),
        ('swizzle(BITMASK_PERM,"01pip")', lambda low: (low & 7 | 8) ^ 2),
        ("0x401f", lambda low: low ^ 16),
        ("0x801b", lambda low: low // 4 * 4 + 3 - low % 4),
    ],
)
def test_swizzle_permutes_inside_32_lanes(execute: Any, offset: str, function: Any) -> None:
    got = execute(f"ds_swizzle_b32 v0, v1 offset:{offset}", {1: VALUES}).vector(0)
    assert [VALUES[lane // 32 * 32 + function(lane % 32)] for lane in LANES] == got
