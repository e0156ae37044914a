"""What a launch can stop with: every error names the instruction, its address and the wave.

AttentionError
 └── Fault                   any stop of the interpreter; `.address`, `.instruction`, `.wave`
      ├── UnknownInstruction  decoded, but no semantics here
      ├── MemoryFault         outside an allocation, misaligned, read-only
      ├── UninitialisedRead   bytes that nothing wrote
      ├── Hazard              a register touched before its s_waitcnt
      ├── Race                LDS bytes shared by two waves without a barrier between
      └── BarrierDivergence   waves of one workgroup at different barriers, or gone
"""

from __future__ import annotations

from attnproof.errors import AttentionError


class Fault(AttentionError):
    """The interpreted kernel did something that the ISA does not define, or that this interpreter does not know."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.address: int | None = None
        self.instruction: str | None = None
        self.wave: str | None = None

    def at(self, address: int, instruction: str, wave: str) -> Fault:
        """Say where; the innermost place wins."""
        if self.address is None:
            self.address, self.instruction, self.wave = address, instruction, wave
        return self

    def __str__(self) -> str:
        if self.address is None:
            return self.reason
        return f"{self.reason} [at {self.address:#x}: {self.instruction}; {self.wave}]"


class UnknownInstruction(Fault):
    """The disassembler knows it, the interpreter does not."""


class MemoryFault(Fault):
    """An access outside one allocation, misaligned, or a store to read-only memory."""


class UninitialisedRead(Fault):
    """A load of bytes that nothing has written."""


class Hazard(Fault):
    """A register used or overwritten while a memory operation still owns it, or LDS traffic left open at a barrier."""


class Race(Fault):
    """Two waves touch the same LDS bytes, one of them writing, with no barrier between."""


class BarrierDivergence(Fault):
    """Waves of one workgroup wait at different barriers, or one of them has ended."""
