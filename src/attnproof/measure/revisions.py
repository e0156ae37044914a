"""Two git revisions side by side: each in its own work tree and process, called in turn, compared by gate A.

A revision's process holds its inputs and waits; the parent says "go" and reads the seconds that the child measured
around its own call, so the pipe is not in the time. Calls of the two processes interleave as in gate A; what the
processes do not share is where their memory lies, so the comparison is repeated over fresh pairs of processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .gate import Comparison, Gate, compare
from .protocol import Subject
from .shapes import Shape

Call = Callable[[], Any]


class ChildTimer:
    """A timer for calls that return their own seconds."""

    name = "clock of each revision's own process"

    def run(self, calls: Sequence[Call], *, cold: bool) -> tuple[list[float], list[Any]]:
        """See ``timer.Timer.run``; a cold cache is the child's business."""
        seconds = [float(call()) for call in calls]
        return seconds, list(seconds)


class Child:
    """One revision's process."""

    def __init__(self, source: Path, shape: Shape, name: str, device: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(source)}
        job = json.dumps({"shape": asdict(shape), "name": name, "device": device})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "attnproof.measure.child", job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def go(self) -> float:
        """Seconds of one call."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("child: expected open pipes, got none")
        stdin.write("go\n")
        stdin.flush()
        answer = stdout.readline()
        if not answer:
            raise RuntimeError(f"child: expected seconds, got exit code {self._process.wait()}")
        return float(answer)

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def work_tree(repository: Path, revision: str) -> Generator[Path]:
    """A throw-away work tree of ``revision``; removed again, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="attnproof-") as folder:
        tree = Path(folder) / "tree"
        _git(repository, "worktree", "add", "--detach", "--quiet", str(tree), revision)
        try:
            yield tree
        finally:
            _git(repository, "worktree", "remove", "--force", str(tree))


def _git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


def regress(
    base: Path, head: Path, shape: Shape, *, name: str, device: str, gate: Gate, processes: int = 3
) -> list[Comparison]:
    """Gate A over ``processes`` fresh pairs of processes; ratios are time of head over time of base."""
    found: list[Comparison] = []
    for _ in range(processes):
        children = [Child(tree / "src", shape, name, device) for tree in (base, head)]
        try:
            a, b = (
                Subject(label, lambda slot, child=child: child.go)
                for label, child in zip(("base", "head"), children, strict=True)
            )
            found.append(compare(a, b, ChildTimer(), gate))
        finally:
            for child in children:
                child.close()
    return found
