"""The judge is judged: the oracle against torch's autograd, and the tolerance against planted mistakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from .oracle import Head, attend, heads, philox
from .problems import Array, Case, draw, everything, packed
from .tolerance import GRADIENTS, assert_close, completed, eager_policy, exact_policy, expected

JUDGED = [
    Case("oracle, plain", dtype="float64"),
    Case("oracle, dead rows", dtype="float64", M=30, N=19, options={"causal": True}, sink=True),
    Case("oracle, sinkless dead rows", dtype="float64", keep="11MN", dead=(0, 4), bias="B11N"),
    everything(Case("oracle, everything", dtype="float64")),
    everything(packed("oracle, everything", (5, 0, 17), (9, 12, 20), dtype="float64")),
]


def torch_head(a: Head, leaves: dict[str, Any]) -> tuple[Any, Any]:
    """Section 2 of the semantics in differentiable torch, with logsumexp for the softmax."""
    import torch

    def tensor(x: Array) -> Any:
        return torch.from_numpy(np.asarray(x, dtype=x.dtype))

    b, h, m, n = (a.at[key] for key in "bhmn")
    q, k, v = leaves["q"][a.at["q"]], leaves["k"][a.at["k"]], leaves["v"][a.at["k"]]
    s = a.scale * (q @ k.T)
    if a.cap:
        s = a.cap * torch.tanh(s / a.cap)
    s = s - leaves["alibi_slopes"][b, h] * tensor(a.distance) + leaves["bias"][b, h, :m, :n]
    s = s.masked_fill(~tensor(a.allowed), -torch.inf)
    if a.sink > -np.inf:
        s = torch.cat([s, leaves["sink"][h].expand(m, 1)], dim=1)
    dead = torch.isneginf(s).all(dim=1, keepdim=True)
    lse = torch.logsumexp(s.masked_fill(dead, 0), dim=1, keepdim=True)
    p = torch.exp(s - lse).masked_fill(dead, 0)[:, :n] * tensor(a.factor)
    return p @ v, lse.masked_fill(dead, -torch.inf)[:, 0]


@pytest.mark.parametrize("case", JUDGED, ids=str)
def test_the_oracle_agrees_with_autograd(case: Case) -> None:
    """A sign or a factor wrong in the oracle would make every backend wrong in the same way."""
    torch = pytest.importorskip("torch")
    x = draw(case)
    zeros = {"bias": np.zeros((1, 1, 1, 1)), "alibi_slopes": np.zeros((1, 1)), "sink": np.zeros(case.H)}
    given = {at: torch.from_numpy(x.get(at, zeros.get(at))).requires_grad_() for at in GRADIENTS}
    full = {"bias": (case.B, case.H, case.M, case.N), "alibi_slopes": (case.B, case.H)}
    leaves = {at: part.expand(full[at]) if at in full else part for at, part in given.items()}
    out, lse = (
        torch.zeros(x["dout"].shape, dtype=torch.float64),
        torch.full(x["dlse"].shape, -torch.inf).double(),
    )
    loss = torch.zeros((), dtype=torch.float64)
    for head in heads(case, x, np.float64):
        o, log_sum = torch_head(head, leaves)
        out[head.at["q"]], lse[head.at["lse"]] = o.detach(), log_sum.detach()
        finite = ~torch.isneginf(log_sum)
        loss = loss + (o * torch.from_numpy(head.dout)).sum()
        loss = loss + (log_sum[finite] * torch.from_numpy(head.dlse)[finite]).sum()
    loss.backward()
    right = expected(case)
    assert_close(out.numpy(), right["out"], "out")
    assert_close(lse.numpy(), right["lse"], "lse")
    for name in GRADIENTS:
        if name in x:
            assert_close(given[name].grad.numpy(), right[name], f"d{name}")


CLEAN = Case("planted", M=70, N=150, H=4, Hkv=2, options={"causal": True}, sink=True, alibi="H")


def eager(case: Case, x: dict[str, Array] | None = None) -> dict[str, Array]:
    """What a plain float32 implementation of the case returns."""
    sums = attend(case, draw(case) if x is None else x, eager_policy("float32", False))
    return {name: part.value for name, part in sums.items()}


def swap_heads(x: dict[str, Array]) -> dict[str, Array]:
    """Key heads read as 0, 1, 0, 1 instead of 0, 0, 1, 1."""
    return {**x, "q": x["q"][:, [0, 2, 1, 3]], "dout": x["dout"][:, [0, 2, 1, 3]]}


MISTAKES = {
    "a scale that is off by a tenth of a percent": (
        replace(CLEAN, options={"causal": True, "scale": 0.25025}),
        None,
    ),
    "the other corner": (replace(CLEAN, options={"causal": True, "align": "top_left"}), None),
    "a window one key too wide": (replace(CLEAN, options={"causal": True, "window": (139, 0)}), None),
    "no sink": (CLEAN, lambda x: {at: part for at, part in x.items() if at != "sink"}),
    "no alibi": (CLEAN, lambda x: {at: part for at, part in x.items() if at != "alibi_slopes"}),
    "other key heads": (CLEAN, swap_heads),
    "inputs rounded to half": (CLEAN, lambda x: {**x, "v": x["v"].astype(np.float16).astype(float)}),
}


def test_the_tolerance_accepts_a_plain_float32_computation() -> None:
    right, got = expected(CLEAN), eager(CLEAN)
    for name in ("out", "lse", *GRADIENTS):
        if name in draw(CLEAN) or name in ("out", "lse"):
            assert_close(got[name], right[name], name)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_tolerance_finds_a_planted_mistake(mistake: str) -> None:
    """A bound that lets these pass would make every comparison of the suite worthless."""
    case, change = MISTAKES[mistake]
    x = draw(CLEAN)
    got = eager(case, x if change is None else change(x))
    with pytest.raises(AssertionError, match="elements are off"):
        assert_close(got["out"], expected(CLEAN)["out"], "out")


def test_a_half_precision_result_is_held_to_its_own_rounding() -> None:
    """Twice the rounding error of float16, not a thousandth of everything."""
    right = expected(Case("float16", dtype="float16"))["out"]
    assert float((right.tolerance / np.abs(right.value).max()).max()) < 2.0**-9


FAINT = Case(
    "heavy keys dropped", dtype="float16", M=64, N=64, D=32, Dv=32, spread=2.0, options={"dropout_p": 0.9}
)


def half_weights(case: Case, *, flush: bool) -> Array:
    """out as a matrix unit makes it of e^(s - max) in half precision, with or without numbers below the normal ones."""
    x = completed(case, draw(case))
    out = np.zeros(x["dout"].shape)
    for a in heads(case, x, np.float64):
        s = a.scale * (a.q @ a.k.T)
        e = np.exp(s - s.max(axis=1, keepdims=True))
        half = np.where(flush & (e < 2.0**-14), 0, e).astype(np.float16).astype(np.float64)
        out[a.at["q"]] = (half * a.factor) @ a.v / e.sum(axis=1, keepdims=True)
    return out.astype(np.float16).astype(np.float64)


def test_weights_below_the_normal_halves_are_given_the_step_between_them() -> None:
    """Found by random calls on a GPU: where dropout takes a row's heavy keys, only such weights are left of it."""
    right = expected(FAINT, half_operands=True)["out"]
    assert_close(half_weights(FAINT, flush=False), right, "out")
    with pytest.raises(AssertionError, match="elements are off"):
        assert_close(half_weights(FAINT, flush=False), expected(FAINT)["out"], "out")


def test_weights_flushed_to_zero_are_found() -> None:
    right = expected(FAINT, half_operands=True)["out"]
    with pytest.raises(AssertionError, match="elements are off"):
        assert_close(half_weights(FAINT, flush=True), right, "out")


def test_a_result_that_sums_nothing_must_be_exactly_zero() -> None:
    case = Case("float16, causal with dead rows", dtype="float16", M=30, N=19, options={"causal": True})
    right = expected(case)
    assert float(right["out"].tolerance[:, :, :11].max()) == 0.0
    assert float(right["q"].tolerance[:, :, :11].max()) == 0.0


def test_nan_is_never_close() -> None:
    right = expected(CLEAN)["out"]
    with pytest.raises(AssertionError, match="elements are off"):
        assert_close(np.full_like(right.value, np.nan), right, "out")


def test_the_exact_policy_is_wider_than_float64_where_the_machine_has_such_a_type() -> None:
    wide = np.finfo(exact_policy("float64").compute).eps
    assert np.finfo(np.longdouble).eps == wide


# the known answers that the authors publish with Random123 for philox4x32-10: counter, key, output
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_the_oracles_generator_gives_the_published_answers(counter: str, key: str, answer: str) -> None:
    assert words(answer) == philox(words(counter), words(key))
