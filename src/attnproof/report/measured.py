"""Records of measuring as one HTML file: speed, roofline, samples, memory, drift and training, several machines at once.

It chooses and arranges what the records say, and computes nothing: a figure that is not in a record is not on the page.
No network, no dependency, light and dark, works from file://.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from attnproof.report import measured_growth
from attnproof.report.curves import LENGTH, Colours, Figure, Record, figure_of, machine, named, series_of
from attnproof.report.html import TEMPLATES, Section, embed, table

KINDS = ("measure", "memory", "drift", "train")


def render(records: Sequence[Record]) -> str:
    """The page of one or several records.

    Raises:
        ValueError: a record is of another kind.
    """
    for record in records:
        if record["kind"] not in KINDS:
            raise ValueError(f"report: expected records of {', '.join(KINDS)}, got {record['kind']}")
    sections: list[Section] = []
    figures: dict[str, dict[str, list[Figure]]] = {}
    for title, key, lead, charts, rows in _parts(records):
        figures[key] = charts
        body = f'<p class="lead">{escape(lead)}</p><div class="charts" id="{key}-charts"></div>{rows}'
        sections.append(Section(title, body))
    page = (TEMPLATES / "measured.html").read_text(encoding="utf-8")
    styles = [(TEMPLATES / name).read_text(encoding="utf-8") for name in ("verify.css", "measured.css")]
    parts = {
        "{{css}}": "\n".join(styles),
        "{{js}}": (TEMPLATES / "measured.js").read_text(encoding="utf-8"),
        "{{title}}": escape(f"attnproof measured, {records[0]['created'][:10]}"),
        "{{headline}}": headline(records),
        "{{facts}}": "".join(facts(record) for record in records),
        "{{navigation}}": "".join(f'<a href="#{_anchor(s.title)}">{escape(s.title)}</a>' for s in sections),
        "{{sections}}": "".join(
            f'<section id="{_anchor(s.title)}"><h2>{escape(s.title)}</h2>{s.html}</section>' for s in sections
        ),
        "{{data}}": embed({"figures": figures}),
    }
    for mark, text in parts.items():
        page = page.replace(mark, text)
    return page


def _anchor(text: str) -> str:
    return text.lower().replace(" ", "-")


def headline(records: Sequence[Record]) -> str:
    """One sentence: how much was measured, and what did not hold."""
    rows = [row for record in records for row in record["results"]]
    bad = [row for row in rows if row["status"] in ("FAIL", "INVALID", "POWERLESS")]
    skipped = sum(row["status"] == "SKIP" for row in rows)
    passed = sum(row["status"] == "PASS" for row in rows)
    findings = sum(row["status"] == "FINDING" for row in rows)
    words = f"{len(bad)} of {passed + len(bad)} results do not hold" if bad else f"{passed} results hold"
    machines = len({machine(record) for record in records})
    where = "one machine" if machines == 1 else f"{machines} machines"
    more = f", {skipped} not served" if skipped else ""
    more += f"; {findings} of broken kernels shown beside them" if findings else ""
    kind = "bad" if bad else "good"
    return (
        f'<p class="headline {kind}">{words}{more}.</p>'
        f"<p>On {where}; a time stands only beside a green verdict.</p>"
    )


def facts(record: Record) -> str:
    """Environment and protocol as a definition list."""
    environment, protocol = record["environment"], record["protocol"]
    commit = environment.get("commit")
    pairs = {
        "record": record["kind"],
        "made": record["created"].replace("T", " ").replace("+00:00", " UTC"),
        "machine": f"{machine(record)}, {environment.get('threads', '?')} threads",
        "versions": ", ".join(f"{name} {version}" for name, version in environment["versions"].items()),
        "commit": "-"
        if not commit
        else commit[:12] + (" with local changes" if environment.get("dirty") else ""),
    }
    if record["kind"] == "measure":
        pairs["protocol"] = (
            f"{protocol['cache']} caches, {protocol['warmup']} + {protocol['timed']} calls, "
            f"{protocol['order']}, {protocol['timer']}"
        )
    body = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>" for name, value in pairs.items()
    )
    return f'<dl class="facts">{body}</dl>'


def _parts(records: Sequence[Record]) -> Iterator[tuple[str, str, str, dict[str, list[Figure]], str]]:
    """Title, key, leading sentence, figures by group and a table, for every section that has something to show."""
    colours = Colours()
    by_kind = {kind: [record for record in records if record["kind"] == kind] for kind in KINDS}
    if by_kind["measure"]:
        yield from _speed(by_kind["measure"], colours)
    if by_kind["memory"]:
        yield measured_growth.memory(by_kind["memory"], colours)
    if by_kind["drift"]:
        yield measured_growth.drift(by_kind["drift"], colours)
    if by_kind["train"]:
        yield measured_growth.train(by_kind["train"], colours)


def _timed(records: Sequence[Record]) -> list[tuple[Record, dict[str, Any]]]:
    return [(record, row) for record in records for row in record["results"] if "summary" in row]


def _group(row: dict[str, Any]) -> str:
    """The cases of one curve: everything but the length and the batch that goes with it."""
    shape = row["shape"]
    heads = f"{shape['H']}/{shape['Hkv']} heads" if shape["H"] != shape["Hkv"] else f"{shape['H']} heads"
    one = ", one query" if shape["M"] == 1 else ""
    band = f", window {shape['left']}" if shape["left"] >= 0 else ""
    mask = ", causal" if shape["causal"] else ""
    batch = f", batch {shape['B']}" if one else ""
    return f"{shape['run']}, D {shape['D']}, {heads}{batch}, {row['dtype']}{mask}{band}{one}"


def _speed(records: Sequence[Record], colours: Colours) -> Iterator[Any]:
    found = _timed(records)
    if found:
        groups: dict[str, list[Figure]] = {}
        for group in dict.fromkeys(_group(row) for _, row in found):
            mine = [(record, row) for record, row in found if _group(row) == group]
            names = dict.fromkeys(named(record, row["candidate"], records) for record, row in mine)
            figures = []
            for key, label, note in (
                ("tflops", "TFLOP/s", "allowed pairs only, at the median"),
                ("gbps", "GB/s", "q, k, v read and out written once, at the median"),
            ):
                series = [
                    series_of(
                        name,
                        colours,
                        [
                            (row["shape"]["N"], row[key])
                            for record, row in mine
                            if named(record, row["candidate"], records) == name
                        ],
                    )
                    for name in names
                ]
                figures.append(
                    figure_of(f"{label} against N", note, LENGTH, {"label": label, "zero": True}, series)
                )
            groups[group] = figures
        yield (
            "Speed",
            "speed",
            "Arithmetic and effective bandwidth by length; choose the cases.",
            groups,
            _speed_table(records),
        )
        yield _roofline(records, found, colours)
        yield _samples(records, found, colours)
        yield from _made_of(records, found)
    else:
        yield (
            "Speed",
            "speed",
            "No candidate has a time: none has a green verdict.",
            {},
            _speed_table(records),
        )


def _speed_table(records: Sequence[Record]) -> str:
    rows: list[list[Any]] = []
    last = ""
    for record in records:
        for row in record["results"]:
            case, last = "" if row["case"] == last else row["case"], row["case"]
            if "summary" not in row:
                rows.append(
                    [
                        case,
                        named(record, row["candidate"], records),
                        row["status"],
                        "-",
                        "-",
                        "-",
                        "-",
                        row["reason"],
                    ]
                )
                continue
            ratio, summary = row["ratio"], row["summary"]
            speed = "-" if ratio is None else f"{ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}]"
            rows.append(
                [
                    case,
                    named(record, row["candidate"], records),
                    row["status"],
                    f"{summary['median'] * 1e3:.4g}",
                    f"{summary['p95'] * 1e3:.4g}",
                    f"{row['tflops']:.3g}",
                    speed,
                    row["roof"]["sentence"],
                ]
            )
    columns = (
        "case",
        "candidate",
        "verdict",
        "median ms",
        "p95 ms",
        "TFLOP/s",
        "speed, 99%",
        "what limits it, or why there is no time",
    )
    return table(
        columns, rows, "Speed: time of the first candidate over this one's, medians of paired ratios."
    )


def _roofline(records: Sequence[Record], found: Any, colours: Colours) -> Any:
    series: list[dict[str, Any]] = []
    for name in dict.fromkeys(named(record, row["candidate"], records) for record, row in found):
        points = [
            (row["roof"]["intensity"], row["tflops"])
            for record, row in found
            if named(record, row["candidate"], records) == name
        ]
        series.append(series_of(name, colours, points, line=False))
    for record in records:
        roofs = record["protocol"]["roofs"]
        for dtype, rate in roofs["products"].items():
            corner = rate / roofs["copy"]
            ends = ((corner / 64, rate / 64 / 1e12), (corner, rate / 1e12), (corner * 64, rate / 1e12))
            series.append(
                series_of(named(record, f"roof {dtype}", records), Colours(), ends, dots=False, roof=True)
            )
    figure = figure_of(
        "Roofline",
        "dashed: this machine's own copy and matrix-product probes; points above memory's slope come out of a cache",
        {"label": "FLOP per byte of q, k, v, out", "log": True},
        {"label": "TFLOP/s", "log": True},
        series,
    )
    rows = [
        (
            named(record, "", records).strip(", ") or machine(record),
            f"{record['protocol']['roofs']['copy'] / 1e9:.3g}",
            ", ".join(
                f"{dtype} {rate / 1e12:.3g}"
                for dtype, rate in record["protocol"]["roofs"]["products"].items()
            ),
            f"{record['protocol']['roofs']['exponentials'] / 1e9:.3g}",
        )
        for record in records
    ]
    roofs = table(
        ("machine", "copy GB/s", "products TFLOP/s", "10^9 exp/s"),
        rows,
        "Roofs, the best of a few runs each.",
    )
    return (
        "Roofline",
        "roofline",
        "Where each case stands under the roofs that this machine's probes reach.",
        {"": [figure]},
        roofs,
    )


def _samples(records: Sequence[Record], found: Any, colours: Colours) -> Any:
    groups: dict[str, list[Figure]] = {}
    for case in dict.fromkeys(row["case"] for _, row in found):
        series: list[dict[str, Any]] = []
        for record, row in found:
            if row["case"] != case:
                continue
            ordered = sorted(row["samples"])
            points = [(second * 1e3, (at + 1) / len(ordered)) for at, second in enumerate(ordered)]
            series.append(series_of(named(record, row["candidate"], records), colours, points, dots=False))
        groups[case] = [
            figure_of(
                "Share of calls that were done within a time",
                case,
                {"label": "ms", "log": True},
                {"label": "share of calls", "zero": True},
                series,
            )
        ]
    return (
        "Samples",
        "samples",
        "Every sample of a case; a long tail is the machine's, a second step often a second clock.",
        groups,
        "",
    )


MADE_OF = {
    "launches": "launches",
    "registers": "most registers",
    "shared_bytes": "most shared memory, bytes",
    "spills": "spills, bytes a thread",
    "code_bytes": "code, bytes",
}


def _made_of(records: Sequence[Record], found: Any) -> Iterator[Any]:
    """What a GPU's calls are made of, by the quantities that gate C holds; nothing where none were counted."""
    rows = [
        (
            row["case"],
            named(record, row["candidate"], records),
            *(f"{held[name]:.0f}" if name in held else "-" for name in MADE_OF),
        )
        for record, row in found
        if "launches" in (held := row.get("deterministic") or {})
    ]
    if rows:
        lead = "Counted, not timed: the same on every run of the same code, so growth beyond a compiler's steps fails gate C."
        yield "Made of", "made-of", lead, {}, table(("case", "candidate", *MADE_OF.values()), rows)
