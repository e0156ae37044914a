"""Mistakes in the online recurrence: maxima, sums, rescales, the precision of each."""

from __future__ import annotations

from attnproof.verify.mutants.operator import LOOP, SOFTMAX, Operator

RECURRENCE = (
    Operator(
        "no-rescale-acc",
        "the output is not rescaled when the maximum grows",
        ((LOOP, "state.acc[:] *= alpha[:, None]", "pass"),),
    ),
    Operator(
        "no-rescale-sum",
        "the running sum is not rescaled",
        ((LOOP, "alpha * state.l + p.sum(axis=1)", "state.l + p.sum(axis=1)"),),
    ),
    Operator(
        "stale-max",
        "the maximum of the first tile is kept for good",
        ((SOFTMAX, "m_new = np.maximum(m, tile_max)", "m_new = np.where(np.isneginf(m), tile_max, m)"),),
    ),
    Operator(
        "max-starts-at-zero",
        "the running maximum starts at 0",
        (
            (
                SOFTMAX,
                "m=np.full(rows, sink if has_sink else -np.inf, dtype=dtype)",
                "m=np.full(rows, sink if has_sink else 0.0, dtype=dtype)",
            ),
        ),
    ),
    Operator(
        "no-max",
        "the maximum is never subtracted",
        (
            (
                SOFTMAX,
                "m_new = np.maximum(m, tile_max)",
                "m_new = np.where(np.isneginf(tile_max), m, np.zeros_like(m))",
            ),
        ),
    ),
    Operator(
        "nan-on-dead-tile",
        "-inf minus -inf where a tile has no visible key",
        ((SOFTMAX, "return np.where(np.isneginf(m), m.dtype.type(0), m)", "return m"),),
    ),
    Operator(
        "dead-row-nan",
        "rows without a key are divided by zero",
        ((SOFTMAX, "seen = state.l != 0", "seen = np.ones_like(state.l, bool)"),),
    ),
    Operator(
        "dead-row-lse-zero",
        "rows without a key get lse 0",
        (
            (
                SOFTMAX,
                "lse = state.m + np.log(state.l)",
                "lse = np.where(state.l == 0, 0, state.m + np.log(state.l))",
            ),
        ),
    ),
    Operator(
        "lse-base-2",
        "the lse is a base-2 logarithm",
        (
            (
                SOFTMAX,
                "lse = state.m + np.log(state.l)",
                "lse = (state.m + np.log(state.l)) * 1.4426950408889634",
            ),
        ),
    ),
    Operator(
        "lse-without-max",
        "the lse forgets the maximum",
        ((SOFTMAX, "lse = state.m + np.log(state.l)", "lse = np.log(state.l)"),),
    ),
    Operator(
        "sink-in-every-tile",
        "the sink's logit is added once per tile",
        (
            (
                LOOP,
                "alpha * state.l + p.sum(axis=1)",
                "alpha * state.l + p.sum(axis=1) + np.exp(head.sink - point)",
            ),
        ),
    ),
    Operator(
        "sink-scaled",
        "the sink is multiplied by the softmax scale",
        (
            (
                LOOP,
                "return scores.sink_logit(self.seq.tensors.sink, self.h)",
                "return scores.sink_logit(self.seq.tensors.sink, self.h) * self.problem.scale",
            ),
        ),
    ),
    Operator(
        "half-running-sum",
        "the running sum is kept in half precision",
        ((LOOP, "alpha * state.l + p.sum(axis=1)", "(alpha * state.l + p.sum(axis=1)).astype(np.float16)"),),
    ),
    Operator(
        "half-accumulator",
        "the output accumulator is kept in the input dtype",
        (
            (
                LOOP,
                "    if trace is not None:\n",
                "    state.acc[:] = widen(narrow(state.acc, head.problem.dtype), head.problem.dtype, state.acc.dtype)\n    if trace is not None:\n",
            ),
        ),
    ),
    Operator(
        "weights-in-fp8",
        "the weights are rounded to three bits of mantissa",
        (
            (
                LOOP,
                "    np.exp(p, out=p)\n",
                "    np.exp(p, out=p)\n    f, e = np.frexp(p)\n    p = np.ldexp(np.round(f * 16) / 16, e).astype(s.dtype)\n",
            ),
        ),
    ),
    Operator(
        "cheap-exp",
        "the exponential is off by up to 2^-9",
        (
            (
                LOOP,
                "    np.exp(p, out=p)\n",
                "    np.exp(p, out=p)\n    p *= 1 + p.dtype.type(2.0**-9) * np.cos(37 * np.sqrt(p))\n",
            ),
        ),
    ),
    Operator(
        "log2e-in-bf16",
        "the scale carries log2(e) rounded to bfloat16",
        (
            (
                LOOP,
                "s = capped = product(scaled_q, k.T)",
                "s = capped = (scaled_q * np.float32(1.4453125 / 1.4426950408889634)) @ k.T",
            ),
        ),
    ),
    Operator(
        "sparse-weights",
        "weights below 0.2 percent of the largest are dropped",
        ((LOOP, "    np.exp(p, out=p)\n", "    np.exp(p, out=p)\n    p[p < 2e-3] = 0\n"),),
    ),
    Operator(
        "dropout-in-sum",
        "dropped weights are missing from the running sum as well",
        (
            (
                LOOP,
                "alpha * state.l + p.sum(axis=1)",
                "alpha * state.l + head.drop(p, rows, cols).sum(axis=1)",
            ),
        ),
    ),
)
