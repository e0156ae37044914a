"""What the compiler made of the kernels: the record of the compile matrix, and the bars on registers, LDS and mnemonics."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import attnproof
from attnproof import gcn
from attnproof.backends import dot2
from attnproof.backends.dot2 import arguments, configs, planned, prebuilt, source
from attnproof.backends.dot2.source import Kernel
from attnproof.backends.dot2.variants import Variant
from attnproof.problem import Problem

from .interpreter import Interpreter, compiled

ROOT = Path(__file__).parents[2]


def _tool() -> Any:
    """The tool that makes the record; tools is a folder, not a package."""
    spec = importlib.util.spec_from_file_location("mi50_matrix", ROOT / "tools" / "mi50_matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


mi50_matrix = _tool()
RECORD = ROOT / "results" / "compile" / "gfx.json"
CLOCK, UNITS = 1.725e9, 60


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return json.loads(RECORD.read_text(encoding="utf-8"))["results"]


def of_gfx906(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["architecture"] == "gfx906"]


def test_the_record_belongs_to_the_present_sources(rows: list[dict[str, Any]]) -> None:
    """A bar that holds on last month's text says nothing; `python tools/mi50_matrix.py` makes the record anew."""
    wanted = {
        (source.digest(source.text(row.step.variant.kernel), *row.step.variant.flags), row.architecture)
        for row in mi50_matrix.rows()
    }
    assert wanted == {(row["digest"], row["architecture"]) for row in rows}
    assert len(mi50_matrix.rows()) == len(rows)
    assert {*mi50_matrix.ARCHITECTURES} == {row["architecture"] for row in rows}


@pytest.mark.parametrize("which", [0, 40, 90])
def test_the_record_is_what_the_compiler_makes(rows: list[dict[str, Any]], which: int) -> None:
    found = mi50_matrix.compiled(mi50_matrix.rows()[which])
    (same,) = (
        row
        for row in rows
        if (row["digest"], row["architecture"]) == (found["digest"], found["architecture"])
    )
    assert found == same


def test_no_half_kernel_for_gfx906_spills(rows: list[dict[str, Any]]) -> None:
    halves = [row for row in of_gfx906(rows) if "-DDTYPE=0" in row["flags"]]
    assert len(halves) > 100
    spilled = [
        (row["call"], row["kernel"])
        for row in halves
        if row["vgpr_spills"] or row["sgpr_spills"] or row["scratch_bytes"]
    ]
    assert [] == spilled


def test_no_kernel_on_any_architecture_uses_scratch_or_a_matrix_unit(rows: list[dict[str, Any]]) -> None:
    assert [] == [(row["architecture"], row["call"], row["forbidden"]) for row in rows if row["forbidden"]]
    assert [] == [(row["architecture"], row["call"]) for row in rows if row["scratch_bytes"]]


def test_two_workgroups_of_the_forward_pass_share_a_compute_unit_at_head_dim_128(
    rows: list[dict[str, Any]],
) -> None:
    """At most 128 registers and 32 KB of LDS, whatever the options of a call with aligned dense rows."""
    found = [
        row for row in of_gfx906(rows)
        if row["kernel"] == "attn_forward" and {"-DDTYPE=0", "-DHEAD_D=128", "-DWIDE=1"} <= {*row["flags"]}
        and not any(flag.startswith("-DROWS=") for flag in row["flags"])
    ]  # fmt: skip
    assert len(found) >= 10
    print("registers:", {row["call"]: row["vgprs"] for row in found})
    assert [] == [row["call"] for row in found if row["vgprs"] > 128 or row["lds_bytes"] > 32768]


def test_products_of_halves_are_dot2_and_loads_are_16_bytes(rows: list[dict[str, Any]]) -> None:
    """On every architecture that has the instruction, under its name there; gfx1010 has only fma_mix."""
    for row in rows:
        telling = row["telling"]
        tiles = row["kernel"] in ("attn_forward", "attn_dq", "attn_dkdv")
        if not tiles or "-DDTYPE=0" not in row["flags"]:
            continue
        dots = sum(count for name, count in telling.items() if name.startswith("v_dot2"))
        assert (row["architecture"] == "gfx1010") == (dots == 0), row["call"]
        assert dots or telling["v_fma_mix_f32"], row["call"]
        assert telling.get("ds_read_b128", 0) + telling.get("ds_load_b128", 0), row["call"]
        if "-DWIDE=1" in row["flags"]:
            assert telling.get("global_load_dwordx4", 0) + telling.get("global_load_b128", 0), row["call"]


def test_lds_is_what_the_plan_says(rows: list[dict[str, Any]]) -> None:
    """The closed form chooses tiles before anything is compiled."""
    passes: dict[Kernel, configs.Pass] = {
        "attn_forward": "forward", "attn_dq": "dq", "attn_dkdv": "dkdv", "attn_dbias": "dbias",
    }  # fmt: skip
    for row in of_gfx906(rows):
        if row["kernel"] not in passes:
            continue
        flags = {name: int(value) for name, value in (flag[2:].split("=") for flag in row["flags"])}
        dtype = ("float16", "bfloat16", "float32")[flags["DTYPE"]]
        problem = Problem(dtype, "cuda", 1, 8, 2, 512, 512, flags["HEAD_D"], flags["HEAD_DV"])
        config = configs.Config(flags["BLOCK_M"], flags["BLOCK_N"], flags["THREADS"], flags["WAVES"])
        assert configs.lds_bytes(problem, passes[row["kernel"]], config) == row["lds_bytes"], row["call"]


def test_the_struct_has_the_same_offsets_for_the_compiler_and_the_packer() -> None:
    """A static_assert per field, in the compiler that makes the kernels."""
    fields = [field[0] for field in arguments.layout()._fields_]
    held = [
        f"static_assert(__builtin_offsetof(Args, {name}) == {getattr(arguments.layout(), name).offset}, {name!r});"
        for name in fields
    ]
    held.append(f"static_assert(sizeof(Args) == {ctypes.sizeof(arguments.layout())});")
    text = source.inline("args.h") + "\n".join(held).replace("'", '"')
    kernel = 'extern "C" __global__ void nothing(Args a) { *a.delta = a.scale; }\n'
    assert prebuilt.clang(Variant("attn_forward", ()), text=text + "\n" + kernel).startswith(b"\x7fELF")
    assert len(fields) >= 100


def shape(keys: int) -> Variant:
    problem = Problem("float16", "cuda", 1, 1, 1, 64, keys, 128, 128)
    return next(step.variant for step in planned.steps(problem, gradients=False))


@pytest.fixture(scope="module")
def inner_loop() -> gcn.Counts:
    """What one more tile of 32 keys costs a workgroup of the forward pass at head dim 128, full tiles only."""
    made = []
    for keys in (64, 96):
        q, k = (
            torch.randn(1, 1, n, 128, generator=torch.Generator().manual_seed(n)).half() for n in (64, keys)
        )
        run = Interpreter(counting=True)
        with dot2.running_on(run):
            attnproof.attention(q, k, k, backend="dot2")
        made.append(run.counts[0][1])
    return difference(*made)


def difference(less: gcn.Counts, more: gcn.Counts) -> gcn.Counts:
    """Counts of the second launch that the first does not have."""
    numbers = {
        name: getattr(more, name) - getattr(less, name)
        for name in ("instructions", "lds_read_cycles", "lds_read_cycles_free", "lds_write_cycles", "lds_write_cycles_free",
                     "load_lines", "store_lines", "load_bytes", "store_bytes")
    }  # fmt: skip
    classes = {name: count - less.classes[name] for name, count in more.classes.items()}
    return gcn.Counts(classes=classes, mnemonics={}, executed={}, **numbers)


def test_dot2_is_at_least_half_of_the_vector_instructions_of_the_inner_loop(inner_loop: gcn.Counts) -> None:
    classes = inner_loop.classes
    share = classes["dot2"] / (classes["dot2"] + classes["valu"] + classes["quarter"])
    print(f"dot2 share of vector instructions: {share:.3f}")
    assert share >= 0.5


def test_padded_lds_reads_are_within_a_twentieth_of_conflict_free(inner_loop: gcn.Counts) -> None:
    ratio = inner_loop.lds_read_cycles / inner_loop.lds_read_cycles_free
    print(f"LDS read cycles over conflict-free: {ratio:.4f}")
    assert ratio <= 1.05


def test_the_modelled_bound_is_19_tflops_with_full_overlap(inner_loop: gcn.Counts) -> None:
    """A model from counted instructions at 1.725 GHz and 60 units, no measurement: nothing of it ran on such a GPU."""
    flops = 4 * 64 * 32 * 128
    both, alone = (inner_loop.bound(CLOCK, 1, overlap).seconds for overlap in (True, False))
    bound, worst = (flops / seconds * UNITS / 1e12 for seconds in (both, alone))
    print(
        f"modelled bound: {bound:.1f} TFLOP/s with full overlap, {worst:.1f} without any; pipes {inner_loop.pipes}"
    )
    assert bound >= 19


def test_the_same_source_compiles_for_cuda(tmp_path: Path) -> None:
    """To PTX only; it is not run here."""
    program = shutil.which(prebuilt.CLANG)
    assert program is not None
    given, made = tmp_path / "kernel.cu", tmp_path / "kernel.ptx"
    given.write_text(source.text("attn_forward"), encoding="utf-8")
    command = [program, "-x", "cuda", "--cuda-gpu-arch=sm_75", "--cuda-device-only", "-nocudainc", "-nocudalib", "-O3",
               "-std=c++17", "-S", *shape(64).flags, "-o", str(made), str(given)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    assert ".entry attn_forward" in made.read_text(encoding="utf-8")


def test_a_prebuilt_kernel_is_what_clang_makes_of_the_present_text() -> None:
    """A stale archive is never used, and this test says that it is stale."""
    usual = prebuilt.usual()
    assert [] == [
        variant.name for variant in usual if prebuilt.find(variant, "gfx906:sramecc+:xnack-") is None
    ]
    variant = usual[0]
    assert compiled(variant, source.text(variant.kernel)) == prebuilt.find(variant, "gfx906")
    assert prebuilt.find(variant, "gfx1030") is None
