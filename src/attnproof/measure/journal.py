"""What a run has finished so far, one JSON line a step, so that a run that is stopped goes on where it stopped.

A line counts only for the same key: candidates, protocol, versions, machine and the digest of the package's sources.
A last line that was torn off is dropped, and a run that ends removes the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from ..verify import records


@cache
def sources() -> str:
    """12 hex digits of the package's own files, the compiled ones included: a commit does not name local changes."""
    root = Path(__file__).resolve().parent.parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".so", ".pyd"):
            found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


class Journal:
    """Results by the name of their step; ``path`` None keeps them in memory only."""

    def __init__(self, path: Path | None, what: Any, device: str = "cpu") -> None:
        environment = records.environment(device)
        held = {name: environment[name] for name in ("device", "cpu", "threads", "versions", "commit")}
        told = json.dumps([records.plain(what), held, sources()], sort_keys=True)
        self.key = hashlib.sha256(told.encode()).hexdigest()[:16]
        self.path = path
        self.done: dict[str, Any] = {}
        if path is not None and path.exists():
            text = path.read_text(encoding="utf-8")
            self.done = dict(self._lines(text.splitlines()))
            if text and not text.endswith("\n"):
                # what was torn off must not swallow the next line
                with path.open("a", encoding="utf-8") as file:
                    file.write("\n")

    def _lines(self, lines: Iterable[str]) -> Iterable[tuple[str, Any]]:
        for text in lines:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if isinstance(line, dict) and line.get("key") == self.key:
                yield line["step"], line["result"]

    def __contains__(self, step: str) -> bool:
        return step in self.done

    def __len__(self) -> int:
        return len(self.done)

    def __getitem__(self, step: str) -> Any:
        return self.done[step]

    def put(self, step: str, result: Any) -> Any:
        """Keep a step's result, plain values only, and return it."""
        plain = records.plain(result)
        if self.path is not None:
            line = json.dumps({"key": self.key, "step": step, "result": plain})
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        self.done[step] = plain
        return plain

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A run that came to its end needs no memory of its steps; one that did not keeps them."""
        if kind is None and self.path is not None:
            self.path.unlink(missing_ok=True)
