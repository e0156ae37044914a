"""Measure tile sizes on the card at hand and keep what was best in a file that people can read, ship and delete.

The file holds one section per device, driver and versions; a section maps a shape bucket to a configuration and to the
times that chose it. Nothing here runs inside a user's call: ``attnproof tune`` writes the file, calls only read it.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...problem import Problem
from . import compat, configs, launch, registry
from .configs import Config, Key, Pass

TUNED_PASSES: tuple[Pass, ...] = ("forward", "dkdv", "dq")
FORMAT = "attnproof/tuning/1"


@dataclass(frozen=True)
class Trial:
    """One candidate and what came of it.

    Attributes:
        config: the candidate.
        ms: median time of the kernel, None if it did not run.
        reason: why it did not run, or "".
    """

    config: Config
    ms: float | None
    reason: str = ""


def candidates(which: Pass, width: int) -> Iterator[Config]:
    """Tile sizes worth a measurement: products that fill a matrix instruction and do not plainly exceed the registers."""
    for rows in (32, 64, 128):
        for keys in (64, 128):
            for warps, stages in ((4, 1), (4, 2), (4, 3), (8, 1), (8, 2), (8, 3)):
                held = rows if which != "dkdv" else 2 * keys
                # fp32 accumulators and two score tiles, per thread
                registers = (held * width + 2 * rows * keys) / (32 * warps)
                if 40 <= registers <= 260:
                    yield Config(rows, keys, warps, stages)
                    yield Config(rows, keys, warps, stages, tma=True)


def path() -> Path:
    """``$ATTNPROOF_TUNING``, or ``attnproof/tuning.json`` in the user's cache folder."""
    given = os.environ.get("ATTNPROOF_TUNING")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "attnproof" / "tuning.json"


def section(device: int) -> str:
    """Everything that a time depends on besides the shape."""
    import torch
    import triton

    name = torch.cuda.get_device_name(device)
    driver = torch.version.cuda or torch.version.hip
    return f"{name}, runtime {driver}, torch {torch.__version__}, triton {triton.__version__}"


def bucket(key: Key) -> str:
    """A shape bucket as text: "forward, head dim 128, banded"."""
    words = [key.which, f"head dim {key.width}", *(at for at in ("banded", "heavy") if getattr(key, at))]
    return ", ".join(words)


def read(at: Path | None = None) -> dict[str, Any]:
    """The file, or an empty one; what another version wrote is not read."""
    at = at or path()
    if not at.exists():
        return {"format": FORMAT, "sections": {}}
    found = json.loads(at.read_text())
    return found if found.get("format") == FORMAT else {"format": FORMAT, "sections": {}}


def store(name: str, which: str, best: Config, trials: list[Trial], at: Path | None = None) -> Path:
    """Put the best configuration of one bucket into a section, with the times that chose it."""
    at = at or path()
    document = read(at)
    times = {str(asdict(t.config)): t.ms for t in trials if t.ms is not None}
    document["sections"].setdefault(name, {})[which] = {"config": asdict(best), "ms": times}
    at.parent.mkdir(parents=True, exist_ok=True)
    at.write_text(json.dumps(document, indent=1) + "\n")
    _kept.cache_clear()
    registry.forget()
    return at


@functools.cache
def _kept(device: int) -> dict[str, Config]:
    """The configurations of a device; read once in a process."""
    rows = read()["sections"].get(section(device), {})
    return {name: Config(**row["config"]) for name, row in rows.items()}


def lookup(problem: Problem, which: Pass, device: int) -> Config | None:
    """The tuned configuration of a call's bucket, if the user's file has one."""
    kept = _kept(device)
    if not kept or problem.dtype == "float32":
        return None
    architecture = compat.architecture(device)
    return kept.get(bucket(configs.key_of(problem, which, architecture)))


def tune(problem: Problem, tensors: Any, which: Pass, *, tell: Callable[[Trial], None]) -> list[Trial]:
    """Time every candidate of one pass on real tensors, fastest first; kernels that accumulate are not among them."""
    import torch

    device = tensors.q.get_device()
    architecture = compat.architecture(device)
    with torch.no_grad():
        out, lse = launch.forward(problem, tensors)
    trials = []
    for config in candidates(which, configs.bucket(problem)):
        config = configs.fitted(config, architecture)
        trial = _try(problem, tensors, which, config, architecture, out, lse)
        tell(trial)
        trials.append(trial)
    return sorted(trials, key=lambda trial: float("inf") if trial.ms is None else trial.ms)


def _try(
    problem: Problem, tensors: Any, which: Pass, config: Config, architecture: str, out: Any, lse: Any
) -> Trial:
    from triton import testing

    bench: Any = testing.do_bench

    try:
        with registry.rehearse(architecture, {which: config}) as rehearsal:
            launch.forward(problem, tensors)
            if which != "forward":
                launch.backward(problem, tensors, out, lse, out, None, frozenset("qkv"))
        for tag, plan, arrays in rehearsal.plans:
            if tag == which:
                run = functools.partial(plan, *arrays)
                return Trial(config, float(bench(run, warmup=5, rep=30, return_mode="median")))
        return Trial(config, None, "the call does not reach this pass")
    except Exception as error:  # a candidate may fail in any way that a compiler or a launch can
        return Trial(config, None, f"{type(error).__name__}: {error}".splitlines()[0][:120])
