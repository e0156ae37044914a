"""Device tests: skipped, by name, where torch sees no GPU."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs a device."""
    here = [item for item in items if "tests/gpu" in str(item.path)]
    torch = pytest.importorskip("torch") if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if torch is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
