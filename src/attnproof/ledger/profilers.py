"""Runs the workload under ncu or rocprof and returns each call with its kernels and its prediction.

ncu is told to leave clocks and caches alone and to run the whole process again for each pass over the
counters: replaying single kernels saves and restores memory around each, which disturbs the very cache that
is measured.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..masks import causal
from . import counters
from .counters import Compared, Counted, CounterError
from .hardware import Hardware
from .traffic import Call
from .workload import DIRECTIONS, Case

LENGTHS = (1024, 2048, 4096, 8192, 16384)
HEADS = (1, 32)
HEAD_DIMS = (64, 128)
WORKLOAD = "attnproof.ledger.workload"


@dataclass(frozen=True)
class Measured:
    """What a run under a profiler gave: a comparison per call; the calls that were not made, with reasons."""

    tool: str
    command: tuple[str, ...]
    compared: tuple[tuple[Case, Compared], ...]
    skipped: tuple[tuple[Case, str], ...]


def cases(
    implementations: Sequence[str],
    *,
    lengths: Sequence[int] = LENGTHS,
    heads: Sequence[int] = HEADS,
    head_dims: Sequence[int] = HEAD_DIMS,
    dtype: str = "float16",
    masked: bool = False,
) -> list[Case]:
    """The grid of calls, smallest first, forward and backward."""
    grid = product(lengths, heads, head_dims, implementations, DIRECTIONS)
    return [Case(name, way, n, h, d, dtype, masked) for n, h, d, name, way in grid]


def find_tool() -> str:
    """Path of ncu, rocprofv3 or rocprof, in that order."""
    for tool in ("ncu", "rocprofv3", "rocprof"):
        path = shutil.which(tool)
        if path is not None:
            return path
    for path in sorted(Path("/usr/local").glob("cuda*/bin/ncu"), reverse=True):
        return str(path)
    raise CounterError("counters: expected ncu (NVIDIA) or rocprof (AMD) on the path, found neither")


def command(
    tool: str,
    plan: Path,
    manifest: Path,
    output: Path,
    replay: str = "application",
    *,
    workload: str = WORKLOAD,
    metrics: Sequence[str] = (),
    page: str = "",
) -> list[str]:
    """The command line of a profiler around a workload; its table goes to `output` or into its folder.

    `metrics` are the tool's own; left out, those of the memory traffic. `page` is ncu's, its own default if left out.
    """
    work = [sys.executable, "-m", workload, str(plan), str(manifest)]
    name = Path(tool).name
    if name == "ncu":
        options = ["--csv", "--print-units", "base", "--log-file", str(output), "--target-processes", "all"]
        options += ["--clock-control", "none", "--cache-control", "none", "--replay-mode", replay]
        options += ["--page", page] if page else []
        options += ["--profile-from-start", "off", "--metrics", ",".join(metrics or counters.NCU_METRICS)]
        return [tool, *options, *work]
    if name == "rocprofv3":
        options = [
            "--pmc",
            *(metrics or counters.ROCPROF_METRICS),
            "--output-format",
            "csv",
            "-d",
            str(output.parent),
            "-o",
            "attn",
        ]
        return [tool, *options, "--", *work]
    return [
        tool,
        "-i",
        str(_rocprof_input(output, metrics or counters.ROCPROF_METRICS)),
        "-o",
        str(output),
        *work,
    ]


def _rocprof_input(output: Path, metrics: Sequence[str]) -> Path:
    """The older rocprof takes its counters from a file."""
    path = output.with_name("counters.txt")
    path.write_text("pmc: " + " ".join(metrics) + "\n", encoding="utf-8")
    return path


def measure(
    wanted: Sequence[Case], hardware: Hardware, *, tool: str | None = None, replay: str = "application"
) -> Measured:
    """Profile every case in one process and put the counters beside the predictions."""
    tool = find_tool() if tool is None else tool
    done = profile(tool, [asdict(case) for case in wanted], replay=replay)
    parse = counters.parse_ncu if Path(tool).name == "ncu" else counters.parse_rocprof
    return Measured(Path(tool).name, done.command, *join(done.manifest, parse(done.table), hardware))


@dataclass(frozen=True)
class Profiled:
    """A profiler's run: its command without this machine's folders, what the workload wrote, and the table."""

    command: tuple[str, ...]
    manifest: Any
    table: str


def profile(
    tool: str,
    plan: Any,
    *,
    replay: str = "application",
    workload: str = WORKLOAD,
    metrics: Sequence[str] = (),
    page: str = "",
) -> Profiled:
    """Run `python -m WORKLOAD PLAN MANIFEST` under a profiler.

    Raises:
        CounterError: the workload did not come to its end; the message says what the profiler said.
    """
    with TemporaryDirectory(prefix="attnproof-") as folder:
        told, manifest, output = (
            Path(folder) / name for name in ("plan.json", "manifest.json", "counters.csv")
        )
        told.write_text(json.dumps(plan), encoding="utf-8")
        line = command(tool, told, manifest, output, replay, workload=workload, metrics=metrics, page=page)
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        table = _table(output)
        if not manifest.is_file():
            raise CounterError(counters.explain_failure(table + done.stdout, Path(tool).name))
        made = json.loads(manifest.read_text(encoding="utf-8"))
    # what went wrong may stand on the screen only: the table without a table then says it
    return Profiled(
        tuple(_plain(part, folder) for part in line), made, table if table.strip() else done.stdout
    )


def _plain(part: str, folder: str) -> str:
    """A command's part without this machine's folders."""
    return part.replace(f"{folder}/", "").replace(sys.executable, "python").rsplit("/", 1)[-1]


def _table(output: Path) -> str:
    """The table where the profiler left it."""
    if output.is_file():
        return output.read_text(encoding="utf-8", errors="replace")
    found = sorted(output.parent.rglob("*counter_collection.csv"))
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in found[:1])


def again(record: dict[str, Any], hardware: Hardware, tick: Callable[[str], Any] | None = None) -> Measured:
    """The counters of a record beside today's model, which may not be the one that the record was written with."""
    if record.get("kind") != "ledger":
        raise CounterError(f"record: expected one of `ledger --measure`, got kind {record.get('kind')!r}")
    compared: list[tuple[Case, Compared]] = []
    for row in record["results"]:
        if row["status"] == "SKIP":
            continue
        case = Case(**row["shape"])
        compared.append((case, _beside(case, [Counted(**kernel) for kernel in row["kernels"]], hardware)))
        if tick is not None:
            tick(str(case))
    protocol = record["protocol"]
    return Measured(protocol["tool"], tuple(protocol["command"]), tuple(compared), ())


def join(
    made: Sequence[dict[str, Any]], kernels: Sequence[Counted], hardware: Hardware
) -> tuple[tuple[tuple[Case, Compared], ...], tuple[tuple[Case, str], ...]]:
    """Calls with their kernels and predictions, and the calls that were skipped with their reasons."""
    named = [(Case(**{k: v for k, v in entry.items() if k != "skipped"}), entry["skipped"]) for entry in made]
    ran = [case for case, skipped in named if skipped is None]
    skipped = tuple((case, reason) for case, reason in named if reason is not None)
    return tuple(_compared(ran, counters.segments(kernels, len(ran)), hardware)), skipped


def _compared(
    ran: Sequence[Case], parts: Sequence[Sequence[Counted]], hardware: Hardware
) -> Iterator[tuple[Case, Compared]]:
    for case, part in zip(ran, parts, strict=True):
        yield case, _beside(case, part, hardware)


def _beside(case: Case, part: Sequence[Counted], hardware: Hardware) -> Compared:
    call = Call.dense(
        case.length,
        heads=case.heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        mask=causal() if case.causal else None,
    )
    return counters.compare(case.implementation, case.direction, call, part, hardware)
