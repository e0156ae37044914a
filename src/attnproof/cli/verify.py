"""Commands that judge kernels: `verify`, `selftest`, `explain-case`, `findings`.

Exit codes beyond the common ones: 5 the harness itself is not to be trusted, 77 every case was skipped.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from attnproof.cli._common import JsonOption, guarded, out_console, progress, write_json, write_text

UNTRUSTED, ALL_SKIPPED = 5, 77
DEFAULT_REPORT = Path("reports") / "verify.html"


@dataclass(frozen=True)
class Output:
    """Where the results go."""

    json_path: Path | None
    html: Path
    junit: Path | None


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("verify")(guarded(verify))


def verify(
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            "--candidate",
            "-c",
            metavar="LOADER",
            help="Judge this kernel: file.py:fn, module:attr, lib.so:symbol, sdpa:flash, ... Repeatable.",
        ),
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option("--backend", "-b", help="Only this backend of ours. Repeatable.")
    ] = None,
    tier: Annotated[str, typer.Option("--tier", help="smoke, standard or full.")] = "standard",
    quick: Annotated[
        bool, typer.Option("--quick", help="A case or two of every kind, under a minute.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Every case.")] = False,
    only: Annotated[
        str, typer.Option("--case", metavar="TEXT", help="Only cases whose id contains TEXT.")
    ] = "",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the inputs.")] = 0,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda; default: where the kernel runs.")
    ] = None,
    html: Annotated[Path, typer.Option("--html", metavar="PATH", help="The report.")] = DEFAULT_REPORT,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="PATH", help="JUnit XML.")] = None,
    json_path: JsonOption = None,
) -> bool:
    """Judge attention kernels against float64: ours by default, anyone's with --candidate."""
    from attnproof.verify import tiers

    chosen = "quick" if quick else "full" if full else tier
    cases = [case for case in tiers.cases(chosen) if only in case.id]
    if not cases:
        raise ValueError(f"--case: expected a part of a case id of tier {chosen}, got {only!r}")
    console = out_console()
    candidates, absent = _candidates(candidate or [], backend or [], device)
    for name, why in absent:
        console.print(f"[dim]{name}: not here ({why})[/]")
    document = _run(candidates, cases, seed, chosen)
    _print(console, document)
    _write(console, document, Output(json_path, html, junit))
    return _verdict(document)


def _candidates(
    words: list[str], backends: list[str], device: str | None
) -> tuple[list[Any], list[tuple[str, str]]]:
    """What to judge: the named ones, or ours and torch's."""
    from attnproof.verify import loaders
    from attnproof.verify.adapters import ours, sdpa
    from attnproof.verify.candidate import Skip

    if words:
        asked = [*words, *(f"attnproof:{name}" for name in backends)]
    else:
        asked = [f"attnproof:{name}" for name in backends or ours.names()]
        asked += [f"sdpa:{name}" for name in sdpa.names()]
    found: list[Any] = []
    absent: list[tuple[str, str]] = []
    for word in asked:
        try:
            found.append(loaders.load(word, device))
        except Skip as reason:
            absent.append((word, str(reason)))
    if not found:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in absent) or "nothing to judge")
    peers = not words
    for one in found:
        # a deviation of a kernel that we only look at is a finding about it, not a failure of ours
        one.peer = peers and not one.own
    return found, absent


def _run(candidates: list[Any], cases: list[Any], seed: int, tier: str) -> dict[str, Any]:
    from attnproof.verify import records, suite

    answers = suite.Answers()
    results: list[dict[str, Any]] = []
    with progress("verify", len(candidates) * len(cases)) as tick:
        for one in candidates:
            for verdict in suite.run(one, cases, seed, answers, tick):
                if verdict.status == suite.FAIL and one.peer:
                    verdict.status = "FINDING"
                results.append(records.from_verdict(verdict))
    protocol = {
        "tier": tier,
        "seed": seed,
        "cases": len(cases),
        "candidates": [_about(one) for one in candidates],
    }
    return records.record("verify", protocol, results, candidates[0].device)


def _about(one: Any) -> dict[str, Any]:
    kind = one.kind
    return {
        "name": one.name,
        "own": one.own,
        "numerics": kind.name,
        "align": one.traits.align,
        "device": one.device,
    }


def _print(console: Console, document: dict[str, Any]) -> None:
    from attnproof.report import verdicts

    console.print(verdicts.summary_table(document))
    for entry in verdicts.kinds(document):
        result = entry["result"]
        label = "finding about" if entry["status"] == "FINDING" else entry["status"]
        more = f", {entry['count']} cases" if entry["count"] > 1 else ""
        console.print(
            f"[{verdicts.COLOUR[entry['status']]}]{label}[/] {entry['candidate']}: {result['case']}{more}: {result['reason']}",
            soft_wrap=True,
        )
        if result["hint"]:
            console.print(f"  {result['hint']}", soft_wrap=True)
        console.print(f"  [dim]{result['replay']}[/]", soft_wrap=True)


def _write(console: Console, document: dict[str, Any], output: Output) -> None:
    from attnproof.report import html, verdicts

    if output.html == DEFAULT_REPORT:
        output.html.parent.mkdir(exist_ok=True)
    record_path = output.json_path or output.html.with_suffix(".json")
    write_json(record_path, document)
    write_text(output.html, html.render(document))
    if output.junit is not None:
        write_text(output.junit, verdicts.junit(document))
    step = os.environ.get("GITHUB_STEP_SUMMARY")
    if step:
        with Path(step).open("a", encoding="utf-8") as stream:
            stream.write(verdicts.markdown(document))
    console.print(f"record {record_path}")
    console.print(f"report {output.html}")


def _verdict(document: dict[str, Any]) -> bool:
    statuses = [result["status"] for result in document["results"]]
    judged = sum(status != "SKIP" for status in statuses)
    out_console().print(
        f"{judged} judged, {len(statuses) - judged} skipped, {statuses.count('FAIL') + statuses.count('INVALID')} failed, "
        f"{statuses.count('FINDING')} findings about others"
    )
    if "POWERLESS" in statuses:
        raise typer.Exit(UNTRUSTED)
    if not judged:
        raise typer.Exit(ALL_SKIPPED)
    return not any(status in ("FAIL", "INVALID") for status in statuses)
