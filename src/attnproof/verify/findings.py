"""Findings: where shipped kernels deviate, each with the smallest program that shows it.

A finding is a bug, a documented convention, or a precision class. Nothing is called a bug that its library documents.
`attnproof findings` runs every program here and says whether the deviation is still there; `docs/findings.md` is
written from the same texts (`attnproof findings --markdown`), so the page and the programs cannot differ.

A program sets `got` and `right`; the deviation is there when they differ by more than `within`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

from attnproof.verify.isolation import GRACE, LOST_CONTEXT, exit_words

BUG, CONVENTION, PRECISION, VALIDATION = "bug", "convention", "precision class", "validation"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One deviation.

    Attributes:
        name: stable name.
        kernel: the candidate, as `verify` names it.
        kind: bug, convention, precision class, or validation (bad input that is accepted).
        title: one sentence.
        code: a program that sets `got` and `right`.
        within: largest difference that would be no deviation.
        seen: versions and device on which it was seen.
        note: why it is of that kind, and what to do.
        device: cpu or cuda.
        crashes: the deviation is that the program loses its process or its GPU context; it need not set anything.
        needs: packages that the program imports.
        case: a named case that shows it too, empty where none does.
    """

    name: str
    kernel: str
    kind: str
    title: str
    code: str
    seen: str
    note: str
    within: float = 0.0
    device: str = "cpu"
    crashes: bool = False
    needs: tuple[str, ...] = ("torch",)
    case: str = ""


@dataclass(frozen=True)
class Observation:
    """What running a finding showed.

    Attributes:
        status: reproduced, gone, or not here.
        got, right: the values, as text.
        why: why it could not be run, or what it raised.
    """

    finding: Finding
    status: str
    got: str = ""
    right: str = ""
    why: str = ""


def observe(finding: Finding) -> Observation:
    """Run the program of a finding."""
    missing = [package for package in finding.needs if find_spec(package) is None]
    if missing:
        return Observation(finding, "not here", why=f"{', '.join(missing)} is not installed")
    if finding.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            return Observation(finding, "not here", why="needs a GPU")
    what = _in_child(finding) if finding.crashes or finding.device != "cpu" else _here(finding)
    if "lost" in what:
        return Observation(finding, "reproduced" if finding.crashes else "gone", why=what["lost"])
    if finding.crashes:
        return Observation(finding, "gone", why=what.get("raised", "ran to its end"))
    if "raised" in what:  # a library that refuses now what it accepted then has changed its mind
        return Observation(finding, "gone", why=f"raised {what['raised']}")
    got, right = what["got"], what["right"]
    status = "reproduced" if differ(got, right, finding.within) else "gone"
    return Observation(finding, status, _text(got), _text(right))


def _here(finding: Finding) -> dict[str, Any]:
    """What the program sets, or what it raises."""
    scope: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(compile(finding.code, f"<finding {finding.name}>", "exec"), scope)
            return {"got": _numbers(scope["got"]), "right": _numbers(scope["right"])}
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            return {"lost" if any(part in said for part in LOST_CONTEXT) else "raised": said}


def _in_child(finding: Finding) -> dict[str, Any]:
    """The same in a process of its own: after an illegal access no later program could run in this one."""
    context = get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_tell, args=(theirs, finding), daemon=True)
    child.start()
    theirs.close()
    try:
        told = mine.recv()
    except EOFError:
        told = None
    child.join(GRACE)
    if child.exitcode is None:
        child.kill()
        child.join()
    return told if told is not None else {"lost": f"the process died ({exit_words(child.exitcode)})"}


def _tell(pipe: Any, finding: Finding) -> None:
    pipe.send(_here(finding))


def differ(got: Sequence[float], right: Sequence[float], within: float) -> bool:
    """Whether any element deviates; NaN equals NaN, and infinities only themselves."""
    if len(got) != len(right):
        return True
    for a, b in zip(got, right, strict=True):
        if a != a or b != b:
            if (a != a) != (b != b):
                return True
        elif a != b and not abs(a - b) <= within:
            return True
    return False


def _numbers(value: Any) -> list[float]:
    import numpy as np

    array = value.detach().cpu().double().numpy() if hasattr(value, "detach") else value
    return [float(x) for x in np.asarray(array, np.float64).reshape(-1)]


def _text(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:.6g}" for value in values[:4])
    return shown + (", ..." if len(values) > 4 else "")


def all_findings() -> tuple[Finding, ...]:
    """Every finding, CPU first."""
    from attnproof.verify.findings_cpu import FINDINGS as CPU
    from attnproof.verify.findings_gpu import FINDINGS as GPU

    return (*CPU, *GPU)


def markdown() -> str:
    """The page of findings."""
    lines = [HEADER]
    for finding in all_findings():
        lines += [
            f"## {finding.name}",
            "",
            f"**{finding.kind}**, `{finding.kernel}`: {finding.title}",
            "",
            "```python",
            finding.code.strip(),
            "```",
            "",
            f"Seen on {finding.seen}. {finding.note}",
        ]
        if finding.case:
            lines.append(f"Also: `attnproof explain-case {finding.case} --candidate {finding.kernel}`.")
        lines.append("")
    return "\n".join(lines)


HEADER = """# Findings

What `attnproof verify` found in kernels that ship with torch. Each entry is the smallest program that shows the
deviation: it sets `got` and `right`. `attnproof findings` runs them all and says which are still there.

A finding is a **bug**, a documented **convention**, a **precision class** (the kernel rounds more often than its
inputs suggest) or a missing **validation**. Nothing is called a bug that its library documents. This page is written
by `attnproof findings --markdown` from `attnproof/verify/findings*.py`; a test holds it to that.
"""
