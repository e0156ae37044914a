"""The oracle must be right before it may judge: multi-precision arithmetic, torch's float64 autograd, closed forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attnproof.cases import Case, find
from attnproof.verify import philox_oracle
from attnproof.verify.audit import audit
from attnproof.verify.expected import control, expected, question, sampled_rows
from attnproof.verify.inputs import build
from attnproof.verify.oracle import Question, solve

SMALL = Case(name="small", group="test", B=2, H=4, Hkv=2, M=7, N=9, D=5, Dv=6, dtype="float64", backward=True)
VARIANTS = {
    "plain": SMALL,
    "causal": replace(SMALL, causal=True),
    "top left": replace(SMALL, causal=True, align="top_left"),
    "more queries": replace(SMALL, causal=True, M=11, N=4),
    "window": replace(SMALL, window=(3, 1)),
    "mask with dead rows": replace(SMALL, keep="dead_rows", keep_axes="BHMN"),
    "softcap": replace(SMALL, softcap=1.5),
    "alibi": replace(SMALL, alibi=True),
    "sink": replace(SMALL, sink=True),
    "bias": replace(SMALL, bias="normal", bias_axes="1H1N"),
    "everything": replace(
        SMALL,
        causal=True,
        window=(5, -1),
        keep="random",
        softcap=2.0,
        alibi=True,
        sink=True,
        bias="normal",
        bias_axes="B1MN",
        dlse=True,
        dropout_p=0.3,
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_gradient_agrees_with_autograd_in_float64(name: str) -> None:
    """A wrong sign or a forgotten factor in the oracle would call correct kernels broken."""
    torch = pytest.importorskip("torch")
    case = VARIANTS[name]
    inputs = build(case, 3)
    asked = question(inputs)
    answer = solve(asked)
    leaves, out, lse = _torch_attention(torch, asked)
    dead = torch.isneginf(lse) if asked.sink is None else torch.zeros_like(lse, dtype=torch.bool)
    loss = (out * torch.from_numpy(asked.dout)).sum()
    if asked.dlse is not None:
        loss = loss + (lse.masked_fill(dead, 0.0) * torch.from_numpy(asked.dlse)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    np.testing.assert_allclose(answer.tensors["out"].value, out.detach().numpy(), atol=1e-14)
    np.testing.assert_allclose(answer.lse, lse.detach().numpy(), atol=1e-13)
    for label, grad in zip(leaves, grads, strict=True):
        np.testing.assert_allclose(answer.tensors[label].value, grad.numpy(), atol=1e-12, err_msg=label)


def _torch_attention(torch: Any, asked: Question) -> tuple[dict[str, Any], Any, Any]:
    names = {
        "dq": asked.q,
        "dk": asked.k,
        "dv": asked.v,
        "dbias": asked.bias,
        "dslopes": asked.slopes,
        "dsink": asked.sink,
    }
    leaves = {
        name: torch.tensor(value, requires_grad=True) for name, value in names.items() if value is not None
    }
    (B, H, M, _), N = asked.q.shape, asked.k.shape[2]
    group = H // asked.k.shape[1]
    k, v = (leaves[name].repeat_interleave(group, 1) for name in ("dk", "dv"))
    s = asked.scale * leaves["dq"] @ k.transpose(-1, -2)
    if asked.softcap:
        s = asked.softcap * torch.tanh(s / asked.softcap)
    i, j = torch.arange(M)[:, None], torch.arange(N)[None, :]
    if "dslopes" in leaves:
        s = s - leaves["dslopes"][:, :, None, None] * (i + N - M - j).abs()
    if "dbias" in leaves:
        s = s + leaves["dbias"]
    distance = j - (i + N - M)
    seen = (
        (distance >= -asked.left) & (distance <= asked.right) & ((j <= i) if asked.top_left else True)
    ).expand(B, H, M, N)
    if asked.keep is not None:
        seen = seen & torch.from_numpy(np.broadcast_to(asked.keep, (B, H, M, N)).copy())
    s = s.masked_fill(~seen, float("-inf"))
    logits = s
    if "dsink" in leaves:
        logits = torch.cat([s, leaves["dsink"][None, :, None, None].expand(B, H, M, 1)], -1)
    dead = torch.isneginf(logits).all(-1, keepdim=True)
    p = torch.softmax(logits.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)[..., :N]
    lse = torch.logsumexp(logits, -1)
    if asked.dropout_p:
        planes = np.arange(B * H)
        factor = philox_oracle.keep_factor(asked.dropout_p, asked.rng, planes, np.arange(M), N).reshape(
            B, H, M, N
        )
        p = p * torch.from_numpy(factor)
    return leaves, p @ v, lse


@pytest.mark.parametrize("name", ["plain", "mask with dead rows", "everything"])
def test_rows_agree_with_multi_precision_arithmetic(name: str) -> None:
    """float64 itself is audited: forty digits, the definition, no recurrence."""
    pytest.importorskip("mpmath")
    case = replace(VARIANTS[name], dropout_p=0.0)
    assert audit(question(build(case, 5)), rows=6) < 4e-15


def test_blocks_of_any_size_give_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle walks in blocks; where they are cut must not show."""
    from attnproof.verify import oracle_forward

    asked = question(build(VARIANTS["everything"], 1))
    whole = solve(asked)
    monkeypatch.setattr(oracle_forward, "CHUNK", 16)
    cut = solve(asked)
    for name, terms in whole.tensors.items():
        np.testing.assert_allclose(cut.tensors[name].value, terms.value, atol=1e-14)
        np.testing.assert_allclose(cut.tensors[name].operand, terms.operand, atol=1e-14)
    np.testing.assert_allclose(cut.lse, whole.lse)


def test_philox_matches_the_published_vectors() -> None:
    """Known answers of Random123 for philox4x32-10."""

    def words(counter: tuple[int, ...], key: tuple[int, int]) -> list[str]:
        drawn = philox_oracle.words(tuple(np.array([part], np.uint64) for part in counter), key)  # type: ignore[arg-type]
        return [f"{int(word[0]):08x}" for word in drawn]

    assert words((0, 0, 0, 0), (0, 0)) == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    full = 0xFFFFFFFF
    assert words((full,) * 4, (full, full)) == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


def test_sensitivities_are_the_sums_that_the_error_model_names() -> None:
    """operand = sum p^2 v^2 and linear = sum p |v|, by brute force on one row."""
    asked = question(build(replace(SMALL, backward=False, H=1, Hkv=1, B=1), 2))
    terms = solve(asked).tensors["out"]
    s = asked.scale * asked.q[0, 0] @ asked.k[0, 0].T
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(terms.operand[0, 0], p**2 @ asked.v[0, 0] ** 2)
    np.testing.assert_allclose(terms.linear[0, 0], p @ np.abs(asked.v[0, 0]))
    wanted = np.einsum("ij,ijc->ic", p**2 * s**2, (asked.v[0, 0][None] - terms.value[0, 0][:, None]) ** 2)
    np.testing.assert_allclose(terms.scores[0, 0], wanted, atol=1e-15)


def test_a_sample_of_rows_equals_those_rows_of_the_whole() -> None:
    """Long cases are judged on a few rows; their positions must still decide what they see."""
    case = replace(find("window-causal-40/float32"), sample=20, backward=False)
    rows = sampled_rows(case, 0)
    assert rows is not None
    some = expected(build(case, 0))
    whole = expected(build(replace(case, sample=0), 0))
    np.testing.assert_allclose(some.tensors["out"].value, np.asarray(whole.tensors["out"].value)[:, :, rows])
    np.testing.assert_allclose(some.lse, np.asarray(whole.lse)[:, :, rows])
    assert {0, case.M - 1} <= set(rows.tolist())


def test_packed_sequences_are_answered_one_by_one_and_loose_tokens_are_dead() -> None:
    inputs = build(find("packed/float32"), 0)
    answer = expected(inputs)
    tokens = inputs.q.shape[0]
    assert answer.tensors["out"].value.shape == (tokens, 4, 64)
    assert answer.lse.shape == (4, tokens)
    assert np.isneginf(answer.lse[:, -3:]).all()
    assert (answer.tensors["out"].value[-3:] == 0).all()
    # the first sequence has keys and no queries: its keys get no gradient
    assert (answer.tensors["dv"].value[:25] == 0).all()


def test_the_control_is_the_same_question_in_float32() -> None:
    inputs = build(find("normal-128/float32"), 0)
    plain, right = control(inputs).tensors["out"].value, expected(inputs).tensors["out"].value
    error = np.abs(plain - right).max()
    assert 0 < error < 1e-5


def test_torch_tensors_give_the_same_answer_as_numpy_arrays() -> None:
    """The oracle of large cases may run on a GPU: the same code on torch float64."""
    torch = pytest.importorskip("torch")
    asked = question(build(replace(VARIANTS["everything"], dropout_p=0.0), 1))
    parts = {
        name: torch.from_numpy(np.array(value))
        for name, value in vars(asked).items()
        if isinstance(value, np.ndarray)
    }
    found = solve(replace(asked, xp=torch, **parts))
    right = solve(asked)
    for name, terms in right.tensors.items():
        np.testing.assert_allclose(found.tensors[name].value.numpy(), terms.value, atol=1e-13, err_msg=name)
