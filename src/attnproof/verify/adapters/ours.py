"""This package's own backends, through the public functions a user calls."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from attnproof.cases import UNBOUNDED, Case
from attnproof.problem import Rows
from attnproof.verify.candidate import Candidate, Native, Outputs, Skip, Traits, native, to_float64
from attnproof.verify.inputs import Inputs
from attnproof.verify.numerics import of_backend

GRADS = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "alibi_slopes": "dslopes", "sink": "dsink"}


def build(name: str, device: str | None = None) -> Candidate:
    """A backend by its name in `attnproof.backends()`."""
    from attnproof import dispatch

    if name not in dispatch.backends():
        raise Skip(f"no backend of that name; there are {', '.join(dispatch.backends())}")
    backend = dispatch.load(name)
    arrays = "torch" if _torch_here() else "numpy"
    device = device or ("cpu" if backend.kind == "numpy" else _accelerator())
    traits = Traits(numerics=of_backend(backend), arrays=arrays)
    candidate = Candidate(
        f"attnproof:{name}", lambda inputs: _run(name, inputs, arrays, device), traits, device, own=True
    )
    candidate.refuse = lambda case: _refuse(backend, case, device)
    candidate.witness = lambda: name
    return candidate


def names() -> tuple[str, ...]:
    """Every backend that can run on this machine."""
    return tuple(name for name, reason in here().items() if reason is None)


def here() -> dict[str, str | None]:
    """Each backend with the reason why it cannot run on this machine at all, or None."""
    from attnproof import dispatch

    return {name: _absence(name) for name in dispatch.backends()}


def _absence(name: str) -> str | None:
    """Why a backend refuses the plainest cases, in every dtype that they have."""
    from attnproof import dispatch
    from attnproof.cases import DTYPES, find

    try:
        backend = dispatch.load(name)
    except ImportError as error:
        return str(error)
    if backend.kind != "numpy" and not _torch_here():
        return "torch is not installed"
    device = "cpu" if backend.kind == "numpy" else _accelerator()
    reasons = [_refuse(backend, find(f"normal-128/{dtype}"), device) for dtype in DTYPES]
    return None if None in reasons else reasons[0]


def _torch_here() -> bool:
    from importlib.util import find_spec

    return find_spec("torch") is not None


def _accelerator() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _refuse(backend: Any, case: Case, device: str) -> str | None:
    """Ask the backend itself, about the problem that the case will become."""
    return backend.why_not(problem_of(case, device))


def problem_of(case: Case, device: str) -> Any:
    """The `Problem` of a case, without making its arrays."""
    from attnproof.problem import Problem
    from attnproof.verify.expected import band

    left, right = band(case)
    full = (case.B, case.H, case.M, case.N)
    shape = tuple(1 if axis == "1" else size for axis, size in zip(case.bias_axes, full, strict=True))
    return Problem(
        dtype=case.dtype,
        device=device,
        B=case.B,
        H=case.H,
        Hkv=case.Hkv,
        M=case.M,
        N=case.N,
        D=case.D,
        Dv=case.Dv,
        rows=cast(Rows, case.rows),
        page=case.page,
        scale=case.softmax_scale,
        softcap=case.softcap,
        left=left,
        right=right,  # type: ignore[arg-type]
        top_left=case.causal and case.align == "top_left",
        has_keep=bool(case.keep),
        bias_shape=shape if case.bias else None,  # type: ignore[arg-type]
        bias_dtype="" if not case.bias else case.dtype if case.bias_dtype == "q" else case.bias_dtype,
        has_alibi=case.alibi,
        has_sink=case.sink,
        dropout_p=case.dropout_p,
        tokens=(sum(case.lens_q), sum(case.lens_k)) if case.rows == "packed" else (0, 0),
    )


def _options(inputs: Inputs, arrays: Native, name: str) -> dict[str, Any]:
    case = inputs.case
    options: dict[str, Any] = {
        "causal": case.causal,
        "align": case.align,
        "window": case.window,
        "mask": arrays.keep,
        "bias": arrays.bias,
        "alibi_slopes": arrays.slopes,
        "softcap": case.softcap or None,
        "sink": arrays.sink,
        "scale": case.scale,
        "dropout_p": case.dropout_p,
        "backend": name,
    }
    if case.window == (UNBOUNDED, UNBOUNDED):
        del options["window"]
    if case.dropout_p:
        key = np.array(inputs.rng, np.int64)
        options["seed"] = key if isinstance(arrays.q, np.ndarray) else _like(key, arrays.q)
    return options


def _like(array: Any, tensor: Any) -> Any:
    import torch

    return torch.from_numpy(array).to(tensor.device)


def _run(name: str, inputs: Inputs, arrays: str, device: str) -> Outputs:
    made = native(inputs, arrays, device)
    options = _options(inputs, made, name)
    if inputs.case.rows in ("cached", "paged"):
        return _decode(inputs, made, options)
    run = _run_torch if arrays == "torch" else _run_numpy
    raw = run(inputs, made, options)
    return Outputs({label: to_float64(array) for label, array in raw.items()}, raw)


def _forward(inputs: Inputs, made: Native, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    from attnproof import api

    if inputs.case.rows == "packed":
        return api.attention_varlen_with_lse(
            q,
            k,
            v,
            made.extra["cu_q"],
            made.extra["cu_k"],
            max_seqlen_q=inputs.case.M,
            max_seqlen_k=inputs.case.N,
            **options,
        )
    if inputs.case.layout == "bmhd":
        swapped = [part.swapaxes(1, 2) for part in (q, k, v)]
        out, lse = api.attention_with_lse(*swapped, layout="bmhd", **options)
        return out.swapaxes(1, 2), lse
    return api.attention_with_lse(q, k, v, **options)


def _run_torch(inputs: Inputs, made: Native, options: dict[str, Any]) -> dict[str, Any]:
    import torch

    case = inputs.case
    leaves = {
        "q": made.q,
        "k": made.k,
        "v": made.v,
        "bias": made.bias,
        "alibi_slopes": made.slopes,
        "sink": made.sink,
    }
    leaves = {label: leaf for label, leaf in leaves.items() if leaf is not None}
    if case.backward:
        leaves = {label: leaf.detach().requires_grad_(True) for label, leaf in leaves.items()}
    options |= {label: leaf for label, leaf in leaves.items() if label in ("bias", "alibi_slopes", "sink")}
    with torch.set_grad_enabled(case.backward):
        out, lse = _forward(inputs, made, leaves["q"], leaves["k"], leaves["v"], options)
    raw = {"out": out, "lse": lse}
    if case.backward:
        outputs, weights = (
            ([out, lse], [made.dout, made.dlse]) if made.dlse is not None else ([out], [made.dout])
        )
        grads = torch.autograd.grad(outputs, list(leaves.values()), weights)
        raw |= {GRADS[label]: grad for label, grad in zip(leaves, grads, strict=True)}
    return raw


def _run_numpy(inputs: Inputs, made: Native, options: dict[str, Any]) -> dict[str, Any]:
    from attnproof import api

    out, lse = _forward(inputs, made, made.q, made.k, made.v, options)
    raw = {"out": out, "lse": lse}
    if inputs.case.backward and inputs.case.rows == "dense":
        grads = api.attention_backward(made.q, made.k, made.v, out, lse, made.dout, dlse=made.dlse, **options)
        found = zip(GRADS.values(), grads, strict=True)
        raw |= {label: grad for label, grad in found if grad is not None}
    return raw


def _decode(inputs: Inputs, made: Native, options: dict[str, Any]) -> Outputs:
    from attnproof import api

    new = {label: made.extra[label] for label in ("k_new", "v_new", "block_table") if label in made.extra}
    out = api.attention_decode(made.q, made.k, made.v, made.extra["lengths"], **new, **options)
    return Outputs({"out": to_float64(out)}, {"out": out})
