"""Does `standard` find a random one-line mistake in the streaming kernel?

    python tools/random_mutations.py results/cpu/random-mutations.json --count 30 --seed 1

Draws edits until `count` of them change a result on some named case without crashing, judges each on the standard
tier, and records what killed it. Survivors are listed with the case on which they differ and by how much.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from attnproof.cases import Case, pool
from attnproof.verify import records, suite, tiers
from attnproof.verify.blas import one_thread
from attnproof.verify.candidate import Candidate
from attnproof.verify.guards import poisoned
from attnproof.verify.inputs import build
from attnproof.verify.mutants import kernel
from attnproof.verify.mutants.random_edits import RandomEdit, edits


class Trial:
    """Judges one edit after the other against the same cases."""

    def __init__(self) -> None:
        self.standard = tiers.cases("standard")
        inside = {case.id for case in self.standard}
        self.others = [
            case for case in pool() if case.id not in inside and case.dtype == "bfloat16" and not case.sample
        ]
        self.answers = suite.Answers()
        self.right: dict[str, dict[str, Any]] = {}

    def baseline(self, case: Case) -> dict[str, Any]:
        """What the correct kernel computes."""
        if case.id not in self.right:
            with np.errstate(all="ignore"):
                self.right[case.id] = kernel.correct().call(build(case, 0)).values
        return self.right[case.id]

    def run(self, edit: RandomEdit) -> dict[str, Any] | None:
        """What became of an edit; None when it changes nothing anywhere or cannot be built."""
        try:
            module = kernel.build({"streaming": edit.apply(kernel.source("streaming"))})
        except (SyntaxError, NameError, TypeError, AttributeError):
            return None
        mutant = kernel.candidate(
            f"line {edit.line}: {edit.says}", lambda inputs: kernel.run_streaming(module, inputs)
        )
        changed = ""
        for case in self.standard:
            outcome, how = self.on(mutant, case)
            if outcome == "crash":
                return {"candidate": mutant.name, "case": case.id, "status": "CRASHED", "how": how}
            if outcome == "dead":
                return {"candidate": mutant.name, "case": case.id, "status": "KILLED", "how": how}
            changed = changed or (how if outcome == "changed" else "")
        for case in self.others if not changed else ():
            outcome, how = self.on(mutant, case)
            if outcome != "same":
                changed = f"{case.id}: {how}"
                break
        return (
            {"candidate": mutant.name, "case": "", "status": "SURVIVED", "how": changed} if changed else None
        )

    def on(self, mutant: Candidate, case: Case) -> tuple[str, str]:
        """`same`, `changed` (within every bound), `dead` or `crash` on one case."""
        right = self.baseline(case)
        inputs = build(case, 0)
        try:
            with poisoned(mutant), np.errstate(all="ignore"):
                outputs = mutant.call(inputs)
        except Exception as error:  # a mistake that crashes is found by anybody
            return "crash", f"raised {type(error).__name__}"
        if all(np.array_equal(outputs.values[name], value, equal_nan=True) for name, value in right.items()):
            return "same", ""
        verdict = suite.judge_outputs(mutant, inputs, outputs, self.answers, explain=False)
        if not verdict.ok:
            return "dead", verdict.reason
        worst = max(report.bound_used for report in verdict.tensors)
        return "changed", f"{case.id} differs within every bound ({worst:.2f} of it)"


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    drawn = edits(kernel.source("streaming"))
    random.Random(asked.seed).shuffle(drawn)
    trial, fates, nothing, crashed = Trial(), [], 0, 0
    with one_thread():
        for edit in drawn:
            fate = trial.run(edit)
            if fate is None:
                nothing += 1
                continue
            if fate["status"] == "CRASHED":  # no result to judge: anybody would notice
                crashed += 1
                continue
            fates.append(fate)
            print(
                fate["status"], fate["candidate"], "|", fate["case"], fate["how"], file=sys.stderr, flush=True
            )
            if len(fates) == asked.count:
                break
    survivors = [fate["candidate"] for fate in fates if fate["status"] == "SURVIVED"]
    protocol = {
        "seed": asked.seed,
        "drawn": len(fates) + nothing + crashed,
        "without_effect": nothing,
        "crashed": crashed,
        "mutations": len(fates),
        "found": len(fates) - len(survivors),
        "survivors": survivors,
        "tier": "standard",
        "cases": len(trial.standard),
    }
    asked.record.parent.mkdir(parents=True, exist_ok=True)
    asked.record.write_text(json.dumps(records.record("random-mutations", protocol, fates), indent=1) + "\n")
    print(f"{len(fates) - len(survivors)} of {len(fates)} found; survivors: {survivors}")


if __name__ == "__main__":
    main()
