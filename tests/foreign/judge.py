"""A pytest plugin: other projects' tests, with kvstow in the place of what they test.

The suite is `KVSTOW_FOREIGN`; suites.toml says which tests do not apply to it, and why.
"""

import os
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

SUITE = os.environ.get("KVSTOW_FOREIGN", "")


def reasons() -> dict[str, str]:
    """Why tests do not apply, by a part of their names."""
    suites = tomllib.loads(Path(__file__).with_name("suites.toml").read_text(encoding="utf-8"))
    return suites[SUITE]["not_applicable"]


def replace_lmcache() -> None:
    """LMCache's mock of a second tier is our adapter."""
    from lmcache.v1.distributed.l2_adapters import mock_l2_adapter

    from kvstow.adapters.lmcache import KvstowL2Adapter

    class Adapter(KvstowL2Adapter):
        """Made from the mock's settings."""

        def __init__(self, config: Any) -> None:
            self._directory = TemporaryDirectory(prefix="kvstow-foreign-")
            capacity = int(config.max_size_gb * 2**30)
            params = {"capacity": capacity, "unverified": "a test", "kv_dtype": "bytes"}
            super().__init__({"path": self._directory.name, **params})

        def close(self) -> None:
            super().close()
            self._directory.cleanup()

    mock_l2_adapter.MockL2Adapter = Adapter


def pytest_configure() -> None:
    if SUITE == "vllm":
        from vllm_suite import replace_vllm

        replace_vllm()
    else:
        replace_lmcache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what does not apply. A reason without a test is out of date."""
    stale = set(reasons())
    for item in items:
        for name, reason in reasons().items():
            if name in item.nodeid:
                stale.discard(name)
                item.add_marker(pytest.mark.skip(reason=reason))
    if stale:
        raise pytest.UsageError(f"suites.toml: no test of {SUITE} is called {sorted(stale)}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Passed, failed, not applicable, each of these with its reason."""
    stats = terminalreporter.stats
    failed = len(stats.get("failed", ())) + len(stats.get("error", ()))
    skipped = stats.get("skipped", ())
    terminalreporter.write_sep("=", f"{SUITE} against kvstow")
    for each in skipped:
        reason = each.longrepr[2].removeprefix("Skipped: ")
        terminalreporter.write_line(f"{each.nodeid.split('::', 1)[-1]}: {reason}")
    passed = len(stats.get("passed", ()))
    terminalreporter.write_line(f"{passed} passed, {failed} failed, {len(skipped)} not applicable")
