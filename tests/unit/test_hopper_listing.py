"""Lists of tiles that the Hopper kernels walk; what they say is checked in a process of its own, see the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.experimental.gluon")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_lists_hold_every_tile_once_and_no_visible_pair_is_left_out() -> None:
    """A tile too few loses rows or keys, a full one too many shows keys that are masked, a wrong place reads other rows."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("hopper_listing_model.py"))],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == run.returncode, run.stderr[-3000:]
    assert "every list is right" in run.stdout
