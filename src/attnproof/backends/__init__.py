"""Backends: each is a module with the five names of ``Backend``. None imports another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..problem import Grads, Problem, Tensors

Needs = frozenset[str]


class Backend(Protocol):
    """What ``dispatch`` asks of a backend module. A torch backend whose backward under ``deterministic=False`` sums in
    an order that varies also has ``unordered_backward = True``.

    ``forward(problem, tensors)`` returns ``(out, lse)``: out of ``problem.out_shape`` in the canonical view, stored in
    the caller's layout, lse contiguous. ``backward(problem, tensors, out, lse, dout, dlse, needs)`` returns ``Grads``
    with the names in ``needs`` filled. ``kind`` is what the arrays are: "numpy" (bfloat16 as uint16 bits) or "torch".
    """

    name: str
    kind: str
    why_not: Callable[[Problem], str | None]
    forward: Callable[[Problem, Tensors], tuple[Any, Any]]
    backward: Callable[[Problem, Tensors, Any, Any, Any, Any, Needs], Grads]
