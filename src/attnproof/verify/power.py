"""Does a case have power? A case that accepts a decoy proves nothing about a kernel that passes it (G3).

Decoys are outputs that need no attention at all. A tolerance that lets one through is too wide for that case, or the
case is too easy; either way it may not count. Cases that are easy by design (all values equal, no key kept) are tagged
`diagnostic` and never count as proof.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnproof.cases import Case
from attnproof.verify.dtypes import Array
from attnproof.verify.inputs import Inputs, build
from attnproof.verify.judge import judge_tensor, setting_for
from attnproof.verify.numerics import CLASSES
from attnproof.verify.oracle import Answer
from attnproof.verify.suite import Answers


def decoys(inputs: Inputs, answer: Answer) -> dict[str, Array]:
    """Outputs that look like something and are not attention of these inputs."""
    right = np.asarray(answer.tensors["out"].value)
    made = {
        "zeros": np.zeros_like(right),
        "the row before": np.roll(right, 1, axis=0 if right.ndim == 3 else 2),
    }
    if right.ndim == 4 and right.shape[1] > 1:
        made["the head before"] = np.roll(right, 1, axis=1)
    if inputs.case.rows == "dense" and inputs.case.N:
        mean = inputs.v.values().mean(2, keepdims=True)
        made["mean of v"] = np.broadcast_to(
            np.repeat(mean, max(inputs.case.H // inputs.case.Hkv, 1), 1), right.shape
        )
    if (right.ndim == 4 and right.shape[2] == 1) or (right.shape[0] == 1 and right.ndim == 3):
        del made["the row before"]
    return made


def accepted(case: Case, seed: int = 0, answers: Answers | None = None) -> list[str]:
    """Names of the decoys that pass on this case, by the class that undeclared kernels must meet."""
    inputs = build(case, seed)
    with np.errstate(all="ignore"):
        answer, _ = (answers or Answers()).of(inputs)
        setting = setting_for(case, answer, CLASSES["flash"])
        found: dict[str, Any] = decoys(inputs, answer)
        return [name for name, out in found.items() if _passes(out, answer, setting, case.dtype)]


def _passes(out: Array, answer: Answer, setting: Any, dtype: str) -> bool:
    return judge_tensor("out", out, answer.tensors["out"], answer, setting, None, dtype).ok
