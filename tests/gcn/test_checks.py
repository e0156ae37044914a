"""Every check of the interpreter stops a kernel that breaks it, and names the instruction; the mended kernel runs.

Long because one small kernel, mutilated in each of its parts, is the subject of them all.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from attnproof import gcn

# v4:5 = s[2:3] + 4 * work item, wave-uniform base in s[8:9]
LOAD = """
    s_load_dwordx2 s[8:9], s[0:1], 0x0
    v_lshlrev_b32_e32 v3, 2, v0
    s_waitcnt lgkmcnt(0)
"""
# each of 256 work items passes its number to another wave through LDS
EXCHANGE = """
    s_load_dwordx2 s[8:9], s[0:1], 0x0
    v_lshlrev_b32_e32 v3, 2, v0
    ds_write_b32 v3, v0
    s_waitcnt lgkmcnt(0)
    s_barrier
    v_xor_b32_e32 v4, 0x100, v3
    ds_read_b32 v5, v4
    s_waitcnt lgkmcnt(0)
    global_store_dword v3, v5, s[8:9]
    s_endpgm
"""
ORDERS = ["lockstep", "forward", "reverse", "random"]


def run(
    code: gcn.CodeObject, items: int = 256, size: int = 256, order: str = "lockstep", **options: Any
) -> Any:
    memory = gcn.Memory()
    target = np.full(size, 0xFFFFFFFF, np.uint32)
    base = memory.place(target, name="target")
    counts = gcn.launch(
        code,
        "k",
        grid=(1, 1, 1),
        block=(items, 1, 1),
        kernarg=struct.pack("<QQ", base, 0),
        memory=memory,
        order=order,
        **options,
    )
    return target, counts


@pytest.mark.parametrize("order", ORDERS)
def test_waves_exchange_values_through_lds(assemble: Any, order: str) -> None:
    target, counts = run(assemble(EXCHANGE, lds_bytes=1024), order=order)
    assert [item ^ 64 for item in range(256)] == target.tolist()
    assert (4 * 10, 4 * 2, 1) == (counts.instructions, counts.classes["lds"], counts.workgroups)


def test_a_load_may_overwrite_the_result_of_a_load_in_flight_but_not_take_it_as_an_address(
    assemble: Any,
) -> None:
    """Vector loads return in order: compilers let a second one reuse a register whose first value nobody wants."""
    text = (
        LOAD
        + """
        global_load_dword v4, v3, s[8:9]
        global_load_dword v4, SECOND, s[8:9]
        s_waitcnt vmcnt(0)
        global_store_dword v3, v4, s[8:9]
        s_endpgm
    """
    )
    run(assemble(text.replace("SECOND", "v3")))
    with pytest.raises(gcn.Hazard, match="v4: used before s_waitcnt vmcnt covers"):
        run(assemble(text.replace("SECOND", "v4")))


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_barrier_is_a_race_in_every_order(assemble: Any, order: str) -> None:
    """Also in an order in which the result happens to be right; old values from before an earlier barrier lie there."""
    first = "    ds_write_b32 v3, v3\n    s_waitcnt lgkmcnt(0)\n    s_barrier\n    ds_write_b32 v3, v0\n"
    whole = EXCHANGE.replace("    ds_write_b32 v3, v0\n", first)
    run(assemble(whole, lds_bytes=1024), order=order)
    code = assemble("".join(whole.rsplit("    s_barrier\n", 1)), lds_bytes=1024)
    with pytest.raises(
        gcn.Race,
        match=r"LDS race: wave \d (reads|writes) byte \d+, which .* since the last barrier .*ds_(read|write)_b32",
    ):
        run(code, order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_a_write_after_another_waves_read_is_a_race(assemble: Any, order: str) -> None:
    """The second tile is staged while a slow wave still reads the first."""
    text = EXCHANGE.replace("    global_store_dword", "    ds_write_b32 v3, v5\n    global_store_dword")
    with pytest.raises(gcn.Race, match="writes byte|reads byte"):
        run(assemble(text, lds_bytes=1024), order=order)
    mended = text.replace("    ds_write_b32 v3, v5", "    s_barrier\n    ds_write_b32 v3, v5")
    run(assemble(mended, lds_bytes=1024), order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_two_waves_writing_one_place_is_a_race_even_with_equal_values(assemble: Any, order: str) -> None:
    text = EXCHANGE.replace(
        "    ds_write_b32 v3, v0\n",
        "    ds_write_b32 v3, v0\n    v_mov_b32_e32 v9, 0\n    ds_write_b32 v9, v9\n",
    )
    with pytest.raises(gcn.Race, match="writes byte 0, which wave"):
        run(assemble(text, lds_bytes=1024), order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_neighbouring_halves_of_a_dword_are_not_a_race(assemble: Any, order: str) -> None:
    """fp16 stores of two waves may share a dword: the detector keeps bytes."""
    text = """
        v_lshrrev_b32_e32 v2, 6, v0
        v_and_b32_e32 v3, 63, v0
        v_lshlrev_b32_e32 v3, 2, v3
        v_lshl_add_u32 v3, v2, 1, v3
        ds_write_b16 v3, v0
        ds_read_u16 v4, v3
        s_endpgm
    """
    run(assemble(text, lds_bytes=256), items=128, order=order)
    whole = text.replace("ds_read_u16 v4, v3", "v_and_b32_e32 v3, 0xfc, v3\n ds_read_b32 v4, v3")
    with pytest.raises((gcn.Race, gcn.UninitialisedRead)):
        run(assemble(whole, lds_bytes=256), items=128, order=order)


def test_atomics_of_different_waves_do_not_race_but_a_plain_read_does(assemble: Any) -> None:
    text = """
        v_mov_b32_e32 v3, 0
        v_cmp_eq_u32_e32 vcc, 0, v0
        s_and_saveexec_b64 s[4:5], vcc
        ds_write_b32 v3, v3
        s_mov_b64 exec, s[4:5]
        s_waitcnt lgkmcnt(0)
        s_barrier
        ds_add_u32 v3, v0
        READ
        s_waitcnt lgkmcnt(0)
        s_barrier
        ds_read_b32 v5, v3
        s_load_dwordx2 s[8:9], s[0:1], 0x0
        v_lshlrev_b32_e32 v3, 2, v0
        s_waitcnt lgkmcnt(0)
        global_store_dword v3, v5, s[8:9]
        s_endpgm
    """
    target, _ = run(assemble(text.replace("READ", "s_nop 0"), lds_bytes=4))
    assert [256 * 255 // 2] * 256 == target.tolist()
    with pytest.raises(gcn.Race):
        run(assemble(text.replace("READ", "ds_read_b32 v7, v3"), lds_bytes=4))


@pytest.mark.parametrize(
    ("name", "old", "new", "error", "match"),
    [
        ("lds out of bounds", "ds_write_b32 v3, v0", "ds_write_b32 v3, v0 offset:4", gcn.MemoryFault, "outside the workgroup's 1024 bytes"),
        ("lds misaligned", "ds_read_b32 v5, v4", "ds_read_b32 v5, v4 offset:2", gcn.MemoryFault, "misaligned LDS access|outside the workgroup"),
        ("lds uninitialised", "ds_write_b32 v3, v0", "ds_write_b16 v3, v0", gcn.UninitialisedRead, "LDS read of byte \\d+, which nothing wrote"),
        ("global out of bounds", "s[8:9]\n    s_endpgm", "s[8:9] offset:4\n    s_endpgm", gcn.MemoryFault, "byte 1024 of|0 bytes past the end of target|past the end of target"),
        ("global before the start", "s[8:9]\n    s_endpgm", "s[8:9] offset:-4\n    s_endpgm", gcn.MemoryFault, "out of bounds access of 4 bytes"),
        ("global misaligned", "s[8:9]\n    s_endpgm", "s[8:9] offset:2\n    s_endpgm", gcn.MemoryFault, "misaligned access of 4 bytes: .* not a multiple of 4"),
        ("lds wait missing", "    s_waitcnt lgkmcnt(0)\n    global", "    global", gcn.Hazard, "v5: used before s_waitcnt lgkmcnt covers 'ds_read_b32 v5, v4'"),
        ("scalar wait missing", "    s_waitcnt lgkmcnt(0)\n    s_barrier\n", "    s_barrier\n", gcn.Hazard, "s_barrier with an LDS operation in flight"),
        ("unknown", "v_xor_b32_e32 v4", "v_cvt_off_f32_i4_e32 v9, v9\n v_xor_b32_e32 v4", gcn.UnknownInstruction, "unknown instruction 'v_cvt_off_f32_i4_e32' .at 0x1014"),
    ],
)  # fmt: skip
def test_a_planted_mistake_is_stopped_and_named(
    assemble: Any, name: str, old: str, new: str, error: type[Exception], match: str
) -> None:
    assert old in EXCHANGE
    with pytest.raises(error, match=match):
        run(assemble(EXCHANGE.replace(old, new, 1), lds_bytes=1024))


def test_an_error_names_instruction_address_and_wave(assemble: Any) -> None:
    code = assemble(EXCHANGE.replace("s[8:9]\n", "s[8:9] offset:4\n"), lds_bytes=1024)
    with pytest.raises(gcn.Fault) as caught:
        run(code, order="forward")
    assert (0x1020, "workgroup (0, 0, 0), wave 3") == (caught.value.address, caught.value.wave)
    assert "global_store_dword v3, v5, s[8:9] offset:4" in str(caught.value)


def test_a_store_to_a_read_only_array_is_an_error(assemble: Any) -> None:
    code = assemble(EXCHANGE, lds_bytes=1024)
    memory, target = gcn.Memory(), np.zeros(256, np.uint32)
    base = memory.place(target, name="q", writable=False)
    with pytest.raises(gcn.MemoryFault, match="store to q, which is read-only"):
        gcn.launch(
            code, "k", grid=(1, 1, 1), block=(256, 1, 1), kernarg=struct.pack("<QQ", base, 0), memory=memory
        )


SHARED = """
    s_load_dwordx2 s[8:9], s[0:1], 0x0
    s_lshl_b32 s5, s2, {shift}
    v_lshl_add_u32 v3, v0, 2, s5
    s_waitcnt lgkmcnt(0)
    {body}
    s_endpgm
"""


@pytest.mark.parametrize(
    ("body", "shift", "match"),
    [
        ("global_store_dword v3, v0, s[8:9]", 8, None),
        ("global_store_dword v3, v0, s[8:9]", 7, r"global race: workgroup \(\d, 0, 0\) writes byte \d+ of target, which workgroup \(\d, 0, 0\) wrote in this launch"),
        ("global_store_short v3, v0, s[8:9]\nglobal_store_byte v3, v0, s[8:9] offset:3", 8, None),
        ("global_load_dword v4, v3, s[8:9] offset:256\nglobal_store_dword v3, v0, s[8:9]", 8, "global race: .* (reads|writes) byte"),
        ("global_load_dword v4, v3, s[8:9]\nglobal_store_dword v3, v0, s[8:9]", 8, None),
        ("global_load_dword v4, v3, s[8:9]", 7, None),
        ("global_atomic_add v3, v0, s[8:9]", 7, None),
        ("global_atomic_add v3, v0, s[8:9]\nglobal_load_dword v4, v3, s[8:9]", 7, "global race: .* reads byte"),
        ("s_load_dword s10, s[8:9], 0x0\nglobal_store_dword v3, v0, s[8:9]", 8, "global race"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("order", ["lockstep", "forward"])
def test_workgroups_that_share_bytes_race(
    assemble: Any, body: str, shift: int, match: str | None, order: str
) -> None:
    """A tile that writes rows of its neighbour: the result can be right and the kernel wrong."""
    memory, target = gcn.Memory(), np.zeros(64 * 5, np.uint32)
    kernarg = struct.pack("<QQ", memory.place(target, name="target"), 0)
    code = assemble(SHARED.format(shift=shift, body=body))
    options: dict[str, Any] = {
        "grid": (4, 1, 1),
        "block": (64, 1, 1),
        "kernarg": kernarg,
        "memory": memory,
        "order": order,
    }
    gcn.launch(code, "k", **options, races=False)
    if match is None:
        gcn.launch(code, "k", **options)
        gcn.launch(code, "k", **options)
        return
    with pytest.raises(gcn.Race, match=match):
        gcn.launch(code, "k", **options)


def test_reading_reserved_memory_before_a_store_is_an_error(assemble: Any) -> None:
    text = LOAD + "global_load_dword v5, v3, s[8:9]\ns_endpgm"
    memory = gcn.Memory()
    base = memory.reserve(1024, "partial")
    kernarg = struct.pack("<QQ", base, 0)
    with pytest.raises(gcn.UninitialisedRead, match="load of partial\\[byte 0\\], which nothing wrote"):
        gcn.launch(assemble(text), "k", grid=(1, 1, 1), block=(256, 1, 1), kernarg=kernarg, memory=memory)
    store = assemble(LOAD + "global_store_dword v3, v3, s[8:9]\ns_endpgm")
    for code in (store, assemble(text)):
        gcn.launch(code, "k", grid=(1, 1, 1), block=(256, 1, 1), kernarg=kernarg, memory=memory)


@pytest.mark.parametrize(
    ("count", "offset", "dword", "natural"),
    [(4, 8, True, False), (4, 16, True, True), (2, 4, True, False), (4, 2, False, False)],
)
def test_natural_alignment_asks_for_the_full_width(
    assemble: Any, count: int, offset: int, dword: bool, natural: bool
) -> None:
    text = f"s_load_dwordx2 s[8:9], s[0:1], 0x0\nv_mov_b32_e32 v3, {offset}\ns_waitcnt lgkmcnt(0)\nglobal_load_dwordx{count} v[4:{3 + count}], v3, s[8:9]\ns_endpgm"
    for rule, fits in (("dword", dword), ("natural", natural)):
        if fits:
            run(assemble(text), items=64, alignment=rule)
        else:
            with pytest.raises(gcn.MemoryFault, match="misaligned"):
                run(assemble(text), items=64, alignment=rule)


WAITS = """
    s_load_dwordx2 s[8:9], s[0:1], 0x0
    v_lshlrev_b32_e32 v3, 2, v0
    s_waitcnt lgkmcnt(0)
    global_load_dword v4, v3, s[8:9]
    global_load_dword v5, v3, s[8:9]
    s_waitcnt vmcnt(1)
    v_add_u32_e32 v6, 1, v4
    {}
    s_endpgm
"""


@pytest.mark.parametrize(
    ("tail", "match"),
    [
        ("v_add_u32_e32 v7, 1, v6", None),
        ("v_add_u32_e32 v7, 1, v5", "v5: used before s_waitcnt vmcnt"),
        ("v_mov_b32_e32 v5, 0", "v5: used before s_waitcnt vmcnt"),
        ("global_store_dword v3, v5, s[8:9]", "v5: used before"),
        ("s_waitcnt vmcnt(0)\nv_add_u32_e32 v7, 1, v5", None),
        ("s_waitcnt lgkmcnt(0)\nv_add_u32_e32 v7, 1, v5", "v5: used before s_waitcnt vmcnt"),
        # a later store counts too: one operation may stay in flight, and that is the store
        ("global_store_dword v3, v6, s[8:9]\ns_waitcnt vmcnt(1)\nv_add_u32_e32 v7, 1, v5", None),
        ("s_load_dwordx2 s[10:11], s[0:1], 0x0\ns_waitcnt vmcnt(0)\ns_add_u32 s10, s10, 1", "s10: used before s_waitcnt lgkmcnt"),
        ("s_load_dword s10, s[0:1], 0x0\ns_load_dword s11, s[0:1], 0x0\ns_waitcnt lgkmcnt(1)\ns_add_u32 s10, s10, 1", "s10: used before"),
        ("s_load_dword s10, s[0:1], 0x0\ns_load_dword s11, s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\ns_add_u32 s10, s10, s11", None),
        ("ds_write_b32 v3, v3\nds_read_b32 v7, v3\nds_read_b32 v8, v3\ns_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v9, v7", None),
        ("ds_write_b32 v3, v3\nds_read_b32 v7, v3\nds_read_b32 v8, v3\ns_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v9, v8", "v8: used before"),
        # a scalar load among them may come back first: then only lgkmcnt(0) says anything
        ("ds_write_b32 v3, v3\nds_read_b32 v7, v3\ns_load_dword s10, s[0:1], 0x0\ns_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v9, v7", "v7: used before"),
        ("ds_bpermute_b32 v7, v3, v3\nv_mov_b32_e32 v9, v7", "v7: used before s_waitcnt lgkmcnt"),
    ],
)  # fmt: skip
def test_the_scoreboard_follows_both_counters(assemble: Any, tail: str, match: str | None) -> None:
    code = assemble(WAITS.format(tail), lds_bytes=1024)
    if match is None:
        run(code)
        return
    with pytest.raises(gcn.Hazard, match=match):
        run(code)


def test_the_scoreboard_keeps_what_each_path_left_in_flight(assemble: Any) -> None:
    """Wave 0 branches over the wait; it meets the others again with its load still open."""
    text = (
        LOAD
        + """
        v_readfirstlane_b32 s6, v0
        global_load_dword v4, v3, s[8:9]
        s_cmp_eq_u32 s6, {}
        s_cbranch_scc1 over
        s_waitcnt vmcnt(0)
        over:
        s_nop 0
        v_add_u32_e32 v5, 1, v4
        s_endpgm
    """
    )
    run(assemble(text.format(1)))
    for order in ORDERS:
        with pytest.raises(gcn.Hazard, match="v4: used before s_waitcnt vmcnt"):
            run(assemble(text.format(0)), order=order)


DIVERGED = (
    LOAD
    + """
    v_readfirstlane_b32 s6, v0
    s_cmp_eq_u32 s6, 0
    s_cbranch_scc1 other
    s_barrier
    {}
    other:
    {}
    s_endpgm
"""
)


@pytest.mark.parametrize("order", ORDERS)
def test_waves_at_different_barriers_are_a_divergence(assemble: Any, order: str) -> None:
    with pytest.raises(
        gcn.BarrierDivergence, match="its waves wait at different barriers: 0x1018 and 0x1020"
    ):
        run(assemble(DIVERGED.format("s_endpgm", "s_barrier")), order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_a_wave_that_ends_before_a_barrier_is_a_divergence(assemble: Any, order: str) -> None:
    with pytest.raises(gcn.BarrierDivergence, match="wave 0 has ended"):
        run(assemble(DIVERGED.format("s_nop 0", "s_nop 0")), order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_waves_that_part_and_meet_again_compute_their_own_paths(assemble: Any, order: str) -> None:
    """Each wave loops as often as its number says; lanes leave an inner loop one by one."""
    text = (
        LOAD
        + """
        v_readfirstlane_b32 s6, v0
        s_lshr_b32 s6, s6, 6
        v_mov_b32_e32 v4, 0
        outer:
        v_and_b32_e32 v5, 7, v0
        s_mov_b64 s[10:11], exec
        inner:
        v_add_u32_e32 v4, 1, v4
        v_add_u32_e32 v5, -1, v5
        v_cmp_lt_i32_e32 vcc, 0, v5
        s_and_b64 exec, exec, vcc
        s_cbranch_execnz inner
        s_mov_b64 exec, s[10:11]
        s_sub_i32 s6, s6, 1
        s_cmp_ge_i32 s6, 0
        s_cbranch_scc1 outer
        global_store_dword v3, v4, s[8:9]
        s_endpgm
    """
    )
    target, counts = run(assemble(text), order=order)
    assert [(item // 64 + 1) * max(1, item % 8) for item in range(256)] == target.tolist()
    assert (1 + 2 + 3 + 4) * 7 == counts.executed[0x1000 + 4 * 9]


def test_every_work_item_finds_its_place_in_grid_and_block(assemble: Any) -> None:
    """Registers at entry: kernarg pointer, workgroup ids, work item ids; the tail of the last wave is inactive."""
    text = """
        s_load_dwordx2 s[8:9], s[0:1], 0x0
        s_mul_i32 s5, s4, 6
        s_mul_i32 s6, s3, 2
        s_add_i32 s5, s5, s6
        s_add_i32 s5, s5, s2
        s_mul_i32 s5, s5, 90
        v_mul_u32_u24_e32 v4, 30, v2
        v_mul_u32_u24_e32 v5, 5, v1
        v_add3_u32 v4, v4, v5, v0
        v_add_u32_e32 v4, s5, v4
        v_lshlrev_b32_e32 v3, 2, v4
        s_waitcnt lgkmcnt(0)
        global_store_dword v3, v4, s[8:9]
        s_endpgm
    """
    for order in ORDERS:
        memory, target = gcn.Memory(), np.full(2 * 3 * 2 * 90, 0xFFFFFFFF, np.uint32)
        kernarg = struct.pack("<QQ", memory.place(target), 0)
        gcn.launch(
            assemble(text), "k", grid=(2, 3, 2), block=(5, 6, 3), kernarg=kernarg, memory=memory, order=order
        )
        assert list(range(len(target))) == target.tolist()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kernel": "other"}, "kernel: expected one of \\['k'\\], got 'other'"),
        ({"block": (512, 1, 1)}, "block: expected at most 256 work items, got 512"),
        ({"kernarg": b"1234"}, None),
        ({"kernarg": bytes(40)}, "kernarg: expected 0 to 16 bytes, got 40 bytes"),
        ({"order": "sideways"}, "order: expected one of"),
        ({"grid": (0, 1, 1)}, "grid, block: expected three sizes of at least 1"),
        ({"alignment": "page"}, "alignment: expected 'dword' or 'natural', got 'page'"),
    ],
)
def test_a_wrong_launch_is_refused_by_name(assemble: Any, change: dict[str, Any], match: str | None) -> None:
    code = assemble("s_endpgm")
    options: dict[str, Any] = {
        "kernel": "k",
        "grid": (1, 1, 1),
        "block": (64, 1, 1),
        "kernarg": bytes(16),
        "memory": gcn.Memory(),
        **change,
    }
    if match is None:
        gcn.launch(code, **options)
        return
    with pytest.raises(ValueError, match=match):
        gcn.launch(code, **options)
