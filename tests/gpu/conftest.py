"""Everything here needs a CUDA device, but for the test that says so."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/gpu/" in str(item.path) and item.path.name != "test_sentinel.py":
            item.add_marker(pytest.mark.gpu)
