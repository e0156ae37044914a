"""Which cases a tier has. The choice is made by the kill matrix and stored in `tiers.json`; nobody picks by taste.

smoke     the fewest cases that kill at least nine of ten mutants: seconds
standard  every mutant dies on at least two cases, and every group of cases is there: minutes
full      everything
quick     smoke, and a case or two of each group: what `verify --quick` shows in one screen
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from attnproof.cases import Case, pool

TIERS = ("smoke", "quick", "standard", "full")
FILE = Path(__file__).parent / "tiers.json"
# cases on which shipped kernels are known to deviate; `quick` includes them so that findings show
TELLING = ("scale-negative-causal/float32", "mask-dead-rows/float32", "long-2048-grad/bfloat16")


def cases(tier: str) -> list[Case]:
    """The cases of a tier, in pool order.

    Raises:
        ValueError: no tier has that name.
    """
    if tier not in TIERS:
        raise ValueError(f"tier: expected one of {', '.join(TIERS)}, got {tier!r}")
    if tier == "full":
        return list(pool())
    chosen = set(stored()["smoke" if tier == "quick" else tier])
    if tier == "quick":
        chosen |= set(TELLING) | _one_of_each_group()
    return [case for case in pool() if case.id in chosen]


@cache
def stored() -> dict[str, Any]:
    """The stored choice: ids per tier, and the mutants it was made against."""
    return json.loads(FILE.read_text())


def _one_of_each_group() -> set[str]:
    seen: dict[tuple[str, str], str] = {}
    for case in pool():
        if case.dtype in ("bfloat16", "float32"):
            seen.setdefault((case.group, case.dtype), case.id)
    return set(seen.values())
