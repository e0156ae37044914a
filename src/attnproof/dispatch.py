"""Which backend serves a call: the first in a documented order that has no reason to refuse.

``auto`` never picks ``reference``, which is slow by intent. A *named* backend that refuses raises ``Unsupported`` with
its own sentence: there is no silent fallback. ``explain`` shows the whole table.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from .arrays import as_torch, from_numpy, is_torch, to_numpy
from .backends import Backend, Needs
from .errors import ShapeError, Unsupported, expected
from .problem import Grads, Problem, Tensors

# fastest first; the oracle last
ORDER = ("hopper", "triton", "dot2", "native", "streaming", "math", "reference")
NEVER_AUTO = frozenset({"reference"})


def backends() -> tuple[str, ...]:
    """Names of all backends, in the order ``auto`` tries them (``reference`` only runs when named)."""
    return ORDER


def automatic() -> tuple[str, ...]:
    """Names of the backends that ``auto`` may choose, in its order."""
    return tuple(name for name in ORDER if name not in NEVER_AUTO)


def load(name: str) -> Backend:
    """The backend module of this name; its optional packages are not imported yet."""
    if name not in ORDER:
        raise ShapeError(expected("backend", f"'auto' or one of {', '.join(ORDER)}", repr(name)))
    return importlib.import_module(f".backends.{name}", __package__)  # type: ignore[return-value]


def choose(problem: Problem, name: str = "auto") -> Backend:
    """The backend that serves this problem.

    Raises:
        Unsupported: the named backend refuses, or (``auto``) every backend does.
    """
    if name != "auto":
        backend = load(name)
        reason = backend.why_not(problem)
        if reason is not None:
            raise Unsupported(name, reason)
        return backend
    reasons: dict[str, str] = {}
    for candidate in automatic():
        backend = load(candidate)
        reason = backend.why_not(problem)
        if reason is None:
            return backend
        reasons[candidate] = reason
    raise Unsupported("auto", "; ".join(f"{at}: {why}" for at, why in reasons.items()))


@dataclass(frozen=True)
class Explanation:
    """Which backend a call gets, and why not the others; ``str()`` is a table.

    Attributes:
        chosen: name of the backend that would run, None if the named one refuses.
        reasons: every backend in dispatch order, with its reason to refuse or None.
    """

    chosen: str | None
    reasons: dict[str, str | None]

    def __str__(self) -> str:
        width = max(len(name) for name in self.reasons)
        lines = []
        for name, reason in self.reasons.items():
            verdict = "chosen" if name == self.chosen else reason or _standby(name)
            lines.append(f"{'->' if name == self.chosen else '  '} {name:<{width}}  {verdict}")
        return "\n".join(lines)


def _standby(name: str) -> str:
    return (
        "would serve it; runs only when named"
        if name in NEVER_AUTO
        else "would serve it; comes later in the order"
    )


def explain(problem: Problem, name: str = "auto") -> Explanation:
    """The whole dispatch table for one problem."""
    reasons = {each: load(each).why_not(problem) for each in ORDER}
    if name == "auto":
        able = [each for each in automatic() if reasons[each] is None]
    else:
        load(name)
        able = [name] if reasons[name] is None else []
    return Explanation(able[0] if able else None, reasons)


def forward(backend: Backend, problem: Problem, tensors: Tensors) -> tuple[Any, Any]:
    """Run a backend on arrays of either kind; results are of the kind and on the device of q."""
    if backend.kind == "torch" and is_torch(tensors.q):
        return backend.forward(problem, tensors)
    out, lse = backend.forward(problem, _to_kind(backend, tensors))
    return _back(out, tensors.q, problem.dtype), _back(lse, tensors.q, problem.lse_dtype)


def backward(
    backend: Backend,
    problem: Problem,
    tensors: Tensors,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any,
    needs: Needs,
) -> Grads:
    """Run a backend's backward on arrays of either kind."""
    if backend.kind == "torch" and is_torch(tensors.q):
        return backend.backward(problem, tensors, out, lse, dout, dlse, needs)
    given = _to_kind(backend, Tensors(out, lse, dout, dlse))
    grads = backend.backward(problem, _to_kind(backend, tensors), *given[:4], needs)
    dtypes = (*(problem.dtype,) * 3, problem.bias_dtype, *(problem.lse_dtype,) * 2)
    return Grads(*(_back(x, tensors.q, to) for x, to in zip(grads, dtypes, strict=True)))


def _to_kind(backend: Backend, tensors: Tensors) -> Tensors:
    convert = to_numpy if backend.kind == "numpy" else as_torch
    return Tensors(*(convert(x) for x in tensors))


def _back(x: Any, q: Any, name: str) -> Any:
    if is_torch(x):
        return x if is_torch(q) else _numpy_result(x, name)
    return from_numpy(x, q, name)


def _numpy_result(x: Any, name: str) -> Any:
    return from_numpy(to_numpy(x), None, name)
