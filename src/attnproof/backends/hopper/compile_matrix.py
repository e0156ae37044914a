"""Which forward kernels are compiled without a GPU: every configuration, every option, both halves."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...masks import BIG
from ...problem import Problem
from ..triton.compile_matrix import minor, versions
from . import configs, offline

__all__ = ["VARIANTS", "Job", "covering", "jobs", "minor", "row", "versions"]

LENGTH = 8192
PACKED: dict[str, Any] = {"rows": "packed", "tokens": (2 * LENGTH, 2 * LENGTH)}
# option -> what it changes in a problem
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "tail": {"N": LENGTH - 1},
    "causal": {"right": 0},
    "window": {"left": 1023, "right": 0},
    "left": {"left": 1023},
    "softcap": {"right": 0, "softcap": 30.0},
    "alibi": {"right": 0, "has_alibi": True},
    "sink": {"right": 0, "has_sink": True},
    "negative": {"scale": -1.0},
    "everything": {
        "left": 1023,
        "right": 0,
        "softcap": 30.0,
        "has_alibi": True,
        "has_sink": True,
        "scale": -1.0,
    },
    "packed": PACKED,
    "packed causal": {**PACKED, "right": 0},
    "packed everything": {
        **PACKED,
        "left": 1023,
        "right": 0,
        "top_left": True,
        "has_bounds": True,
        "softcap": 30.0,
        "has_alibi": True,
        "has_sink": True,
        "scale": -1.0,
    },
    "bounds": {"has_bounds": True},
    "bounds causal": {"has_bounds": True, "right": 0},
}
MIXED = ((192, 128), (128, 64), (64, 128), (256, 64), (64, 256), (128, 256), (256, 128))


class Job(NamedTuple):
    """One kernel."""

    width: int
    width_v: int
    variant: str
    dtype: str = "bfloat16"

    def problem(self) -> Problem:
        """H * D = 2048 and B = 2, as in the measurements."""
        heads = max(1, 2048 // self.width)
        given: dict[str, Any] = {
            "dtype": self.dtype,
            "device": "cuda",
            "B": 2,
            "H": heads,
            "Hkv": heads,
            "M": LENGTH,
            "N": LENGTH,
            "D": self.width,
            "Dv": self.width_v,
            "scale": self.width**-0.5,
            "left": BIG,
            "right": BIG,
        }
        return Problem(**(given | VARIANTS[self.variant]))

    def identity(self) -> dict[str, Any]:
        """The fields that name a row."""
        return {"D": self.width, "Dv": self.width_v, "variant": self.variant, "dtype": self.dtype}


def jobs() -> list[Job]:
    """The whole matrix."""
    base = [Job(width, width, variant) for width in configs.WIDTHS for variant in VARIANTS]
    single = [Job(width, width, of, "float16") for width in configs.WIDTHS for of in ("full", "causal")]
    return [*base, *single, *(Job(d, dv, of) for d, dv in MIXED for of in ("full", "causal"))]


def covering() -> list[Job]:
    """The part that a test compiles: every configuration as it is shipped."""
    shipped = [Job(width, width, of) for width in configs.WIDTHS for of in ("full", "causal")]
    return [*shipped, *(Job(128, 128, of) for of in ("packed causal", "bounds"))]


def row(job: Job) -> dict[str, Any]:
    """What the assembler says about one kernel."""
    facts = configs.facts(job.problem())
    found = offline.inspect(offline.compile_facts(facts, job.dtype))
    return {**job.identity(), **found.row(), "fits": found.shared <= offline.SHARED_LIMIT}
