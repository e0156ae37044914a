"""The sections of the measuring report on growth: memory, drift and training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnproof.report.curves import LENGTH, Colours, Figure, Record, figure_of, named, series_of
from attnproof.report.html import table


def memory(records: Sequence[Record], colours: Colours) -> Any:
    """Peaks by length, and the exponents."""
    groups: dict[str, list[Figure]] = {}
    rows: list[list[Any]] = []
    for record in records:
        for row in record["results"]:
            name = named(record, row["candidate"], records)
            exponent = row["exponent"]
            if row["n"]:
                points = [
                    (n, size / 2**20) for n, size in zip(row["n"], row["bytes"], strict=True) if size > 0
                ]
                figure = groups.setdefault(
                    row["case"],
                    [
                        figure_of(
                            "Peak memory against N",
                            "over the inputs, forward and backward",
                            LENGTH,
                            {"label": "MiB", "log": True},
                            [],
                        )
                    ],
                )[0]
                figure["series"].append(series_of(name, colours, points))
            shown = "-" if exponent is None else "{value:.2f} [{low:.2f}, {high:.2f}]".format(**exponent)
            longest = f"{row['bytes'][-1] / 2**20:.1f} at N={row['n'][-1]}" if row["n"] else "-"
            rows.append([row["case"], name, row["status"], shown, longest, row["reason"]])
    columns = ("case", "candidate", "verdict", "exponent of N, 95%", "MiB at the longest", "")
    return "Memory", "memory", "1 is linear, 2 quadratic.", groups, table(columns, rows)


def drift(records: Sequence[Record], colours: Colours) -> Any:
    """Errors by length, the mutant dashed."""
    groups: dict[str, list[Figure]] = {}
    rows: list[list[Any]] = []
    for record in records:
        for row in record["results"]:
            name = named(record, row["candidate"], records)
            figures = groups.setdefault(
                row["dtype"],
                [
                    figure_of(
                        "Error over its model (z) against N",
                        "1 is what rounding alone explains",
                        LENGTH,
                        {"label": "z", "log": True},
                        [],
                    ),
                    figure_of(
                        "RMS error against N",
                        "outputs shrink with the number of keys, and so do their errors",
                        LENGTH,
                        {"label": "RMS", "log": True},
                        [],
                    ),
                ],
            )
            for figure, key in zip(figures, ("z_rms", "rms"), strict=True):
                points = [(point["n"], point[key]) for point in row["points"]]
                figure["series"].append(series_of(name, colours, points, dashed=row["status"] == "FINDING"))
            if row["dtype"] in ("float16", "bfloat16"):
                figures[0]["limits"] = [{"y": record["protocol"]["band"], "label": "limit of verify"}]
            slope = (
                "-"
                if row["slope"] is None
                else "{value:+.3f} [{low:+.3f}, {high:+.3f}]".format(**row["slope"])
            )
            rows.append([row["dtype"], name, row["status"], slope, row["reason"]])
    rows_html = table(("dtype", "candidate", "verdict", "slope of z, 95%", ""), rows)
    return (
        "Drift",
        "drift",
        "A correct kernel is flat at every length; one that accumulates in a half type rises.",
        groups,
        rows_html,
    )


def train(records: Sequence[Record], colours: Colours) -> Any:
    """Loss curves, other seeds dashed."""
    groups: dict[str, list[Figure]] = {}
    rows: list[list[Any]] = []
    for record in records:
        for row in record["results"]:
            name = named(record, row["candidate"], records)
            label = name if not row["seed"] else f"{name}, other seeds"
            figure = groups.setdefault(
                row["case"],
                [
                    figure_of(
                        "Loss against step",
                        "one seed for all attentions, curves that coincide lie under the last; other seeds dashed",
                        {"label": "step"},
                        {"label": "loss"},
                        [],
                    )
                ],
            )[0]
            points = [(step + 1, loss) for step, loss in enumerate(row["losses"])]
            series = series_of(label, colours, points, dots=False, dashed=bool(row["seed"]))
            figure["series"].append(series | ({"name": f"{name}, seed {row['seed']}"} if row["seed"] else {}))
            apart = "-" if "spread" not in row else f"{row['difference']:.4f}, seeds {row['spread']:.4f}"
            speed, peak = f"{row['tokens_per_second']:.0f}", f"{row['peak_bytes'] / 2**20:.0f}"
            rows.append(
                [
                    row["case"],
                    name,
                    row["seed"],
                    row["status"],
                    f"{row['final_loss']:.4f}",
                    apart,
                    speed,
                    peak,
                ]
            )
    columns = ("model", "attention", "seed", "verdict", "final loss", "difference", "tokens/s", "peak MiB")
    return (
        "Training",
        "train",
        "Curves of one seed must lie closer together than seeds do.",
        groups,
        table(columns, rows) + _gains(records),
    )


def _gains(records: Sequence[Record]) -> str:
    """Published gains of training with fused attention, each beside ours from the records that trained that model."""
    told = [(record, gains) for record in records if (gains := record["protocol"].get("gains"))]
    if not told:
        return ""
    every = [(record, one) for record, gains in told for one in gains["models"]]
    rows: list[list[Any]] = []
    for model in dict.fromkeys(one["model"] for _, one in every):
        mine = [(record, one) for record, one in every if one["model"] == model]
        ours = [(record, one) for record, one in mine if one["ours"] is not None]
        rows += [
            [
                named(record, model, records),
                *_published(one),
                f"{one['ours']:.2f}x",
                str(one["length"]),
                "-" if one["memory"] is None else f"{one['memory']:.2f}x",
            ]
            for record, one in ours
        ] or [[model, *_published(mine[0][1]), "not run", "-", "-"]]
    columns = ("model", "published gain", "at N", "over", "ours over eager", "at N", "eager's peak over ours")
    sources = "; ".join(sorted({gains["source"] for _, gains in told}))
    return table(columns, rows, f"Tokens per second: published in {sources}, and of these records.")


def _published(one: dict[str, Any]) -> list[str]:
    if one["published"] is None:
        return ["-", "-", "-"]
    return [f"{one['published']:.2f}x", one["lengths"], one["against"]]
