"""Records: what was measured or verified, under one versioned schema, with what is needed to judge it later.

`schema/record-1.json` is the JSON Schema that ships with the package; `check` holds a document against it. Records
never name a host or a user.
"""

from __future__ import annotations

import json
import math
import platform
import subprocess
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from attnproof.verify.judge import TensorReport
from attnproof.verify.suite import Verdict

SCHEMA = "attnproof/record/1"
SCHEMA_FILE = Path(__file__).parent / "schema" / "record-1.json"


def record(
    kind: str, protocol: dict[str, Any], results: list[dict[str, Any]], device: str = "cpu"
) -> dict[str, Any]:
    """A complete record: `kind` is verify, selftest, measure, ...; `protocol` says how, `results` what came out."""
    document = {
        "schema": SCHEMA,
        "kind": kind,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "environment": environment(device),
        "protocol": plain(protocol),
        "results": plain(results),
    }
    check(document)
    return document


def environment(device: str = "cpu") -> dict[str, Any]:
    """Device, processor, versions and commit."""
    return {
        "device": _device_name(device),
        **({} if device == "cpu" else {"state": _gpu_state()}),
        "cpu": cpu_name(),
        "threads": _threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
        **_commit(),
    }


def versions() -> dict[str, str]:
    """Versions of what decides a number; absent packages are absent."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("attnproof", "numpy", "torch", "triton", "flash-attn", "xformers", "flashinfer-python"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def cpu_name() -> str:
    """The processor's name as the kernel tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _threads() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device_name(device: str) -> str:
    if device == "cpu":
        return "cpu"
    import torch

    return str(torch.cuda.get_device_name(device))


def _gpu_state() -> dict[str, str]:
    """What decides a time besides the device, where the driver tells it: clocks, power limit, temperature."""
    query = "driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return dict(zip(query.split(","), done.stdout.partition("\n")[0].split(", "), strict=False))


@cache
def _commit() -> dict[str, Any]:
    return commit_of(Path(__file__).parents[3])


def commit_of(root: Path) -> dict[str, Any]:
    """Commit and dirty flag of a checkout, None where nobody knows.

    A copy without history says in a file ``COMMIT`` what ``git describe --always --abbrev=40 --dirty`` said of the original.
    """
    named = root / "COMMIT"
    if named.is_file():
        said = named.read_text(encoding="utf-8").strip()
        return {"commit": said.removesuffix("-dirty"), "dirty": said.endswith("-dirty")}
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        )
        state = subprocess.run(
            ["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
    return {"commit": head.stdout.strip(), "dirty": bool(state.stdout.strip())}


def from_verdict(verdict: Verdict) -> dict[str, Any]:
    """A verdict as one entry of `results`."""
    case = verdict.case
    return {
        "case": case.id,
        "group": case.group,
        "describe": case.describe(),
        "dtype": case.dtype,
        "candidate": verdict.candidate,
        "status": verdict.status,
        "seed": verdict.seed,
        "reason": verdict.reason,
        "hint": verdict.hint,
        "notes": list(verdict.notes),
        "guards": verdict.guards,
        "seconds": round(verdict.seconds, 4),
        "replay": verdict.replay,
        "tensors": [_tensor(report) for report in verdict.tensors],
    }


def _tensor(report: TensorReport) -> dict[str, Any]:
    worst = report.worst
    return {
        "tensor": report.tensor,
        "max_abs": report.max_abs,
        "rms": report.rms,
        "rel": report.rel,
        "z_rms": report.z_rms,
        "z_max": report.z_max,
        "bound": report.bound,
        "bound_used": report.bound_used,
        "ok": report.ok,
        "classic_ok": report.classic_ok,
        "checks": [
            {"name": check.name, "value": check.value, "limit": check.limit, "ok": check.ok}
            for check in report.checks
        ],
        "worst": None
        if worst is None
        else {"index": list(worst.index), "got": worst.got, "expected": worst.expected, "bound": worst.bound},
    }


def plain(value: Any) -> Any:
    """Anything as JSON: infinities and NaN become words, because JSON has none."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def number(value: Any) -> float:
    """The inverse of `plain` for one number."""
    return float("nan") if value is None else float(value)


def check(document: Any) -> None:
    """Hold a document against the shipped schema.

    Raises:
        ValueError: it does not fit; the message says where.
    """
    _check(document, json.loads(SCHEMA_FILE.read_text()), "record")


_TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def _is(value: Any, kind: str) -> bool:
    if kind in ("number", "integer"):
        accepted = int if kind == "integer" else (int, float)
        return isinstance(value, accepted) and not isinstance(value, bool)
    return isinstance(value, _TYPES[kind])


def _check(value: Any, schema: dict[str, Any], path: str) -> None:
    """The part of JSON Schema that the shipped file uses: type, const, enum, required, properties, items."""
    kinds = schema.get("type")
    if kinds is not None:
        allowed = [kinds] if isinstance(kinds, str) else kinds
        if not any(_is(value, kind) for kind in allowed):
            raise ValueError(f"{path}: expected {' or '.join(allowed)}, got {type(value).__name__}")
    if "const" in schema and value != schema["const"]:
        raise ValueError(f"{path}: expected {schema['const']!r}, got {value!r}")
    if "enum" in schema and value not in schema["enum"]:
        raise ValueError(f"{path}: expected one of {schema['enum']}, got {value!r}")
    if isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                raise ValueError(f"{path}: expected a field {name!r}")
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                _check(value[name], inner, f"{path}.{name}")
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            _check(item, schema["items"], f"{path}[{index}]")


def load(path: Path) -> dict[str, Any]:
    """Read and check a record."""
    document = json.loads(path.read_text())
    check(document)
    return document
