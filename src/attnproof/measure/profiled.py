"""The process that a profiler watches for `why-slow`: `python -m attnproof.measure.profiled PLAN MANIFEST`.

PLAN is JSON: a shape, a candidate and a device. The call is made twice (compilation, allocator) and then once more, between
two markers and with the profiler on; MANIFEST is written when that has happened.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..ledger.workload import profiled
from . import implementations
from .bench import make_inputs, prepared
from .shapes import Shape


def main(plan: Path, manifest: Path) -> None:
    """Make the call of ``plan``."""
    import torch

    job = json.loads(plan.read_text(encoding="utf-8"))
    shape = Shape(**job["shape"])
    q, k, v, _ = inputs = make_inputs(shape, job["device"], 0)
    one = implementations.load(job["name"])
    prepared(shape, inputs, one.run)()
    call = prepared(shape, inputs, one.timed(q, k, v, shape))
    call()
    with profiled(torch.cuda):
        call()
    manifest.write_text(json.dumps(job), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
