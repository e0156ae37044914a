"""MkDocs hooks: formulas become MathML when the site is built, so that a page needs no script and no network."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, /, **_: Any) -> str:
    """Replace what pymdownx.arithmatex marked."""

    def mathml(match: re.Match[str]) -> str:
        tag, bracket, formula = match.groups()
        block = bracket == "["
        return f"<{tag}>{convert(html.unescape(formula), display='block' if block else 'inline')}</{tag}>"

    return FORMULA.sub(mathml, content)
