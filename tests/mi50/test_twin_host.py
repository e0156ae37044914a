"""The CUDA twin without a GPU: what NVRTC makes of the shipped text, and the bytes that the driver would be given.

A fake libcuda keeps the launches; their bytes are then run by the interpreter, as compiled for gfx906.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.calls import Call
from tests.parity.problems import Case, everything
from tests.parity.random_cases import loosened, random_case
from tests.parity.tolerance import expected

import attnproof
from attnproof.backends import dot2
from attnproof.backends.dot2 import arguments, loader, source
from attnproof.backends.dot2.variants import Step, Variant

from . import compile_twin, fake, nvrtc
from .calls import PARTS, TARGET, hold, suite
from .interpreter import compiled
from .test_launch_bytes import replay
from .twin import Driver, DriverError, Twin

__all__ = ["suite"]
ROOT = Path(__file__).parents[2]
STREAM = 0x7F00_1234_5678  # wider than an int, as pointers are
SMALL = everything(Case("everything, small", B=1, H=2, Hkv=1, M=18, N=21, D=16, Dv=16, dtype="float16"))


@pytest.fixture(scope="module")
def rtc() -> nvrtc.Compiler:
    found = nvrtc.find()
    if found is None:
        pytest.skip("no libnvrtc here (pip install nvidia-cuda-nvrtc)")
    return found


class Written:
    """A compiler that writes a line of PTX and asks for so many bytes of dynamic shared memory."""

    def __init__(self, dynamic: int = 0, ptx: str = ".version 9.0\n") -> None:
        self.made = nvrtc.Image(ptx, dynamic)

    def image(self, variant: Variant, text: str | None = None) -> nvrtc.Image:
        return self.made


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(fake.build(tmp_path, "fake_cuda.c"))


def twin_on(driver: Driver, made: Any) -> Twin:
    return Twin(made, driver, lambda: STREAM, 2)


@pytest.mark.usefixtures("suite")
@pytest.mark.parametrize("case", [SMALL, PARTS], ids=str)
def test_recorded_launches_compute_attention_when_interpreted(case: Case, driver: Driver) -> None:
    """Bytes, grid and block reach the CUDA driver as the AMD driver gets them."""
    run, done = twin_on(driver, Written()), 0

    def record_and_replay(step: Step) -> None:
        nonlocal done
        run(step)
        made = fake.recorded(driver.library)[done:]
        done += len(made)
        assert loader.packed(step) == [(each.raw, each.grid[0]) for each in made]
        for launch in made:
            assert (STREAM, 0, (step.threads, 1, 1)) == (launch.stream, launch.shared, launch.block)
            replay(launch, step, compiled(step.variant, source.text(step.variant.kernel)))

    hold(Call(TARGET, case), expected(case, half_operands=True), record_and_replay)
    if case is PARTS:
        assert ["attn_forward", "attn_combine"] == [launch.name for launch in fake.recorded(driver.library)]


def test_shared_memory_past_the_static_limit_is_asked_for_and_given(driver: Driver) -> None:
    """The fake refuses a launch whose dynamic bytes differ from the attribute."""
    q = torch.zeros(1, 1, 20, 16, dtype=torch.float16)
    with dot2.running_on(twin_on(driver, Written(55808))):
        attnproof.attention(q, q, q, backend="dot2")
    assert [55808] == [launch.shared for launch in fake.recorded(driver.library)]


def test_a_failing_driver_call_is_named(driver: Driver) -> None:
    q = torch.zeros(1, 1, 20, 16, dtype=torch.float16)
    with (
        dot2.running_on(twin_on(driver, Written(ptx="nonsense"))),
        pytest.raises(DriverError, match="cuModuleLoadData failed with CUDA_ERROR_INVALID_PTX"),
    ):
        attnproof.attention(q, q, q, backend="dot2")


PTX = """.version 9.0
.visible .entry attn_forward(
)
{
\t// demoted variable
\t.shared .align 16 .b8 _ZZ12attn_forwardE6q_tile[40008];
\t// demoted variable
\t.shared .align 16 .b8 _ZZ12attn_forwardE7weights[SIZE];
\tmov.u64 \t%rd1, _ZZ12attn_forwardE6q_tile;
\tld.shared.u32 \t%r1, [_ZZ12attn_forwardE7weights+12];
}
"""


def test_static_arrays_within_the_limit_stay_as_they_are() -> None:
    within = PTX.replace("SIZE", "9144")
    assert nvrtc.Image(within, 0) == nvrtc.placed(within)


def test_static_arrays_past_the_limit_follow_each_other_in_one_dynamic_array() -> None:
    """The second starts at the next multiple of 16 after the first; nothing of the old names is left."""
    made = nvrtc.placed(PTX.replace("SIZE", "9145"))
    assert 40016 + 9145 == made.dynamic
    assert ".extern .shared .align 16 .b8 twin_shared[];\n.visible .entry" in made.ptx
    assert "mov.u64 \t%rd1, twin_shared+0;" in made.ptx
    assert "[twin_shared+40028];" in made.ptx
    assert "_ZZ" not in made.ptx


def test_a_text_with_vectors_of_another_form_is_refused() -> None:
    """A typedef that is not rewritten would silently become a scalar: NVRTC ignores the attribute."""
    with pytest.raises(ValueError, match="expected vector typedefs"):
        nvrtc.translated("typedef u32 u32x4 __attribute__((ext_vector_type(4), aligned(8)));")


def test_every_kernel_compiles_as_cuda(
    rtc: nvrtc.Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One variant of each at least, all options on; `tools/mi50_twin.py compile` takes every kernel of the suite."""
    monkeypatch.setattr(nvrtc, "kept", lambda: tmp_path)
    wide = Case(
        "wide", B=1, H=1, Hkv=1, M=70, N=70, D=256, Dv=256, dtype="bfloat16", options={"causal": True}
    )
    wanted = compile_twin.variants([SMALL, PARTS, wide])
    images = {variant: rtc.image(variant) for variant in wanted}
    assert {"attn_forward", "attn_combine", "attn_stats", "attn_dsink", "attn_dq", "attn_dkdv", "attn_dbias", "attn_kinds"} == {
        variant.name for variant in wanted
    }  # fmt: skip
    for variant, image in images.items():
        assert f".visible .entry {variant.name}(" in image.ptx
        assert ".target sm_90" in image.ptx
        assert (
            not variant.name.startswith("attn_d") or "fma.rn.f32" in image.ptx or variant.name == "attn_dsink"
        )
    assert len(list(tmp_path.glob("*.ptx"))) == len(wanted)
    assert images[wanted[0]] == rtc.image(wanted[0]), "kept by text and flags"


def test_the_struct_has_the_same_offsets_for_nvrtc_and_the_packer(rtc: nvrtc.Compiler) -> None:
    """Where the compiler that makes the twin reads each field from."""
    layout, text = arguments.layout(), nvrtc.translated(source.inline("args.h"))
    names = [name for name, _ in layout._fields_]
    text += "".join(
        f'extern "C" __global__ void read_{name}(Args a, u64* to) {{ *to = (u64)a.{name}; }}\n'
        for name in names
    )
    ptx = rtc.compile(text)
    load = re.compile(r"ld\.param\.\w+ \s*%\w+, \[read_(\w+)_param_0(?:\+(\d+))?\];")
    assert {name: getattr(layout, name).offset for name in names} == {
        name: int(at or 0) for name, at in load.findall(ptx)
    }
    assert len(names) == ptx.count(f"_param_0[{ctypes.sizeof(layout)}]")


def test_half_precision_and_vectors_of_the_words_are_what_clang_has(rtc: nvrtc.Compiler) -> None:
    """Sizes, alignment and bit casts that the kernels rely on."""
    facts = """
    static_assert(sizeof(f16) == 2 && alignof(f16) == 2, "f16");
    static_assert(sizeof(f16x2) == 4 && alignof(f16x2) == 4, "f16x2");
    static_assert(sizeof(u32x2) == 8 && alignof(u32x2) == 8, "u32x2");
    static_assert(sizeof(u32x4) == 16 && alignof(u32x4) == 16, "u32x4");
    static_assert(__builtin_bit_cast(u32, TwinVector<u16, 2>{1, 2}) == 0x20001u, "order");
    """
    rtc.compile(nvrtc.translated(source.inline("device.h")) + facts)


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    return [random_case(seed) for seed in range(600)]


def test_random_calls_meet_every_option_and_every_way_of_storing_rows(drawn: list[Case]) -> None:
    options = {name for case in drawn for name in case.options}
    assert {"causal", "align", "window", "softcap", "dropout_p", "scale", "layout", "num_splits"} == options
    assert {"dense", "packed", "cached", "paged"} == {case.rows for case in drawn}
    assert {"float16", "bfloat16", "float32"} == {case.dtype for case in drawn}
    assert {"", "prefix", "prefixes", "segments"} == {case.mask for case in drawn}
    seldom: list[Callable[[Case], bool]] = [
        lambda case: case.D > 256, lambda case: case.D % 8 > 0, lambda case: case.D != case.Dv, lambda case: bool(case.keep),
        lambda case: bool(case.bias), lambda case: bool(case.alibi), lambda case: case.sink, lambda case: case.append > 0,
        lambda case: case.M * case.N == 0, lambda case: len(case.dead) > 0, lambda case: case.H > case.Hkv,
    ]  # fmt: skip
    assert [True] * len(seldom) == [any(map(each, drawn)) for each in seldom]


def test_a_seed_says_all_of_a_call(drawn: list[Case]) -> None:
    """Or a failure could not be seen again."""
    assert drawn[:20] == [random_case(seed) for seed in range(20)]
    rngs = [np.random.default_rng(5) for _ in range(2)]
    x = torch.randn(2, 3, 5, 8)
    left, right = ([loosened(x, rng) for _ in range(40)] for rng in rngs)
    assert [each.stride() for each in left] == [each.stride() for each in right]
    assert all(torch.equal(each, x) for each in left)
    assert any(each.data_ptr() % 16 for each in left)
    assert any(each.stride(-1) != 1 for each in left)
    assert any(not each.is_contiguous() and each.stride(-1) == 1 for each in left)


def test_without_a_gpu_the_fuzz_runs_nothing_and_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    command = [sys.executable, "tools/mi50_twin.py", "fuzz", "--minutes", "0.1", "--into", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (1, "torch sees no GPU: nothing was run\n") == (done.returncode, done.stdout)
    assert [] == list(tmp_path.iterdir())
