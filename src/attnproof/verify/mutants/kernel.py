"""Build a mutated streaming kernel from source text, and run any streaming-like module on a case.

The mutated modules exist only in memory: the edited text is compiled under the package's own name, so its relative
imports find the rest of the package, and every name that a mutated module lends to the kernel is exchanged.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from attnproof.verify.candidate import Candidate, Outputs, Traits, to_float64
from attnproof.verify.dtypes import decode
from attnproof.verify.inputs import Inputs
from attnproof.verify.mutants.operator import Operator

HOME = {
    "streaming": "attnproof.backends.streaming",
    "online_softmax": "attnproof.online_softmax",
    "scores": "attnproof.scores",
    "masks": "attnproof.masks",
    "rows": "attnproof.rows",
    "philox": "attnproof.philox",
}
BLOCK = 64  # small tiles: more edges per case


class DoesNotApply(Exception):
    """The text that an operator edits is not in the source any more: the operator must follow the kernel."""


@cache
def source(name: str) -> str:
    """Source text of one of the kernel's modules."""
    return inspect.getsource(import_module(HOME[name]))


def edited(operator: Operator) -> dict[str, str]:
    """The new source texts of an operator, by module."""
    texts: dict[str, str] = {}
    for module, old, new in operator.edits:
        text = texts.get(module, source(module))
        count = text.count(old)
        if count != 1:
            raise DoesNotApply(f"{operator.name}: expected {old!r} once in {module}, found it {count} times")
        texts[module] = text.replace(old, new)
    return texts


def build(texts: dict[str, str]) -> ModuleType:
    """A streaming module in which these texts replace the originals."""
    made = {name: _compile(name, text) for name, text in texts.items() if name != "streaming"}
    if "rows" in made or "masks" in made:
        # rows reads masks by name; give it the mutated ones
        made.setdefault("rows", _compile("rows", source("rows")))
        _exchange(made["rows"], {name: module for name, module in made.items() if name == "masks"})
    kernel = _compile("streaming", texts.get("streaming", source("streaming")))
    _exchange(kernel, made)
    return kernel


def _compile(name: str, text: str) -> ModuleType:
    home = HOME[name]
    module = ModuleType(home)
    module.__package__ = home.rpartition(".")[0]
    module.__file__ = f"<mutant of {name}>"
    import sys

    # dataclasses look their module up while the class body runs
    original = sys.modules[home]
    sys.modules[home] = module
    try:
        exec(compile(text, module.__file__, "exec"), module.__dict__)
    finally:
        sys.modules[home] = original
    return module


def _exchange(user: ModuleType, made: dict[str, ModuleType]) -> None:
    """Give `user` the mutated modules, and the mutated functions that it imported by name."""
    for name, module in made.items():
        original = import_module(HOME[name])
        if getattr(user, name, None) is original:
            setattr(user, name, module)
        for label, value in list(vars(user).items()):
            if not label.startswith("__") and value is not None and getattr(original, label, None) is value:
                setattr(user, label, getattr(module, label))


def run_streaming(kernel: Any, inputs: Inputs) -> dict[str, Any]:
    """Forward and backward of a streaming-like module on a case; arrays in storage form."""
    from attnproof.problem import GRADIENTS, Tensors

    case = inputs.case
    problem, tensors = describe(inputs)
    out, lse = kernel.forward(problem, tensors, block_m=BLOCK, block_n=BLOCK)
    packed = case.rows == "packed"
    found: dict[str, Any] = {"out": out.swapaxes(0, 1) if packed else out}
    if case.rows in ("dense", "packed"):
        found["lse"] = lse
    if case.backward:
        dout = inputs.dout.view().swapaxes(0, 1) if packed else inputs.dout.view()
        dlse = None if inputs.dlse is None else inputs.dlse.astype(problem.lse_dtype)
        given = Tensors(*tensors)
        needs = frozenset(name for name in GRADIENTS if getattr(given, name) is not None)
        grads = kernel.backward(problem, tensors, out, lse, dout, dlse, needs, block_m=BLOCK, block_n=BLOCK)
        names = ("dq", "dk", "dv", "dbias", "dslopes", "dsink")
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                found[name] = grad.swapaxes(0, 1) if packed and name in ("dq", "dk", "dv") else grad
    return found


def describe(inputs: Inputs) -> tuple[Any, Any]:
    """`Problem` and `Tensors` of a case in the canonical views, without the public functions."""
    from attnproof.problem import Tensors
    from attnproof.verify.adapters.ours import problem_of

    case = inputs.case
    problem = problem_of(case, "cpu")
    wide = np.float64 if case.dtype == "float64" else np.float32
    q, k, v = (part.view() for part in (inputs.q, inputs.k, inputs.v))
    lengths = None
    if case.rows == "packed":
        problem = replace(problem, tokens=(q.shape[0], k.shape[0]))
        q, k, v = (part.swapaxes(0, 1) for part in (q, k, v))
    elif case.rows != "dense":
        k, v, lengths = _appended(inputs, k.copy(), v.copy())
        width = 1 if inputs.block_table is None else inputs.block_table.shape[1]
        problem = replace(problem, N=k.shape[2] * width)
    tensors = Tensors(
        q,
        k,
        v,
        bias=None if inputs.bias is None else inputs.bias.view(),
        keep=inputs.keep,
        alibi_slopes=None if inputs.slopes is None else inputs.slopes.astype(wide),
        sink=None if inputs.sink is None else inputs.sink.astype(wide),
        cu_q=inputs.cu_q,
        cu_k=inputs.cu_k,
        lengths=lengths,
        block_table=inputs.block_table,
        rng=np.array(inputs.rng, np.int64) if case.dropout_p else None,
    )
    return problem, tensors


def _appended(inputs: Inputs, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """The caches after the new keys were written, and the lengths."""
    if inputs.lengths is None:
        raise ValueError("inputs: expected lengths of a cache, got None")
    for row, start in enumerate(inputs.lengths):
        for token in range(inputs.case.append):
            at = int(start) + token
            slot, place = (row, at)
            if inputs.block_table is not None:
                slot, place = inputs.block_table[row, at // inputs.case.page], at % inputs.case.page
            for kept, new in ((k, inputs.k_new), (v, inputs.v_new)):
                if new is None:
                    raise ValueError("inputs: expected new keys and values, got None")
                kept[slot, :, place] = new.view()[row, :, token]
    return k, v, inputs.lengths + np.int32(inputs.case.append)


def outputs_of(found: dict[str, Any], inputs: Inputs) -> Outputs:
    """Storage arrays as float64 values, each by its own dtype."""
    values: dict[str, Any] = {}
    for name, array in found.items():
        bits = array.dtype == np.uint16
        values[name] = decode(array, "bfloat16") if bits else to_float64(array)
    return Outputs(values, found)


def candidate(name: str, run: Any) -> Candidate:
    """A candidate around `run(inputs) -> storage arrays by name`."""

    def call(inputs: Inputs) -> Outputs:
        return outputs_of(run(inputs), inputs)

    return Candidate(name, call, Traits(numerics="precise", arrays="numpy"))


def correct() -> Candidate:
    """The unmutated kernel with the small tiles of the mutants."""
    kernel = build({})
    return candidate("streaming", lambda inputs: run_streaming(kernel, inputs))


def mutate(operator: Operator) -> Candidate:
    """The candidate that an operator makes."""
    kernel = build(edited(operator))

    def run(inputs: Inputs) -> dict[str, Any]:
        return run_streaming(kernel, inputs)

    return candidate(operator.name, operator.wrap(run) if operator.wrap else run)
