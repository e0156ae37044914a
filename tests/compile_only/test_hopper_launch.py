"""A launch of the Hopper kernel up to the driver, which is a fake: Triton compiles and binds, the C launcher fills in.

Everything between the public tensors and cuLaunchKernel runs here as it does on the GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.experimental.gluon")

import triton
from tests.unit import hopper_fakes

CALLS = """
import json, os, re, sys
from tests.unit import hopper_fakes
hopper_fakes.preload(sys.argv[1])
import torch
from triton.runtime import driver
driver.set_active(hopper_fakes.Driver())
from attnproof.backends.hopper import launch, offline
from attnproof.problem import Options, bind
torch._C._cuda_getCurrentRawStream = lambda device: 0x57
counter = torch.zeros(2, dtype=torch.int32)
launch.counters.pair = lambda device, stream: counter
launch.multiprocessors = lambda device: 5
q = torch.zeros(2, 300, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
k, v = (torch.zeros(2, 200, 2, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
problem, tensors = bind(q, k, v, Options(causal=True, window=(70, -1)))
plan = launch.plan_of(problem, tensors)
out, lse = launch.empty_out(problem, q), torch.empty(2, 4, 300)
launch.run(plan, tensors, out, lse)
bound = hopper_fakes.Launcher.calls[-1][-26:]
entry = offline.compile_facts(plan.facts).asm["ptx"].split(".entry")[1].split(")")[0]
kinds = {"b8": "m", "u32": "i", "u64": "l", "f32": "f"}
letters = "".join(kinds[x] for x in re.findall(r"[.]param.*?[.](b8|u32|u64|f32)", entry))
os.environ["FAKE_PARAMETERS"] = letters
def described(source):
    # 3.9 lists constants among the attributes, with none
    return source.signature, source.constants, {at: x for at, x in source.attrs.items() if x}
print(json.dumps({
    "same": described(hopper_fakes.Launcher.source) == described(offline.source(plan.facts)),
    "bound": [x for x in bound if type(x) in (int, float)],
    "fast": plan.fast is not None,
    "letters": letters,
    "addresses": [x.data_ptr() for x in (lse, counter)],
    "bytes": [x.data_ptr() & 255 for x in (q, k, v, out)],
}), flush=True)
if plan.fast is not None:
    launch.run(plan, tensors, out, lse)
"""
PACKED_CALLS = """
import json, os, re, sys
from tests.unit import hopper_fakes
hopper_fakes.preload(sys.argv[1])
import torch
from triton.runtime import driver
driver.set_active(hopper_fakes.Driver())
from attnproof.backends.hopper import launch, listings, offline
from attnproof.backends.triton import compat, registry
from attnproof.problem import Options, bind_varlen
torch._C._cuda_getCurrentRawStream = lambda device: 0x57
compat.current_device = lambda: 0
counter = torch.zeros(2, dtype=torch.int32)
launch.counters.pair = lambda device, stream: counter
launch.multiprocessors = lambda device: 5
registry.device_of = None
q, k, v = (torch.zeros(300, h, 64, dtype=torch.bfloat16) for h in (4, 2, 2))
cu = torch.tensor([0, 100, 300], dtype=torch.int32)
bounds = torch.zeros(300, 2, dtype=torch.int32)
problem, tensors = bind_varlen(q, k, v, cu, cu, 200, 200, Options(causal=True))
plan = launch.plan_of(problem, tensors)
out, lse = launch.empty_out(problem, tensors.q), torch.empty(4, 300)
launch.run(plan, tensors, out, lse)
listing, walking = (x[9:] for x in hopper_fakes.Launcher.calls)
entry = offline.compile_facts(plan.facts).asm["ptx"].split(".entry")[1].split(")")[0]
kinds = {"b8": "m", "u32": "i", "u64": "l", "f32": "f"}
letters = "".join(kinds[x] for x in re.findall(r"[.]param.*?[.](b8|u32|u64|f32)", entry))
os.environ["FAKE_PARAMETERS"] = letters
def described(source):
    return source.signature, source.constants, {at: x for at, x in source.attrs.items() if x}
print(json.dumps({
    "same": described(hopper_fakes.Launcher.source) == described(offline.source(plan.facts)),
    "listing": [x for x in listing if type(x) in (int, str, bool)],
    "bound": [x for x in walking if type(x) is int][-12:],
    "fast": plan.fast is not None,
    "letters": letters,
    "bytes": [x.data_ptr() & 255 for x in (q, k, v, out)],
}), flush=True)
if plan.fast is not None:
    launch.run(plan, tensors, out, lse)
"""
# scale .. lift, strides of slopes and sink, M, N, H, group, left, right, slots, planes, together
INTEGERS = [0, 0, 0, 300, 200, 4, 2, 70, 0, 3, 8, 8]


def run_with_fakes(calls: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", calls, str(hopper_fakes.library(folder))],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "FAKE_PARAMETERS": ""},
    )


@pytest.mark.slow
@pytest.mark.skipif(not hopper_fakes.BUILDS, reason="needs a C compiler and Python's headers")
def test_a_launch_binds_what_was_compiled_offline_and_the_launcher_fills_in_its_parameters(
    tmp_path: Path,
) -> None:
    """Were the runtime to specialise otherwise, what the matrix proves would not be what runs."""
    run = run_with_fakes(CALLS, tmp_path)
    found = next(json.loads(line) for line in run.stdout.splitlines() if line.startswith("{"))
    assert found["same"]
    assert INTEGERS == found["bound"][5:17]
    assert triton.__version__.startswith("3.6.") == found["fast"]
    if not found["fast"]:
        return
    assert "miiiillll" * 4 + "llll" + "fffff" + "i" * 12 + "ll" == found["letters"]
    launch = next(line for line in run.stdout.splitlines() if line.startswith("launch"))
    assert re.match(rf"launch {hopper_fakes.FUNCTION:x} 5 1 1 384 \d+ 57 ", launch)
    values = launch.split()[8:]
    assert [f"m0,{x}" for x in found["bytes"]] == [x for x in values if x.startswith("m")]
    assert ["2", "4", "300", "64", str(300 * 4 * 64), "64", "256", "1"] == values[1:9]
    lse, counter = (str(x) for x in found["addresses"])
    assert [lse, counter, lse, lse] == values[36:40]
    assert [str(x) for x in INTEGERS] == values[45:57]
    assert ["0", "0"] == values[57:]


@pytest.mark.slow
@pytest.mark.skipif(not hopper_fakes.BUILDS, reason="needs a C compiler and Python's headers")
def test_a_packed_launch_describes_rows_that_end_where_sequences_do(tmp_path: Path) -> None:
    """Two axes that only move the address, and a row axis that every sequence ends at."""
    run = run_with_fakes(PACKED_CALLS, tmp_path)
    found = next(json.loads(line) for line in run.stdout.splitlines() if line.startswith("{"))
    assert found["same"]
    # token counts, sequences, band, slots; tiles; packed, left, right, top left, bounds
    assert [300, 300, 2, 2**30, 0, 5, 128, 128, 128] == [x for x in found["listing"] if type(x) is int]
    assert [True, False, True, False, False] == [x for x in found["listing"] if type(x) is bool]
    assert [0, 0, 0, 300, 300, 4, 2, 2**30, 0, 5, 4, 4] == found["bound"]
    assert triton.__version__.startswith("3.6.") == found["fast"]
    if not found["fast"]:
        return
    assert "miiiiilllll" * 4 + "lllll" + "fffff" + "i" * 12 + "ll" == found["letters"]
    maps = [line.split()[5:] for line in run.stdout.splitlines() if line.startswith("map 9")]
    step = 4 * 64
    lengths = ["64", str(2**30), "4", str(0x7FFF0000), str(0x7FFF0000)]
    bytes_ = [str(2 * x) for x in (step, 64, step, 2**34 - step)]
    assert [*lengths, *bytes_, "64", "64", "1", "1", "1"] == maps[-4]
    launch = next(line for line in run.stdout.splitlines() if line.startswith("launch"))
    values = launch.split()[8:]
    assert [f"m0,{x}" for x in found["bytes"]] == [x for x in values if x.startswith("m")]
    assert [*reversed(lengths), str(2**34 - step), str(step), "64", str(step), "1"] == values[1:11]
