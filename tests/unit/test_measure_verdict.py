"""The judge of timed calls where the tensors are on a device: it says what the one on the host says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attnproof.measure import bench, implementations  # noqa: E402
from attnproof.measure.shapes import Shape  # noqa: E402
from attnproof.measure.verdict import DeviceJudge, Judge, solved_by_torch  # noqa: E402
from attnproof.verify.expected import expected  # noqa: E402
from attnproof.verify.numerics import CLASSES, hard_bound  # noqa: E402

RIGHT = implementations.load("eager")


def test_the_oracle_on_a_device_answers_as_on_the_host() -> None:
    """Long gradients are judged by it; here torch's CPU stands for the device."""
    shape = Shape(2, 4, 48, 16, Hkv=2, dtype="bfloat16", causal=True, run="both")
    judge = Judge(shape, tensors := bench.make_inputs(shape, "cpu", 0))
    inputs = judge.inputs
    cut = [judge._cut(label, tensor) for label, tensor in zip(("q", "k", "v", "dout"), tensors, strict=True)]
    host, device = expected(inputs), solved_by_torch(inputs, cut)
    assert {"out", "dq", "dk", "dv"} == set(host.tensors) == set(device.tensors)
    for name, terms in host.tensors.items():
        for term, value in vars(terms).items():
            assert np.allclose(value, getattr(device.tensors[name], term), rtol=1e-12, atol=1e-13), (
                name,
                term,
            )
    assert np.allclose(host.lse, device.lse) and np.array_equal(host.dead, device.dead)


LONG = Shape(1, 2, 300, 16, Hkv=1, dtype="bfloat16", causal=True, run="both")


def judged_pair(shape: Shape) -> tuple[Judge, DeviceJudge, dict[str, Any]]:
    """Both judges of one call, and what a right kernel returned; torch's CPU stands for the device."""
    tensors = bench.make_inputs(shape, "cpu", 0)
    q, k, v = (x.detach().float().requires_grad_() for x in tensors[:3])
    out = RIGHT.run(q, k, v, shape)
    grads = torch.autograd.grad(out, (q, k, v), tensors[3].float())
    found = (x.detach().bfloat16() for x in (out, *grads))
    outputs = dict(zip(("out", "dq", "dk", "dv"), found, strict=True))
    return Judge(shape, tensors), DeviceJudge(shape, tensors), outputs


def test_both_judges_agree_about_a_right_call() -> None:
    """Hard bounds of every row, on the device as on the host; z of sampled rows only there."""
    host, device, outputs = judged_pair(LONG)
    a, b = host("mine", "flash", outputs), device("mine", "flash", outputs)
    assert (True, True) == (a.green, b.green), (a, b)
    assert a.used == pytest.approx(b.used)
    assert 128 < len(device.rows["dk"]) < 160
    assert "all rows by their bound" in device.part


@pytest.mark.parametrize("label", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("damage", [4.0, float("nan")])
def test_one_element_in_a_row_that_is_not_sampled_is_found_on_the_device(label: str, damage: float) -> None:
    """Statistics of a sample cannot see it; a tile that is wrong in one place is what kernels do."""
    _, judge, outputs = judged_pair(LONG)
    row = next(at for at in range(LONG.N) if at not in judge.rows[label])
    outputs[label][0, 0, row, 3] += damage
    found = judge("mine", "flash", outputs)
    assert not found.green
    assert f"{label}: hard bound" in found.reason


def test_a_lean_in_every_row_is_found_by_the_sampled_statistics() -> None:
    """Too small for any bound, but in every element."""
    _, judge, outputs = judged_pair(LONG)
    outputs["out"] = (judge.exact["out"].value * (1 + 0.8 * 2**-8)).bfloat16()
    found = judge("mine", "flash", outputs)
    assert not found.green
    assert found.reason.startswith("out: ") and "hard bound" not in found.reason


def test_the_bound_of_torchs_terms_is_that_of_numpys() -> None:
    _, judge, _ = judged_pair(LONG)
    host = expected(judge.inputs)
    for kind in CLASSES.values():
        for label, terms in judge.exact.items():
            wanted = hard_bound(host.tensors[label], "bfloat16", kind)
            assert np.allclose(wanted, hard_bound(terms, "bfloat16", kind).numpy(), rtol=1e-9, atol=1e-15)
