"""What this machine is and what runs on it, as plain data."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

# optional package -> how to get it
OPTIONAL = {
    "torch": "pip install 'attnproof[torch]'",
    "triton": "pip install 'attnproof[triton]'",
    "ml_dtypes": "pip install ml_dtypes (bfloat16 in NumPy)",
    "jinja2": "pip install 'attnproof[report]'",
    "matplotlib": "pip install 'attnproof[report]'",
    "transformers": "pip install 'attnproof[real]'",
}


def version_of(package: str) -> str | None:
    """The installed version, None if it is not installed; nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's marketing name, where the system tells."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Versions, processor and GPUs. Imports torch if it is installed: only torch knows its devices."""
    import attnproof

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "attnproof": attnproof.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": cores,
        "packages": {name: version_of(name) for name in ("numpy", *OPTIONAL)},
        "gpus": gpus(),
    }


def gpus() -> list[dict[str, str]]:
    """Name, memory and architecture of every GPU that torch can use."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    found: list[dict[str, str]] = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        arch = getattr(about, "gcnArchName", "") if torch.version.hip else f"sm_{about.major}{about.minor}"
        found.append(
            {"name": about.name, "memory": f"{about.total_memory / 2**30:.1f} GiB", "arch": str(arch)}
        )
    return found


def simd_target() -> str | None:
    """The instruction set that the native backend chose on this processor; None if it is not built."""
    try:
        native = importlib.import_module("attnproof.backends.native")
        return str(native.simd_target())
    except (ImportError, AttributeError):
        return None


def self_tests(devices: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Every backend on a small causal problem: its error, or its reason not to run. ``ok`` is None for a refusal."""
    from attnproof import backends

    kinds = [("cpu", "float32"), *([("cuda", "float16")] if devices else [])]
    return [_self_test(name, device, dtype) for name in backends() for device, dtype in kinds]


def _self_test(backend: str, device: str, dtype: str) -> dict[str, Any]:
    import attnproof
    from attnproof.cli._lessons import Inputs, naive

    inputs = Inputs.draw(100, 64, 0)
    want = naive(inputs, causal=True)[0]
    arrays: list[Any] = [x.astype(dtype) for x in inputs.dense]
    if device != "cpu":
        import torch

        arrays = [torch.from_numpy(x).to(device) for x in arrays]
    about: dict[str, Any] = {"backend": backend, "device": device, "dtype": dtype}
    try:
        out = attnproof.attention(*arrays, causal=True, backend=backend)
    except (attnproof.Unsupported, attnproof.BackendMissing) as refusal:
        return {**about, "ok": None, "verdict": str(refusal)}
    except Exception as error:
        # a backend that breaks is what a doctor is asked about: the others are still examined
        return {**about, "ok": False, "verdict": f"BROKEN: {type(error).__name__}: {error}"}
    got = np.asarray(out.cpu().numpy() if device != "cpu" else out)[0, 0].astype(np.float64)
    error = float(np.abs(got - want).max())
    # inputs are rounded to dtype too, so a few of its roundoffs are no fault; a wrong row is off by about 1
    ok = error < 16 * float(np.finfo(dtype).eps)
    return {
        **about,
        "ok": ok,
        "error": error,
        "verdict": f"{'ok' if ok else 'WRONG'}, max abs error {error:.1e}",
    }
