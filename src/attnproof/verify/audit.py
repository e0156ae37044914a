"""The oracle's own oracle: a few rows in forty digits, straight from the definition (needs mpmath)."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnproof.errors import BackendMissing
from attnproof.verify.oracle import Question, solve

DIGITS = 40


def audit(asked: Question, rows: int = 4, seed: int = 0) -> float:
    """Largest error of out and lse over some rows, relative to the size of the row's values.

    Raises:
        BackendMissing: mpmath is not installed.
    """
    try:
        import mpmath
    except ImportError as error:
        raise BackendMissing("mpmath: needed to audit the oracle; pip install mpmath") from error
    answer = solve(asked)
    rng = np.random.default_rng(seed)
    B, H, M, _ = asked.q.shape
    worst = 0.0
    with mpmath.workdps(DIGITS):
        for _ in range(rows):
            b, h, i = int(rng.integers(B)), int(rng.integers(H)), int(rng.integers(M))
            out, lse = _row(mpmath, asked, b, h, i)
            got = np.asarray(answer.tensors["out"].value)[b, h, i]
            size = max(float(np.abs(asked.v).max()), 1e-300)
            worst = max(
                worst, float(max(abs(mpmath.mpf(float(x)) - y) for x, y in zip(got, out, strict=True))) / size
            )
            found = float(np.asarray(answer.lse)[b, h, i])
            if np.isinf(found) or lse == -mpmath.inf:
                worst = max(worst, 0.0 if mpmath.mpf(found) == lse else np.inf)
            else:
                worst = max(worst, float(abs(mpmath.mpf(found) - lse) / (1 + abs(lse))))
    return worst


def _row(mp: Any, asked: Question, b: int, h: int, i: int) -> tuple[list[Any], Any]:
    """One row of out and its lse; dropout is not audited, it is a product with 0 or 1/(1-p)."""
    N, M, group = asked.k.shape[2], asked.q.shape[2], asked.q.shape[1] // asked.k.shape[1]
    logits = {j: _logit(mp, asked, b, h, i, j, group) for j in range(N) if _seen(asked, b, h, i, j, M, N)}
    weights = {j: mp.exp(logit) for j, logit in logits.items() if logit != -mp.inf}
    total = sum(weights.values(), mp.mpf(0))
    if asked.sink is not None:
        total += mp.exp(mp.mpf(float(asked.sink[h])))
    width = asked.v.shape[3]
    if total == 0:
        return [mp.mpf(0)] * width, -mp.inf
    v = asked.v[b, h // group]
    out = [
        sum((w * mp.mpf(float(v[j, c])) for j, w in weights.items()), mp.mpf(0)) / total for c in range(width)
    ]
    return out, mp.log(total)


def _seen(asked: Question, b: int, h: int, i: int, j: int, M: int, N: int) -> bool:
    distance = j - (i + N - M)
    inside = -asked.left <= distance <= asked.right and (not asked.top_left or j <= i)
    return inside and (asked.keep is None or bool(_at(asked.keep, b, h, i, j)))


def _logit(mp: Any, asked: Question, b: int, h: int, i: int, j: int, group: int) -> Any:
    q, k = asked.q[b, h, i], asked.k[b, h // group, j]
    s = mp.mpf(float(asked.scale)) * sum(
        (mp.mpf(float(x)) * mp.mpf(float(y)) for x, y in zip(q, k, strict=True)), mp.mpf(0)
    )
    if asked.softcap:
        cap = mp.mpf(float(asked.softcap))
        s = cap * mp.tanh(s / cap)
    if asked.slopes is not None:
        s -= mp.mpf(float(asked.slopes[b, h])) * abs(i + asked.k.shape[2] - asked.q.shape[2] - j)
    if asked.bias is not None:
        s += mp.mpf(float(_at(asked.bias, b, h, i, j)))
    return s


def _at(array: Any, *index: int) -> Any:
    return array[tuple(min(place, size - 1) for place, size in zip(index, array.shape, strict=True))]
