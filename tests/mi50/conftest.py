"""What this folder needs: clang for gfx906 and llvm-objdump; without them its tests are skipped, by name."""

from __future__ import annotations

import shutil

import pytest

from attnproof.backends.dot2 import prebuilt
from attnproof.gcn.codeobject import find_objdump


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/mi50" in str(item.path)]
    missing = None
    if shutil.which(prebuilt.CLANG) is None:
        missing = f"{prebuilt.CLANG} is not on PATH"
    elif find_objdump() is None:
        missing = "llvm-objdump is not on PATH"
    for item in here:
        if missing is not None:
            item.add_marker(pytest.mark.skip(reason=missing))
