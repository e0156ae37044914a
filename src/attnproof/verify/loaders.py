"""From a word on the command line to a candidate.

attnproof:NAME       one of this package's backends          streaming, reference, ...
sdpa:NAME            torch's fused attention                 flash, efficient, cudnn, math
torch:eager, torch:flex
flash_attn, xformers, flashinfer                             when installed
file.py:function     a function in a file
module:attribute     a function in an importable module
lib.so:symbol        a C function, with an argument map in lib.toml next to it (see `cabi`)
NAME                 an entry point of the group `attnproof.candidates`
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from attnproof.verify.candidate import Candidate, Skip, Traits, wrap

GROUP = "attnproof.candidates"
EXTERNAL = ("flash_attn", "xformers", "flashinfer")


def load(word: str, device: str | None = None) -> Candidate:
    """The candidate that a word names.

    Raises:
        ValueError: nothing of that name can be loaded; the message says what was tried.
        Skip: it exists in principle, but not on this machine.
    """
    head, colon, tail = word.rpartition(":")
    if word in EXTERNAL or head in EXTERNAL:
        from attnproof.verify.adapters import external

        return external.build(head or word, tail if head else "", device)
    if not colon:
        return _entry_point(word, device)
    if head in ("attnproof", "sdpa", "torch"):
        return _built_in(head, tail, device)
    if head.endswith((".so", ".dll", ".dylib")):
        from attnproof.verify.cabi import load_library

        return load_library(Path(head), tail)
    return from_function(word, function_of(word), device)


def function_of(word: str) -> Any:
    """The function that `file.py:name` or `module:name` means."""
    head, _, tail = word.rpartition(":")
    if head.endswith(".py"):
        return _attribute(_file_module(head), tail, word)
    try:
        module = importlib.import_module(head)
    except ImportError as error:
        raise ValueError(f"candidate: cannot import {head!r} of {word!r}: {error}") from None
    return _attribute(module, tail, word)


def _built_in(head: str, tail: str, device: str | None) -> Candidate:
    from attnproof.verify.adapters import flex, ours, sdpa

    if head == "attnproof":
        return ours.build(tail, device)
    if head == "torch" and tail == "flex":
        return flex.build(device)
    if head == "torch" and tail != "eager":
        raise ValueError(f"candidate: expected torch:eager or torch:flex, got torch:{tail}")
    return sdpa.build(tail, device)


def _entry_point(word: str, device: str | None) -> Candidate:
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP):
        if point.name == word:
            return from_function(word, point.load(), device)
    raise ValueError(
        f"candidate: expected FILE.py:FUNCTION, MODULE:ATTRIBUTE, LIB.so:SYMBOL, sdpa:NAME, attnproof:NAME or "
        f"an entry point of {GROUP}, got {word!r}"
    )


def _file_module(path: str) -> Any:
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"candidate: expected a Python file, {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"attnproof_candidate_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"candidate: expected a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickling inside the file look themselves up
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _attribute(module: Any, name: str, word: str) -> Any:
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"candidate: {word!r} has no attribute {part!r}")
        found = getattr(found, part)
    if not callable(found) and not isinstance(found, Candidate):
        raise ValueError(f"candidate: expected a function at {word!r}, got {type(found).__name__}")
    return found


def from_function(name: str, fn: Any, device: str | None = None) -> Candidate:
    """A candidate from any callable; what it says about itself is on it or on its module."""
    if isinstance(fn, Candidate):
        return fn
    declared = declared_traits(fn)
    given: dict[str, Any] = {
        key: tuple(value) if key == "dtypes" else value for key, value in declared.items()
    }
    traits = Traits(**given)
    if device is None:
        device = _default_device(traits)
    candidate = wrap(name, fn, traits, device=device)
    candidate.source = getattr(getattr(fn, "__code__", None), "co_filename", "")
    return candidate


def declared_traits(fn: Any) -> dict[str, Any]:
    """The `attnproof` dict of a function, else the `ATTNPROOF` dict of its module, with unknown keys refused."""
    declared = getattr(fn, "attnproof", None)
    if declared is None:
        declared = getattr(sys.modules.get(getattr(fn, "__module__", "")), "ATTNPROOF", {})
    known = {field.name for field in fields(Traits)}
    unknown = sorted(set(declared) - known)
    if unknown:
        raise ValueError(
            f"attnproof: expected keys among {', '.join(sorted(known))}, got {', '.join(unknown)}"
        )
    return dict(declared)


def _default_device(traits: Traits) -> str:
    if traits.arrays != "torch":
        return "cpu"
    try:
        import torch
    except ImportError:
        raise Skip("torch is not installed; a function on NumPy arrays says arrays='numpy'") from None
    return "cuda" if torch.cuda.is_available() else "cpu"
