"""``attnproof::forward`` and ``attnproof::backward``: one call as operators that torch can trace, fake and transform.

An operator takes the fields of ``Tensors`` and, as numbers and words, what of ``Problem`` cannot be read off the
tensors. Results have the shapes, strides and dtypes that the fake kernels announce, whatever the backend returns:

    out                  ``problem.out_shape``, stored in the caller's layout
    lse                  contiguous
    dq, dk, dv           like q, k, v, stored in the caller's layout
    other gradients      of the shape and dtype of their input, contiguous
    what is not needed   an empty tensor

``backward`` is differentiable as well, through ``backends.math.differentiable``: the slow path to higher orders.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from ..backends import Backend
from ..errors import Unsupported
from ..problem import GRADIENTS, Grads, Problem, Tensors
from . import batching


class Settings(NamedTuple):
    """The part of a ``Problem`` that the tensors do not show, and the backend; in the order of the schemas."""

    M: int
    N: int
    rows: str
    layout: str
    scale: float
    softcap: float
    left: int
    right: int
    top_left: bool
    dropout_p: float
    deterministic: bool
    num_splits: int
    backend: str


_TENSORS = ", ".join(f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in Tensors._fields)
_SETTINGS = (
    "SymInt M, SymInt N, str rows, str layout, float scale, float softcap, SymInt left, SymInt right, bool top_left, "
    "float dropout_p, bool deterministic, int num_splits, str backend"
)
_GIVEN = "Tensor out, Tensor lse, Tensor? dout, Tensor? dlse"

LIBRARY = torch.library.Library("attnproof", "FRAGMENT")
LIBRARY.define(f"forward({_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(
    f"backward({_TENSORS}, {_GIVEN}, {_SETTINGS}, str needs) -> ({', '.join(['Tensor'] * len(GRADIENTS))})",
    tags=(torch.Tag.pt2_compliant_tag,),
)

_COUNT, _GIVEN_COUNT, _SETTINGS_COUNT = len(Tensors._fields), 4, len(Settings._fields)


def settings_of(backend: str, problem: Problem) -> Settings:
    """The arguments of the operators that are not tensors."""
    return Settings(**{name: getattr(problem, name) for name in Settings._fields[:-1]}, backend=backend)


def problem_of(tensors: Tensors, s: Settings) -> Problem:
    """The inverse of ``settings_of``."""
    q, k, v, bias = tensors[:4]
    packed = s.rows == "packed"
    B = tensors.cu_q.shape[0] - 1 if packed else q.shape[0]
    heads = 0 if packed else 1
    return Problem(
        dtype=str(q.dtype).removeprefix("torch."),
        device=q.device.type,
        B=B,
        H=q.shape[heads],
        Hkv=k.shape[heads],
        M=s.M,
        N=s.N,
        D=q.shape[-1],
        Dv=v.shape[-1],
        rows=s.rows,  # type: ignore[arg-type]
        layout=s.layout,
        tokens=(q.shape[1], k.shape[1]) if packed else (0, 0),
        page=k.shape[2] if s.rows == "paged" else 0,
        scale=s.scale,
        softcap=s.softcap,
        left=s.left,
        right=s.right,
        top_left=s.top_left,
        has_keep=tensors.keep is not None,
        has_bounds=tensors.bounds is not None,
        bias_shape=None if bias is None else tuple(bias.shape),
        bias_dtype="" if bias is None else str(bias.dtype).removeprefix("torch."),
        has_alibi=tensors.alibi_slopes is not None,
        has_sink=tensors.sink is not None,
        dropout_p=s.dropout_p,
        deterministic=s.deterministic,
        num_splits=s.num_splits,
    )


def needed(flags: Sequence[bool]) -> tuple[str, ...]:
    """Names of the inputs whose gradient is asked for, from flags in the order of ``Tensors``."""
    by_name = dict(zip(Tensors._fields, flags, strict=True))
    return tuple(name for name in GRADIENTS if by_name[name])


def pick(grads: Sequence[Any], needs: Sequence[str]) -> tuple[Any, ...]:
    """Gradients in the order of ``GRADIENTS`` as gradients in the order of ``Tensors``, None where not needed."""
    by_name: dict[str, Any] = dict(zip(GRADIENTS, grads, strict=True))
    return tuple(by_name[name] if name in needs else None for name in Tensors._fields)


def run_backward(
    backend: Backend,
    problem: Problem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    needs: Sequence[str],
) -> Grads:
    """The backend's backward; every gradient has the shape and dtype of its input."""
    if not problem.deterministic:
        refuse_if_unordered(backend)
    if dout is None:
        dout = out.new_zeros(()).expand(out.shape)
    grads = dispatch.backward(backend, problem, tensors, out, lse, dout, dlse, frozenset(needs))
    dalibi, dsink = grads.dalibi, grads.dsink
    if dalibi is not None:
        slopes = tensors.alibi_slopes
        dalibi = (dalibi.sum(0, keepdim=True) if slopes.shape[0] == 1 else dalibi).to(slopes.dtype)
    if dsink is not None:
        dsink = dsink.to(tensors.sink.dtype)
    return grads._replace(dalibi=dalibi, dsink=dsink)


def refuse_if_unordered(backend: Backend) -> None:
    """``deterministic=False`` may only change something, and is only refused, where a backend has such a path.

    Raises:
        Unsupported: the backend would sum gradients in an order that varies, while torch promises determinism.
    """
    if not getattr(backend, "unordered_backward", False) or not torch.are_deterministic_algorithms_enabled():
        return
    reason = (
        "deterministic=False sums gradients in an order that varies, and torch's deterministic mode is on"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise Unsupported(backend.name, f"{reason}; leave deterministic=True")
    warnings.warn(f"{backend.name}: {reason}", stacklevel=2)


def _new(like: Tensor, shape: Sequence[int], s: Settings, *, rows: bool) -> Tensor:
    """An unwritten result; query-side and key-side arrays (``rows``) are stored in the caller's layout."""
    if rows and s.rows == "packed":
        return like.new_empty((shape[1], shape[0], shape[2])).transpose(0, 1)
    if rows and s.layout == "bmhd":
        return like.new_empty((shape[0], shape[2], shape[1], shape[3])).transpose(1, 2)
    return like.new_empty(shape)


def _settled(x: Tensor, s: Settings, *, rows: bool) -> Tensor:
    """The result as the fake kernel announced it; a copy only where a backend stored it otherwise."""
    order = tuple(range(x.ndim))
    if rows and (s.rows == "packed" or s.layout == "bmhd"):
        order = (1, 0, 2) if s.rows == "packed" else (0, 2, 1, 3)
    step = 1
    for axis in reversed(order):
        if x.stride(axis) != step:
            return _new(x, x.shape, s, rows=rows).copy_(x)
        step *= max(x.shape[axis], 1)
    return x


def _split(args: Sequence[Any]) -> tuple[Tensors, Settings]:
    return Tensors(*args[:_COUNT]), Settings(*args[_COUNT : _COUNT + _SETTINGS_COUNT])


def _split_backward(args: Sequence[Any]) -> tuple[Tensors, tuple[Any, ...], Settings, list[str]]:
    given = _COUNT + _GIVEN_COUNT
    needs: list[str] = args[-1].split(",") if args[-1] else []
    return Tensors(*args[:_COUNT]), tuple(args[_COUNT:given]), Settings(*args[given:-1]), needs


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, s = _split(args)
    out, lse = dispatch.forward(dispatch.load(s.backend), problem_of(tensors, s), tensors)
    return _settled(out, s, rows=True), _settled(lse, s, rows=False)


def _lse_like(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, s = _split(args)
    shape = (*tensors.q.shape[:-1], tensors.v.shape[-1])
    lse = tensors.q.new_empty(shape[:-1], dtype=_lse_like(tensors.q))
    return _new(tensors.q, shape, s, rows=True), lse


def _backward(*args: Any) -> tuple[Tensor, ...]:
    tensors, given, s, needs = _split_backward(args)
    problem = problem_of(tensors, s)
    out, lse, dout, dlse = given
    grads = run_backward(dispatch.load(s.backend), problem, tensors, out, lse, dout, dlse, needs)
    by_name: dict[str, Tensor] = dict(zip(GRADIENTS, grads, strict=True))
    return tuple(
        _settled(by_name[name], s, rows=name in "qkv") if name in needs else tensors.q.new_empty(0)
        for name in GRADIENTS
    )


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    tensors, _, s, needs = _split_backward(args)
    inputs = {name: getattr(tensors, name) for name in needs}
    return tuple(
        _new(inputs[name], inputs[name].shape, s, rows=name in "qkv")
        if name in needs
        else tensors.q.new_empty(0)
        for name in GRADIENTS
    )


def save_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """What ``first_order`` needs."""
    tensors, ctx.settings = _split(inputs)
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def first_order(
    call: Callable[..., Sequence[Tensor]], ctx: Any, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Any, ...]:
    """The gradient of ``forward``, in the order of its arguments, by ``call``: ``backward`` in some form."""
    rest = (None,) * _SETTINGS_COUNT
    if dout is None and dlse is None:
        return (None,) * _COUNT + rest
    *arrays, out, lse = ctx.saved_tensors
    needs = needed(ctx.needs_input_grad[:_COUNT])
    grads = call(*arrays, out, lse, dout, dlse, *ctx.settings, ",".join(needs))
    return pick(grads, needs) + rest


_VARIABLES = (*Tensors._fields, "out", "lse", "dout", "dlse")


def save_backward(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    """What ``second_order`` needs."""
    tensors, given, ctx.settings, ctx.needs = _split_backward(inputs)
    ctx.save_for_backward(*tensors, *given)
    ctx.set_materialize_grads(False)


def second_order(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """The gradient of ``backward``: the whole call again in plain operations, which torch differentiates twice.

    What ``backward`` returns depends on q, k, v and the other inputs directly; out and lse are functions of them and
    count as constants here.
    """
    values = dict(zip(_VARIABLES, ctx.saved_tensors, strict=True))
    flags = dict(zip(_VARIABLES, ctx.needs_input_grad, strict=False))
    wanted = [name for name in _VARIABLES if flags[name] and name not in ("out", "lse")]

    def firsts(changed: dict[str, Tensor]) -> list[Tensor]:
        return _first_order_again(ctx.settings, {**values, **changed}, ctx.needs)

    results, pull = _pullback(firsts, {name: values[name] for name in wanted})
    by_name = dict(zip(GRADIENTS, grads, strict=True))
    given = [by_name[name] for name in ctx.needs]
    (found,) = pull([torch.zeros_like(y) if g is None else g for y, g in zip(results, given, strict=True)])
    return tuple(found.get(name) for name in _VARIABLES) + (None,) * (_SETTINGS_COUNT + 1)


def _first_order_again(s: Settings, values: dict[str, Any], needs: list[str]) -> list[Tensor]:
    """What ``backward`` computes, as a differentiable function of ``values``."""
    from ..backends.math import differentiable

    tensors = Tensors(*(values[name] for name in Tensors._fields))
    problem = problem_of(tensors, s)

    def outputs(changed: dict[str, Tensor]) -> tuple[Tensor, ...]:
        results = differentiable(problem, tensors._replace(**changed))
        return tuple(y for y, name in zip(results, ("dout", "dlse"), strict=True) if values[name] is not None)

    _, pull = _pullback(outputs, {name: values[name] for name in needs})
    (found,) = pull(tuple(values[name] for name in ("dout", "dlse") if values[name] is not None))
    return [found[name] for name in needs]


def _pullback(function: Callable[..., Any], at: dict[str, Tensor]) -> Any:
    # torch.func nests: this works inside another transform, and records what an outer backward may differentiate
    return torch.func.vjp(function, at)


def _first_order(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    return first_order(torch.ops.attnproof.backward, ctx, dout, dlse)


def _vmap_forward(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
    return batching.forward(torch.ops.attnproof.forward, info, in_dims, *args)


def _vmap_backward(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
    return batching.backward(torch.ops.attnproof.backward, info, in_dims, *args)


LIBRARY.impl("forward", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("attnproof::forward", _forward_fake, lib=LIBRARY)
torch.library.register_fake("attnproof::backward", _backward_fake, lib=LIBRARY)
torch.library.register_autograd("attnproof::forward", _first_order, setup_context=save_forward, lib=LIBRARY)
torch.library.register_autograd("attnproof::backward", second_order, setup_context=save_backward, lib=LIBRARY)
torch.library.register_vmap("attnproof::forward", _vmap_forward, lib=LIBRARY)
torch.library.register_vmap("attnproof::backward", _vmap_backward, lib=LIBRARY)
