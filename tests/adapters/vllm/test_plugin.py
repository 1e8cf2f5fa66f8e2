"""What the entry point changes, under stand-ins of vLLM's and Dynamo's tables."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvstow.adapters.vllm.plugin import DYNAMO, NAME, register

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Connectors that vLLM knows by name."""
    known: dict[str, Any] = {}

    def register_connector(name: str, module: str, cls: str) -> None:
        known[name] = (module, cls)

    module = ModuleType(FACTORY)
    vars(module)["KVConnectorFactory"] = SimpleNamespace(
        _registry=known, register_connector=register_connector
    )
    for end in range(1, FACTORY.count(".") + 1):
        name = ".".join(FACTORY.split(".")[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, FACTORY, module)
    return known


def test_vllm_knows_the_connector_by_its_name_however_often_it_is_registered(
    registered: dict[str, Any],
):
    for _ in range(2):
        register()
    assert registered == {NAME: ("kvstow.adapters.vllm", NAME)}
    assert DYNAMO not in sys.modules


def test_dynamo_hands_requests_over_as_with_nixls_connector(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    table = {"NixlConnector": object(), "MooncakeConnector": object()}
    monkeypatch.setitem(sys.modules, DYNAMO, SimpleNamespace(KV_CONNECTOR_PROTOCOLS=table))  # pyright: ignore
    register()
    assert table[NAME] is table["NixlConnector"]


def test_a_dynamo_without_such_a_table_is_left_as_it_is(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, DYNAMO, SimpleNamespace())  # pyright: ignore
    register()
