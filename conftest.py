"""Leaves out modules of the library that need an engine which is not installed here.

Everything else must import: a test file or a module that does not is an error, never a skip.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

OPTIONAL = {
    "src/kvstow/adapters/vllm/connector.py": "vllm.config",
    "src/kvstow/vllm.py": "vllm.config",
    "src/kvstow/adapters/router/server.py": "aiohttp",
    "src/kvstow/adapters/lmcache.py": "lmcache",
    "src/kvstow/adapters/sglang/backend.py": "sglang",
    "src/kvstow/offload/remote/clients/mooncake.py": "mooncake",
}
ROOT = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out slow folders of tests")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if not collection_path.is_relative_to(ROOT):
        return None
    missing = OPTIONAL.get(collection_path.relative_to(ROOT).as_posix())
    return True if missing is not None and find_spec(missing) is None else None
