"""An AMDGPU code object: ELF64, kernel descriptors, metadata note, and its instructions.

Follows the LLVM "User Guide for AMDGPU Backend" (code object V3 to V5: sections "ELF Code Object",
"Kernel Descriptor", "Code Object V3 Metadata"). Only the instructions need a tool: `llvm-objdump`;
`CodeObject.to_text` writes a file from which `CodeObject.from_text` works without LLVM.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attnproof.errors import BackendMissing, ShapeError, expected
from attnproof.gcn.decode import Instruction, decode
from attnproof.gcn.msgpack import unpack

_NOTE_METADATA = 32  # NT_AMDGPU_METADATA
_FIXTURE = "; attnproof gcn fixture 1 "
_TOOLS = ("llvm-objdump-19", "llvm-objdump")
# EF_AMDGPU_MACH of e_flags, for objects without a metadata note
_MACHINES = {0x02F: "gfx906", 0x02C: "gfx900", 0x030: "gfx908", 0x03F: "gfx90a"}


@dataclass(frozen=True)
class KernelInfo:
    """What the metadata and the kernel descriptor say about one kernel."""

    name: str
    vgprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    lds_bytes: int
    scratch_bytes: int
    kernarg_size: int
    wavefront_size: int
    max_flat_workgroup_size: int
    arguments: tuple[dict[str, Any], ...]
    entry: int
    rsrc1: int
    rsrc2: int
    properties: int

    @property
    def user_sgprs(self) -> int:
        """Scalar registers that the dispatch fills before the workgroup ids (COMPUTE_PGM_RSRC2)."""
        return self.rsrc2 >> 1 & 31

    @property
    def flushes_f32(self) -> bool:
        """FLOAT_DENORM_MODE_32 of COMPUTE_PGM_RSRC1 is "flush source and destination"."""
        return (self.rsrc1 >> 16 & 3) == 0

    @property
    def flushes_f16(self) -> bool:
        """FLOAT_DENORM_MODE_16_64 is "flush source and destination"."""
        return (self.rsrc1 >> 18 & 3) == 0


class _Elf:
    """Sections, symbols and notes of a little-endian ELF64 file."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ShapeError(expected("data", "a little-endian ELF64 code object", repr(data[:6])))
        self.data = data
        (table,) = struct.unpack_from("<Q", data, 0x28)
        (self.flags,) = struct.unpack_from("<I", data, 0x30)
        size, count = struct.unpack_from("<HH", data, 0x3A)
        # name, type, flags, address, offset, size, link, info, align, entry size
        self.sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + size * i) for i in range(count)]

    def symbols(self) -> dict[str, tuple[int, int]]:
        """Name -> (address, size) of every defined symbol."""
        found: dict[str, tuple[int, int]] = {}
        for _, kind, _, _, offset, size, link, _, _, entry in self.sections:
            if kind not in (2, 11):  # SHT_SYMTAB, SHT_DYNSYM
                continue
            strings = self.sections[link][4]
            for at in range(offset, offset + size, entry):
                name, _, _, section, value, length = struct.unpack_from("<IBBHQQ", self.data, at)
                end = self.data.index(b"\0", strings + name)
                if section:
                    found[self.data[strings + name : end].decode()] = (value, length)
        return found

    def at(self, address: int, size: int) -> bytes:
        """Bytes at a virtual address."""
        for _, kind, _, start, offset, length, *_ in self.sections:
            if kind == 1 and start and start <= address and address + size <= start + length:
                return self.data[offset + address - start : offset + address - start + size]
        raise ShapeError(expected("data", f"a section that holds address {address:#x}", "none"))

    def metadata(self) -> dict[str, Any]:
        """The metadata note."""
        for _, kind, _, _, offset, size, *_ in self.sections:
            at = offset
            while kind == 7 and at < offset + size:
                names, length, note = struct.unpack_from("<III", self.data, at)
                body = at + 12 + (names + 3 & ~3)
                if note == _NOTE_METADATA and self.data[at + 12 : at + 18] == b"AMDGPU":
                    return unpack(self.data[body : body + length])
                at = body + (length + 3 & ~3)
        raise ShapeError(
            expected("data", "a code object with a metadata note (code object V3 or later)", "none")
        )


def _kernel(elf: _Elf, symbols: dict[str, tuple[int, int]], entry: dict[str, Any]) -> KernelInfo:
    address, _ = symbols[entry[".symbol"]]
    descriptor = elf.at(address, 64)
    (offset,) = struct.unpack_from("<q", descriptor, 16)
    rsrc1, rsrc2, properties = struct.unpack_from("<IIH", descriptor, 48)
    return KernelInfo(
        name=entry[".name"],
        vgprs=entry[".vgpr_count"],
        sgprs=entry[".sgpr_count"],
        vgpr_spills=entry.get(".vgpr_spill_count", 0),
        sgpr_spills=entry.get(".sgpr_spill_count", 0),
        lds_bytes=entry[".group_segment_fixed_size"],
        scratch_bytes=entry[".private_segment_fixed_size"],
        kernarg_size=entry[".kernarg_segment_size"],
        wavefront_size=entry[".wavefront_size"],
        max_flat_workgroup_size=entry[".max_flat_workgroup_size"],
        arguments=tuple(entry.get(".args", ())),
        entry=address + offset,
        rsrc1=rsrc1,
        rsrc2=rsrc2,
        properties=properties,
    )


def find_objdump() -> str | None:
    """Path of an llvm-objdump, or None."""
    return next((path for path in map(shutil.which, _TOOLS) if path), None)


def _disassemble(data: bytes) -> str:
    tool = find_objdump()
    if tool is None:
        raise BackendMissing(
            "llvm-objdump: expected on PATH to read instructions, got none; "
            "install LLVM, or load a text fixture with CodeObject.from_text"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "code.co"
        path.write_bytes(data)
        done = subprocess.run([tool, "-d", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ShapeError(expected("data", "a code object that llvm-objdump reads", done.stderr.strip()))
    # without the line that names the temporary file
    return done.stdout[done.stdout.find("Disassembly of section") :]


@dataclass(frozen=True)
class CodeObject:
    """A loaded code object: `target`, `kernels` by name, and its instructions.

    Metadata and `to_text` work for every AMD target; `instructions` are decoded when first asked for, by the rules of gfx9.
    """

    target: str
    kernels: dict[str, KernelInfo]
    disassembly: str = field(repr=False)
    # kernels made ready to run, by name
    programs: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @functools.cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """All of the text section, in address order."""
        return decode(self.disassembly)

    @classmethod
    def load(cls, data: bytes) -> CodeObject:
        """Read a linked code object (not an offload bundle)."""
        elf = _Elf(data)
        metadata, symbols = elf.metadata(), elf.symbols()
        # "amdgcn-amd-amdhsa--gfx906:xnack-": the processor without its features (compilers order the parts differently)
        named = re.search(r"gfx[0-9a-f]+", str(metadata.get("amdhsa.target", "")))
        processor = named[0] if named else _MACHINES.get(elf.flags & 0xFF, "unknown")
        kernels = {entry[".name"]: _kernel(elf, symbols, entry) for entry in metadata["amdhsa.kernels"]}
        return cls(processor, kernels, _disassemble(data))

    def to_text(self) -> str:
        """A fixture: one line of metadata, then the disassembly."""
        kernels = [asdict(kernel) for kernel in self.kernels.values()]
        return _FIXTURE + json.dumps({"target": self.target, "kernels": kernels}) + "\n" + self.disassembly

    @classmethod
    def from_text(cls, text: str) -> CodeObject:
        """Read what `to_text` wrote, perhaps edited: instructions may be changed or dropped (their comment too)."""
        head, _, body = text.partition("\n")
        if not head.startswith(_FIXTURE):
            raise ShapeError(expected("text", f"a first line that starts with {_FIXTURE!r}", repr(head[:40])))
        found = json.loads(head[len(_FIXTURE) :])
        kernels: dict[str, KernelInfo] = {}
        for entry in found["kernels"]:
            fields: dict[str, Any] = dict(entry)
            fields["arguments"] = tuple(fields["arguments"])
            kernels[fields["name"]] = KernelInfo(**fields)
        return cls(found["target"], kernels, body)
