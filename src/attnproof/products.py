"""Matrix products of NumPy whose bits do not depend on how many threads BLAS has (SEMANTICS section 4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# multiply-adds of one product up to which OpenBLAS starts no threads, whatever their number
ONE_THREAD = 2**18
# rows that a piece has at least; with fewer a product reads its right side too often
FEWEST_ROWS = 16


def product(a: Array, b: Array) -> Array:
    """``a @ b`` of arrays [m, k] and [k, n] in pieces that BLAS computes in one thread.

    With threads it may sum in another order. Pieces are rows of ``a``; a ``b`` so large that few rows would make a piece
    is cut in two along its longer side first.
    """
    (m, k), n = a.shape, b.shape[1]
    if min(m, FEWEST_ROWS) * n * k > ONE_THREAD:
        if n >= k:
            return np.concatenate([product(a, b[:, : n // 2]), product(a, b[:, n // 2 :])], axis=1)
        return product(a[:, : k // 2], b[: k // 2]) + product(a[:, k // 2 :], b[k // 2 :])
    rows = max(ONE_THREAD // max(n * k, 1), 1)
    if rows >= m:
        return np.matmul(a, b)
    whole = m - m % rows
    out = np.empty((m, n), a.dtype)
    np.matmul(a[:whole].reshape(-1, rows, k), b, out=out[:whole].reshape(-1, rows, n))
    np.matmul(a[whole:], b, out=out[whole:])
    return out
