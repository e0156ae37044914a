"""The device's place taken by an interpreter of gfx906 code: the same steps, the same argument bytes.

Every step is compiled by clang from the shipped text (with the step's own flags), its argument struct is packed as for
the driver, and only then are host addresses exchanged for the interpreter's. Inputs are mapped read-only.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnproof import gcn
from attnproof.backends.dot2 import arguments, loader, prebuilt, source
from attnproof.backends.dot2.variants import Step, Variant

WRITTEN = frozenset({"out", "lse", "parts", "delta", "dq", "dk", "dv", "dbias"})
_POOL = ThreadPoolExecutor(2)
_COMPILING: dict[str, Future[bytes]] = {}


@functools.cache
def _kept() -> Path:
    """Code objects of this run, and of others of the same sources where ATTNPROOF_MI50_CACHE names a folder."""
    named = os.environ.get("ATTNPROOF_MI50_CACHE")
    folder = Path(named) if named else Path(tempfile.mkdtemp(prefix="attnproof-mi50-"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compile(variant: Variant, text: str) -> bytes:
    path = _kept() / f"{source.digest(text, *variant.flags)}.co"
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}")
        made.write_bytes(prebuilt.clang(variant, text=text))
        made.replace(path)
    return path.read_bytes()


def compile_ahead(variant: Variant, text: str) -> Future[bytes]:
    """Start to compile, unless that has been done: the second core works while the first interprets."""
    key = source.digest(text, *variant.flags)
    if key not in _COMPILING:
        _COMPILING[key] = _POOL.submit(_compile, variant, text)
    return _COMPILING[key]


def compiled(variant: Variant, text: str) -> bytes:
    """The gfx906 code object of a text with a variant's flags."""
    return compile_ahead(variant, text).result()


@functools.cache
def loaded(raw: bytes) -> gcn.CodeObject:
    return gcn.CodeObject.load(raw)


def storage_of(x: torch.Tensor) -> tuple[int, np.ndarray[Any, Any]]:
    """Address and bytes of everything a tensor's storage holds."""
    whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    return x.untyped_storage().data_ptr(), whole.numpy()


def map_arrays(memory: gcn.Memory, arrays: dict[str, torch.Tensor]) -> dict[str, int]:
    """Place every storage once; interpreter addresses by field."""
    placed: dict[int, int] = {}
    found: dict[str, int] = {}
    for name, x in arrays.items():
        start, raw = storage_of(x)
        if raw.size == 0:
            found[name] = 0
            continue
        if start not in placed:
            shared = any(
                other.untyped_storage().data_ptr() == start and at in WRITTEN for at, other in arrays.items()
            )
            placed[start] = memory.place(raw, name=name, writable=shared)
        found[name] = placed[start] + x.data_ptr() - start
    return found


@dataclass
class Interpreter:
    """Runs steps; may change a kernel's text or code on the way.

    Attributes:
        units: compute units that decodes are split for.
        order: of the waves of a workgroup.
        edit: from a kernel's name and text to the text that is compiled.
        patch: from a code object to the one that is run, after loading.
        counts: what each step cost, by kernel.
    """

    units: int = 2
    order: str = "lockstep"
    edit: Callable[[str, str], str] = lambda kernel, text: text
    patch: Callable[[gcn.CodeObject], gcn.CodeObject] = lambda code: code
    counts: list[tuple[Step, gcn.Counts]] = field(default_factory=list)
    counting: bool = False

    def __call__(self, step: Step) -> None:
        text = self.edit(step.variant.kernel, source.text(step.variant.kernel))
        code = self.patch(loaded(compiled(step.variant, text)))
        memory = gcn.Memory()
        addresses = map_arrays(memory, step.arrays)
        for raw, groups in loader.packed(step):
            values = {**arguments.unpack(raw), **addresses}
            made = gcn.launch(
                code, step.variant.name, grid=(groups, 1, 1), block=(step.threads, 1, 1),
                kernarg=arguments.pack(values), memory=memory, order=self.order, counts=self.counting,
            )  # fmt: skip
            self.counts.append((step, made))


@dataclass
class Ahead:
    """Takes steps, and only has them compiled, after the same edit."""

    units: int = 2
    edit: Callable[[str, str], str] = lambda kernel, text: text

    def __call__(self, step: Step) -> None:
        compile_ahead(step.variant, self.edit(step.variant.kernel, source.text(step.variant.kernel)))
