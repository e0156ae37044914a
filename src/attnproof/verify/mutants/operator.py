"""What a mutant is: a name, what it does, and the edits that make it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LOOP, SOFTMAX, SCORES, MASKS, ROWS = "streaming", "online_softmax", "scores", "masks", "rows"

Edit = tuple[str, str, str]


@dataclass(frozen=True)
class Operator:
    """One way to break the kernel.

    Attributes:
        name: stable name.
        says: the mistake, as its author would describe it.
        edits: (module, old text, new text); the old text must occur exactly once in that module's source.
        wrap: for mistakes around the kernel: takes the correct run, returns a broken one.
        guard: the guard that is expected to find it, where numbers cannot.
    """

    name: str
    says: str
    edits: tuple[Edit, ...] = ()
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    guard: str = ""
