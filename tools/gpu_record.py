"""Where device measurements are written: one JSON record per kind, under a folder named after the device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from attnproof.verify import records  # noqa: E402


def folder(device: str) -> str:
    """``NVIDIA H200`` is kept under ``results/h200``."""
    return device.lower().removeprefix("nvidia ").replace(" ", "-")


def write(kind: str, name: str, protocol: dict[str, Any], results: list[dict[str, Any]], into: Path) -> Path:
    """Write one record and return its path."""
    into.mkdir(parents=True, exist_ok=True)
    path = into / f"{name}.json"
    document = records.record(kind, protocol, results, device="cuda")
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
