"""Commands that gate: `baseline save | compare | gate | trials` and `regress BASE..HEAD`.

Exit codes: 0 nothing got worse, 1 something did, 3 no verdict within the budget (AMBIGUOUS), 2 and 130 as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnproof.cli._common import JsonOption, err_console, guarded, out_console, progress, show, write_json
from attnproof.cli._measuring import DeviceOption, device_of, kept

if TYPE_CHECKING:
    from attnproof.measure.baseline import Finding
    from attnproof.measure.gate import Verdict

AMBIGUOUS = 3
LISTED = 60  # findings up to which those that are SAME are listed too
BASELINES = Path(".attnproof") / "baselines"
CASE = "forward B1 H4 N256 D64 float32 causal"

FolderOption = Annotated[Path, typer.Option("--folder", metavar="PATH", help="Where baselines are kept.")]
NameOption = Annotated[str, typer.Option("--name", help="Name of the suite within the folder.")]
CaseOption = Annotated[str, typer.Option("--case", metavar="TEXT", help="The call, as `measure` names it.")]
ThresholdOption = Annotated[
    float, typer.Option("--threshold", min=0.001, help="Smallest relative change worth a verdict.")
]
SecondsOption = Annotated[
    float, typer.Option("--seconds", min=0.1, help="Wall time of one comparison at most.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    group = typer.Typer(
        help="Stored baselines and gates that hold on noisy machines.",
        no_args_is_help=True,
        add_completion=False,
    )
    commands: list[Callable[..., bool | None]] = [save, compare, gate, trials]
    for command in commands:
        group.command()(guarded(command))
    app.add_typer(group, name="baseline", rich_help_panel="Measure")
    app.command(rich_help_panel="Measure")(guarded(regress))


def save(
    record: Annotated[
        Path,
        typer.Argument(help="What `measure`, `memory` or `drift` wrote, or a record of compiled kernels."),
    ],
    folder: FolderOption = BASELINES,
    name: NameOption = "default",
) -> None:
    """Keep a record as this machine's baseline."""
    from attnproof.measure import baseline

    document = baseline.read(record)
    if document["environment"].get("dirty"):
        err_console().print(
            "the record comes from a checkout with local changes: its commit does not name its code"
        )
    out_console().print(f"kept {baseline.save(document, folder, name)}", soft_wrap=True)


def compare(
    record: Annotated[Path, typer.Argument(help="A record of now, of the same kind.")],
    folder: FolderOption = BASELINES,
    name: NameOption = "default",
    json_path: JsonOption = None,
) -> bool:
    """Hold a record against the baseline: times are advisory (SUSPECT), quantities without a clock are hard."""
    from attnproof.measure import baseline
    from attnproof.verify import records

    now = baseline.read(record)
    before = baseline.load(folder, name, now["environment"])
    findings = baseline.compare(before, now)
    if not findings:
        raise ValueError(f"{record}: expected times or deterministic quantities, got none")
    told = [one for one in findings if len(findings) <= LISTED or one.verdict != "SAME"]
    console = out_console()
    _list(told)
    if len(told) < len(findings):
        console.print(f"and {len(findings) - len(told)} that are SAME")
    if any(one.verdict == "SUSPECT" for one in findings):
        console.print("SUSPECT is no verdict: attnproof regress BASE..HEAD measures both side by side")
    protocol = {"baseline": before["created"], "baseline_commit": before["environment"].get("commit")}
    write_json(json_path, records.record("compare", protocol, [one.as_dict() for one in findings]))
    return baseline.holds(findings)


def _list(findings: Sequence[Finding]) -> None:
    rows = [
        (
            one.case,
            one.candidate,
            one.quantity,
            "-" if one.before is None else f"{one.before:.4g}",
            f"{one.now:.4g}",
            one.verdict,
            "hard" if one.hard else "advisory",
        )
        for one in findings
    ]
    columns = ("case", "candidate", "quantity", "then", "now", "verdict", "gate")
    show(out_console(), "then and now", *columns, rows=rows)


def gate(
    base: Annotated[str, typer.Argument(metavar="A", help="A candidate, as for `measure`.")],
    other: Annotated[str, typer.Argument(metavar="B", help="The one that must not be slower.")],
    case: CaseOption = CASE,
    threshold: ThresholdOption = 0.01,
    seconds: SecondsOption = 60.0,
    counts: Annotated[
        bool,
        typer.Option("--counts", help="Gate C as well: for two versions of one kernel, not for two kernels."),
    ] = False,
    device: DeviceOption = None,
    json_path: JsonOption = None,
) -> bool:
    """Is B slower than A? Both in one process, interleaved, with what A against A gives beside the answer."""
    from attnproof.measure import baseline, implementations, shapes, sweep
    from attnproof.measure import gate as gates
    from attnproof.measure.bench import Bench
    from attnproof.measure.timer import timer_for
    from attnproof.verify import records

    where, shape = device_of(device), shapes.parse(case)
    limits = gates.Gate(threshold=threshold, seconds=seconds)
    bench = Bench(shape, where, limits.protocol.slots)
    subjects: list[Any] = []
    right: list[tuple[Any, Any]] = []
    for label, word in (("A", base), ("B", other)):
        one = implementations.load(word)
        try:
            found = bench.verdict(one)
        except implementations.Unable as error:
            raise ValueError(f"{word} does not serve {shape.name}: {error}") from None
        if not found.green:
            out_console().print(f"{word}: {found.status}, {found.reason}: no time is taken", soft_wrap=True)
            return False
        subjects.append(replace(bench.subject(one), name=f"{label} {word}"))
        right.append((one, found))
    with progress("gate", limits.budget // limits.batch) as tick:
        answer = gates.compare(
            subjects[0],
            subjects[1],
            timer_for(where),
            limits,
            progress=lambda done, of: tick(f"{done} samples"),
        )
    _say(f"{base} (A) and {other} (B), {shape.name}", [answer])
    hard: list[Finding] = []
    if counts:  # after the clock: a profiler may leave something behind
        made = sweep.count(bench, [one for one, _ in right]) if where == "cuda" else {}
        before, now = (sweep.without_a_clock(one.name, found, made.get(one.name, {})) for one, found in right)
        hard = baseline.held(shape.name, other, before, now)
    row = {"case": shape.name, "candidate": other, "base": base, **answer.as_dict()}
    rows = [_renamed(row), *(one.as_dict() for one in hard)]
    write_json(json_path, records.record("gate", asdict(limits), rows, where))
    return _leave(_with_counts(answer.verdict, hard))


def _with_counts(verdict: Verdict, hard: Sequence[Finding]) -> Verdict:
    """The verdict of the clock, unless a quantity without one got worse."""
    from attnproof.measure import baseline

    if hard:
        _list(hard)
    return verdict if baseline.holds(hard) else "REGRESSED"


def trials(
    count: Annotated[int, typer.Option("--trials", min=1, help="Of each kind.")] = 200,
    share: Annotated[float, typer.Option("--planted", min=0.0, help="Planted slowdown.")] = 0.03,
    case: CaseOption = "forward B1 H1 N128 D64 float32",
    candidate: Annotated[str, typer.Option("--candidate", "-c", help="What is called.")] = "sdpa:flash",
    seconds: SecondsOption = 4.0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each call.")] = 1,
    json_path: JsonOption = None,
) -> bool:
    """How good is the gate here, now? Trials with identical code, and with a spin planted; resumable."""
    import torch

    from attnproof.measure import shapes
    from attnproof.measure import trials as measured
    from attnproof.verify import records
    from attnproof.verify.blas import one_thread

    before = torch.get_num_threads()
    plan = measured.Plan(count, share, candidate, shapes.parse(case), replace(measured.GATE, seconds=seconds))
    # more trials go on from fewer: their number is no part of what makes two runs the same
    what = {"command": "trials", "plan": str(replace(plan, trials=0)), "threads": threads}
    partial = None if json_path is None else json_path.with_suffix(".partial")
    torch.set_num_threads(threads)
    try:
        with ExitStack() as stack:
            if threads == 1:
                stack.enter_context(one_thread())
            journal = stack.enter_context(kept(partial, what, "cpu"))
            tick = stack.enter_context(progress("trials", 2 * count))
            rows = measured.run(plan, journal, tick=tick)
            score = measured.score(rows)
            protocol = {"plan": asdict(plan), "threads": threads, "score": score}
            entries = [_renamed({"case": row["kind"], "candidate": candidate, **row}) for row in rows]
            write_json(json_path, records.record("trials", protocol, entries))
    finally:
        torch.set_num_threads(before)
    _print_score(score, share)
    return score["called_different"] < 0.01 and score["found"] > 0.95


def _print_score(score: dict[str, Any], share: float) -> None:
    verdicts = ("SAME", "AMBIGUOUS", "REGRESSED", "IMPROVED")
    rows = [
        (label, *(str(score["verdicts"][kind].get(verdict, 0)) for verdict in verdicts))
        for kind, label in (("same", "identical code"), ("slower", f"{share:+.1%} planted"))
    ]
    console = out_console()
    show(console, "verdicts of the paired gate", "B is", *verdicts, rows=rows)
    console.print(
        f"identical code called different: {score['called_different']:.1%} (bar: below 1%); "
        f"planted slowdown found: {score['found']:.1%} (bar: above 95%); {score['seconds_per_trial']:.2f} s a trial",
        soft_wrap=True,
    )


def regress(
    revisions: Annotated[str, typer.Argument(metavar="BASE..HEAD", help="Two git revisions.")],
    case: CaseOption = CASE,
    candidate: Annotated[
        str,
        typer.Option(
            "--candidate", "-c", help="What of each revision is called; default: the fastest of ours."
        ),
    ] = "",
    processes: Annotated[int, typer.Option(min=1, help="Fresh pairs of processes.")] = 3,
    threshold: ThresholdOption = 0.02,
    seconds: SecondsOption = 20.0,
    repository: Annotated[Path, typer.Option("--repository", metavar="PATH", help="The checkout.")] = Path(),
    device: DeviceOption = None,
    json_path: JsonOption = None,
) -> bool:
    """Measure two git revisions side by side in work trees of their own, and say whether the later one is slower."""
    from attnproof.measure import gate as gates
    from attnproof.measure import implementations, shapes
    from attnproof.measure import revisions as trees
    from attnproof.verify import records

    base, head = trees.split(revisions)
    where, shape = device_of(device), shapes.parse(case)
    name = candidate or implementations.names(where)[0]
    limits = gates.Gate(threshold=threshold, seconds=seconds, batch=60)
    with ExitStack() as stack:
        tick = stack.enter_context(progress("regress", processes + 2))
        folders: list[Path] = []
        for revision in (base, head):
            folders.append(stack.enter_context(trees.work_tree(repository, revision)))
            if name == "native" and not trees.share_extension(repository, folders[-1]):
                raise ValueError(
                    f"native: the C++ sources of {revision} are not those of this build; measure another backend"
                )
            tick(revision)
        found, hard = trees.regress(
            folders[0],
            folders[1],
            shape,
            name=name,
            device=where,
            gate=limits,
            processes=processes,
            tick=tick,
        )
    _say(f"{base} (A) and {head} (B), {name}, {shape.name}", found)
    verdict = gates.together(found)
    out_console().print(f"{len(found)} pairs of processes together: {verdict}")
    verdict = _with_counts(verdict, hard)
    protocol = asdict(limits) | {"base": base, "head": head, "verdict": verdict}
    rows = [_renamed({"case": shape.name, "candidate": name, **one.as_dict()}) for one in found]
    rows += [one.as_dict() for one in hard]
    write_json(json_path, records.record("regress", protocol, rows, where))
    return _leave(verdict)


def _say(title: str, found: list[Any]) -> None:
    console = out_console()
    console.print(title, soft_wrap=True)
    for one in found:
        # what this machine cannot tell from nothing comes first
        console.print(f"A against A: {one.aa_error:.2%}, so differences count from {one.delta:.2%}")
        console.print(str(one), soft_wrap=True)


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    """`seconds` of a record is the time of one judged case: the wall time of a comparison has its own word."""
    return {("wall" if name == "seconds" else name): value for name, value in row.items()}


def _leave(verdict: str) -> bool:
    if verdict == "AMBIGUOUS":
        raise typer.Exit(AMBIGUOUS)
    return verdict != "REGRESSED"
