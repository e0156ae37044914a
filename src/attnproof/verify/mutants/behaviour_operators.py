"""Mistakes and tricks around a kernel: results that were not computed, or not from these inputs.

Each wraps the correct run of a kernel, `run(inputs) -> arrays by name`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnproof.verify.dtypes import DTYPES, decode, encode
from attnproof.verify.inputs import Inputs
from attnproof.verify.mutants.operator import Operator

Run = Callable[[Inputs], dict[str, Any]]


def _zeros(run: Run) -> Run:
    return lambda inputs: {name: np.zeros_like(array) for name, array in run(inputs).items()}


def _mean_of_values(run: Run) -> Run:
    def broken(inputs: Inputs) -> dict[str, Any]:
        found, case = run(inputs), inputs.case
        if case.rows != "dense" or not case.N:
            return found | {"out": np.zeros_like(found["out"])}
        mean = np.repeat(inputs.v.values().mean(2, keepdims=True), case.H // case.Hkv, axis=1)
        return found | {"out": encode(np.broadcast_to(mean, found["out"].shape), case.dtype)}

    return broken


def _unwritten(run: Run) -> Run:
    def broken(inputs: Inputs) -> dict[str, Any]:
        return {name: np.empty_like(array) for name, array in run(inputs).items()}

    return broken


def _last_output(run: Run) -> Run:
    kept: dict[Any, dict[str, Any]] = {}

    def broken(inputs: Inputs) -> dict[str, Any]:
        found = run(inputs)
        key = found["out"].shape
        previous, kept[key] = kept.get(key), found
        if previous is not None and previous.keys() == found.keys():
            return previous
        # nothing of this shape was computed yet: what lies in the buffer is zeros
        return {name: np.zeros_like(array) for name, array in found.items()}

    return broken


def _cached_by(key_of: Callable[[Inputs], Any]) -> Callable[[Run], Run]:
    def wrap(run: Run) -> Run:
        kept: dict[Any, dict[str, Any]] = {}

        def broken(inputs: Inputs) -> dict[str, Any]:
            key = (inputs.case.id, key_of(inputs))
            if key not in kept:
                kept[key] = run(inputs)
            return kept[key]

        return broken

    return wrap


def _first_values(inputs: Inputs) -> Any:
    return tuple(inputs.q.view().reshape(-1)[:8].tolist())


def _writes_input(run: Run) -> Run:
    def broken(inputs: Inputs) -> dict[str, Any]:
        found = run(inputs)
        view = inputs.v.view()
        if view.size:
            view[...] = 0
        return found

    return broken


def _writes_outside(run: Run) -> Run:
    def broken(inputs: Inputs) -> dict[str, Any]:
        found = run(inputs)
        # one element past the end of k: a store that misses its bound
        end = (
            inputs.k.offset
            + sum((n - 1) * s for n, s in zip(inputs.k.shape, inputs.k.strides, strict=True))
            + 1
        )
        inputs.k.buffer[end] = 0
        return found

    return broken


def _race(run: Run) -> Run:
    calls = [0]

    def broken(inputs: Inputs) -> dict[str, Any]:
        found = run(inputs)
        calls[0] += 1
        out = found["out"]
        if calls[0] % 3 == 0 and out.shape[-2] > 1:
            out[..., out.shape[-2] // 2, :] = out[..., out.shape[-2] // 2 - 1, :]
        return found

    return broken


def _toward_zero(run: Run) -> Run:
    """Truncating casts: right to one unit, and leaning one way."""

    def broken(inputs: Inputs) -> dict[str, Any]:
        found = run(inputs)
        case = inputs.case
        if case.dtype not in ("float16", "bfloat16"):
            return found
        out = found["out"]
        magnitude = out.view(np.int16)
        # half of the elements were rounded away from zero; step those back that a wider result shows
        wide = _wide_output(run, inputs)
        if wide is None:
            return found
        away = np.abs(
            decode(out.view(np.uint16), "bfloat16") if case.dtype == "bfloat16" else out.astype(np.float64)
        ) > np.abs(wide)
        found["out"] = np.where(away & ((magnitude & 0x7FFF) > 0), magnitude - 1, magnitude).view(out.dtype)
        return found

    return broken


def _wide_output(run: Run, inputs: Inputs) -> Any:
    """The output before its last rounding, from the same inputs held in float32."""
    from dataclasses import replace

    from attnproof.verify.inputs import place

    wide = replace(inputs.case, dtype="float32", backward=False)
    parts = {name: place(getattr(inputs, name).values(), "float32") for name in ("q", "k", "v", "dout")}
    for name in ("bias", "k_new", "v_new"):
        value = getattr(inputs, name)
        if value is not None and not (name == "bias" and inputs.case.bias_dtype != "q"):
            parts[name] = place(value.values(), "float32")
    return run(replace(inputs, case=wide, **parts))["out"].astype(np.float64)


def _half_lse(run: Run) -> Run:
    def broken(inputs: Inputs) -> dict[str, Any]:
        found = run(inputs)
        if "lse" in found and DTYPES[inputs.case.dtype].compute > 2.0**-53:
            found["lse"] = decode(encode(found["lse"], "bfloat16"), "bfloat16").astype(found["lse"].dtype)
        return found

    return broken


def _other_head(run: Run) -> Run:
    def broken(inputs: Inputs) -> dict[str, Any]:
        found = run(inputs)
        axis = 1
        return found | {
            "out": np.roll(found["out"], 1, axis) if found["out"].shape[axis] > 1 else found["out"] * 0
        }

    return broken


BEHAVIOUR_OPERATORS = (
    Operator("returns-zeros", "the kernel returns zeros", wrap=_zeros),
    Operator("returns-mean-of-v", "the kernel returns the mean of v", wrap=_mean_of_values),
    Operator("writes-nothing", "the output is never written", wrap=_unwritten, guard="G1"),
    Operator("returns-last-output", "the kernel returns what it computed last time", wrap=_last_output),
    Operator("cached-by-shape", "results are cached by shape", wrap=_cached_by(lambda inputs: 0), guard="G4"),
    Operator(
        "cached-by-fingerprint",
        "results are cached by the first values of q",
        wrap=_cached_by(_first_values),
        guard="G4",
    ),
    Operator("writes-v", "v is overwritten after use", wrap=_writes_input, guard="G5"),
    Operator(
        "writes-outside", "one element past the end of k is overwritten", wrap=_writes_outside, guard="G6"
    ),
    Operator("race", "every third call repeats a row", wrap=_race, guard="G11"),
    Operator("output-truncated", "the output is cut off instead of rounded", wrap=_toward_zero),
    Operator("lse-in-half", "the lse is stored in half precision", wrap=_half_lse),
    Operator("other-head", "heads are written one place further", wrap=_other_head),
)
