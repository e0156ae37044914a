"""Random calls of a backend on the GPU at hand, against float64; a call that hangs is a failure, and the others go on.

    python tools/gpu_fuzz.py run hopper --minutes 10 [--more]     writes results/<device>/fuzz-hopper.json
    python tools/gpu_fuzz.py replay hopper SEED ...

Seeds whose call the backend refuses are counted apart. Every call runs twice and must give the same bits, unless its seed
asks for ``deterministic=False``; no input may be written to.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import random_calls
from random_calls import REFUSED, ROOT, Record

BACKENDS = ("triton", "hopper")
JUDGED = "float64, with the parity suite's tolerances: out, lse and every gradient; the same bits twice; inputs untouched"
UNORDERED = 0.25  # share of calls with deterministic=False
LOOSE = 0.5  # share of calls whose arrays may lie anywhere: hopper hands most of these over to triton


class BackendCalls:
    """Random calls of one backend; see ``random_calls.Calls``."""

    def __init__(self, backend: str, device: str = "cuda") -> None:
        self.backend, self.device = backend, device

    def call(self, seed: int) -> Any:
        """The call that a seed stands for, its arrays anywhere in memory."""
        from tests.parity.calls import Call
        from tests.parity.random_cases import Loose, random_case
        from tests.parity.targets import Target

        rng = np.random.default_rng([0xA77, seed])
        case = random_case(seed)
        if case.differentiable and rng.random() < UNORDERED:
            case = replace(case, options={**case.options, "deterministic": False})
        loose = rng.random() < LOOSE
        at = (self.backend, "torch", self.device)
        return Call(Loose(*at, rng) if loose else Target(*at), case)

    def kind(self, seed: int) -> str:
        """Rows and dtype, or that the backend refuses, which the suite must allow it to."""
        from tests.parity.checking import refused

        call = self.call(seed)
        return REFUSED if refused(call) else f"{call.case.rows}, {call.case.dtype}"

    def check(self, seed: int) -> None:
        """Forward and every gradient, twice."""
        import torch
        from tests.parity.checking import check_forward, check_gradients
        from tests.parity.problems import draw
        from tests.parity.tolerance import judge

        call = self.call(seed)
        before = {name: x.clone() for name, x in call.arrays.items()}
        right = judge(call.case, draw(call.case), call.target.half_operands)
        check = check_gradients if call.case.differentiable else check_forward
        first, again = (bits(check(self.call(seed) if turn else call, right)) for turn in range(2))
        if call.case.option("deterministic", True):
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), (
                "other bits the second time"
            )
        for name, x in before.items():
            left = call.arrays[name].detach()
            assert torch.equal(as_bytes(x), as_bytes(left)), f"{name} was written to"


def as_bytes(x: Any) -> Any:
    """A copy as bytes, which NaN equals too."""
    import torch

    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def bits(result: Any) -> list[Any]:
    """Everything that a call gave."""
    parts = [result.out, *([] if result.lse is None else [result.lse]), *result.grads.values()]
    return [as_bytes(x) for x in parts]


def replay_of(backend: str, seed: int) -> str:
    return f"python tools/gpu_fuzz.py replay {backend} {seed}"


def code() -> str:
    """A name for the kernels' text and what launches it."""
    whole = hashlib.sha256()
    for backend in BACKENDS:
        for path in sorted((ROOT / "src" / "attnproof" / "backends" / backend).rglob("*.py")):
            whole.update(path.read_bytes())
    return whole.hexdigest()[:32]


def record(backend: str, into: Path) -> Record:
    protocol = {"command": f"tools/gpu_fuzz.py run {backend} --more", "judged": JUDGED}
    return Record(f"fuzz-{backend}", f"attnproof:{backend}", code(), protocol, into)


def replay(backend: str, seeds: list[int]) -> int:
    from tests.parity.random_cases import described

    random_calls.poison()
    calls, failed = BackendCalls(backend), 0
    for seed in seeds:
        print(f"seed {seed}: {described(calls.call(seed).case)}", flush=True)
        try:
            kind = calls.kind(seed)
            if kind != REFUSED:
                calls.check(seed)
            print(f"  {'refused' if kind == REFUSED else 'agrees with float64'}")
        except AssertionError as error:
            failed = 1
            print(f"  {error}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="random calls until the clock ends it")
    run.add_argument("backend", choices=BACKENDS)
    random_calls.options(run)
    again = commands.add_parser("replay", help="the calls of these seeds, one after the other")
    again.add_argument("backend", choices=BACKENDS)
    again.add_argument("seeds", type=int, nargs="+")
    asked = parser.parse_args()
    backend = asked.backend
    if asked.command == "replay":
        sys.exit(replay(backend, asked.seeds))
    make = functools.partial(BackendCalls, backend)
    sys.exit(
        random_calls.fuzz(
            asked, make, functools.partial(record, backend), functools.partial(replay_of, backend)
        )
    )


if __name__ == "__main__":
    main()
