"""Reading a code object: the container, the metadata note, the text fixture, and what is said about anything else."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from attnproof import gcn
from attnproof.errors import BackendMissing
from attnproof.gcn import codeobject
from attnproof.gcn.msgpack import unpack

KERNEL = {
    ".name": "k", ".symbol": "k.kd", ".vgpr_count": 9, ".sgpr_count": 12, ".vgpr_spill_count": 1, ".sgpr_spill_count": 2,
    ".group_segment_fixed_size": 640, ".private_segment_fixed_size": 16, ".kernarg_segment_size": 300, ".wavefront_size": 64,
    ".max_flat_workgroup_size": 256, ".args": [{".offset": 0, ".size": 8, ".value_kind": "global_buffer"}],
}  # fmt: skip


def pack(value: Any) -> bytes:
    """Msgpack, in its longest forms where the reader must know them."""
    if isinstance(value, dict):
        return (
            b"\xde"
            + struct.pack(">H", len(value))
            + b"".join(pack(x) for pair in value.items() for x in pair)
        )
    if isinstance(value, list):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(pack, value))
    if isinstance(value, str):
        return b"\xd9" + bytes([len(value.encode())]) + value.encode()
    return b"\xcd" + struct.pack(">H", value)


def elf(metadata: bytes, name: bytes = b"AMDGPU") -> bytes:
    """A code object of five sections: null, note, descriptors, symbols, strings."""
    note = (
        struct.pack("<III", len(name) + 1, len(metadata), 32)
        + (name + b"\0").ljust(8, b"\0")
        + metadata.ljust(-(-len(metadata) // 4) * 4, b"\0")
    )
    descriptor = bytearray(64)
    struct.pack_into("<IIIxxxxq", descriptor, 0, 640, 16, 300, 0x1000)
    struct.pack_into("<IIH", descriptor, 48, 0xAF0000, 0x38C, 9)
    strings = b"\0k\0k.kd\0"
    symbols = (
        bytes(24)
        + struct.pack("<IBBHQQ", 1, 0x12, 3, 2, 0x1500, 8)
        + struct.pack("<IBBHQQ", 3, 0x11, 3, 2, 0x500, 64)
    )
    parts, offset, table = [note, bytes(descriptor), symbols, strings], 64, []
    for part, (kind, address, link, entry) in zip(
        parts, [(7, 0, 0, 0), (1, 0x500, 0, 0), (11, 0, 4, 24), (3, 0, 0, 0)], strict=True
    ):
        table.append(struct.pack("<IIQQQQIIQQ", 0, kind, 0, address, offset, len(part), link, 0, 1, entry))
        offset += len(part)
    head = b"\x7fELF\x02\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 224, 1, 0, 0, offset, 0x2F, 64, 0, 0, 64, 5, 0
    )
    return head + b"".join(parts) + bytes(64) + b"".join(table)


@pytest.fixture
def no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codeobject, "_disassemble", lambda data: "")


@pytest.mark.parametrize(
    ("target", "processor"),
    [
        ("amdgcn-amd-amdhsa--gfx906", "gfx906"), ("amdgcn-amd-amdhsa--gfx906:sramecc+:xnack-", "gfx906"),
        ("amdgpu9.06-amd-amdhsa-unknown-gfx906", "gfx906"), ("amdgcn-amd-amdhsa--gfx90a", "gfx90a"), ("", "gfx906"),
    ],
)  # fmt: skip
def test_metadata_and_descriptor_are_read(no_tool: None, target: str, processor: str) -> None:
    code = gcn.CodeObject.load(elf(pack({"amdhsa.kernels": [KERNEL], "amdhsa.target": target})))
    kernel = code.kernels["k"]
    assert processor == code.target
    assert ("k", 9, 12, 1, 2, 640, 16) == (
        kernel.name, kernel.vgprs, kernel.sgprs, kernel.vgpr_spills, kernel.sgpr_spills, kernel.lds_bytes, kernel.scratch_bytes,
    )  # fmt: skip
    assert (300, 64, 256, 0x1500) == (
        kernel.kernarg_size,
        kernel.wavefront_size,
        kernel.max_flat_workgroup_size,
        kernel.entry,
    )
    assert (6, False, False, 9) == (
        kernel.user_sgprs,
        kernel.flushes_f32,
        kernel.flushes_f16,
        kernel.properties,
    )
    assert ({".offset": 0, ".size": 8, ".value_kind": "global_buffer"},) == kernel.arguments


def test_a_text_fixture_gives_back_what_it_was_made_from(no_tool: None) -> None:
    code = gcn.CodeObject.load(
        elf(pack({"amdhsa.kernels": [KERNEL], "amdhsa.target": "amdgcn-amd-amdhsa--gfx906"}))
    )
    again = gcn.CodeObject.from_text(code.to_text())
    assert code == again
    assert "k" in json.loads(code.to_text().splitlines()[0].partition("fixture 1 ")[2])["kernels"][0]["name"]


@pytest.mark.parametrize("data", [b"", b"__CLANG_OFFLOAD_BUNDLE__", b"\x7fELF\x01\x01" + bytes(60)])
def test_what_is_not_a_code_object_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(ValueError, match="data: expected a little-endian ELF64 code object, got"):
        gcn.CodeObject.load(data)


def test_a_code_object_without_its_note_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a code object with a metadata note"):
        gcn.CodeObject.load(elf(pack({}), name=b"OTHERS"))


def test_text_that_is_not_a_fixture_is_refused() -> None:
    with pytest.raises(ValueError, match="text: expected a first line that starts with"):
        gcn.CodeObject.from_text("s_endpgm")


def test_without_a_disassembler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codeobject, "find_objdump", lambda: None)
    with pytest.raises(BackendMissing, match="llvm-objdump: expected on PATH .* CodeObject.from_text"):
        gcn.CodeObject.load(
            elf(pack({"amdhsa.kernels": [KERNEL], "amdhsa.target": "amdgcn-amd-amdhsa--gfx906"}))
        )


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x05", 5), (b"\xff", -1), (b"\xcc\xc8", 200), (b"\xcd\x01\x00", 256), (b"\xce\x00\x01\x00\x00", 65536),
        (b"\xcf" + bytes(7) + b"\x09", 9), (b"\xd0\x80", -128), (b"\xd1\xff\x00", -256), (b"\xd2\xff\xff\xff\xff", -1),
        (b"\xd3" + b"\xff" * 8, -1), (b"\xc0", None), (b"\xc2", False), (b"\xc3", True), (b"\xa2ab", "ab"),
        (b"\xd9\x02ab", "ab"), (b"\xda\x00\x02ab", "ab"), (b"\xdb\x00\x00\x00\x02ab", "ab"), (b"\xc4\x02ab", b"ab"),
        (b"\x92\x01\x02", [1, 2]), (b"\xdc\x00\x01\x07", [7]), (b"\x81\xa1a\x92\x01\xa0", {"a": [1, ""]}),
        (b"\xca\x3f\x80\x00\x00", 1.0), (b"\xcb\x3f\xf0" + bytes(6), 1.0), (b"\xde\x00\x01\xa1a\x01", {"a": 1}),
        (b"\xdf\x00\x00\x00\x01\xa1a\x01", {"a": 1}),
    ],
)  # fmt: skip
def test_msgpack_values_are_read(data: bytes, value: Any) -> None:
    assert value == unpack(data)


def test_a_msgpack_type_that_metadata_does_not_use_is_an_error() -> None:
    with pytest.raises(ValueError, match="got byte 0xc7 at 0"):
        unpack(b"\xc7\x01\x01a")
