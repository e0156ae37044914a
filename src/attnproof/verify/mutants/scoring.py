"""Mistakes in scale, bias, softcap, ALiBi and dropout."""

from __future__ import annotations

from attnproof.verify.mutants.operator import LOOP, SCORES, Operator

SCORING = (
    Operator(
        "scale-of-padded-dim",
        "the scale is that of the head dim padded to a power of two",
        (
            (
                LOOP,
                "* state.m.dtype.type(head.problem.scale)",
                "* state.m.dtype.type(head.problem.scale * np.sqrt(head.problem.D / 2 ** np.ceil(np.log2(max(head.problem.D, 1)))))",
            ),
        ),
    ),
    Operator(
        "scale-absolute",
        "a negative scale loses its sign",
        (
            (
                LOOP,
                "* state.m.dtype.type(head.problem.scale)",
                "* state.m.dtype.type(abs(head.problem.scale))",
            ),
        ),
    ),
    Operator(
        "scale-default-only",
        "the caller's scale is ignored",
        (
            (
                LOOP,
                "* state.m.dtype.type(head.problem.scale)",
                "* state.m.dtype.type(max(head.problem.D, 1) ** -0.5)",
            ),
        ),
    ),
    Operator(
        "bias-scaled",
        "the bias is multiplied by the scale",
        (
            (
                LOOP,
                "s = s + widen(bias, problem.bias_dtype, s.dtype)",
                "s = s + widen(bias, problem.bias_dtype, s.dtype) * s.dtype.type(problem.scale)",
            ),
        ),
    ),
    Operator(
        "bias-of-head-zero",
        "every head reads the bias of head 0",
        ((LOOP, "tensors.bias[b, self.h, ", "tensors.bias[b, 0, "),),
    ),
    Operator(
        "bias-before-softcap",
        "the bias is capped together with the score",
        (
            (
                LOOP,
                "s = capped = product(scaled_q, k.T)\n",
                "s = capped = product(scaled_q, k.T)\n        if problem.has_bias and problem.softcap:\n            s = s + widen(tensors.bias[b, self.h, slice(*rows), slice(*cols)], problem.bias_dtype, s.dtype)\n",
            ),
            (
                LOOP,
                "        if problem.has_bias:\n",
                "        if problem.has_bias and not problem.softcap:\n",
            ),
        ),
    ),
    Operator(
        "softcap-ignored", "scores are not capped", ((SCORES, "return cap * np.tanh(s / cap)", "return s"),)
    ),
    Operator(
        "alibi-signed",
        "the distance of ALiBi has a sign",
        (
            (
                SCORES,
                "return np.abs((i[:, None] + (n - m)) - j[None, :])",
                "return (i[:, None] + (n - m)) - j[None, :]",
            ),
        ),
    ),
    Operator(
        "alibi-top-left",
        "the distance of ALiBi is measured from the top left",
        (
            (
                SCORES,
                "return np.abs((i[:, None] + (n - m)) - j[None, :])",
                "return np.abs(i[:, None] - j[None, :])",
            ),
        ),
    ),
    Operator(
        "alibi-slope-of-head-zero",
        "every head takes the slope of head 0",
        ((LOOP, "tensors.alibi_slopes[b, self.h]", "tensors.alibi_slopes[b, 0]"),),
    ),
    Operator(
        "dropout-unscaled",
        "kept weights are not divided by 1-p",
        ((LOOP, "x.dtype.type(1 / (1 - problem.dropout_p))", "x.dtype.type(1)"),),
    ),
    Operator(
        "dropout-per-tile",
        "the dropout counter starts anew in each tile",
        (
            (
                LOOP,
                "            start=cols[0],\n            stop=cols[1],\n",
                "            start=0,\n            stop=cols[1] - cols[0],\n",
            ),
        ),
    ),
    Operator(
        "dropout-same-for-heads",
        "all heads drop the same weights",
        ((LOOP, "plane=self.seq.b * problem.H + self.h", "plane=self.seq.b * problem.H"),),
    ),
)
