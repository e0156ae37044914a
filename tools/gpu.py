"""Everything that needs a GPU, in order: right first, then safe, then fast. ``make gpu`` calls this.

Usage: gpu.py [parity] [cases] [sanitizer] [twin] [measure] [bars]     (all of them without arguments)
       gpu.py bars:figure [bars:decode ...] [--into DIR] [--minutes N]  (parts of the last stage, alone)

``twin`` runs the source of the MI50 kernels as CUDA: it tests their algorithm and says nothing about an AMD GPU.

A part of ``bars`` that passes its budget is interrupted as by Ctrl-C: what it finished stays in a .partial file beside
its record, and the same command goes on from there.

Records go to results/<device>/; a stage that fails stops the run, so no time is written for a wrong kernel. Every row of the
record of stages names the commit at which its stage ran; stages that are not asked for again keep their rows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
# beside other work a process may need longer than the tool's ten seconds to reach its first call
PATIENT = ("--launch-timeout", "120", "--error-exitcode", "9", "--print-limit", "5")


def run(*command: str, **environment: str) -> int:
    """One stage's command, with the package of this checkout."""
    print("+", *command, flush=True)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, **environment}).returncode


def pytest(*arguments: str, prefix: tuple[str, ...] = (), **environment: str) -> int:
    """Tests, many processes of which share the cores: one thread each for what is expected, or they wait for each other."""
    environment = {"OMP_NUM_THREADS": "1", **environment}
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
            prefix=(tool, "--tool", check, *PATIENT),
            PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        )
    return failed


def twin() -> int:
    """The MI50 kernels' source as CUDA: float64 at full size, racecheck, and a short run of random calls."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not installed: the twin's racecheck did not run", flush=True)
        return 1
    test = f"{TWIN}::test_the_interpreters_cases_agree_with_float64_and_repeat"
    cases = [f"{test}[{name}]" for name in RACECHECKED]
    with tempfile.TemporaryDirectory() as kept, ThreadPoolExecutor(2) as pool:
        failed = pytest(TWIN, *_workers(), ATTNPROOF_TWIN_CACHE=kept)
        races = pool.submit(
            pytest, *cases, prefix=(tool, "--tool", "racecheck", *PATIENT), ATTNPROOF_TWIN_CACHE=kept
        )
        fuzz = (sys.executable, "tools/mi50_twin.py", "fuzz", "--more", "--minutes", FUZZ_MINUTES)
        failed |= run(*fuzz, ATTNPROOF_TWIN_CACHE=kept)
        return failed | races.result()


def measure() -> int:
    import torch

    into = ROOT / "results" / folder(torch.cuda.get_device_name())
    return run(sys.executable, "tools/gpu_measure.py", str(into))


@dataclass(frozen=True)
class Bar:
    """A command of `attnproof`, and the minutes after which it is interrupted."""

    command: tuple[str, ...]
    minutes: float


# what `attnproof` itself measures on a GPU: sweeps, memory, drift to a million keys, the documents' training table
# (12 layers, batch 4, N = 4096), curves over 300 steps, and the other models whose gains were published
FULL = ("--size", "full", "--dtype", "bfloat16")
GPT2 = ("train", "--model", "gpt2-small", *FULL)
BARS = {
    "figure": Bar(("measure", "--preset", "figure"), 9),
    "decode": Bar(("measure", "--preset", "decode"), 3),
    "memory": Bar(("memory", "--limit", "100"), 3),
    "drift": Bar(("drift",), 5),
    "table": Bar((*GPT2, "--length", "4096", "--checkpointed", "--steps", "4", "--seeds", "3"), 4),
    "train": Bar((*GPT2, "--steps", "300"), 8),
    "bert": Bar(("train", "--model", "bert-large", *FULL, "--steps", "40", "--seeds", "2"), 4),
    "lra": Bar(("train", "--model", "lra", *FULL, "--steps", "40", "--seeds", "2"), 4),
}
INTERRUPTED = 130
GRACE = 60  # seconds that an interrupted command has to write down what it did
ENDS = {0: "passed", INTERRUPTED: "its budget ended first: the same command goes on"}


def bars() -> int:
    """Every bar of the measuring chain; each command judges its own and leaves a record."""
    codes = [bar(name) for name in BARS]
    return int(any(codes))


def bar(name: str, into: Path | None = None, minutes: float | None = None) -> int:
    """One part of ``bars``; 130 if it was interrupted by its budget."""
    import torch

    into = into or ROOT / "results" / folder(torch.cuda.get_device_name())
    into.mkdir(parents=True, exist_ok=True)
    one = BARS[name]
    target = into / f"measure-{name}.json"
    command = (sys.executable, "-m", "attnproof.cli", *one.command, "--device", "cuda", "--json", str(target))
    return within(60 * (minutes or one.minutes), *command)


def within(seconds: float, *command: str) -> int:
    """A command that is interrupted after so many seconds, with all that it started, and ended if that does not help."""
    print("+", *command, flush=True)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    child = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, start_new_session=True
    )
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"the budget of {seconds:.0f} s is spent: the same command goes on from here", flush=True)
        return _interrupt(child)
    except KeyboardInterrupt:
        _interrupt(child)
        raise


def _interrupt(child: subprocess.Popen[bytes]) -> int:
    """What Ctrl-C does in a terminal, which a session of its own does not hear of; after the grace, the end."""
    for how in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(child.pid, how)
            child.wait(GRACE)
            break
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    return child.wait()


def _workers() -> list[str]:
    """Compilation dominates; spread it where pytest-xdist is installed."""
    from importlib.util import find_spec

    # pytest-benchmark, where installed, warns of xdist, and warnings are errors
    return ["-n", str(min(12, os.cpu_count() or 1)), "-p", "no:benchmark"] if find_spec("xdist") else []


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = [f"bars:{name}" for name in BARS]
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join((*STAGES, *parts)))
    parser.add_argument("--into", type=Path, help="folder for the records of parts of bars")
    parser.add_argument("--minutes", type=float, help="budget of each part of bars, instead of its own")
    asked = parser.parse_args(words)
    if unknown := set(asked.stages) - {*STAGES, *parts}:
        parser.error(
            f"stages: expected some of {', '.join((*STAGES, *parts))}, got {', '.join(sorted(unknown))}"
        )
    return asked


def earlier(into: Path, wanted: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of the record of stages that still hold, each of the commit that it names: those that do not run again now."""
    path, now = into / "stages.json", records.environment("cuda")
    if not path.is_file():
        return []
    document = json.loads(path.read_text())
    then = document["environment"]
    if now["dirty"] or any(then[name] != now[name] for name in ("device", "versions")):
        return []
    return [row for row in document["results"] if row["stage"] not in wanted and not row["dirty"]]


def main() -> None:
    """Run as a script."""
    asked = arguments(sys.argv[1:])
    parts = [stage.partition(":")[2] for stage in asked.stages if ":" in stage]
    codes = {name: bar(name, asked.into and asked.into.absolute(), asked.minutes) for name in parts}
    for name, code in codes.items():
        print(f"bars:{name}: {ENDS.get(code, f'FAILED with {code}')}", flush=True)
    if any(codes.values()):
        sys.exit(1)
    if stages := [stage for stage in asked.stages if ":" not in stage] or ([] if parts else list(STAGES)):
        sys.exit(0 if run_stages(stages) else 1)


def run_stages(wanted: Sequence[str]) -> bool:
    """Whole stages in their order; a record says which passed."""
    import torch

    into = ROOT / "results" / folder(torch.cuda.get_device_name())
    results: list[dict[str, Any]] = []
    held, now = earlier(into, wanted), records.environment("cuda")
    code = {"commit": now["commit"], "dirty": now["dirty"]}
    for line in ORDER:
        together = [stage for stage in line if stage in wanted]
        with ThreadPoolExecutor(len(line)) as pool:
            codes = list(pool.map(lambda stage: globals()[stage](), together))
        for stage, exit_code in zip(together, codes, strict=True):
            results.append({"candidate": "attnproof", "stage": stage, "passed": exit_code == 0, **code})
            print(f"{stage}: {'passed' if exit_code == 0 else 'FAILED'}", flush=True)
        # after each line, so that a run that is cut short has said what it knows
        write("device", "stages", {"command": "make gpu", "stages": list(wanted)}, [*held, *results], into)
        if any(codes):
            break
    return all(r["passed"] for r in results)


if __name__ == "__main__":
    main()
