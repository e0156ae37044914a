"""Compile the forward kernel for a Hopper that is not here, and read its machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler.compiler import compile as compile_source
from triton.experimental.gluon._runtime import GluonASTSource

from .compat import gl
from .configs import ROWS, Facts
from .kernels.forward import forward_kernel

TARGET = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 232448
TYPES = {"bfloat16": "bf16", "float16": "fp16"}
ALIGNED = [["tt.divisibility", 16]]
FLOATS = frozenset({"scale", "cap", "unit", "wide_unit", "lift"})
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@dataclass(frozen=True)
class MachineCode:
    """What the assembler made of a kernel.

    Attributes:
        registers: per thread at launch; setmaxnreg then moves them from the producer to the consumers.
        spills: bytes of local memory stored per thread.
        shared: bytes of shared memory per program.
        wgmma: matrix instructions.
        local_in_loops: loads and stores of local memory inside the innermost loops with matrix instructions.
        serialised: whether the assembler says that it waits after every matrix instruction.
        splits: register counts that warps set for themselves.
        barriers: ``BAR.SYNC`` of each innermost loop with matrix instructions, in the order of the code.
        instructions: of each such loop.
    """

    registers: int
    spills: int
    shared: int
    wgmma: int
    local_in_loops: int
    serialised: bool
    splits: tuple[int, ...]
    barriers: tuple[int, ...]
    instructions: tuple[int, ...]

    def row(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}


def descriptor_type(dtype: str, block: list[int]) -> str:
    """Triton's name of a descriptor of such blocks, with the layout that the launcher gives it."""
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if dtype == "bfloat16" else gl.float16)
    return f"tensordesc<{TYPES[dtype]}{block},{layout!r}>"


def source(facts: Facts, dtype: str = "bfloat16") -> Any:
    """The forward kernel as a launch would specialise it."""
    kernel: Any = forward_kernel
    ones = [1, 1, 1] if facts.packed else [1, 1]
    query, value = ([*ones, ROWS, width] for width in (facts.width, facts.width_v))
    blocks = {
        "q": query,
        "k": [*ones, facts.block_n, facts.width],
        "v": [*ones, facts.block_n, facts.width_v],
        "out": value,
    }
    pointers = {
        "lse": "*fp32",
        "counter": "*i32" if facts.dynamic else "*fp32",
        "slopes": "*fp32",
        "sink": f"*{TYPES[dtype]}" if facts.has_sink else "*fp32",
        **({"tiles": "*i32"} if facts.listed else {}),
        **({"bounds": "*i32"} if facts.has_bounds else {}),
    }
    signature = {at: descriptor_type(dtype, block) for at, block in blocks.items()} | pointers
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in pointers:
            attributes[(index,)] = ALIGNED
        elif name == "C":
            signature[name], constants[(index,)] = "constexpr", facts
        elif name in ("tiles", "bounds"):
            signature[name], constants[(index,)] = "constexpr", None
        elif name not in blocks:
            signature[name] = "fp32" if name in FLOATS else "i32"
    ordered = {name: signature[name] for name in kernel.arg_names}
    return GluonASTSource(kernel, ordered, constants, attributes)


def compile_facts(facts: Facts, dtype: str = "bfloat16") -> Any:
    """Triton's compiled kernel; no device is touched."""
    return compile_source(source(facts, dtype), target=TARGET, options=OPTIONS)


def inspect(compiled: Any) -> MachineCode:
    """Assemble once more, with the assembler's remarks, and read the result."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(compiled.asm["ptx"])
        assembler = Path(get_ptxas(90).path)
        remarks = _run(assembler, "-lineinfo", "-v", "--gpu-name=sm_90a", ptx, "-o", cubin).stderr
        code = _run(assembler.with_name("nvdisasm"), "-c", cubin).stdout
    loops = matrix_loops(code)
    return MachineCode(
        registers=_number(r"Used (\d+) registers", remarks),
        spills=_number(r"(\d+) bytes spill stores", remarks),
        shared=int(compiled.metadata.shared),
        wgmma=len(re.findall(r"\bHGMMA\b", code)),
        local_in_loops=sum(len(re.findall(r"\b(?:LDL|STL)\b", loop)) for loop in loops),
        serialised="C75" in remarks,
        splits=tuple(int(x, 16) for x in re.findall(r"USETMAXREG\S*\s+(?:UP\d, )?(0x[0-9a-f]+)", code)),
        barriers=tuple(len(re.findall(r"\bBAR\.SYNC", loop)) for loop in loops),
        instructions=tuple(loop.count(";") for loop in loops),
    )


def idle_mbarriers(code: str) -> list[str]:
    """Names in Triton's GPU dialect of mbarriers that are made and initialised, and never used.

    They are dead to the compiler, which gives their bytes to tiles; PTX forbids that for a live one, and results are wrong
    once in a while.
    """
    return [
        name
        for name in re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<\d+x1xi64", code)
        if not _used(name, code.splitlines())
    ]


def _used(barrier: str, lines: list[str]) -> bool:
    """Whether anything but its initialisation takes a barrier, or one of its stages."""
    names = {barrier}
    for line in lines:
        if names.isdisjoint(re.findall(r"%\w+", line)):
            continue
        stage = re.match(r"\s*(%\w+) = ttg\.(?:memdesc_index|local_alloc)", line)
        if stage:
            names.add(stage.group(1))
        elif "init_barrier" not in line:
            return True
    return False


def matrix_loops(code: str) -> list[str]:
    """Text of the innermost loops that hold a matrix instruction, in order."""
    lines = code.splitlines()
    labels = {line.rstrip(":"): at for at, line in enumerate(lines) if line.startswith(".L_x_")}
    loops: list[tuple[int, int]] = []
    for at, line in enumerate(lines):
        # an unconditional branch back only returns from a wait that was moved out of the way
        target = re.search(r"@!?U?P\d BRA `\((\.L_x_\d+)\)", line)
        if target and labels.get(target.group(1), at) < at:
            start = labels[target.group(1)]
            if any("HGMMA" in inner for inner in lines[start:at]):
                loops.append((start, at + 1))
    inner = [
        loop
        for loop in loops
        if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in loops)
    ]
    return ["\n".join(lines[start:stop]) for start, stop in sorted(inner)]


def _run(*command: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(x) for x in command], capture_output=True, text=True, check=True)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern} in the assembler's report")
    return int(found.group(1))
