"""Text of llvm-objdump -> `Instruction`: mnemonic, operands, modifiers, address, branch target.

Operand syntax as in LLVM's "Syntax of GFX906 Instructions"; encodings of scalar registers as in the
"Vega" 7nm ISA, section "Scalar ALU operands": vcc is s106:107, m0 s124, exec s126:127.
"""

from __future__ import annotations

import functools
import re
import struct
from dataclasses import dataclass

from attnproof.errors import ShapeError, expected

VCC, M0, EXEC = 106, 124, 126
_NAMED = {
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "m0": (M0, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
    "flat_scratch": (102, 2),
    "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1),
    "xnack_mask": (104, 2),
}
_FLOATS = ("0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0")
_INV_2PI = {
    "0.15915494": (0x3118, 0x3E22F983, 0x3FC45F306DC9C882),
    "0.15915494309189532": (0x3118, 0x3E22F983, 0x3FC45F306DC9C882),
    "0.1592": (0x3118, 0x3E22F983, 0x3FC45F306DC9C882),
}
_LINE = re.compile(r"^\s+([a-z]\w+)\s*(.*?)\s*//\s*([0-9A-Fa-f]+):")
_REGISTER = re.compile(r"^([sv])(?:(\d+)|\[(\d+)(?::(\d+))?\])$")
_MODIFIER = re.compile(r"^([a-z]\w*)(?::(.*))?$", re.S)
_SUFFIX = re.compile(r"_(e32|e64|dpp|sdwa)$")


@dataclass(frozen=True)
class Operand:
    """One operand: a vector register `v`, a scalar register `s`, an `imm`ediate, or a `word` such as off or scc."""

    kind: str
    index: int = 0
    count: int = 1
    text: str = ""
    neg: bool = False
    abs: bool = False
    sext: bool = False
    # bit patterns of an immediate as a 16-, 32- and 64-bit operand
    patterns: tuple[int, int, int] = (0, 0, 0)

    @property
    def value(self) -> int:
        """An immediate as a signed integer."""
        return self.patterns[1] - (1 << 32 if self.patterns[1] >> 31 else 0)


@dataclass(frozen=True)
class Instruction:
    """One decoded instruction; `name` is the mnemonic without its encoding suffix."""

    address: int
    mnemonic: str
    name: str
    encoding: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, str]
    text: str
    target: int | None = None

    def number(self, modifier: str, default: int = 0) -> int:
        """An integer modifier such as offset."""
        return int(self.modifiers.get(modifier, str(default)), 0)

    def bits(self, modifier: str, count: int, default: int) -> tuple[int, ...]:
        """A bit list such as op_sel:[0,1]."""
        found = self.modifiers.get(modifier)
        if found is None:
            return (default,) * count
        given = tuple(int(part) for part in found.strip("[]").split(","))
        return given + (default,) * (count - len(given))


def _split(text: str, stops: str) -> list[str]:
    """Split at `stops` outside brackets."""
    parts, depth, part = [""], 0, 0
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter in stops and depth == 0:
            parts.append("")
            part += 1
        else:
            parts[part] += letter
    return [piece.strip() for piece in parts if piece.strip()]


def _immediate(text: str) -> tuple[int, int, int] | None:
    if text in _INV_2PI:
        return _INV_2PI[text]
    if text in _FLOATS:
        number = float(text)
        half, single, double = (struct.pack("<" + form, number) for form in "efd")
        return tuple(int.from_bytes(raw, "little") for raw in (half, single, double))  # type: ignore[return-value]
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
        number = int(text, 0)
        return number & 0xFFFF, number & 0xFFFFFFFF, number & (1 << 64) - 1
    return None


@functools.lru_cache(maxsize=4096)
def operand(text: str) -> Operand:
    """Parse one operand.

    >>> operand("-|v3|").neg, operand("s[4:7]").count, operand("vcc").index
    (True, 4, 106)
    """
    whole, neg, absolute, sext = text, False, False, False
    if text.startswith("neg("):
        text, neg = text[4:-1], True
    elif text.startswith("-") and not re.match(r"-[\d.]", text):
        text, neg = text[1:], True
    if text.startswith("|") or text.startswith("abs("):
        text, absolute = text.strip("|").removeprefix("abs(").rstrip(")"), True
    if text.startswith("sext("):
        text, sext = text[5:-1], True
    match = _REGISTER.match(text)
    if match:
        first = int(match[2] or match[3])
        last = int(match[4]) if match[4] else first
        return Operand(match[1], first, last - first + 1, whole, neg, absolute, sext)
    if text in _NAMED:
        first, count = _NAMED[text]
        return Operand("s", first, count, whole, neg, absolute, sext)
    patterns = _immediate(text)
    if patterns is not None:
        return Operand("imm", 0, 1, whole, neg, absolute, sext, patterns)
    return Operand("word", 0, 1, text)


def _branch_target(name: str, operands: tuple[Operand, ...], address: int) -> int | None:
    if name != "s_branch" and not name.startswith("s_cbranch"):
        return None
    offset = operands[0].patterns[0]
    return address + 4 + 4 * (offset - 0x10000 if offset >> 15 else offset)


@functools.lru_cache(maxsize=1 << 16)
def _form(mnemonic: str, rest: str) -> tuple[str, str, tuple[Operand, ...], dict[str, str], str]:
    """Name, encoding, operands, modifiers and text: what does not depend on the address, taken apart once."""
    suffix = _SUFFIX.search(mnemonic)
    name = mnemonic[: suffix.start()] if suffix else mnemonic
    text = f"{mnemonic} {rest}".strip()
    if name in ("s_waitcnt", "s_setreg_b32", "s_setreg_imm32_b32", "s_getreg_b32", "s_sendmsg"):
        return name, "", (), {"raw": rest}, text
    pieces = _split(rest, ",")
    tail = _split(pieces[-1], " ") if pieces else []
    modifiers: dict[str, str] = {}
    while len(tail) > 1 and (found := _MODIFIER.match(tail[-1])) and operand(tail[-1]).kind == "word":
        modifiers[found[1]] = found[2] or "1"
        tail.pop()
    if len(tail) > 1:
        raise ShapeError(expected("text", "operands, then modifiers", repr(text)))
    operands = tuple(operand(piece) for piece in pieces[:-1] + tail[:1])
    return name, suffix[1] if suffix else "", operands, modifiers, text


def decode_line(line: str) -> Instruction | None:
    """One line of disassembly, or None for a label, a blank or a header."""
    match = _LINE.match(line)
    if match is None:
        return None
    address = int(match[3], 16)
    name, encoding, operands, modifiers, text = _form(match[1], match[2])
    target = _branch_target(name, operands, address)
    return Instruction(address, match[1], name, encoding, operands, modifiers, text, target)


def decode(text: str) -> tuple[Instruction, ...]:
    """Every instruction of a disassembly, in address order."""
    found = [made for line in text.splitlines() if (made := decode_line(line)) is not None]
    return tuple(sorted(found, key=lambda made: made.address))
