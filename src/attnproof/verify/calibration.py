"""Tables drawn from the results of verify records: how much room the limits leave, and deviations of one kind as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, sqrt
from typing import Any

from attnproof.verify.records import number

JUDGED = ("PASS", "FAIL", "FINDING", "INVALID")
NAMES = {"z rms": "z_rms", "z max": "z_max", "row z": "row_z", "bias": "bias"}


@dataclass
class Room:
    """What the statistics of one tensor came to over all cases of a kernel and dtype.

    Attributes:
        results: tensors that were judged.
        bad: those of them that failed a check.
        z_rms, z_max, row_z, bias: the largest value of each, over the cases whose statistics count.
        z_mean: root mean square of `z_rms`: 1 where the model fits.
        used: largest share of the worst case of all roundings.
        closest: the largest value over its limit of any check, and which.
    """

    results: int = 0
    bad: int = 0
    z_rms: float | None = None
    z_mean: float | None = None
    z_max: float | None = None
    row_z: float | None = None
    bias: float | None = None
    used: float = 0.0
    closest: float = 0.0
    check: str = ""
    squares: list[float] = field(default_factory=list)

    def add(self, tensor: dict[str, Any], case: str) -> None:
        """One more tensor of a record."""
        self.results += 1
        self.bad += not tensor["ok"]
        self.used = max(self.used, number(tensor["bound_used"]))
        for check in tensor["checks"]:
            value, limit = number(check["value"]), number(check["limit"])
            name = NAMES.get(check["name"])
            if name is not None:
                setattr(self, name, max(getattr(self, name) or 0.0, value))
            if check["name"] == "z rms":
                self.squares.append(value**2)
            if limit and not value / limit <= self.closest:
                self.closest, self.check = value / limit, f"{check['name']} of {case}"

    def row(self) -> dict[str, Any]:
        """As fields of a record."""
        if self.squares:
            self.z_mean = sqrt(sum(self.squares) / len(self.squares))
        fields = asdict(self)
        del fields["squares"]
        return {k: round(v, 4) if isinstance(v, float) and abs(v) < inf else v for k, v in fields.items()}


def calibration(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per kernel, dtype and tensor."""
    rooms: dict[tuple[str, str, str], Room] = {}
    for one in results:
        if one["status"] in JUDGED:
            for tensor in one["tensors"]:
                key = (one["candidate"], one["dtype"], tensor["tensor"])
                rooms.setdefault(key, Room()).add(tensor, one["case"])
    return [
        {"candidate": name, "group": "calibration", "dtype": dtype, "tensor": tensor, **room.row()}
        for (name, dtype, tensor), room in sorted(rooms.items())
    ]


def kinds(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What did not pass, one row per kernel, tensor and check (or sentence), with its cases and the clearest of them."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for one in results:
        if one["status"] in ("PASS", "SKIP"):
            continue
        for tensor, check, excess in _deviations(one):
            key = (one["status"], one["candidate"], tensor, check)
            row = found.setdefault(
                key, {"group": "kind", "tensor": tensor, "check": check, "cases": [], "excess": -1.0}
            )
            row["cases"].append(one["case"])
            if not excess <= row["excess"]:
                told = (
                    "candidate",
                    "status",
                    "case",
                    "dtype",
                    "seed",
                    "describe",
                    "reason",
                    "hint",
                    "replay",
                    "guards",
                )
                row |= {"excess": excess} | {name: one[name] for name in told}
    return sorted(found.values(), key=lambda row: (row["candidate"], row["tensor"], row["check"]))


def _deviations(one: dict[str, Any]) -> list[tuple[str, str, float]]:
    """Each failed tensor with its first failed check and value over limit; a sentence where no tensor failed."""
    failed: list[tuple[str, str, float]] = []
    for tensor in one["tensors"]:
        for check in tensor["checks"]:
            if not check["ok"]:
                value, limit = number(check["value"]), number(check["limit"])
                failed.append((tensor["tensor"], check["name"], value / limit if limit else value))
                break
    return failed or [("-", one["reason"], 0.0)]
