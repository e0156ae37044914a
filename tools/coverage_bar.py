"""Fail when fewer than 95% of the package's lines were run by the tests; report branches beside it.

`coverage report --fail-under` mixes lines and branches into one number once branches are measured, so the bar is read
from the JSON report instead.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LINE_BAR = 95.0  # percent


def main(report: str) -> int:
    totals = json.loads(Path(report).read_text())["totals"]
    lines = 100 * totals["covered_lines"] / totals["num_statements"]
    branches = 100 * totals["covered_branches"] / max(totals["num_branches"], 1)
    verdict = "ok" if lines >= LINE_BAR else f"below the bar of {LINE_BAR:.0f}%"
    print(
        f"coverage: {lines:.1f}% of {totals['num_statements']} lines ({verdict}), {branches:.1f}% of branches"
    )
    return 0 if lines >= LINE_BAR else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
