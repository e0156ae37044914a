"""Commands that need nothing but NumPy: trace, compare, memory, blocks, explain, doctor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from attnproof.cli._common import JsonOption, guarded, out_console, progress, show, write_json
from attnproof.cli._machine import OPTIONAL, machine, self_tests, simd_target
from attnproof.cli._measuring import (
    CandidateOption,
    Device,
    DeviceOption,
    HtmlOption,
    device_of,
    kept,
    targets,
    write,
)


class Order(str, Enum):
    """Which loop is outside."""

    keys = "keys"
    queries = "queries"


Sizes = Annotated[list[int] | None, typer.Option("--n", min=1, help="Sequence length; repeat for several.")]
DOUBLING = 0.2  # how far a ratio may be from its law and still hold


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    commands: list[Callable[..., bool]] = [trace, compare, memory, blocks, explain, doctor]
    for command in commands:
        app.command(rich_help_panel="Understand")(guarded(command))


def trace(
    n: Annotated[int, typer.Option(min=1, help="Keys and queries.")] = 8,
    d: Annotated[int, typer.Option(min=1, help="Head dim.")] = 4,
    block: Annotated[int, typer.Option(min=1, help="Keys per tile.")] = 2,
    order: Annotated[
        Order, typer.Option(help="Outer loop: keys (FlashAttention 1) or queries (2).")
    ] = Order.keys,
    row: Annotated[int, typer.Option(min=0, help="The query row to watch.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the inputs.")] = 0,
    causal: Annotated[bool, typer.Option("--causal", help="Keys up to the query only.")] = False,
    json_path: JsonOption = None,
) -> bool:
    """Watch one row's running maximum, sum and rescale factor, tile by tile."""
    from attnproof.cli import _lessons

    if row >= n:
        raise ValueError(f"--row: expected a row below --n {n}, got {row}")
    result = _lessons.trace(n, d, block, order.value, row, seed, causal)
    shown = result.rows if len(result.rows) <= 40 else (*result.rows[:20], *result.rows[-20:])
    console = out_console()
    show(
        console,
        f"N={n} D={d} block={block} {order.value} outer, query row {row}",
        *("j", "m", "l", "corr"),
        rows=([str(r.j), f"{r.m:+.4f}", f"{r.l:.4f}", f"{r.corr:.4f}"] for r in shown),
        note="" if shown is result.rows else f"{len(result.rows)} tiles, the first and last 20 shown",
    )
    console.print(f"lse = m + ln l = {result.lse:+.4f}")
    console.print(
        f"against the whole matrix: out {result.error_out:.1e}, lse {result.error_lse:.1e} "
        f"(bound {_lessons.EXACT:.0e}): {'equal' if result.holds else 'NOT equal'}"
    )
    options = {
        "n": n,
        "d": d,
        "block": block,
        "order": order.value,
        "row": row,
        "seed": seed,
        "causal": causal,
    }
    write_json(json_path, {"command": "trace", "options": options, "holds": result.holds, **asdict(result)})
    return result.holds


def compare(
    n: Sizes = None,
    d: Annotated[int, typer.Option(min=1, help="Head dim.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each candidate.")] = 7,
    json_path: JsonOption = None,
) -> bool:
    """Exactness and time in float64, one head: naive NumPy, our backends, torch. Inputs of size N come from seed N."""
    from attnproof.cli import _lessons

    sizes = n or [256, 1024, 2048, 4096]
    with progress("compare", len(sizes) * (1 + rounds)) as tick:
        results = list(_lessons.compare(sizes, d, rounds, tick))
    # the naive form is what the others are measured against
    holds = all(r.exact for r in results if r.ours)
    rows: list[list[str]] = []
    for r in results:
        first = r.candidate == "naive NumPy"
        errors = ["-", "-"] if first else [f"{r.error_full:.1e}", f"{r.error_causal:.1e}"]
        verdict = "" if first else "exact" if r.exact else ("NOT exact" if r.ours else "above the bound")
        rows.append(
            [
                str(r.n) if first else "",
                r.candidate,
                *errors,
                verdict,
                f"{r.seconds * 1e3:.2f}",
                f"{r.ratio:.2f}",
            ]
        )
    show(
        out_console(),
        f"float64, D={d}, one head, median of {rounds} interleaved rounds",
        *("N", "candidate", "error full", "error causal", "verdict", "ms full", "time / naive"),
        rows=rows,
        note=f"errors: max abs against naive NumPy, exact is below {_lessons.EXACT:.0e}; times are shown, not judged",
    )
    payload = {"command": "compare", "options": {"n": sizes, "d": d, "rounds": rounds}, "holds": holds}
    write_json(json_path, {**payload, "machine": machine(), "rows": [asdict(r) for r in results]})
    return holds


def memory(
    numpy: Annotated[
        bool, typer.Option("--numpy", help="Peak memory of NumPy code, by tracemalloc.")
    ] = False,
    n: Sizes = None,
    d: Annotated[int, typer.Option(min=1, help="Head dim.")] = 64,
    block: Annotated[int, typer.Option(min=1, help="Rows and keys per tile, with --numpy.")] = 64,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Heads, without --numpy.")] = 2,
    dtype: Annotated[str, typer.Option("--dtype", help="Default: float32, bfloat16 on a GPU.")] = "",
    candidate: CandidateOption = None,
    limit: Annotated[float, typer.Option("--limit", min=0.01, help="GiB that no length may pass.")] = 2.0,
    device: DeviceOption = None,
    html: HtmlOption = None,
    json_path: JsonOption = None,
) -> bool:
    """Peak memory against N: of torch calls with their gradients, or with --numpy of the forms in float64, one head."""
    from attnproof.cli import _lessons

    if not numpy:
        return _memory_of_calls(n, d, heads, dtype, candidate, limit, device, html, json_path)
    sizes = sorted(n or [1024, 2048, 4096, 8192])
    with progress("memory", 3 * len(sizes)) as tick:
        results = _lessons.memory(sizes, d, block, tick)
    laws = _doublings(results)
    holds = all(law["holds"] for law in laws)
    mib = _lessons.MIB
    console = out_console()
    show(
        console,
        f"peak MiB by tracemalloc, float64, D={d}, blocks {block}x{block}, inputs not counted",
        *("N", "naive", "2 N^2 8 bytes", "keys outer", "queries outer", "naive / keys outer"),
        rows=(
            [
                str(r.n),
                *(f"{x / mib:.1f}" for x in (r.naive, r.theory, r.keys_outer, r.queries_outer)),
                f"{r.ratio:.1f}",
            ]
            for r in results
        ),
    )
    for law in laws:
        verdict = "holds" if law["holds"] else "DOES NOT HOLD"
        console.print(
            f"N {law['from']} to {law['to']}: naive x{law['naive']:.2f} (law x4), "
            f"keys outer x{law['keys_outer']:.2f} (law x2): {verdict}"
        )
    payload = {"command": "memory", "options": {"n": sizes, "d": d, "block": block}, "holds": holds}
    write_json(json_path, {**payload, "doublings": laws, "rows": [asdict(r) for r in results]})
    return holds


def _memory_of_calls(
    n: list[int] | None,
    d: int,
    heads: int,
    dtype: str,
    candidate: list[str] | None,
    limit: float,
    device: Device | None,
    html: Path | None,
    json_path: Path | None,
) -> bool:
    """Forward and backward of ours, torch's and the eager form; ours must stay linear."""
    from attnproof.cli import _growth

    where = device_of(device)
    lengths = tuple(sorted(n or (2**p for p in range(10, 18 if where == "cuda" else 14))))
    kind = dtype or ("bfloat16" if where == "cuda" else "float32")
    names = tuple(candidate or (*_growth.drift_names(where), "eager"))
    plan = _growth.MemoryPlan(names, lengths, heads, d, kind, where, int(limit * 2**30))
    record_path, page, partial = targets("memory", json_path, html)
    with kept(partial, {"command": "memory", "plan": str(plan)}, where) as journal:
        record, holds = _growth.memory(plan, journal)
    write(record, record_path, page)
    return holds


def _doublings(results: list[Any]) -> list[dict[str, Any]]:
    """The growth laws, for neighbours that are one doubling apart and large enough for the tile itself not to count."""
    laws: list[dict[str, Any]] = []
    for small, large in pairwise(results):
        if large.n != 2 * small.n or small.n < 1024:
            continue
        naive, keys_outer = large.naive / small.naive, large.keys_outer / small.keys_outer
        holds = abs(naive - 4) <= 2 * DOUBLING and abs(keys_outer - 2) <= DOUBLING
        laws.append(
            {"from": small.n, "to": large.n, "naive": naive, "keys_outer": keys_outer, "holds": holds}
        )
    return laws


def blocks(
    n: Annotated[int, typer.Option(min=1, help="Keys.")] = 4096,
    m: Annotated[int | None, typer.Option(min=1, help="Queries; as many as keys if left out.")] = None,
    block: Annotated[int, typer.Option(min=1, help="Keys per tile.")] = 64,
    block_m: Annotated[
        int | None, typer.Option(min=1, help="Rows per tile; as many as keys if left out.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Keys up to the query only.")] = True,
    window: Annotated[tuple[int, int], typer.Option(help="Keys to the left and right; -1 is unbounded.")] = (
        -1,
        -1,
    ),
    align: Annotated[str, typer.Option(help="bottom_right or top_left.")] = "bottom_right",
    json_path: JsonOption = None,
) -> bool:
    """Which tiles a mask lets a kernel skip."""
    from attnproof import masks
    from attnproof.cli import _lessons

    mask = masks.window(*window)
    if causal:
        mask = mask & masks.causal(align=align)
    result = _lessons.blocks(mask, m or n, n, block_m or block, block)
    console = out_console()
    console.print(
        f"{result.m} queries, {result.n} keys, tiles {result.block_m}x{result.block_n}: "
        f"{result.total} tiles, {result.kept} kept ({result.full} full, {result.edge} edge), "
        f"{result.skipped} skipped ({100 * result.skipped_share:.1f}%)"
    )
    console.print(f"{result.pairs} of {result.m * result.n} pairs are allowed")
    holds = True
    if causal and window == (-1, -1) and result.m == result.n and result.block_m == result.block_n:
        side = -(-n // block)
        expected = side * (side + 1) // 2
        holds = result.kept == expected
        console.print(
            f"law: (T+1)/2T of T^2 tiles, T={side}: {expected} kept: {'holds' if holds else 'DOES NOT HOLD'}"
        )
    if result.picture:
        console.print(f"\n{result.picture}\n\n# full   / edge   . skipped")
    write_json(json_path, {"command": "blocks", "holds": holds, **result.as_dict()})
    return holds


class Dtype(str, Enum):
    """Input dtypes."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


class Rows(str, Enum):
    """Where rows live."""

    dense = "dense"
    packed = "packed"
    cached = "cached"
    paged = "paged"


def explain(
    b: Annotated[int, typer.Option(min=0, help="Batch.")] = 1,
    h: Annotated[int, typer.Option(min=0, help="Query heads.")] = 8,
    hkv: Annotated[
        int | None, typer.Option(min=0, help="Key and value heads; as many as --h if left out.")
    ] = None,
    m: Annotated[int | None, typer.Option(min=0, help="Queries; as many as keys if left out.")] = None,
    n: Annotated[int, typer.Option(min=0, help="Keys.")] = 1024,
    d: Annotated[int, typer.Option(min=0, help="Head dim of q and k.")] = 64,
    dv: Annotated[int | None, typer.Option(min=0, help="Head dim of v; that of q if left out.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of q, k and v.")] = Dtype.float32,
    device: Annotated[str, typer.Option(help="cpu or cuda; no such device needs to be here.")] = "cpu",
    rows: Annotated[Rows, typer.Option(help="Where rows live.")] = Rows.dense,
    causal: Annotated[bool, typer.Option("--causal")] = False,
    window: Annotated[tuple[int, int], typer.Option(help="Keys to the left and right; -1 is unbounded.")] = (
        -1,
        -1,
    ),
    softcap: Annotated[float | None, typer.Option(help="c of c tanh(s / c).")] = None,
    mask: Annotated[bool, typer.Option("--mask", help="With a boolean mask.")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="With an additive bias.")] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="With ALiBi slopes.")] = False,
    sink: Annotated[bool, typer.Option("--sink", help="With a sink logit per head.")] = False,
    dropout: Annotated[float, typer.Option(help="Probability of dropping an entry.")] = 0.0,
    backend: Annotated[str, typer.Option(help="auto, or a name that must not fall back.")] = "auto",
    json_path: JsonOption = None,
) -> bool:
    """Which backend a call would get, and why not the others. Takes sizes and options; no data is allocated."""
    from dataclasses import replace

    from attnproof import dispatch
    from attnproof.cli._shapes import Call

    call = Call(
        sizes=(b, h, h if hkv is None else hkv, n if m is None else m, n, d, d if dv is None else dv),
        dtype=dtype.value,
        rows=rows.value,
        options={"causal": causal, "window": window, "softcap": softcap, "dropout_p": dropout},
        extras={"mask": mask, "bias": bias, "alibi_slopes": alibi, "sink": sink},
    )
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu or cuda, got {device}")
    problem = replace(call.problem(), device=device)
    answer = dispatch.explain(problem, backend)
    console = out_console()
    console.print(str(answer), markup=False, soft_wrap=True)
    if answer.chosen is None:
        console.print("no backend serves this call" if backend == "auto" else f"{backend} refuses")
    write_json(json_path, {"command": "explain", "problem": asdict(problem), **asdict(answer)})
    return answer.chosen is not None


def doctor(
    amd: Annotated[
        bool, typer.Option("--amd", help="Examine backend dot2 on an AMD GPU without matrix units.")
    ] = False,
    json_path: JsonOption = None,
) -> bool:
    """Versions, devices, and every backend with a small self-test or the reason why it is not used here."""
    if amd:
        return _doctor_amd(json_path)
    facts = machine()
    console = out_console()
    extras = {name: facts["packages"][name] or f"not installed: {how}" for name, how in OPTIONAL.items()}
    about = {
        "attnproof": facts["attnproof"],
        "Python": f"{facts['python']} on {facts['platform']}",
        "CPU": f"{facts['cpu']}, {facts['cores']} usable",
        "SIMD": simd_target() or "the native backend is not built",
        "NumPy": facts["packages"]["numpy"],
        **extras,
    }
    show(console, "this machine", "what", "is", rows=about.items())
    if facts["gpus"]:
        show(
            console,
            "GPUs",
            "name",
            "memory",
            "kind",
            rows=([g["name"], g["memory"], g["arch"]] for g in facts["gpus"]),
        )
    else:
        console.print("no GPU that torch can use")
    tests = self_tests(facts["gpus"])
    rows = ([t["backend"], t["device"], t["dtype"], t["verdict"]] for t in tests)
    show(console, "backends, in dispatch order", "backend", "device", "dtype", "self-test", rows=rows)
    holds = all(t["ok"] is not False for t in tests)
    write_json(
        json_path,
        {"command": "doctor", "holds": holds, "machine": facts, "simd": simd_target(), "backends": tests},
    )
    return holds


def _doctor_amd(json_path: JsonOption) -> bool:
    from attnproof.backends.dot2 import doctor as examiner

    document = examiner.examine()
    show(out_console(), "backend dot2", "what", "is", rows=examiner.as_rows(document))
    write_json(json_path, document)
    return bool(document["holds"])
