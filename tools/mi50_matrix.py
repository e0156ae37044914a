"""Compile the kernels of backend dot2 for every architecture it serves, and record what the compiler made of them.

    python tools/mi50_matrix.py [--all] [results/compile/gfx.json]

Needs clang 19; no GPU, no SDK. The record holds registers, LDS, spills and counts of telling mnemonics, with a digest of
text and flags per row, so that a test can tell whether it belongs to the present sources; rows of the same text, flags and
compiler are kept unless ``--all`` is given.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnproof.backends.dot2 import planned, prebuilt, source
from attnproof.backends.dot2.variants import Step
from attnproof.gcn import codeobject
from attnproof.problem import Problem

ARCHITECTURES = (
    "gfx906",
    "gfx908",
    "gfx90a",
    "gfx942",
    "gfx1010",
    "gfx1012",
    "gfx1030",
    "gfx1100",
    "gfx1201",
)
TELLING = (
    "v_dot2_f32_f16", "v_dot2acc_f32_f16", "v_dot2c_f32_f16", "v_perm_b32", "v_fma_mix_f32", "ds_read_b128", "ds_load_b128",
    "global_load_dwordx4", "global_load_b128", "v_mov_b32_dpp", "s_barrier",
)  # fmt: skip
FORBIDDEN = re.compile(r"^(v_mfma|v_wmma|v_smfmac|scratch_|buffer_(load|store|atomic)|flat_)")
SUFFIX = re.compile(r"_(e32|e64|dpp|sdwa|e64_dpp)$")


@dataclass(frozen=True)
class Row:
    """One kernel to compile: where it comes from, and its step."""

    call: str
    step: Step
    architecture: str


def base(width: int, dtype: str = "float16", **more: Any) -> Problem:
    """A call of usual size."""
    return replace(Problem(dtype, "cuda", 1, 8, 2, 512, 512, width, width), **more)


def everywhere() -> dict[str, Problem]:
    """Calls whose kernels are compiled for every architecture."""
    return {
        "D 64": base(64),
        "D 128": base(128),
        "D 128 causal": base(128, right=0),
        "D 256 causal": base(256, right=0),
        "D 128 decode": base(128, M=1, N=4096, rows="cached"),
        "D 128 bfloat16": base(128, "bfloat16"),
        "D 128 float32": base(128, "float32"),
    }


def shipped() -> dict[str, Problem]:
    """fp16 calls whose kernels are compiled for gfx906: every head dim bucket, every option alone, and all at once."""
    options: dict[str, dict[str, Any]] = {
        "causal": {"right": 0},
        "top left": {"right": 0, "top_left": True},
        "window": {"left": 128, "right": 0},
        "mask": {"has_keep": True},
        "bounds": {"has_bounds": True},
        "bias": {"bias_shape": (1, 8, 512, 512), "bias_dtype": "float16"},
        "bias in float32": {"bias_shape": (1, 1, 1, 512), "bias_dtype": "float32"},
        "alibi": {"has_alibi": True},
        "softcap": {"softcap": 30.0},
        "sink": {"has_sink": True},
        "dropout": {"dropout_p": 0.1},
        "packed causal": {"rows": "packed", "tokens": (512, 512), "right": 0},
    }
    every: dict[str, Any] = {}
    for given in options.values():
        every |= {name: value for name, value in given.items() if name not in ("rows", "tokens", "top_left")}
    made = {f"D {width}": base(width) for width in (16, 32, 64, 80, 96, 128, 192, 256, 512)}
    made |= {f"D {width} causal": base(width, right=0) for width in (64, 80, 128, 256, 512)}
    made |= {f"D 128 {name}": base(128, **given) for name, given in options.items()}
    made |= {f"D {width} everything": base(width, **every) for width in (64, 128, 256)}
    made["D 128 packed everything"] = base(128, rows="packed", tokens=(512, 512), **every)
    made |= {"D 192 and 128": base(192, Dv=128, right=0), "D 59 narrow": base(59)}
    made |= {f"D {width} decode": base(width, M=1, N=4096, rows="cached") for width in (64, 128, 256, 512)}
    made |= {
        "D 128 paged": base(128, M=1, N=4096, rows="paged", page=16),
        "D 128 chunk": base(128, M=64, rows="paged", page=64),
    }
    return made


@functools.cache
def rows() -> tuple[Row, ...]:
    """Everything that is compiled, each kernel and architecture once."""
    wanted = [(call, p, arch) for call, p in everywhere().items() for arch in ARCHITECTURES]
    wanted += [(call, p, "gfx906") for call, p in shipped().items()]
    found: dict[Any, Row] = {}
    for call, problem, architecture in wanted:
        for step in planned.steps(problem):
            found.setdefault((step.variant, architecture), Row(call, step, architecture))
    return tuple(found.values())


def digest(row: Row) -> str:
    """What a row was compiled from."""
    return source.digest(source.text(row.step.variant.kernel), *row.step.variant.flags)


def compiled(row: Row) -> dict[str, Any]:
    """What the compiler made of a row."""
    variant = row.step.variant
    about = {
        "call": row.call,
        "kernel": variant.name,
        "architecture": row.architecture,
        "flags": list(variant.flags),
        "digest": digest(row),
    }
    # a kernel with less LDS to share than asked for only warns
    raw = prebuilt.clang(variant, row.architecture, more=("-Wno-pass-failed",))
    return {**about, **measured(raw, variant.name)}


def measured(raw: bytes, name: str) -> dict[str, Any]:
    """Registers, memory and mnemonics of one kernel of a code object."""
    # not CodeObject.load: it decodes operands, and those of RDNA 3 and 4 have forms that gfx906 has not
    elf = codeobject._Elf(raw)
    entry = next(each for each in elf.metadata()["amdhsa.kernels"] if each[".name"] == name)
    kernel = codeobject._kernel(elf, elf.symbols(), entry)
    counts = Counter(SUFFIX.sub("", line.split()[0]) for line in lines(codeobject._disassemble(raw), name))
    return {
        "vgprs": kernel.vgprs,
        "sgprs": kernel.sgprs,
        "vgpr_spills": kernel.vgpr_spills,
        "sgpr_spills": kernel.sgpr_spills,
        "scratch_bytes": kernel.scratch_bytes,
        "lds_bytes": kernel.lds_bytes,
        "wavefront": kernel.wavefront_size,
        "instructions": sum(counts.values()),
        "telling": {name: counts[name] for name in TELLING if counts[name]},
        "forbidden": sorted(name for name in counts if FORBIDDEN.match(name)),
    }


def lines(disassembly: str, name: str) -> list[str]:
    """Instructions of one function in the disassembler's text."""
    found, inside = [], False
    for line in disassembly.splitlines():
        if line.endswith(">:"):
            inside = line.endswith(f"<{name}>:")
        elif inside and re.match(r"^\s+[a-z]+_", line):
            found.append(line)
    return found


def kept(path: Path, version: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows of an earlier record by the same compiler, by digest and architecture."""
    if not path.exists():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    same = document["environment"]["compiler"] == version
    return {(row["digest"], row["architecture"]): row for row in document["results"]} if same else {}


def main(path: Path, *, everything: bool) -> None:
    done = subprocess.run([prebuilt.CLANG, "--version"], capture_output=True, text=True, check=True)
    version = done.stdout.splitlines()[0]
    earlier = {} if everything else kept(path, version)

    def made(row: Row) -> dict[str, Any]:
        return earlier.get((digest(row), row.architecture)) or compiled(row)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(made, rows()))
    document = {
        "schema": "attnproof/record/1",
        "kind": "compile",
        "environment": {"compiler": version, "device": "none: compiled, not run"},
        "protocol": {"flags": "-O3 -std=c++17", "tool": "tools/mi50_matrix.py"},
        "results": [],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = ",\n".join(json.dumps(row) for row in results)
    head = json.dumps(document, indent=1)
    path.write_text(head.replace('"results": []', f'"results": [\n{text}\n]') + "\n", encoding="utf-8")
    print(f"{len(results)} kernels in {path}")


if __name__ == "__main__":
    names = [name for name in sys.argv[1:] if name != "--all"]
    main(Path(names[0] if names else "results/compile/gfx.json"), everything="--all" in sys.argv)
