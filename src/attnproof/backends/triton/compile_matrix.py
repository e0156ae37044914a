"""Which kernels are compiled for which targets without a GPU, and how a row of the record is made."""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

import torch
import triton

from . import offline

TARGETS = (
    "sm80",
    "sm86",
    "sm89",
    "sm90",
    "sm100",
    "sm120",
    "gfx90a",
    "gfx942",
    "gfx950",
    "gfx1100",
    "gfx1201",
)
WIDTHS = (64, 128, 256)
# what stands behind a target: run on a device, or only compiled
SUPPORT = {at: "run on an H200" if at == "sm90" else "compiled only, untested" for at in TARGETS}
# one variant that reaches each kernel; the second list is compiled where it costs little to know more
VARIANTS = ("causal", "cached")
MORE = ("full", "softcap", "dropout", "bias", "keep", "bounds", "sink", "packed", "paged")
MORE_TARGETS = ("sm90", "gfx942")
NEEDS = {"bias": "bias", "alibi": "alibi_slopes", "sink": "sink"}


class Job(NamedTuple):
    """One call whose kernels are compiled for one target."""

    target: str
    sample: offline.Sample


def jobs() -> list[Job]:
    """The whole matrix."""
    base = [Job(at, offline.Sample(width, of)) for at in TARGETS for width in WIDTHS for of in VARIANTS]
    more = [Job(at, offline.Sample(128, of)) for at in MORE_TARGETS for of in MORE]
    single = [Job(at, offline.Sample(64, "causal", "float32")) for at in MORE_TARGETS]
    return base + more + single


def covering() -> list[Job]:
    """The part that a test compiles: every target, every width, every kernel, not every combination."""
    base = [
        Job(at, offline.Sample(WIDTHS[(index + shift) % 3], of))
        for shift, of in enumerate(VARIANTS)
        for index, at in enumerate(TARGETS)
        if of == "causal" or index % 3 == 0
    ]
    return [*base, *(Job("sm90", offline.Sample(128, of)) for of in ("keep", "bias", "sink"))]


def rows(job: Job) -> list[dict[str, Any]]:
    """Resources of every kernel of a job."""
    needs = frozenset(
        {"q", "k", "v"} | ({NEEDS[job.sample.variant]} if job.sample.variant in NEEDS else set())
    )
    made = []
    for name, plan, arrays in job.sample.plans(job.target, needs=needs):
        compiled = offline.compile_plan(plan, tuple(plan.described(arrays)), job.target)
        found = offline.resources(compiled, job.target)
        made.append(
            {
                **identity(job, name),
                "registers": found.registers,
                "spills": found.spills,
                "shared": found.shared,
                "fits": found.fits,
                "options": plan.options,
            }
        )
    return made


def identity(job: Job, kernel: str) -> dict[str, Any]:
    """The fields that name a row."""
    sample = job.sample
    return {
        "target": job.target,
        "kernel": kernel,
        "D": sample.width,
        "variant": sample.variant,
        "dtype": sample.dtype,
    }


def minor() -> str:
    """Triton's version as "3.6"; records are per version, because compilers differ."""
    return ".".join(triton.__version__.split(".")[:2])


def versions() -> dict[str, str]:
    """What decides the numbers."""
    return {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
