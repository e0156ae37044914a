"""A verify record as one HTML file: no network, no dependency, light and dark, works from file://.

The charts are drawn by 200 lines of plain JavaScript that ship here instead of an inlined Vega-Lite: its bundle alone
is 0.9 MB and evaluates strings as code, which the content security policy of this page forbids; what is needed is dots
on an axis. The data is embedded as JSON, so the page is also a readable copy of the record.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from attnproof.report import verdicts

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Section:
    """A further part of the report, written by whoever has something to add.

    Attributes:
        title: heading, also in the navigation.
        html: trusted markup; text that comes from elsewhere must be escaped by the caller.
    """

    title: str
    html: str


def render(record: dict[str, Any], sections: Sequence[Section] = ()) -> str:
    """The report of a verify record, and whatever sections others add to it."""
    page = (TEMPLATES / "verify.html").read_text(encoding="utf-8")
    parts = {
        "{{css}}": (TEMPLATES / "verify.css").read_text(encoding="utf-8"),
        "{{js}}": (TEMPLATES / "verify.js").read_text(encoding="utf-8"),
        "{{title}}": escape(title(record)),
        "{{headline}}": headline(record),
        "{{facts}}": facts(record),
        "{{sections}}": "".join(_section(section) for section in sections),
        "{{navigation}}": "".join(
            f'<a href="#{_anchor(section.title)}">{escape(section.title)}</a>' for section in sections
        ),
        "{{data}}": embed(compact(record)),
    }
    for mark, text in parts.items():
        page = page.replace(mark, text)
    return page


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """A plain table for a section; everything is escaped, numbers are set right."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(_cell(value) for value in row) + "</tr>" for row in rows)
    note = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table class="plain">{note}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f'<td class="number">{verdicts.show(value)}</td>'
    number = isinstance(value, int) and not isinstance(value, bool)
    return f'<td class="number">{value}</td>' if number else f"<td>{escape(str(value))}</td>"


def _section(section: Section) -> str:
    return f'<section id="{_anchor(section.title)}"><h2>{escape(section.title)}</h2>{section.html}</section>'


def _anchor(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text.lower())


def title(record: dict[str, Any]) -> str:
    """Title of the page."""
    return f"attnproof verify, {record['created'][:10]}"


def headline(record: dict[str, Any]) -> str:
    """One sentence: what held and what did not."""
    statuses = [result["status"] for result in record["results"]]
    failed = sum(status in ("FAIL", "INVALID", "POWERLESS") for status in statuses)
    findings, passed = statuses.count("FINDING"), statuses.count("PASS")
    kernels = len({result["candidate"] for result in record["results"]})
    mark = "bad" if failed else "good"
    words = (
        f"{failed} of {passed + failed + findings} results do not hold"
        if failed
        else f"{passed} results hold, none of ours fails"
    )
    if findings:
        words += f"; {findings} findings about other kernels"
    cases = len({row["case"] for row in record["results"]})
    return f'<p class="headline {mark}">{words}.</p><p>{kernels} kernels on {cases} named cases.</p>'


def facts(record: dict[str, Any]) -> str:
    """Environment and protocol as a definition list."""
    environment, protocol = record["environment"], record["protocol"]
    commit = environment.get("commit")
    pairs = {
        "made": record["created"].replace("T", " ").replace("+00:00", " UTC"),
        "device": environment["device"],
        "processor": f"{environment['cpu']}, {environment.get('threads', '?')} threads",
        "versions": ", ".join(f"{name} {version}" for name, version in environment["versions"].items()),
        "commit": "-"
        if not commit
        else commit[:12] + (" with local changes" if environment.get("dirty") else ""),
        "cases": f"tier {protocol.get('tier', '-')}, seed {protocol.get('seed', '-')}",
        "sharpness": protocol.get("sharpness", "not measured in this run"),
    }
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>" for name, value in pairs.items()
    )


def compact(record: dict[str, Any]) -> dict[str, Any]:
    """What the page needs of a record, in few bytes: passed checks are dropped, numbers shortened."""
    return {
        "results": [_short(result) for result in record["results"]],
        "kinds": [_kind(entry) for entry in verdicts.kinds(record)],
        "mutants": [_mutant(result) for result in record["protocol"].get("selftest", ())],
    }


def _short(result: dict[str, Any]) -> dict[str, Any]:
    return {
        "case": result["case"],
        "group": result["group"],
        "about": result["describe"],
        "dtype": result["dtype"],
        "who": result["candidate"],
        "status": result["status"],
        "why": result["reason"],
        "hint": result["hint"],
        "notes": result["notes"],
        "replay": result["replay"],
        "guards": _guards(result),
        "tensors": [_short_tensor(tensor) for tensor in result["tensors"]],
    }


def _guards(result: dict[str, Any]) -> dict[str, str]:
    return {name: text for name, text in result["guards"].items() if text != "ok"}


def _short_tensor(tensor: dict[str, Any]) -> list[Any]:
    checks = [
        [check["name"], _digits(check["value"]), _digits(check["limit"])]
        for check in tensor["checks"]
        if not check["ok"]
    ]
    worst = tensor["worst"]
    where = (
        []
        if worst is None or tensor["ok"]
        else [worst["index"], _digits(worst["got"]), _digits(worst["expected"]), _digits(worst["bound"])]
    )
    numbers = [_digits(tensor[field]) for field in ("max_abs", "rms", "z_rms", "z_max", "bound_used")]
    return [tensor["tensor"], *numbers, int(tensor["ok"]), int(tensor["classic_ok"]), checks, where]


def _kind(entry: dict[str, Any]) -> dict[str, Any]:
    result = entry["result"]
    return {
        "status": entry["status"],
        "who": entry["candidate"],
        "tensor": entry["tensor"],
        "check": entry["check"],
        "count": entry["count"],
        "case": result["case"],
        "why": result["reason"],
        "hint": result["hint"],
        "replay": result["replay"],
    }


def _mutant(result: dict[str, Any]) -> dict[str, Any]:
    return {name: result.get(name, "") for name in ("candidate", "says", "status", "by", "how", "classic")}


def _digits(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def embed(data: Any) -> str:
    """JSON that cannot end its script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
