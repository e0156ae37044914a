"""Two git revisions side by side: each in its own work tree and process, called in turn, compared by gate A.

A revision's process holds its inputs and waits; the parent says "go" and reads the seconds that the child measured
around its own call, so the pipe is not in the time. Calls of the two processes interleave as in gate A; what the
processes do not share is where their memory lies, so the comparison is repeated over fresh pairs of processes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .baseline import Finding, held
from .gate import Comparison, Gate, compare
from .protocol import Subject
from .shapes import Shape

Call = Callable[[], Any]


# a finder of an editable install would be asked before any path, and both children would measure the installed package
START = """
import runpy, sys
sys.meta_path[:] = [at for at in sys.meta_path if getattr(at, "__module__", "").startswith("_frozen_importlib")]
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("attnproof.measure.child", run_name="__main__", alter_sys=True)
"""


GRACE = 5.0  # seconds that a child gets to end by itself


class ChildTimer:
    """A timer for calls that return their own seconds."""

    name = "clock of each revision's own process"
    flushed = 0.0

    def run(self, calls: Sequence[Call], *, cold: bool) -> tuple[list[float], list[Any]]:
        """See ``timer.Timer.run``; a cold cache is the child's business."""
        seconds = [float(call()) for call in calls]
        return seconds, list(seconds)


class Child:
    """One revision's process; ``deterministic`` are the quantities of gate C.

    Raises:
        ValueError: its result is wrong or the shape is not served; no time is taken then.
    """

    def __init__(self, source: Path, shape: Shape, name: str, device: str, label: str = "revision") -> None:
        job = json.dumps({"shape": asdict(shape), "name": name, "device": device})
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(source), job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        stdout = self._process.stdout
        said = stdout.readline() if stdout is not None else ""
        if not said:
            reason = self._last_words()
            self.close()
            raise ValueError(f"{label}: cannot measure {name}: {reason}")
        verdict = json.loads(said)
        if not verdict["green"]:
            self.close()
            raise ValueError(f"{label}: no green verdict for {name} on {shape.name}: {verdict['reason']}")
        # a revision from before gate C knew this says nothing of it
        self.deterministic: dict[str, float] = verdict.get("deterministic", {})

    def _last_words(self) -> str:
        lines = (self._process.stderr.read() if self._process.stderr is not None else "").strip().splitlines()
        text = lines[-1] if lines else "its process said nothing"
        if "attnproof.measure" in text and "No module" in text:
            return "this revision cannot measure yet (it has no attnproof.measure.child)"
        return text

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
            self._process.stdin.close()  # the child reads to the end of it and is done
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


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


def split(text: str) -> tuple[str, str]:
    """BASE..HEAD, where HEAD may be left out."""
    base, dots, head = text.partition("..")
    if not dots or not base:
        raise ValueError(f"revisions: expected BASE..HEAD, got {text!r}")
    return base, head or "HEAD"


def share_extension(here: Path, tree: Path) -> bool:
    """Give a work tree the compiled extension of this checkout, if its C++ sources are the same; says whether it has one."""
    folder = Path("src/attnproof/backends/native")
    built = [path for path in (here / folder).glob("_kernels*") if path.suffix in (".so", ".pyd")]
    same = all(
        _git(here, "rev-parse", f"HEAD:{part}") == _git(tree, "rev-parse", f"HEAD:{part}")
        for part in ("csrc", "CMakeLists.txt")
    )
    if not built or not same or _git(here, "status", "--porcelain", "--", "csrc", "CMakeLists.txt"):
        return False
    for path in built:
        shutil.copy2(path, tree / folder)
    return True


def regress(
    base: Path,
    head: Path,
    shape: Shape,
    *,
    name: str,
    device: str,
    gate: Gate,
    processes: int = 3,
    tick: Callable[[str], Any] = lambda text: None,
) -> tuple[list[Comparison], list[Finding]]:
    """Gate A over ``processes`` fresh pairs of processes, ratios are time of head over time of base; and gate C once."""
    found: list[Comparison] = []
    hard: list[Finding] = []
    for number in range(processes):
        children: list[Child] = []
        try:
            for label, tree in (("base", base), ("head", head)):
                children.append(Child(tree / "src", shape, name, device, label))
            a, b = (
                Subject(label, lambda slot, child=child: child.go)
                for label, child in zip(("base", "head"), children, strict=True)
            )
            hard = hard or held(shape.name, name, *(child.deterministic for child in children))
            found.append(compare(a, b, ChildTimer(), gate))
        finally:
            for child in children:
                child.close()
        tick(f"process pair {number + 1}: {found[-1].verdict}")
    return found, hard
