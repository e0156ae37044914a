"""Griffe extension: docstrings write formulas as reStructuredText, so that `help()` stays readable; the site wants dollars."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

BLOCK = re.compile(r"^\.\. math::\n((?:\n|[ \t]+.*\n?)+)", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]+)`")


class FormulaExtension(griffe.Extension):
    """Rewrites the `math` directive and role in every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every loaded object once its members are known."""
        if obj.docstring is not None:
            text = BLOCK.sub(lambda m: f"$$\n{textwrap.dedent(m[1]).strip()}\n$$\n\n", obj.docstring.value)
            obj.docstring.value = INLINE.sub(r"$\1$", text)
