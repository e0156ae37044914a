"""Commands that judge kernels: `verify`, `selftest`, `explain-case`, `findings`.

Exit codes beyond the common ones: 5 the harness itself is not to be trusted, 77 every case was skipped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from attnproof.cli._common import JsonOption, guarded, out_console, progress, show, write_json, write_text

UNTRUSTED, ALL_SKIPPED = 5, 77
MISSED_SHARE = 0.1  # of the broken kernels, by the smoke tier; `standard` misses none
DEFAULT_REPORT = Path("reports") / "verify.html"


DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda; default: where the kernel runs.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of the inputs.")]
JobsOption = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        min=0,
        help="Worker processes, 0 for none. Default: none on a CPU, up to 4 on a GPU.",
    ),
]


@dataclass(frozen=True)
class Output:
    """Where the results go."""

    json_path: Path | None
    html: Path
    junit: Path | None


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("verify")(guarded(verify))
    app.command("explain-case")(guarded(explain_case))
    app.command("selftest")(guarded(selftest))
    app.command("findings")(guarded(findings))


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
    real: Annotated[
        bool, typer.Option("--real", help="Judge on what a real model computes (extra `real`).")
    ] = False,
    adversarial: Annotated[
        bool, typer.Option("--adversarial", help="Child processes, hidden seeds, unseen lengths.")
    ] = False,
    only: Annotated[
        str, typer.Option("--case", metavar="TEXT", help="Only cases whose id contains TEXT.")
    ] = "",
    seed: SeedOption = 0,
    jobs: JobsOption = None,
    device: DeviceOption = None,
    html: Annotated[Path, typer.Option("--html", metavar="PATH", help="The report.")] = DEFAULT_REPORT,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="PATH", help="JUnit XML.")] = None,
    json_path: JsonOption = None,
) -> bool:
    """Judge attention kernels against float64: ours by default, anyone's with --candidate."""
    from attnproof.verify import session, tiers

    console = out_console()
    output = Output(json_path, html, junit)
    if real:
        if quick or full or adversarial or only or seed or tier != "standard":
            raise ValueError(
                "--real: expected no choice of named cases beside it (--quick, --full, --case, ...)"
            )
        return _real(console, output, session.choose(candidate or [], backend or [], device))
    chosen = "quick" if quick else "full" if full else tier
    cases = tuple(case for case in tiers.cases(chosen) if only in case.id)
    if not cases:
        raise ValueError(f"--case: expected a part of a case id of tier {chosen}, got {only!r}")
    kernels = session.choose(candidate or [], backend or [], device)
    _print_absent(console, kernels)
    jobs = session.default_jobs(kernels, adversarial) if jobs is None else jobs
    sharpness = "classics" if chosen in ("quick", "smoke") else "smoke"
    plan = session.Plan(
        tier=chosen, cases=cases, seed=seed, sharpness=sharpness, adversarial=adversarial, jobs=jobs
    )
    document = session.run(kernels, plan, progress)
    _print(console, document)
    _write(console, document, output)
    return _verdict(document)


def _real(console: Console, output: Output, kernels: Any) -> bool:
    """The real-input run: the layers of a model, then the model with our attention in place of its own."""
    from attnproof.report import real as report
    from attnproof.verify import real

    _print_absent(console, kernels)
    document = real.run(judged=kernels.candidates, progress=progress).record
    if output.html == DEFAULT_REPORT:
        output = replace(output, html=DEFAULT_REPORT.with_name("verify-real.html"))
    console.print(report.sentence(document), soft_wrap=True)
    _print(console, document)
    console.print(report.model_table(document))
    _write(console, document, output, (report.section(document),))
    return _verdict(document)


def _print_absent(console: Console, kernels: Any) -> None:
    for name, why in kernels.absent:
        console.print(f"[dim]{name}: not here ({why})[/]")


def _print(console: Console, document: dict[str, Any]) -> None:
    from attnproof.report import verdicts

    console.print(verdicts.summary_table(document))
    for about in document["protocol"].get("candidates", ()):
        if "coverage" in about:
            console.print(f"{about['name']}: {about['coverage']} (numerics {about['numerics']})")
    if "sharpness" in document["protocol"]:
        console.print(f"self-test: {document['protocol']['sharpness']}")
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


def _write(console: Console, document: dict[str, Any], output: Output, sections: Sequence[Any] = ()) -> None:
    from attnproof.report import html, verdicts

    if output.html.parent == DEFAULT_REPORT.parent:
        output.html.parent.mkdir(exist_ok=True)
    record_path = output.json_path or output.html.with_suffix(".json")
    write_json(record_path, document)
    write_text(output.html, html.render(document, sections))
    if output.junit is not None:
        write_text(output.junit, verdicts.junit(document))
    step = os.environ.get("GITHUB_STEP_SUMMARY")
    if step:
        with Path(step).open("a", encoding="utf-8") as stream:
            stream.write(verdicts.markdown(document))
    console.print(f"record {record_path}")
    console.print(f"report {output.html}")


def _verdict(document: dict[str, Any]) -> bool:
    """Say what it comes to, and leave with the exit code of it."""
    cases = [result["status"] for result in document["results"] if result.get("group") != "guards"]
    statuses = [result["status"] for result in document["results"]]
    judged = sum(status not in ("SKIP", "POWERLESS") for status in cases)
    failed = statuses.count("FAIL") + statuses.count("INVALID")
    out_console().print(
        f"{judged} judged, {cases.count('SKIP')} skipped, {failed} failed, {statuses.count('FINDING')} findings about others"
    )
    if "POWERLESS" in statuses or _blunt(document["protocol"]):
        raise typer.Exit(UNTRUSTED)
    if not judged:
        raise typer.Exit(ALL_SKIPPED)
    return not failed


def _blunt(protocol: dict[str, Any]) -> bool:
    """Whether the self-test of this run missed more broken kernels than its tier may."""
    missed = len(protocol.get("mutants_missed", ()))
    return missed > MISSED_SHARE * protocol.get("mutants", 0)


def explain_case(
    identifier: Annotated[
        str, typer.Argument(metavar="ID", help="Case id, as verify prints it: name/dtype.")
    ],
    candidate: Annotated[
        str, typer.Option("--candidate", "-c", metavar="LOADER", help="The kernel.")
    ] = "attnproof:streaming",
    mutant: Annotated[str, typer.Option("--mutant", help="A broken kernel of the self-test instead.")] = "",
    seed: SeedOption = 0,
    device: DeviceOption = None,
    json_path: JsonOption = None,
) -> bool:
    """Replay one case of one kernel and show its worst row."""
    from attnproof import cases
    from attnproof.verify import explain, loaders, records
    from attnproof.verify.candidate import Skip

    try:
        case = cases.find(identifier)
    except KeyError as error:
        raise ValueError(error.args[0]) from None
    try:
        judged = _mutant(mutant) if mutant else loaders.load(candidate, device)
        found = explain.replay(judged, case, seed)
    except Skip as reason:
        out_console().print(str(reason))
        raise typer.Exit(ALL_SKIPPED) from None
    _print_replay(out_console(), found)
    write_json(
        json_path,
        records.record("explain-case", {"seed": seed}, [records.from_verdict(found.verdict)], judged.device),
    )
    return found.verdict.ok


def _mutant(name: str) -> Any:
    from attnproof.verify.mutants import catalogue, kernel

    return kernel.mutate(catalogue.find(name))


def _print_replay(console: Console, found: Any) -> None:
    from attnproof.report.verdicts import COLOUR
    from attnproof.report.verdicts import show as digits

    verdict = found.verdict
    console.print(f"{verdict.case.id}, seed {verdict.seed}: {verdict.case.describe()}")
    console.print(
        f"{verdict.candidate}: [{COLOUR[verdict.status]}]{verdict.status}[/] {verdict.reason}", soft_wrap=True
    )
    if verdict.hint:
        console.print(verdict.hint, soft_wrap=True)
    rows = [
        (
            f"{report.tensor} {check.name}",
            f"{check.value:.4g}",
            f"{check.limit:.4g}",
            "" if check.ok else "over",
            check.why,
        )
        for report in verdict.tensors
        for check in report.checks
    ]
    show(console, "checks", "check", "value", "limit", "", "why", rows=rows)
    if found.elements:
        where = ", ".join(map(str, found.place))
        elements = [
            (str(i), f"{got:.8g}", f"{right:.8g}", digits(error), digits(bound))
            for i, got, right, error, bound in found.elements[:8]
        ]
        show(
            console,
            f"worst row of {found.tensor}, at [{where}], tile {found.tile} of 64",
            "element",
            "got",
            "right",
            "error",
            "bound",
            rows=elements,
        )
    if found.keys:
        keys = [(str(j), f"{weight:.4g}", f"{logit:.6g}") for j, weight, logit in found.keys]
        show(console, "the keys that decide this row", "key", "weight", "logit", rows=keys)


def selftest(
    tier: Annotated[str, typer.Option("--tier", help="smoke or standard.")] = "smoke",
    seeds: Annotated[int, typer.Option("--seeds", help="Seeds on which correct kernels must be green.")] = 1,
    mutant: Annotated[
        list[str] | None, typer.Option("--mutant", help="Only this broken kernel. Repeatable.")
    ] = None,
    candidate: Annotated[
        str,
        typer.Option(
            "--candidate", "-c", metavar="LOADER", help="The mutants that this kernel was built with."
        ),
    ] = "",
    json_path: JsonOption = None,
) -> None:
    """Prove the verifier: every broken kernel must be found, no correct one flagged."""
    from attnproof.verify import records, selftest
    from attnproof.verify.mutants import catalogue

    names = mutant or []
    console = out_console()
    with progress("selftest", selftest.steps(tier, names, candidate)) as tick:
        if candidate:
            score = selftest.of_compiled(candidate, tier, tick)
        else:
            score = selftest.run(tier, seeds=seeds, names=names, tick=tick)
    rows = [
        (fate.operator.name, fate.operator.says, fate.how[:90] if fate.dead else "survived")
        for fate in score.fates
    ]
    show(console, "broken kernels", "mutant", "mistake", "found by", rows=rows)
    for alarm in score.alarms:
        console.print(
            f"[bold red]false alarm[/] {alarm.candidate}: {alarm.case.id} seed {alarm.seed}: {alarm.reason}",
            soft_wrap=True,
        )
    console.print(score.sentence)
    protocol = {
        "tier": tier,
        "seeds": seeds,
        "candidate": candidate or "streaming",
        "mutant_set": catalogue.digest(),
        "dead": score.dead,
        "mutants": len(score.fates),
        "alarms": len(score.alarms),
        "sharpness": score.sentence,
    }
    write_json(json_path, records.record("selftest", protocol, selftest.entries(score)))
    missed = len(score.survivors) / max(len(score.fates), 1)
    if score.alarms or missed > (MISSED_SHARE if tier == "smoke" else 0.0):
        raise typer.Exit(UNTRUSTED)


def findings(
    name: Annotated[list[str] | None, typer.Argument(help="Only findings whose name contains this.")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page of findings and run nothing.")
    ] = False,
    json_path: JsonOption = None,
) -> None:
    """Run the smallest program of every finding: is the deviation still there?"""
    from attnproof.verify import findings as found
    from attnproof.verify import records

    if markdown:
        print(found.markdown(), end="")
        return
    chosen = [one for one in found.all_findings() if not name or any(part in one.name for part in name)]
    if not chosen:
        raise ValueError(f"findings: expected a part of a name, got {', '.join(name or [])}")
    seen: list[Any] = []
    with progress("findings", len(chosen)) as tick:
        for one in chosen:
            seen.append(found.observe(one))
            tick(one.name)
    rows = [
        (
            o.finding.name,
            o.finding.kernel,
            o.finding.kind,
            o.got or "-",
            o.right or "-",
            f"{o.status} {o.why}".strip(),
        )
        for o in seen
    ]
    show(out_console(), "findings", "finding", "kernel", "kind", "got", "right", "status", rows=rows)
    entries = [
        {
            "candidate": o.finding.kernel,
            "case": o.finding.name,
            "group": o.finding.kind,
            "reason": o.finding.title,
            "status": "FINDING" if o.status == "reproduced" else "SKIP" if o.status == "not here" else "PASS",
            "got": o.got,
            "right": o.right,
            "hint": o.why,
        }
        for o in seen
    ]
    write_json(json_path, records.record("findings", {"findings": len(seen)}, entries))
