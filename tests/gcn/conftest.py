"""One instruction at a time: registers in, instruction text, registers out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from attnproof.gcn.codeobject import CodeObject, KernelInfo
from attnproof.gcn.decode import EXEC, VCC, decode_line
from attnproof.gcn.lds import Lds
from attnproof.gcn.memory import Memory
from attnproof.gcn.program import build_step
from attnproof.gcn.wave import Machine

ALL = (1 << 64) - 1
# fp32 and fp16 denormals kept, round to nearest even: what clang sets for gfx906
KERNEL = KernelInfo(
    name="k", vgprs=32, sgprs=32, vgpr_spills=0, sgpr_spills=0, lds_bytes=0, scratch_bytes=0, kernarg_size=0,
    wavefront_size=64, max_flat_workgroup_size=256, arguments=(), entry=0, rsrc1=0xAF0000, rsrc2=0, properties=0,
)  # fmt: skip


def assembled(lines: str, lds_bytes: int = 0, kernarg_size: int = 16, block: int = 256) -> CodeObject:
    """A code object from instruction text; `label:` lines name branch targets, every instruction counts four bytes."""
    found = [line.strip() for line in lines.strip().splitlines() if line.strip()]
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in found:
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
        else:
            code.append(line)
    text: list[str] = []
    for at, line in enumerate(code):
        words = line.split()
        if words[0].startswith(("s_branch", "s_cbranch")):
            line = f"{words[0]} {labels[words[1]] - at - 1 & 0xFFFF}"
        text.append(f"\t{line}    // {0x1000 + 4 * at:012X}: 00000000")
    # kernarg pointer in s[0:1], workgroup ids in s2, s3, s4, work items in v0, v1, v2
    kernel = replace(
        KERNEL, lds_bytes=lds_bytes, kernarg_size=kernarg_size, max_flat_workgroup_size=block, entry=0x1000,
        properties=8, rsrc2=2 << 1 | 7 << 7 | 2 << 11,
    )  # fmt: skip
    head = json.dumps({"target": "gfx906", "kernels": [asdict(kernel)]})
    return CodeObject.from_text(f"; attnproof gcn fixture 1 {head}\n" + "\n".join(text))


@pytest.fixture
def assemble() -> Callable[..., CodeObject]:
    return assembled


class State:
    """One wave before and after an instruction."""

    def __init__(self, lds_bytes: int, memory: Memory) -> None:
        self.machine = Machine(1, 32, memory, Lds(1, 1, lds_bytes), None)
        self.group = self.machine.group(0, 1, 1)

    def vector(self, register: int) -> list[int]:
        return [int(word) for word in self.group.v[register][0]]

    def vector64(self, register: int) -> list[int]:
        return [
            low | high << 32
            for low, high in zip(self.vector(register), self.vector(register + 1), strict=True)
        ]

    def scalar(self, register: int) -> int:
        return int(self.group.s[register][0])

    def scalar64(self, register: int) -> int:
        return int(self.group.pair[register >> 1][0])

    @property
    def vcc(self) -> int:
        return self.scalar64(VCC)

    @property
    def exec(self) -> int:
        return self.scalar64(EXEC)

    @property
    def scc(self) -> int:
        return int(self.group.scc[0])


@pytest.fixture
def execute() -> Callable[..., State]:
    """Run one instruction (or several, one per line) on one wave."""

    def run(
        text: str,
        v: dict[int, Any] | None = None,
        s: dict[int, int] | None = None,
        *,
        vcc: int = 0,
        exec_mask: int = ALL,
        scc: int = 0,
        lds: bytes = b"",
        memory: Memory | None = None,
        flush: bool = False,
    ) -> State:
        state = State(max(len(lds), 16), memory or Memory())
        group = state.group
        for register, words in (v or {}).items():
            group.v[register][...] = np.array(words, np.uint64).astype(np.uint32)
        for register, word in (s or {}).items():
            group.s[register][...] = word & 0xFFFFFFFF
        group.scc[...] = bool(scc)
        group.pair[VCC >> 1][...] = vcc
        group.write_exec(np.uint64(exec_mask))
        if lds:
            state.machine.lds.data.raw[: len(lds)] = np.frombuffer(lds, np.uint8)
            state.machine.lds.written.raw[: len(lds)] = 1
        kernel = replace(KERNEL, rsrc1=0xAC0000) if flush else KERNEL
        with np.errstate(all="ignore"):
            for line in text.splitlines():
                made = decode_line(f"    {line.strip()}    // 000000001000: 00000000")
                assert made is not None, line
                build_step(made, kernel)(group)
        return state

    return run
