"""Every kernel that the twin will be asked for, compiled without a GPU: by NVRTC to PTX, on to machine code, by clang."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.parity.calls import Call
from tests.parity.problems import Case
from tests.parity.random_cases import random_case

from attnproof.backends import dot2
from attnproof.backends.dot2 import prebuilt, source
from attnproof.backends.dot2.variants import Step, Variant

from . import nvrtc
from .calls import DECODE, PARITY, TARGET, run
from .full import FULL, FULL_DECODE

_USED = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores")


@dataclass
class Recorder:
    """Takes steps, and only keeps which kernels they are."""

    units: int = 132
    variants: dict[Variant, None] = field(default_factory=dict)

    def __call__(self, step: Step) -> None:
        self.variants[step.variant] = None


def variants(cases: Iterable[Case]) -> list[Variant]:
    """The kernels of these calls, each once."""
    recorder = Recorder()
    with dot2.running_on(recorder):
        for case in cases:
            run(Call(TARGET, case))
    return list(recorder.variants)


def ptxas(image: nvrtc.Image) -> str:
    """What the assembler says of PTX for sm_90.

    Raises:
        RuntimeError: it refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "kernel.ptx"
        given.write_text(image.ptx, encoding="utf-8")
        command = ["ptxas", "-arch=sm_90", "-v", "-o", str(given.with_suffix(".cubin")), str(given)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas: {done.stdout}{done.stderr}")
    return done.stderr


def clang_cuda(variant: Variant) -> str:
    """The PTX that clang makes of the shipped text, for sm_90 and without any header of CUDA.

    Raises:
        RuntimeError: it refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "kernel.cu", Path(folder) / "kernel.ptx"
        given.write_text(source.text(variant.kernel), encoding="utf-8")
        command = [prebuilt.CLANG, "-x", "cuda", "--cuda-gpu-arch=sm_90", "--cuda-device-only", "-nocudainc",
                   "-nocudalib", "-O3", "-std=c++17", "-S", *variant.flags, "-o", str(made), str(given)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{prebuilt.CLANG}: {done.stderr}")
        return made.read_text(encoding="utf-8")


def checked(variant: Variant, compiler: nvrtc.Compiler, *, assemble: bool, clang: bool) -> dict[str, int]:
    """Compile one kernel every way that is asked for; sizes that are worth telling."""
    image = compiler.image(variant)
    entry = f".visible .entry {variant.name}("
    if entry not in image.ptx:
        raise RuntimeError(f"{variant.name}: expected an entry of this name, got none in the PTX")
    found = {"dynamic": image.dynamic}
    if assemble:
        said = ptxas(image)
        found["registers"] = max(int(n) for n in _USED.findall(said))
        found["spilled"] = max(int(n) for n in _SPILLS.findall(said))
    if clang and f".entry {variant.name}(" not in clang_cuda(variant):
        raise RuntimeError(f"{variant.name}: expected an entry of this name, got none in clang's PTX")
    return found


def main(*, ptxas: bool, clang: bool, random: int) -> int:
    """Compile everything, print what came out, and say with the exit status whether all of it compiled."""
    compiler = nvrtc.find()
    if compiler is None:
        print("libnvrtc was not found: nothing was compiled")
        return 1
    if ptxas and shutil.which("ptxas") is None:
        print("ptxas is not on PATH: nothing was compiled")
        return 1
    cases = [*PARITY, *DECODE, *FULL, *FULL_DECODE, *(random_case(seed) for seed in range(random))]
    wanted, failed = variants(cases), 0
    rows: list[tuple[Variant, dict[str, int]]] = []
    with ThreadPoolExecutor(2) as pool:
        jobs = [(v, pool.submit(checked, v, compiler, assemble=ptxas, clang=clang)) for v in wanted]
        for variant, job in jobs:
            try:
                rows.append((variant, job.result()))
            except Exception as error:
                failed += 1
                print(f"{variant.name} {' '.join(variant.flags)}: {error}", flush=True)
    counts = Counter(variant.name for variant, _ in rows)
    print(
        f"{len(rows)} of {len(wanted)} kernels compiled by {compiler.version}: {dict(sorted(counts.items()))}"
    )
    largest = max((row["dynamic"] for _, row in rows), default=0)
    print(f"{sum(row['dynamic'] > 0 for _, row in rows)} in dynamic shared memory, at most {largest} bytes")
    if ptxas:
        print(
            f"at most {max(row['registers'] for _, row in rows)} registers; "
            f"{sum(row['spilled'] > 0 for _, row in rows)} spill on sm_90"
        )
    return 1 if failed else 0
