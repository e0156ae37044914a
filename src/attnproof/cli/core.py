"""Commands that need nothing but NumPy: trace, compare, memory, blocks, explain, doctor."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from attnproof.cli._common import JsonOption, guarded, out_console, progress, table, write_json


class Order(str, Enum):
    """Which loop is outside."""

    keys = "keys"
    queries = "queries"


Positive = typer.Option(min=1)
Sizes = Annotated[list[int] | None, typer.Option("--n", min=1, help="Sequence length; repeat for several.")]
DOUBLING = 0.2  # how far a ratio may be from its law and still hold


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    for command in (trace, compare, memory, blocks, explain, doctor):
        app.command(rich_help_panel="Understand")(guarded(command))


def trace(
    n: Annotated[int, typer.Option(min=1, help="Keys and queries.")] = 8,
    d: Annotated[int, typer.Option(min=1, help="Head dim.")] = 4,
    block: Annotated[int, typer.Option(min=1, help="Keys per tile.")] = 2,
    order: Annotated[Order, typer.Option(help="Outer loop: keys (FlashAttention 1) or queries (2).")] = Order.keys,
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
    console.print(
        table(
            f"N={n} D={d} block={block} {order.value} outer, query row {row}",
            *("j", "m", "l", "corr"),
            rows=([str(r.j), f"{r.m:+.4f}", f"{r.l:.4f}", f"{r.corr:.4f}"] for r in shown),
            note="" if shown is result.rows else f"{len(result.rows)} tiles, the first and last 20 shown",
        )
    )
    console.print(f"lse = m + ln l = {result.lse:+.4f}")
    console.print(
        f"against the whole matrix: out {result.error_out:.1e}, lse {result.error_lse:.1e} "
        f"(bound {_lessons.EXACT:.0e}): {'equal' if result.holds else 'NOT equal'}"
    )
    options = {"n": n, "d": d, "block": block, "order": order.value, "row": row, "seed": seed, "causal": causal}
    write_json(json_path, {"command": "trace", "options": options, "holds": result.holds, **asdict(result)})
    return result.holds


def compare(
    n: Sizes = None,
    d: Annotated[int, typer.Option(min=1, help="Head dim.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each candidate.")] = 7,
    json_path: JsonOption = None,
) -> bool:
    """Exactness and time in float64, one head: naive NumPy, our backends, torch; each size's inputs come from seed N."""
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
        rows.append([str(r.n) if first else "", r.candidate, *errors, verdict, f"{r.seconds * 1e3:.2f}", f"{r.ratio:.2f}"])
    out_console().print(
        table(
            f"float64, D={d}, one head, median of {rounds} interleaved rounds",
            *("N", "candidate", "error full", "error causal", "verdict", "ms full", "time / naive"),
            rows=rows,
            note=f"errors: max abs against naive NumPy, exact is below {_lessons.EXACT:.0e}; times are shown, not judged",
        )
    )
    payload = {"command": "compare", "options": {"n": sizes, "d": d, "rounds": rounds}, "holds": holds}
    write_json(json_path, {**payload, "machine": _machine(), "rows": [asdict(r) for r in results]})
    return holds


def memory(
    numpy: Annotated[bool, typer.Option("--numpy", help="Peak memory of NumPy code, by tracemalloc.")] = False,
    n: Sizes = None,
    d: Annotated[int, typer.Option(min=1, help="Head dim.")] = 64,
    block: Annotated[int, typer.Option(min=1, help="Rows and keys per tile.")] = 64,
    json_path: JsonOption = None,
) -> bool:
    """Peak memory of the whole matrix against one tile at a time, float64, one head."""
    from attnproof.cli import _lessons

    if not numpy:
        raise ValueError("memory: expected a kind of memory to measure, got none; use --numpy")
    sizes = sorted(n or [1024, 2048, 4096, 8192])
    with progress("memory", 3 * len(sizes)) as tick:
        results = _lessons.memory(sizes, d, block, tick)
    laws = _doublings(results)
    holds = all(law["holds"] for law in laws)
    mib = _lessons.MIB
    console = out_console()
    console.print(
        table(
            f"peak MiB by tracemalloc, float64, D={d}, blocks {block}x{block}, inputs not counted",
            *("N", "naive", "2 N^2 8 bytes", "keys outer", "queries outer", "naive / keys outer"),
            rows=(
                [str(r.n), *(f"{x / mib:.1f}" for x in (r.naive, r.theory, r.keys_outer, r.queries_outer)), f"{r.ratio:.1f}"]
                for r in results
            ),
        )
    )
    for law in laws:
        verdict = "holds" if law["holds"] else "DOES NOT HOLD"
        console.print(
            f"N {law['from']} to {law['to']}: naive x{law['naive']:.2f} (law x4), keys outer x{law['keys_outer']:.2f} (law x2): {verdict}"
        )
    payload = {"command": "memory", "options": {"n": sizes, "d": d, "block": block}, "holds": holds}
    write_json(json_path, {**payload, "doublings": laws, "rows": [asdict(r) for r in results]})
    return holds


def _doublings(results: list[Any]) -> list[dict[str, Any]]:
    """The growth laws, for neighbours that are one doubling apart and large enough for the tile itself not to count."""
    laws: list[dict[str, Any]] = []
    for small, large in zip(results, results[1:], strict=False):
        if large.n != 2 * small.n or small.n < 1024:
            continue
        naive, keys_outer = large.naive / small.naive, large.keys_outer / small.keys_outer
        holds = abs(naive - 4) <= 2 * DOUBLING and abs(keys_outer - 2) <= DOUBLING
        laws.append({"from": small.n, "to": large.n, "naive": naive, "keys_outer": keys_outer, "holds": holds})
    return laws


def blocks(
    n: Annotated[int, typer.Option(min=1, help="Keys.")] = 4096,
    m: Annotated[int | None, typer.Option(min=1, help="Queries; as many as keys if left out.")] = None,
    block: Annotated[int, typer.Option(min=1, help="Keys per tile.")] = 64,
    block_m: Annotated[int | None, typer.Option(min=1, help="Rows per tile; as many as keys if left out.")] = None,
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Keys up to the query only.")] = True,
    window: Annotated[tuple[int, int], typer.Option(help="Keys to the left and right; -1 is unbounded.")] = (-1, -1),
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
        f"{result.m} queries, {result.n} keys, tiles {result.block_m}x{result.block_n}: {result.total} tiles, {result.kept} kept "
        f"({result.full} full, {result.edge} edge), {result.skipped} skipped ({100 * result.skipped_share:.1f}%)"
    )
    console.print(f"{result.pairs} of {result.m * result.n} pairs are allowed")
    holds = True
    if causal and window == (-1, -1) and result.m == result.n and result.block_m == result.block_n:
        side = -(-n // block)
        expected = side * (side + 1) // 2
        holds = result.kept == expected
        console.print(f"law: (T+1)/2T of T^2 tiles, T={side}: {expected} kept: {'holds' if holds else 'DOES NOT HOLD'}")
    if result.picture:
        console.print(f"\n{result.picture}\n\n# full   / edge   . skipped")
    write_json(json_path, {"command": "blocks", "holds": holds, **result.as_dict()})
    return holds
