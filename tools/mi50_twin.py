"""The MI50 kernels' source run as CUDA on an NVIDIA GPU: random calls, the replay of one, and a compile-only proof.

    python tools/mi50_twin.py fuzz --minutes 20 [--seed 0] [--workers 12]     writes results/<device>/mi50-twin.json
    python tools/mi50_twin.py fuzz --minutes 5 --more                         adds to it what the seeds behind its last show
    python tools/mi50_twin.py replay SEED ...
    python tools/mi50_twin.py compile [--ptxas] [--clang]                     needs no GPU

What it shows is the algorithm and its bookkeeping, on real threads. It says nothing about an AMD GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import random_calls
from random_calls import Record

CANDIDATE = "dot2: HIP source compiled as CUDA"
SAYS = (
    "The MI50 kernels' source ran as CUDA on the NVIDIA GPU named in `environment`. This tests the algorithm; it says "
    "nothing about AMD code, an AMD GPU or its speed."
)
JUDGED = "float64, with the parity suite's tolerances: out, lse and every gradient"


class TwinCalls:
    """Random calls of every kind; see ``random_calls.Calls``."""

    def __init__(self) -> None:
        from tests.mi50 import twin

        self.runner = twin.twin()

    def kind(self, seed: int) -> str:
        """Rows and dtype."""
        from tests.parity.random_cases import random_case

        case = random_case(seed)
        return f"{case.rows}, {case.dtype}"

    def check(self, seed: int) -> None:
        """Against float64."""
        from tests.mi50 import fuzz

        fuzz.check(seed, self.runner)


def replay_of(seed: int) -> str:
    return f"python tools/mi50_twin.py replay {seed}"


def code() -> str:
    """A name for all that is compiled and for the words around it."""
    from tests.mi50 import nvrtc

    from attnproof.backends.dot2 import source

    return source.digest(*(nvrtc.translated(source.text(kernel)) for kernel in source.FILES), *nvrtc.FLAGS)


def record(into: Path) -> Record:
    protocol = {
        "command": "tools/mi50_twin.py fuzz --more",
        "says": SAYS,
        "judged": JUDGED,
        "compiler": compiler_name(),
    }
    return Record("mi50-twin", CANDIDATE, code(), protocol, into)


def compiler_name() -> str:
    from tests.mi50 import nvrtc

    found = nvrtc.find()
    return "none" if found is None else f"{found.version} {' '.join(nvrtc.FLAGS)}"


def replay(seeds: list[int]) -> int:
    from tests.mi50 import fuzz, twin
    from tests.parity.random_cases import described, random_case

    random_calls.poison()
    failed = 0
    for seed in seeds:
        print(f"seed {seed}: {described(random_case(seed))}", flush=True)
        try:
            fuzz.check(seed, twin.twin())
            print("  agrees with float64")
        except AssertionError as error:
            failed = 1
            print(f"  {error}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    random = commands.add_parser("fuzz", help="random calls on the GPU against float64")
    random_calls.options(random)
    again = commands.add_parser("replay", help="the calls of these seeds, one after the other")
    again.add_argument("seeds", type=int, nargs="+")
    compiles = commands.add_parser("compile", help="every kernel of the suite to PTX, without a GPU")
    compiles.add_argument("--ptxas", action="store_true", help="on to machine code of sm_90, with spills")
    compiles.add_argument("--clang", action="store_true", help="by clang 19 as well")
    compiles.add_argument("--random", type=int, default=0, help="so many random calls too")
    given = parser.parse_args()
    if given.command == "fuzz":
        os.environ.setdefault("ATTNPROOF_TWIN_CACHE", tempfile.mkdtemp(prefix="attnproof-twin-"))
        sys.exit(random_calls.fuzz(given, TwinCalls, record, replay_of))
    if given.command == "replay":
        sys.exit(replay(given.seeds))
    from tests.mi50 import compile_twin

    sys.exit(compile_twin.main(ptxas=given.ptxas, clang=given.clang, random=given.random))


if __name__ == "__main__":
    main()
