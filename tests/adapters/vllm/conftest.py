"""The connector under stand-ins of vLLM."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from connected_engine import Engine, stand_ins
from kvstow.transfer.transport.local import Fabric, LocalTransport


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`kvstow.adapters.vllm.connector`, over an engine of its own for rows in one process."""
    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("bases", "metrics", "connector"):
        monkeypatch.delitem(sys.modules, f"kvstow.adapters.vllm.{name}", raising=False)
    import kvstow.adapters.vllm.connector as made

    fabric = Fabric()
    monkeypatch.setattr(made, "NixlTransport", lambda listen: LocalTransport(fabric))
    monkeypatch.setattr(made, "check_sleep", lambda *given: None)
    monkeypatch.setattr(
        made, "check_engine", lambda *given: None
    )  # tests/vllm has the real classes
    yield made
    for engine in Engine.running:
        engine.end()
    Engine.running.clear()
    for name in ("bases", "metrics", "connector"):
        del sys.modules[f"kvstow.adapters.vllm.{name}"]
