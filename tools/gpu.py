"""Everything that needs a GPU, in order: right first, then safe, then fast. ``make gpu`` calls this.

Usage: gpu.py [parity] [cases] [sanitizer] [twin] [measure] [bars]     (all of them without arguments)

``twin`` runs the source of the MI50 kernels as CUDA: it tests their algorithm and says nothing about an AMD GPU.

Records go to results/<device>/; a stage that fails stops the run, so no time is written for a wrong kernel. The record of
stages keeps what earlier runs at the same commit said of stages that were not asked for again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_record import ROOT, folder, records, write

# stages of one line run side by side: they mostly compile
ORDER = (("parity", "cases"), ("sanitizer",), ("twin",), ("measure",), ("bars",))
STAGES = tuple(stage for line in ORDER for stage in line)
MEMCHECKED = "test_forward_and_backward_tiles or test_nothing_is_stored or test_cumulative or test_empty_splits or odd_element"

TWIN = "tests/gpu/test_twin.py"
# of the twin, by name: forward, dropout, every option dense and packed, and a decode whose parts are combined
RACECHECKED = (
    "two tiles each way, causal",
    "dropout",
    "everything",
    "packed, everything",
    "cached, 200 keys, three parts",
)
FUZZ_MINUTES = "2"


def run(*command: str, **environment: str) -> int:
    """One stage's command, with the package of this checkout."""
    print("+", *command, flush=True)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, **environment}).returncode


def pytest(*arguments: str, prefix: tuple[str, ...] = (), **environment: str) -> int:
    return run(
        *prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, **environment
    )


def parity() -> int:
    """The one suite, on the device, with every backend that is written for it."""
    return pytest("tests/parity", "-k", "triton or hopper", *_workers(), ATTNPROOF_TEST_DEVICE="cuda")


def cases() -> int:
    """Cases of the list that need a device, the large ones included."""
    return pytest("tests/gpu", "--ignore", TWIN, *_workers())


def sanitizer() -> int:
    """memcheck and racecheck over the small cases; the allocator's cache would hide an overrun from memcheck."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not installed: the sanitizer stage did not run", flush=True)
        return 1
    failed = 0
    for check in ("memcheck", "racecheck"):
        failed |= pytest(
            *("tests/gpu", "-k", MEMCHECKED),
            prefix=(tool, "--tool", check, "--error-exitcode", "9", "--print-limit", "5"),
            PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        )
    return failed


def twin() -> int:
    """The MI50 kernels' source as CUDA: float64 at full size, racecheck, and a short run of random calls."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not installed: the twin's racecheck did not run", flush=True)
        return 1
    failed = pytest(TWIN, *_workers(), OMP_NUM_THREADS="2")
    test = f"{TWIN}::test_the_interpreters_cases_agree_with_float64_and_repeat"
    failed |= pytest(
        *(f"{test}[{name}]" for name in RACECHECKED),
        prefix=(tool, "--tool", "racecheck", "--error-exitcode", "9", "--print-limit", "5"),
    )
    return failed | run(sys.executable, "tools/mi50_twin.py", "fuzz", "--minutes", FUZZ_MINUTES)


def measure() -> int:
    import torch

    into = ROOT / "results" / folder(torch.cuda.get_device_name())
    return run(sys.executable, "tools/gpu_measure.py", str(into))


# what `attnproof` itself measures on a GPU: sweeps, memory, drift to a million keys, the documents' training table
# (12 layers, batch 4, N = 4096), and curves over 300 steps
TRAIN = ("train", "--model", "gpt2-small", "--size", "full", "--dtype", "bfloat16")
BARS = {
    "measure-figure": ("measure", "--preset", "figure"),
    "measure-decode": ("measure", "--preset", "decode"),
    "measure-memory": ("memory", "--limit", "100"),
    "measure-drift": ("drift",),
    "measure-table": (*TRAIN, "--length", "4096", "--checkpointed", "--steps", "4", "--seeds", "2"),
    "measure-train": (*TRAIN, "--steps", "300"),
}


def bars() -> int:
    """Every bar of the measuring chain; each command judges its own and leaves a record."""
    import torch

    into = ROOT / "results" / folder(torch.cuda.get_device_name())
    codes = [
        run(
            sys.executable,
            "-m",
            "attnproof.cli",
            *command,
            "--device",
            "cuda",
            "--json",
            str(into / f"{name}.json"),
        )
        for name, command in BARS.items()
    ]
    return max(codes)


def _workers() -> list[str]:
    """Compilation dominates; spread it where pytest-xdist is installed."""
    from importlib.util import find_spec

    # pytest-benchmark, where installed, warns of xdist, and warnings are errors
    return ["-n", str(min(12, os.cpu_count() or 1)), "-p", "no:benchmark"] if find_spec("xdist") else []


def earlier(into: Path, wanted: list[str]) -> list[dict[str, Any]]:
    """Rows of the record of stages that still hold: of this very commit, and of stages that do not run again now."""
    path, now = into / "stages.json", records.environment("cuda")
    if not path.is_file():
        return []
    document = json.loads(path.read_text())
    then = document["environment"]
    same = all(then[name] == now[name] for name in ("commit", "device", "versions"))
    if then["dirty"] or now["dirty"] or not same:
        return []
    return [row for row in document["results"] if row["stage"] not in wanted]


def main() -> None:
    import torch

    wanted = sys.argv[1:] or list(STAGES)
    if unknown := set(wanted) - set(STAGES):
        sys.exit(f"stages: expected some of {', '.join(STAGES)}, got {', '.join(sorted(unknown))}")
    into = ROOT / "results" / folder(torch.cuda.get_device_name())
    results: list[dict[str, Any]] = []
    held = earlier(into, wanted)
    for line in ORDER:
        together = [stage for stage in line if stage in wanted]
        with ThreadPoolExecutor(len(line)) as pool:
            codes = list(pool.map(lambda stage: globals()[stage](), together))
        for stage, code in zip(together, codes, strict=True):
            results.append({"candidate": "attnproof", "stage": stage, "passed": code == 0})
            print(f"{stage}: {'passed' if code == 0 else 'FAILED'}", flush=True)
        # after each line, so that a run that is cut short has said what it knows
        write("device", "stages", {"command": "make gpu", "stages": wanted}, [*held, *results], into)
        if any(codes):
            break
    sys.exit(0 if all(r["passed"] for r in results) else 1)


if __name__ == "__main__":
    main()
