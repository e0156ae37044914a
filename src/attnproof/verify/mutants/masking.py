"""Mistakes about which keys a query sees."""

from __future__ import annotations

from attnproof.verify.mutants.operator import LOOP, MASKS, Operator

MASKING = (
    Operator(
        "masked-is-zero",
        "a masked score is 0 instead of -inf",
        ((LOOP, "s = np.where(allowed, s, -np.inf)", "s = np.where(allowed, s, 0).astype(s.dtype)"),),
    ),
    Operator(
        "finite-filler",
        "masked scores are the smallest float16 instead of -inf",
        (
            (LOOP, "s = np.where(allowed, s, -np.inf)", "s = np.where(allowed, s, -65504).astype(s.dtype)"),
            (
                LOOP,
                "slice(*rows), slice(*cols)], s, -np.inf)",
                "slice(*rows), slice(*cols)], s, s.dtype.type(-65504))",
            ),
        ),
    ),
    Operator("mask-ignored", "the boolean mask is not read", ((LOOP, "if problem.has_keep:", "if False:"),)),
    Operator(
        "mask-inverted",
        "True means masked",
        (
            (
                LOOP,
                "s = np.where(tensors.keep[b, self.h, slice(*rows), slice(*cols)], s, -np.inf)",
                "s = np.where(tensors.keep[b, self.h, slice(*rows), slice(*cols)], -np.inf, s).astype(s.dtype)",
            ),
        ),
    ),
    Operator(
        "mask-of-head-zero",
        "every head reads the mask of head 0",
        ((LOOP, "tensors.keep[b, self.h, ", "tensors.keep[b, 0, "),),
    ),
    Operator(
        "mask-per-tile",
        "one row of the mask decides for its whole tile",
        (
            (
                LOOP,
                "tensors.keep[b, self.h, slice(*rows), slice(*cols)]",
                "tensors.keep[b, self.h, rows[0]:rows[0] + 1, slice(*cols)]",
            ),
        ),
    ),
    Operator(
        "causal-strict",
        "a query does not see its own key",
        (
            (
                MASKS,
                "hi = np.clip(diagonal + right + 1, 0, n)",
                "hi = np.clip(diagonal + right + (right > 2**29), 0, n)",
            ),
        ),
    ),
    Operator(
        "causal-plus-one",
        "a query sees one key of the future",
        ((MASKS, "hi = np.clip(diagonal + right + 1, 0, n)", "hi = np.clip(diagonal + right + 2, 0, n)"),),
    ),
    Operator(
        "causal-top-left",
        "causal masks are aligned to the top left",
        ((MASKS, "diagonal = i + (n - m)", "diagonal = i + 0 * (n - m)"),),
    ),
    Operator(
        "top-left-ignored",
        "the top-left alignment is not looked at",
        ((MASKS, "    if top_left:\n", "    if False:\n"),),
    ),
    Operator(
        "last-tile-unmasked",
        "the last key tile is taken as full",
        ((LOOP, "bool(kinds[row, col] != FULL)", "bool(kinds[row, col] != FULL) and cols[1] < n"),),
    ),
    Operator(
        "edge-is-full",
        "a tile counts as full when its first row is",
        ((MASKS, "(row_hi.min() >= stops)", "(row_hi.max() >= stops)"),),
    ),
    Operator(
        "edge-is-skipped",
        "tiles that the diagonal touches are skipped",
        (
            (
                LOOP,
                "np.flatnonzero(line != SKIP)",
                "np.flatnonzero((line != SKIP) & ((line == FULL) | (line[::-1].cumsum()[::-1] > line)))",
            ),
        ),
    ),
    Operator(
        "window-one-too-wide",
        "a window of W means W+1 keys",
        ((MASKS, "lo = np.clip(diagonal - left, 0, n)", "lo = np.clip(diagonal - left - 1, 0, n)"),),
    ),
    Operator(
        "window-right-ignored",
        "the right side of a window is not looked at unless it is 0",
        (
            (
                MASKS,
                "hi = np.clip(diagonal + right + 1, 0, n)",
                "hi = np.clip(diagonal + (right if right == 0 else 2**30) + 1, 0, n)",
            ),
        ),
    ),
    Operator(
        "window-drops-causal",
        "a window wider than the keys switches causality off",
        (
            (
                MASKS,
                "hi = np.clip(diagonal + right + 1, 0, n)",
                "hi = np.clip(diagonal + (2**30 if 2**29 > left >= n else right) + 1, 0, n)",
            ),
        ),
    ),
    Operator(
        "window-left-ignored",
        "the left side of a window is not looked at",
        ((MASKS, "lo = np.clip(diagonal - left, 0, n)", "lo = np.clip(diagonal - 2**30, 0, n)"),),
    ),
)
