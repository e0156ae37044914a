"""Where device measurements are written: one JSON record per kind, with what is needed to judge it later."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def commit() -> dict[str, Any]:
    """Commit and dirty flag; a copy without its history names its commit in a file."""
    named = ROOT / "COMMIT"
    if named.exists():
        return {"commit": named.read_text().split()[0], "dirty": False}
    try:
        head, state = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
    return {"commit": head.strip(), "dirty": bool(state.strip())}


def environment() -> dict[str, Any]:
    """Device, driver, clocks, versions and commit."""
    import torch
    import triton

    query = "driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
        state = dict(zip(query.split(","), done.stdout.splitlines()[0].split(", "), strict=True))
    except (OSError, subprocess.CalledProcessError):
        state = {}
    return {
        "device": torch.cuda.get_device_name(),
        "cpu": platform.processor() or platform.machine(),
        "platform": f"{platform.system()} {platform.machine()}",
        "state": state,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "triton": triton.__version__,
        },
        **commit(),
    }


def folder(device: str) -> str:
    """``NVIDIA H200`` is kept under ``results/h200``."""
    return device.lower().removeprefix("nvidia ").replace(" ", "-")


def write(kind: str, name: str, protocol: dict[str, Any], results: list[dict[str, Any]], into: Path) -> Path:
    """Write one record and return its path."""
    document = {
        "schema": "attnproof/record/1",
        "kind": kind,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "environment": environment(),
        "protocol": protocol,
        "results": results,
    }
    into.mkdir(parents=True, exist_ok=True)
    path = into / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
