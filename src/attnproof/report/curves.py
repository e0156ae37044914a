"""What the sections of the measuring report share: names, colours, figures of curves as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Record = dict[str, Any]
Figure = dict[str, Any]
LENGTH = {"label": "N", "log": True, "powers": True}


def machine(record: Record) -> str:
    """A short name: the device, or the processor where that is the device."""
    environment = record["environment"]
    return environment["cpu"] if environment["device"] == "cpu" else environment["device"]


class Colours:
    """The same colour for the same name on the whole page."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self.known.setdefault(name, len(self.known))


def named(record: Record, name: str, records: Sequence[Record]) -> str:
    """The candidate, and the machine where there is more than one."""
    several = len({machine(one) for one in records}) > 1
    return f"{name}, {machine(record)}" if several else name


def figure_of(
    title: str, note: str, x: dict[str, Any], y: dict[str, Any], series: list[dict[str, Any]]
) -> Figure:
    """A figure without curves yet."""
    return {"title": title, "note": note, "x": x, "y": y, "series": series, "limits": []}


def series_of(name: str, colours: Colours, points: Iterable[Sequence[float]], **how: bool) -> dict[str, Any]:
    """One curve; how: line, dots, dashed, roof."""
    return {
        "name": name,
        "colour": colours[name],
        "points": [list(point) for point in points],
        "line": how.get("line", True),
        "dots": how.get("dots", True),
        "dashed": how.get("dashed", False),
        "roof": how.get("roof", False),
    }
