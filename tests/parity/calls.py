"""Running a case on a target through the public functions; results as float64 in canonical axis order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import attnproof
from attnproof import dispatch
from attnproof.problem import Bound, Options, bind, bind_decode, bind_varlen

from .oracle import document, segment
from .problems import OFFSET, SEED, Array, Case, draw
from .targets import Target, values


@dataclass
class Result:
    """What a call returned, untouched, and as float64 in the axis order of the oracle."""

    out: Any
    lse: Any
    grads: dict[str, Any] = field(default_factory=dict)  # by argument name, as returned

    def named(self, case: Case) -> dict[str, Array]:
        out = values(self.out)
        if case.option("layout", "bhmd") == "bmhd" and out is not None:
            out = out.swapaxes(1, 2)
        return {"out": out, "lse": values(self.lse)}


class Call:
    """The arguments of a case on a target; arrays may be replaced before it is run."""

    def __init__(self, target: Target, case: Case, arrays: dict[str, Array] | None = None) -> None:
        self.target, self.case = target, case
        x = draw(case) if arrays is None else arrays
        self.arrays = {at: target.array(self._axes(at, part), case.dtype_of(at)) for at, part in x.items()}

    def _axes(self, at: str, x: Array) -> Array:
        """Canonical axes to those of the caller's layout."""
        swap = at in ("q", "k", "v", "dout") and self.case.option("layout", "bhmd") == "bmhd"
        return x.swapaxes(1, 2) if swap else x

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that every public function takes."""
        given = {at: x for at, x in self.case.options.items() if at != "num_splits"}
        given |= {at: self.arrays[at] for at in ("bias", "alibi_slopes", "sink") if at in self.arrays}
        mask = mask_of(self.case)
        if "keep" in self.arrays:
            mask = self.arrays["keep"] if mask is None else mask & self.arrays["keep"]
        if self.case.option("dropout_p", 0.0):
            given["seed"] = (SEED, OFFSET)
        return {**given, "mask": mask}

    @property
    def qkv(self) -> tuple[Any, Any, Any]:
        return self.arrays["q"], self.arrays["k"], self.arrays["v"]

    def integers(self, x: Any) -> Any:
        return self.target.array(np.asarray(x, np.int64), "int32")

    @property
    def cumulative(self) -> tuple[Any, Any]:
        """cu_seqlens of q and k."""
        lengths = (self.case.q_lengths, self.case.k_lengths)
        return tuple(self.integers(np.cumsum([0, *each])) for each in lengths)

    def bound(self) -> Bound:
        """Problem and tensors, as the backend gets them."""
        case = self.case
        options = Options(**self.options)
        if case.rows == "packed":
            return bind_varlen(*self.qkv, *self.cumulative, None, None, options)
        if case.rows == "dense":
            return bind(*self.qkv, options)
        cache = Cache(self)
        return bind_decode(
            self.arrays["q"],
            cache.k,
            cache.v,
            cache.after,
            cache.table,
            options,
            case.option("num_splits", None),
        )

    def reason(self) -> str | None:
        """Why the backend refuses this case, or None."""
        return dispatch.load(self.target.backend).why_not(self.bound().problem)

    def forward(self) -> Result:
        case, more = self.case, {**self.options, "backend": self.target.backend}
        if case.rows == "packed":
            return Result(*attnproof.attention_varlen_with_lse(*self.qkv, *self.cumulative, **more))
        if case.rows == "dense":
            return Result(*attnproof.attention_with_lse(*self.qkv, **more))
        cache = Cache(self)
        given = {
            "block_table": cache.table,
            "num_splits": case.option("num_splits", None),
            **cache.new,
            **more,
        }
        return Result(
            attnproof.attention_decode(self.arrays["q"], cache.k, cache.v, cache.before, **given), None
        )

    def gradients(self, needs: tuple[str, ...]) -> Result:
        """Forward, then backward for exactly the arguments named."""
        return self._numpy_gradients(needs) if self.target.kind == "numpy" else self._torch_gradients(needs)

    def _torch_gradients(self, needs: tuple[str, ...]) -> Result:
        import torch

        leaves = {at: self.arrays[at].detach().requires_grad_() for at in needs}
        self.arrays |= leaves
        result = self.forward()
        grads = torch.autograd.grad(
            (result.out, result.lse), list(leaves.values()), (self.arrays["dout"], self.arrays["dlse"])
        )
        result.grads = dict(zip(needs, grads, strict=True))
        return result

    def _numpy_gradients(self, needs: tuple[str, ...]) -> Result:
        result = self.forward()
        names = ("q", "k", "v", "bias", "alibi_slopes", "sink")
        if self.case.rows == "dense":
            found = attnproof.attention_backward(
                *self.qkv, result.out, result.lse, self.arrays["dout"], dlse=self.arrays["dlse"], needs=needs,
                backend=self.target.backend, **self.options,
            )  # fmt: skip
        else:
            bound = self.bound()
            out, dout = (x.swapaxes(0, 1) for x in (result.out, self.arrays["dout"]))
            backend = dispatch.choose(bound.problem, self.target.backend)
            found = dispatch.backward(
                backend, *bound, out, result.lse, dout, self.arrays["dlse"], frozenset(needs)
            )
            found = found._replace(
                **{
                    at: None if (x := getattr(found, at)) is None else x.swapaxes(0, 1)
                    for at in ("dq", "dk", "dv")
                }
            )
        result.grads = {at: x for at, x in zip(names, found, strict=True) if x is not None}
        return result


class Cache:
    """A cache or pool of pages that holds a case's keys, and NaN wherever nothing may be read."""

    def __init__(self, call: Call) -> None:
        case, target = call.case, call.target
        self.valid = np.asarray(case.k_lengths)
        self.after = call.integers(self.valid)
        self.before = call.integers(self.valid - case.append)
        swap = case.option("layout", "bhmd") == "bmhd"
        x = {at: values(call.arrays[at]) for at in "kv"}
        x = {at: part.swapaxes(1, 2) if swap else part for at, part in x.items()}
        self.table, made = None, {}
        entries = self._entries(case) if case.rows == "paged" else None
        if entries is not None:
            self.table = call.integers(entries)
        for at, part in x.items():
            stored = self._store(case, part, entries)
            made[at] = target.array(stored.swapaxes(1, 2) if swap else stored, case.dtype)
        self.k, self.v, self.new = made["k"], made["v"], {}
        if case.append:
            for at, part in x.items():
                new = np.stack([part[b, :, n - case.append : n] for b, n in enumerate(self.valid)])
                self.new[f"{at}_new"] = target.array(new.swapaxes(1, 2) if swap else new, case.dtype)

    def _entries(self, case: Case) -> Array:
        """A page table that walks the pool backwards; entries that are not used are -1 or far outside."""
        width, pool = case.N // case.page, case.B * (case.N // case.page) + 3
        entries = np.arange(pool - 1, pool - 1 - case.B * width, -1).reshape(case.B, width)
        unused = np.arange(width)[None, :] * case.page >= self.valid[:, None]
        return np.where(unused, np.where(np.arange(width) % 2, -1, 10**6), entries)

    def _store(self, case: Case, x: Array, entries: Array | None) -> Array:
        hidden = np.arange(case.N) >= (self.valid - case.append)[:, None]
        x = np.where(hidden[:, None, :, None], np.nan, x)
        if entries is None:
            return x
        pool = np.full((case.B * entries.shape[1] + 3, x.shape[1], case.page, x.shape[3]), np.nan)
        for b in range(case.B):
            for slot in range(-(-int(self.valid[b]) // case.page)):
                pool[entries[b, slot]] = x[b, :, slot * case.page : (slot + 1) * case.page]
        return pool


def mask_of(case: Case) -> Any:
    """The mask object of a case; oracle.py says the same pair by pair."""
    if case.mask == "prefix":
        return attnproof.prefix(9)
    if case.mask == "prefixes":
        return attnproof.prefix([3 + 5 * b for b in range(case.B)])
    if case.mask == "segments":
        ids = np.array([segment(i) for i in range(max(case.M, case.N))])
        return attnproof.segments(ids[: case.M], ids[: case.N])
    if case.mask == "documents":
        ids = np.array([document(i) for i in range(max(case.M, case.N))])
        return attnproof.segments(ids[: case.M], ids[: case.N])
    return None
