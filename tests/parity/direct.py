"""Short calls for tests that say their own right answer: float64 in, float64 out, on any target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import attnproof
from attnproof.problem import Bound, Options, bind, bind_varlen

from .problems import Array
from .targets import Target, values


class Attended(NamedTuple):
    """out and lse as float64."""

    out: Array
    lse: Array


def served(target: Target, run: Callable[[], Any], bound: Callable[[], Bound]) -> Any:
    """What a call returns; a refusal that the target may make of such a problem ends the test there."""
    try:
        return run()
    except attnproof.Unsupported as refusal:
        assert target.may_refuse(bound().problem), str(refusal)
        pytest.skip(str(refusal))


def varlen(target: Target, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, **given: Any) -> Any:
    """attention_varlen_with_lse() on native arrays."""
    return served(
        target,
        lambda: attnproof.attention_varlen_with_lse(q, k, v, cu_q, cu_k, backend=target.backend, **given),
        lambda: bind_varlen(q, k, v, cu_q, cu_k, None, None, Options()),
    )


class Attend:
    """attention_with_lse() on one target; arrays are converted to its kind and to `dtype`."""

    def __init__(self, target: Target, dtype: str = "float32") -> None:
        self.target, self.dtype = target, dtype

    def native(self, x: Any, dtype: str = "") -> Any:
        """A NumPy array as an array of the target; anything else as it is."""
        if not isinstance(x, np.ndarray):
            return x
        return self.target.array(x, dtype or ("bool" if x.dtype == bool else self.dtype))

    def options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Options with their arrays converted."""
        return {at: self.native(x, "float32" if at == "alibi_slopes" else "") for at, x in given.items()}

    def raw(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
        """The call on native arrays; a refusal that the target may make ends the test there."""
        return served(
            self.target,
            lambda: attnproof.attention_with_lse(q, k, v, backend=self.target.backend, **options),
            lambda: bind(q, k, v, Options(**options)),
        )

    def __call__(self, q: Array, k: Array, v: Array, **options: Any) -> Attended:
        out, lse = self.raw(*(self.native(x) for x in (q, k, v)), **self.options(options))
        return Attended(values(out), values(lse))

    def gradients(
        self,
        q: Any,
        k: Any,
        v: Any,
        dout: Any,
        dlse: Any = None,
        needs: Any = ("q", "k", "v"),
        **options: Any,
    ) -> dict[str, Array]:
        """Gradients by argument name, as float64."""
        given = dict(zip("qkv", (self.native(x) for x in (q, k, v)), strict=True)) | self.options(options)
        dout, dlse = self.native(dout), self.native(dlse, "float64" if self.dtype == "float64" else "float32")
        found = self.raw_gradients(given, dout, dlse, tuple(needs))
        return {at: values(x) for at, x in found.items()}

    def raw_gradients(
        self, given: dict[str, Any], dout: Any, dlse: Any, needs: tuple[str, ...]
    ) -> dict[str, Any]:
        """The same on native arrays."""
        if self.target.kind == "numpy":
            arrays = {at: given[at] for at in "qkv"}
            options = {at: x for at, x in given.items() if at not in "qkv"}
            out, lse = self.raw(*arrays.values(), **options)
            more = {"dlse": dlse, "needs": needs, "backend": self.target.backend, **options}
            found = attnproof.attention_backward(*arrays.values(), out, lse, dout, **more)
            names = ("q", "k", "v", "bias", "alibi_slopes", "sink")
            return {at: x for at, x in zip(names, found, strict=True) if x is not None}
        import torch

        leaves = {at: given[at].detach().requires_grad_() for at in needs}
        given = given | leaves
        out, lse = self.raw(**given)
        pairs = [(out, dout)] if dlse is None else [(out, dout), (lse, dlse)]
        grads = torch.autograd.grad([x for x, _ in pairs], list(leaves.values()), [g for _, g in pairs])
        return dict(zip(needs, grads, strict=True))

    def seen(self, m: int, n: int, **options: Any) -> list[str]:
        """Which keys each query attends to: equal logits, and v the identity, so that out is the weights."""
        q, k, v = np.zeros((1, 1, m, 8)), np.zeros((1, 1, n, 8)), np.eye(n)[None, None]
        return [
            "".join("x" if weight > 0 else "." for weight in row)
            for row in self(q, k, v, **options).out[0, 0]
        ]


def drawn(
    m: int, n: int, *, B: int = 1, H: int = 2, Hkv: int = 0, D: int = 16, Dv: int = 0, seed: int = 0
) -> list[Array]:
    """Normal q, k and v, rounded so that float16 holds them exactly and bfloat16 nearly."""
    rng = np.random.default_rng((seed, m, n, D))
    shapes = ((B, H, m, D), (B, Hkv or H, n, D), (B, Hkv or H, n, Dv or D))
    return [np.round(rng.standard_normal(shape) * 32) / 32 for shape in shapes]


def sparse(path: Path, count: int, dtype: Any) -> Array:
    """A file of this many elements that takes no space until it is written to, as an array."""
    return np.asarray(np.memmap(path, dtype=dtype, mode="w+", shape=(count,)))
