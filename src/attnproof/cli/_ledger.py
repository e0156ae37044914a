"""The ledger's reports as tables and as plain data. `ledger` (the commands) decides which of them to show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from ..ledger import accounts, activations, documents
from ..ledger.accounts import Account
from ..ledger.hardware import GIB, KIB, MIB, Hardware, get, names
from ..ledger.profilers import Measured
from ..ledger.roofline import Roofline, roofline
from ..ledger.tiles import Candidate, Plan
from ..ledger.traffic import Call
from ._common import show


def size(count: float) -> str:
    """Bytes in the binary unit that keeps three or four digits."""
    for unit, scale in (("TiB", GIB * 1024), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= 0.9995 * scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Seconds in the unit that keeps three or four digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def passes(call: Call, direction: str) -> list[Account]:
    """The accounts to set side by side for one call."""
    if max((m for m, _ in call.lengths), default=0) * call.group <= 16 and direction == "forward":
        return [accounts.eager(call), *(accounts.decode(call, splits) for splits in (1, 8, 32))]
    if direction == "forward":
        return [accounts.eager(call), accounts.keys_outer(call), accounts.forward(call)]
    return [accounts.eager_backward(call), accounts.backward_atomic(call), accounts.backward(call)]


def bytes_table(console: Console, call: Call, device: Hardware, direction: str) -> list[dict[str, Any]]:
    """Requests, memory traffic and bounds of every form of one call."""
    lines = [roofline(account, device) for account in passes(call, direction)]
    m, n = call.lengths[0] if call.lengths else (0, 0)
    heads = f"{call.heads} heads ({call.kv_heads} kv)"
    title = (
        f"{direction}, {len(call.lengths)} x {heads}, M={m}, N={n}, D={call.head_dim}, Dv={call.value_dim}, "
    )
    title += f"{call.dtype}, on {device.title}"
    note = f"FLOP/byte is of memory traffic; balance {lines[0].balance:.0f}, cache {size(device.l2_bytes)}. "
    note += (
        "Bounds are lower bounds at peak: with exponentials, vector instructions and ports; classic without"
    )
    show(
        console,
        title,
        *("form", "requests", "memory read", "written", "FLOP/byte", "bound", "classic", "limited by"),
        rows=(_line_row(line) for line in lines),
        note=note,
    )
    return [line_data(line) for line in lines]


def _line_row(line: Roofline) -> list[str]:
    return [
        line.account.name,
        size(line.account.total),
        size(line.memory.read),
        size(line.memory.written),
        f"{line.intensity:.1f}",
        duration(line.seconds),
        duration(line.classic_seconds),
        line.sentence,
    ]


def line_data(line: Roofline) -> dict[str, Any]:
    """A roofline as plain data."""
    return {
        "form": line.account.name,
        "requests": {"read": line.account.read, "written": line.account.written},
        "memory": {
            "read": line.memory.read,
            "written": line.memory.written,
            "left_in_cache": line.memory.resident,
        },
        "flops": line.account.flops,
        "executed_flops": line.account.executed_flops,
        "exps": line.account.exps,
        "intensity": None if line.memory.total == 0 else line.intensity,
        "balance": line.balance,
        "seconds": line.seconds,
        "serial_seconds": line.serial_seconds,
        "classic_seconds": line.classic_seconds,
        "limits": list(line.limits),
        "sentence": line.sentence,
        "kernels": [
            {
                "kernel": kernel.kernel,
                "seconds": kernel.seconds,
                "terms": dict(kernel.terms),
                "used": kernel.used,
            }
            for kernel in line.kernels
        ],
    }


def kept_table(console: Console, call: Call) -> list[dict[str, Any]]:
    """What each implementation keeps for the backward pass of one block, and holds on top while it runs."""
    block = activations.Block(
        batch=len(call.lengths),
        length=max((m for m, _ in call.lengths), default=0),
        heads=call.heads,
        kv_heads=call.kv_heads,
        head_dim=call.head_dim,
        value_dim=call.value_dim,
        model_dim=call.heads * call.head_dim,
        dtype=call.dtype,
    )
    out: list[dict[str, Any]] = []
    for name in activations.IMPLEMENTATIONS:
        tensors = activations.kept(block, name)
        out.append(
            {
                "implementation": name,
                "kept": activations.total(tensors),
                "forward_transient": activations.forward_transient(block, name),
                "backward_transient": activations.backward_transient(block, name),
                "tensors": {tensor.name: tensor.bytes for tensor in tensors},
            }
        )
    show(
        console,
        "kept by one attention block for its backward pass",
        *("implementation", "kept", "and in forward", "and in backward", "largest"),
        rows=(
            [
                row["implementation"],
                *(size(row[key]) for key in ("kept", "forward_transient", "backward_transient")),
                max(row["tensors"], key=row["tensors"].get),
            ]
            for row in out
        ),
    )
    return out


def documents_tables(console: Console) -> dict[str, list[dict[str, str]]]:
    """The three reports of the source documents, their words beside our numbers."""
    reports = {
        "IO of one head, D=64, fp16, A100-40GB": list(documents.io_report()),
        "activations, d_model=3072, H=24, B=1, bf16": list(documents.activation_report()),
        "the engineer's notes": list(documents.engineer_report()),
    }
    for title, lines in reports.items():
        rows = ([line.what, line.said, line.computed, line.note] for line in lines)
        show(console, title, "what", "documents", "computed", "note", rows=rows)
    return {title: [vars(line) for line in lines] for title, lines in reports.items()}


def hardware_table(console: Console, wanted: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """The device table; a question mark is an uncertain figure."""
    rows = [get(name) for name in (names() if wanted is None else wanted)]
    show(
        console,
        "devices (a question mark is a figure in doubt)",
        *("name", "arch", "units", "half TFLOP/s", "fp32", "exp T/s", "GB/s", "L2 MiB", "shared KiB"),
        rows=(_hardware_row(row) for row in rows),
    )
    return [hardware_data(row) for row in rows]


def _hardware_row(row: Hardware) -> list[str]:
    def value(key: str) -> str:
        figure = row.figures().get(key)
        return "-" if figure is None else f"{figure.value:g}{'?' * figure.uncertain}"

    half = value("matrix_float16")
    if row.packed_float16 is not None:
        half = f"{value('packed_float16')} packed"
    exps = f"{row.exp_rate / 1e12:.2f}{'?' * row.exp_per_clock.uncertain}"
    keys = ("memory_bandwidth", "l2_size", "shared_per_unit")
    return [
        row.name,
        row.arch,
        value("units"),
        half,
        value("vector_float32"),
        exps,
        *(value(key) for key in keys),
    ]


def hardware_data(row: Hardware) -> dict[str, Any]:
    """A device as plain data, every figure with unit, source and doubt."""
    figures = {key: vars(figure) for key, figure in row.figures().items()}
    return {"name": row.name, "title": row.title, "arch": row.arch, "note": row.note, "figures": figures}


def plan_tables(console: Console, plan: Plan, top: int, refused: bool) -> dict[str, Any]:
    """The planner's best tiles, and on request why each other one was refused."""
    job, device = plan.job, plan.hardware
    rows_q, rows_k = plan.tutorial
    what = f"{job.kernel}, D={job.head_dim}, {job.dtype}{', causal' * job.causal}"
    note = (
        f"{len(plan.fitting)} tiles fit, {len(plan.refused)} do not; time is the model's for N={job.length}, "
        f"{job.heads} heads; the tutorial's rule gives B_r={rows_q}, B_c={rows_k}"
    )
    if plan.style.name == "dot2":
        budget = documents.mi50_budget(head_dim=job.head_dim, dtype=job.dtype)
        parts = " + ".join(f"{name} {size(count)}" for name, count in budget.items())
        note += f"; the engineer's tile 128x64 takes {size(sum(budget.values()))} ({parts})"
    show(
        console,
        f"{what}: {plan.style.name} kernels on {device.title}",
        *("tile", "time", "shared", "registers", "blocks", "products", "softmax", "shared clocks"),
        rows=(_tile_row(each) for each in plan.fitting[:top]),
        note=note,
    )
    if not plan.fitting and plan.closest is not None:
        console.print(
            f"nothing fits; nearest is {plan.closest.tile}: {plan.closest.refused}", highlight=False
        )
    if refused:
        show(console, "refused", "tile", "reason", rows=([str(x.tile), x.refused] for x in plan.refused))
    return {
        "hardware": device.name,
        "style": plan.style.name,
        "job": vars(job),
        "tutorial": {"block_q": rows_q, "block_k": rows_k},
        "fitting": [candidate_data(each) for each in plan.fitting],
        "refused": [candidate_data(each) for each in plan.refused],
    }


def _tile_row(each: Candidate) -> list[str]:
    terms = each.terms
    softmax = terms["exponentials"] + terms["vector"]
    return [
        str(each.tile),
        duration(each.seconds),
        size(each.shared_bytes),
        f"{each.registers}{f' ({each.spills} spill)' if each.spills else ''}",
        str(each.resident),
        *(f"{clocks:.0f}" for clocks in (terms["products"], softmax, terms["shared"])),
    ]


def candidate_data(each: Candidate) -> dict[str, Any]:
    """A tile as plain data."""
    return {
        "tile": vars(each.tile),
        "shared": dict(each.shared),
        "registers": each.registers,
        "spills": each.spills,
        "resident": each.resident,
        "refused": each.refused,
        "terms": dict(each.terms),
        "seconds": each.seconds,
    }


def measured_table(console: Console, measured: Measured, device: Hardware) -> None:
    """Counters beside predictions."""
    show(
        console,
        f"memory traffic by {measured.tool} on {device.title}, MB",
        *("call", "N", "H", "D", "read", "model", "written", "model", "ratio", "within"),
        rows=_measured_rows(measured, device),
        note="within: 10% where the working set is above four times the cache, a factor of two below",
    )
    for case, reason in measured.skipped:
        console.print(f"skipped {case.implementation} {case}: {reason}", highlight=False, markup=False)


def _measured_rows(measured: Measured, device: Hardware) -> Iterable[Sequence[str]]:
    for case, found in measured.compared:
        numbers = (found.read, found.predicted.read, found.written, found.predicted.written)
        yield [
            f"{case.implementation} {case.direction}",
            *(str(x) for x in (case.length, case.heads, case.head_dim)),
            *(f"{number / 1e6:.1f}" for number in numbers),
            f"{found.ratio:.2f}",
            "yes" if found.holds(device) else f"NO (limit {found.limit(device):g})",
        ]
