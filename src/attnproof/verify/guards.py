"""What numbers alone do not catch: kernels that are right for the wrong reason.

    G1  outputs come from poisoned memory       G9   no faster than memory and arithmetic allow
    G2  the reference is finite                 G10  the path that was asked for is the one that ran
    G3  a case fails every decoy                G11  repeated calls agree
    G4  fresh values give fresh results         G12  precision is that of the declared class, TF32 is off
    G5  inputs are unchanged                    G13  launches and resources are checked
    G6  poison around every array               G14  hidden seeds and shapes
    G7  the result is complete when returned    G15  strides beyond 2^31
    G8  clocks are the real ones

In-process Python can never be tamper-proof; these guards assume a cooperative author and find honest mistakes.
`isolation` adds a child process for the rest.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import numpy as np

from attnproof.verify.candidate import Candidate
from attnproof.verify.inputs import FAR_REACH, Inputs, Placed


def fingerprint(inputs: Inputs) -> dict[str, int]:
    """A checksum of every buffer, poison bands included (G5, G6)."""
    return {name: crc32(np.ascontiguousarray(array).view(np.uint8).data) for name, array in _buffers(inputs)}


def _buffers(inputs: Inputs) -> Iterator[tuple[str, Any]]:
    for name in ("q", "k", "v", "dout", "bias", "keep", "slopes", "sink", "cu_q", "cu_k", "block_table"):
        value = getattr(inputs, name)
        if value is None:
            continue
        if isinstance(value, Placed):
            if inputs.case.append and name in ("k", "v"):
                continue  # an append writes to the cache by design
            # a far layout spans gigabytes of untouched pages: look at its elements only
            value = value.view() if value.buffer.size > FAR_REACH // 2 else value.buffer
        yield name, value


def changed(inputs: Inputs, before: dict[str, int]) -> list[str]:
    """Names of inputs whose bytes are not what they were."""
    after = fingerprint(inputs)
    return [name for name, value in before.items() if after[name] != value]


@contextmanager
def poisoned(candidate: Candidate) -> Generator[None, None, None]:
    """Uninitialised memory holds NaN while the candidate runs (G1).

    NumPy's and torch's allocation functions fill what they hand out. A kernel that leaves rows unwritten then returns
    NaN there, whatever lay in that memory before.
    """
    undo = [_patch(np, name, _poisoned_numpy(getattr(np, name))) for name in ("empty", "empty_like")]
    if candidate.traits.arrays == "torch" or candidate.own:
        undo += _poison_torch()
    try:
        yield
    finally:
        for module, name, original in undo:
            setattr(module, name, original)


def _patch(module: Any, name: str, replacement: Any) -> tuple[Any, str, Any]:
    original = getattr(module, name)
    setattr(module, name, replacement)
    return module, name, original


def _poisoned_numpy(allocate: Any) -> Any:
    def poisoned_allocate(*args: Any, **kwargs: Any) -> Any:
        array = allocate(*args, **kwargs)
        if array.dtype.kind == "f":
            array.fill(np.nan)
        elif array.dtype == np.uint16:
            array.fill(0x7FC1)  # a bfloat16 NaN as raw bits
        return array

    return poisoned_allocate


def _poison_torch() -> list[tuple[Any, str, Any]]:
    try:
        import torch
    except ImportError:
        return []

    def wrap(allocate: Any) -> Any:
        def poisoned_allocate(*args: Any, **kwargs: Any) -> Any:
            tensor = allocate(*args, **kwargs)
            # a compiler's stand-ins have no memory to fill
            real = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta"
            if real and tensor.is_floating_point():
                tensor.detach().fill_(float("nan"))
            return tensor

        return poisoned_allocate

    names = ("empty", "empty_like", "empty_strided")
    return [_patch(torch, name, wrap(getattr(torch, name))) for name in names]
