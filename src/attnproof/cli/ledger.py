"""Commands of the ledger: ledger (bytes, bounds, activations), plan (tiles) and figures."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._common import JsonOption, guarded, out_console, write_json, write_text

if TYPE_CHECKING:
    from ..ledger.hardware import Hardware
    from ..ledger.profilers import Measured
    from ..ledger.traffic import Call
    from ..masks import Mask

HardwareOption = Annotated[
    str | None,
    typer.Option(
        "--hardware", metavar="NAME", help="A device of the table or a .toml profile; default: this machine."
    ),
]


class Dtype(str, Enum):
    """Input dtypes."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


class Direction(str, Enum):
    """Which pass."""

    forward = "forward"
    backward = "backward"


class PassName(str, Enum):
    """Which kernel to plan."""

    forward = "forward"
    dkdv = "dkdv"
    dq = "dq"


class Language(str, Enum):
    """Language of the figures."""

    en = "en"
    zh = "zh"


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    app.command(rich_help_panel="Account")(guarded(ledger))
    app.command(rich_help_panel="Account")(guarded(plan))
    app.command(rich_help_panel="Account")(guarded(figures))


def ledger(
    hardware: HardwareOption = None,
    n: Annotated[list[int] | None, typer.Option("--n", min=1, help="Keys; repeat for several.")] = None,
    m: Annotated[int | None, typer.Option(min=1, help="Queries; as many as keys if left out.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key/value heads; as many if left out.")] = None,
    d: Annotated[int, typer.Option(min=1, help="Head dim of q and k.")] = 64,
    dv: Annotated[int | None, typer.Option(min=1, help="Head dim of v; as d if left out.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Input dtype.")] = Dtype.float16,
    causal: Annotated[bool, typer.Option("--causal", help="Keys up to the query only.")] = False,
    window: Annotated[tuple[int, int], typer.Option(help="Keys left and right; -1 is unbounded.")] = (-1, -1),
    direction: Annotated[Direction, typer.Option(help="Which pass.")] = Direction.forward,
    documents: Annotated[
        bool, typer.Option("--documents", help="The source documents' three reports.")
    ] = False,
    devices: Annotated[bool, typer.Option("--devices", help="The device table.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Count with ncu or rocprof, beside the model.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="RECORD", help="Hold the model against a record's counters again."),
    ] = None,
    impl: Annotated[list[str] | None, typer.Option(help="With --measure: eager, sdpa or a backend.")] = None,
    replay: Annotated[str, typer.Option(help="With --measure: ncu's replay mode.")] = "application",
    explore: Annotated[
        Path | None, typer.Option("--explore", metavar="PATH", help="Write the interactive page to PATH.")
    ] = None,
    json_path: JsonOption = None,
) -> bool:
    """Where every byte of a call goes, and what limits it."""
    if documents or devices:
        return _tables(documents, json_path)
    if explore is not None:
        return _explorer(explore)
    if against is not None:
        return _against(against, hardware, json_path)
    if measure:
        return _measure(hardware, n, causal, dtype.value, impl, replay, json_path)
    from ..ledger.hardware import resolve
    from ..ledger.traffic import Call
    from . import _ledger

    device, payload = resolve(hardware), []
    for length in n or [1024, 4096, 16384]:
        call = Call(
            lengths=((m or length, length),) * batch,
            heads=heads,
            kv_heads=kv_heads or heads,
            head_dim=d,
            value_dim=dv or d,
            dtype=dtype.value,
            mask=_mask(causal, window),
        )
        payload.append(_one(call, device, direction.value))
    data = {"command": "ledger", "hardware": _ledger.hardware_data(device), "calls": payload}
    write_json(json_path, data)
    return True


def _tables(documents: bool, json_path: Path | None) -> bool:
    """What needs no call: the documents' reports, or the devices."""
    from . import _ledger

    console = out_console()
    what = "documents" if documents else "devices"
    shown = _ledger.documents_tables(console) if documents else _ledger.hardware_table(console)
    write_json(json_path, {"command": "ledger", what: shown})
    return True


def _one(call: Call, device: Hardware, direction: str) -> dict[str, Any]:
    """Tables and data of one call."""
    from . import _ledger

    console = out_console()
    data = {
        "lengths": [list(pair) for pair in call.lengths],
        "heads": call.heads,
        "kv_heads": call.kv_heads,
        "head_dim": call.head_dim,
        "value_dim": call.value_dim,
        "dtype": call.dtype,
        "direction": direction,
        "pairs": call.pairs,
        "forms": _ledger.bytes_table(console, call, device, direction),
    }
    if direction == "backward":
        data["kept"] = _ledger.kept_table(console, call)
    return data


def _mask(causal: bool, window: tuple[int, int]) -> Mask:
    from .. import masks

    mask = masks.window(*window)
    return mask & masks.causal() if causal else mask


def _explorer(path: Path) -> bool:
    """Write the interactive page."""
    from ..ledger import explore
    from ..report import explorer

    write_text(path, explorer.page(explore.page_data()))
    out_console().print(f"wrote {path}", highlight=False, markup=False)
    return True


def _measure(
    hardware: str | None,
    lengths: list[int] | None,
    causal: bool,
    dtype: str,
    wanted: list[str] | None,
    replay: str,
    json_path: Path | None,
) -> bool:
    """Profile the grid of calls, print counters beside predictions, write the record."""
    from ..ledger import profilers
    from ..ledger.hardware import resolve
    from ..ledger.workload import implementations
    from . import _ledger

    device = resolve(hardware)
    tool = profilers.find_tool()
    grid = profilers.cases(
        wanted or implementations(), lengths=lengths or profilers.LENGTHS, dtype=dtype, masked=causal
    )
    measured = profilers.measure(grid, device, tool=tool, replay=replay)
    _ledger.measured_table(out_console(), measured, device)
    write_json(json_path, _record(measured, device) if json_path is not None else {})
    return all(found.holds(device) for _, found in measured.compared)


def _against(path: Path, hardware: str | None, json_path: Path | None) -> bool:
    """Today's model beside the counters of a record; what was counted, and on what, stays as it is."""
    import json

    from ..ledger import profilers
    from ..ledger.hardware import resolve
    from ..verify.records import commit_of
    from . import _ledger
    from ._common import progress

    kept = json.loads(path.read_text(encoding="utf-8"))
    device = resolve(hardware or kept.get("protocol", {}).get("hardware", {}).get("name"))
    with progress("predicting", len(kept.get("results", ()))) as tick:
        measured = profilers.again(kept, device, lambda _: tick())
    _ledger.measured_table(out_console(), measured, device)
    skipped = [row for row in kept["results"] if row["status"] == "SKIP"]
    root = Path(__file__).parents[3]
    protocol = kept["protocol"] | {
        "hardware": _ledger.hardware_data(device),
        "predicted_by": commit_of(root)["commit"],
    }
    write_json(json_path, kept | {"protocol": protocol, "results": [*_results(measured, device), *skipped]})
    return all(found.holds(device) for _, found in measured.compared)


def _results(measured: Measured, device: Hardware) -> list[dict[str, Any]]:
    return [found.as_result(device, str(case), vars(case)) for case, found in measured.compared]


def _record(measured: Measured, device: Hardware) -> dict[str, Any]:
    """The measurement under the project's record schema."""
    from ..verify.records import record
    from . import _ledger

    skipped = [
        {"candidate": case.implementation, "case": str(case), "status": "SKIP", "reason": reason}
        for case, reason in measured.skipped
    ]
    protocol = {
        "tool": measured.tool,
        "command": list(measured.command),
        "before_each_call": "one warm-up call, then unrelated memory of four times the L2 is read",
        "hardware": _ledger.hardware_data(device),
    }
    return record("ledger", protocol, [*_results(measured, device), *skipped], device="cuda")


def plan(
    hardware: HardwareOption = None,
    d: Annotated[int, typer.Option(min=1, help="Head dim of q and k.")] = 64,
    dv: Annotated[int | None, typer.Option(min=1, help="Head dim of v; as d if left out.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Input dtype.")] = Dtype.float16,
    kernel: Annotated[PassName, typer.Option("--pass", help="Which kernel.")] = PassName.forward,
    n: Annotated[int, typer.Option(min=1, help="Length that the score is for.")] = 4096,
    heads: Annotated[int, typer.Option(min=1, help="Heads that the score is for.")] = 64,
    causal: Annotated[bool, typer.Option("--causal", help="Keys up to the query only.")] = False,
    style: Annotated[str | None, typer.Option(help="Kind of kernel; default: ours on that device.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many tiles to show.")] = 10,
    refused: Annotated[bool, typer.Option("--refused", help="Also list every refused tile and why.")] = False,
    json_path: JsonOption = None,
) -> bool:
    """Which tiles fit a device, how long each should take, and why the others do not fit."""
    from ..ledger import tiles
    from ..ledger.hardware import resolve
    from ..ledger.resources import STYLES, Job
    from . import _ledger

    if style is not None and style not in STYLES:
        raise ValueError(f"--style: expected one of {', '.join(STYLES)}, got {style!r}")
    job = Job(dtype.value, d, dv or d, kernel.value, n, heads, causal)
    found = tiles.plan(resolve(hardware), job, None if style is None else STYLES[style])
    write_json(json_path, {"command": "plan", **_ledger.plan_tables(out_console(), found, top, refused)})
    return bool(found.fitting)


def figures(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files.")] = Path(
        "figures"
    ),
    lang: Annotated[Language, typer.Option(help="Language of titles and labels.")] = Language.en,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--record", metavar="PATH", help="A record of `ledger --measure` for the comparison figure."
        ),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only these figures, by name.")] = None,
) -> bool:
    """Draw the ledger's figures as SVG and PNG."""
    import json

    from ..ledger import pictures
    from ..report import figures as draw

    record = None if measured is None else json.loads(measured.read_text(encoding="utf-8"))
    console = out_console()
    for line in draw.draw_all(pictures.data(record), out, lang=lang.value, only=only):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return True
