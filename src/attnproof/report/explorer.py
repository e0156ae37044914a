"""The interactive page: one self-contained file that needs no network and no optional package.

The numbers come from `templates/explorer_account.js`, which mirrors the module `explore` of the ledger; what
is given here are the devices and dtypes to offer.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def page(data: dict[str, Any]) -> str:
    """The whole page as text; `data` holds devices, dtypes and the names of the limits."""
    text = template("explorer.html")
    # "<" inside JSON could end the script element
    parts = {
        "css": template("explorer.css"),
        "data": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        "account": template("explorer_account.js"),
        "page": template("explorer_page.js"),
    }
    for name, part in parts.items():
        text = text.replace("{{" + name + "}}", part.strip())
    return text


def template(name: str) -> str:
    """A file of `templates` as text."""
    return (resources.files("attnproof.report") / "templates" / name).read_text(encoding="utf-8")
