"""Leaves out modules of the library that need an engine which is not installed here.

Everything else must import: a test file or a module that does not is an error, never a skip.
`--quick` looks only at modules that have examples.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

OPTIONAL = {
    "src/kvstow/adapters/vllm/bases.py": "vllm.config",
    "src/kvstow/adapters/vllm/connector.py": "vllm.config",
    "src/kvstow/adapters/vllm/metrics.py": "vllm.config",
    "src/kvstow/adapters/vllm/secondary.py": "vllm.config",
    "src/kvstow/vllm.py": "vllm.config",
    "src/kvstow/adapters/router.py": "aiohttp",
    "src/kvstow/adapters/lmcache.py": "lmcache",
    "src/kvstow/adapters/sglang/backend.py": "sglang",
    "src/kvstow/offload/remote/mooncake.py": "mooncake",
}
ROOT = Path(__file__).parent

# Or every process that a test starts compiles the library anew, and pytest all its tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out slow folders of tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.is_relative_to(ROOT):
        return None
    missing = OPTIONAL.get(collection_path.relative_to(ROOT).as_posix())
    if missing is not None and find_spec(missing) is None:
        return True
    return True if config.getoption("--quick") and _has_no_examples(collection_path) else None


def _has_no_examples(path: Path) -> bool:
    """Whether this is a module of the library whose docstrings have nothing to run."""
    in_library = path.suffix == ".py" and path.is_relative_to(ROOT / "src")
    return in_library and ">>>" not in path.read_text(encoding="utf-8")
