"""The process of one revision: for each line on stdin, one call and its seconds on stdout. See ``revisions``."""

from __future__ import annotations

import json
import sys
from typing import Any

from . import implementations, sweep
from .bench import Bench
from .shapes import Shape
from .timer import timer_for


def main(job: str) -> None:
    """Judge the call, say so in one line, and serve calls of it until stdin ends."""
    given = json.loads(job)
    bench = Bench(Shape(**given["shape"]), given["device"], 1)
    one = implementations.load(given["name"])
    try:
        found = bench.verdict(one)
    except (implementations.Unable, NotImplementedError) as error:
        print(json.dumps({"green": False, "reason": str(error)}), flush=True)
        return
    said: dict[str, Any] = {"green": found.green, "reason": found.reason}
    if found.green:
        counted = sweep.count(bench, [one]) if given["device"] == "cuda" else {}
        said["deterministic"] = sweep.without_a_clock(one.name, found, counted.get(one.name, {}))
    print(json.dumps(said), flush=True)
    call = bench.subject(one).prepare(0)
    timer = timer_for(given["device"])
    timer.run([call] * 3, cold=False)
    for _ in sys.stdin:
        seconds, _ = timer.run([call], cold=False)
        print(repr(seconds[0]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
