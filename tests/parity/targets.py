"""What the suite runs on: every backend of the package, and how arrays get there and back.

ATTNPROOF_TEST_DEVICE=cuda moves the whole suite to a GPU; TRITON_INTERPRET=1 brings the Triton backend to
the CPU.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import attnproof
from attnproof import dispatch
from attnproof.backends import hopper
from attnproof.problem import Options, Problem, bind

from .problems import Array, Case

DEVICE = os.environ.get("ATTNPROOF_TEST_DEVICE", "cpu")

# what a backend may refuse, by name; a refusal outside of it fails. New backends state theirs here.
REFUSES: dict[str, Callable[[Problem], bool]] = {
    "triton": lambda problem: problem.dtype == "float64" or max(problem.D, problem.Dv) > 256,
    "hopper": lambda problem: (
        problem.dtype not in ("float16", "bfloat16")
        or problem.rows not in ("dense", "packed")
        or (problem.rows == "packed" and "packed" in hopper.ON_TRIAL)
        or not (0 < problem.D <= 256 and 0 < problem.Dv <= 256)
        or problem.Dv % 8 != 0
        or problem.has_bias
        or problem.has_keep
        or (problem.has_bounds and "bounds" in hopper.ON_TRIAL)
        or problem.dropout_p > 0
    ),
}

# backends whose matrix unit takes p and dS as halves
HALF_OPERANDS: frozenset[str] = frozenset({"triton", "hopper"})


@dataclass(frozen=True)
class Target:
    """A backend, fed arrays of one kind on one device."""

    backend: str
    kind: str  # numpy or torch
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.backend}-{self.kind}" + ("" if self.device == "cpu" else f"-{self.device}")

    @property
    def fast(self) -> bool:
        """Whether large sizes are affordable: not under an interpreter."""
        return self.device != "cpu" or self.backend != "triton"

    @property
    def half_operands(self) -> bool:
        """Whether p and dS are rounded to a half input dtype before they are multiplied."""
        return self.backend in HALF_OPERANDS

    def may_refuse(self, problem: Problem) -> bool:
        """Whether the suite lets this backend refuse a problem."""
        return REFUSES.get(self.backend, lambda _: False)(problem)

    def array(self, x: Array | None, dtype: str) -> Any:
        """Values as an array of this target, in `dtype`."""
        if x is None:
            return None
        rounded = x.astype(numpy_dtype(dtype))
        if self.kind == "numpy":
            return rounded
        import torch

        # torch would round float64 to a half type by way of float32, that is twice
        wide = torch.from_numpy(np.ascontiguousarray(rounded.astype(x.dtype)))
        return wide.to(device=self.device, dtype=getattr(torch, dtype))


def numpy_dtype(name: str) -> Any:
    """The NumPy dtype of this name; bfloat16 is ml_dtypes'."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def values(x: Any) -> Array | None:
    """An array or tensor of any kind as float64 (float64 and wider stay)."""
    if x is None or isinstance(x, np.ndarray):
        return None if x is None else x.astype(np.float64)
    return x.detach().double().cpu().numpy()


def kind_of(x: Any) -> str:
    return "numpy" if isinstance(x, np.ndarray) else "torch"


@functools.cache
def absent(backend: str, kind: str, device: str) -> str | None:
    """Why a backend cannot run here at all, or None; asked with a plain problem in the dtype that fewest refuse."""
    dtype = "bfloat16" if backend == "hopper" else "float32"
    q = Target(backend, kind, device).array(np.zeros((1, 1, 2, 8)), dtype)
    try:
        return dispatch.load(backend).why_not(bind(q, q, q, Options()).problem)
    except ImportError as error:
        return str(error)


def natural_kind(backend: str) -> str:
    """The kind of array that a backend works on; what cannot be loaded counts as NumPy's."""
    try:
        return dispatch.load(backend).kind
    except ImportError:
        return "numpy"


def targets() -> list[Target]:
    """Every backend that can run here, with each kind of array that can live on the device.

    `test_suite.py` names those that cannot, once each and not once per case.
    """
    kinds = ("numpy", "torch") if DEVICE == "cpu" else ("torch",)
    every = [Target(name, kind, DEVICE) for name in attnproof.backends() for kind in kinds]
    return [target for target in every if absent(target.backend, target.kind, target.device) is None]


def _parameter(target: Target, *more: Any) -> Any:
    return pytest.param(target, *more, id="-".join(map(str, (target, *more))))


# a test that is decorated with one of these runs on every backend with these kinds
every_target = pytest.mark.parametrize("target", [_parameter(target) for target in targets()])
every_numpy_target = pytest.mark.parametrize(
    "target", [_parameter(target) for target in targets() if target.kind == "numpy"]
)
every_torch_target = pytest.mark.parametrize(
    "target", [_parameter(target) for target in targets() if target.kind == "torch"]
)
every_host_target = pytest.mark.parametrize(
    "target", [_parameter(target) for target in targets() if target.device == "cpu"]
)


def every_target_and_case(cases: Sequence[Case], shared: Sequence[Case]) -> Any:
    """All cases with the kind a backend works on, the shared ones with the kind that is converted."""
    pairs = [
        _parameter(target, case)
        for target in targets()
        for case in (cases if target.kind == natural_kind(target.backend) or DEVICE != "cpu" else shared)
    ]
    return pytest.mark.parametrize(("target", "case"), pairs)
