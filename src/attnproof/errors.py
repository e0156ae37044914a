"""Every error that attnproof raises on purpose.

    Exception
     ├── ValueError
     │    └── ShapeError       (also AttentionError)  sizes, ranges, head counts, lengths
     ├── TypeError
     │    └── DtypeError       (also AttentionError)  dtypes, kinds, devices
     └── AttentionError
          ├── ShapeError
          ├── DtypeError
          ├── Unsupported      (also NotImplementedError)  a named backend refuses, with its sentence
          └── BackendMissing   (also ImportError)          a named backend or optional part is not here

A message names the argument, what was expected and what came:
``k: expected head dim 64 to match q, got 80``.
"""

from __future__ import annotations


class AttentionError(Exception):
    """Base of every error that attnproof raises on purpose."""


class ShapeError(AttentionError, ValueError):
    """An argument has the wrong size, range or value."""


class DtypeError(AttentionError, TypeError):
    """An argument has the wrong dtype, kind or device."""


class Unsupported(AttentionError, NotImplementedError):
    """A named backend cannot do what was asked; the message says why and what would work."""

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(f"{backend}: {reason}")
        self.backend = backend
        self.reason = reason

    def __reduce__(self) -> tuple[type[Unsupported], tuple[str, str]]:
        # two arguments, where the default would replay the one joined message
        return type(self), (self.backend, self.reason)


class BackendMissing(AttentionError, ImportError):
    """A named backend, or an optional package it needs, is not installed."""


def expected(name: str, wanted: object, got: object) -> str:
    """The one form of message: ``name: expected wanted, got got``."""
    return f"{name}: expected {wanted}, got {got}"
