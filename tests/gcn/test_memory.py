"""Loads and stores of global memory, LDS and scalar memory: the bytes that move, in every width and form."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pytest

from attnproof import gcn

LANES = list(range(64))
M32 = (1 << 32) - 1


def split(addresses: list[int]) -> tuple[list[int], list[int]]:
    return [address & M32 for address in addresses], [address >> 32 for address in addresses]


def data(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).integers(0, 256, count, np.uint8)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("saddr", [False, True])
def test_a_global_load_brings_dwords(execute: Any, count: int, saddr: bool) -> None:
    """Vector address, or scalar base plus 32-bit lane offset; the immediate offset may be negative."""
    memory = gcn.Memory()
    raw = data(4096)
    base = memory.place(raw)
    offsets = [16 * (lane * 7 % 64) + 64 for lane in LANES]
    name = "dword" if count == 1 else f"dwordx{count}"
    target = "v8" if count == 1 else f"v[8:{7 + count}]"
    if saddr:
        text, v = f"global_load_{name} {target}, v0, s[2:3] offset:-64", {0: offsets}
    else:
        low, high = split([base + offset for offset in offsets])
        text, v = f"global_load_{name} {target}, v[0:1], off offset:-64", {0: low, 1: high}
    state = execute(text, v, {2: base & M32, 3: base >> 32}, memory=memory)
    for k in range(count):
        at = [offset - 64 + 4 * k for offset in offsets]
        assert [int.from_bytes(raw[a : a + 4].tobytes(), "little") for a in at] == state.vector(8 + k)


NARROW = {
    "ubyte": lambda b, s, old: b,
    "sbyte": lambda b, s, old: (b - ((b >> 7) << 8)) & M32,
    "ushort": lambda b, s, old: s,
    "sshort": lambda b, s, old: (s - ((s >> 15) << 16)) & M32,
    "short_d16": lambda b, s, old: old & 0xFFFF0000 | s,
    "short_d16_hi": lambda b, s, old: old & 0xFFFF | s << 16,
    "ubyte_d16": lambda b, s, old: old & 0xFFFF0000 | b,
    "ubyte_d16_hi": lambda b, s, old: old & 0xFFFF | b << 16,
    "sbyte_d16": lambda b, s, old: old & 0xFFFF0000 | (b - ((b >> 7) << 8)) & 0xFFFF,
    "sbyte_d16_hi": lambda b, s, old: old & 0xFFFF | ((b - ((b >> 7) << 8)) & 0xFFFF) << 16,
}


@pytest.mark.parametrize("name", NARROW)
def test_a_narrow_load_extends_or_keeps_the_other_half(execute: Any, name: str) -> None:
    memory = gcn.Memory()
    raw = data(128)
    base = memory.place(raw)
    state = execute(
        f"global_load_{name} v8, v0, s[2:3]",
        {0: [2 * k for k in LANES], 8: 0xABCD1234},
        {2: base, 3: base >> 32},
        memory=memory,
    )
    expected = [
        NARROW[name](int(raw[2 * k]), int(raw[2 * k]) | int(raw[2 * k + 1]) << 8, 0xABCD1234) for k in LANES
    ]
    assert expected == state.vector(8)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_global_store_writes_the_active_lanes_into_the_array(execute: Any, count: int) -> None:
    memory = gcn.Memory()
    target = np.full(64 * 4, 9, np.uint32)
    base = memory.place(target, name="target")
    active = random.Random(1).getrandbits(64)
    low, high = split([base + 16 * lane for lane in LANES])
    values = {8 + k: [100 * k + lane for lane in LANES] for k in range(count)}
    name, source = ("dword", "v8") if count == 1 else (f"dwordx{count}", f"v[8:{7 + count}]")
    execute(
        f"global_store_{name} v[0:1], {source}, off",
        {0: low, 1: high, **values},
        exec_mask=active,
        memory=memory,
    )
    expected = [
        [100 * k + lane if k < count and active >> lane & 1 else 9 for k in range(4)] for lane in LANES
    ]
    assert expected == target.reshape(64, 4).tolist()
    assert target is memory.read(base)


@pytest.mark.parametrize(
    ("name", "size", "shift"),
    [("byte", 1, 0), ("short", 2, 0), ("short_d16_hi", 2, 16), ("byte_d16_hi", 1, 16)],
)
def test_a_narrow_store_writes_only_its_bytes(execute: Any, name: str, size: int, shift: int) -> None:
    memory = gcn.Memory()
    target = np.zeros(256, np.uint8)
    base = memory.place(target)
    words = [random.Random(k).getrandbits(32) for k in LANES]
    execute(
        f"global_store_{name} v0, v8, s[2:3] offset:2",
        {0: [4 * k for k in range(63)] + [0], 8: words[:63] + words[:1]},
        {2: base, 3: base >> 32},
        memory=memory,
    )
    expected = bytearray(256)
    for k in range(63):
        expected[4 * k + 2 : 4 * k + 2 + size] = (words[k] >> shift & (1 << 8 * size) - 1).to_bytes(
            size, "little"
        )
    assert bytes(expected) == target.tobytes()


def test_accesses_of_one_instruction_may_lie_in_different_allocations(execute: Any) -> None:
    memory = gcn.Memory()
    bases = [memory.place(np.arange(64, dtype=np.uint32) + 1000 * k, name=f"part {k}") for k in range(3)]
    low, high = split([bases[lane % 3] + 4 * lane for lane in LANES])
    state = execute(
        "global_load_dword v8, v[0:1], off\nglobal_store_dword v[0:1], v9, off",
        {0: low, 1: high, 9: 5},
        memory=memory,
    )
    assert [1000 * (lane % 3) + lane for lane in LANES] == state.vector(8)
    assert 5 == int(memory.read(bases[2])[62])


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("add", lambda old, new: old + new), ("sub", lambda old, new: old - new), ("umax", max), ("umin", min),
        ("and", lambda old, new: old & new), ("or", lambda old, new: old | new), ("xor", lambda old, new: old ^ new),
        ("swap", lambda old, new: new),
        ("smax", lambda old, new: max(old, new, key=lambda w: w - (w >> 31 << 32))),
        ("smin", lambda old, new: min(old, new, key=lambda w: w - (w >> 31 << 32))),
    ],
)  # fmt: skip
def test_a_global_atomic_works_lane_after_lane(execute: Any, name: str, function: Any) -> None:
    memory = gcn.Memory()
    target = np.array([5, 0x80000000, 77, 1], np.uint32)
    base = memory.place(target)
    words = [random.Random(k).getrandbits(32) for k in LANES]
    expected, olds = [5, 0x80000000, 77, 1], []
    for lane in LANES:
        olds.append(expected[lane % 4])
        expected[lane % 4] = function(expected[lane % 4], words[lane]) & M32
    state = execute(
        f"global_atomic_{name} v9, v0, v8, s[2:3] glc",
        {0: [4 * (k % 4) for k in LANES], 8: words},
        {2: base, 3: base >> 32},
        memory=memory,
    )
    assert (expected, olds) == (target.tolist(), state.vector(9))


def test_compare_and_swap_stores_where_the_old_value_matches(execute: Any) -> None:
    memory = gcn.Memory()
    target = np.arange(64, dtype=np.uint32)
    base = memory.place(target)
    v = {0: [4 * k for k in LANES], 8: 900, 9: [k if k % 2 else 5000 for k in LANES]}
    state = execute(
        "global_atomic_cmpswap v10, v0, v[8:9], s[2:3] glc", v, {2: base, 3: base >> 32}, memory=memory
    )
    assert [900 if k % 2 else k for k in LANES] == target.tolist()
    assert LANES == state.vector(10)


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_a_scalar_load_fills_consecutive_registers(execute: Any, count: int) -> None:
    memory = gcn.Memory()
    words = np.arange(64, dtype=np.uint32) + 500
    base = memory.place(words)
    name, target = ("s_load_dword", "s8") if count == 1 else (f"s_load_dwordx{count}", f"s[8:{7 + count}]")
    for offset, s in (("0x10", {}), ("s4", {4: 16}), ("s4", {4: 18})):
        state = execute(
            f"{name} {target}, s[2:3], {offset}", {}, {2: base, 3: base >> 32, **s}, memory=memory
        )
        assert [504 + k for k in range(count)] == [state.scalar(8 + k) for k in range(count)]


def test_a_scalar_buffer_load_reads_zero_past_the_end(execute: Any) -> None:
    memory = gcn.Memory()
    base = memory.place(np.arange(64, dtype=np.uint32) + 500)
    s = {4: base, 5: base >> 32, 6: 3 * 4, 7: 0}
    state = execute("s_buffer_load_dwordx4 s[8:11], s[4:7], 0x4", {}, s, memory=memory)
    assert [501, 502, 0, 0] == [state.scalar(8 + k) for k in range(4)]


SIZES = {"b32": 4, "b64": 8, "b96": 12, "b128": 16}


@pytest.mark.parametrize("kind", SIZES)
def test_an_lds_write_and_read_move_the_same_bytes(execute: Any, kind: str) -> None:
    size = SIZES[kind]
    count, active = size // 4, random.Random(1).getrandbits(64)
    values = {8 + k: [1000 * k + lane for lane in LANES] for k in range(count)}
    last = "" if count == 1 else f":{7 + count}"
    source, target = (f"v[8{last}]", f"v[16:{15 + count}]") if count > 1 else ("v8", "v16")
    order = [16 * (lane * 5 % 64) for lane in LANES]
    text = f"ds_write_{kind} v0, {source} offset:32\nds_read_{kind} {target}, v0 offset:32"
    state = execute(
        text, {0: order, **values, **{16 + k: 7 for k in range(4)}}, exec_mask=active, lds=bytes(16 * 64 + 32)
    )
    for k in range(count):
        assert [values[8 + k][lane] if active >> lane & 1 else 7 for lane in LANES] == state.vector(16 + k)
    stored = state.machine.lds.data.raw.tobytes()
    lane = next(lane for lane in LANES if active >> lane & 1)
    assert (
        struct.pack(f"<{count}I", *(values[8 + k][lane] for k in range(count)))
        == stored[order[lane] + 32 : order[lane] + 32 + size]
    )


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("u8", lambda b, s, old: b), ("i8", lambda b, s, old: (b - ((b >> 7) << 8)) & M32),
        ("u16", lambda b, s, old: s), ("i16", lambda b, s, old: (s - ((s >> 15) << 16)) & M32),
        ("u16_d16", lambda b, s, old: old & 0xFFFF0000 | s), ("u16_d16_hi", lambda b, s, old: old & 0xFFFF | s << 16),
        ("u8_d16", lambda b, s, old: old & 0xFFFF0000 | b), ("u8_d16_hi", lambda b, s, old: old & 0xFFFF | b << 16),
    ],
)  # fmt: skip
def test_a_narrow_lds_read_extends_or_keeps_the_other_half(execute: Any, name: str, function: Any) -> None:
    raw = data(128)
    state = execute(f"ds_read_{name} v8, v0", {0: [2 * k for k in LANES], 8: 0xABCD1234}, lds=raw.tobytes())
    expected = [
        function(int(raw[2 * k]), int(raw[2 * k]) | int(raw[2 * k + 1]) << 8, 0xABCD1234) for k in LANES
    ]
    assert expected == state.vector(8)


@pytest.mark.parametrize(
    ("name", "size", "shift"), [("b8", 1, 0), ("b16", 2, 0), ("b8_d16_hi", 1, 16), ("b16_d16_hi", 2, 16)]
)
def test_a_narrow_lds_write_leaves_its_neighbours(execute: Any, name: str, size: int, shift: int) -> None:
    words = [random.Random(k).getrandbits(32) for k in LANES]
    state = execute(
        f"ds_write_{name} v0, v8 offset:2", {0: [4 * k for k in LANES], 8: words}, lds=bytes([255] * 258)
    )
    expected = bytearray([255] * 258)
    for k in LANES:
        expected[4 * k + 2 : 4 * k + 2 + size] = (words[k] >> shift & (1 << 8 * size) - 1).to_bytes(
            size, "little"
        )
    assert bytes(expected) == state.machine.lds.data.raw[:258].tobytes()


@pytest.mark.parametrize("kind", ["b32", "b64"])
@pytest.mark.parametrize("far", [False, True])
def test_a_two_address_form_counts_its_offsets_in_elements(execute: Any, kind: str, far: bool) -> None:
    """ST64 in 64 elements."""
    size, count = SIZES[kind], SIZES[kind] // 4
    pitch = size * (64 if far else 1)
    raw = bytes(data(size * 64 * 4 + 2048))
    st = "st64" if far else ""
    v = {
        0: [size * k for k in LANES],
        **{8 + k: [10_000 * k + lane for lane in LANES] for k in range(2 * count)},
    }
    first, second = ("v8", "v9") if count == 1 else ("v[8:9]", "v[10:11]")
    last = 15 + 2 * count
    write = f"ds_write2{st}_{kind} v0, {first}, {second} offset0:1 offset1:3"
    read = f"ds_read2{st}_{kind} v[16:{last}], v0 offset0:1 offset1:3"
    if not far:
        # neighbours overlap at small offsets: one lane alone
        state = execute(f"{write}\n{read}", v, exec_mask=1, lds=raw)
        assert [v[8 + k][0] for k in range(2 * count)] == [state.vector(16 + k)[0] for k in range(2 * count)]
        stored = state.machine.lds.data.raw.tobytes()
        assert v[8][0] == int.from_bytes(stored[pitch : pitch + 4], "little")
        assert v[8 + count][0] == int.from_bytes(stored[3 * pitch : 3 * pitch + 4], "little")
        return
    state = execute(f"{write}\n{read}", v, lds=raw)
    assert all(v[8 + k] == state.vector(16 + k) for k in range(2 * count))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("add_u32", lambda old, new: old + new), ("sub_u32", lambda old, new: old - new), ("max_u32", max),
        ("min_u32", min), ("or_b32", lambda old, new: old | new), ("and_b32", lambda old, new: old & new),
        ("xor_b32", lambda old, new: old ^ new), ("wrxchg_rtn_b32", lambda old, new: new),
        ("add_rtn_u32", lambda old, new: old + new), ("rsub_u32", lambda old, new: new - old),
        ("max_i32", lambda old, new: max(old, new, key=lambda w: w - (w >> 31 << 32))),
    ],
)  # fmt: skip
def test_an_lds_atomic_works_lane_after_lane(execute: Any, name: str, function: Any) -> None:
    words = [random.Random(k).getrandbits(32) for k in LANES]
    expected, olds = [5, 0x80000000], []
    for lane in LANES:
        olds.append(expected[lane % 2])
        expected[lane % 2] = function(expected[lane % 2], words[lane]) & M32
    text = f"ds_{name} v9, v0, v8" if "rtn" in name else f"ds_{name} v0, v8"
    state = execute(text, {0: [4 * (k % 2) for k in LANES], 8: words}, lds=struct.pack("<2I", 5, 0x80000000))
    assert expected == list(struct.unpack("<2I", state.machine.lds.data.raw[:8].tobytes()))
    if "rtn" in name:
        assert olds == state.vector(9)


def test_an_lds_float_atomic_adds_in_lane_order(execute: Any) -> None:
    values = [float(2**k) for k in range(20)] + [0.5] * 44
    words = [struct.unpack("<I", struct.pack("<f", value))[0] for value in values]
    state = execute("ds_add_f32 v0, v8", {0: 0, 8: words}, lds=struct.pack("<f", 1.0))
    assert 1.0 + sum(values) == struct.unpack("<f", state.machine.lds.data.raw[:4].tobytes())[0]


def test_reserved_memory_can_be_read_once_it_is_written(execute: Any) -> None:
    memory = gcn.Memory()
    base = memory.reserve(256, "partial")
    with pytest.raises(gcn.UninitialisedRead, match="partial\\[byte 0\\]"):
        memory.read(base)
    execute(
        "global_store_dword v0, v8, s[2:3]",
        {0: [4 * k for k in LANES], 8: LANES},
        {2: base, 3: base >> 32},
        memory=memory,
    )
    assert LANES == memory.read(base, (64,), np.uint32).tolist()


def test_an_array_that_is_not_contiguous_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="q: expected a C-contiguous array"):
        gcn.Memory().place(np.zeros((4, 4)).T, name="q")
