"""Plans by the structure of their call: looked up, built, launched; or only collected, when a call is rehearsed.

The key of a plan holds everything that Triton specialises a kernel on: the problem, and dtype, strides and alignment
of each array (a sink in float32 beside halves is another kernel than one in halves).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch

from ...problem import Problem
from . import compat, configs
from .configs import Config, Pass
from .plan import Plan

PLANS: dict[Any, Plan] = {}
MAX_PLANS = 4096  # a runaway of shapes must not hold memory for ever
REHEARSED_MULTIPROCESSORS = 132


@dataclass
class Rehearsal:
    """Calls inside are planned for an architecture, and neither compiled nor launched; see ``rehearse``."""

    architecture: str
    configs: dict[Pass, Config]
    plans: list[tuple[str, Plan, tuple[Any, ...]]]

    def config(self, problem: Problem, which: Pass) -> Config:
        """The configuration given for a pass, or the table's."""
        return self.configs.get(which) or configs.choose(problem, which, self.architecture)


_REHEARSALS: list[Rehearsal] = []


@contextlib.contextmanager
def rehearse(architecture: str, given: dict[Pass, Config] | None = None) -> Generator[Rehearsal, None, None]:
    """Collect the plans of the calls inside, which may be on meta tensors: for compiling offline and for tuning.

    Args:
        architecture: ``sm90``, ``gfx942`` ...
        given: configurations to use instead of the table's.
    """
    _REHEARSALS.append(Rehearsal(architecture, given or {}, []))
    try:
        yield _REHEARSALS[-1]
    finally:
        _REHEARSALS.pop()


def run(tag: str, problem: Any, arrays: tuple[Any, ...], build: Callable[[], Plan], *more: Any) -> Plan:
    """Launch the plan of this structure, and return it; everything that Triton specialises on is in the key."""
    if _REHEARSALS:
        plan = build()
        _REHEARSALS[-1].plans.append((tag, plan, arrays))
        return plan
    facts = [None if x is None else (x.dtype, x.stride(), x.data_ptr() & 15 == 0) for x in arrays]
    key = (tag, problem, arrays[0].get_device(), more, *facts)
    plan = PLANS.get(key)
    if plan is None:
        if len(PLANS) >= MAX_PLANS:
            PLANS.clear()
        plan = PLANS[key] = build()
    plan(*arrays)
    return plan


def device_of(x: Any) -> contextlib.AbstractContextManager[Any]:
    """The device of x, without the cost of switching where it is current."""
    if x.device.type != "cuda" or x.get_device() == compat.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def architecture_of(x: Any) -> str:
    """The architecture that a call on x is compiled for: the rehearsal's, or that of its device."""
    if _REHEARSALS:
        return _REHEARSALS[-1].architecture
    return "interpreter" if x.device.type == "cpu" else compat.architecture(x.get_device())


def config_of(problem: Problem, which: Pass, x: Any) -> Config:
    """The configuration of one pass on the device of x, or of the rehearsal."""
    if _REHEARSALS:
        return _REHEARSALS[-1].config(problem, which)
    if x.device.type == "cpu":
        return configs.INTERPRETER
    return _config(problem, which, x.get_device())


@functools.lru_cache(maxsize=MAX_PLANS)
def _config(problem: Problem, which: Pass, device: int) -> Config:
    """What ``attnproof tune`` found for this device if the user ran it, else the package's table."""
    from . import tuning  # which plans calls itself

    found = tuning.lookup(problem, which, device)
    return found or configs.choose(problem, which, compat.architecture(device))


def forget() -> None:
    """Drop every plan and remembered configuration."""
    PLANS.clear()
    _config.cache_clear()


def rehearsal() -> Rehearsal | None:
    """The innermost rehearsal, if a call is being rehearsed."""
    return _REHEARSALS[-1] if _REHEARSALS else None
