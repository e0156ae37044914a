"""Planted mistakes: one edit of a kernel's text (or of its instructions) each, and the check that has to find it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from tests.parity.problems import Case

from attnproof import gcn

LSE = "lse"  # results are within the suite's tolerance, lse is not within two millionths
RESULT = "result"  # out, lse or a gradient is not that of float64
CONFLICTS = "conflicts"  # results are right, and LDS reads cost more than without conflicts
SMALL: dict[str, Any] = {"B": 1, "H": 1, "Hkv": 1, "M": 40, "N": 70, "dtype": "float16"}
CAUSAL = Case("causal", options={"causal": True}, D=32, Dv=32, **SMALL)
PLAIN = Case("plain", D=32, Dv=32, **SMALL)
DEAD = Case("dead rows", options={"causal": True}, **{**SMALL, "M": 40, "N": 20})
GROUPS = Case("two groups", **{**SMALL, "H": 4, "Hkv": 2, "M": 17, "N": 20})
DROPOUT = Case("dropout", options={"dropout_p": 0.3}, **SMALL)
SOFTCAP = Case("softcap", options={"softcap": 2.0}, spread=2, **SMALL)
PARTS = Case(
    "parts", rows="cached", k_lengths=(150,), options={"num_splits": 2}, **{**SMALL, "M": 1, "N": 160, "H": 2, "Hkv": 1}
)  # fmt: skip


@dataclass(frozen=True)
class Mistake:
    """One edit.

    Attributes:
        name: what went wrong.
        kernel: whose text is edited.
        old: text that is there.
        new: what takes its place.
        case: the call that shows it.
        found_by: RESULT, CONFLICTS, or the interpreter's faults that count as finding it.
        gradients: whether the backward runs too.
    """

    name: str
    kernel: str
    old: str
    new: str
    case: Case
    found_by: str | tuple[type[gcn.Fault], ...] = RESULT
    gradients: bool = field(default=False)

    def __str__(self) -> str:
        return self.name

    def edit(self, kernel: str, text: str) -> str:
        """The text with the mistake in it."""
        if kernel != self.kernel or not self.old:
            return text
        if self.old not in text:
            raise ValueError(f"{self.name}: expected {self.old!r} in the kernel's text")
        return text.replace(self.old, self.new, 1)


def forward(name: str, old: str, new: str, case: Case = CAUSAL, found_by: Any = RESULT) -> Mistake:
    return Mistake(name, "attn_forward", old, new, case, found_by)


def backward(
    name: str, kernel: str, old: str, new: str, case: Case = CAUSAL, found_by: Any = RESULT
) -> Mistake:
    return Mistake(name, kernel, old, new, case, found_by, gradients=True)


MISTAKES: tuple[Mistake, ...] = (
    forward("no barrier before the values are staged", "barrier();  // everyone is done with the keys", "",
            found_by=(gcn.Race,)),
    forward("no barrier before the next keys are staged", "barrier();  // everyone is done with the values of the tile before",
            "", found_by=(gcn.Race,)),
    forward("no barrier after the keys are staged", "KeyMover::stage(x_tile, k, t);\n    barrier();",
            "KeyMover::stage(x_tile, k, t);", found_by=(gcn.Race, gcn.UninitialisedRead)),
    forward("causal mask off by one", "distance <= right", "distance <= right + 1"),
    forward("no rescale of the accumulator", "acc[i][e] *= alpha", "acc[i][e] *= 1.0f", PLAIN),
    forward("no rescale of the sum", "l[i] = l[i] * alpha + sum", "l[i] = l[i] + sum", PLAIN),
    forward("halves of a pair swapped", "0x05040100", "0x01000504", PLAIN),
    forward("LDS array too short", "u32 weights[BLOCK_M * weight_stride(BLOCK_N)]",
            "u32 weights[BLOCK_M * weight_stride(BLOCK_N) - 64]", PLAIN,
            (gcn.MemoryFault, gcn.Race, gcn.UninitialisedRead)),
    forward("row stride that is not a multiple of 16 bytes", "width * Element::kBytes / 4 + 4", "width * Element::kBytes / 4 + 3",
            PLAIN, (gcn.MemoryFault,)),
    forward("global load one element off", "return *(const u32x4*)(row + column);", "return *(const u32x4*)(row + column + 1);",
            PLAIN, (gcn.MemoryFault,)),
    forward("weights summed in half precision", "float sum = 0.0f;\n    UNROLL", "f16 sum = 0;\n    UNROLL", PLAIN, LSE),
    forward("wrong lane in the maximum", "return larger(x, lane_move<0x140>(x));", "return larger(x, lane_move<0x141>(x));", PLAIN),
    forward("wrong lane in the sum", "return x + lane_move<0x140>(x);", "return x + lane_move<0x141>(x);", PLAIN),
    forward("one row read past the end", "const bool inside = row < end &&", "const bool inside = row <= end &&", PLAIN,
            (gcn.MemoryFault,)),
    forward("one key counted past the end", "bool sees = j < s.keys;", "bool sees = j <= s.keys;", PLAIN),
    forward("edge tile taken for a full one", "first + count <= full_high", "first <= full_high", PLAIN),
    forward("no guard for a maximum of -inf", "const float shift = top == -infinity() ? 0.0f : top;\n    const float alpha",
            "const float shift = top;\n    const float alpha", DEAD),
    forward("lse to base 2", "above + kLn2 * log2_of(total)", "above + log2_of(total)"),
    forward("no scale in the exponent", "const float exponent = FOLD ? given.scale * kLog2e : kLog2e;",
            "const float exponent = kLog2e;"),
    forward("heads dealt out in turn", "job.h / a.G", "job.h % a.Hkv", GROUPS),
    forward("another dropout word", "((j & 1) ? c3 : c2)", "((j & 1) ? c2 : c3)", DROPOUT),
    forward("a part without its last keys", "(start + (part + 1) * each) * BLOCK_N", "(start + part * each + 1) * BLOCK_N", PARTS),
    forward("rows of LDS not padded", "width * Element::kBytes / 4 + 4", "width * Element::kBytes / 4", PLAIN, CONFLICTS),
    backward("no delta", "attn_dkdv", "p * (dp - row.delta)", "p * dp"),
    backward("no barrier before ds replaces p", "attn_dkdv", "barrier();  // everyone is done with p and dout", "",
             found_by=(gcn.Race,)),
    backward("one head of the group", "attn_dkdv", "h < (kv + 1) * a.G", "h < kv * a.G + 1", GROUPS),
    backward("no derivative of the softcap", "attn_dq", "1.0f - ratio * ratio", "1.0f", SOFTCAP),
    backward("no scale of dq", "attn_dq", "acc[i], a.scale, x", "acc[i], 1.0f, x"),
)  # fmt: skip

_LOAD = re.compile(r"^\s+global_load_dwordx4 v\[(\d+):")
_WAIT = re.compile(r"^\s+s_waitcnt vmcnt\(\d+\)")


def without_wait(code: gcn.CodeObject) -> gcn.CodeObject:
    """The code without the first wait for a vector load: what a wrong compiler, or a wrong edit, would leave."""
    lines = code.to_text().splitlines()
    at = next(n for n, line in enumerate(lines) if _WAIT.match(line))
    return gcn.CodeObject.from_text("\n".join([*lines[:at], *lines[at + 1 :]]))
