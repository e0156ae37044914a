"""Packed rows and masks by bounds on the Hopper backend: descriptors, masks of edge tiles, and the lists of tiles.

What lists say, and what kernels make of it, is checked in processes of their own, see the scripts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.experimental.gluon")

from attnproof.backends.hopper import arguments, configs  # noqa: E402

from .test_hopper import BANDS, PIECES, band, seen  # noqa: E402

ROOT = Path(__file__).parents[2]


def run(script: str) -> str:
    """What a script of this folder says; it fails with what it found."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script))],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == found.returncode, found.stderr[-3000:]
    return found.stdout


@pytest.mark.slow
def test_lists_hold_every_tile_once_and_no_visible_pair_is_left_out() -> None:
    """A tile too few loses rows or keys, a full one too many shows keys that are masked, a wrong place reads other rows."""
    assert "every list is right" in run("hopper_listing_model.py")


@pytest.mark.slow
def test_the_kernels_own_source_is_right_and_never_waits_for_ever_on_a_machine_of_threads() -> None:
    """Rows of another sequence, a stage handed back too early, a barrier that nobody reaches: a device would hang on the last."""
    assert "every run is right" in run("hopper_machine_runs.py")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_ragged_descriptor_ends_where_a_sequence_ends(dtype: torch.dtype) -> None:
    """Addresses wrap at 2^64: were the sum off by a row, every packed sequence would read another's rows."""
    x = torch.zeros(700, 6, 80, dtype=dtype)[:, ::2].transpose(0, 1)
    found = arguments.ragged(x, 64, 128)
    assert [1, 1, 1, 64, 128] == found.block_shape
    bytes_of = x.element_size()
    assert all(0 < step * bytes_of < 2**40 and step * bytes_of % 16 == 0 for step in found.strides[:-1])
    assert all(0 < length < 2**31 for length in found.shape)
    for first, length in ((0, 1), (0, 700), (5, 130), (699, 1), (700, 0)):
        for row in (0, 1, 63, 64, length - 1, length, length + 200):
            if row < 0:
                continue
            at = (
                arguments.FAR,
                first + length,
                2,
                arguments.FAR - length + row,
                7,
            )  # as ``state.query_origin``
            assert all(place < size for place, size in zip(at[:3], found.shape[:3], strict=True))
            assert (at[3] < found.shape[3]) == (row < length)
            offset = sum(place * step for place, step in zip(at, found.strides, strict=True)) * bytes_of
            right = ((first + row) * x.stride(1) + 2 * x.stride(0) + 7) * bytes_of
            assert right == offset % 2**64


@pytest.mark.parametrize("options", BANDS, ids=str)
def test_an_edge_tile_of_a_packed_sequence_hides_exactly_what_is_not_seen(options: dict[str, Any]) -> None:
    """The corner of a top-left mask depends on the lengths of the sequence."""
    problem = replace(band(**options), rows="packed", tokens=(900, 900))
    facts = configs.facts(problem)
    sizes = SimpleNamespace(left=problem.left, right=problem.right)
    for m, n in [(1, 1), (65, 200), (200, 65), (130, 130), (20, 0)]:
        tile = SimpleNamespace(n_rows=m, n_keys=n, row=300)
        wide = np.concatenate([seen(replace(problem, M=m, N=n)), np.zeros((m, 64), bool)], axis=1)
        for first in range(0, n + 1, 64):
            s = np.zeros((m, 64), np.float32)
            hidden = PIECES.hide_listed(s, np.arange(m), np.arange(64), first, tile, sizes, facts)
            part = wide[:, first : first + 64]
            assert (part == np.isfinite(hidden[:, : part.shape[1]])).all()
