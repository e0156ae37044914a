"""Runs pytest with Triton's interpreter, without the part of it that costs most: ``python interpreted.py ARGUMENTS``.

The interpreter re-patches ``triton.language`` at every call of a jit function from another, some milliseconds each, though
the kernel's own launch has patched it already. Pieces are small, so that is half of the time.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import pytest
from triton.runtime import interpreter

patched: set[str] = set()


def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
    """InterpretedFunction.__call__, patching once per module of Triton and never for the package's own."""
    module = self.fn.__module__
    if not module.startswith("attnproof") and module not in patched:
        interpreter._patch_lang(self.fn)
        patched.add(module)
    return self.rewrite()(*arguments, **keywords)


if __name__ == "__main__":
    interpreter.InterpretedFunction.__call__ = call
    sys.exit(pytest.main(sys.argv[1:]))
