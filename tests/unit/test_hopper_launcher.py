"""The C launcher of the Hopper backend above a driver that only writes down what it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.experimental.gluon")

from . import hopper_fakes

CALLS = """
import sys
from tests.unit import hopper_fakes
hopper_fakes.preload(sys.argv[1])
import torch
from attnproof.backends.hopper import arguments, launcher
x = torch.zeros(2, 100, 3, 80, dtype=torch.bfloat16).transpose(1, 2)
descriptor = arguments.descriptor(x, 64, 128)
one = launcher.map_bytes(descriptor, {"block_size": [1, 1, 64, 64], "swizzle": 3})
plan = launcher.pack((0xF00D, 132, 416, 200000), [one], 2, (0.5, -7))
launch = launcher.module().launch
launch(plan, 0x57, 0x1234567890AB, 2**62 + 1, 2**40)
for bad in ((plan, 1, 2), (plan[:-1], 1, 2, 3, 4), (plan, 1, 0xDEAD00, 3, 4), (plan, 1, "x", 3, 4), (b"", 1)):
    try:
        launch(*bad)
    except (TypeError, RuntimeError) as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.mark.skipif(not hopper_fakes.BUILDS, reason="needs a C compiler and Python's headers")
def test_the_driver_gets_what_the_plan_says(tmp_path: Path) -> None:
    """A byte off between the Python that packs a plan and the C that reads it is a wrong result or a fault on the GPU."""
    run = subprocess.run(
        [sys.executable, "-c", CALLS, str(hopper_fakes.library(tmp_path))],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "FAKE_PARAMETERS": "miiiillllllfill"},
    )
    lines = run.stdout.splitlines()
    maps = [line for line in lines if line.startswith("map 9 3 0 0")]
    asked = [line for line in lines if line not in maps]
    assert "map 9 3 0 0 80 100 3 2 480 160 48000 64 64 1 1" == maps[0]
    assert (
        "launch f00d 132 1 1 416 200000 57 m0,171 2 3 100 80 24000 80 240 1"
        " 4611686018427387905 1099511627776 0.5 -7 0 0" == asked[0]
    )
    assert [
        "TypeError launch: the plan does not fit the arguments",
        "TypeError launch: the plan does not fit the arguments",
        "RuntimeError tensor map 0: driver error 1",
        "TypeError launch: expected a plan, a stream and addresses",
    ] == [line for line in asked[1:] if "integer" not in line]
    assert any("integer" in line for line in asked[1:])
