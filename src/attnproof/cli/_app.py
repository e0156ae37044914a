"""Puts the command groups together: every module of the list that exists adds its commands.

A group that needs an optional package imports it inside its commands, so `attnproof --help` works without any.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated

import typer

GROUPS = ("verify", "measure", "ledger", "report", "tune", "core")


def _version(asked: bool) -> None:
    if asked:
        import attnproof

        typer.echo(f"attnproof {attnproof.__version__}")
        raise typer.Exit


def build() -> typer.Typer:
    """The whole application, built anew at each call (tests build their own)."""
    app = typer.Typer(
        name="attnproof",
        help="Exact attention that runs where you are, and proves it.",
        no_args_is_help=True,
        add_completion=False,
        # errors are one line for a user; `_common.guarded` writes it
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(  # pyright: ignore[reportUnusedFunction]
        version: Annotated[
            bool,
            typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave."),
        ] = False,
    ) -> None:
        pass

    for group in GROUPS:
        name = f"attnproof.cli.{group}"
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name).register(app)
    return app
