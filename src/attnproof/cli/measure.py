"""Commands that measure: `measure`, `drift`, `train`, `why-slow`, `report`; `baseline` and `regress` join from `_gates`.

Exit codes beyond the common ones: 77 when no candidate serves any case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from attnproof.cli import _gates
from attnproof.cli._common import JsonOption, guarded, out_console, progress, show, write_json, write_text
from attnproof.cli._measuring import (
    FOLDER,
    Cache,
    CandidateOption,
    DeviceOption,
    HtmlOption,
    device_of,
    engineering,
    kept,
    leave,
    targets,
    write,
)
from attnproof.dtypes import NAMES


class Preset(str, Enum):
    """Sweeps by name."""

    figure = "figure"
    decode = "decode"
    small = "small"
    small_decode = "small-decode"


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    commands: dict[str, Callable[..., bool | None]] = {
        "measure": measure,
        "drift": drift,
        "train": train,
        "why-slow": why_slow,
        "report": report,
    }
    for name, command in commands.items():
        app.command(name, rich_help_panel="Measure")(guarded(command))
    _gates.register(app)


def measure(
    preset: Annotated[
        Preset | None, typer.Option("--preset", help="Default: figure on a GPU, small on a CPU.")
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="TEXT", help='A case, as "N1024 D64 causal". Repeatable.'),
    ] = None,
    candidate: CandidateOption = None,
    cache: Annotated[
        Cache | None, typer.Option("--cache", help="Default: cold on a GPU, warm on a CPU.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Calls before the first sample.")] = 10,
    timed: Annotated[int, typer.Option(min=2, help="Samples of each candidate and case.")] = 50,
    slots: Annotated[int, typer.Option(min=1, help="Sets of inputs that calls rotate through.")] = 3,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", min=0, help="Processes that compile before the clock starts; default: none on a CPU."
        ),
    ] = None,
    device: DeviceOption = None,
    html: HtmlOption = None,
    json_path: JsonOption = None,
) -> bool:
    """Time attention side by side: ours, torch's, yours. No time without a green verdict on the same numbers."""
    from attnproof.measure import implementations, shapes, sweep, warm
    from attnproof.measure.protocol import Protocol
    from attnproof.measure.timer import timer_for
    from attnproof.verify import records

    where = device_of(device)
    chosen = preset or (Preset.figure if where == "cuda" else Preset.small)
    wanted = [shapes.parse(text) for text in case or ()] or list(shapes.PRESETS[chosen.value]())
    names = tuple(candidate or implementations.names(where))
    how = Protocol(
        warmup, timed, (cache or (Cache.cold if where == "cuda" else Cache.warm)) is Cache.cold, slots
    )
    timer = timer_for(where)
    protocol = how.as_dict() | {
        "preset": "" if case else chosen.value,
        "timer": timer.name,
        "flops": "2 D FLOP a pair and matrix product; pairs are counted from the mask's intervals",
        "bytes": "q, k, v read and out written once; twice that with gradients",
        "candidates": list(names),
    }
    record_path, page, partial = targets("measure", json_path, html)
    what = {"command": "measure", "cases": [shape.name for shape in wanted], "protocol": protocol}
    processes = warm.jobs_for(where) if jobs is None else jobs
    steps = len(wanted) * (2 if processes else 1) + 1
    with kept(partial, what, where) as journal, progress("measure", steps) as tick:
        done = sweep.run(wanted, names, where, timer, how, journal=journal, jobs=processes, tick=tick)
        protocol |= {"roofs": done.roofs, "overhead": done.overhead, "seconds": done.seconds}
        record = records.record("measure", protocol, done.rows, where)
    _print_rows(done.rows, how.as_dict()["cache"])
    spent = ", ".join(f"{what} {took:.1f} s" for what, took in done.seconds.items())
    out_console().print(
        f"{spent}; host work between samples is {done.overhead:.1%} of their time", soft_wrap=True
    )
    write(record, record_path, page)
    return leave(done.rows)


def _print_rows(rows: list[dict[str, Any]], cache: str) -> None:
    console = out_console()
    cells: list[list[str]] = []
    last = ""
    for row in rows:
        first = "" if row["case"] == last else row["case"]
        last = row["case"]
        if "samples" not in row:
            # SKIP is a refusal, FAIL a wrong result: the sentence takes the place of a time
            cells.append([first, row["candidate"], row["status"], "", "", "", "", row["reason"]])
            continue
        found, ratio = row["summary"], row["ratio"]
        cells.append(
            [
                first,
                row["candidate"],
                engineering(found["median"]),
                engineering(found["p95"]),
                f"{row['tflops']:.3g}",
                f"{row['gbps']:.3g}",
                "" if ratio is None else f"{ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}]",
                row["roof"]["sentence"],
            ]
        )
    show(
        console,
        f"medians of interleaved calls, {cache} caches; speed is the first candidate's time over this one's",
        *("case", "candidate", "median", "p95", "TFLOP/s", "GB/s", "speed, 99%", "what limits it"),
        rows=cells,
    )


def drift(
    candidate: CandidateOption = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help="Repeatable; default: float16, bfloat16, float32.")
    ] = None,
    longest: Annotated[
        int | None,
        typer.Option("--longest", min=1024, help="Keys; default: 65536 on a CPU, a million on a GPU."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Draws of the inputs at each length.")] = 3,
    device: DeviceOption = None,
    html: HtmlOption = None,
    json_path: JsonOption = None,
) -> bool:
    """Does the error grow with length? z and RMS against the number of keys, a half-precision accumulator beside them."""
    from attnproof.cli import _growth

    for kind in dtype or ():
        if kind not in NAMES:
            raise ValueError(f"--dtype: expected some of {', '.join(NAMES)}, got {kind}")
    where = device_of(device)
    stop = longest or (2**20 if where == "cuda" else 2**16)
    plan = _growth.DriftPlan(
        tuple(candidate or _growth.drift_names(where)),
        tuple(dtype or ("float16", "bfloat16", "float32")),
        stop,
        seeds,
        where,
    )
    record_path, page, partial = targets("drift", json_path, html)
    with kept(partial, {"command": "drift", "plan": str(plan)}, where) as journal:
        record, holds = _growth.drift(plan, journal)
    write(record, record_path, page)
    return holds


class Model(str, Enum):
    """Models to train."""

    gpt2_small = "gpt2-small"
    bert_large = "bert-large"
    lra = "lra"
    dit = "dit"
    tiny = "tiny"


class Attention(str, Enum):
    """What a model's attention is."""

    eager = "eager"
    sdpa = "sdpa"
    attnproof = "attnproof"


class Scale(str, Enum):
    """Model sizes: as published, or what a laptop trains in minutes."""

    small = "small"
    full = "full"


def train(
    model: Annotated[Model, typer.Option("--model", help="What is trained.")] = Model.gpt2_small,
    attention: Annotated[
        list[Attention] | None, typer.Option("--attention", help="Repeatable; default: all three.")
    ] = None,
    size: Annotated[
        Scale | None, typer.Option("--size", help="Default: small on a CPU, full on a GPU.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=4, help="Default: 60 on a CPU, 300 on a GPU.")] = None,
    seeds: Annotated[
        int, typer.Option(min=2, help="Seeds of the first attention: the spread to stay within.")
    ] = 3,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 by autocast.")] = "",
    length: Annotated[int | None, typer.Option("--length", min=8, help="Tokens of a sequence.")] = None,
    checkpointed: Annotated[
        bool,
        typer.Option("--checkpointed", help="Also eager with its blocks computed again in the backward."),
    ] = False,
    device: DeviceOption = None,
    html: HtmlOption = None,
    json_path: JsonOption = None,
) -> bool:
    """Train a small real model with each attention: their loss curves must coincide within the spread of seeds."""
    where = device_of(device)
    from attnproof.cli import _growth
    from attnproof.measure import models

    scale = size or (Scale.full if where == "cuda" else Scale.small)
    sizes = models.SIZES if scale is Scale.full else models.SMALL
    kind = dtype or ("bfloat16" if where == "cuda" else "float32")
    if kind not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype: expected float32 or bfloat16, got {kind}")
    names = tuple(dict.fromkeys(one.value for one in attention or Attention))
    names += (_growth.CHECKPOINTED,) if checkpointed else ()
    count = steps or (300 if where == "cuda" else 60)
    shape = sizes[model.value]
    shape = shape if length is None else replace(shape, length=length)
    plan = _growth.TrainPlan(model.value, names, shape, count, seeds, kind, where)
    record_path, page, partial = targets("train", json_path, html)
    with kept(partial, {"command": "train", "plan": str(plan)}, where) as journal:
        record, holds = _growth.train(plan, journal)
    write(record, record_path, page)
    return holds


def why_slow(
    case: Annotated[str, typer.Argument(metavar="CASE", help='As `measure` names it: "N1024 D64 causal".')],
    candidate: Annotated[str, typer.Option("--candidate", "-c", help="Default: the fastest of ours.")] = "",
    device: DeviceOption = None,
    json_path: JsonOption = None,
) -> bool:
    """Why is this call slow? First whether it is right, then where its time goes, spills, conflicts and alignment."""
    from attnproof.measure import implementations, shapes, slow
    from attnproof.verify import records

    where, shape = device_of(device), shapes.parse(case)
    name = candidate or implementations.names(where)[0]
    console = out_console()
    console.print(f"{name}, {shape.name}", soft_wrap=True)
    entries: list[dict[str, Any]] = []
    holds = True
    with progress("why-slow", len(slow.STEPS)) as tick:
        for step in slow.explain(shape, name, where):
            tick(step.question)
            console.print(
                f"{len(entries) + 1}. {step.question}: {step.sentence}", soft_wrap=True, markup=False
            )
            entries.append({"case": shape.name, "candidate": name, **step.as_dict()})
            holds = holds and step.status != "FAIL"
    write_json(json_path, records.record("why-slow", {"order": list(slow.STEPS)}, entries, where))
    return holds


def report(
    record: Annotated[
        list[Path], typer.Argument(help="Records of measure, memory, drift or train; several machines.")
    ],
    html: Annotated[Path, typer.Option("--html", metavar="PATH", help="The page.")] = FOLDER
    / "measured.html",
) -> None:
    """Several records, of several machines, on one page."""
    from attnproof.report import measured
    from attnproof.verify import records

    documents = [records.load(path) for path in record]
    if html.parent == FOLDER:
        FOLDER.mkdir(exist_ok=True)
    write_text(html, measured.render(documents))
    out_console().print(f"report {html}", soft_wrap=True)
