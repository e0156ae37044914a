"""Mutants of a compiled kernel: built into it, switched on by an environment variable, run in child processes.

A kernel that was built with mistakes says so: its function (or backend module) has `MUTANTS`, a dict from name to the
mistake in words, and it reads `ATTNPROOF_MUTANT` when it is loaded. Each mutant runs in a process of its own, so the
one that crashes ends only itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attnproof.cases import Case
from attnproof.verify import isolation, loaders, suite
from attnproof.verify.candidate import Candidate
from attnproof.verify.mutants.matrix import Fate
from attnproof.verify.mutants.operator import Operator

VARIABLE = "ATTNPROOF_MUTANT"


def mutants_of(word: str) -> dict[str, str]:
    """The mutants that a candidate was built with.

    Raises:
        ValueError: it has none.
    """
    if word.startswith("attnproof:"):
        from attnproof import dispatch

        holder: Any = dispatch.load(word.partition(":")[2])
    else:
        holder = loaders.function_of(word)
    found = getattr(holder, "MUTANTS", None)
    if not found:
        raise ValueError(
            f"selftest: {word} has no MUTANTS; build it with them (see the documentation of candidates)"
        )
    return dict(found)


def self_test(
    word: str, cases: Sequence[Case], device: str | None = None, tick: Callable[[str], Any] | None = None
) -> list[Fate]:
    """The fate of every mutant of a compiled kernel, each until its first kill."""
    candidate, answers = loaders.load(word, device), suite.Answers()
    fates: list[Fate] = []
    for name, says in mutants_of(word).items():
        fates.append(_fate(Operator(name, says), candidate, cases, answers))
        if tick is not None:
            tick(name)
    return fates


def _fate(operator: Operator, candidate: Candidate, cases: Sequence[Case], answers: suite.Answers) -> Fate:
    found = Fate(operator)
    shell = isolation.isolated(candidate, {VARIABLE: operator.name})
    try:
        for case in cases:
            verdict = suite.run_case(shell, case, 0, answers, explain=False)
            if verdict.status not in (suite.PASS, suite.SKIP):
                found.killed_by.append(case.id)
                found.how = f"{case.id}: {verdict.reason}"
                break
    finally:
        isolation.close(shell)
    return found
