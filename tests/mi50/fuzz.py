"""Random calls for the twin, held against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.parity.calls import Call
from tests.parity.problems import Case, draw
from tests.parity.random_cases import Loose, random_case
from tests.parity.tolerance import judge

from .calls import hold


def check(seed: int, runner: Any, device: str = "cuda") -> Case:
    """Run a seed's call on a runner of steps; forward and every gradient are held against float64.

    Raises:
        AssertionError: a result is off, or an input was written to.
    """
    import torch

    case = random_case(seed)
    target = Loose("dot2", "torch", device, np.random.default_rng([0x57, seed]))
    call = Call(target, case)
    before = {name: x.clone() for name, x in call.arrays.items()}
    hold(call, judge(case, draw(case), half_operands=True), runner)
    for name, x in before.items():
        assert torch.equal(x, call.arrays[name].detach()), f"{name} was written to"
    return case
