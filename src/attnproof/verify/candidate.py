"""What can be judged: a candidate is a function, plus what it says about itself.

The least that is asked for is

    fn(q, k, v, *, causal, scale, mask=None) -> out  or  (out, lse)

with q `[B,H,M,D]`, k `[B,Hkv,N,D]`, v `[B,Hkv,N,Dv]` as torch tensors (or NumPy arrays), `mask` boolean with True =
may attend. Every further option (`window`, `bias`, `alibi_slopes`, `softcap`, `sink`, `dropout_p`, `seed`, `align`) is
passed by keyword, and only to functions that name it; cases that need an option which the function does not name are
skipped with that reason. What else a kernel wants to say goes into a dict, on the function or its module:

    fn.attnproof = {"numerics": "eager", "align": "top_left", "gqa": False}

A skipped case is never a passed one; the coverage is part of every report.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnproof.cases import UNBOUNDED, Case
from attnproof.verify.dtypes import Array, decode
from attnproof.verify.inputs import Inputs, Placed
from attnproof.verify.numerics import Numerics, numerics

OPTIONS = ("window", "bias", "alibi_slopes", "softcap", "sink", "dropout_p")


class Skip(Exception):
    """A candidate cannot do this case; the message says why."""


@dataclass(frozen=True)
class Traits:
    """What a candidate says about itself.

    Attributes:
        numerics: class of the error model, or a dict of its fields.
        align: which corner `causal` means when M and N differ.
        gqa: whether fewer key than query heads are taken.
        arrays: "torch" or "numpy".
        layout: "bhmd" or "bmhd": the axis order that the function wants; only strides change.
        dtypes: names of the dtypes that are served, empty for all.
        deterministic: whether two calls agree bit for bit.
        backward: why there is no gradient, empty where there is one.
        limits: called with a case, returns why it is not served, or None.
    """

    numerics: Any = "flash"
    align: str = "bottom_right"
    gqa: bool = True
    arrays: str = "torch"
    layout: str = "bhmd"
    dtypes: tuple[str, ...] = ()
    deterministic: bool = True
    backward: str = ""
    limits: Callable[[Case], str | None] | None = None


@dataclass
class Candidate:
    """A loaded candidate.

    Attributes:
        name: how it was named on the command line.
        call: runs one case and returns what came out; raises `Skip`.
        traits: what it says about itself.
        device: where the tensors are made.
        own: one of this package's backends.
        peer: only looked at: its deviations are findings and do not fail the run.
        refuse: why a case is not served, or None.
        witness: called after a run, names what really ran, or None where that cannot be told.
        source: the file that it comes from, for the record.
        child: the process that it runs in, in an adversarial run.
        word: what was asked for, where `name` is not it; another process loads the kernel by it.
    """

    name: str
    call: Callable[[Inputs], Outputs]
    traits: Traits = field(default_factory=Traits)
    device: str = "cpu"
    own: bool = False
    refuse: Callable[[Case], str | None] = lambda case: None
    witness: Callable[[], str] | None = None
    source: str = ""
    peer: bool = False
    child: Any = None
    word: str = ""

    @property
    def source_hash(self) -> str:
        """A short hash of the file that the kernel comes from, empty where there is none."""
        from hashlib import sha256
        from pathlib import Path

        path = Path(self.source)
        return sha256(path.read_bytes()).hexdigest()[:12] if self.source and path.is_file() else ""

    @property
    def kind(self) -> Numerics:
        """The class of the error model that it declares."""
        return numerics(self.traits.numerics)


@dataclass
class Outputs:
    """What a candidate returned: decoded to float64 by name, and the objects themselves."""

    values: dict[str, Array]
    raw: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class Native:
    """The inputs of a case as the candidate's kind of array."""

    q: Any
    k: Any
    v: Any
    dout: Any
    keep: Any = None
    bias: Any = None
    slopes: Any = None
    sink: Any = None
    dlse: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


def native(inputs: Inputs, arrays: str, device: str = "cpu") -> Native:
    """Torch tensors or NumPy views over the poisoned buffers, strides and offsets kept."""
    convert = _torch_array(device) if arrays == "torch" else _numpy_array
    plain = _torch_plain(device) if arrays == "torch" else (lambda x: x)
    wide = np.float64 if inputs.case.dtype == "float64" else np.float32
    made = Native(*(convert(part) for part in (inputs.q, inputs.k, inputs.v, inputs.dout)))
    made.keep = None if inputs.keep is None else plain(np.ascontiguousarray(inputs.keep))
    made.bias = None if inputs.bias is None else convert(inputs.bias)
    made.slopes = None if inputs.slopes is None else plain(inputs.slopes.astype(wide))
    made.sink = None if inputs.sink is None else plain(inputs.sink.astype(wide))
    made.dlse = None if inputs.dlse is None else plain(inputs.dlse.astype(wide))
    for name in ("cu_q", "cu_k", "lengths", "block_table"):
        value = getattr(inputs, name)
        if value is not None:
            made.extra[name] = plain(value)
    for name in ("k_new", "v_new"):
        value = getattr(inputs, name)
        if value is not None:
            made.extra[name] = convert(value)
    return made


def _numpy_array(placed: Placed) -> Any:
    view = placed.view()
    if placed.dtype != "bfloat16":
        return view
    try:
        import ml_dtypes
    except ImportError:
        raise Skip("bfloat16 NumPy arrays need ml_dtypes") from None
    return view.view(ml_dtypes.bfloat16)


def _torch_array(device: str) -> Callable[[Placed], Any]:
    import torch

    def convert(placed: Placed) -> Any:
        # uint16 bits become bfloat16 without touching a bit
        block = torch.from_numpy(placed.buffer)
        block = block.view(torch.bfloat16) if placed.dtype == "bfloat16" else block
        return block.to(device).as_strided(placed.shape, placed.strides, placed.offset)

    return convert


def _torch_plain(device: str) -> Callable[[Array], Any]:
    import torch

    return lambda array: torch.from_numpy(np.array(array)).to(device)


def to_float64(array: Any) -> Array:
    """Any returned array as float64, exactly."""
    if hasattr(array, "detach"):
        import torch

        return array.detach().to("cpu", torch.float64).numpy()
    if array.dtype == np.uint16:
        return decode(array, "bfloat16")
    return np.asarray(array).astype(np.float64)


def refusal(case: Case, traits: Traits, accepted: frozenset[str] | None) -> str | None:
    """Why a function with these traits and keyword names cannot take a case; `accepted` None means any keyword."""
    if traits.dtypes and case.dtype not in traits.dtypes:
        return f"takes {', '.join(traits.dtypes)}"
    if case.rows != "dense":
        return f"no {case.rows} rows"
    if case.Hkv != case.H and not traits.gqa:
        return "needs as many key heads as query heads"
    if traits.limits is not None:
        reason = traits.limits(case)
        if reason:
            return reason
    if case.causal and case.M != case.N and case.align != traits.align and not _names(accepted, "align"):
        return f"its causal mask is aligned {traits.align.replace('_', ' ')}"
    needed = {"causal": case.causal, "scale": case.scale is not None, "mask": bool(case.keep)}
    needed |= {name: name in case.features for name in OPTIONS}
    missing = [name for name, wanted in needed.items() if wanted and not _names(accepted, name)]
    return f"does not take {', '.join(missing)}" if missing else None


def _names(accepted: frozenset[str] | None, name: str) -> bool:
    return accepted is None or name in accepted


def keywords(fn: Callable[..., Any]) -> frozenset[str] | None:
    """Keyword names of a function, or None when it takes any."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))


def call_options(inputs: Inputs, arrays: Native, accepted: frozenset[str] | None) -> dict[str, Any]:
    """The keyword arguments of one case; plain ones always, others only where the case needs them."""
    case = inputs.case
    options: dict[str, Any] = {"causal": case.causal, "scale": case.softmax_scale}
    options = {name: value for name, value in options.items() if _names(accepted, name)}
    optional = {
        "mask": arrays.keep,
        "window": None if case.window == (UNBOUNDED, UNBOUNDED) else case.window,
        "bias": arrays.bias,
        "alibi_slopes": arrays.slopes,
        "softcap": case.softcap or None,
        "sink": arrays.sink,
        "dropout_p": case.dropout_p or None,
        "align": case.align
        if case.causal and case.M != case.N and accepted is not None and "align" in accepted
        else None,
    }
    options |= {name: value for name, value in optional.items() if value is not None}
    if case.dropout_p:
        options["seed"] = np.array(inputs.rng, np.int64)
    return options


def wrap(
    name: str, fn: Callable[..., Any], traits: Traits, *, device: str = "cpu", own: bool = False
) -> Candidate:
    """A candidate from a function of the documented form."""
    accepted = keywords(fn)

    def call(inputs: Inputs) -> Outputs:
        return run_function(fn, traits, accepted, inputs, device)

    return Candidate(name, call, traits, device, own, lambda case: refusal(case, traits, accepted))


def run_function(
    fn: Callable[..., Any], traits: Traits, accepted: frozenset[str] | None, inputs: Inputs, device: str
) -> Outputs:
    """Forward, and backward by autograd or by the function's own `backward`."""
    case = inputs.case
    arrays = native(inputs, traits.arrays, device)
    swap = traits.layout == "bmhd"
    tensors = [part.swapaxes(1, 2) if swap else part for part in (arrays.q, arrays.k, arrays.v)]
    options = call_options(inputs, arrays, accepted)
    own_backward = getattr(fn, "backward", None)
    autograd = case.backward and traits.arrays == "torch" and own_backward is None and not traits.backward
    leaves: dict[str, Any] = dict(zip(("dq", "dk", "dv"), tensors, strict=True))
    if autograd:
        tensors, leaves = _as_leaves(tensors, options)
    with _grad_mode(traits.arrays, autograd):
        result = fn(*tensors, **options)
    out, lse = split_result(result)
    raw = {"out": out} if lse is None else {"out": out, "lse": lse}
    dout = arrays.dout.swapaxes(1, 2) if swap else arrays.dout
    notes: tuple[str, ...] = ()
    if autograd:
        notes = _autograd(raw, leaves, dout, arrays.dlse)
    elif case.backward and own_backward is not None:
        grads = own_backward(*tensors, out, lse, dout, **options)
        raw |= dict(zip(("dq", "dk", "dv"), grads, strict=False))
    elif case.backward:
        notes = (f"no backward: {traits.backward or 'NumPy function without one'}",)
    values = {name: to_float64(array) for name, array in raw.items()}
    if swap:
        values = {
            name: value.swapaxes(1, 2) if value.ndim == 4 and name != "dbias" else value
            for name, value in values.items()
        }
    return Outputs(values, raw, notes)


def split_result(result: Any) -> tuple[Any, Any]:
    """`out` or `(out, lse)`, strictly: anything else is an error of the candidate."""
    if isinstance(result, tuple):
        if len(result) != 2:
            raise TypeError(f"candidate: expected out or (out, lse), got a tuple of {len(result)}")
        out, lse = result
    else:
        out, lse = result, None
    for part, label in ((out, "out"), (lse, "lse")):
        if part is not None and type(part).__module__.split(".")[0] not in ("torch", "numpy"):
            raise TypeError(f"candidate: expected an array as {label}, got {type(part).__name__}")
    return out, lse


def _as_leaves(tensors: list[Any], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Leaf tensors that keep the strides and storage of the given ones."""
    fresh = [tensor.detach().requires_grad_(True) for tensor in tensors]
    leaves: dict[str, Any] = dict(zip(("dq", "dk", "dv"), fresh, strict=True))
    for option, grad in (("bias", "dbias"), ("sink", "dsink"), ("alibi_slopes", "dslopes")):
        if option in options:
            leaves[grad] = options[option] = options[option].detach().requires_grad_(True)
    return fresh, leaves


def _grad_mode(arrays: str, on: bool) -> Any:
    if arrays != "torch":
        from contextlib import nullcontext

        return nullcontext()
    import torch

    return torch.enable_grad() if on else torch.no_grad()


def _autograd(raw: dict[str, Any], leaves: dict[str, Any], dout: Any, dlse: Any) -> tuple[str, ...]:
    import torch

    outputs, weights = [raw["out"]], [dout]
    if not raw["out"].requires_grad:
        return ("no backward: the result does not require grad",)
    if dlse is not None:
        if "lse" not in raw or not raw["lse"].requires_grad:
            return ("no backward: the lse is not differentiable",)
        outputs, weights = [*outputs, raw["lse"]], [*weights, dlse]
    grads: tuple[Any, ...] = torch.autograd.grad(outputs, list(leaves.values()), weights, allow_unused=True)
    raw |= {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
    return ()
