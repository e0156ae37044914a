"""The command line. `main` is the console script; the application itself is put together by `_app`.

Command groups are modules with a function `register(app)`: `core` (trace, compare, memory, blocks, explain, doctor)
and, where present, the ones that verify, measure and report. Nothing here is imported by the library.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and leave with its exit code: 0 only when everything that was asked for holds."""
    try:
        from attnproof.cli._app import build

        build()()
    except KeyboardInterrupt:
        # ctrl-c before or after a command's own handler: one line, the code a shell expects
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
