"""A kernel made ready to run: one step per instruction, branches resolved to instruction numbers, and the scoreboard."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnproof.errors import ShapeError, expected
from attnproof.gcn import datashare, lanes, packed, scalar, transfers, vector
from attnproof.gcn.codeobject import CodeObject, KernelInfo
from attnproof.gcn.decode import EXEC, VCC, Instruction
from attnproof.gcn.faults import Fault, UnknownInstruction
from attnproof.gcn.operands import Step
from attnproof.gcn.scoreboard import Scoreboard
from attnproof.gcn.wave import Group

# nothing to do here: the scheduler, the scoreboard or nobody looks at them
_IDLE = frozenset(
    (
        "s_nop",
        "s_waitcnt",
        "s_setprio",
        "s_sleep",
        "s_inst_prefetch",
        "s_dcache_inv",
        "s_dcache_wb",
        "s_icache_inv",
    )
)
# a modifier that nobody reads would change the meaning silently
_MODIFIERS = frozenset(
    [
        "offset",
        "offset0",
        "offset1",
        "glc",
        "slc",
        "clamp",
        "mul",
        "div",
        "op_sel",
        "op_sel_hi",
        "neg_lo",
        "neg_hi",
        "quad_perm",
        "row_shl",
        "row_shr",
        "row_ror",
        "row_mirror",
        "row_half_mirror",
        "row_bcast",
        "wave_shl",
        "wave_shr",
        "wave_rol",
        "wave_ror",
        "row_mask",
        "bank_mask",
        "bound_ctrl",
        "dst_sel",
        "dst_unused",
        "src0_sel",
        "src1_sel",
        "raw",
    ]
)
END, BARRIER, JUMP, BRANCH, PLAIN = range(5)
_CONDITIONS: dict[str, Any] = {
    "s_cbranch_scc0": lambda group: ~group.scc,
    "s_cbranch_scc1": lambda group: group.scc,
    "s_cbranch_vccz": lambda group: group.pair[VCC >> 1] == 0,
    "s_cbranch_vccnz": lambda group: group.pair[VCC >> 1] != 0,
    "s_cbranch_execz": lambda group: group.pair[EXEC >> 1] == 0,
    "s_cbranch_execnz": lambda group: group.pair[EXEC >> 1] != 0,
}


# steps by text and mode: kernels repeat themselves and each other
_BUILT: dict[tuple[str, bool], Step] = {}
_BUILT_LIMIT = 1 << 16


def build_step(made: Instruction, kernel: KernelInfo) -> Step:
    """The step of one instruction; an unknown one gives a step that raises when it is reached."""
    key = (made.text, kernel.flushes_f32)
    found = _BUILT.get(key)
    if found is None:
        if len(_BUILT) >= _BUILT_LIMIT:
            _BUILT.clear()
        found = _BUILT[key] = _build_step(made, kernel)
    return found


def _build_step(made: Instruction, kernel: KernelInfo) -> Step:
    if made.name in _IDLE:
        return _nothing
    foreign = set(made.modifiers) - _MODIFIERS
    if foreign:
        return _Missing(f"unknown modifier {', '.join(sorted(foreign))} of {made.text!r}")
    try:
        step = (
            packed.build(made)
            or lanes.build(made)
            or vector.build(made, kernel.flushes_f32)
            or scalar.build(made)
            or datashare.build(made)
            or transfers.build(made)
        )
    except Fault as fault:
        return _Missing(fault.reason)
    except (IndexError, KeyError, ValueError) as error:
        return _Missing(f"unknown form of {made.text!r} ({error!r})")
    return step or _Missing(f"unknown instruction {made.mnemonic!r}")


def _nothing(group: Group) -> None:
    """No effect on registers or memory."""


class _Missing:
    """A step without semantics: raises when a wave reaches it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __call__(self, group: Group) -> None:
        raise UnknownInstruction(self.reason)


@dataclass(frozen=True)
class Program:
    """Steps of one kernel; `kind` says how the scheduler goes on after each."""

    kernel: KernelInfo
    instructions: tuple[Instruction, ...]
    steps: list[Step] = field(repr=False)
    kind: list[int] = field(repr=False)
    target: list[int] = field(repr=False)
    condition: list[Any] = field(repr=False)
    board: Scoreboard = field(repr=False)

    @property
    def missing(self) -> tuple[str, ...]:
        """Instructions without semantics here, reached or not."""
        return tuple(
            made.text
            for made, step in zip(self.instructions, self.steps, strict=True)
            if isinstance(step, _Missing)
        )


def reachable(instructions: tuple[Instruction, ...], entry: int) -> tuple[Instruction, ...]:
    """Instructions of one kernel: from its entry along fall-through and branches (no calls)."""
    at = {made.address: number for number, made in enumerate(instructions)}
    if entry not in at:
        raise ShapeError(expected("code", f"an instruction at the kernel's entry {entry:#x}", "none"))
    seen: set[int] = set()
    todo = [at[entry]]
    while todo:
        number = todo.pop()
        while number < len(instructions) and number not in seen:
            seen.add(number)
            made = instructions[number]
            if made.target is not None:
                if made.target not in at:
                    raise ShapeError(
                        expected("code", f"an instruction at branch target {made.target:#x}", "none")
                    )
                todo.append(at[made.target])
            if made.name in ("s_endpgm", "s_branch"):
                break
            number += 1
    return tuple(instructions[number] for number in sorted(seen))


def prepare(code: CodeObject, name: str) -> Program:
    """Make a kernel ready; done once per code object."""
    if name not in code.programs:
        code.programs[name] = _prepare(code, name)
    return code.programs[name]


def _later(steps: list[Step], at: int, made: Instruction, kernel: KernelInfo) -> Step:
    """A step that is built when a wave first reaches it: much of a kernel is not."""

    def first(group: Group) -> None:
        steps[at] = build_step(made, kernel)
        steps[at](group)

    return first


def _prepare(code: CodeObject, name: str) -> Program:
    if name not in code.kernels:
        raise ShapeError(expected("kernel", f"one of {sorted(code.kernels)}", repr(name)))
    kernel = code.kernels[name]
    if kernel.wavefront_size != 64:
        raise ShapeError(expected("kernel", "wavefront size 64", kernel.wavefront_size))
    if kernel.rsrc1 >> 12 & 15 or kernel.flushes_f16:
        raise ShapeError(
            expected("kernel", "round to nearest even and fp16 denormals kept", f"{kernel.rsrc1:#x}")
        )
    instructions = reachable(code.instructions, kernel.entry)
    number = {made.address: index for index, made in enumerate(instructions)}
    steps: list[Step] = []
    kinds: list[int] = []
    for made in instructions:
        if made.name == "s_endpgm":
            kinds.append(END)
        elif made.name == "s_barrier":
            kinds.append(BARRIER)
        elif made.name == "s_branch":
            kinds.append(JUMP)
        elif made.name in _CONDITIONS:
            kinds.append(BRANCH)
        else:
            kinds.append(PLAIN)
        steps.append(_later(steps, len(steps), made, kernel) if kinds[-1] == PLAIN else _nothing)
    targets = [number[made.target] if made.target is not None else -1 for made in instructions]
    conditions = [_CONDITIONS.get(made.name) for made in instructions]
    return Program(kernel, instructions, steps, kinds, targets, conditions, Scoreboard(instructions))


def missing(code: CodeObject, name: str) -> tuple[str, ...]:
    """Instructions of a kernel that have no semantics here, reached or not."""
    return prepare(code, name).missing


def uniform(taken: Any) -> bool | None:
    """True or False when all waves agree, None when they part."""
    count = int(np.count_nonzero(taken))
    if count == 0:
        return False
    return True if count == len(taken) else None
