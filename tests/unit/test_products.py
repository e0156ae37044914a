"""Products in pieces are products."""

from __future__ import annotations

import numpy as np
import pytest

from attnproof import products


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(3, 4, 5), (200, 80, 400), (300, 5000, 64), (70, 64, 3001), (1, 9000, 40), (20, 0, 7), (0, 3, 4)],
)
def test_pieces_make_the_whole_product(m: int, k: int, n: int, dtype: str) -> None:
    """Cut along rows, columns and the sum: each entry within its own rounding of the product in wider numbers."""
    rng = np.random.default_rng(m + k + n)
    a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
    got, wide = products.product(a, b), np.longdouble
    assert (m, n) == got.shape
    assert a.dtype == got.dtype
    band = max(k, 1) * np.finfo(dtype).eps * (np.abs(a) @ np.abs(b))
    assert np.all(np.abs(got - a.astype(wide) @ b.astype(wide)) <= band)


@pytest.mark.parametrize(("m", "k", "n"), [(200, 80, 400), (300, 5000, 64), (1, 9000, 40)])
def test_no_piece_is_larger_than_one_thread_takes(
    m: int, k: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is handed to BLAS at once, counted in multiply-adds."""
    sizes: list[int] = []

    def counted(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        sizes.append(a.shape[-2] * a.shape[-1] * b.shape[-1])
        return real(a, b, out=out)

    real = np.matmul
    monkeypatch.setattr(products.np, "matmul", counted)
    products.product(np.ones((m, k)), np.ones((k, n)))
    assert sizes
    assert max(sizes) <= products.ONE_THREAD
