"""The process of one revision: for each line on stdin, one call and its seconds on stdout. See ``revisions``."""

from __future__ import annotations

import json
import sys

from . import implementations
from .shapes import Shape
from .sweep import subject
from .timer import timer_for


def main(job: str) -> None:
    """Serve calls of one shape until stdin ends."""
    given = json.loads(job)
    shape = Shape(**given["shape"])
    call = subject(given["name"], implementations.load(given["name"]), shape, given["device"]).prepare(0)
    timer = timer_for(given["device"])
    timer.run([call] * 3, cold=False)
    for _ in sys.stdin:
        seconds, _ = timer.run([call], cold=False)
        print(repr(seconds[0]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
