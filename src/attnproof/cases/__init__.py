"""Named cases: the one list that tests, verification, tuning, measuring and reports read.

A case is a shape, a dtype, a way to make the numbers, a mask and the score options; it holds no array. Its
`id` is stable (`name/dtype`), so a record, a replay command and a test all mean the same inputs:
`verify.inputs.build(case, seed)` makes them from `(name, seed)` alone.
"""

from __future__ import annotations

import re
from dataclasses import replace

from attnproof.cases.case import GAUSSIAN, RANDOM, UNBOUNDED, Case
from attnproof.cases.named import EVERY as DTYPES
from attnproof.cases.named import pool

__all__ = ["DTYPES", "GAUSSIAN", "RANDOM", "UNBOUNDED", "Case", "find", "pool"]


def find(identifier: str) -> Case:
    """The case with this id.

    Raises:
        KeyError: no case has it; the message lists the nearest ids.
    """
    from difflib import get_close_matches

    by_id = {case.id: case for case in pool()}
    if identifier in by_id:
        return by_id[identifier]
    # a named case in a dtype or at lengths that the list does not have: name~MxN/dtype
    parts = re.fullmatch(r"([^~/]+)(?:~(\d+)x(\d+))?/(\w+)", identifier)
    same = [case for case in by_id.values() if parts and case.name == parts[1]]
    if parts and same and parts[4] in DTYPES:
        base = replace(same[0], dtype=parts[4])
        if parts[2]:
            return replace(base, name=f"{base.name}~{parts[2]}x{parts[3]}", M=int(parts[2]), N=int(parts[3]))
        return base
    near = ", ".join(get_close_matches(identifier, by_id, n=4, cutoff=0.3)) or "none is close"
    raise KeyError(f"case: expected a known id, got {identifier!r} (nearest: {near})")
