"""The real-input part of a verify record: what was read, and the model with our attention inside."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from attnproof.report import html, verdicts

GROUP = "real model"
COLUMNS = ("attention of the model", "what", "check", "value", "limit", "holds")


def sentence(record: dict[str, Any]) -> str:
    """What was read, by what."""
    said = record["protocol"]
    lengths = [str(length) for length in said["lengths"]]
    texts = f"{', '.join(lengths[:-1])} and {lengths[-1]}"
    return (
        f"{said['model']} ({said['layers']} layers of {said['heads']} heads, {said['weights'] / 1e6:.1f} million "
        f"trained weights, {said['dtype']}) read {len(lengths)} texts of {texts} tokens in one batch padded to "
        f"{said['padded_to']}: {said['text']}."
    )


def rows(record: dict[str, Any]) -> list[tuple[str, str, str, float, float, str]]:
    """One row per backend and check of the whole model."""
    return [
        (
            result["candidate"],
            tensor["tensor"],
            check["name"],
            float(check["value"]),
            float(check["limit"]),
            "yes" if check["ok"] else "no",
        )
        for result in record["results"]
        if result["group"] == GROUP
        for tensor in result["tensors"]
        for check in tensor["checks"]
    ]


def model_table(record: dict[str, Any]) -> Table:
    """The whole model, for a terminal."""
    grid = Table(title="the whole model with our attention in place of its own", title_justify="left")
    for column in COLUMNS:
        grid.add_column(column, justify="right" if column in ("value", "limit") else "left")
    last = ""
    for who, what, check, value, limit, holds in rows(record):
        colour = verdicts.COLOUR["PASS" if holds == "yes" else "FAIL"]
        name = "" if who == last else who
        grid.add_row(name, what, check, verdicts.show(value), verdicts.show(limit), f"[{colour}]{holds}[/]")
        last = who
    return grid


def section(record: dict[str, Any]) -> html.Section:
    """The same for the HTML report."""
    lead = f'<p class="lead">{html.escape(sentence(record))}</p>'
    return html.Section("Real model", lead + html.table(COLUMNS, rows(record)))
