"""A whole kernel, end to end: HIP source, compiled code, interpreter, float64; and what happens when parts of it go missing."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnproof import gcn
from attnproof.gcn.codeobject import find_objdump

HERE = Path(__file__).parent
SOURCE, FIXTURE = HERE / "small_attention.hip", HERE / "small_attention.s"
CLANG = shutil.which("clang-19")
needs_llvm = pytest.mark.skipif(
    CLANG is None or find_objdump() is None, reason="no clang 19 and llvm-objdump here"
)
DIM = 32
# p is rounded to fp16 and so is the output: each by at most 2**-11 of a mean of values
ROUNDING = 2.0**-10


def compiled() -> gcn.CodeObject:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "small_attention.co"
        flags = "-x hip --offload-arch=gfx906 --cuda-device-only --no-gpu-bundle-output -nogpulib -nogpuinc -O3 -std=c++17"
        subprocess.run([str(CLANG), *flags.split(), "-o", str(target), str(SOURCE)], check=True)
        return gcn.CodeObject.load(target.read_bytes())


@pytest.fixture(scope="module")
def code() -> gcn.CodeObject:
    return gcn.CodeObject.from_text(FIXTURE.read_text())


def reference(q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
    """Attention in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = np.einsum("hmd,hnd->hmn", q, k) * DIM**-0.5
    if causal:
        rows, keys = s.shape[1:]
        s = np.where(np.arange(keys) <= np.arange(rows)[:, None] + keys - rows, s, -np.inf)
    top = s.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        p = np.exp(s - np.where(np.isinf(top), 0, top))
        total = p.sum(axis=-1, keepdims=True)
        out = np.einsum("hmn,hnd->hmd", p / np.where(total == 0, 1, total), v)
        return out, (top + np.log(total))[..., 0]


def attention(
    code: gcn.CodeObject, rows: int, keys: int, causal: bool, heads: int = 2, **options: Any
) -> tuple[float, float, gcn.Counts]:
    """Largest error of out in units of the largest value, largest error of lse, and the counts."""
    rng = np.random.default_rng(rows + keys)
    q, k, v = (rng.standard_normal((heads, n, DIM)).astype(np.float16) for n in (rows, keys, keys))
    out, lse = np.full((heads, rows, DIM), np.nan, np.float16), np.full((heads, rows), np.nan, np.float32)
    memory = gcn.Memory()
    addresses = [
        memory.place(x, name=n, writable=n in ("out", "lse"))
        for n, x in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse))
    ]
    kernarg = struct.pack("<5Q3if", *addresses, rows, keys, causal, DIM**-0.5 / np.log(2))
    counts = gcn.launch(
        code,
        "small_attention",
        grid=(-(-rows // 8), heads, 1),
        block=(128, 1, 1),
        kernarg=kernarg,
        memory=memory,
        **options,
    )
    want, want_lse = reference(q, k, v, causal)
    seen = np.isfinite(want_lse)
    assert (np.isneginf(lse) == ~seen).all()
    return (
        float(np.abs(out - want).max() / np.abs(v).max()),
        float(np.abs(lse[seen] - want_lse[seen]).max()),
        counts,
    )


SHAPES = [(8, 32, False), (19, 45, False), (19, 45, True), (33, 7, True), (1, 1, False)]


@pytest.mark.parametrize(("rows", "keys", "causal"), SHAPES)
def test_the_compiled_kernel_is_attention(code: gcn.CodeObject, rows: int, keys: int, causal: bool) -> None:
    """Ragged edges, causal, dead rows: against float64, from the text fixture, so without LLVM."""
    out, lse, _ = attention(code, rows, keys, causal)
    assert out < ROUNDING and lse < 2e-6


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_every_wave_order_gives_the_same_result(code: gcn.CodeObject, order: str) -> None:
    first, second = (attention(code, 19, 45, True, order=name) for name in ("lockstep", order))
    assert first == second


@needs_llvm
def test_source_compiled_now_does_the_same() -> None:
    out, lse, _ = attention(compiled(), 19, 45, True)
    assert out < ROUNDING and lse < 2e-6


@needs_llvm
def test_the_fixture_says_what_the_code_object_says(code: gcn.CodeObject) -> None:
    """A fixture that no longer belongs to its source would prove something else."""
    fresh = compiled()
    if fresh.disassembly != code.disassembly:
        version = subprocess.run([str(CLANG), "--version"], capture_output=True, text=True, check=True).stdout
        assert "19.1.7" not in version
    assert fresh.kernels["small_attention"].lds_bytes == code.kernels["small_attention"].lds_bytes
    again = gcn.CodeObject.from_text(fresh.to_text())
    assert (fresh.target, fresh.kernels, fresh.instructions) == (
        again.target,
        again.kernels,
        again.instructions,
    )


def test_metadata_is_read(code: gcn.CodeObject) -> None:
    kernel = code.kernels["small_attention"]
    assert ("gfx906", 64, 128, 56) == (
        code.target,
        kernel.wavefront_size,
        kernel.max_flat_workgroup_size,
        kernel.kernarg_size,
    )
    assert (32 * 40 * 2 + 16 * 32 * 4 + 8 * 40 * 2, 0, 0, 0) == (
        kernel.lds_bytes, kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes,
    )  # fmt: skip


def without(
    code: gcn.CodeObject, wanted: Callable[[str], bool], number: int, replace: str | None = None
) -> gcn.CodeObject:
    """The kernel with its number-th matching line dropped, or replaced by other text."""
    lines = code.to_text().splitlines()
    at = [k for k, line in enumerate(lines) if wanted(line)][number]
    # an s_nop keeps addresses and branch offsets as they are
    old = lines[at].strip().split("//")[0].strip()
    lines[at] = lines[at].replace(old, replace or "s_nop 0", 1)
    return gcn.CodeObject.from_text("\n".join(lines))


def count(code: gcn.CodeObject, name: str) -> int:
    return sum(made.name == name for made in code.instructions)


def test_every_barrier_is_needed(code: gcn.CodeObject) -> None:
    for number in range(count(code, "s_barrier")):
        broken = without(code, lambda line: "s_barrier" in line, number)
        with pytest.raises((gcn.Race, gcn.Hazard, gcn.UninitialisedRead)):
            attention(broken, 19, 70, False)


def test_a_dropped_wait_is_a_hazard_or_was_not_needed(code: gcn.CodeObject) -> None:
    """No dropped s_waitcnt may pass silently with a wrong result; most are needed."""
    found = 0
    for number in range(count(code, "s_waitcnt")):
        broken = without(code, lambda line: "s_waitcnt" in line, number)
        try:
            out, _, _ = attention(broken, 9, 33, True)
        except gcn.Hazard:
            found += 1
        else:
            assert out < ROUNDING
    assert found >= count(code, "s_waitcnt") * 2 // 3


@pytest.mark.parametrize(
    ("pattern", "old", "new", "error"),
    [
        (r"\tds_write_b128", r"(ds_write_b128 v\d+, v\[\d+:\d+\])", r"\1 offset:4096", gcn.MemoryFault),
        (r"\tds_read_b128", r"offset:\d+", "offset:8", gcn.MemoryFault),
        (r"\tglobal_load_dwordx4", r"off$", "off offset:2", gcn.MemoryFault),
        (r"\tglobal_store_dword ", r"off$", "off offset:4", gcn.MemoryFault),
        (
            r"\tv_dot2_f32_f16",
            r"v_dot2_f32_f16 (v\d+), (v\d+), (v\d+), v\d+",
            r"v_fma_f32 \1, \2, \3, 0",
            None,
        ),
        (r"row_half_mirror", "row_half_mirror", "row_ror:1", None),
        (r"\tv_perm_b32", r"v_perm_b32 (v\d+), (v\d+), (v\d+),", r"v_perm_b32 \1, \3, \2,", None),
    ],
)
def test_a_mistake_planted_in_the_code_is_caught(
    code: gcn.CodeObject, pattern: str, old: str, new: str, error: type[Exception] | None
) -> None:
    """By a check where the ISA forbids it, else by the result."""
    line = next(
        text
        for text in code.disassembly.splitlines()
        if re.search(pattern, text) and re.search(old, text.split("//")[0].strip())
    )
    text = line.split("//")[0].strip()
    broken = without(code, lambda other: other == line, 0, re.sub(old, new, text))
    if error is not None:
        with pytest.raises(error):
            attention(broken, 19, 45, False)
        return
    assert attention(broken, 19, 45, False)[0] > 1e-2


def test_instructions_are_counted_as_they_were_executed(code: gcn.CodeObject) -> None:
    """One workgroup of two waves, two key steps of which each has 32 products for the scores and 32 for the output."""
    _, _, counts = attention(code, 8, 64, False, heads=1)
    assert 2 * 2 * (32 + 32) == counts.classes["dot2"]
    assert (
        counts.instructions
        == sum(counts.executed.values())
        == sum(counts.classes.values())
        == sum(counts.mnemonics.values())
    )
    assert 2 * (1 + 2 * 2) - 2 == counts.mnemonics["s_barrier"]
    doubled = attention(code, 8, 64, False, heads=2)[2]
    assert 2 * counts.instructions == doubled.instructions
    without_traffic = attention(code, 8, 64, False, heads=1, counts=False)[2]
    assert (counts.classes, 0, False) == (
        without_traffic.classes,
        without_traffic.lds_read_cycles,
        without_traffic.traffic,
    )


def test_the_bound_is_the_busiest_pipe_or_the_sum(code: gcn.CodeObject) -> None:
    _, _, counts = attention(code, 8, 64, False, heads=1)
    vector = 4 * (counts.classes["valu"] + counts.classes["dot2"]) + 16 * counts.classes["quarter"]
    lds = counts.lds_read_cycles + counts.lds_write_cycles
    bound = counts.bound(1e9, 2)
    assert pytest.approx(vector / 4 / 2 / 1e9) == bound.pipes["valu"]
    assert pytest.approx(lds / 2 / 1e9) == bound.pipes["lds"]
    assert max(bound.pipes.values()) == bound.seconds
    assert pytest.approx(sum(bound.pipes.values())) == counts.bound(1e9, 2, overlap=False).seconds


if __name__ == "__main__":
    FIXTURE.write_text(compiled().to_text())
