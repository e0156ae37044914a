"""Verify records as text: the summary table, JUnit XML, and Markdown for a CI page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any
from xml.etree import ElementTree as xml

from rich.table import Table

COLOUR = {
    "PASS": "green",
    "FAIL": "bold red",
    "FINDING": "yellow",
    "SKIP": "dim",
    "INVALID": "bold red",
    "POWERLESS": "bold magenta",
}
WORST_FIRST = ("INVALID", "FAIL", "POWERLESS", "FINDING", "PASS", "SKIP")


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _most(results: Iterable[dict[str, Any]], field: str, tensor: str = "") -> float:
    """The largest value of a field over all tensors, or over one of them; NaN counts as the largest."""
    found = [
        _number(one[field])
        for result in results
        for one in result["tensors"]
        if one.get(field) is not None and tensor in ("", one["tensor"])
    ]
    return max((value if not math.isnan(value) else math.inf for value in found), default=math.nan)


def show(value: float) -> str:
    """A number in three digits, or a dash."""
    if math.isnan(value):
        return "-"
    return f"{value:.2f}" if 0.01 <= abs(value) < 1000 else f"{value:.1e}"


def rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per group and candidate: worst numbers and counts."""
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in record["results"]:
        grouped.setdefault((result["group"], result["candidate"]), []).append(result)
    table: list[dict[str, Any]] = []
    for (group, candidate), results in grouped.items():
        counts = {status: sum(result["status"] == status for result in results) for status in WORST_FIRST}
        worst = next((status for status in WORST_FIRST if counts[status]), "SKIP")
        table.append(
            {
                "group": group,
                "candidate": candidate,
                "counts": counts,
                "status": worst,
                "cases": len(results),
                "max_abs": _most(results, "max_abs", "out"),
                "rms": _most(results, "rms", "out"),
                "z": _most(results, "z_rms"),
                "bound": _most(results, "bound_used"),
            }
        )
    return sorted(table, key=lambda row: row["group"])


def verdict_words(counts: dict[str, int]) -> str:
    """`12 pass, 1 fail` with the empty counts left out."""
    names = {
        "FINDING": "finding",
        "FAIL": "fail",
        "PASS": "pass",
        "SKIP": "skipped",
        "INVALID": "invalid",
        "POWERLESS": "powerless",
    }
    order = ("PASS", *(status for status in WORST_FIRST if status != "PASS"))
    return ", ".join(f"{counts[status]} {names[status]}" for status in order if counts[status])


def summary_table(record: dict[str, Any]) -> Table:
    """The one table of a run."""
    grid = Table(title="float64 is the judge: worst numbers per group of cases", title_justify="left")
    for name, justify in (
        ("cases", "left"),
        ("candidate", "left"),
        ("out max abs", "right"),
        ("out RMS", "right"),
        ("z", "right"),
        ("of bound", "right"),
        ("verdict", "left"),
    ):
        grid.add_column(name, justify=justify)  # type: ignore[arg-type]
    last = ""
    for row in rows(record):
        words = verdict_words(row["counts"])
        grid.add_row(
            "" if row["group"] == last else row["group"],
            row["candidate"],
            show(row["max_abs"]),
            show(row["rms"]),
            show(row["z"]),
            show(row["bound"]),
            f"[{COLOUR[row['status']]}]{words}[/]",
        )
        last = row["group"]
    return grid


def failures(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Everything that did not pass, worst first."""
    order = {status: index for index, status in enumerate(WORST_FIRST)}
    wrong = [result for result in record["results"] if result["status"] not in ("PASS", "SKIP")]
    return sorted(wrong, key=lambda result: order[result["status"]])


def kinds(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Deviations of one kind as one line: candidate, tensor and check, how often, and the clearest case."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for result in failures(record):
        tensor, check, value = _first_failure(result)
        key = (result["status"], result["candidate"], tensor, check)
        entry = found.setdefault(
            key,
            {
                "status": result["status"],
                "candidate": result["candidate"],
                "tensor": tensor,
                "check": check,
                "count": 0,
                "worst": -1.0,
                "result": result,
            },
        )
        entry["count"] += 1
        if not value <= entry["worst"]:
            entry["worst"], entry["result"] = value, result
    return list(found.values())


def _first_failure(result: dict[str, Any]) -> tuple[str, str, float]:
    """The first tensor that fails (out before gradients before lse), its first failed check and by how much."""
    for tensor in result["tensors"]:
        for check in tensor["checks"]:
            if not check["ok"]:
                limit, value = _number(check["limit"]), _number(check["value"])
                return tensor["tensor"], check["name"], value / limit if limit else value
    return "-", result["reason"], 0.0


def junit(record: dict[str, Any]) -> str:
    """JUnit XML: one suite per candidate; findings about peers are in the output of passed tests."""
    root = xml.Element("testsuites", name="attnproof verify")
    suites: dict[str, list[dict[str, Any]]] = {}
    for result in record["results"]:
        suites.setdefault(result["candidate"], []).append(result)
    for candidate, results in suites.items():
        bad = sum(result["status"] in ("FAIL", "INVALID", "POWERLESS") for result in results)
        suite = xml.SubElement(
            root,
            "testsuite",
            name=candidate,
            tests=str(len(results)),
            failures=str(bad),
            skipped=str(sum(result["status"] == "SKIP" for result in results)),
            errors="0",
        )
        for result in results:
            _junit_case(suite, result)
    xml.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + xml.tostring(root, encoding="unicode") + "\n"


def _junit_case(suite: xml.Element, result: dict[str, Any]) -> None:
    case = xml.SubElement(
        suite,
        "testcase",
        classname=f"{result['candidate']}.{result['group']}",
        name=result["case"],
        time=str(result["seconds"]),
    )
    properties = xml.SubElement(case, "properties")
    for tensor in result["tensors"]:
        for field in ("max_abs", "rms", "z_rms", "bound_used"):
            if tensor[field] is not None:
                xml.SubElement(
                    properties, "property", name=f"{tensor['tensor']}.{field}", value=str(tensor[field])
                )
    text = "\n".join(part for part in (result["reason"], result["hint"], result["replay"]) if part)
    if result["status"] == "SKIP":
        xml.SubElement(case, "skipped", message=result["reason"])
    elif result["status"] in ("FAIL", "INVALID", "POWERLESS"):
        xml.SubElement(case, "failure", message=result["reason"], type=result["status"]).text = text
    elif result["status"] == "FINDING":
        xml.SubElement(case, "system-out").text = f"finding about the candidate: {text}"


def markdown(record: dict[str, Any], limit: int = 900_000) -> str:
    """A summary for a CI page, worst first, cut off below the page's size limit."""
    lines = [
        "## attnproof verify",
        "",
        "| cases | candidate | out max abs | out RMS | z | of bound | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['group']} | {row['candidate']} | {show(row['max_abs'])} | {show(row['rms'])} | {show(row['z'])} | "
        f"{show(row['bound'])} | {verdict_words(row['counts'])} |"
        for row in rows(record)
    ]
    wrong = failures(record)
    if wrong:
        lines += ["", "### Deviations, worst first", ""]
    for result in wrong:
        line = f"- **{result['status']}** `{result['case']}` {result['candidate']}: {result['reason']}"
        line += f" ({result['hint']})" if result["hint"] else ""
        if sum(len(one) + 1 for one in lines) + len(line) > limit:
            lines.append("- ... and more; see the record")
            break
        lines.append(line)
    return "\n".join(lines) + "\n"
