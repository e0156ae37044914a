"""The planner's estimates against what the compiler says today about our kernels; no GPU is needed."""

from __future__ import annotations

import warnings

import pytest

from attnproof.ledger.hardware import KIB, get
from attnproof.ledger.resources import STYLES, Job, Tile
from attnproof.ledger.tiles import candidate
from attnproof.problem import Options, bind

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
offline = pytest.importorskip("attnproof.backends.triton.offline")
configs = pytest.importorskip("attnproof.backends.triton.configs")


def plan_of(kernel: str, d: int, at: Tile):
    """The launch plan and the arrays of one of our kernels with a given tile, as the launcher builds them."""
    from attnproof.backends.triton import launch, registry

    config = configs.Config(at.block_q, at.block_k, at.warps, at.stages, tma=True)
    q, k, v = (torch.zeros(1, 2, 512, d, dtype=torch.float16) for _ in range(3))
    problem, tensors = bind(q, k, v, Options())
    with registry.rehearse("sm90", {kernel: config}) as rehearsal:
        launch.forward(problem, tensors)
        launch.backward(problem, tensors, q, torch.zeros(1, 2, 512), q, None, frozenset("qkv"))
    return next((plan, arrays) for tag, plan, arrays in rehearsal.plans if tag == kernel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "d", "at"),
    [
        ("forward", 64, Tile(64, 128, 4, 1)),
        ("forward", 128, Tile(128, 128, 8, 2)),
        ("dkdv", 64, Tile(64, 64, 4, 2)),
        ("dq", 128, Tile(64, 64, 4, 2)),
    ],
    ids=str,
)
def test_estimates_hold_for_what_is_compiled_here(kernel, d, at) -> None:
    plan, arrays = plan_of(kernel, d, at)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler talks about its own coming defaults
        compiled = offline.compile_plan(plan, tuple(plan.described(tuple(arrays))), "sm90")
    reported = offline.resources(compiled, "sm90")
    estimated = candidate(get("h200"), Job("float16", d, d, kernel), STYLES["wgmma"], at)
    needed = reported.registers + reported.spills // 4
    assert abs(estimated.registers - needed) <= 0.2 * needed
    assert abs(estimated.shared_bytes - reported.shared) <= max(0.02 * reported.shared, KIB)
