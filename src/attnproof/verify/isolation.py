"""The adversarial run: each kernel in a child process, on seeds and shapes that it cannot have seen (G8, G14).

The child loads the candidate, makes the inputs from (case, seed) and sends outputs back; oracle, judge and clocks stay
in the parent. A kernel that crashes takes its child with it and is INVALID, not the end of the run. This finds honest
mistakes and plain tricks; a process that runs somebody's code can never be made safe from it.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnproof.cases import Case
from attnproof.verify.candidate import Candidate, Outputs, Skip
from attnproof.verify.inputs import Inputs

if TYPE_CHECKING:
    from attnproof.verify.session import Plan

PATIENCE = 600.0  # seconds until a silent child is taken for dead
GRACE = 2.0  # seconds that a child gets to end by itself
# sentences of drivers after which a process is of no more use
LOST_CONTEXT = (
    "CUDA error",
    "HIP error",
    "CUDA driver error",
    "illegal memory access",
    "misaligned address",
    "device-side assert",
    "unspecified launch failure",
)
JITTERED = 8  # cases that are run once more with other lengths


def exit_words(code: int | None) -> str:
    """How a process ended."""
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


class Crashed(RuntimeError):
    """The child process died or did not answer."""


class _Child:
    """A process that has loaded one candidate."""

    def __init__(self, word: str, device: str, variables: dict[str, str]) -> None:
        self.word, self.device, self.variables = word, device, variables
        self.process: Any = None
        self.pipe: Any = None

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, self.word, self.device, self.variables), daemon=True
        )
        self.process.start()
        theirs.close()

    def ask(self, case: Case, seed: int) -> Any:
        if self.process is None or not self.process.is_alive():
            self.start()
        try:
            self.pipe.send((case, seed))
            if not self.pipe.poll(PATIENCE):
                raise Crashed(f"no answer in {PATIENCE:.0f} s")
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            self.stop()
            raise Crashed(f"the child process died on {case.id}") from error

    def stop(self) -> None:
        if self.process is not None:
            self.pipe.close()  # a child that waits for its next question ends by itself
            self.process.join(GRACE)
            self.process.kill()
            self.process.join()
            self.process = None


def _serve(pipe: Any, word: str, device: str, variables: dict[str, str]) -> None:
    """The child: answer questions until the pipe closes."""
    os.environ.update(variables)  # before anything of the candidate is imported
    import numpy as np

    from attnproof.verify.blas import one_thread
    from attnproof.verify.guards import changed, fingerprint, poisoned
    from attnproof.verify.inputs import build
    from attnproof.verify.loaders import load

    candidate = load(word, device)
    with one_thread():
        while True:
            try:
                case, seed = pipe.recv()
            except EOFError:
                return
            try:
                inputs = build(case, seed)
                before = fingerprint(inputs)
                with poisoned(candidate), np.errstate(all="ignore"):
                    outputs = candidate.call(inputs)
                pipe.send(("ok", outputs.values, outputs.notes, changed(inputs, before)))
            except (Skip, NotImplementedError) as reason:
                pipe.send(("skip", str(reason), (), []))
            except Exception as error:  # whatever the kernel raised is its result
                pipe.send(("raised", f"{type(error).__name__}: {error}", (), []))


def isolated(candidate: Candidate, variables: dict[str, str] | None = None) -> Candidate:
    """The same candidate behind a process boundary, with some environment variables set there."""
    child = _Child(candidate.word or candidate.name, candidate.device, variables or {})

    def call(inputs: Inputs) -> Outputs:
        # other values than those of (case, seed) cannot be asked for across the boundary
        what, values, notes, wrote = child.ask(inputs.case, inputs.seed)
        if what == "skip":
            raise Skip(values)
        if what == "raised":
            raise RuntimeError(values)
        if wrote:
            raise RuntimeError(f"wrote to its inputs: {', '.join(wrote)}")
        return Outputs(values, {}, notes)

    shell = replace(candidate, call=call)
    shell.child = child
    return shell


def close(candidate: Candidate) -> None:
    """End the child of a candidate, if it has one."""
    if candidate.child is not None:
        candidate.child.stop()


def hidden(plan: Plan) -> Plan:
    """The plan with a seed from the system's entropy, and a few cases at lengths that no list has (G14)."""
    seed = secrets.randbelow(1 << 31)
    return replace(plan, seed=seed, cases=(*plan.cases, *jittered(plan.cases, seed)))


def jittered(cases: Sequence[Case], seed: int) -> list[Case]:
    """Some dense cases with other lengths; their names carry the lengths, so that they can be replayed."""
    import numpy as np

    rng = np.random.default_rng(seed)
    able = [
        case for case in cases if case.rows == "dense" and min(case.M, case.N) > 8 and not case.diagnostic
    ]
    made: list[Case] = []
    for index in rng.permutation(len(able))[:JITTERED]:
        case = able[int(index)]
        M, N = (max(1, length + int(rng.integers(-7, 8))) for length in (case.M, case.N))
        made.append(replace(case, name=f"{case.name}~{M}x{N}", M=M, N=N))
    return made
