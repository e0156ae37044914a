"""The whole way from text to result without a GPU: compiler, loader, driver call, recorded bytes, interpreted code.

A fake libamdhip64 keeps what ``hipModuleLaunchKernel`` is given; those very bytes are then run by the interpreter. The
compiler is the machine's own hiprtc where there is one, else clang behind the same interface.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnproof
from attnproof import gcn
from attnproof.backends import dot2
from attnproof.backends.dot2 import arguments, compiler, libraries, loader, planned, prebuilt, source
from attnproof.backends.dot2.variants import Step
from attnproof.errors import BackendMissing
from attnproof.problem import Problem

from . import fake
from .interpreter import storage_of

STREAM = 0x1234
ARCHITECTURE = "gfx906:sramecc+:xnack-"


def hiprtc() -> compiler.Compiler | None:
    """The run-time compiler of this machine, if it has one."""
    runtime = libraries.load(libraries.RUNTIME)
    found = None if runtime is None else libraries.load_compiler(*runtime)
    return None if found is None else compiler.Compiler.of(found[0])


class Clang:
    """clang behind the interface of ``Compiler``."""

    version = "clang"

    def compile(self, text: str, flags: tuple[str, ...], architecture: str) -> bytes:
        from attnproof.backends.dot2.variants import Variant

        return prebuilt.clang(Variant("attn_forward", flags), architecture, text=text)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> loader.Device:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: Any = hiprtc() or Clang()
    return loader.Device(loader.Runtime(fake.build(tmp_path), made), ARCHITECTURE, 2, lambda: STREAM)


class Recorder:
    """Passes steps to a device and keeps their arrays alive."""

    def __init__(self, device: loader.Device) -> None:
        self.device, self.units = device, device.units
        self.steps: list[Step] = []
        self.images: list[bytes] = []

    def __call__(self, step: Step) -> None:
        self.steps.append(step)
        self.images.append(self.device.code_object(step.variant))
        self.device.run(step)


def replay(launch: fake.Launch, step: Step, image: bytes) -> None:
    """Run recorded bytes; every pointer in them must lie in an array of the step, and is moved with it."""
    memory, moved = gcn.Memory(), {}
    for x in step.arrays.values():
        start, raw = storage_of(x)
        if raw.size and start not in moved:
            moved[start] = (len(raw), memory.place(raw, writable=True))
    values = arguments.unpack(launch.raw)
    for name, kind in arguments.layout()._fields_:
        if kind is not ctypes.c_uint64 or not values[name]:
            continue
        start = max(at for at in moved if at <= values[name])
        size, address = moved[start]
        assert values[name] - start < size, f"{name} points outside every array"
        values[name] += address - start
    gcn.launch(
        gcn.CodeObject.load(image), launch.name, grid=launch.grid, block=launch.block,
        kernarg=arguments.pack(values), memory=memory, counts=False,
    )  # fmt: skip


def test_recorded_launches_compute_attention_and_its_gradients(device: loader.Device) -> None:
    """Source, compiler, packing, launch call and instructions in one chain."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((1, 2, 20, 32), (1, 1, 40, 32), (1, 1, 40, 32))
    q, k, v = (torch.randn(shape, generator=generator).half() for shape in shapes)
    problem = attnproof.problem.bind(q, k, v, attnproof.problem.Options(causal=True)).problem
    run = Recorder(device)
    with dot2.running_on(run):
        out, lse = attnproof.attention_with_lse(q, k, v, causal=True, backend="dot2")
        first = fake.recorded(device.runtime.hip)
        for launch, step, image in zip(first, run.steps, run.images, strict=True):
            replay(launch, step, image)
        grads = attnproof.dispatch.backward(
            attnproof.dispatch.load("dot2"), problem, attnproof.problem.Tensors(q, k, v), out, lse, out, None, frozenset("qkv")
        )  # fmt: skip
    launches = fake.recorded(device.runtime.hip)
    for launch, step, image in list(zip(launches, run.steps, run.images, strict=True))[len(first) :]:
        replay(launch, step, image)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    right = attnproof.attention(*wide, causal=True, backend="streaming")
    wanted = torch.autograd.grad(right, wide, out.double())
    assert ["attn_forward", "attn_stats", "attn_dkdv", "attn_dq"] == [launch.name for launch in launches]
    assert {(STREAM, 0, (256, 1, 1))} == {(each.stream, each.shared, each.block) for each in launches}
    for got, want in zip((out, *grads[:3]), (right, *wanted), strict=True):
        np.testing.assert_allclose(got.double().numpy(), want.detach().numpy(), atol=4e-3, rtol=4e-3)


def test_a_failing_driver_call_is_named(device: loader.Device) -> None:
    device.runtime.hip.fake_fail(209)
    q = torch.zeros(1, 1, 16, 16, dtype=torch.float16)
    with (
        dot2.running_on(device.run),
        pytest.raises(BackendMissing, match="hipModuleLoadData failed with hipErrorNoBinary"),
    ):
        attnproof.attention(q, q, q, backend="dot2")


def test_large_grids_are_launched_in_pieces(device: loader.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime counts work items in 32 bits; the pieces must add up to the whole."""
    monkeypatch.setattr(loader, "MAX_LAUNCH", 3)
    q = torch.zeros(1, 4, 128, 16, dtype=torch.float16)
    with dot2.running_on(device.run):
        attnproof.attention(q, q, q, backend="dot2")
    launches = fake.recorded(device.runtime.hip)
    assert [3, 3, 2] == [launch.grid[0] for launch in launches]
    assert [0, 3, 6] == [arguments.unpack(launch.raw)["first_group"] for launch in launches]


@pytest.mark.parametrize("architecture", ["gfx906", ARCHITECTURE, "gfx1030"])
def test_the_run_time_compiler_takes_the_shipped_text(architecture: str) -> None:
    """The string that a user's machine compiles, by a real hiprtc, which needs neither GPU nor driver."""
    made = hiprtc()
    if made is None:
        pytest.skip("no libhiprtc here (Debian: libamdhip64-5 and libhiprtc-builtins5)")
    problem = Problem("float16", "cuda", 1, 8, 8, 512, 512, 128, 128, right=0)
    for variant in planned.variants(problem, gradients=architecture == "gfx906"):
        raw = made.compile(source.text(variant.kernel), variant.flags, architecture)
        assert raw.startswith(compiler.ELF)
        if architecture == "gfx906":
            kernel = gcn.CodeObject.load(raw).kernels[variant.name]
            print(f"{made.version}: {variant.name} {kernel.vgprs} registers, {kernel.vgpr_spills} spilled")
            assert 0 == kernel.vgpr_spills + kernel.sgpr_spills + kernel.scratch_bytes


def test_a_compiler_error_is_shown_with_its_log() -> None:
    made = hiprtc()
    if made is None:
        pytest.skip("no libhiprtc here (Debian: libamdhip64-5 and libhiprtc-builtins5)")
    with pytest.raises(compiler.CompileError, match=r"unknown type name 'nonsense'"):
        made.compile("nonsense x;", (), "gfx906")
