"""Which backward kernels are compiled without a GPU: every configuration, every option, both halves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ...problem import Problem
from . import backward_offline, compile_matrix, configs, offline

# option -> what it changes in a problem, on top of those of the forward's matrix
GROUPS: dict[str, dict[str, Any]] = {"groups causal": {"Hkv": 1, "right": 0}}
# a compilation takes some twenty seconds: every kind of loop, and all options at once
LISTED = ("packed causal", "bounds", "packed everything")
VARIANTS: tuple[str, ...] = ("full", "tail", "causal", "window", "everything", *GROUPS, *LISTED)


class Job(NamedTuple):
    """The kernels of one backward."""

    width: int
    variant: str
    dtype: str = "bfloat16"

    def problem(self) -> Problem:
        """H * D = 2048 and B = 2, as in the measurements."""
        known = self.variant in compile_matrix.VARIANTS
        base = compile_matrix.Job(self.width, self.width, self.variant if known else "full", self.dtype)
        return replace(base.problem(), **GROUPS.get(self.variant, {}))

    def identity(self) -> dict[str, Any]:
        """The fields that name the rows of a job."""
        return {"D": self.width, "variant": self.variant, "dtype": self.dtype}


def jobs() -> list[Job]:
    """The whole matrix."""
    base = [Job(width, variant) for width in configs.WIDTHS for variant in VARIANTS]
    return [*base, *(Job(width, of, "float16") for width in configs.WIDTHS for of in ("full", "causal"))]


def covering() -> list[Job]:
    """The part that a test compiles: every configuration, with the loop that masks and the one that does not, and lists."""
    return [
        *(Job(width, "causal") for width in configs.WIDTHS),
        Job(128, "bounds"),
        Job(256, "packed causal"),
    ]


def rows(job: Job) -> list[dict[str, Any]]:
    """What the assembler says about the kernels of one job."""
    found: list[dict[str, Any]] = []
    for launch in backward_offline.launches(job.problem()):
        code = offline.inspect(backward_offline.compile_launch(launch))
        name = {"kernel": launch.kernel.fn.__name__, **job.identity()}
        found.append({**name, **code.row(), "fits": code.shared <= offline.SHARED_LIMIT})
    return found
