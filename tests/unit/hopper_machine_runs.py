"""The Hopper kernels' own source on ``hopper_machine`` against attention written down plainly; run as a script."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # small products, and threads of our own
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from tests.unit.hopper_listing_model import BASE, Sequence, seen, sequences
from tests.unit.hopper_machine import BACKENDS, Descriptor, Machine, Pointer

from attnproof.backends.hopper import arguments, backprop, backward_launches, configs, listings
from attnproof.backends.hopper.compat import TensorDescriptor
from attnproof.backends.triton.backprop import Given
from attnproof.problem import Problem, Tensors

KERNELS = BACKENDS / "hopper" / "kernels"
SIZES: dict[str, Any] = {"H": 4, "Hkv": 2, "D": 16, "Dv": 16}
CLOSE = 2e-5  # constants like ln 2 and the series of tanh are those of fp32


class Array:
    """A torch tensor for its shape and strides, and float64 values in the place of its own."""

    def __init__(self, shape: tuple[int, ...], rng: Any = None) -> None:
        # rows lie behind each other with the heads inside, as callers have them
        self.like = torch.zeros(
            (*shape[:-3], shape[-2], shape[-3], shape[-1]), dtype=torch.bfloat16
        ).transpose(-2, -3)
        self.data = (
            np.full(self.like.numel(), np.nan) if rng is None else rng.standard_normal(self.like.numel())
        )
        self.writes = np.zeros(self.data.size, int)

    @property
    def view(self) -> Any:
        steps = tuple(8 * step for step in self.like.stride())
        return np.lib.stride_tricks.as_strided(self.data, tuple(self.like.shape), steps)

    def described(self, made: Any) -> Descriptor:
        return Descriptor(made, self.data, self.writes)


class Call:
    """A problem with its arrays."""

    def __init__(self, p: Problem, seed: int, **t: Any) -> None:
        rng = np.random.default_rng(seed)
        self.p = p
        packed = p.rows == "packed"
        shapes = [
            ((heads, p.tokens[side]) if packed else (p.B, heads, (p.M, p.N)[side])) + (width,)
            for side, heads, width in ((0, p.H, p.D), (1, p.Hkv, p.D), (1, p.Hkv, p.Dv))
        ]
        self.q, self.k, self.v = (Array(shape, rng) for shape in shapes)
        self.out = Array((*shapes[0][:-1], p.Dv))
        self.lse = np.full(shapes[0][:-1], np.nan)
        self.slopes = torch.rand(p.B, p.H) if p.has_alibi else None
        self.sink = torch.randn(p.H) if p.has_sink else None
        like = [x.like for x in (self.q, self.k, self.v)]
        self.t = Tensors(*like, alibi_slopes=self.slopes, sink=self.sink, **t)

    def planes(self) -> Any:
        """(sequence, head, slice of rows of queries, of keys, mask) of every plane."""
        for b in range(1 if self.p.rows == "packed" else self.p.B):
            one = (
                b if self.t.bounds is not None and self.t.bounds.dim() == 3 and len(self.t.bounds) > 1 else 0
            )
            for at in sequences(self.p, self.t, one):
                lead = () if self.p.rows == "packed" else (b,)
                q_rows = slice(at.row, at.row + at.n_rows) if self.p.rows == "packed" else slice(None)
                k_rows = slice(at.k_row, at.k_row + at.n_keys) if self.p.rows == "packed" else slice(None)
                for h in range(self.p.H):
                    number = at.number if self.p.rows == "packed" else b
                    yield number, at, (*lead, h, q_rows), (*lead, h // self.p.G, k_rows), h

    def right(self, number: int, at: Sequence, q_at: Any, k_at: Any, h: int) -> Plane:
        """What a plane is, by definition."""
        p = self.p
        q, k, v = self.q.view[q_at], self.k.view[k_at], self.v.view[k_at]
        s, bend = p.scale * (q @ k.T), 1.0
        if p.softcap:
            ratio = np.tanh(s / p.softcap)
            s, bend = p.softcap * ratio, 1.0 - ratio**2
        if self.slopes is not None and number >= 0:
            i, j = np.arange(at.n_rows)[:, None], np.arange(at.n_keys)[None, :]
            s = s - float(self.slopes[number, h]) * abs(i + at.n_keys - at.n_rows - j)
        s = np.where(seen(p, self.t, at), s, -np.inf)
        if self.sink is not None and number >= 0:
            s = np.concatenate([s, np.full((at.n_rows, 1), float(self.sink[h]))], 1)
        top = s.max(1, initial=-np.inf, keepdims=True)
        top = np.where(np.isfinite(top), top, 0)
        e = np.exp(s - top)
        total = e.sum(1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse = (top + np.log(total))[:, 0]
        weights = (e / np.where(total > 0, total, 1))[:, : at.n_keys]
        return Plane(weights @ v, lse, weights, bend)


class Plane(NamedTuple):
    """One head of one sequence: out, lse, P, and the derivative of softcap."""

    out: Any
    lse: Any
    p: Any
    bend: Any


def forward(call: Call, machine: Machine, units: int = 3) -> None:
    """Run the kernel, and compare."""
    p, t = call.p, call.t
    facts = configs.facts(p)
    arrays = (call.q, call.k, call.v, call.out)
    made = arguments.descriptors(facts, *(x.like for x in arrays))
    counter = np.zeros(2, np.int64)
    lists: tuple[Any, ...] = (None, None)
    if facts.listed:
        cut = listings.Cut(facts.block_m, facts.block_n, arguments.slots(p, facts.block_m))
        found = listings.query_tiles(p, t, cut)
        lists = tuple(None if x is None else Pointer(x.numpy().astype(np.int64)) for x in found)
    extras = [
        Pointer(np.zeros(1) if x is None else x.numpy().astype(float).reshape(-1))
        for x in (call.slopes, call.sink)
    ]
    machine.launch(
        machine.module(KERNELS / "forward.py")["forward_kernel"],
        arguments.programs(p, facts, units),
        *(x.described(one) for x, one in zip(arrays, made, strict=True)),
        *(Pointer(call.lse.reshape(-1)), Pointer(counter), *extras, *lists),
        *arguments.factors(p, facts),
        *arguments.numbers(p, facts, t),
        C=facts,
    )
    assert not counter.any()
    assert (call.out.writes == 1).all(), "rows that are not written once"
    for number, at, q_at, k_at, h in call.planes():
        right = call.right(number, at, q_at, k_at, h)
        assert np.allclose(right.lse, call.lse[q_at], atol=CLOSE), (number, h)
        assert np.allclose(right.out, call.out.view[q_at], atol=CLOSE), (number, h)


class Gradients:
    """What the backward of a call is given and fills."""

    def __init__(self, call: Call, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.dout = Array(call.out.like.shape, rng)
        self.dlse = rng.standard_normal(call.lse.shape)
        self.dq, self.dk, self.dv = (Array(x.like.shape) for x in (call.q, call.k, call.v))
        self.right = [np.zeros(x.like.shape) for x in (call.q, call.k, call.v)]

    def add(self, call: Call, q_at: Any, k_at: Any, plane: Plane) -> None:
        """A plane's share of the right gradients."""
        dout = self.dout.view[q_at]
        delta = (plane.out * dout).sum(1) - np.where(np.isfinite(plane.lse), self.dlse[q_at], 0)
        ds = plane.p * plane.bend * (dout @ call.v.view[k_at].T - delta[:, None]) * call.p.scale
        self.right[0][q_at] += ds @ call.k.view[k_at]
        self.right[1][k_at] += ds.T @ call.q.view[q_at]
        self.right[2][k_at] += plane.p.T @ dout


def backward(call: Call, machine: Machine, seed: int) -> None:
    """Both passes from the right out and lse, and compare."""
    p, t, grads = call.p, call.t, Gradients(call, seed)
    for number, at, q_at, k_at, h in call.planes():
        right = call.right(number, at, q_at, k_at, h)
        call.out.view[q_at], call.lse[q_at] = right.out, right.lse
        grads.add(call, q_at, k_at, right)
    lse, dlse = (torch.empty(call.lse.shape) for _ in range(2))
    stats = backward_launches.empty_statistics(p, "cpu")
    values = np.full(stats.shape, np.nan)
    lists = backprop.lists_of(p, t, frozenset("qkv"))
    given = Given(call.out.like, lse, grads.dout.like, dlse)
    launches = (
        backward_launches.queries(p, t, stats, given, grads.dq.like, lists),
        backward_launches.keys(p, t, stats, grads.dout.like, grads.dk.like, grads.dv.like, lists),
    )
    arrays = (call.q, call.k, call.v, call.out, grads.dout, grads.dq, grads.dk, grads.dv)
    pointers = {
        "shift": values[0],
        "delta": values[1],
        "lse": call.lse,
        "dlse": grads.dlse,
        "out": call.out.data,
    }
    for launch in launches:
        kernel = launch.kernel.fn
        machine.launch(
            machine.module(KERNELS / f"{kernel.__module__.rpartition('.')[2]}.py")[kernel.__name__],
            launch.programs,
            **{name: given_as(name, x, arrays, pointers) for name, x in launch.arguments.items()},
        )
    for name, made, right in zip("qkv", (grads.dq, grads.dk, grads.dv), grads.right, strict=True):
        assert (made.writes == 1).all(), f"d{name}: rows that are not written once"
        assert np.allclose(right, made.view, atol=CLOSE), f"d{name}: off by {abs(right - made.view).max()}"


def given_as(name: str, x: Any, arrays: tuple[Array, ...], pointers: dict[str, Any]) -> Any:
    """An argument of a launch, as the machine takes it."""
    if isinstance(x, TensorDescriptor):
        return next(array.described(x) for array in arrays if array.like is x.base)
    if not isinstance(x, torch.Tensor):
        return x
    if name in pointers:
        return Pointer(pointers[name].reshape(-1))
    return Pointer(x.numpy().astype(float if x.is_floating_point() else np.int64).reshape(-1))


def cumulative(*lengths: int) -> Any:
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


def packed(
    q: tuple[int, ...], k: tuple[int, ...], tail: tuple[int, int] = (0, 0), seed: int = 0, **more: Any
) -> Call:
    p = replace(
        BASE, rows="packed", B=len(q), M=max(q), N=max(k), tokens=(sum(q) + tail[0], sum(k) + tail[1]), scale=0.3,
        **SIZES | more,
    )  # fmt: skip
    bounds = None
    if p.has_bounds:
        bounds = torch.tensor(
            np.sort(np.random.default_rng(seed).integers(0, max(k), (p.tokens[0], 2)), 1).astype(np.int32)
        )
    return Call(p, seed, cu_q=cumulative(*q), cu_k=cumulative(*k), bounds=bounds)


def dense(m: int, n: int, seed: int = 0, lists: int = 1, **more: Any) -> Call:
    p = replace(BASE, B=2, M=m, N=n, scale=0.3, **SIZES | more)
    bounds = None
    if p.has_bounds:
        ids = np.sort(np.random.default_rng(seed).integers(0, 4, (lists, max(m, n))), 1)
        found = [[np.searchsorted(x[:n], x[:m]), np.searchsorted(x[:n], x[:m], "right")] for x in ids]
        bounds = torch.tensor(np.array(found).swapaxes(1, 2).astype(np.int32).copy())
    return Call(p, seed, bounds=bounds)


CAUSAL: dict[str, Any] = {"right": 0}
UNEVEN = ((1, 200, 64, 0, 133), (1, 200, 30, 7, 290))


def calls() -> list[Call]:
    """Every kind of row, mask and configuration, at sizes that take seconds."""
    return [
        *(dense(200, 150, D=d, Dv=d, **more) for d in (64, 128) for more in ({}, CAUSAL)),
        *(packed(*UNEVEN, D=d, Dv=d, **more) for d in (64, 128, 256) for more in ({}, CAUSAL)),
        packed(*UNEVEN, (70, 9), has_sink=True, **CAUSAL),
        packed(*UNEVEN, (0, 200), has_alibi=True, left=50, right=0),
        packed((300, 0), (20, 40), right=0, top_left=True, D=128, Dv=128),
        packed(*UNEVEN, (3, 0), has_bounds=True, softcap=2.0, has_sink=True),
        packed(*UNEVEN, has_bounds=True, right=0, top_left=True, left=100, D=128, Dv=128),
        *(dense(200, 333, has_bounds=True, lists=n, D=d, Dv=d) for n, d in ((1, 64), (2, 128), (1, 256))),
        dense(333, 200, has_bounds=True, lists=2, D=128, Dv=64, **CAUSAL),
    ]


def main() -> None:
    """Every call forward and backward, threads in a different order each."""
    for number, call in enumerate(calls()):
        forward(call, Machine(1000 * number))
        backward(call, Machine(1000 * number + 500), number)
        print(number, call.p.rows, call.p.D, flush=True)
    print("every run is right")


if __name__ == "__main__":
    main()
