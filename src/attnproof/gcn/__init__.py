"""An interpreter of gfx906 code objects: run a compiled AMD kernel on a CPU, instruction by instruction, and check it.

    from attnproof import gcn
    code = gcn.CodeObject.load(Path("kernel.co").read_bytes())
    memory = gcn.Memory()
    counts = gcn.launch(code, "kernel", grid=(1, 1, 1), block=(256, 1, 1), kernarg=packed, memory=memory)

What it proves and what it does not: docs/gcn.md.
"""

from __future__ import annotations

from attnproof.gcn.codeobject import CodeObject, KernelInfo
from attnproof.gcn.counts import Bound, Counts
from attnproof.gcn.faults import (
    BarrierDivergence,
    Fault,
    Hazard,
    MemoryFault,
    Race,
    UninitialisedRead,
    UnknownInstruction,
)
from attnproof.gcn.memory import Memory
from attnproof.gcn.program import missing
from attnproof.gcn.run import launch

__all__ = [
    "BarrierDivergence",
    "Bound",
    "CodeObject",
    "Counts",
    "Fault",
    "Hazard",
    "KernelInfo",
    "Memory",
    "MemoryFault",
    "Race",
    "UninitialisedRead",
    "UnknownInstruction",
    "launch",
    "missing",
]
