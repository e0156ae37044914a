"""Griffe extension: formulas in docstrings are reStructuredText, for the eye in `help()`; the site wants dollars."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

BLOCK = re.compile(r"^\.\. math::\n((?:\n|[ \t]+.*\n?)+)", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]+)`")
EXAMPLE = re.compile(r"^>>> .*\n(?:.+\n?)*", re.MULTILINE)


class FormulaExtension(griffe.Extension):
    """Rewrites the `math` directive and role, and fences examples, in every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every loaded object once its members are known."""
        if obj.docstring is not None:
            text = BLOCK.sub(lambda m: f"$$\n{textwrap.dedent(m[1]).strip()}\n$$\n\n", obj.docstring.value)
            text = EXAMPLE.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", text)
            obj.docstring.value = INLINE.sub(r"$\1$", text)
