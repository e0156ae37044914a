"""The Triton kernels without a GPU: the parity suite in Triton's interpreter, in a process of its own.

The interpreter is chosen when kernels are decorated, so it cannot be switched on in a process that has imported them. This
runs one case of each feature; `TRITON_INTERPRET=1 pytest tests/parity -k triton` runs all, which takes far longer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
# named cases of tests/parity/problems.py; together they reach every branch of every kernel that the interpreter can run
FORWARD = (
    "float16, causal with dead rows",
    "bfloat16, everything",
    "window 3, 0, causal",
    "segments and a boolean mask",
    "first tiles hidden by a window",
    "negative scale",
    "dropout past one tile",
    "paged, bfloat16",
    "cached, append of one",
    "packed, everything",
    "packed, rows past the end",
)
GRADIENTS = (
    "bfloat16, everything",
    "float32, bmhd",
    "3 heads on 1",
    "mask BHMN",
    "bias 1H1N",
    "alibi, causal, more queries",
    "sink and dead rows",
    "softcap and bias",
    "segments and causal",
    "dropout, causal",
    "packed, alibi",
    "packed, top left",
)
# of the case list: what a named case cannot say
CASES = (
    "tests/parity/test_cases_gradients.py::"
    "test_the_gradient_through_lse_counts_and_dead_rows_take_none[float32-triton-torch]",
)


def identifiers(test: str, cases: tuple[str, ...]) -> list[str]:
    return [f"tests/parity/test_suite.py::{test}[triton-torch-{case}]" for case in cases]


@pytest.mark.slow
def test_the_kernels_agree_with_the_oracle_in_the_interpreter() -> None:
    """Everything but speed and memory: tiles, masks, scores, dropout, packing, pages, all gradients."""
    wanted = [
        *identifiers("test_out_and_lse_are_right", FORWARD),
        *identifiers("test_every_gradient_is_right", GRADIENTS),
        *CASES,
    ]
    run = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("interpreted.py")),
            "-q",
            "-p",
            "no:cacheprovider",
            *wanted,
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == run.returncode, run.stdout[-3000:] + run.stderr[-1000:]
    assert f"{len(wanted)} passed" in run.stdout
