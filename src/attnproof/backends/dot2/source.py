"""The kernels' text: one string per kernel file, headers put in place, ready for a compiler that sees no file system.

The same string is what a run-time compiler gets, what is hashed for the cache, and what tests compile.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import Literal

Kernel = Literal[
    "attn_forward", "attn_combine", "attn_stats", "attn_dq", "attn_dkdv", "attn_dbias", "attn_kinds", "bench"
]
FILES: dict[Kernel, str] = {
    "attn_forward": "forward.hip",
    "attn_combine": "combine.hip",
    "attn_stats": "stats.hip",
    "attn_dq": "dq.hip",
    "attn_dkdv": "dkdv.hip",
    "attn_dbias": "dbias.hip",
    "attn_kinds": "kinds.hip",
    "bench": "bench.hip",
}
FOLDER = Path(__file__).parent / "kernels"
_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)
_ONCE = "#pragma once\n"


@functools.cache
def text(kernel: Kernel) -> str:
    """The whole translation unit of one kernel."""
    return inline(FILES[kernel])


def inline(name: str, folder: Path = FOLDER) -> str:
    """A file with its headers in place, each once, in the order they are first asked for."""
    seen: set[str] = set()

    def place(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        raw = (folder / name).read_text(encoding="utf-8").replace(_ONCE, "")
        return _INCLUDE.sub(lambda found: place(found[1]), raw)

    return place(name)


def digest(*parts: str) -> str:
    """A name for what was compiled: source and flags."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.encode())
        whole.update(b"\0")
    return whole.hexdigest()[:32]
