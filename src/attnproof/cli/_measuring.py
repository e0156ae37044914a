"""What the measuring commands share: where results lie, runs that go on where they were stopped, and tables."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from attnproof.cli._common import err_console, out_console, write_json, write_text

if TYPE_CHECKING:
    from attnproof.measure.journal import Journal

FOLDER = Path("reports")
ALL_SKIPPED = 77


class Device(str, Enum):
    """Where tensors are made."""

    cpu = "cpu"
    cuda = "cuda"


class Cache(str, Enum):
    """State of the caches before a timed call."""

    cold = "cold"
    warm = "warm"


DeviceOption = Annotated[
    Device | None, typer.Option("--device", help="Default: the GPU where torch sees one.")
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="PATH", help="The report; default: reports/COMMAND.html.")
]
CandidateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--candidate",
        "-c",
        metavar="NAME",
        help="A backend, sdpa:flash, sdpa:math, eager, flex, or file.py:function. Repeatable; ratios are to the first.",
    ),
]


def device_of(asked: Device | None) -> str:
    """The device asked for, or the GPU where there is one."""
    try:
        import torch
    except ImportError:
        raise ValueError("measuring needs torch: pip install torch") from None
    if asked is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked is Device.cuda and not torch.cuda.is_available():
        raise ValueError("--device: expected a device that torch sees, got cuda")
    return asked.value


def targets(command: str, json_path: Path | None, html: Path | None) -> tuple[Path, Path, Path]:
    """Where the record, the report and the steps of an unfinished run go."""
    record = json_path or FOLDER / f"{command}.json"
    page = html or (record.with_suffix(".html") if json_path else FOLDER / f"{command}.html")
    for path in (record, page):
        if path.parent == FOLDER:
            FOLDER.mkdir(exist_ok=True)
        if not path.absolute().parent.is_dir():
            raise ValueError(f"expected a path in a folder that exists, got {path}")
    return record, page, record.with_suffix(".partial")


@contextmanager
def kept(path: Path | None, what: Any, device: str) -> Generator[Journal, None, None]:
    """A journal that says on ctrl-c what it keeps."""
    from attnproof.measure.journal import Journal

    journal = Journal(path, what, device)
    if len(journal):
        err_console().print(f"going on after {len(journal)} steps of {path}")
    try:
        with journal:
            yield journal
    except KeyboardInterrupt:
        if len(journal):
            err_console().print(
                f"{len(journal)} steps are kept in {path}; the same command goes on from there"
            )
        raise


def write(record: dict[str, Any], json_path: Path, html: Path) -> None:
    """The record and its page, each whole or not at all."""
    from attnproof.report import measured

    write_json(json_path, record)
    write_text(html, measured.render([record]))
    console = out_console()
    console.print(f"record {escape(str(json_path))}", soft_wrap=True)
    console.print(f"report {escape(str(html))}", soft_wrap=True)


def leave(rows: Sequence[dict[str, Any]]) -> bool:
    """0 only if something was measured and nothing was wrong."""
    statuses = [row["status"] for row in rows]
    if all(status == "SKIP" for status in statuses):
        raise typer.Exit(ALL_SKIPPED)
    return not any(status in ("FAIL", "INVALID", "POWERLESS") for status in statuses)


def engineering(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
