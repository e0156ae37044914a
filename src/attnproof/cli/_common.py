"""What every command shares: the `--json` option, atomic output, progress, and errors as one line with an exit code.

Exit codes: 0 everything holds, 1 a claim does not hold, 2 the request makes no sense or cannot be served, 130 ctrl-c.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ParamSpec, Protocol

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

P = ParamSpec("P")

HOLDS, BROKEN, REFUSED, INTERRUPTED = 0, 1, 2, 130

JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="PATH", help="Also write the numbers to PATH as JSON (whole or not at all)."
    ),
]


class _Output(Console):
    def on_broken_pipe(self) -> None:
        # rich would leave with 1, which means "does not hold" here
        raise BrokenPipeError


def out_console() -> Console:
    """Where results go. Made per call, because tests and callers exchange stdout."""
    return _Output(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)


def err_console() -> Console:
    """Where progress and errors go, so that a redirected result stays clean."""
    return Console(file=sys.stderr, highlight=False)


def guarded(command: Callable[P, bool | None]) -> Callable[P, None]:
    """Turn a command into one that leaves with an exit code and never with a traceback.

    The command returns False when a claim it checked does not hold, anything else when all of them do. Set
    ATTNPROOF_TRACEBACK=1 to see where an error came from.
    """

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            target = kwargs.get("json_path")
            if isinstance(target, Path):
                check_target(target)
            holds = command(*args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt:
            err_console().print("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # the reader left (`| head`): not an error of ours; keep the interpreter from flushing into the closed pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(HOLDS) from None
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:
            if os.environ.get("ATTNPROOF_TRACEBACK") == "1":
                traceback.print_exc()
            err_console().print(f"[bold red]error[/]: {escape(describe(error))}", soft_wrap=True)
            raise typer.Exit(REFUSED) from None
        if holds is False:
            raise typer.Exit(BROKEN)

    return wrapper


def describe(error: Exception) -> str:
    """One line for a person: the message of an expected kind of error, kind and message of any other."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return f"out of memory: {text or 'a smaller --n needs less'}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if text and isinstance(error, (ValueError, TypeError, NotImplementedError, ImportError)):
        return text
    return f"{type(error).__name__}: {text}"


def check_target(path: Path) -> None:
    """Refuse an output path that cannot be written before the work starts, not after it."""
    if path.is_dir():
        raise ValueError(f"--json: expected a file name, got the folder {path}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--json: expected a path in a folder that exists, got {path}")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--json: expected a folder that can be written, got {folder}")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: a temporary neighbour, then a rename that replaces the target in one step."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.absolute().parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes private files; a result is as readable as any other file the caller writes
        part.chmod(0o666 & ~_umask())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path | None, payload: dict[str, Any]) -> None:
    """Write `payload` to `path` when there is one. NaN and infinities are refused: they are not JSON."""
    if path is not None:
        write_text(path, json.dumps(payload, indent=2, allow_nan=False) + "\n")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def show(console: Console, title: str, *columns: str, rows: Iterable[Iterable[str]], note: str = "") -> None:
    """Print a result table: its title above, an optional sentence below; columns of numbers are set to the right."""
    cells = [list(row) for row in rows]
    grid = Table()
    for index, column in enumerate(columns):
        numeric = all(row[index][:1] in "+-.0123456789" for row in cells)
        grid.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        grid.add_row(*map(Text, row))
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(grid)
    if note:
        console.print(Text(note), soft_wrap=True)


class Tick(Protocol):
    """Called once per finished step, with the name of the next one if it is known."""

    def __call__(self, label: str = "") -> None: ...


@contextmanager
def progress(title: str, steps: int) -> Generator[Tick, None, None]:
    """A progress bar on stderr for work that may pass a second; plain lines where stderr is no terminal.

    Yields a function to call after each step.
    """
    console = err_console()
    if not console.is_terminal:
        yield _plain_progress(title, steps)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=steps)

        def tick(label: str = "") -> None:
            bar.update(task, advance=1, description=f"{title}: {label}" if label else title)

        yield tick


def _plain_progress(title: str, steps: int) -> Tick:
    """At most one line a second, so a log shows that something moves and short commands print nothing."""
    started = last = time.monotonic()
    done = 0

    def tick(label: str = "") -> None:
        nonlocal done, last
        done += 1
        now = time.monotonic()
        if now - last > 1.0:
            last = now
            print(f"{title}: {done}/{steps} {label} ({now - started:.0f} s)", file=sys.stderr)

    return tick
