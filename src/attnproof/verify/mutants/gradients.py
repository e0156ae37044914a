"""Mistakes in the backward pass."""

from __future__ import annotations

from attnproof.verify.mutants.operator import LOOP, SCORES, Operator

GRADIENTS = (
    Operator(
        "delta-left-out",
        "dS forgets rowsum(dout * out)",
        ((LOOP, "ds = p * (dp - delta[slice(*rows), None])", "ds = p * dp"),),
    ),
    Operator(
        "dlse-left-out",
        "the gradient of the lse is dropped",
        ((LOOP, "    if dlse is None:\n        return delta\n", "    return delta\n"),),
    ),
    Operator(
        "dlse-sign",
        "the gradient of the lse has the wrong sign",
        ((LOOP, "return delta - np.where(dead", "return delta + np.where(dead"),),
    ),
    Operator(
        "dk-unscaled", "dk forgets the scale", ((LOOP, "+= scale * product(ds.T, q)", "+= product(ds.T, q)"),)
    ),
    Operator(
        "dq-scaled-twice",
        "dq gets the scale twice",
        ((LOOP, "+= scale * product(ds, k)", "+= scale * scale * product(ds, k)"),),
    ),
    Operator(
        "dk-last-head-only",
        "dk keeps the last query head of a group instead of the sum",
        (
            (
                LOOP,
                "head.seq.keys(sums.dk, g, *cols)[...] += scale * product(ds.T, q)",
                "into = head.seq.keys(sums.dk, g, *cols)\n        into[...] = scale * product(ds.T, q) + (0 if rows[0] == 0 and head.h % head.problem.G else into)",
            ),
        ),
    ),
    Operator(
        "dv-undropped",
        "dv uses the weights before dropout",
        ((LOOP, "[...] += product(head.drop(p, rows, cols).T, do)", "[...] += product(p.T, do)"),),
    ),
    Operator(
        "dp-undropped",
        "dP is not dropped",
        (
            (
                LOOP,
                "dp = head.drop(product(do, head.load_keys(tensors.v, cols).T), rows, cols)",
                "dp = product(do, head.load_keys(tensors.v, cols).T)",
            ),
        ),
    ),
    Operator(
        "backward-forgets-mask",
        "backward rebuilds the weights without the boolean mask",
        (
            (
                LOOP,
                "    p = np.exp(s - online_softmax.reference_point(log_sum[slice(*rows)])[:, None])\n",
                "    if problem.has_keep:\n        s, capped = Head(head.seq.__class__(problem, tensors._replace(keep=np.ones_like(tensors.keep)), head.seq.b, head.seq.m, head.seq.n), head.h, head.lo, head.hi).logits(q * scale, k, rows, cols, edge)\n    p = np.exp(s - online_softmax.reference_point(log_sum[slice(*rows)])[:, None])\n",
            ),
        ),
    ),
    Operator(
        "softcap-derivative-left-out",
        "backward forgets the derivative of the softcap",
        (
            (
                LOOP,
                "    if problem.softcap:\n        ds = ds * scores",
                "    if False:\n        ds = ds * scores",
            ),
        ),
    ),
    Operator(
        "gradients-in-half",
        "dk and dv are accumulated in the input dtype",
        (
            (
                LOOP,
                "    def narrowed(self, problem: Problem)",
                "    def rounded(self, problem: Problem) -> None:\n        for x in (self.dk, self.dv):\n            if x is not None:\n                x[...] = widen(narrow(x, problem.dtype), problem.dtype, x.dtype)\n\n    def narrowed(self, problem: Problem)",
            ),
            (
                LOOP,
                "                _backward_tile(head, visit, sums, dout, delta, log_sum)\n",
                "                _backward_tile(head, visit, sums, dout, delta, log_sum)\n                sums.rounded(problem)\n",
            ),
        ),
    ),
    Operator(
        "dbias-of-last-head",
        "the gradient of a shared bias keeps the last head instead of the sum",
        ((SCORES, "slice(*rows), slice(*cols)] += ds", "slice(*rows), slice(*cols)] = ds"),),
    ),
    Operator(
        "dsink-sign",
        "the sink's gradient has the wrong sign",
        ((SCORES, "return -float((weight * row).sum())", "return float((weight * row).sum())"),),
    ),
    Operator(
        "dsink-dead-rows",
        "the sink's gradient forgets rows without keys",
        (
            (
                LOOP,
                "scores.sink_gradient(head.sink, log_sum, delta)",
                "scores.sink_gradient(head.sink, np.where(head.lo < head.hi, log_sum, -np.inf), delta)",
            ),
        ),
    ),
    Operator(
        "dslope-sign",
        "the gradient of the ALiBi slopes has the wrong sign",
        ((SCORES, "return -float((ds * dist).sum())", "return float((ds * dist).sum())"),),
    ),
    Operator(
        "dv-of-other-head",
        "dv lands in the neighbouring key head",
        (
            (
                LOOP,
                "head.seq.keys(sums.dv, g, *cols)[...]",
                "head.seq.keys(sums.dv, (g + 1) % problem.Hkv, *cols)[...]",
            ),
        ),
    ),
    Operator(
        "dq-tail-lost",
        "the last key tile does not reach dq",
        (
            (
                LOOP,
                "    if sums.dq is not None:\n",
                "    if sums.dq is not None and not (cols[0] > 0 and cols[1] == head.seq.n):\n",
            ),
        ),
    ),
)
