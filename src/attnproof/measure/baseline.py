"""Stored baselines: what a machine measured before, and what that allows to be said now.

Gate B compares medians with a stored file. Two runs of one code differ by tens of per cent on a shared machine, so it
is advisory: it says SUSPECT and asks for gate A, never "slower". Gate C compares quantities that do not depend on the
clock (bytes, exponents, launches, registers, spills, code size, z) and is hard: any growth beyond its slack fails.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..verify import records
from .stats import summarise

Verdict = Literal["SAME", "IMPROVED", "REGRESSED", "SUSPECT", "INCOMPARABLE"]

# relative slack of gate C by quantity; what is not named (launches, spills, shared_bytes) must not grow at all.
# A compiler hands out registers in steps of 8
SLACK = {
    **{"z_rms": 0.05, "rms": 0.05, "peak_bytes": 0.01, "exponent": 0.03},
    **{"code_bytes": 0.02, "registers": 0.04},
}
TOLERANCE = 0.05  # gate B: a stored median within this share, or 3 MAD, is the same
# rows of kernels that were compiled for a target and never run (results/compile): what names them, what they hold
COMPILED_KEY = ("target", "kernel", "D", "Dv", "variant", "dtype")
COMPILED = {"registers": "registers", "spills": "spills", "shared": "shared_bytes"}
FINGERPRINT = ("device", "cpu", "threads", "platform")
VERSIONS = ("torch", "triton")


@dataclass(frozen=True)
class Finding:
    """One quantity of one case, then and now."""

    case: str
    candidate: str
    quantity: str
    before: float | None
    now: float
    verdict: Verdict
    hard: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return asdict(self)


def fingerprint(environment: Mapping[str, Any]) -> str:
    """12 hex digits of what must agree for two times to be comparable at all."""
    versions = environment.get("versions", {})
    held = {name: environment.get(name) for name in FINGERPRINT} | {
        name: versions.get(name) for name in VERSIONS
    }
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()[:12]


def path_of(folder: Path, name: str, environment: Mapping[str, Any]) -> Path:
    """Where the baseline of this machine is kept."""
    return folder / fingerprint(environment) / f"{name}.json"


def load(folder: Path, name: str, environment: Mapping[str, Any]) -> dict[str, Any]:
    """The baseline of this machine.

    Raises:
        ValueError: there is none; the message says how to make one.
    """
    path = path_of(folder, name, environment)
    if not path.is_file():
        raise ValueError(
            f"baseline: {path} is not there: this machine and these versions have none; "
            f"make one with attnproof baseline save"
        )
    return read(path)


def read(path: Path) -> dict[str, Any]:
    """A record; one of compiled kernels has no machine that made it, and fewer fields than others.

    Raises:
        ValueError: it is no record.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.get("kind") != "compile":
        records.check(document)
    return document


def save(record: Mapping[str, Any], folder: Path, name: str) -> Path:
    """Keep a record as the baseline; keys in a fixed order, so that differences read well in git."""
    path = path_of(folder, name, record["environment"])
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Finding]:
    """Gates B and C of two records of the same kind."""
    comparable = fingerprint(before["environment"]) == fingerprint(now["environment"])
    old = {_key(row): row for row in before["results"]}
    findings: list[Finding] = []
    for row in now["results"]:
        findings += _row(old.get(_key(row)), row, comparable)
    return findings


def holds(findings: Iterable[Finding]) -> bool:
    """Whether no hard quantity got worse."""
    return not any(each.hard and each.verdict == "REGRESSED" for each in findings)


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    if "case" in row:
        return str(row["case"]), str(row["candidate"])
    return " ".join(str(row[name]) for name in COMPILED_KEY if name in row), "compiled"


def _without_a_clock(row: Mapping[str, Any]) -> dict[str, float]:
    """The quantities of gate C of a row: those of a measured call, or what an assembler says of a compiled kernel."""
    if "case" in row:
        return dict(row.get("deterministic") or {})
    return {quantity: float(row[name]) for name, quantity in COMPILED.items() if name in row}


def _row(before: Mapping[str, Any] | None, now: Mapping[str, Any], comparable: bool) -> list[Finding]:
    case, candidate = _key(now)
    findings: list[Finding] = []
    if now.get("samples"):
        findings.append(_stored(case, candidate, before, now, comparable))
    earlier = {} if before is None else _without_a_clock(before)
    return findings + held(case, candidate, earlier, _without_a_clock(now))


def held(case: str, candidate: str, before: Mapping[str, float], now: Mapping[str, float]) -> list[Finding]:
    """Gate C of one call: each quantity then and now, hard."""
    findings: list[Finding] = []
    for quantity, value in sorted(now.items()):
        known = before.get(quantity)
        verdict = "INCOMPARABLE" if known is None else _hard(quantity, known, value)
        findings.append(Finding(case, candidate, quantity, known, value, verdict, hard=True))
    return findings


def _hard(quantity: str, before: float, now: float) -> Verdict:
    slack = SLACK.get(quantity, 0.0) * abs(before)
    if now > before + slack:
        return "REGRESSED"
    return "IMPROVED" if now < before - slack else "SAME"


def _stored(
    case: str, candidate: str, before: Mapping[str, Any] | None, now: Mapping[str, Any], comparable: bool
) -> Finding:
    median = summarise(now["samples"]).median
    if before is None or not before.get("samples") or not comparable:
        return Finding(case, candidate, "median seconds", None, median, "INCOMPARABLE", hard=False)
    then = summarise(before["samples"])
    band = max(TOLERANCE * then.median, 3 * then.mad)
    verdict: Verdict = "SAME" if abs(median - then.median) <= band else "SUSPECT"
    return Finding(case, candidate, "median seconds", then.median, median, verdict, hard=False)
