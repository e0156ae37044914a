"""What every test runs under: unwritten memory is NaN, and warnings are errors (pyproject.toml).

A kernel that forgets to store a row returns whatever the allocator left there, which is often a plausible old result.
So every `empty` that a module of the package calls is filled: NaN for floats (and for bfloat16 bits in uint16), the
least value for integers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

BFLOAT16_NAN = 0x7FFF


def poison_numpy(x: Any) -> Any:
    if x.dtype.kind in "fc" or x.dtype.name == "bfloat16":
        x[...] = np.nan
    elif x.dtype == np.uint16:
        x[...] = BFLOAT16_NAN
    elif x.dtype.kind in "iu":
        x[...] = np.iinfo(x.dtype).min
    return x


def poison_torch(x: Any) -> Any:
    import torch

    if x.is_floating_point():
        return x.fill_(torch.nan)
    return x if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).min)


def poisoned(make: Callable[..., Any], poison: Callable[[Any], Any]) -> Callable[..., Any]:
    """`make`, with the result filled when a module of the package is the caller."""

    @functools.wraps(make)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return poison(made) if caller.partition(".")[0] == "attnproof" else made

    return wrapper


@pytest.fixture(autouse=True, scope="session")
def unwritten_memory_is_nan() -> Iterator[None]:
    """Patched once for the whole run: an allocation made while a module is imported counts too."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like"):
            patch.setattr(np, name, poisoned(getattr(np, name), poison_numpy))
        try:
            import torch
        except ImportError:
            pass
        else:
            for name in ("empty", "empty_like", "empty_strided"):
                patch.setattr(torch, name, poisoned(getattr(torch, name), poison_torch))
            for name in ("new_empty", "new_empty_strided"):
                patch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name), poison_torch))
        yield
